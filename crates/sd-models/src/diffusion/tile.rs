//! Convolutions over pictures that may repeat without a seam.

use sd_core::{Conv2dOptions, Error, Graph, Result, Var, scope::Conv2d};

/// `x [.., h, w]` with `rows` more above and below and `columns` more left and right: zeros, or in axes that are
/// `circular` (down, across) the rows or columns of the other side.
pub(crate) fn pad(
    g: &Graph,
    mut x: Var,
    rows: [usize; 2],
    columns: [usize; 2],
    circular: [bool; 2],
) -> Result<Var> {
    let rank = g.shape(x).rank();
    for (axis, [before, after], circular) in [(2, rows, circular[0]), (1, columns, circular[1])] {
        let Some(axis) = rank.checked_sub(axis).filter(|_| circular) else { continue };
        let n = g.shape(x).dim(axis);
        let Some(end) = n.checked_sub(before).filter(|_| after <= n) else {
            return Err(Error::shape(format!("{} repeats over {before} and {after} of {n}", g.describe(x))));
        };
        let mut parts = Vec::new();
        if before > 0 {
            parts.push(g.slice(x, axis, end, before)?);
        }
        parts.push(x);
        if after > 0 {
            parts.push(g.slice(x, axis, 0, after)?);
        }
        x = g.concat(&parts, axis)?;
    }
    let zeros = |sides: [usize; 2], circular: bool| if circular { [0, 0] } else { sides };
    let (rows, columns) = (zeros(rows, circular[0]), zeros(columns, circular[1]));
    if (rows, columns) == ([0, 0], [0, 0]) { Ok(x) } else { g.pad2d(x, rows, columns) }
}

/// A convolution with a row or column on each side as [`pad`] adds them, in steps of `stride`.
pub(crate) fn conv(g: &Graph, w: &Conv2d, x: Var, stride: usize, circular: [bool; 2]) -> Result<Var> {
    let options = Conv2dOptions { stride, ..Conv2dOptions::default() };
    if circular == [false; 2] {
        return g.conv2d(w, x, Conv2dOptions { padding: 1, ..options });
    }
    g.conv2d(w, pad(g, x, [1, 1], [1, 1], circular)?, options)
}
