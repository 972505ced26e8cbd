//! Rows of images, made for a convolution of a band of them, and put where its result belongs.

use super::Norm;
use super::moves::repeat;
use super::scratch::share;
use crate::dtype::DType;
use crate::ffi::{HostOp, Operand};

/// `count` rows from row `first` on of images `[planes, h, w]`, of which each value may be repeated in both axes, or which
/// may be normalised: `[planes, count, w]`. Rows outside are 0.
#[derive(Debug)]
pub(crate) struct Rows {
    pub(crate) planes: usize,
    /// Rows and columns before values are repeated.
    pub(crate) image: [usize; 2],
    /// How often each value is repeated, in rows that are counted after that.
    pub(crate) factor: usize,
    pub(crate) first: isize,
    pub(crate) count: usize,
    /// Reads its [`Moments`](super::Moments), and its vectors. A channel is a plane.
    pub(crate) norm: Option<Norm>,
}

impl Rows {
    /// The rows that exist.
    fn inside(&self) -> [usize; 2] {
        let end = self.image[0] * self.factor;
        [self.first, self.first + self.count as isize].map(|i| usize::try_from(i).unwrap_or(0).min(end))
    }
}

impl HostOp for Rows {
    fn operands(&self) -> Vec<Operand> {
        let mut all = vec![(DType::F32, [self.planes * self.image[0], self.image[1]])];
        if let Some(norm) = &self.norm {
            all.push((DType::F32, [norm.rows, 2]));
            all.extend(std::iter::repeat_n((DType::F32, [1, norm.all_channels]), norm.vectors));
        }
        all
    }

    fn elements(&self) -> usize {
        self.planes * self.count * self.image[1] * self.factor
    }

    fn bytes(&self) -> usize {
        let [from, until] = self.inside();
        let read = (until - from).div_ceil(self.factor) * self.image[1] * self.planes;
        4 * (read + self.elements())
    }

    fn work(&self) -> usize {
        self.elements() * self.norm.as_ref().map_or(4, |n| 16 + 4 * n.then.len())
    }

    unsafe fn compute(&self, out: *mut f32, operands: &[*const u8], part: usize, parts: usize) {
        let &[x, ref others @ ..] = operands else { return };
        let ([h, w], [from, until]) = (self.image, self.inside());
        let width = w * self.factor;
        let before = from.saturating_add_signed(-self.first).min(self.count) * width;
        for plane in share(self.planes, part, parts) {
            let source = x.cast::<f32>().wrapping_add(plane * h * w);
            let to = out.wrapping_add(plane * self.count * width);
            let len = (until - from) * width;
            // SAFETY: the rows exist, and the plane of the result is this thread's.
            unsafe {
                std::slice::from_raw_parts_mut(to, before).fill(0.0);
                let behind = before + len;
                std::slice::from_raw_parts_mut(to.wrapping_add(behind), self.count * width - behind).fill(0.0);
                let to = to.wrapping_add(before);
                match (&self.norm, others) {
                    (Some(norm), &[moments, ref vectors @ ..]) => {
                        let from = source.wrapping_add(from * w).cast_mut();
                        norm.channel(plane, moments.cast(), vectors, [from, to], len);
                    }
                    _ if self.factor == 1 => {
                        std::ptr::copy_nonoverlapping(source.wrapping_add(from * w), to, len);
                    }
                    _ => {
                        for (i, row) in (from..until).enumerate() {
                            let line = std::slice::from_raw_parts(source.wrapping_add(row / self.factor * w), w);
                            let to = std::slice::from_raw_parts_mut(to.wrapping_add(i * width), width);
                            repeat(line, self.factor, to);
                        }
                    }
                }
            }
        }
    }
}

/// Runs `[planes, run]` put `step` apart.
#[derive(Debug)]
pub(crate) struct Put {
    pub(crate) planes: usize,
    pub(crate) run: usize,
    pub(crate) step: usize,
}

impl HostOp for Put {
    fn operands(&self) -> Vec<Operand> {
        vec![(DType::F32, [self.planes, self.run])]
    }

    fn elements(&self) -> usize {
        self.planes * self.run
    }

    fn reach(&self) -> usize {
        self.planes.saturating_sub(1) * self.step + self.run
    }

    fn work(&self) -> usize {
        self.elements() * 4
    }

    unsafe fn compute(&self, out: *mut f32, operands: &[*const u8], part: usize, parts: usize) {
        let &[x] = operands else { return };
        for plane in share(self.planes, part, parts) {
            let (from, to) = (x.cast::<f32>().wrapping_add(plane * self.run), out.wrapping_add(plane * self.step));
            // SAFETY: the run exists in both, and is this thread's.
            unsafe { std::ptr::copy_nonoverlapping(from, to, self.run) };
        }
    }
}
