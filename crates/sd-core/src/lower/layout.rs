//! Row-major shapes in ggml's order, and moves of axes that ggml's four do not express directly.

use crate::error::{Error, Result};
use crate::ffi::{Binary, Context, Id};
use crate::shape::Shape;

/// A shape in ggml's order. Of five axes, the two outermost are one.
pub(crate) fn ne(shape: &Shape) -> [usize; 4] {
    flip(shape.dims())
}

/// As [`ne`], for any number of row-major axes: those beyond four are folded into the outermost.
pub(super) fn flip(dims: &[usize]) -> [usize; 4] {
    let mut out = [1; 4];
    for (i, &d) in dims.iter().rev().enumerate() {
        out[i.min(3)] *= d;
    }
    out
}

/// The elements before, on and after an axis.
pub(super) fn around(dims: &[usize], axis: usize) -> [usize; 3] {
    let before = dims.iter().take(axis).product();
    let after = dims.iter().skip(axis + 1).product();
    [before, dims.get(axis).copied().unwrap_or(1), after]
}

/// `x`, row-major `from`, repeated along its axes of size 1 to row-major `to` of the same rank.
pub(super) fn expand(ctx: &mut Context, x: Id, from: &[usize], to: &[usize]) -> Result<Id> {
    let mut now = from.to_vec();
    let mut x = x;
    for axis in (0..to.len()).rev() {
        if now[axis] == to[axis] {
            continue;
        }
        let [before, _, after] = around(&now, axis);
        x = ctx.reshape(x, [after, 1, before, 1])?;
        x = ctx.repeat(x, [after, to[axis], before, 1])?;
        now[axis] = to[axis];
    }
    ctx.reshape(x, flip(to))
}

/// Neighbouring axes with the same pattern of repetition, as one: `(size in a, size in b)` per axis.
fn merged(a: &[usize], b: &[usize]) -> Vec<(usize, usize)> {
    let mut out: Vec<(usize, usize)> = Vec::new();
    for (&x, &y) in a.iter().zip(b) {
        if x == 1 && y == 1 {
            continue;
        }
        match out.last_mut() {
            Some(l) if (l.0 == l.1) == (x == y) && (l.0 == 1) == (x == 1) && (l.1 == 1) == (y == 1) => {
                l.0 *= x;
                l.1 *= y;
            }
            _ => out.push((x, y)),
        }
    }
    if out.is_empty() {
        out.push((1, 1));
    }
    out
}

fn aligned(dims: &[usize], rank: usize) -> Vec<usize> {
    let mut out = vec![1; rank.saturating_sub(dims.len())];
    out.extend_from_slice(dims);
    out
}

/// `f(a, b)` broadcast as in NumPy, row-major shapes given; the result has the broadcast shape.
pub(super) fn binary(ctx: &mut Context, f: Binary, a: Id, a_dims: &[usize], b: Id, b_dims: &[usize]) -> Result<Id> {
    let rank = a_dims.len().max(b_dims.len());
    let (da, db) = (aligned(a_dims, rank), aligned(b_dims, rank));
    let out: Vec<usize> = da.iter().zip(&db).map(|(&x, &y)| x.max(y)).collect();
    if da.iter().zip(&db).any(|(&x, &y)| x != y && x != 1 && y != 1) {
        return Err(Error::internal(format!("{a_dims:?} and {b_dims:?} do not broadcast")));
    }
    let (mut a, mut b, mut da, mut db) = (a, b, da, db);
    if da != out && db == out && matches!(f, Binary::Add | Binary::Mul) {
        (a, b, da, db) = (b, a, db, da);
    }
    if da != out {
        a = expand(ctx, a, &da, &out)?;
        da.clone_from(&out);
    }
    let mut axes = merged(&da, &db);
    if axes.len() > 4 {
        b = expand(ctx, b, &db, &out)?;
        axes = vec![(out.iter().product(), out.iter().product())];
    }
    let (sizes_a, sizes_b): (Vec<usize>, Vec<usize>) = axes.into_iter().unzip();
    let a = ctx.reshape(a, flip(&sizes_a))?;
    let b = ctx.reshape(b, flip(&sizes_b))?;
    let y = ctx.binary(f, a, b)?;
    ctx.reshape(y, flip(&out))
}

/// `x`, row-major `dims`, with axis `i` of the result being axis `axes[i]` of `x`; copied.
pub(super) fn permute(ctx: &mut Context, x: Id, dims: &[usize], axes: &[usize]) -> Result<Id> {
    let result: Vec<usize> = axes.iter().map(|&a| dims[a]).collect();
    // Axes of size 1 do not matter, and axes that stay neighbours move as one.
    let mut groups: Vec<(usize, usize, usize)> = Vec::new(); // (first axis of x, last axis, size), in result order
    for &a in axes.iter().filter(|&&a| dims[a] != 1) {
        match groups.last_mut() {
            Some(g) if (g.1 + 1..a).all(|skipped| dims[skipped] == 1) && g.1 < a => {
                g.1 = a;
                g.2 *= dims[a];
            }
            _ => groups.push((a, a, dims[a])),
        }
    }
    let mut source: Vec<usize> = (0..groups.len()).collect();
    source.sort_by_key(|&g| groups[g].0);
    let sizes: Vec<usize> = source.iter().map(|&g| groups[g].2).collect();
    let order: Vec<usize> = (0..groups.len()).map(|g| source.iter().position(|&s| s == g).unwrap_or(g)).collect();
    let moved = if order.is_sorted() { x } else { shuffle(ctx, x, &sizes, &order)? };
    ctx.reshape(moved, flip(&result))
}

/// [`permute`] of axes none of which is 1.
fn shuffle(ctx: &mut Context, x: Id, sizes: &[usize], order: &[usize]) -> Result<Id> {
    let rank = sizes.len();
    if rank <= 4 {
        let x = ctx.reshape(x, flip(sizes))?;
        // ggml counts from the inside, and says where each axis goes rather than where it comes from.
        let mut to = [0, 1, 2, 3];
        for (i, &a) in order.iter().enumerate() {
            to[rank - 1 - a] = rank - 1 - i;
        }
        let y = ctx.permute(x, to)?;
        return ctx.cont(y);
    }
    // One axis after the other is pulled to the front of those not yet placed: a swap of two runs of axes.
    let mut now: Vec<usize> = (0..rank).collect();
    let mut x = x;
    for (i, &wanted) in order.iter().enumerate() {
        let Some(j) = now.iter().position(|&a| a == wanted).filter(|&j| j != i) else { continue };
        let size = |r: std::ops::Range<usize>| now[r].iter().map(|&a| sizes[a]).product::<usize>();
        let (pre, skipped, axis, post) = (size(0..i), size(i..j), size(j..j + 1), size(j + 1..rank));
        x = ctx.reshape(x, [post, axis, skipped, pre])?;
        x = ctx.permute(x, [0, 2, 1, 3])?;
        x = ctx.cont(x)?;
        let a = now.remove(j);
        now.insert(i, a);
    }
    Ok(x)
}

/// `parts` joined along ggml's axis `dim`. Parts may be views whose rows are contiguous.
pub(super) fn join(ctx: &mut Context, mut parts: Vec<Id>, dim: usize) -> Result<Id> {
    let dense = |ctx: &mut Context, p: Id| if ctx.is_contiguous(p)? { Ok(p) } else { ctx.cont(p) };
    let [first, ..] = parts[..] else { return Err(Error::internal("nothing to join")) };
    if parts.len() == 1 {
        return dense(ctx, first);
    }
    let mut sizes = ctx.ne(first)?;
    sizes[dim] = 0;
    for &p in &parts {
        sizes[dim] += ctx.ne(p)?[dim];
    }
    let bytes = sizes.iter().product::<usize>().saturating_mul(4);
    // Writing into place needs one copy; ggml takes offsets below 2^30.
    if parts.len() > 2 && bytes <= 1 << 30 {
        let mut whole = ctx.leaf(crate::DType::F32, sizes)?;
        let stride = ctx.nb(whole)?[dim];
        let mut at = 0;
        for p in parts {
            whole = ctx.set(whole, p, at * stride)?;
            at += ctx.ne(p)?[dim];
        }
        return Ok(whole);
    }
    while parts.len() > 1 {
        let mut next = Vec::with_capacity(parts.len().div_ceil(2));
        for pair in parts.chunks(2) {
            let a = dense(ctx, pair[0])?;
            next.push(match pair.get(1) {
                Some(&b) => {
                    let b = dense(ctx, b)?;
                    ctx.concat(a, b, dim)?
                }
                None => a,
            });
        }
        parts = next;
    }
    Ok(parts[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_axes_merge() {
        assert_eq!(merged(&[2, 3, 4], &[2, 3, 4]), [(24, 24)]);
        assert_eq!(merged(&[2, 3, 4, 5], &[2, 3, 1, 1]), [(6, 6), (20, 1)]);
        assert_eq!(merged(&[2, 1, 4], &[1, 1, 4]), [(2, 1), (4, 4)]);
        assert_eq!(merged(&[1, 1], &[1, 1]), [(1, 1)]);
        assert_eq!(merged(&[2, 3, 2, 3, 2], &[2, 1, 2, 1, 2]).len(), 5);
    }

    #[test]
    fn five_axes_fold_into_four() {
        assert_eq!(flip(&[2, 3, 4, 5, 6]), [6, 5, 4, 6]);
        assert_eq!(flip(&[7]), [7, 1, 1, 1]);
        assert_eq!(flip(&[]), [1, 1, 1, 1]);
        assert_eq!(around(&[2, 3, 4], 1), [2, 3, 4]);
    }
}
