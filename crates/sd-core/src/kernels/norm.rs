//! Normalisations and softmax, by rows.

use super::scratch::share;
use super::vector::Vector;
use super::{Code, Isa};
use crate::dtype::DType;
use crate::ffi::{HostOp, Operand};
use crate::graph::Binary;

/// Elements that are summed as f32, and that all steps are applied to before the next.
const PIECE: usize = 1024;

/// Rows of `channels * positions` elements normalised, each channel times its weight plus its bias, then changed further.
#[derive(Clone, Debug)]
pub(crate) struct Norm {
    pub(crate) isa: &'static Isa,
    pub(crate) rows: usize,
    /// Channels of a row.
    pub(crate) channels: usize,
    /// Neighbours that share a channel.
    pub(crate) positions: usize,
    /// Channels of all rows: those of row `i` begin at `i * channels`, modulo this.
    pub(crate) all_channels: usize,
    /// Whether the mean is subtracted.
    pub(crate) centred: bool,
    pub(crate) eps: f32,
    /// Weight and bias, each `[all_channels]` f32: none, the first or both.
    pub(crate) vectors: usize,
    /// Steps that read no operand.
    pub(crate) then: Vec<Code>,
}

impl HostOp for Norm {
    fn operands(&self) -> Vec<Operand> {
        let mut all = vec![(DType::F32, [self.rows, self.channels * self.positions])];
        all.extend(std::iter::repeat_n((DType::F32, [1, self.all_channels]), self.vectors));
        all
    }

    fn elements(&self) -> usize {
        self.rows * self.channels * self.positions
    }

    fn work(&self) -> usize {
        self.elements() * (16 + 4 * self.then.len())
    }

    unsafe fn compute(&self, out: *mut f32, operands: &[*const u8], part: usize, parts: usize) {
        let &[x, ref vectors @ ..] = operands else { return };
        let (x, len) = (x.cast::<f32>(), self.channels * self.positions);
        for row in share(self.rows, part, parts) {
            let (from, to) = (x.wrapping_add(row * len), out.wrapping_add(row * len));
            // SAFETY: the row has `len` elements.
            let moments = unsafe { self.moments(from) };
            let first_channel = row * self.channels % self.all_channels;
            // Pieces of one channel, or of many where a channel is one element.
            let (run, runs) = if self.positions == 1 { (len, 1) } else { (self.positions, self.channels) };
            for channel in 0..runs {
                for i in (0..run).step_by(PIECE) {
                    let (n, at) = (PIECE.min(run - i), channel * run + i);
                    let (c, step) =
                        if self.positions == 1 { (first_channel + i, 1) } else { (first_channel + channel, 0) };
                    // SAFETY: rows and vectors have the elements, and this row is this thread's.
                    unsafe {
                        self.apply(
                            moments,
                            [from.wrapping_add(at).cast_mut(), to.wrapping_add(at)],
                            n,
                            vectors,
                            [c, step],
                        )
                    };
                }
            }
        }
    }
}

impl Norm {
    /// What is subtracted from a row at `from`, and what it is multiplied by then.
    ///
    /// # Safety
    /// The machine has the instruction set, and the row exists.
    unsafe fn moments(&self, from: *const f32) -> [f32; 2] {
        let len = self.channels * self.positions;
        let total = |less: f32| {
            let mut sums = [0.0f64; 2];
            for i in (0..len).step_by(PIECE) {
                // SAFETY: the row has `len` elements.
                let [a, b] = unsafe { (self.isa.deviation)(from.wrapping_add(i), PIECE.min(len - i), less) };
                sums = [sums[0] + a, sums[1] + b];
            }
            sums.map(|s| s / len as f64)
        };
        let mean = if self.centred { total(0.0)[0] as f32 } else { 0.0 };
        let [off, square] = total(mean);
        // The mean as f32 is a little off.
        let variance = if self.centred { square - off * off } else { square };
        [mean, (1.0 / (variance + f64::from(self.eps)).sqrt()) as f32]
    }

    /// What becomes of `n` elements at `from`, at most [`PIECE`], where channels of the vectors begin at the first of
    /// `channel`, and are as far apart as the second says.
    ///
    /// # Safety
    /// The machine has the instruction set, and the pointers are valid for that; `to` may be `from`.
    unsafe fn apply(
        &self,
        [mean, factor]: [f32; 2],
        [from, to]: [*mut f32; 2],
        n: usize,
        vectors: &[*const u8],
        [channel, step]: [usize; 2],
    ) {
        let apply = |code: Code, by: *const f32, step: usize| {
            // SAFETY: as the caller promises.
            unsafe { (self.isa.apply)(code, n, to, by, step) }
        };
        if from != to {
            apply(Code::Load, from, 1);
        }
        apply(Code::Centre { mean, factor }, std::ptr::null(), 0);
        for (&vector, f) in vectors.iter().zip([Binary::Mul, Binary::Add]) {
            apply(Code::With(f), vector.cast::<f32>().wrapping_add(channel), step);
        }
        for &code in &self.then {
            apply(code, std::ptr::null(), 0);
        }
    }

    /// As [`Norm::compute`], of `len` neighbours at `from` that have the channel `plane`, counted through all rows.
    ///
    /// # Safety
    /// The machine has the instruction set; `moments` are those of [`Moments`], and the pointers are valid for that.
    pub(super) unsafe fn channel(
        &self,
        plane: usize,
        moments: *const f32,
        vectors: &[*const u8],
        [from, to]: [*mut f32; 2],
        len: usize,
    ) {
        let row = plane / self.channels;
        for i in (0..len).step_by(PIECE) {
            let places = [from, to].map(|p| p.wrapping_add(i));
            // SAFETY: as the caller promises.
            unsafe {
                let moments = [*moments.wrapping_add(2 * row), *moments.wrapping_add(2 * row + 1)];
                self.apply(moments, places, PIECE.min(len - i), vectors, [plane % self.all_channels, 0]);
            }
        }
    }
}

/// Of each row of a norm, what is subtracted from it and what it is multiplied by then: `[rows, 2]`.
#[derive(Debug)]
pub(crate) struct Moments(pub(crate) Norm);

impl HostOp for Moments {
    fn operands(&self) -> Vec<Operand> {
        vec![(DType::F32, [self.0.rows, self.0.channels * self.0.positions])]
    }

    fn elements(&self) -> usize {
        2 * self.0.rows
    }

    fn work(&self) -> usize {
        self.0.elements() * 8
    }

    unsafe fn compute(&self, out: *mut f32, operands: &[*const u8], part: usize, parts: usize) {
        let &[x] = operands else { return };
        let len = self.0.channels * self.0.positions;
        for row in share(self.0.rows, part, parts) {
            // SAFETY: the row exists, and its moments are this thread's.
            unsafe {
                let [mean, factor] = self.0.moments(x.cast::<f32>().wrapping_add(row * len));
                *out.wrapping_add(2 * row) = mean;
                *out.wrapping_add(2 * row + 1) = factor;
            }
        }
    }
}

/// # Safety
/// The machine has the instruction set of `V`; `from` is valid for `len` reads.
#[inline(always)]
pub(super) unsafe fn deviation<V: Vector>(from: *const f32, len: usize, less: f32) -> [f64; 2] {
    const CHAINS: usize = 2;
    // SAFETY: as the caller promises; masked lanes are below `len`.
    unsafe {
        let less_each = V::splat(less);
        let mut sums = [[V::splat(0.0); 2]; CHAINS];
        let whole = len - len % (CHAINS * V::LANES);
        for i in (0..whole).step_by(CHAINS * V::LANES) {
            for (chain, [sum, squares]) in sums.iter_mut().enumerate() {
                let x = V::load(from.wrapping_add(i + chain * V::LANES)).sub(less_each);
                *sum = sum.add(x);
                *squares = x.mul_add(x, *squares);
            }
        }
        let [[a, b], [c, d]] = sums;
        let (mut sum, mut squares) = (f64::from(a.add(c).sum()), f64::from(b.add(d).sum()));
        for i in whole..len {
            let x = f64::from(*from.wrapping_add(i)) - f64::from(less);
            (sum, squares) = (sum + x, squares + x * x);
        }
        [sum, squares]
    }
}

/// Softmax of rows.
#[derive(Debug)]
pub(crate) struct Softmax {
    pub(crate) isa: &'static Isa,
    pub(crate) rows: usize,
    pub(crate) width: usize,
}

impl HostOp for Softmax {
    fn operands(&self) -> Vec<Operand> {
        vec![(DType::F32, [self.rows, self.width])]
    }

    fn elements(&self) -> usize {
        self.rows * self.width
    }

    fn work(&self) -> usize {
        self.elements() * 24
    }

    unsafe fn compute(&self, out: *mut f32, operands: &[*const u8], part: usize, parts: usize) {
        let &[x] = operands else { return };
        for row in share(self.rows, part, parts) {
            let (from, to) = (x.cast::<f32>().wrapping_add(row * self.width), out.wrapping_add(row * self.width));
            // SAFETY: the row exists, and is this thread's.
            unsafe { (self.isa.softmax)(from, self.width, to) };
        }
    }
}

/// # Safety
/// The machine has the instruction set of `V`; `from` is valid for `len` reads and `to` for as many writes.
#[inline(always)]
pub(super) unsafe fn softmax<V: Vector>(from: *const f32, len: usize, to: *mut f32) {
    // SAFETY: as the caller promises; masked lanes are below `len`.
    unsafe {
        let mut top = f32::NEG_INFINITY;
        for i in 0..len {
            top = top.max(*from.wrapping_add(i));
        }
        let top = V::splat(top);
        let mut total = V::splat(0.0);
        for i in (0..len).step_by(V::LANES) {
            let mask = V::first(len - i);
            let e = V::load_some(from.wrapping_add(i), mask).sub(top).exp();
            e.store_some(to.wrapping_add(i), mask);
            total = total.add(V::splat(0.0).replaced(e, mask));
        }
        let total = V::splat(total.sum());
        for i in (0..len).step_by(V::LANES) {
            let (to, mask) = (to.wrapping_add(i), V::first(len - i));
            V::load_some(to, mask).div(total).store_some(to, mask);
        }
    }
}
