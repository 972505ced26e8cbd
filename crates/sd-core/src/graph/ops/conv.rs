//! Convolutions.

use crate::error::Result;
use crate::graph::{Graph, Op, Var};
use crate::scope::Conv2d;
use crate::shape::Shape;

/// How a kernel moves over its input.
#[derive(Clone, Copy, Debug)]
pub struct Conv2dOptions {
    /// Step in both axes.
    pub stride: usize,
    /// Zeros on each side of both axes.
    pub padding: usize,
    /// Distance between kernel elements in both axes.
    pub dilation: usize,
}

impl Default for Conv2dOptions {
    fn default() -> Self {
        Conv2dOptions { stride: 1, padding: 0, dilation: 1 }
    }
}

impl Conv2dOptions {
    /// Step 1, `padding` zeros on each side.
    pub fn padded(padding: usize) -> Self {
        Conv2dOptions { padding, ..Self::default() }
    }

    /// The length that remains of an axis, if the kernel fits.
    fn out(&self, len: usize, kernel: usize) -> Option<usize> {
        let span = self.dilation.checked_mul(kernel.checked_sub(1)?)?.checked_add(1)?;
        let len = self.padding.checked_mul(2)?.checked_add(len)?;
        Some(len.checked_sub(span)?.checked_div(self.stride)? + 1)
    }
}

impl Graph {
    /// `x [b, c, h, w]` with kernel `[n, c, kh, kw]` and bias `[n]` gives `[b, n, h', w']`.
    ///
    /// # Errors
    /// `x` is not `[b, c, h, w]` with the kernel's `c`, or the kernel does not fit into the padded image.
    pub fn conv2d(&self, w: &Conv2d, x: Var, options: Conv2dOptions) -> Result<Var> {
        self.want_f32("conv2d", &[x])?;
        let [n, c, kh, kw] = w.dims();
        let Some([b, xc, h, wd]) = self.shape(x).array() else {
            return Err(self.bad_op("conv2d", &[x], "input should be [b, c, h, w]"));
        };
        if xc != c {
            return Err(w.weight().mismatch(&self.describe(x), &format!("[*, {xc}, *, *]")));
        }
        let (Some(oh), Some(ow)) = (options.out(h, kh), options.out(wd, kw)) else {
            return Err(self.bad_op(
                "conv2d",
                &[x],
                format_args!("kernel {} [{n}, {c}, {kh}, {kw}] does not fit with {options:?}", w.path()),
            ));
        };
        let mut inputs = vec![x, self.weight(w.weight())];
        inputs.extend(w.bias().map(|b| self.weight(b)));
        let Conv2dOptions { stride, padding, dilation } = options;
        let op = Op::Conv2d { stride, padding, dilation, wide: w.is_wide() };
        let y = self.push(op, &inputs, Shape::new(&[b, n, oh, ow])?);
        self.label(y, w.path());
        Ok(y)
    }

    /// `x [b, c, h, w]` with every value repeated gives `[b, c, factor h, factor w]`.
    ///
    /// # Errors
    /// `x` is not an image or `factor` is 0.
    pub fn upsample_nearest(&self, x: Var, factor: usize) -> Result<Var> {
        self.want_f32("upsample_nearest", &[x])?;
        let [b, c, h, w] = self.dims(x)?;
        let big = |n: usize| n.checked_mul(factor).filter(|_| factor > 0);
        let (Some(h), Some(w)) = (big(h), big(w)) else {
            return Err(self.bad_op("upsample_nearest", &[x], format_args!("factor {factor}")));
        };
        Ok(self.push(Op::UpsampleNearest { factor }, &[x], Shape::new(&[b, c, h, w])?))
    }

    /// `x [.., h, w]` with zeros: `rows` above and below, `columns` left and right.
    ///
    /// # Errors
    /// `x` has fewer than two axes.
    pub fn pad2d(&self, x: Var, rows: [usize; 2], columns: [usize; 2]) -> Result<Var> {
        self.want_f32("pad2d", &[x])?;
        let s = self.shape(x);
        let Some(r) = s.rank().checked_sub(2) else {
            return Err(self.bad_op("pad2d", &[x], "input should be [.., h, w]"));
        };
        let h = s.dim(r).saturating_add(rows[0]).saturating_add(rows[1]);
        let w = s.last().saturating_add(columns[0]).saturating_add(columns[1]);
        Ok(self.push(Op::Pad2d { rows, columns }, &[x], s.with_last(w)?.with_dim(r, h)?))
    }
}
