//! Pictures that are computed piece by piece: neighbouring pieces share a strip, in which one fades into the other.

use sd_core::{Error, Result, Tensor};

/// The part of a shared strip at each of its ends that the other piece has alone: near its edge a piece has seen zeros
/// where the picture goes on.
const UNSEEN: f64 = 0.25;

/// An axis, and the pieces of it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Pieces {
    total: usize,
    /// Positions of each piece.
    len: usize,
    /// Where each begins.
    starts: Vec<usize>,
    /// The last piece goes on where the first begins.
    circular: bool,
}

impl Pieces {
    /// As few pieces of `len` positions as cover `total` and share at least `shared` positions with each neighbour. All
    /// begin at multiples of `step`, as `total` and `len` are. Where `circular`, several pieces wrap around; one does
    /// not.
    pub(crate) fn new(total: usize, len: usize, shared: usize, step: usize, circular: bool) -> Pieces {
        if len >= total {
            return Pieces { total, len: total, starts: vec![0], circular: false };
        }
        let (step, shared) = (step.max(1), shared.min(len / 2));
        let apart = (len - shared).max(1);
        let (count, room) =
            if circular { (total.div_ceil(apart), total) } else { ((total - shared).div_ceil(apart), total - len) };
        let gaps = if circular { count } else { count.saturating_sub(1) };
        let start = |i: usize| (i * room / gaps.max(1)) / step * step;
        let mut starts: Vec<usize> = (0..count).map(start).collect();
        if let (Some(last), false) = (starts.last_mut(), circular) {
            *last = room;
        }
        Pieces { total, len, starts, circular }
    }

    /// How many pieces there are.
    pub(crate) fn count(&self) -> usize {
        self.starts.len()
    }

    /// Positions of a piece.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// What each value of each piece counts, where a position has `scale` values. They add up to 1 at every position of
    /// the axis.
    fn weights(&self, scale: Scale) -> Vec<Vec<f32>> {
        let (total, len) = (scale.of(self.total), scale.of(self.len));
        let n = self.starts.len();
        let shared = |i: usize, j: usize| {
            let (Some(a), Some(b)) = (self.starts.get(i), self.starts.get(j)) else { return 0 };
            let next = if j <= i { b + self.total } else { *b };
            scale.of((a + self.len).saturating_sub(next))
        };
        let edge = |i: usize, next: bool| match (next, self.circular) {
            (true, false) if i + 1 == n => 0,
            (false, false) if i == 0 => 0,
            (true, _) => shared(i, (i + 1) % n),
            (false, _) => shared((i + n - 1) % n, i),
        };
        let ramp = |at: usize, strip: usize| {
            if strip == 0 {
                return 1.0;
            }
            fade(((at as f64 + 0.5) / strip as f64 - UNSEEN) / (1.0 - 2.0 * UNSEEN))
        };
        let piece = |i: usize| {
            let (before, after) = (edge(i, false), edge(i, true));
            (0..len).map(|at| ramp(at, before).min(ramp(len - 1 - at, after))).collect::<Vec<f64>>()
        };
        let raw: Vec<Vec<f64>> = (0..n).map(piece).collect();
        let mut sums = vec![0.0; total];
        let place = |start: usize, at: usize| (scale.of(start) + at) % total.max(1);
        for (start, weights) in self.starts.iter().zip(&raw) {
            for (at, w) in weights.iter().enumerate() {
                if let Some(sum) = sums.get_mut(place(*start, at)) {
                    *sum += w;
                }
            }
        }
        let share = |start: usize, at: usize, w: f64| {
            let sum = sums.get(place(start, at)).copied().unwrap_or(0.0);
            if sum > 0.0 { (w / sum) as f32 } else { 1.0 / n as f32 }
        };
        let one = |(start, weights): (&usize, &Vec<f64>)| {
            weights.iter().enumerate().map(|(at, w)| share(*start, at, *w)).collect()
        };
        self.starts.iter().zip(&raw).map(one).collect()
    }
}

/// From 0 to 1 with two derivatives that vanish at both ends (Perlin 2002).
fn fade(t: f64) -> f64 {
    let t = t.clamp(0.0, 1.0);
    t * t * t * (t * (6.0 * t - 15.0) + 10.0)
}

/// Values that a result has for `per` positions of the input, along each axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Scale {
    pub(crate) values: usize,
    pub(crate) per: usize,
}

impl Scale {
    fn of(self, positions: usize) -> usize {
        positions * self.values / self.per.max(1)
    }
}

/// The result `[1, k, h', w']` of `compute` on `x [1, c, h, w]`, piece by piece, row by row. `compute` gets each piece
/// with its number.
pub(crate) fn pieced(
    x: &Tensor,
    [rows, columns]: [&Pieces; 2],
    scale: Scale,
    compute: &mut dyn FnMut(usize, &Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    let (down, across) = (rows.weights(scale), columns.weights(scale));
    let (height, width) = (scale.of(rows.total), scale.of(columns.total));
    let mut out = Vec::new();
    let mut channels = 0;
    let mut number = 0;
    for (top, down) in rows.starts.iter().zip(&down) {
        for (left, across) in columns.starts.iter().zip(&across) {
            let piece = compute(number, &cut(x, [*top, *left], [rows.len, columns.len])?)?;
            let [_, k, h, w] = dims(&piece)?;
            if [h, w] != [down.len(), across.len()] {
                return Err(Error::internal(format!("a piece became {}", piece.shape())));
            }
            if out.is_empty() {
                (channels, out) = (k, vec![0.0; k * height * width]);
            }
            for (plane, to) in piece.values().chunks_exact(h * w).zip(out.chunks_exact_mut(height * width)) {
                for (y, (row, wy)) in plane.chunks_exact(w).zip(down).enumerate() {
                    let at = (scale.of(*top) + y) % height * width;
                    let Some(to) = to.get_mut(at..at + width) else { continue };
                    add(to, scale.of(*left), row, across, *wy);
                }
            }
            number += 1;
        }
    }
    Tensor::f32(&[1, channels, height, width], out)
}

/// Adds a row from `left` on, around the end.
fn add(to: &mut [f32], left: usize, row: &[f32], weights: &[f32], factor: f32) {
    let width = to.len().max(1);
    for (x, (value, weight)) in row.iter().zip(weights).enumerate() {
        if let Some(sum) = to.get_mut((left + x) % width) {
            *sum += value * weight * factor;
        }
    }
}

/// A part of `x [1, c, h, w]`, which goes on around its ends.
pub(crate) fn cut(x: &Tensor, [top, left]: [usize; 2], [rows, columns]: [usize; 2]) -> Result<Tensor> {
    let [_, c, h, w] = dims(x)?;
    if [rows, columns] == [h, w] && [top, left] == [0, 0] {
        return Ok(x.clone());
    }
    let mut out = Vec::with_capacity(c * rows * columns);
    for plane in x.values().chunks_exact(h * w) {
        for y in 0..rows {
            let row = plane.get((top + y) % h * w..).unwrap_or_default();
            out.extend((0..columns).map(|x| row.get((left + x) % w).copied().unwrap_or(0.0)));
        }
    }
    Tensor::f32(&[1, c, rows, columns], out)
}

fn dims(x: &Tensor) -> Result<[usize; 4]> {
    x.shape().array().ok_or_else(|| Error::internal(format!("a picture is {}", x.shape())))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAME: Scale = Scale { values: 1, per: 1 };

    #[test]
    fn pieces_cover_the_axis_and_share_strips() {
        for (total, len, shared) in [(520, 128, 32), (129, 128, 32), (256, 64, 16), (17, 4, 2), (1000, 7, 3)] {
            let p = Pieces::new(total, len, shared, 1, false);
            assert_eq!((p.starts[0], p.starts.last().unwrap() + len), (0, total), "{p:?}");
            assert!(p.starts.windows(2).all(|s| s[1] > s[0] && s[0] + len >= s[1] + shared), "{p:?}");
            let around = Pieces::new(total, len, shared, 1, true);
            let next = around.starts.iter().skip(1).copied().chain([total]);
            assert!(around.starts.iter().zip(next).all(|(a, b)| a + len >= b + shared), "{around:?}");
        }
        assert_eq!(Pieces::new(64, 64, 16, 1, true).count(), 1);
        let stepped = Pieces::new(96, 32, 8, 4, false);
        assert!(stepped.starts.iter().all(|s| s % 4 == 0), "{stepped:?}");
    }

    /// What does not look at neighbours comes out as if it were computed at once, whatever the pieces.
    #[test]
    fn pieces_of_a_pointwise_function_are_the_whole() {
        let (h, w) = (33, 50);
        let x = Tensor::f32(&[1, 2, h, w], (0..2 * h * w).map(|i| (i as f32 * 0.37).sin()).collect()).unwrap();
        for circular in [false, true] {
            for len in [4, 9, 32, 49] {
                let (rows, columns) =
                    (Pieces::new(h, len, len / 2, 1, circular), Pieces::new(w, len, len / 4, 1, circular));
                let mut seen = Vec::new();
                let out = pieced(&x, [&rows, &columns], SAME, &mut |i, piece| {
                    seen.push(i);
                    Tensor::f32(piece.dims(), piece.values().iter().map(|v| 2.0 * v).collect())
                });
                let out = out.unwrap();
                assert!(out.values().iter().zip(x.values()).all(|(a, b)| (a - 2.0 * b).abs() < 1e-6), "{len}");
                assert_eq!(seen, (0..rows.count() * columns.count()).collect::<Vec<_>>());
            }
        }
    }

    /// A blur that takes zeros beyond the edges of a piece shows none of them, where strips are wide enough.
    #[test]
    fn what_a_piece_cannot_see_is_not_taken_from_it() {
        let blur = |x: &Tensor| {
            let [_, _, h, w] = x.shape().array().unwrap();
            let at = |y: i64, x_: i64| {
                let inside = y >= 0 && x_ >= 0 && y < h as i64 && x_ < w as i64;
                if inside { x.values()[y as usize * w + x_ as usize] } else { 0.0 }
            };
            let one = |i: usize| {
                let (y, x_) = ((i / w) as i64, (i % w) as i64);
                (-2..=2).flat_map(|dy| (-2..=2).map(move |dx| (dy, dx))).map(|(dy, dx)| at(y + dy, x_ + dx)).sum()
            };
            Tensor::f32(x.dims(), (0..h * w).map(one).collect())
        };
        let x = Tensor::f32(&[1, 1, 40, 60], (0..2400).map(|i| ((i * i) as f32 * 0.013).cos()).collect()).unwrap();
        let whole = blur(&x).unwrap();
        let (rows, columns) = (Pieces::new(40, 24, 8, 1, false), Pieces::new(60, 24, 8, 1, false));
        let out = pieced(&x, [&rows, &columns], SAME, &mut |_, piece| blur(piece)).unwrap();
        assert!(rows.count() > 1 && columns.count() > 2);
        let far = out.values().iter().zip(whole.values()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(far < 1e-5, "{far}");
    }

    #[test]
    fn results_may_be_larger_or_smaller() {
        let x = Tensor::f32(&[1, 1, 8, 12], (0..96).map(|v| v as f32).collect()).unwrap();
        let (rows, columns) = (Pieces::new(8, 4, 2, 2, false), Pieces::new(12, 6, 2, 2, true));
        let half = Scale { values: 1, per: 2 };
        let out = pieced(&x, [&rows, &columns], half, &mut |_, piece| {
            let [_, _, h, w] = piece.shape().array().unwrap();
            let value = |i: usize| piece.values()[(i / (w / 2) * 2) * w + i % (w / 2) * 2];
            Tensor::f32(&[1, 1, h / 2, w / 2], (0..h * w / 4).map(value).collect())
        });
        let out = out.unwrap();
        assert_eq!(out.dims(), [1, 1, 4, 6]);
        let want: Vec<f32> = (0..24).map(|i| ((i / 6 * 2) * 12 + i % 6 * 2) as f32).collect();
        assert!(out.values().iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-4), "{:?}", out.values());
    }
}
