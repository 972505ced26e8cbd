//! Convolutions with kernels of 3 by 3 and steps of 1 by way of 16 products over tiles of 2 by 2 results, which take 2.25
//! times fewer multiplications (Winograd 1980; Lavin and Gray 2016, F(2×2, 3×3)).

use std::ops::Range;

use super::conv2d::Geometry;
use super::inner::WIDE;
use super::pack::{Matrix, ahead};
use super::scratch::{share, with};
use super::vector::{Vector, Words};
use super::{Base, DEPTH, Isa, MAX_COLUMNS, Tile};
use crate::dtype::DType;
use crate::ffi::{HostOp, Operand};

/// Products: elements of a tile of 4 by 4 inputs.
const POINTS: usize = 16;

/// Panels of tiles that are transformed at a time, at most.
const PANELS: usize = 8;

/// Channels of all those panels, of which one product's stay near.
const NEAR: usize = 4096;

/// Channels whose taps are transformed at a time: an even number.
const SOME: usize = 64;

/// A kernel `[n, c, 3, 3]` transformed: for each strip of rows `[POINTS][words of channels][rows]`.
#[derive(Debug)]
pub(crate) struct WinogradKernel {
    pub(crate) isa: &'static Isa,
    pub(crate) n: usize,
    pub(crate) channels: usize,
    pub(crate) dtype: DType,
}

impl WinogradKernel {
    /// Sizes of the result.
    pub(crate) fn dims(&self) -> [usize; 3] {
        [POINTS, self.n, self.isa.words(self.channels)]
    }
}

impl HostOp for WinogradKernel {
    fn operands(&self) -> Vec<Operand> {
        vec![(self.dtype, [self.n, self.channels * 9])]
    }

    fn elements(&self) -> usize {
        self.dims().iter().product()
    }

    fn work(&self) -> usize {
        self.n * self.channels * 64
    }

    unsafe fn compute(&self, out: *mut f32, operands: &[*const u8], part: usize, parts: usize) {
        let &[kernel] = operands else { return };
        let (isa, n) = (self.isa, self.n);
        let each = isa.height(n);
        let (words, kernel) = (isa.words(self.channels), Matrix::new(self.dtype, kernel, self.channels * 9));
        with([each * SOME * 9, each * SOME * 9], |[taps, turned]| {
            for strip in share(n.div_ceil(each), part, parts) {
                let rows = strip * each..((strip + 1) * each).min(n);
                let to = out.wrapping_add(POINTS * rows.start * words);
                for first in (0..self.channels).step_by(SOME) {
                    let count = SOME.min(self.channels - first);
                    let mut from = [taps.cast_const(); MAX_COLUMNS];
                    // SAFETY: the rows have the taps, the strip is this thread's, and there is room for all rows of one.
                    unsafe {
                        for (r, row) in rows.clone().enumerate() {
                            let to = taps.wrapping_add(r * SOME * 9);
                            kernel.read_row(isa, row, first * 9..(first + count) * 9, to);
                            from[r] = to;
                        }
                        (isa.transpose)(&from[..rows.len()], count * 9, turned, rows.len());
                        let to = to.wrapping_add(isa.words(first) * rows.len());
                        (isa.kernel_in)(turned, [rows.len(), count], to, words * rows.len());
                    }
                }
            }
        });
    }
}

/// `G g Gᵀ` of taps `[channels][9][rows]` into `[words of channels][rows]` for each point, `step` apart.
///
/// # Safety
/// The machine has the instruction set of `W`, a register is at least `rows` wide, and the pointers are valid for that.
#[inline(always)]
pub(super) unsafe fn kernel_in<W: Words>(
    taps: *const f32,
    [rows, channels]: [usize; 2],
    to: *mut f32,
    step: usize,
) {
    // SAFETY: as the caller promises; masked lanes are rows.
    unsafe {
        let mask = W::V::first(rows);
        let half = W::V::splat(0.5);
        let line = |a: W::V, b: W::V, c: W::V| {
            let (outer, inner) = (a.add(c).mul(half), b.mul(half));
            [a, outer.add(inner), outer.sub(inner), c]
        };
        let transformed = |channel: usize| -> [[W::V; 4]; 4] {
            let tap = |i: usize| W::V::load_some(taps.wrapping_add((channel * 9 + i) * rows), mask);
            let columns = [0, 1, 2].map(|j| line(tap(j), tap(3 + j), tap(6 + j)));
            std::array::from_fn(|i| line(columns[0][i], columns[1][i], columns[2][i]))
        };
        for channel in (0..channels).step_by(W::GRAIN) {
            let first = transformed(channel);
            let there = W::GRAIN > 1 && channel + 1 < channels;
            let second = if there { transformed(channel + 1) } else { [[W::V::splat(0.0); 4]; 4] };
            let to = to.wrapping_add(channel / W::GRAIN * rows);
            for (p, (&a, &b)) in first.as_flattened().iter().zip(second.as_flattened()).enumerate() {
                W::pair(a, b).store_some(to.wrapping_add(p * step), mask);
            }
        }
    }
}

/// A convolution with a [`WinogradKernel`], plus the bias.
#[derive(Clone, Debug)]
pub(crate) struct Winograd {
    pub(super) isa: &'static Isa,
    pub(super) g: Geometry,
    pub(super) bias: bool,
}

impl Winograd {
    /// `None` where it does not pay, whatever the batch is, or cannot be.
    pub(crate) fn new(isa: &'static Isa, g: Geometry, bias: bool) -> Option<Winograd> {
        let fits = g.kernel == [3, 3] && g.stride == 1 && g.dilation == 1 && g.padding.iter().all(|&p| p <= 2);
        let sound = (0..2).all(|i| g.out[i] + 2 == g.image[i] + 2 * g.padding[i]);
        let pays = g.positions() >= 900 && g.channels >= 32 && g.n >= 32;
        (fits && sound && pays).then_some(Winograd { isa, g, bias })
    }

    /// Rows and columns of tiles.
    fn tiles(&self) -> [usize; 2] {
        self.g.out.map(|n| n.div_ceil(2))
    }
}

impl HostOp for Winograd {
    fn operands(&self) -> Vec<Operand> {
        let g = &self.g;
        let mut all = vec![
            (DType::F32, [g.batch * g.channels, g.image[0] * g.image[1]]),
            (DType::F32, [POINTS * g.n, self.isa.words(g.channels)]),
        ];
        if self.bias {
            all.push((DType::F32, [1, g.n]));
        }
        all
    }

    fn elements(&self) -> usize {
        self.g.batch * self.g.n * self.g.positions()
    }

    fn work(&self) -> usize {
        8 * self.elements() * self.g.channels
    }

    fn operations(&self) -> usize {
        18 * self.elements() * self.g.channels
    }

    unsafe fn compute(&self, out: *mut f32, operands: &[*const u8], part: usize, parts: usize) {
        let &[x, kernel, ref bias @ ..] = operands else { return };
        let (isa, g) = (self.isa, &self.g);
        let [tile_rows, tile_columns] = self.tiles();
        let (tiles, columns) = (tile_rows * tile_columns, isa.columns);
        let each = tiles.div_ceil(columns);
        let mine = share(g.batch * each, part, parts);
        let words = isa.words(g.channels);
        let some = (NEAR / words).clamp(2, PANELS).min(mine.len().max(1));
        let strip = isa.height(g.n);
        let step = 2 * columns + ROOM;
        let panel_size = POINTS * words * columns;
        // Two channels that become one of words.
        let pair = if isa.narrow.is_some() { 2 * POINTS * columns } else { 0 };
        let sizes = [some * panel_size, some * POINTS * g.n * columns, 4 * step, pair];
        let (x, kernel, bias) = (x.cast(), kernel.cast(), bias.first().map(|b| b.cast()));
        let data = Data { x, kernel, bias, out, step, words, panel_size, strip };
        with(sizes, |[v, m, lines, pair]| {
            for line in 0..4 * step {
                // SAFETY: the lines have as many elements.
                unsafe { *lines.wrapping_add(line) = 0.0 };
            }
            for first in mine.clone().step_by(some) {
                let panels = first..(first + some).min(mine.end);
                // The image, and the tiles of a panel.
                let place = |panel: usize| {
                    let from = panel % each * columns;
                    (panel / each, from..(from + columns).min(tiles))
                };
                for (i, panel) in panels.clone().enumerate() {
                    let (image, tiles) = place(panel);
                    let plane = |c: usize| (image * g.channels + c) * g.image[0] * g.image[1];
                    let soon = |c: usize| {
                        if c + SOON < g.channels {
                            self.ahead(&data, plane(c + SOON), tiles.clone());
                        }
                    };
                    let to = |c: usize| v.wrapping_add(i * panel_size + isa.words(c) * columns);
                    let step = words * columns;
                    // SAFETY: the planes exist, and the panel has room for the channels.
                    unsafe {
                        let Some(narrow) = &isa.narrow else {
                            for c in 0..g.channels {
                                soon(c);
                                self.take_in(&data, plane(c), tiles.clone(), lines, to(c), step);
                            }
                            continue;
                        };
                        for c in (0..g.channels).step_by(2) {
                            let second = pair.wrapping_add(POINTS * columns);
                            soon(c);
                            soon(c + 1);
                            self.take_in(&data, plane(c), tiles.clone(), lines, pair, columns);
                            if c + 1 < g.channels {
                                self.take_in(&data, plane(c + 1), tiles.clone(), lines, second, columns);
                            }
                            for at in (0..POINTS).map(|p| p * columns) {
                                let second = (c + 1 < g.channels).then_some(second.wrapping_add(at).cast_const());
                                let first = Some(pair.wrapping_add(at).cast_const());
                                (narrow.pair)([first, second], to(c).wrapping_add(at * words));
                            }
                        }
                    }
                }
                // SAFETY: panels and kernel are there, products have room, and the tiles of the result are this thread's.
                unsafe {
                    self.multiply(&data, panels.len(), v, m);
                    for (i, panel) in panels.clone().enumerate() {
                        let (image, tiles) = place(panel);
                        self.give_out(&data, image, tiles, m.wrapping_add(i * POINTS * g.n * columns), lines);
                    }
                }
            }
        });
    }
}

/// Channels whose inputs are on their way while one is transformed.
const SOON: usize = 4;

/// Elements beyond the last tile's that may be read.
const ROOM: usize = 64;

struct Data {
    x: *const f32,
    kernel: *const f32,
    bias: Option<*const f32>,
    out: *mut f32,
    /// Elements of a line.
    step: usize,
    /// Words of channels.
    words: usize,
    /// Words of the transformed channels of a panel.
    panel_size: usize,
    /// Rows of a strip.
    strip: usize,
}

impl Winograd {
    /// The runs of neighbours in one row of tiles: row, first column, and position in the panel.
    fn runs(&self, tiles: Range<usize>) -> impl Iterator<Item = (usize, usize, usize, usize)> {
        let width = self.tiles()[1];
        (tiles.start / width..tiles.end.div_ceil(width)).map(move |row| {
            let (from, to) = ((row * width).max(tiles.start), ((row + 1) * width).min(tiles.end));
            (row, from - row * width, from - tiles.start, to - from)
        })
    }

    /// Asks for the inputs of `tiles` in the plane from element `plane` on.
    fn ahead(&self, data: &Data, plane: usize, tiles: Range<usize>) {
        let ([h, w], [above, padding]) = (self.g.image, self.g.padding);
        for (row, column, _, count) in self.runs(tiles) {
            for y in (0..4).filter_map(|i| (2 * row + i).checked_sub(above)).filter(|&y| y < h) {
                let from = data.x.wrapping_add(plane + y * w + (2 * column).saturating_sub(padding));
                ahead(from.cast(), 4 * (2 * count + 2));
            }
        }
    }

    /// Transforms the inputs of `tiles` in the plane from element `plane` on.
    ///
    /// # Safety
    /// The machine has the instruction set; the plane exists, `lines` are four, `to` has [`POINTS`] rows `step` apart.
    unsafe fn take_in(
        &self,
        data: &Data,
        plane: usize,
        tiles: Range<usize>,
        lines: *mut f32,
        to: *mut f32,
        step: usize,
    ) {
        let ([h, w], [above, padding]) = (self.g.image, self.g.padding);
        for (row, column, at, count) in self.runs(tiles) {
            let wanted = 2 * count + 2;
            // Columns of the image that exist, from the first that is seen on.
            let first = 2 * column;
            let before = padding.saturating_sub(first);
            let from = first.saturating_sub(padding);
            let there = w.saturating_sub(from).min(wanted - before);
            for i in 0..4 {
                let line = lines.wrapping_add(i * data.step);
                let y = (2 * row + i).checked_sub(above).filter(|&y| y < h);
                // SAFETY: a line holds what a panel's tiles see; the row of the image holds `there` elements.
                unsafe {
                    let line = std::slice::from_raw_parts_mut(line, wanted);
                    match y {
                        Some(y) => {
                            let x = data.x.wrapping_add(plane + y * w + from);
                            line[..before].fill(0.0);
                            line[before..before + there].copy_from_slice(std::slice::from_raw_parts(x, there));
                            line[before + there..].fill(0.0);
                        }
                        None => line.fill(0.0),
                    }
                }
            }
            // SAFETY: as above.
            unsafe { (self.isa.tiles_in)([lines, to.wrapping_add(at)], [data.step, step], count) };
        }
    }

    /// Multiplies `panels` with the kernel: a point after the other, whose channels stay near.
    ///
    /// # Safety
    /// The machine has the instruction set; `v` and `m` hold as many panels.
    unsafe fn multiply(&self, data: &Data, panels: usize, v: *const f32, m: *mut f32) {
        let (isa, columns, words, n) = (self.isa, self.isa.columns, data.words, self.g.n);
        for p in 0..POINTS {
            for row in (0..n).step_by(data.strip) {
                let rows = data.strip.min(n - row);
                let strip = data.kernel.wrapping_add((POINTS * row + p * rows) * words);
                for i in 0..panels {
                    for first in (0..words).step_by(DEPTH) {
                        let tile = Tile {
                            depth: DEPTH.min(words - first),
                            a: strip.wrapping_add(first * rows),
                            b: v.wrapping_add(i * data.panel_size + (p * words + first) * columns),
                            c: m.wrapping_add(((i * POINTS + p) * n + row) * columns),
                            stride: columns,
                            columns,
                            base: if first == 0 { Base::Zero } else { Base::Sum },
                        };
                        // SAFETY: as the caller promises.
                        unsafe { (isa.tile)(rows, &tile) };
                    }
                }
            }
        }
    }

    /// Transforms products into results.
    ///
    /// # Safety
    /// The machine has the instruction set; `m` holds the products of `tiles`, and `lines` are at least two.
    unsafe fn give_out(&self, data: &Data, image: usize, tiles: Range<usize>, m: *const f32, lines: *mut f32) {
        let (g, columns) = (&self.g, self.isa.columns);
        let [oh, ow] = g.out;
        for n in 0..g.n {
            // SAFETY: biases exist, and products and lines have the elements.
            unsafe {
                let bias = data.bias.map_or(0.0, |b| *b.wrapping_add(n));
                let from = m.wrapping_add(n * columns);
                (self.isa.tiles_out)([from, lines], [g.n * columns, data.step], bias);
            }
            let plane = data.out.wrapping_add((image * g.n + n) * oh * ow);
            for (row, column, at, count) in self.runs(tiles.clone()) {
                let len = (2 * count).min(ow - 2 * column);
                for i in (0..2).filter(|i| 2 * row + i < oh) {
                    let from = lines.wrapping_add(i * data.step + 2 * at);
                    let to = plane.wrapping_add((2 * row + i) * ow + 2 * column);
                    // SAFETY: the run exists in the line and in the result.
                    unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
                }
            }
        }
    }
}

/// `Bᵀ d B` of `count` neighbouring tiles, of four lines `steps[0]` apart, into [`POINTS`] rows `steps[1]` apart.
///
/// # Safety
/// The machine has the instruction set of `V`; lines have elements for whole registers of tiles and two more.
#[inline(always)]
#[allow(clippy::needless_range_loop, reason = "columns of rows are walked through")]
pub(super) unsafe fn tiles_in<V: Vector>([from, to]: [*mut f32; 2], steps: [usize; 2], count: usize) {
    // SAFETY: as the caller promises; masked lanes are tiles that exist.
    unsafe {
        let line = |[a, b, c, d]: [V; 4]| [a.sub(c), b.add(c), c.sub(b), b.sub(d)];
        for k in (0..count).step_by(V::LANES) {
            let mask = V::first(count - k);
            let rows: [[V; 4]; 4] = std::array::from_fn(|i| {
                let at = from.wrapping_add(i * steps[0] + 2 * k);
                let pair = |at: *const f32| V::load(at).unzip(V::load(at.wrapping_add(V::LANES)));
                let ((a, b), (c, d)) = (pair(at), pair(at.wrapping_add(2)));
                line([a, b, c, d])
            });
            for j in 0..4 {
                let column = line([rows[0][j], rows[1][j], rows[2][j], rows[3][j]]);
                for (i, x) in column.into_iter().enumerate() {
                    x.store_some(to.wrapping_add((4 * i + j) * steps[1] + k), mask);
                }
            }
        }
    }
}

/// `Aᵀ m A` of as many tiles as a panel has, plus `bias`, from [`POINTS`] rows `steps[0]` apart into two lines
/// `steps[1]` apart.
///
/// # Safety
/// The machine has the instruction set of `V`, and the pointers are valid for that.
#[inline(always)]
#[allow(clippy::needless_range_loop, reason = "columns of rows are walked through")]
pub(super) unsafe fn tiles_out<V: Vector>([m, to]: [*const f32; 2], steps: [usize; 2], bias: f32) {
    // SAFETY: as the caller promises.
    unsafe {
        let bias = V::splat(bias);
        let line = |[a, b, c, d]: [V; 4]| [a.add(b).add(c), b.sub(c).sub(d)];
        for k in (0..WIDE * V::LANES).step_by(V::LANES) {
            let columns: [[V; 2]; 4] = std::array::from_fn(|j| {
                line(std::array::from_fn(|i| V::load(m.wrapping_add((4 * i + j) * steps[0] + k))))
            });
            for i in 0..2 {
                let [a, b] = line([columns[0][i], columns[1][i], columns[2][i], columns[3][i]]);
                let (first, second) = a.add(bias).zip(b.add(bias));
                let to = to.wrapping_add(i * steps[1] + 2 * k).cast_mut();
                first.store(to);
                second.store(to.wrapping_add(V::LANES));
            }
        }
    }
}
