//! `x [m, k]` times `w [n, k]` transposed, plus the bias: `[m, n]`.

use std::ops::Range;

use super::gemm::{self, Panel, Product};
use super::inner::WIDE;
use super::integers::{PARTS, Terms};
use super::pack::{self, Matrix, ROOM};
use super::quants::is_integers;
use super::scratch::{share, with};
use super::{DEPTH, Dots, GROUP, Isa, MAX_COLUMNS};
use crate::dtype::DType;
use crate::ffi::{HostOp, Operand};

/// Sizes and types of the factors.
#[derive(Debug)]
pub(crate) struct Linear {
    pub(crate) isa: &'static Isa,
    /// Rows of `x` and of the result.
    pub(crate) m: usize,
    /// Rows of `w`.
    pub(crate) n: usize,
    pub(crate) k: usize,
    /// How `w` is stored: `super::can_read` it.
    pub(crate) dtype: DType,
    /// Whether there is a bias, `[n]` f32.
    pub(crate) bias: bool,
    pub(crate) sums: Sums,
}

/// What a product's sums are of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sums {
    /// Factors in the order of tiles.
    Tiles,
    /// f32 factors, lane by lane of a register.
    Lanes,
    /// Integers: those of the matrix, which [`super::quants::is_integers`] knows, and 16-bit ones of rows.
    Integers,
}

impl Sums {
    /// Those of `x [image, .., k]` with a matrix stored as `dtype`. `narrow` says whether factors may be less than f32.
    pub(crate) fn of(x: &[usize], dtype: DType, narrow: bool) -> Sums {
        match few(x) {
            true if narrow && is_integers(dtype) => Sums::Integers,
            true => Sums::Lanes,
            false => Sums::Tiles,
        }
    }
}

/// Whether `x [image, .., k]` has so few rows for each image that a product with a matrix waits for the matrix. What
/// else is computed with an image does not matter, so that it cannot change a result.
fn few(x: &[usize]) -> bool {
    match x {
        [_, rows @ .., _] => rows.iter().product::<usize>() <= FEW,
        _ => true,
    }
}

/// The most rows of an image for which a matrix is used as it is stored.
const FEW: usize = 16;

/// Rows that use what was converted of a matrix.
const SOME: usize = 32;

impl HostOp for Linear {
    fn operands(&self) -> Vec<Operand> {
        let mut all = vec![(DType::F32, [self.m, self.k]), (self.dtype, [self.n, self.k])];
        if self.bias {
            all.push((DType::F32, [1, self.n]));
        }
        all
    }

    fn elements(&self) -> usize {
        self.m * self.n
    }

    fn work(&self) -> usize {
        2 * self.m * self.n * self.k
    }

    fn operations(&self) -> usize {
        self.work()
    }

    unsafe fn compute(&self, out: *mut f32, operands: &[*const u8], part: usize, parts: usize) {
        let &[x, w, ref bias @ ..] = operands else { return };
        let weight = Matrix::new(self.dtype, w, self.k);
        let p = Factors { sizes: self, x: x.cast(), weight, bias: bias.first().map(|b| b.cast()), out };
        // SAFETY: the operands are as long as `operands` says and the result as `elements`.
        unsafe {
            match self.sums {
                Sums::Tiles => gemm::compute(self.isa, &p, part, parts),
                Sums::Lanes => p.few_rows(self.isa.wide(), part, parts),
                Sums::Integers => p.integers(self.isa, part, parts),
            }
        }
    }
}

/// Products of one size, `x [many, m, k]` with `w [.., n, k]`.
#[derive(Debug)]
pub(crate) struct Products {
    pub(crate) each: Linear,
    /// For each, which `w` it is of.
    pub(crate) which: Vec<usize>,
    /// How many `w` there are.
    pub(crate) factors: usize,
}

impl HostOp for Products {
    fn operands(&self) -> Vec<Operand> {
        let Linear { m, n, k, dtype, .. } = self.each;
        vec![(DType::F32, [self.which.len() * m, k]), (dtype, [self.factors * n, k])]
    }

    fn elements(&self) -> usize {
        self.which.len() * self.each.elements()
    }

    fn work(&self) -> usize {
        self.which.len() * self.each.work()
    }

    fn operations(&self) -> usize {
        self.work()
    }

    unsafe fn compute(&self, out: *mut f32, operands: &[*const u8], part: usize, parts: usize) {
        let &[x, w] = operands else { return };
        let Linear { m, n, k, dtype, .. } = self.each;
        let Some(step) = dtype.bytes(n * k, k) else { return };
        for (i, &factor) in self.which.iter().enumerate() {
            let operands = [x.wrapping_add(i * m * k * 4), w.wrapping_add(factor * step)];
            // SAFETY: as the caller promises for all of them.
            unsafe { self.each.compute(out.wrapping_add(i * m * n), &operands, part, parts) };
        }
    }
}

struct Factors<'a> {
    sizes: &'a Linear,
    x: *const f32,
    weight: Matrix,
    bias: Option<*const f32>,
    out: *mut f32,
}

impl Factors<'_> {
    /// The product with each row of `w` read once for [`SOME`] rows of `x`, in f32. Lanes of a register are sums of their
    /// own.
    ///
    /// # Safety
    /// As for [`gemm::compute`].
    unsafe fn few_rows(&self, isa: &Isa, part: usize, parts: usize) {
        let &Linear { m, n, k, .. } = self.sizes;
        let lanes = isa.columns / WIDE;
        with([ROOM, SOME.min(m) * GROUP * lanes], |[room, sums]| {
            for first_row in (0..m).step_by(SOME) {
                let rows = SOME.min(m - first_row);
                for group in share(n.div_ceil(GROUP), part, parts) {
                    let first = group * GROUP;
                    let columns = first..(first + GROUP).min(n);
                    // SAFETY: the rows of both factors exist, and the columns of the result are this thread's.
                    unsafe {
                        let all = std::slice::from_raw_parts_mut(sums, rows * GROUP * lanes);
                        all.fill(0.0);
                        for from in (0..k).step_by(DEPTH) {
                            let terms = from..(from + DEPTH).min(k);
                            let (x, len) = (self.x.wrapping_add(first_row * k + from), terms.len());
                            let w = self.weight.group(isa, columns.clone(), terms, room);
                            (isa.dots)(&Dots { len, rows, x, step: k, w, sums });
                        }
                        self.finish(all, first_row, first);
                    }
                }
            }
        });
    }

    /// As [`Factors::few_rows`], with the factors as integers.
    ///
    /// # Safety
    /// As for [`gemm::compute`].
    unsafe fn integers(&self, isa: &Isa, part: usize, parts: usize) {
        let &Linear { m, n, k, .. } = self.sizes;
        let groups = share(n.div_ceil(GROUP), part, parts);
        let blocks = k.div_ceil(DEPTH);
        with(
            [SOME.min(m) * blocks * size_of::<Terms>() / size_of::<f32>(), SOME.min(m) * GROUP * PARTS],
            |[x, sums]| {
                let x: *mut Terms = x.cast();
                for first_row in (0..m).step_by(SOME) {
                    let rows = SOME.min(m - first_row);
                    for i in 0..if groups.is_empty() { 0 } else { rows * blocks } {
                        let (row, from) = (first_row + i / blocks, i % blocks * DEPTH);
                        // SAFETY: the terms exist, and there is room for as many blocks, aligned as those of lines are.
                        unsafe {
                            let from_x = self.x.wrapping_add(row * k + from);
                            (isa.quantise)(from_x, DEPTH.min(k - from), &mut *x.wrapping_add(i));
                        }
                    }
                    for group in groups.clone() {
                        let first = group * GROUP;
                        // SAFETY: the rows of both factors exist, and the columns of the result are this thread's.
                        unsafe {
                            self.weight.integer_dots(isa, [first, n], [rows, k], x, sums);
                            let all = std::slice::from_raw_parts_mut(sums, rows * GROUP * PARTS);
                            self.finish(all, first_row, first);
                        }
                    }
                }
            },
        );
    }

    /// Writes what is summed in `[rows][GROUP][lanes]`, from this row and column on.
    ///
    /// # Safety
    /// As for [`gemm::compute`].
    unsafe fn finish(&self, sums: &mut [f32], first_row: usize, first: usize) {
        let &Linear { m, n, .. } = self.sizes;
        let rows = SOME.min(m - first_row);
        for (i, sums) in sums.chunks_exact_mut(sums.len() / (rows * GROUP)).enumerate() {
            let (row, column) = (first_row + i / GROUP, first + i % GROUP);
            if column < n {
                // SAFETY: as the caller promises.
                unsafe {
                    let bias = self.bias.map_or(0.0, |b| *b.wrapping_add(column));
                    *self.out.wrapping_add(row * n + column) = bias + total(sums);
                }
            }
        }
    }
}

/// The sum of a power of two of lanes, of one half and the other again and again; they are overwritten.
fn total(lanes: &mut [f32]) -> f32 {
    let mut half = lanes.len() / 2;
    while half > 0 {
        let (low, high) = lanes.split_at_mut(half);
        low.iter_mut().zip(high).for_each(|(a, b)| *a += *b);
        half /= 2;
    }
    lanes.first().copied().unwrap_or(0.0)
}

impl Product for Factors<'_> {
    fn rows(&self) -> usize {
        self.sizes.m
    }

    fn depth(&self) -> usize {
        self.sizes.k
    }

    fn panels(&self, isa: &Isa) -> usize {
        self.sizes.n.div_ceil(isa.columns)
    }

    fn row_bias(&self) -> Option<*const f32> {
        None
    }

    fn panel(&self, isa: &Isa, panel: usize) -> Panel {
        let first = panel * isa.columns;
        Panel {
            c: self.out.wrapping_add(first),
            stride: self.sizes.n,
            columns: isa.columns.min(self.sizes.n - first),
            bias: self.bias.map(|b| b.wrapping_add(first)),
        }
    }

    unsafe fn pack_rows(&self, isa: &Isa, rows: Range<usize>, terms: Range<usize>, to: *mut f32, room: *mut f32) {
        let count = rows.len().min(MAX_COLUMNS);
        let mut from = [self.x; MAX_COLUMNS];
        for (p, row) in from.iter_mut().zip(rows) {
            *p = self.x.wrapping_add(row * self.sizes.k + terms.start);
        }
        // SAFETY: the rows exist and have the terms.
        unsafe { pack::pack(isa, &from[..count], terms.len(), count, to, room) }
    }

    unsafe fn pack_columns(&self, isa: &Isa, panel: usize, terms: Range<usize>, to: *mut f32, room: *mut f32) {
        let first = panel * isa.columns;
        let rows = first..(first + isa.columns).min(self.sizes.n);
        // SAFETY: as the caller promises.
        unsafe { self.weight.pack(isa, rows, isa.columns, terms, to, room) }
    }
}
