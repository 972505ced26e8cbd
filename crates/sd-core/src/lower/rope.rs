//! Rotary positions. ggml's own operation makes its angles itself, from one axis of positions.

use super::layout;
use crate::error::Result;
use crate::ffi::{Binary, Context, Id};
use crate::graph::RopeLayout;

/// `x [b, t, h, d]`, row-major sizes given, turned by the tables: `x` times the cosines, plus `x` with the elements of
/// each pair exchanged times the sines, negative for the first of a pair.
pub(super) fn rope(
    c: &mut Context,
    x: Id,
    [b, t, h, d]: [usize; 4],
    [cos, sin]: [Id; 2],
    layout: RopeLayout,
) -> Result<Id> {
    // In ggml's order, pairs are axis `pair`, of two, next to axis `1 - pair` of `half`.
    let half = d / 2;
    let pair = if layout == RopeLayout::Interleaved { 0 } else { 1 };
    let sizes = |of_pair: usize, h: usize, t: usize| {
        let mut out = [half, half, h, t];
        out[pair] = of_pair;
        out
    };
    let element = |c: &mut Context, pairs: Id, i: usize| {
        let mut start = [0; 4];
        start[pair] = i;
        c.window(pairs, start, sizes(1, h, t * b))
    };
    let pairs = c.reshape(x, sizes(2, h, t * b))?;
    let (first, second) = (element(c, pairs, 0)?, element(c, pairs, 1)?);
    let exchanged = layout::join(c, vec![second, first], pair)?;
    let exchanged = c.reshape(exchanged, [d, h, t, b])?;

    let rows: usize = c.ne(cos)?.iter().skip(1).product();
    let table = |c: &mut Context, of_first: Id, of_second: Id| {
        let of_first = c.reshape(of_first, sizes(1, 1, rows))?;
        let of_second = c.reshape(of_second, sizes(1, 1, rows))?;
        let joined = layout::join(c, vec![of_first, of_second], pair)?;
        c.reshape(joined, [d, 1, t, rows / t.max(1)])
    };
    let minus = c.affine(sin, -1.0, 0.0)?;
    let (cos, sin) = (table(c, cos, cos)?, table(c, minus, sin)?);

    let kept = c.binary(Binary::Mul, x, cos)?;
    let turned = c.binary(Binary::Mul, exchanged, sin)?;
    c.binary(Binary::Add, kept, turned)
}
