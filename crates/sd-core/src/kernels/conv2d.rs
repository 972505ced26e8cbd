//! Convolution of `x [b, c, h, w]` with a kernel `[n, c, kh, kw]`, plus the bias: `[b, n, oh, ow]`. It is the product of
//! the kernel, a row per output channel, with the patches, a column per position, which are packed straight from `x`.

use std::ops::Range;

use super::gemm::{self, Panel, Product};
use super::pack::Matrix;
use super::{Isa, MAX_COLUMNS, Winograd};
use crate::dtype::DType;
use crate::ffi::{HostOp, Operand};

/// Sizes of a convolution; steps are the same in both axes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Geometry {
    pub(crate) batch: usize,
    pub(crate) channels: usize,
    /// Rows and columns of an image.
    pub(crate) image: [usize; 2],
    /// Rows and columns of a result.
    pub(crate) out: [usize; 2],
    /// Output channels.
    pub(crate) n: usize,
    /// Rows and columns of the kernel.
    pub(crate) kernel: [usize; 2],
    pub(crate) stride: usize,
    /// Rows above and below, and columns left and right, that are 0.
    pub(crate) padding: [usize; 2],
    pub(crate) dilation: usize,
}

impl Geometry {
    fn taps(&self) -> usize {
        self.kernel[0] * self.kernel[1]
    }

    fn depth(&self) -> usize {
        self.channels * self.taps()
    }

    fn plane(&self) -> usize {
        self.image[0] * self.image[1]
    }

    /// Whether a result is as large as an image and each of its rows sees as many rows above as below.
    fn keeps_size(&self) -> bool {
        let centred = |i: usize| 2 * self.padding[i] == (self.kernel[i] - 1) * self.dilation;
        self.stride == 1 && self.out == self.image && centred(0)
    }

    /// Of a convolution that keeps sizes, `rows` of the result from images with the rows around them.
    fn band(&self, rows: usize) -> Geometry {
        let image = [rows + 2 * self.padding[0], self.image[1]];
        Geometry { image, out: [rows, self.out[1]], padding: [0, self.padding[1]], ..*self }
    }

    pub(super) fn positions(&self) -> usize {
        self.out[0] * self.out[1]
    }
}

/// A convolution with how the kernel is stored.
#[derive(Clone, Debug)]
pub(crate) struct Conv2d {
    isa: &'static Isa,
    g: Geometry,
    dtype: DType,
    bias: bool,
}

impl Conv2d {
    /// `None` for images whose positions take more than 31 bits, and where types or sizes are not what kernels take.
    /// `bias` says whether there is one, `[n]` f32.
    pub(crate) fn new(isa: &'static Isa, g: Geometry, dtype: DType, bias: bool) -> Option<Conv2d> {
        let span = |i: usize| g.dilation.checked_mul(g.kernel[i].checked_sub(1)?)?.checked_add(1);
        let fits = |i: usize| {
            let reach = g.out[i].checked_sub(1)?.checked_mul(g.stride)?.checked_add(span(i)?)?;
            Some(reach <= g.padding[i].checked_mul(2)?.checked_add(g.image[i])?)
        };
        let small = g.image[0].checked_mul(g.image[1]).is_some_and(|n| i32::try_from(n).is_ok());
        let positions = g.out[0].checked_mul(g.out[1]).is_some_and(|n| i32::try_from(n).is_ok());
        let sound = small && positions && fits(0)? && fits(1)? && super::can_read(dtype) && dtype.block() == 1;
        sound.then_some(Conv2d { isa, g, dtype, bias })
    }
}

/// A convolution, computed one way or the other.
#[derive(Clone, Debug)]
pub(crate) enum Conv {
    Direct(Conv2d),
    Tiles(Winograd),
}

impl Conv {
    pub(crate) fn geometry(&self) -> &Geometry {
        match self {
            Conv::Direct(c) => &c.g,
            Conv::Tiles(c) => &c.g,
        }
    }

    /// Whether [`Conv::band`] gives parts of it.
    pub(crate) fn has_bands(&self) -> bool {
        self.geometry().keeps_size()
    }

    /// What computes `rows` of the result, the first of which is even, from images of those rows and the
    /// padding's around them. Each element is the same as that of the whole.
    pub(crate) fn band(&self, rows: usize) -> Box<dyn HostOp> {
        match self {
            Conv::Direct(c) => Box::new(Conv2d { g: c.g.band(rows), ..*c }),
            Conv::Tiles(c) => Box::new(Winograd { g: c.g.band(rows), ..*c }),
        }
    }

    pub(crate) fn whole(self) -> Box<dyn HostOp> {
        match self {
            Conv::Direct(c) => Box::new(c),
            Conv::Tiles(c) => Box::new(c),
        }
    }
}

impl HostOp for Conv2d {
    fn operands(&self) -> Vec<Operand> {
        let g = &self.g;
        let mut all = vec![(DType::F32, [g.batch * g.channels, g.plane()]), (self.dtype, [g.n, g.depth()])];
        if self.bias {
            all.push((DType::F32, [1, g.n]));
        }
        all
    }

    fn elements(&self) -> usize {
        self.g.batch * self.g.n * self.g.positions()
    }

    fn work(&self) -> usize {
        2 * self.elements() * self.g.depth()
    }

    fn operations(&self) -> usize {
        self.work()
    }

    unsafe fn compute(&self, out: *mut f32, operands: &[*const u8], part: usize, parts: usize) {
        let &[x, kernel, ref bias @ ..] = operands else { return };
        let p = Factors {
            g: &self.g,
            x: x.cast(),
            kernel: Matrix::new(self.dtype, kernel, self.g.depth()),
            bias: bias.first().map(|b| b.cast()),
            out,
        };
        // SAFETY: the operands are as long as `operands` says and the result as `elements`.
        unsafe { gemm::compute(self.isa, &p, part, parts) }
    }
}

struct Factors<'a> {
    g: &'a Geometry,
    x: *const f32,
    kernel: Matrix,
    bias: Option<*const f32>,
    out: *mut f32,
}

impl Factors<'_> {
    /// The image of a panel and the panel's first position in it: no panel spans images.
    fn place(&self, isa: &Isa, panel: usize) -> (usize, usize) {
        let each = self.g.positions().div_ceil(isa.columns);
        (panel / each, panel % each * isa.columns)
    }
}

impl Product for Factors<'_> {
    fn rows(&self) -> usize {
        self.g.n
    }

    fn depth(&self) -> usize {
        self.g.depth()
    }

    fn panels(&self, isa: &Isa) -> usize {
        self.g.batch * self.g.positions().div_ceil(isa.columns)
    }

    fn row_bias(&self) -> Option<*const f32> {
        self.bias
    }

    fn panel(&self, isa: &Isa, panel: usize) -> Panel {
        let (image, first) = self.place(isa, panel);
        let positions = self.g.positions();
        Panel {
            c: self.out.wrapping_add(image * self.g.n * positions + first),
            stride: positions,
            columns: isa.columns.min(positions - first),
            bias: None,
        }
    }

    unsafe fn pack_rows(&self, isa: &Isa, rows: Range<usize>, terms: Range<usize>, to: *mut f32, room: *mut f32) {
        let width = rows.len();
        // SAFETY: as the caller promises.
        unsafe { self.kernel.pack(isa, rows, width, terms, to, room) }
    }

    unsafe fn pack_columns(&self, isa: &Isa, panel: usize, terms: Range<usize>, to: *mut f32, _: *mut f32) {
        let g = self.g;
        let (image, first) = self.place(isa, panel);
        let count = isa.columns.min(g.positions() - first);
        // Of each position, the row and column that the kernel's first element sees.
        let mut seen = [[0isize; 2]; MAX_COLUMNS];
        for (i, at) in seen.iter_mut().enumerate().take(count) {
            let position = first + i;
            let step = |i: usize, axis: usize| (i * g.stride) as isize - g.padding[axis] as isize;
            *at = [step(position / g.out[1], 0), step(position % g.out[1], 1)];
        }
        let taps = g.taps();
        let images = self.x.wrapping_add(image * g.channels * g.plane());
        for tap in 0..taps {
            // Term `channel * taps + tap` for each channel of which it is among `terms`.
            let channel = terms.start.saturating_sub(tap).div_ceil(taps);
            let channels = terms.end.saturating_sub(tap).div_ceil(taps).saturating_sub(channel);
            if channels == 0 {
                continue;
            }
            let dilated = [tap / g.kernel[1], tap % g.kernel[1]].map(|i| (i * g.dilation) as isize);
            let mut index = [-1i32; MAX_COLUMNS];
            for (index, at) in index.iter_mut().zip(&seen).take(count) {
                let [row, column] = [at[0] + dilated[0], at[1] + dilated[1]];
                let inside = |i: isize, n: usize| i >= 0 && (i as usize) < n;
                if inside(row, g.image[0]) && inside(column, g.image[1]) {
                    *index = row as i32 * g.image[1] as i32 + column as i32;
                }
            }
            let from = images.wrapping_add(channel * g.plane());
            let to = to.wrapping_add((channel * taps + tap - terms.start) * isa.columns);
            // SAFETY: indices are positions of an image; the channels exist, and `to` has room for their terms.
            unsafe {
                (isa.gather)(&index[..isa.columns], from, g.plane(), channels, to, taps * isa.columns);
            }
        }
        // SAFETY: the terms are there, and `to` has room for their words.
        unsafe { gemm::narrow(isa, to, terms.len(), to) }
    }
}
