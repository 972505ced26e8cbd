//! Ops that move values without changing them.

use crate::error::{Error, Result};
use crate::graph::{Graph, Op, Var};
use crate::shape::{MAX_RANK, Shape};

impl Graph {
    /// The same elements in another shape.
    ///
    /// # Errors
    /// The number of elements differs.
    pub fn reshape(&self, x: Var, dims: &[usize]) -> Result<Var> {
        self.want_f32("reshape", &[x])?;
        let shape = Shape::new(dims)?;
        if shape.elements() != self.shape(x).elements() {
            return Err(self.bad_op("reshape", &[x], format_args!("{shape} has another number of elements")));
        }
        if shape == self.shape(x) {
            return Ok(x);
        }
        Ok(self.push(Op::Reshape, &[x], shape))
    }

    /// Axis `i` of the result is axis `axes[i]` of `x`.
    ///
    /// # Errors
    /// `axes` is not an order of the axes of `x`.
    pub fn permute(&self, x: Var, axes: &[usize]) -> Result<Var> {
        self.want_f32("permute", &[x])?;
        let s = self.shape(x);
        let mut seen = [false; MAX_RANK];
        let mut order = [0u8; MAX_RANK];
        let mut dims = Vec::with_capacity(axes.len());
        for (i, &a) in axes.iter().enumerate() {
            if axes.len() != s.rank() || a >= s.rank() || seen[a] {
                return Err(self.bad_op("permute", &[x], format_args!("{axes:?} is not an order of its axes")));
            }
            seen[a] = true;
            order[i] = a as u8;
            dims.push(s.dim(a));
        }
        Ok(self.push(Op::Permute { axes: order }, &[x], Shape::new(&dims)?))
    }

    /// An image `[b, c, h, w]` as tokens `[b, h w, c]`.
    ///
    /// # Errors
    /// `x` is not an image.
    pub fn to_tokens(&self, x: Var) -> Result<Var> {
        let [b, c, h, w] = self.dims(x)?;
        let x = self.reshape(x, &[b, c, h * w])?;
        self.permute(x, &[0, 2, 1])
    }

    /// Tokens `[b, h w, c]` as an image `[b, c, h, w]`.
    ///
    /// # Errors
    /// There are not `h w` tokens.
    pub fn to_image(&self, x: Var, h: usize, w: usize) -> Result<Var> {
        let [b, _, c] = self.dims(x)?;
        let x = self.permute(x, &[0, 2, 1])?;
        self.reshape(x, &[b, c, h, w])
    }

    /// `[b, t, h d]` as `[b, t, h, d]`.
    ///
    /// # Errors
    /// The width is not a multiple of `heads`.
    pub fn split_heads(&self, x: Var, heads: usize) -> Result<Var> {
        let [b, t, c] = self.dims(x)?;
        if heads == 0 || !c.is_multiple_of(heads) {
            return Err(self.bad_op("split_heads", &[x], format_args!("{c} is not {heads} equal heads")));
        }
        self.reshape(x, &[b, t, heads, c / heads])
    }

    /// `[b, t, h, d]` as `[b, t, h d]`.
    ///
    /// # Errors
    /// `x` does not have four axes.
    pub fn merge_heads(&self, x: Var) -> Result<Var> {
        let [b, t, h, d] = self.dims(x)?;
        self.reshape(x, &[b, t, h * d])
    }

    /// Values joined along `axis`.
    ///
    /// # Errors
    /// No values, or shapes that differ in another axis.
    pub fn concat(&self, parts: &[Var], axis: usize) -> Result<Var> {
        let Some(&first) = parts.first() else {
            return Err(Error::internal("concat of nothing"));
        };
        self.want_f32("concat", parts)?;
        let s = self.shape(first);
        let mut total = 0usize;
        for &p in parts {
            let ps = self.shape(p);
            let same = ps.rank() == s.rank() && axis < s.rank() && ps.with_dim(axis, s.dim(axis)).ok() == Some(s);
            if !same {
                return Err(self.bad_op("concat", parts, format_args!("shapes differ outside axis {axis}")));
            }
            total = total.saturating_add(ps.dim(axis));
        }
        if parts.len() == 1 {
            return Ok(first);
        }
        Ok(self.push(Op::Concat { axis }, parts, s.with_dim(axis, total)?))
    }

    /// `len` positions of `axis`, from `start`.
    ///
    /// # Errors
    /// The range reaches outside.
    pub fn slice(&self, x: Var, axis: usize, start: usize, len: usize) -> Result<Var> {
        self.want_f32("slice", &[x])?;
        let s = self.shape(x);
        let inside = axis < s.rank() && start.checked_add(len).is_some_and(|end| end <= s.dim(axis));
        if !inside {
            return Err(self.bad_op("slice", &[x], format_args!("{len} from {start} of axis {axis} is outside")));
        }
        if len == s.dim(axis) {
            return Ok(x);
        }
        Ok(self.push(Op::Slice { axis, start }, &[x], s.with_dim(axis, len)?))
    }

    /// `N` equal parts of the last axis.
    ///
    /// # Errors
    /// The last axis is not a multiple of `N`.
    pub fn chunk<const N: usize>(&self, x: Var) -> Result<[Var; N]> {
        let s = self.shape(x);
        let c = s.last();
        if N == 0 || s.rank() == 0 || !c.is_multiple_of(N) {
            return Err(self.bad_op("chunk", &[x], format_args!("{c} is not {N} equal parts")));
        }
        let mut parts = [x; N];
        for (i, p) in parts.iter_mut().enumerate() {
            *p = self.slice(x, s.rank() - 1, i * (c / N), c / N)?;
        }
        Ok(parts)
    }
}
