//! `softmax(scale q kᵀ + mask) v` for each head, by tiles: as many queries as a tile has columns, and blocks of keys whose
//! maximum and sum are carried along (Milakov and Gimelshein 2018; Dao et al. 2022). Queries lie side by side in
//! registers, so a query's result depends on nothing that is computed with it.

use std::ops::Range;

use super::inner::WIDE;
use super::pack::{ROOM, pack};
use super::scratch::{share, with};
use super::vector::{Vector, Words};
use super::{Base, DEPTH, Isa, MAX_COLUMNS, Tile};
use crate::dtype::DType;
use crate::ffi::{HostOp, Operand};

/// Keys of a block: whole tiles of rows on every instruction set, whose scores stay near.
const KEYS: usize = 168;

/// Elements of queries and results that a thread works on while it goes through the keys once, about.
const GROUP: usize = 1 << 18;

/// Sizes of `q [b, tq, h, d]`, `k [b, tk, h, d]`, `v [b, tk, h, e]` and the mask; the result is `[b, tq, h, e]`.
#[derive(Debug)]
pub(crate) struct Attention {
    pub(crate) isa: &'static Isa,
    pub(crate) batch: usize,
    pub(crate) heads: usize,
    pub(crate) queries: usize,
    pub(crate) keys: usize,
    /// `d`.
    pub(crate) width: usize,
    /// `e`.
    pub(crate) value_width: usize,
    pub(crate) scale: f32,
    /// Keys after a query's own position do not count.
    pub(crate) causal: bool,
    /// Sizes of what is added to the scores `[b, h, tq, tk]`: each as there or 1.
    pub(crate) mask: Option<[usize; 4]>,
}

impl HostOp for Attention {
    fn operands(&self) -> Vec<Operand> {
        let rows = |t: usize| self.batch * t * self.heads;
        let mut all = vec![
            (DType::F32, [rows(self.queries), self.width]),
            (DType::F32, [rows(self.keys), self.width]),
            (DType::F32, [rows(self.keys), self.value_width]),
        ];
        if let Some([b, h, tq, tk]) = self.mask {
            all.push((DType::F32, [b * h * tq, tk]));
        }
        all
    }

    fn elements(&self) -> usize {
        self.batch * self.queries * self.heads * self.value_width
    }

    fn work(&self) -> usize {
        2 * self.batch * self.heads * self.queries * self.keys * (self.width + self.value_width)
    }

    fn operations(&self) -> usize {
        self.work()
    }

    unsafe fn compute(&self, out: *mut f32, operands: &[*const u8], part: usize, parts: usize) {
        let &[q, k, v, ref mask @ ..] = operands else { return };
        let [q, k, v] = [q, k, v].map(|p| p.cast());
        let tensors = Tensors { q, k, v, mask: mask.first().map(|m| m.cast()), out };
        let each = self.queries.div_ceil(self.isa.columns);
        let mine = share(self.batch * self.heads * each, part, parts);
        let mut at = mine.start;
        while at < mine.end {
            let head = at / each;
            let end = mine.end.min((head + 1) * each);
            // SAFETY: the operands are as long as `operands` says and the result as `elements`.
            unsafe { self.head(&tensors, head, at - head * each..end - head * each) }
            at = end;
        }
    }
}

struct Tensors {
    q: *const f32,
    k: *const f32,
    v: *const f32,
    mask: Option<*const f32>,
    out: *mut f32,
}

impl Attention {
    /// Computes `tiles` of the queries of head `head`, counted through the batch.
    ///
    /// # Safety
    /// As for [`HostOp::compute`]; the tiles exist.
    unsafe fn head(&self, t: &Tensors, head: usize, tiles: Range<usize>) {
        let (isa, d, e) = (self.isa, self.width, self.value_width);
        let columns = isa.columns;
        let group = (GROUP / ((d + e) * columns)).clamp(1, tiles.len());
        // Words of a query, and of a key.
        let dw = isa.words(d);
        let sizes = [
            group * dw * columns,
            group * e * columns,
            2 * group * columns,
            KEYS * dw,
            isa.words(KEYS) * e,
            KEYS * columns,
            KEYS * columns,
            ROOM,
        ];
        let (b, h) = (head / self.heads, head % self.heads);
        // The first element of position `i` of this head, in a tensor of `n` positions of `w` elements.
        let row = |n: usize, i: usize, w: usize| ((b * n + i) * self.heads + h) * w;
        with(sizes, |[q, out, state, k, v, scores, mask, room]| {
            for first in tiles.clone().step_by(group) {
                let some = first..(first + group).min(tiles.end);
                // Queries of a tile, and where what belongs to it lies.
                let queries = |tile: usize| tile * columns..((tile + 1) * columns).min(self.queries);
                let place = |tile: usize, base: *mut f32, size: usize| base.wrapping_add((tile - first) * size);
                for tile in some.clone() {
                    let from = queries(tile).map(|i| t.q.wrapping_add(row(self.queries, i, d)));
                    // SAFETY: the queries exist, and the panel has a place for each.
                    unsafe {
                        let from = panel(isa, from);
                        pack(isa, &from[..columns], d, columns, place(tile, q, dw * columns), room);
                    }
                    let state = place(tile, state, 2 * columns);
                    for i in 0..columns {
                        // SAFETY: a tile's state is two rows.
                        unsafe {
                            *state.wrapping_add(i) = f32::NEG_INFINITY;
                            *state.wrapping_add(columns + i) = 0.0;
                        }
                    }
                }
                for first_key in (0..self.keys).step_by(KEYS) {
                    let count = KEYS.min(self.keys - first_key);
                    if self.causal && first_key >= queries(some.end - 1).end {
                        break;
                    }
                    let keys = t.k.wrapping_add(row(self.keys, first_key, d));
                    let values = t.v.wrapping_add(row(self.keys, first_key, e));
                    // SAFETY: the keys exist.
                    unsafe {
                        for i in (0..count).step_by(isa.rows) {
                            let mut from = [keys; MAX_COLUMNS];
                            let n = isa.rows.min(count - i);
                            for (j, p) in from.iter_mut().enumerate().take(n) {
                                *p = keys.wrapping_add((i + j) * self.heads * d);
                            }
                            pack(isa, &from[..n], d, n, k.wrapping_add(i * dw), room);
                        }
                        (isa.strips)(values, self.heads * e, [count, e, isa.height(e)], v);
                    }
                    for tile in some.clone() {
                        let queries = queries(tile);
                        if self.causal && first_key >= queries.end {
                            continue;
                        }
                        let seen = if self.causal { count.min(queries.end - first_key) } else { count };
                        let place = |base: *mut f32, size: usize| place(tile, base, size);
                        let (q, out) = (place(q, dw * columns), place(out, e * columns));
                        let mut s = Scores {
                            keys: seen,
                            s: scores,
                            scale: self.scale * std::f32::consts::LOG2_E,
                            mask: None,
                            diagonal: None,
                            state: place(state, 2 * columns),
                            out,
                            width: if first_key == 0 { 0 } else { e },
                        };
                        if let (Some(from), Some([mb, mh, mq, mk])) = (t.mask, self.mask) {
                            let at = |i: usize| {
                                let first = if mk == 1 { 0 } else { first_key };
                                (((b % mb) * mh + h % mh) * mq + i % mq) * mk + first
                            };
                            let from = queries.clone().map(|i| from.wrapping_add(at(i)));
                            let len = if mk == 1 { 1 } else { seen };
                            // SAFETY: the rows exist, and the panel has a place for each.
                            unsafe { (isa.transpose)(&panel(isa, from)[..isa.columns], len, mask, isa.columns) };
                            s.mask = Some((mask, if mk == 1 { 0 } else { columns }));
                        }
                        if self.causal && first_key + seen > queries.start + 1 {
                            s.diagonal = Some(queries.start as isize - first_key as isize);
                        }
                        // SAFETY: panels of both factors are packed, and the scores and results have room.
                        unsafe {
                            let rows = seen.next_multiple_of(isa.rows).min(count);
                            let k = Strips { a: k, rows, height: isa.rows, stored: dw, depth: dw };
                            product(isa, &k, q, scores, false);
                            (isa.soften)(&s);
                            let (stored, depth) = (isa.words(count), isa.words(seen));
                            let v = Strips { a: v, rows: e, height: isa.height(e), stored, depth };
                            product(isa, &v, scores, out, first_key > 0);
                        }
                    }
                }
                for tile in some {
                    let out = place(tile, out, e * columns);
                    let queries = queries(tile);
                    let to = t.out.wrapping_add(row(self.queries, queries.start, e));
                    // SAFETY: the tile is computed, and its queries exist.
                    unsafe {
                        (isa.divide)(out, e, place(tile, state, 2 * columns).wrapping_add(columns));
                        for i in (0..e).step_by(columns) {
                            let mut from = [out.cast_const(); MAX_COLUMNS];
                            let n = columns.min(e - i);
                            for (j, p) in from.iter_mut().enumerate().take(n) {
                                *p = out.wrapping_add((i + j) * columns);
                            }
                            (isa.transpose)(&from[..n], queries.len(), to.wrapping_add(i), self.heads * e);
                        }
                    }
                }
            }
        });
    }
}

/// Rows, at most as many as a tile has columns, as many of them: the first also stands for those missing.
fn panel(isa: &Isa, rows: impl Iterator<Item = *const f32>) -> [*const f32; MAX_COLUMNS] {
    let mut from = [std::ptr::null(); MAX_COLUMNS];
    let mut count = 0;
    for (p, row) in from.iter_mut().zip(rows) {
        *p = row;
        count += 1;
    }
    let first = from[0];
    from[count..isa.columns].fill(first);
    from
}

/// The left factor of a product, cut into strips of at most `height` rows, each `[stored][rows of the strip]` of words.
struct Strips {
    a: *const f32,
    rows: usize,
    height: usize,
    /// Words of terms that strips have.
    stored: usize,
    /// Words that count.
    depth: usize,
}

/// `c [rows][columns] = a b`, or added to what is there, for a panel `b [depth][columns]`.
///
/// # Safety
/// The machine has `isa`, and the pointers are valid for that.
unsafe fn product(isa: &Isa, a: &Strips, b: *const f32, c: *mut f32, add: bool) {
    for row in (0..a.rows).step_by(a.height) {
        let rows = a.height.min(a.rows - row);
        for from in (0..a.depth).step_by(DEPTH) {
            let tile = Tile {
                depth: DEPTH.min(a.depth - from),
                a: a.a.wrapping_add(row * a.stored + from * rows),
                b: b.wrapping_add(from * isa.columns),
                c: c.wrapping_add(row * isa.columns),
                stride: isa.columns,
                columns: isa.columns,
                base: if add || from > 0 { Base::Sum } else { Base::Zero },
            };
            // SAFETY: as the caller promises.
            unsafe { (isa.tile)(rows, &tile) };
        }
    }
}

/// Scores of a tile of queries, `s [keys][columns]`, about to become weights, as words.
pub(super) struct Scores {
    keys: usize,
    s: *mut f32,
    /// Factor of the scores, for powers of two.
    scale: f32,
    /// What is added after that, before it is made one of powers of two, and elements from one key to the next.
    mask: Option<(*const f32, usize)>,
    /// The first query's position less the first key's: keys after a query are masked.
    diagonal: Option<isize>,
    /// Maximum and sum so far, `[2][columns]`.
    state: *mut f32,
    /// Weighted values so far, `[width][columns]`, which shrink as maxima grow.
    out: *mut f32,
    width: usize,
}

/// Keys whose maxima are found side by side.
const CHAINS: usize = 4;

/// # Safety
/// The machine has the instruction set of `W`, and `t` describes valid memory.
#[inline(always)]
pub(super) unsafe fn soften<W: Words>(t: &Scores) {
    let at = |p: *mut f32, row: usize, v: usize| p.wrapping_add((row * WIDE + v) * W::V::LANES);
    // SAFETY: as the caller promises.
    unsafe {
        let least = W::V::splat(f32::NEG_INFINITY);
        let mut tops = [[least; WIDE]; CHAINS];
        let plain = t.mask.is_none() && t.diagonal.is_none() && t.scale > 0.0;
        let scale = if plain {
            for j in 0..t.keys {
                for (v, top) in tops[j % CHAINS].iter_mut().enumerate() {
                    *top = top.max(W::V::load(at(t.s, j, v)));
                }
            }
            t.scale
        } else {
            for j in 0..t.keys {
                for (v, top) in tops[0].iter_mut().enumerate() {
                    let mut x = W::V::load(at(t.s, j, v)).mul(W::V::splat(t.scale));
                    if let Some((mask, step)) = t.mask {
                        let m = W::V::load(mask.wrapping_add(j * step + v * W::V::LANES));
                        x = m.mul_add(W::V::splat(std::f32::consts::LOG2_E), x);
                    }
                    if let Some(diagonal) = t.diagonal {
                        let before = j as isize - diagonal - (v * W::V::LANES) as isize;
                        x = x.replaced(least, W::V::first(before.max(0) as usize));
                    }
                    x.store(at(t.s, j, v));
                    *top = top.max(x);
                }
            }
            1.0
        };
        for v in 0..WIDE {
            let (max, sum) = (at(t.state, 0, v), at(t.state, 1, v));
            let mut top = tops[0][v];
            for other in &tops[1..] {
                top = top.max(other[v]);
            }
            let before = W::V::load(max);
            let top = before.max(top.mul(W::V::splat(scale)));
            top.store(max);
            // Where every score so far is minus infinity, weights are 0 rather than no numbers.
            let top = W::V::splat(f32::MIN).max(top);
            let shrink = W::exp2(before.sub(top));
            let below = W::V::splat(0.0).sub(top);
            let mut total = W::V::splat(0.0);
            let weight = |j: usize| W::exp2(W::V::load(at(t.s, j, v)).mul_add(W::V::splat(scale), below));
            for j in (0..t.keys).step_by(W::GRAIN) {
                let first = weight(j);
                let mut second = W::V::splat(0.0);
                total = total.add(first);
                if W::GRAIN > 1 && j + 1 < t.keys {
                    second = weight(j + 1);
                    total = total.add(second);
                }
                W::pair(first, second).store(at(t.s, j / W::GRAIN, v));
            }
            W::V::load(sum).mul_add(shrink, total).store(sum);
            for j in 0..t.width {
                let o = at(t.out, j, v);
                W::V::load(o).mul(shrink).store(o);
            }
        }
    }
}

/// Rows `[rows][columns]` over `by [columns]`.
///
/// # Safety
/// The machine has the instruction set of `V`, and the pointers are valid for that.
#[inline(always)]
pub(super) unsafe fn divide<V: Vector>(out: *mut f32, rows: usize, by: *const f32) {
    // SAFETY: as the caller promises.
    unsafe {
        let by: [V; WIDE] = std::array::from_fn(|v| V::load(by.wrapping_add(v * V::LANES)));
        for row in 0..rows {
            for (v, &by) in by.iter().enumerate() {
                let o = out.wrapping_add((row * WIDE + v) * V::LANES);
                V::load(o).div(by).store(o);
            }
        }
    }
}

/// Rows of `width` elements, `step` apart, cut into strips of `height` columns: `[words of rows][height]` one after
/// another.
///
/// # Safety
/// The machine has the instruction set of `W`, a register is at least `height` wide, and the pointers are valid for
/// that.
#[inline(always)]
pub(super) unsafe fn strips<W: Words>(
    from: *const f32,
    step: usize,
    [rows, width, height]: [usize; 3],
    to: *mut f32,
) {
    for first in (0..width).step_by(height) {
        let n = height.min(width - first);
        let to = to.wrapping_add(first * rows.div_ceil(W::GRAIN));
        // SAFETY: masked lanes are elements of the strip.
        unsafe {
            let mask = W::V::first(n);
            let load = |row: usize| W::V::load_some(from.wrapping_add(row * step + first), mask);
            for row in (0..rows).step_by(W::GRAIN) {
                let second = if W::GRAIN > 1 && row + 1 < rows { load(row + 1) } else { W::V::splat(0.0) };
                W::pair(load(row), second).store_some(to.wrapping_add(row / W::GRAIN * n), mask);
            }
        }
    }
}
