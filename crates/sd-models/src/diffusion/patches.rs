//! Latents as tokens of 2×2 values, as diffusion transformers read them, and where those tokens stand.

use sd_core::{Graph, Result, Var};

/// Latent values along each side of a patch.
pub(crate) const PATCH: usize = 2;

/// A latent `[b, z, h, w]` as tokens `[b, t, 4 z]`, row by row: each a patch of 2×2 with its values in the order channel,
/// row, column. Odd sides are filled up with zeros.
///
/// # Errors
/// `x` does not have four axes.
pub fn pack(g: &Graph, x: Var) -> Result<Var> {
    let [b, z, h, w] = g.dims(x)?;
    let [rows, columns] = [h, w].map(|side| side.div_ceil(PATCH));
    let x = g.pad2d(x, [0, rows * PATCH - h], [0, columns * PATCH - w])?;
    let x = g.reshape(x, &[b * z, rows, PATCH, columns, PATCH])?;
    let x = g.permute(x, &[0, 1, 3, 2, 4])?;
    let x = g.reshape(x, &[b, z, rows * columns, PATCH * PATCH])?;
    let x = g.permute(x, &[0, 2, 1, 3])?;
    g.reshape(x, &[b, rows * columns, z * PATCH * PATCH])
}

/// Tokens `[b, t, 4 z]` as the latent `[b, z, h, w]` that [`pack`] makes them of.
///
/// # Errors
/// There are not as many tokens as `h` by `w` takes.
pub fn unpack(g: &Graph, x: Var, h: usize, w: usize) -> Result<Var> {
    let [b, t, c] = g.dims(x)?;
    let [rows, columns] = [h, w].map(|side| side.div_ceil(PATCH));
    let x = g.reshape(x, &[b, t, c / (PATCH * PATCH), PATCH * PATCH])?;
    let x = g.permute(x, &[0, 2, 1, 3])?; // [b, z, t, 4]
    let x = g.reshape(x, &[b * (c / (PATCH * PATCH)), rows, columns, PATCH, PATCH])?;
    let x = g.permute(x, &[0, 1, 3, 2, 4])?;
    let x = g.reshape(x, &[b, c / (PATCH * PATCH), rows * PATCH, columns * PATCH])?;
    g.slice(g.slice(x, 2, 0, h)?, 3, 0, w)
}

/// How several reference pictures are placed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum ReferencePlan {
    /// Side by side in one plane, index 1, as ComfyUI does it for Kontext.
    #[default]
    Fixed,
    /// In planes of their own, index 1, 2, 3, …
    Increase,
    /// In planes of their own, index -1, -2, -3, …
    Decrease,
}

/// Positions `(index, row, column)` of all tokens: `text` at the origin, then those of a picture and of references,
/// given as latent sizes `[h, w]`.
pub fn positions(
    text: usize,
    picture: [usize; 2],
    references: &[[usize; 2]],
    plan: ReferencePlan,
) -> Vec<[i32; 3]> {
    let mut out = vec![[0; 3]; text];
    let mut place = |[h, w]: [usize; 2], index: i32, [top, left]: [usize; 2]| {
        let columns = move |row| (0..w).map(move |column| [index, (top + row) as i32, (left + column) as i32]);
        out.extend((0..h).flat_map(columns));
    };
    let patches = |size: [usize; 2]| size.map(|side| side.div_ceil(PATCH));
    place(patches(picture), 0, [0, 0]);
    let (mut bottom, mut right) = (0, 0);
    for (&reference, number) in references.iter().zip(1..) {
        let [h, w] = patches(reference);
        match plan {
            ReferencePlan::Increase => place([h, w], number, [0, 0]),
            ReferencePlan::Decrease => place([h, w], -number, [0, 0]),
            ReferencePlan::Fixed => {
                // Below the others, or right of them if that ends nearer to the origin.
                let [top, left] = if bottom + h <= right + w { [bottom, 0] } else { [0, right] };
                place([h, w], 1, [top, left]);
                bottom = bottom.max(top + h);
                right = right.max(left + w);
            }
        }
    }
    out
}
