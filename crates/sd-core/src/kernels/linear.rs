//! `x [m, k]` times `w [n, k]` transposed, plus the bias: `[m, n]`.

use std::ops::Range;

use super::gemm::{self, Panel, Product};
use super::pack::{self, Matrix, ROOM};
use super::scratch::{share, with};
use super::{Base, DEPTH, FEW, Isa, MAX_COLUMNS, Rows};
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
}

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
            if self.m <= FEW {
                p.few_rows(self.isa, part, parts);
            } else {
                gemm::compute(self.isa, &p, part, parts);
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
    /// The product for at most [`FEW`] rows, in the order of sums that tiles have.
    ///
    /// # Safety
    /// As for [`gemm::compute`].
    unsafe fn few_rows(&self, isa: &Isa, part: usize, parts: usize) {
        let &Linear { m, k, .. } = self.sizes;
        let step = isa.words(k);
        let narrowed = if isa.narrow.is_some() { m * step } else { 0 };
        with([ROOM, narrowed], |[room, narrowed]| {
            let x = match &isa.narrow {
                Some(narrow) => {
                    for row in 0..m {
                        // SAFETY: the row exists, and there is room for its words.
                        unsafe { (narrow.row)(self.x.wrapping_add(row * k), k, narrowed.wrapping_add(row * step)) };
                    }
                    narrowed.cast_const()
                }
                None => self.x,
            };
            for panel in share(self.panels(isa), part, parts) {
                let Panel { c, stride, columns, bias } = self.panel(isa, panel);
                let first = panel * isa.columns;
                for from in (0..k).step_by(DEPTH) {
                    let terms = from..(from + DEPTH).min(k);
                    let base = match (from, bias) {
                        (0, Some(bias)) => Base::Columns(bias),
                        (0, None) => Base::Zero,
                        _ => Base::Sum,
                    };
                    let (a, depth) = (x.wrapping_add(isa.words(from)), isa.words(terms.len()));
                    // SAFETY: the rows of both factors exist, and the part of the result is this thread's.
                    unsafe {
                        let b = self.weight.rows(isa, first..first + columns, terms, room);
                        (isa.rows_by)(m, &Rows { depth, a, step, b, c, stride, columns, base });
                    }
                }
            }
        });
    }
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
