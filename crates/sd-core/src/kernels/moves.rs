//! Values that go elsewhere, and those that are looked up or come from positions.

use super::pack::Matrix;
use super::scratch::share;
use super::{DEPTH, Isa, MAX_COLUMNS};
use crate::dtype::DType;
use crate::ffi::{HostOp, Operand};
use crate::graph::RopeLayout;

/// The most axes besides the two that change places.
const OTHERS: usize = 4;

/// Axes in another order, where the last axis of the result is not the last of the operand.
#[derive(Debug)]
pub(crate) struct Transpose {
    isa: &'static Isa,
    /// Sizes of the other axes, with elements from one position to the next in operand and result.
    others: [(usize, usize, usize); OTHERS],
    /// The last axis of the result: its size and the operand's step.
    last: (usize, usize),
    /// The last axis of the operand: its size and the result's step.
    run: (usize, usize),
}

impl Transpose {
    /// Of an operand of `strides` by axis of the result, whose sizes are `dims`. `None` where no axis of the operand
    /// holds neighbours, or there are too many axes.
    pub(crate) fn new(isa: &'static Isa, dims: &[usize], strides: &[usize]) -> Option<Transpose> {
        let mut axes: Vec<(usize, usize, usize)> = Vec::new(); // size, operand's step, result's step
        let mut step = 1;
        for (&n, &stride) in dims.iter().zip(strides).rev().filter(|d| *d.0 != 1) {
            match axes.last_mut() {
                Some(a) if a.1 * a.0 == stride => a.0 *= n,
                _ => axes.push((n, stride, step)),
            }
            step *= n;
        }
        let last = *axes.first()?;
        let run = axes.iter().position(|a| a.1 == 1).filter(|&i| i > 0)?;
        let (run_size, _, run_step) = axes[run];
        let rest: Vec<_> = axes.iter().enumerate().filter(|(i, _)| *i != 0 && *i != run).map(|(_, a)| *a).collect();
        if rest.len() > OTHERS {
            return None;
        }
        let mut others = [(1, 0, 0); OTHERS];
        others[..rest.len()].copy_from_slice(&rest);
        Some(Transpose { isa, others, last: (last.0, last.1), run: (run_size, run_step) })
    }
}

impl HostOp for Transpose {
    fn operands(&self) -> Vec<Operand> {
        let reach: usize = self.others.iter().map(|&(n, step, _)| (n - 1) * step).sum();
        vec![(DType::F32, [1, reach + (self.last.0 - 1) * self.last.1 + self.run.0])]
    }

    fn elements(&self) -> usize {
        self.others.iter().map(|o| o.0).product::<usize>() * self.last.0 * self.run.0
    }

    fn work(&self) -> usize {
        self.elements() * 8
    }

    unsafe fn compute(&self, out: *mut f32, operands: &[*const u8], part: usize, parts: usize) {
        let &[x] = operands else { return };
        let blocks = self.last.0.div_ceil(MAX_COLUMNS);
        let others: usize = self.others.iter().map(|o| o.0).product();
        for unit in share(others * blocks, part, parts) {
            let (mut rest, first) = (unit / blocks, unit % blocks * MAX_COLUMNS);
            let (mut from, mut to) = (first * self.last.1, first);
            for &(n, operand, result) in &self.others {
                from += rest % n * operand;
                to += rest % n * result;
                rest /= n;
            }
            let n = MAX_COLUMNS.min(self.last.0 - first);
            let mut rows = [std::ptr::null(); MAX_COLUMNS];
            for (i, row) in rows.iter_mut().enumerate().take(n) {
                *row = x.cast::<f32>().wrapping_add(from + i * self.last.1);
            }
            // SAFETY: rows and their elements exist, and each goes to a place of its own.
            unsafe { (self.isa.transpose)(&rows[..n], self.run.0, out.wrapping_add(to), self.run.1) };
        }
    }
}

/// Any elements in order, one at a time.
#[derive(Debug)]
pub(crate) struct Scatter {
    /// Size and step of each axis of the result.
    pub(crate) axes: Vec<(usize, usize)>,
}

impl HostOp for Scatter {
    fn operands(&self) -> Vec<Operand> {
        vec![(DType::F32, [1, 1 + self.axes.iter().map(|&(n, step)| (n - 1) * step).sum::<usize>()])]
    }

    fn elements(&self) -> usize {
        self.axes.iter().map(|a| a.0).product()
    }

    fn work(&self) -> usize {
        self.elements() * 32
    }

    unsafe fn compute(&self, out: *mut f32, operands: &[*const u8], part: usize, parts: usize) {
        let &[x] = operands else { return };
        for i in share(self.elements(), part, parts) {
            let (mut rest, mut from) = (i, 0);
            for &(n, step) in self.axes.iter().rev() {
                from += rest % n * step;
                rest /= n;
            }
            // SAFETY: both elements exist.
            unsafe { *out.wrapping_add(i) = *x.cast::<f32>().wrapping_add(from) };
        }
    }
}

/// Rows of several operands, joined.
#[derive(Debug)]
pub(crate) struct Join {
    pub(crate) rows: usize,
    /// Elements of a row of each.
    pub(crate) widths: Vec<usize>,
}

impl HostOp for Join {
    fn operands(&self) -> Vec<Operand> {
        self.widths.iter().map(|&w| (DType::F32, [self.rows, w])).collect()
    }

    fn elements(&self) -> usize {
        self.rows * self.widths.iter().sum::<usize>()
    }

    fn work(&self) -> usize {
        self.elements() * 4
    }

    unsafe fn compute(&self, out: *mut f32, operands: &[*const u8], part: usize, parts: usize) {
        let row: usize = self.widths.iter().sum();
        let mine = share(self.elements(), part, parts);
        for line in mine.start / row..mine.end.div_ceil(row) {
            let mut first = line * row;
            for (&x, &width) in operands.iter().zip(&self.widths) {
                let (from, to) = (first.max(mine.start), (first + width).min(mine.end));
                if from < to {
                    let x = x.cast::<f32>().wrapping_add(line * width + from - first);
                    // SAFETY: the elements exist, and are this thread's in the result.
                    unsafe { std::ptr::copy_nonoverlapping(x, out.wrapping_add(from), to - from) };
                }
                first += width;
            }
        }
    }
}

/// `[planes, h, w]` with zeros around the last two axes.
#[derive(Debug)]
pub(crate) struct Pad {
    pub(crate) planes: usize,
    pub(crate) image: [usize; 2],
    /// Above and below, left and right.
    pub(crate) around: [[usize; 2]; 2],
}

impl Pad {
    fn out(&self) -> [usize; 2] {
        [0, 1].map(|i| self.image[i] + self.around[i][0] + self.around[i][1])
    }
}

impl HostOp for Pad {
    fn operands(&self) -> Vec<Operand> {
        vec![(DType::F32, [self.planes * self.image[0], self.image[1]])]
    }

    fn elements(&self) -> usize {
        self.planes * self.out().iter().product::<usize>()
    }

    unsafe fn compute(&self, out: *mut f32, operands: &[*const u8], part: usize, parts: usize) {
        let &[x] = operands else { return };
        let ([h, w], [rows, columns]) = (self.image, self.out());
        for line in share(self.planes * rows, part, parts) {
            let (plane, row) = (line / rows, line % rows);
            // SAFETY: the line of the result exists and is this thread's, as does the row where there is one.
            let to = unsafe { std::slice::from_raw_parts_mut(out.wrapping_add(line * columns), columns) };
            to.fill(0.0);
            if let Some(row) = row.checked_sub(self.around[0][0]).filter(|&r| r < h) {
                let from = x.cast::<f32>().wrapping_add((plane * h + row) * w);
                // SAFETY: as above.
                let from = unsafe { std::slice::from_raw_parts(from, w) };
                to[self.around[1][0]..][..w].copy_from_slice(from);
            }
        }
    }
}

/// Each value of `from` `factor` times.
pub(super) fn repeat(from: &[f32], factor: usize, to: &mut [f32]) {
    if factor == 2 {
        for (pair, &v) in to.chunks_exact_mut(2).zip(from) {
            pair.copy_from_slice(&[v, v]);
        }
    } else {
        to.chunks_exact_mut(factor).zip(from).for_each(|(run, &v)| run.fill(v));
    }
}

/// `[planes, h, w]` with each value repeated in both axes.
#[derive(Debug)]
pub(crate) struct Upsample {
    pub(crate) planes: usize,
    pub(crate) image: [usize; 2],
    pub(crate) factor: usize,
}

impl HostOp for Upsample {
    fn operands(&self) -> Vec<Operand> {
        vec![(DType::F32, [self.planes * self.image[0], self.image[1]])]
    }

    fn elements(&self) -> usize {
        self.planes * self.image[0] * self.image[1] * self.factor * self.factor
    }

    fn work(&self) -> usize {
        self.elements() * 4
    }

    unsafe fn compute(&self, out: *mut f32, operands: &[*const u8], part: usize, parts: usize) {
        let &[x] = operands else { return };
        let (w, f) = (self.image[1], self.factor);
        for line in share(self.planes * self.image[0], part, parts) {
            // SAFETY: the row and its lines of the result exist, which are this thread's.
            let (from, to) = unsafe {
                let from = std::slice::from_raw_parts(x.cast::<f32>().wrapping_add(line * w), w);
                (from, std::slice::from_raw_parts_mut(out.wrapping_add(line * f * f * w), f * f * w))
            };
            let (first, others) = to.split_at_mut(f * w);
            repeat(from, f, first);
            others.chunks_exact_mut(f * w).for_each(|line| line.copy_from_slice(first));
        }
    }
}

/// Pairs of `x [b, t, h, d]` turned by angles.
#[derive(Debug)]
pub(crate) struct Rope {
    pub(crate) sizes: [usize; 4],
    /// Rows of the tables, `[rows, d / 2]`: `t`, or `b t`.
    pub(crate) rows: usize,
    pub(crate) layout: RopeLayout,
}

impl HostOp for Rope {
    fn operands(&self) -> Vec<Operand> {
        let [b, t, h, d] = self.sizes;
        let table = (DType::F32, [self.rows, d / 2]);
        vec![(DType::F32, [b * t * h, d]), table, table]
    }

    fn elements(&self) -> usize {
        self.sizes.iter().product()
    }

    fn work(&self) -> usize {
        self.elements() * 8
    }

    unsafe fn compute(&self, out: *mut f32, operands: &[*const u8], part: usize, parts: usize) {
        let &[x, cos, sin] = operands else { return };
        let [b, t, h, d] = self.sizes;
        let half = d / 2;
        for token in share(b * t, part, parts) {
            let table = |p: *const u8| p.cast::<f32>().wrapping_add(token % self.rows * half);
            // SAFETY: the rows of the tables exist.
            let (cos, sin) = unsafe {
                (std::slice::from_raw_parts(table(cos), half), std::slice::from_raw_parts(table(sin), half))
            };
            for head in token * h..(token + 1) * h {
                // SAFETY: the head exists, and is this thread's in the result.
                let (x, y) = unsafe {
                    let x = std::slice::from_raw_parts(x.cast::<f32>().wrapping_add(head * d), d);
                    (x, std::slice::from_raw_parts_mut(out.wrapping_add(head * d), d))
                };
                match self.layout {
                    RopeLayout::Interleaved => {
                        for ((x, y), (c, s)) in
                            x.chunks_exact(2).zip(y.chunks_exact_mut(2)).zip(cos.iter().zip(sin))
                        {
                            y[0] = x[0] * c - x[1] * s;
                            y[1] = x[0] * s + x[1] * c;
                        }
                    }
                    RopeLayout::Halves => {
                        let ((p, q), (u, v)) = (x.split_at(half), y.split_at_mut(half));
                        for i in 0..half {
                            u[i] = p[i] * cos[i] - q[i] * sin[i];
                            v[i] = p[i] * sin[i] + q[i] * cos[i];
                        }
                    }
                }
            }
        }
    }
}

/// Sines and cosines of `t [b]` at `dim / 2` frequencies.
#[derive(Debug)]
pub(crate) struct Timesteps {
    pub(crate) count: usize,
    pub(crate) dim: usize,
    pub(crate) max_period: f32,
}

impl HostOp for Timesteps {
    fn operands(&self) -> Vec<Operand> {
        vec![(DType::F32, [1, self.count])]
    }

    fn elements(&self) -> usize {
        self.count * self.dim
    }

    unsafe fn compute(&self, out: *mut f32, operands: &[*const u8], part: usize, parts: usize) {
        let &[t] = operands else { return };
        let half = self.dim / 2;
        // The exponent in f32, as all reference implementations have it: angles are up to 30,000 times as far off.
        let log = -f64::from(self.max_period).ln() as f32;
        for i in share(self.count, part, parts) {
            for j in 0..half {
                let frequency = f64::from(log * j as f32 / half as f32).exp() as f32;
                // SAFETY: the timestep and its row exist.
                unsafe {
                    let angle = f64::from(*t.cast::<f32>().wrapping_add(i) * frequency);
                    let row = out.wrapping_add(i * self.dim);
                    *row.wrapping_add(j) = angle.cos() as f32;
                    *row.wrapping_add(half + j) = angle.sin() as f32;
                }
            }
        }
    }
}

/// Rows of a table `[rows, width]` of any type that can be read.
#[derive(Debug)]
pub(crate) struct Lookup {
    pub(crate) isa: &'static Isa,
    pub(crate) dtype: DType,
    pub(crate) rows: usize,
    pub(crate) width: usize,
    pub(crate) count: usize,
}

impl HostOp for Lookup {
    fn operands(&self) -> Vec<Operand> {
        vec![(self.dtype, [self.rows, self.width]), (DType::I32, [1, self.count])]
    }

    fn elements(&self) -> usize {
        self.count * self.width
    }

    unsafe fn compute(&self, out: *mut f32, operands: &[*const u8], part: usize, parts: usize) {
        let &[table, ids] = operands else { return };
        let table = Matrix::new(self.dtype, table, self.width);
        for i in share(self.count, part, parts) {
            // SAFETY: the id exists; ids outside the table, which are refused before, do not reach beyond it.
            let id = unsafe { *ids.cast::<i32>().wrapping_add(i) };
            let row = usize::try_from(id).unwrap_or(0).min(self.rows - 1);
            for from in (0..self.width).step_by(DEPTH) {
                let terms = from..(from + DEPTH).min(self.width);
                // SAFETY: the row has the terms, and its place in the result is this thread's.
                unsafe { table.read_row(self.isa, row, terms, out.wrapping_add(i * self.width + from)) };
            }
        }
    }
}
