//! One builder per ggml operation. Each checks what ggml asserts, so that a bug here is an error and not an abort.

use ggml_sys as sys;

use super::context::{Context, Id, sized};
use super::types;
use crate::dtype::DType;
use crate::error::{Error, Result};

/// Elementwise functions of one operand.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Unary {
    Silu,
    GeluErf,
    Sigmoid,
    Tanh,
    Relu,
    Exp,
}

/// Elementwise functions of two operands; the second repeats.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Binary {
    Add,
    Sub,
    Mul,
    Div,
}

/// How an image is resized.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Interpolation {
    Nearest,
}

/// How a kernel moves: `[x, y]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Conv {
    pub(crate) stride: [usize; 2],
    pub(crate) padding: [usize; 2],
    pub(crate) dilation: [usize; 2],
}

/// `ggml_set` refuses offsets from here on, in bytes.
const MAX_SET_OFFSET: usize = 1 << 30;

fn int(n: usize) -> Result<i32> {
    i32::try_from(n).map_err(|_| Error::internal(format!("{n} is too large for a device")))
}

fn all(checks: &[bool], what: &str) -> Result<()> {
    if checks.iter().all(|&c| c) { Ok(()) } else { Err(Error::internal(format!("{what}: operands do not fit"))) }
}

impl Context {
    fn is_f32(&self, a: Id) -> Result<bool> {
        Ok(self.dtype(a)? == DType::F32)
    }

    fn dense_f32(&self, a: Id, what: &str) -> Result<()> {
        all(&[self.is_f32(a)?, self.is_contiguous(a)?], what)
    }

    /// `f(a)`, `a` contiguous f32.
    pub(crate) fn unary(&mut self, f: Unary, a: Id) -> Result<Id> {
        self.dense_f32(a, "unary")?;
        let op = match f {
            Unary::Silu => sys::GGML_UNARY_OP_SILU,
            Unary::GeluErf => sys::GGML_UNARY_OP_GELU_ERF,
            Unary::Sigmoid => sys::GGML_UNARY_OP_SIGMOID,
            Unary::Tanh => sys::GGML_UNARY_OP_TANH,
            Unary::Relu => sys::GGML_UNARY_OP_RELU,
            Unary::Exp => sys::GGML_UNARY_OP_EXP,
        };
        let (pool, a) = (self.pool()?, self.raw(a)?);
        // SAFETY: the pool has room for one tensor, the operand is alive, contiguous and f32.
        let t = unsafe { sys::ggml_unary(pool, a, op) };
        self.adopt(t)
    }

    /// `cos a`, contiguous f32.
    pub(crate) fn cos(&mut self, a: Id) -> Result<Id> {
        self.dense_f32(a, "cos")?;
        let (pool, a) = (self.pool()?, self.raw(a)?);
        // SAFETY: as for `unary`.
        let t = unsafe { sys::ggml_cos(pool, a) };
        self.adopt(t)
    }

    /// `sin a`, contiguous f32.
    pub(crate) fn sin(&mut self, a: Id) -> Result<Id> {
        self.dense_f32(a, "sin")?;
        let (pool, a) = (self.pool()?, self.raw(a)?);
        // SAFETY: as for `unary`.
        let t = unsafe { sys::ggml_sin(pool, a) };
        self.adopt(t)
    }

    /// `f(a, b)`, both contiguous f32; each size of `b` is that of `a` or 1.
    pub(crate) fn binary(&mut self, f: Binary, a: Id, b: Id) -> Result<Id> {
        self.dense_f32(a, "binary")?;
        self.dense_f32(b, "binary")?;
        let (na, nb) = (self.ne(a)?, self.ne(b)?);
        all(&[na.iter().zip(nb).all(|(&a, b)| a == b || b == 1)], "binary")?;
        let (pool, a, b) = (self.pool()?, self.raw(a)?, self.raw(b)?);
        // SAFETY: the pool has room for one tensor; `b` repeats into `a`.
        let t = unsafe {
            match f {
                Binary::Add => sys::ggml_add(pool, a, b),
                Binary::Sub => sys::ggml_sub(pool, a, b),
                Binary::Mul => sys::ggml_mul(pool, a, b),
                Binary::Div => sys::ggml_div(pool, a, b),
            }
        };
        self.adopt(t)
    }

    /// `a * factor + offset`, contiguous f32.
    pub(crate) fn affine(&mut self, a: Id, factor: f32, offset: f32) -> Result<Id> {
        self.dense_f32(a, "affine")?;
        let (pool, a) = (self.pool()?, self.raw(a)?);
        // SAFETY: as for `unary`.
        let t = unsafe { sys::ggml_scale_bias(pool, a, factor, offset) };
        self.adopt(t)
    }

    /// `a` repeated to the sizes `ne`, contiguous f32.
    pub(crate) fn repeat(&mut self, a: Id, ne: [usize; 4]) -> Result<Id> {
        self.dense_f32(a, "repeat")?;
        all(&[self.ne(a)?.iter().zip(ne).all(|(&a, n)| n > 0 && (a == n || a == 1))], "repeat")?;
        sized(ne)?;
        let (pool, a) = (self.pool()?, self.raw(a)?);
        let [n0, n1, n2, n3] = ne.map(|n| n as i64);
        // SAFETY: the pool has room for one tensor and the sizes are multiples.
        let t = unsafe { sys::ggml_repeat_4d(pool, a, n0, n1, n2, n3) };
        self.adopt(t)
    }

    /// `w [k, n]` and `x [k, m, ..]` give `[n, m, ..]`; `x` is f32, or f16 with `w` f16. Sums are f32 when `precise`.
    pub(crate) fn mul_mat(&mut self, w: Id, x: Id, precise: bool) -> Result<Id> {
        let (nw, nx) = (self.ne(w)?, self.ne(x)?);
        let (dw, dx) = (self.dtype(w)?, self.dtype(x)?);
        let strides = self.nb(w)?;
        all(
            &[
                types::multiplies(dw),
                dx == DType::F32 || (dx == DType::F16 && dw == DType::F16),
                nw[0] == nx[0],
                nx[2].is_multiple_of(nw[2]),
                nx[3].is_multiple_of(nw[3]),
                strides[0] == dw.block_bytes(),
                strides[0] <= strides[1] || nw[1] == 1,
                self.nb(x)?[0] == dx.block_bytes(),
            ],
            "mul_mat",
        )?;
        sized([nw[1], nx[1], nx[2], nx[3]])?;
        let (pool, w, x) = (self.pool()?, self.raw(w)?, self.raw(x)?);
        // SAFETY: the pool has room for one tensor; inner sizes agree, outer sizes repeat, `w` is not transposed.
        let t = unsafe {
            let t = sys::ggml_mul_mat(pool, w, x);
            if precise {
                sys::ggml_prec_set_acc(t, sys::GGML_PREC_F32);
            }
            t
        };
        self.adopt(t)
    }

    /// Rows minus mean over deviation, contiguous f32.
    pub(crate) fn norm(&mut self, a: Id, eps: f32) -> Result<Id> {
        self.dense_f32(a, "norm")?;
        all(&[eps >= 0.0], "norm")?;
        let (pool, a) = (self.pool()?, self.raw(a)?);
        // SAFETY: as for `unary`.
        let t = unsafe { sys::ggml_norm(pool, a, eps) };
        self.adopt(t)
    }

    /// Rows over root mean square, contiguous f32.
    pub(crate) fn rms_norm(&mut self, a: Id, eps: f32) -> Result<Id> {
        self.dense_f32(a, "rms_norm")?;
        all(&[eps >= 0.0], "rms_norm")?;
        let (pool, a) = (self.pool()?, self.raw(a)?);
        // SAFETY: as for `unary`.
        let t = unsafe { sys::ggml_rms_norm(pool, a, eps) };
        self.adopt(t)
    }

    /// `a [w, h, c, b]` normalised over equal runs of channels, contiguous f32.
    pub(crate) fn group_norm(&mut self, a: Id, groups: usize, eps: f32) -> Result<Id> {
        self.dense_f32(a, "group_norm")?;
        let c = self.ne(a)?[2];
        all(&[eps >= 0.0, groups > 0 && c.is_multiple_of(groups)], "group_norm")?;
        let groups = int(groups)?;
        let (pool, a) = (self.pool()?, self.raw(a)?);
        // SAFETY: as for `unary`; the channels divide into the groups.
        let t = unsafe { sys::ggml_group_norm(pool, a, groups, eps) };
        self.adopt(t)
    }

    /// Softmax of each row of `a * scale + mask`, contiguous f32; `mask [n, m, 1 or .., 1 or ..]`.
    pub(crate) fn soft_max(&mut self, a: Id, mask: Option<Id>, scale: f32) -> Result<Id> {
        self.dense_f32(a, "soft_max")?;
        let mut raw_mask = std::ptr::null_mut();
        if let Some(m) = mask {
            self.dense_f32(m, "soft_max mask")?;
            let (na, nm) = (self.ne(a)?, self.ne(m)?);
            let repeats = (2..4).all(|i| nm[i] == na[i] || nm[i] == 1);
            all(&[nm[0] == na[0], nm[1] == na[1], repeats], "soft_max mask")?;
            raw_mask = self.raw(m)?;
        }
        let (pool, a) = (self.pool()?, self.raw(a)?);
        // SAFETY: as for `unary`; the mask repeats into `a`.
        let t = unsafe { sys::ggml_soft_max_ext(pool, a, raw_mask, scale, 0.0) };
        self.adopt(t)
    }

    /// Scores with `-inf` where the column is beyond row + `past`, contiguous f32.
    pub(crate) fn mask_future(&mut self, a: Id, past: usize) -> Result<Id> {
        self.dense_f32(a, "diag_mask_inf")?;
        let past = int(past)?;
        let (pool, a) = (self.pool()?, self.raw(a)?);
        // SAFETY: as for `unary`.
        let t = unsafe { sys::ggml_diag_mask_inf(pool, a, past) };
        self.adopt(t)
    }

    /// `softmax(scale q kᵀ) v` for `q [d, m, h, b]`, `k [d, n, h, b]`, `v [e, n, h, b]`, f32 with contiguous rows:
    /// `[e, h, m, b]`, in one operation whose memory does not grow with `n`.
    pub(crate) fn flash_attention(&mut self, q: Id, k: Id, v: Id, scale: f32) -> Result<Id> {
        let (nq, nk, nv) = (self.ne(q)?, self.ne(k)?, self.ne(v)?);
        let mut dense = true;
        for x in [q, k, v] {
            dense &= self.is_f32(x)? && self.nb(x)?[0] == 4;
        }
        all(&[dense, nq[0] == nk[0], nk[1] == nv[1], nq[2..] == nk[2..], nk[2..] == nv[2..]], "flash_attention")?;
        // ggml counts heads and rows in 32 bits here.
        int(nq[1].saturating_mul(nq[2]).saturating_mul(nq[3]))?;
        sized([nv[0], nq[2], nq[1], nq[3]])?;
        let (pool, q, k, v) = (self.pool()?, self.raw(q)?, self.raw(k)?, self.raw(v)?);
        // SAFETY: the pool has room for one tensor; the operands agree in width, length, heads and batch.
        let t = unsafe {
            let t = sys::ggml_flash_attn_ext(pool, q, k, v, std::ptr::null_mut(), scale, 0.0, 0.0);
            sys::ggml_prec_set_acc(t, sys::GGML_PREC_F32);
            t
        };
        self.adopt(t)
    }

    /// Rows of `table [c, n]` at `ids [m]` i32, each below `n`, give `[c, m]`.
    pub(crate) fn get_rows(&mut self, table: Id, ids: Id) -> Result<Id> {
        let (nt, ni) = (self.ne(table)?, self.ne(ids)?);
        all(
            &[
                self.dtype(ids)? == DType::I32,
                self.dtype(table)?.is_float(),
                nt[2] == 1 && nt[3] == 1,
                ni[1..] == [1, 1, 1],
                self.is_contiguous(table)?,
                self.is_contiguous(ids)?,
            ],
            "get_rows",
        )?;
        sized([nt[0], ni[0], 1, 1])?;
        let (pool, table, ids) = (self.pool()?, self.raw(table)?, self.raw(ids)?);
        // SAFETY: the pool has room for one tensor; both operands are matrices of the right types.
        let t = unsafe { sys::ggml_get_rows(pool, table, ids) };
        self.adopt(t)
    }

    /// `a` and `b` joined along axis `dim`, contiguous f32.
    pub(crate) fn concat(&mut self, a: Id, b: Id, dim: usize) -> Result<Id> {
        self.dense_f32(a, "concat")?;
        self.dense_f32(b, "concat")?;
        let (na, nb) = (self.ne(a)?, self.ne(b)?);
        all(&[dim < 4, (0..4).all(|i| i == dim || na[i] == nb[i])], "concat")?;
        let (pool, a, b) = (self.pool()?, self.raw(a)?, self.raw(b)?);
        // SAFETY: the pool has room for one tensor; sizes agree outside `dim`.
        let t = unsafe { sys::ggml_concat(pool, a, b, dim as i32) };
        self.adopt(t)
    }

    /// `part` written into `whole`, contiguous f32, at `offset` bytes with the strides of `whole`; shows `whole` after.
    pub(crate) fn set(&mut self, whole: Id, part: Id, offset: usize) -> Result<Id> {
        self.dense_f32(whole, "set")?;
        let (nw, np, strides) = (self.ne(whole)?, self.ne(part)?, self.nb(whole)?);
        let last = (0..4).map(|i| (np[i] - 1) * strides[i]).sum::<usize>() + offset + 4;
        all(
            &[
                self.is_f32(part)?,
                self.nb(part)?[0] == 4,
                np.iter().zip(nw).all(|(&p, w)| p <= w),
                last <= self.bytes(whole)?,
                offset.is_multiple_of(4),
                offset < MAX_SET_OFFSET,
            ],
            "set",
        )?;
        int(strides[3])?;
        let (pool, w, p) = (self.pool()?, self.raw(whole)?, self.raw(part)?);
        // SAFETY: the pool has room for one tensor and the part ends inside the whole; strides and offset fit ggml's i32 fields.
        let t = unsafe { sys::ggml_set_inplace(pool, w, p, strides[1], strides[2], strides[3], offset) };
        self.adopt(t)
    }

    /// The elements of `a` in order without gaps, copied.
    pub(crate) fn cont(&mut self, a: Id) -> Result<Id> {
        let (pool, a) = (self.pool()?, self.raw(a)?);
        // SAFETY: the pool has room for one tensor and the operand is alive.
        let t = unsafe { sys::ggml_cont(pool, a) };
        self.adopt(t)
    }

    /// `a`, contiguous, in other sizes.
    pub(crate) fn reshape(&mut self, a: Id, ne: [usize; 4]) -> Result<Id> {
        if self.ne(a)? == ne {
            return Ok(a);
        }
        let elements = |n: [usize; 4]| n.iter().try_fold(1usize, |p, &d| p.checked_mul(d));
        let whole_blocks = ne[0].is_multiple_of(self.dtype(a)?.block());
        all(&[self.is_contiguous(a)?, elements(ne) == elements(self.ne(a)?), whole_blocks], "reshape")?;
        let (pool, a) = (self.pool()?, self.raw(a)?);
        let [n0, n1, n2, n3] = ne.map(|n| n as i64);
        // SAFETY: the pool has room for one tensor; the operand is contiguous with as many elements.
        let t = unsafe { sys::ggml_reshape_4d(pool, a, n0, n1, n2, n3) };
        self.adopt(t)
    }

    /// Axis `i` of `a` becomes axis `to[i]`: a view.
    pub(crate) fn permute(&mut self, a: Id, to: [usize; 4]) -> Result<Id> {
        let mut sorted = to;
        sorted.sort_unstable();
        all(&[sorted == [0, 1, 2, 3], self.dtype(a)?.block() == 1], "permute")?;
        let (pool, a) = (self.pool()?, self.raw(a)?);
        let [t0, t1, t2, t3] = to.map(|t| t as i32);
        // SAFETY: the pool has room for one tensor; `to` is an order of the four axes.
        let t = unsafe { sys::ggml_permute(pool, a, t0, t1, t2, t3) };
        self.adopt(t)
    }

    /// Sizes `ne` of `a` from position `start` on, with the strides of `a`: a view.
    pub(crate) fn window(&mut self, a: Id, start: [usize; 4], ne: [usize; 4]) -> Result<Id> {
        let (na, nb) = (self.ne(a)?, self.nb(a)?);
        let inside = (0..4).all(|i| ne[i] > 0 && start[i].checked_add(ne[i]).is_some_and(|e| e <= na[i]));
        all(&[inside, self.dtype(a)?.block() == 1], "window")?;
        let offset = (0..4).map(|i| start[i] * nb[i]).sum();
        let (pool, a) = (self.pool()?, self.raw(a)?);
        let [n0, n1, n2, n3] = ne.map(|n| n as i64);
        // SAFETY: the pool has room for one tensor; the view ends inside `a`.
        let t = unsafe { sys::ggml_view_4d(pool, a, n0, n1, n2, n3, nb[1], nb[2], nb[3], offset) };
        self.adopt(t)
    }

    /// Patches of `x [w, h, c, b]` under a kernel `[kw, kh, c, n]`: `[c kh kw, ow, oh, b]`, of type `dtype`.
    pub(crate) fn im2col(&mut self, kernel: Id, x: Id, conv: Conv, dtype: DType) -> Result<Id> {
        let (nk, nx, strides) = (self.ne(kernel)?, self.ne(x)?, self.nb(x)?);
        let fits = (0..2).all(|i| {
            let span = conv.dilation[i].saturating_mul(nk[i] - 1).saturating_add(1);
            conv.stride[i] > 0
                && conv.dilation[i] > 0
                && conv.padding[i].saturating_mul(2).saturating_add(nx[i]) >= span
        });
        let dense_planes = strides[0] == 4 && strides[1] == 4 * nx[0];
        all(
            &[self.is_f32(x)?, dense_planes, nk[2] == nx[2], fits, matches!(dtype, DType::F32 | DType::F16)],
            "im2col",
        )?;
        let [s0, s1] = [int(conv.stride[0])?, int(conv.stride[1])?];
        let [p0, p1] = [int(conv.padding[0])?, int(conv.padding[1])?];
        let [d0, d1] = [int(conv.dilation[0])?, int(conv.dilation[1])?];
        let type_id = types::id(dtype)?;
        let out = |i: usize| {
            let span = conv.dilation[i] * (nk[i] - 1) + 1;
            (nx[i] + 2 * conv.padding[i] - span) / conv.stride[i] + 1
        };
        let patch = nk[0].saturating_mul(nk[1]).saturating_mul(nk[2]);
        sized([patch, out(0), out(1), nx[3]])?;
        let (pool, k, x) = (self.pool()?, self.raw(kernel)?, self.raw(x)?);
        // SAFETY: the pool has room for one tensor; channels agree and the kernel fits into the padded image.
        let t = unsafe { sys::ggml_im2col(pool, k, x, s0, s1, p0, p1, d0, d1, true, type_id) };
        self.adopt(t)
    }

    /// Zeros around the first two axes: `columns` before and after in axis 0, `rows` in axis 1; contiguous f32.
    pub(crate) fn pad(&mut self, a: Id, columns: [usize; 2], rows: [usize; 2]) -> Result<Id> {
        self.dense_f32(a, "pad")?;
        let [w, h, c, b] = self.ne(a)?;
        let wide = |n: usize, p: [usize; 2]| n.saturating_add(p[0]).saturating_add(p[1]);
        sized([wide(w, columns), wide(h, rows), c, b])?;
        let [l0, r0, l1, r1] = [int(columns[0])?, int(columns[1])?, int(rows[0])?, int(rows[1])?];
        let (pool, a) = (self.pool()?, self.raw(a)?);
        // SAFETY: as for `unary`.
        let t = unsafe { sys::ggml_pad_ext(pool, a, l0, r0, l1, r1, 0, 0, 0, 0) };
        self.adopt(t)
    }

    /// `a [w, h, c, b]` resized to `w` by `h`, contiguous f32.
    pub(crate) fn resize(&mut self, a: Id, w: usize, h: usize, how: Interpolation) -> Result<Id> {
        self.dense_f32(a, "resize")?;
        let [_, _, c, b] = self.ne(a)?;
        all(&[w > 0, h > 0], "resize")?;
        sized([w, h, c, b])?;
        let mode = match how {
            Interpolation::Nearest => sys::GGML_SCALE_MODE_NEAREST,
        };
        let (pool, a) = (self.pool()?, self.raw(a)?);
        // SAFETY: as for `unary`.
        let t = unsafe { sys::ggml_interpolate(pool, a, w as i64, h as i64, c as i64, b as i64, mode) };
        self.adopt(t)
    }
}
