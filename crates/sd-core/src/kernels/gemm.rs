//! The loops around the tiles: which part of both factors is packed when, and which thread computes what.

use std::ops::Range;

use super::scratch::{share, with};
use super::{Base, DEPTH, Isa, Tile, pack};

/// Tiles of rows that are packed at a time, at most.
const CHUNK: usize = 16;

/// Words of the left factor up to which it is packed once for all columns.
const WHOLE: usize = 1 << 20;

/// Words of a row or column that are packed at a time, at most.
const DEEP: usize = 640;

/// A product whose right factor is cut into panels, each as many columns wide as a tile.
pub(super) trait Product {
    /// Rows of the result.
    fn rows(&self) -> usize;
    /// Terms of each sum.
    fn depth(&self) -> usize;
    /// Panels of columns.
    fn panels(&self, isa: &Isa) -> usize;
    /// A value for each row, added to its sums.
    fn row_bias(&self) -> Option<*const f32>;
    /// Where the result of a panel goes.
    fn panel(&self, isa: &Isa, panel: usize) -> Panel;
    /// Rows of the left factor as `[words of terms][rows]`.
    ///
    /// # Safety
    /// The machine has `isa`; rows and terms exist, the latter from a multiple of [`DEPTH`] on and at most as many; `to`
    /// has room for them, and `room` for [`pack::ROOM`].
    unsafe fn pack_rows(&self, isa: &Isa, rows: Range<usize>, terms: Range<usize>, to: *mut f32, room: *mut f32);
    /// A panel of the right factor as `[words of terms][isa.columns]`; there is room for a word for each term.
    ///
    /// # Safety
    /// As for [`Product::pack_rows`].
    unsafe fn pack_columns(&self, isa: &Isa, panel: usize, terms: Range<usize>, to: *mut f32, room: *mut f32);
}

/// The place of one panel in the result.
pub(super) struct Panel {
    /// Its element in row 0.
    pub(super) c: *mut f32,
    /// Elements from one row to the next.
    pub(super) stride: usize,
    /// Columns that exist.
    pub(super) columns: usize,
    /// A value for each of them, added to its sums.
    pub(super) bias: Option<*const f32>,
}

/// Computes what thread `part` of `parts` has to of `p`: some of the panels or some of the rows, of which there are
/// more.
///
/// # Safety
/// The machine has `isa`, and what `p` points to is valid; nobody else touches the result's elements of this part.
pub(super) unsafe fn compute(isa: &Isa, p: &impl Product, part: usize, parts: usize) {
    let (rows, panels) = (p.rows(), p.panels(isa));
    let by_panels = panels.saturating_mul(isa.columns) >= rows;
    let (rows, panels) = match by_panels {
        true => (0..rows, share(panels, part, parts)),
        false => (share(rows, part, parts), 0..panels),
    };
    if rows.is_empty() || panels.is_empty() {
        return;
    }
    // SAFETY: as the caller promises.
    unsafe { block(isa, p, rows, panels) }
}

/// # Safety
/// As for [`compute`]; rows and panels exist.
unsafe fn block(isa: &Isa, p: &impl Product, rows: Range<usize>, panels: Range<usize>) {
    let (m, depth) = (rows.len(), p.depth());
    // Rows of a tile: as even as can be.
    let height = isa.height(m);
    let whole = m.saturating_mul(isa.words(depth)) <= WHOLE;
    let chunk = (height * CHUNK).min(m);
    // A panel that few rows use is used while it is near.
    let wide = if m <= isa.rows { 1 } else { (isa.block / isa.columns).max(1) }.min(panels.len());
    // Blocks of terms that are added to the same elements one after another.
    let most = (DEEP / isa.words(DEPTH)).max(1);
    let blocks = depth.div_ceil(DEPTH);
    let deep = blocks.div_ceil(blocks.div_ceil(most)) * DEPTH;
    let panel_room = isa.words(DEPTH) * isa.columns;
    // The last panel has room for a word for each term.
    let b_size = wide * panel_room * (deep / DEPTH) + isa.columns * DEPTH;
    let a_size = if whole { m * isa.words(depth) } else { chunk * isa.words(deep) };
    with([a_size, b_size, pack::ROOM], |[a, b, room]| {
        // The tiles of rows `some` as panels one after another, for each block of terms.
        let pack_tiles = |some: Range<usize>, terms: Range<usize>, to: *mut f32| {
            for from in terms.clone().step_by(DEPTH) {
                let block = from..(from + DEPTH).min(terms.end);
                let to = to.wrapping_add(isa.words(from - terms.start) * some.len());
                for first in some.clone().step_by(height) {
                    let tile = first..(first + height).min(some.end);
                    let to = to.wrapping_add((first - some.start) * isa.words(block.len()));
                    // SAFETY: `to` lies in `a`, which holds all tiles of a chunk, or of all rows.
                    unsafe { p.pack_rows(isa, tile, block.clone(), to, room) };
                }
            }
        };
        if whole {
            pack_tiles(rows.clone(), 0..depth, a);
        }
        for first_panel in panels.clone().step_by(wide) {
            let some_panels = first_panel..(first_panel + wide).min(panels.end);
            for first in (0..depth).step_by(deep) {
                let terms = first..(first + deep).min(depth);
                for from in terms.clone().step_by(DEPTH) {
                    let block = from..(from + DEPTH).min(terms.end);
                    let to = b.wrapping_add((from - first) / DEPTH * wide * panel_room);
                    for (i, panel) in some_panels.clone().enumerate() {
                        let to = to.wrapping_add(i * isa.words(block.len()) * isa.columns);
                        // SAFETY: `b` holds `wide` panels for each block.
                        unsafe { p.pack_columns(isa, panel, block.clone(), to, room) };
                    }
                }
                for first_row in rows.clone().step_by(chunk) {
                    let some_rows = first_row..(first_row + chunk).min(rows.end);
                    // The first row and term that are in `a`, and how many rows.
                    let (a_row, a_term, a_rows) = match whole {
                        true => (rows.start, 0, m),
                        false => (some_rows.start, first, some_rows.len()),
                    };
                    if !whole {
                        pack_tiles(some_rows.clone(), terms.clone(), a);
                    }
                    for (i, panel) in some_panels.clone().enumerate() {
                        let to = p.panel(isa, panel);
                        for from in terms.clone().step_by(DEPTH) {
                            let words = isa.words(DEPTH.min(terms.end - from));
                            let a = a.wrapping_add(isa.words(from - a_term) * a_rows);
                            let b = b.wrapping_add((from - first) / DEPTH * wide * panel_room);
                            for row in some_rows.clone().step_by(height) {
                                let base = match (from, p.row_bias(), to.bias) {
                                    (0, Some(bias), _) => Base::Rows(bias.wrapping_add(row)),
                                    (0, None, Some(bias)) => Base::Columns(bias),
                                    (0, None, None) => Base::Zero,
                                    _ => Base::Sum,
                                };
                                let tile = Tile {
                                    depth: words,
                                    a: a.wrapping_add((row - a_row) * words),
                                    b: b.wrapping_add(i * words * isa.columns),
                                    c: to.c.wrapping_add(row * to.stride),
                                    stride: to.stride,
                                    columns: to.columns,
                                    base,
                                };
                                // SAFETY: both panels are packed, the tile's elements and biases exist.
                                unsafe { (isa.tile)(height.min(some_rows.end - row), &tile) };
                            }
                        }
                    }
                }
            }
        }
    });
}

/// A panel `[terms][isa.columns]` as words; `to` may be `from`.
///
/// # Safety
/// The machine has `isa`, and the pointers are valid for that.
pub(super) unsafe fn narrow(isa: &Isa, from: *const f32, terms: usize, to: *mut f32) {
    let Some(narrow) = &isa.narrow else { return };
    let row = |i: usize| (i < terms).then(|| from.wrapping_add(i * isa.columns));
    for i in 0..isa.words(terms) {
        // SAFETY: as the caller promises; rows that are overwritten were read before.
        unsafe { (narrow.pair)([row(2 * i), row(2 * i + 1)], to.wrapping_add(i * isa.columns)) };
    }
}
