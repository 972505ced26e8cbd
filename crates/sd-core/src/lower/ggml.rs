//! One segment of a program as a ggml graph. Every value is contiguous f32 (i32 for ids), so that any operation can
//! follow any other; shapes were checked when the program was built.

use std::collections::HashMap;
use std::collections::HashSet;

use super::layout::{self, binary, flip, ne};
use super::rope;
use super::workspace::{self, Layout};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::ffi::{self, Context, Conv, Dev, DevKind, Graph, Id, Interpolation};
use crate::graph::{Binary, Node, Norm, Op, Program, Unary, Var};
use crate::kernels::Isa;
use crate::plan::Segment;
use crate::tensor::Data;

/// Bytes that scores of an attention, or patches of a convolution, take at most at a time where they can be divided.
const SCRATCH: usize = 64 << 20;

/// The fewest queries for which the CPU's fused attention goes by tiles, each row for itself and in f32. With fewer
/// it divides the keys by threads, or rounds to f16.
const FUSED_QUERIES: usize = 64;

/// A segment ready to be placed and computed.
pub(crate) struct Lowered {
    /// The tensors.
    pub(crate) ctx: Context,
    /// What computes [`Segment::writes`].
    pub(crate) graph: Graph,
    /// Inputs, constants, weights and values of earlier segments, to be placed and filled before.
    pub(crate) leaves: Vec<(Var, Id)>,
    /// Values that the lowering itself adds.
    pub(crate) constants: Vec<(Id, Data)>,
    /// [`Segment::writes`], each in memory of its own, to be placed before.
    pub(crate) writes: Vec<(Var, Id)>,
    /// Where everything else lies.
    pub(crate) layout: Layout,
}

/// Lowers `segment` for `dev`, with kernels for `isa` if there is one. `memory_type` says which type a weight has in
/// memory.
pub(crate) fn lower(
    program: &Program,
    segment: &Segment,
    dev: Dev,
    isa: Option<&'static Isa>,
    memory_type: impl Fn(Var) -> Result<DType>,
) -> Result<Lowered> {
    // Other devices' fused attention rounds keys and values to f16.
    let fuses_attention = dev.kind() == DevKind::Cpu;
    let (values, constants) = (HashMap::new(), Vec::new());
    let mut l = Lowering { program, ctx: Context::new(), values, constants, fuses_attention, isa };
    let mut leaves = Vec::new();
    for &v in segment.leaves.iter().chain(&segment.reads) {
        let node = program.node(v);
        let dtype = if matches!(node.op, Op::Weight(_)) { memory_type(v)? } else { node.dtype };
        let id = l.ctx.leaf(dtype, ne(&node.shape))?;
        l.values.insert(v, id);
        leaves.push((v, id));
    }
    for i in segment.nodes.clone() {
        let v = Var(i as u32);
        let node = program.node(v);
        if node.op.is_leaf() {
            continue;
        }
        if node.shape.elements() > ffi::MAX_ELEMENTS {
            return Err(Error::device(format!("{} is more than any device holds", program.describe(v))));
        }
        let id = l.node(node).map_err(|e| e.context(program.describe(v)))?;
        if l.ctx.ne(id)? != ne(&node.shape) || !l.ctx.is_contiguous(id)? {
            let got = l.ctx.ne(id)?;
            return Err(Error::internal(format!("{} was lowered to {got:?}", program.describe(v))));
        }
        l.values.insert(v, id);
    }
    let results = l.own(segment)?;
    let Lowering { ctx, constants, .. } = l;
    let graph = ctx.graph(&results)?;
    let roots: Vec<Id> = results.into_iter().map(|id| ctx.root(id)).collect::<Result<_>>()?;
    let outside: HashSet<Id> =
        leaves.iter().map(|l| l.1).chain(constants.iter().map(|c| c.0)).chain(roots.iter().copied()).collect();
    let layout = workspace::plan(&ctx, &graph, dev, |id| !outside.contains(&id))?;
    let writes = segment.writes.iter().copied().zip(roots).collect();
    Ok(Lowered { ctx, graph, leaves, constants, writes, layout })
}

pub(super) struct Lowering<'a> {
    program: &'a Program,
    pub(super) ctx: Context,
    values: HashMap<Var, Id>,
    constants: Vec<(Id, Data)>,
    fuses_attention: bool,
    /// Instructions of the kernels that take nodes from ggml.
    pub(super) isa: Option<&'static Isa>,
}

impl Lowering<'_> {
    fn value(&self, v: Var) -> Result<Id> {
        self.values
            .get(&v)
            .copied()
            .ok_or_else(|| Error::internal(format!("{} is not there", self.program.describe(v))))
    }

    fn dims(&self, v: Var) -> &[usize] {
        self.program.node(v).shape.dims()
    }

    /// The operand at `i`, with its row-major sizes.
    pub(super) fn operand(&self, node: &Node, i: usize) -> Result<(Id, Vec<usize>)> {
        let v =
            *node.inputs.get(i).ok_or_else(|| Error::internal(format!("{} lacks operand {i}", node.op.name())))?;
        Ok((self.value(v)?, self.dims(v).to_vec()))
    }

    fn constant(&mut self, values: &[f32]) -> Result<Id> {
        let id = self.ctx.leaf(DType::F32, [values.len(), 1, 1, 1])?;
        self.constants.push((id, Data::F32(values.to_vec())));
        Ok(id)
    }

    /// [`Segment::writes`], copied where a value shares memory with something else.
    fn own(&mut self, segment: &Segment) -> Result<Vec<Id>> {
        let mut taken: HashSet<Id> =
            segment.leaves.iter().chain(&segment.reads).filter_map(|v| self.values.get(v).copied()).collect();
        let mut results = Vec::with_capacity(segment.writes.len());
        for &v in &segment.writes {
            let mut id = self.value(v)?;
            let root = self.ctx.root(id)?;
            let whole = self.ctx.bytes(root)? == self.ctx.bytes(id)?;
            if taken.contains(&root) || !whole {
                id = self.ctx.cont(id)?;
            }
            taken.insert(self.ctx.root(id)?);
            results.push(id);
        }
        Ok(results)
    }

    fn node(&mut self, node: &Node) -> Result<Id> {
        if let Some(id) = self.kernel(node)? {
            return Ok(id);
        }
        let (x, dims) = self.operand(node, 0)?;
        let out = node.shape.dims();
        match &node.op {
            Op::Input(_) | Op::Constant(_) | Op::Weight(_) => Err(Error::internal("a leaf is not computed")),
            Op::Linear { .. } => self.linear(node, x, &dims),
            Op::Conv2d { stride, padding, dilation, .. } => {
                let conv = Conv { stride: [*stride; 2], padding: [*padding; 2], dilation: [*dilation; 2] };
                self.conv2d(node, x, conv)
            }
            Op::Embedding => {
                let (ids, id_dims) = self.operand(node, 1)?;
                let ids = self.ctx.reshape(ids, [id_dims.iter().product(), 1, 1, 1])?;
                let y = self.ctx.get_rows(x, ids)?;
                self.ctx.reshape(y, flip(out))
            }
            Op::Binary(f) => {
                let (b, b_dims) = self.operand(node, 1)?;
                let f = match f {
                    Binary::Add => ffi::Binary::Add,
                    Binary::Sub => ffi::Binary::Sub,
                    Binary::Mul => ffi::Binary::Mul,
                    Binary::Div => ffi::Binary::Div,
                };
                binary(&mut self.ctx, f, x, &dims, b, &b_dims)
            }
            Op::Affine { mul, add } => self.ctx.affine(x, *mul, *add),
            Op::Unary(f) => self.unary(*f, x),
            Op::Norm { kind, eps } => self.norm(node, x, &dims, *kind, *eps),
            Op::Softmax => self.ctx.soft_max(x, None, 1.0),
            Op::MatMulT => self.matmul_t(node, x, &dims),
            Op::Attention { scale, causal } => self.attention(node, *scale, *causal),
            Op::Rope { layout } => {
                let sizes = node.shape.array().ok_or_else(|| Error::internal("rope of other than four axes"))?;
                let tables = [self.operand(node, 1)?.0, self.operand(node, 2)?.0];
                rope::rope(&mut self.ctx, x, sizes, tables, *layout)
            }
            Op::Reshape => self.ctx.reshape(x, flip(out)),
            Op::Permute { axes } => {
                let axes: Vec<usize> = axes.iter().take(dims.len()).map(|&a| usize::from(a)).collect();
                layout::permute(&mut self.ctx, x, &dims, &axes)
            }
            Op::Concat { axis } => {
                let mut parts = Vec::with_capacity(node.inputs.len());
                for i in 0..node.inputs.len() {
                    let (p, dims) = self.operand(node, i)?;
                    let [before, len, after] = layout::around(&dims, *axis);
                    parts.push(self.ctx.reshape(p, [after, len, before, 1])?);
                }
                let y = layout::join(&mut self.ctx, parts, 1)?;
                self.ctx.reshape(y, flip(out))
            }
            Op::Slice { axis, start } => {
                let [before, len, after] = layout::around(&dims, *axis);
                let keep = node.shape.dim(*axis);
                // Of the last axis, runs of `keep` elements are rows; of others, runs of `keep * after`.
                let x = self.ctx.reshape(x, [after * len, before, 1, 1])?;
                let y = self.ctx.window(x, [after * start, 0, 0, 0], [after * keep, before, 1, 1])?;
                let y = if self.ctx.is_contiguous(y)? { y } else { self.ctx.cont(y)? };
                self.ctx.reshape(y, flip(out))
            }
            Op::Pad2d { rows, columns } => {
                let (h, w) = (dims[dims.len() - 2], dims[dims.len() - 1]);
                let x = self.ctx.reshape(x, [w, h, dims[..dims.len() - 2].iter().product(), 1])?;
                let y = self.ctx.pad(x, *columns, *rows)?;
                self.ctx.reshape(y, flip(out))
            }
            Op::UpsampleNearest { .. } => {
                self.ctx.resize(x, node.shape.dim(3), node.shape.dim(2), Interpolation::Nearest)
            }
            Op::TimestepEmbedding { dim, max_period } => self.timesteps(x, dims[0], *dim, *max_period),
        }
    }

    fn linear(&mut self, node: &Node, x: Id, dims: &[usize]) -> Result<Id> {
        let (w, _) = self.operand(node, 1)?;
        let k = node.inputs.first().map_or(1, |&v| self.program.node(v).shape.last());
        let rows = dims[..dims.len() - 1].iter().product();
        let x = self.ctx.reshape(x, [k, rows, 1, 1])?;
        let y = self.ctx.mul_mat(w, x, true)?;
        let y = self.ctx.reshape(y, ne(&node.shape))?;
        self.bias(node, 2, y, |n| vec![n])
    }

    /// `y` plus operand `i`, if there is one, whose row-major sizes are `shape(n)`.
    fn bias(&mut self, node: &Node, i: usize, y: Id, shape: impl Fn(usize) -> Vec<usize>) -> Result<Id> {
        if node.inputs.len() <= i {
            return Ok(y);
        }
        let (b, dims) = self.operand(node, i)?;
        binary(&mut self.ctx, ffi::Binary::Add, y, node.shape.dims(), b, &shape(dims.iter().product()))
    }

    fn unary(&mut self, f: Unary, x: Id) -> Result<Id> {
        let c = &mut self.ctx;
        match f {
            Unary::Silu => c.unary(ffi::Unary::Silu, x),
            Unary::Gelu => c.unary(ffi::Unary::GeluErf, x),
            Unary::Sigmoid => c.unary(ffi::Unary::Sigmoid, x),
            Unary::Tanh => c.unary(ffi::Unary::Tanh, x),
            Unary::Relu => c.unary(ffi::Unary::Relu, x),
            Unary::Exp => c.unary(ffi::Unary::Exp, x),
            // ggml's own versions of these two look values up in f16 tables on the CPU.
            Unary::QuickGelu => {
                let z = c.affine(x, 1.702, 0.0)?;
                let z = c.unary(ffi::Unary::Sigmoid, z)?;
                c.binary(ffi::Binary::Mul, z, x)
            }
            Unary::GeluTanh => {
                // (1 + tanh u) / 2 = σ(2u) with u = √(2/π) (x + 0.044715 x³).
                let two_u = 2.0 * (2.0 / std::f32::consts::PI).sqrt();
                let z = c.binary(ffi::Binary::Mul, x, x)?;
                let z = c.affine(z, 0.044715 * two_u, two_u)?;
                let z = c.binary(ffi::Binary::Mul, z, x)?;
                let z = c.unary(ffi::Unary::Sigmoid, z)?;
                c.binary(ffi::Binary::Mul, z, x)
            }
        }
    }

    fn norm(&mut self, node: &Node, x: Id, dims: &[usize], kind: Norm, eps: f32) -> Result<Id> {
        let mut y = match kind {
            Norm::Layer => self.ctx.norm(x, eps)?,
            Norm::Rms => self.ctx.rms_norm(x, eps)?,
            Norm::Group { groups } => {
                let [b, c] = [node.shape.dim(0), node.shape.dim(1)];
                let positions = dims.iter().skip(2).product();
                let x = self.ctx.reshape(x, [positions, 1, c, b])?;
                self.ctx.group_norm(x, groups, eps)?
            }
        };
        y = self.ctx.reshape(y, ne(&node.shape))?;
        for (i, f) in [(1, ffi::Binary::Mul), (2, ffi::Binary::Add)] {
            if node.inputs.len() <= i {
                break;
            }
            let (w, w_dims) = self.operand(node, i)?;
            let c = w_dims.iter().product();
            let mut shape = vec![c];
            if matches!(kind, Norm::Group { .. }) {
                shape.resize(dims.len() - 1, 1);
            }
            y = binary(&mut self.ctx, f, y, dims, w, &shape)?;
        }
        Ok(y)
    }

    fn matmul_t(&mut self, node: &Node, a: Id, a_dims: &[usize]) -> Result<Id> {
        let (b, b_dims) = self.operand(node, 1)?;
        let r = a_dims.len();
        let (a_lead, b_lead) = (&a_dims[..r - 2], &b_dims[..r - 2]);
        let (m, n, k) = (a_dims[r - 2], b_dims[r - 2], a_dims[r - 1]);
        let lead: usize = a_lead.iter().product();
        let y = if b_lead.iter().all(|&d| d == 1) {
            let a = self.ctx.reshape(a, [k, m * lead, 1, 1])?;
            let b = self.ctx.reshape(b, [k, n, 1, 1])?;
            self.ctx.mul_mat(b, a, true)?
        } else {
            let mut want = a_lead.to_vec();
            want.extend([n, k]);
            let b = layout::expand(&mut self.ctx, b, &b_dims, &want)?;
            let a = self.ctx.reshape(a, [k, m, lead, 1])?;
            let b = self.ctx.reshape(b, [k, n, lead, 1])?;
            self.ctx.mul_mat(b, a, true)?
        };
        self.ctx.reshape(y, ne(&node.shape))
    }

    fn timesteps(&mut self, t: Id, b: usize, dim: usize, max_period: f32) -> Result<Id> {
        let half = dim / 2;
        // The exponent in f32, as all reference implementations have it: angles are up to 30,000 times as far off.
        let log = -f64::from(max_period).ln() as f32;
        let frequency = |i: usize| f64::from(log * i as f32 / half as f32).exp() as f32;
        let f = self.constant(&(0..half).map(frequency).collect::<Vec<_>>())?;
        let c = &mut self.ctx;
        let angles = binary(c, ffi::Binary::Mul, t, &[b, 1], f, &[half])?;
        let (cos, sin) = (c.cos(angles)?, c.sin(angles)?);
        c.concat(cos, sin, 0)
    }

    fn conv2d(&mut self, node: &Node, x: Id, conv: Conv) -> Result<Id> {
        let (kernel, _) = self.operand(node, 1)?;
        let (c, constants) = (&mut self.ctx, &mut self.constants);
        let [w, h, channels, batch] = c.ne(x)?;
        let [kw, kh, _, n] = c.ne(kernel)?;
        let [ow, oh] = [node.shape.dim(3), node.shape.dim(2)];
        let dtype = c.dtype(kernel)?;
        let k = kw * kh * channels;
        let flat = c.reshape(kernel, [k, n, 1, 1])?;
        let product = |c: &mut Context, part: Id, conv: Conv, rows: usize| -> Result<Id> {
            let patches = c.im2col(kernel, part, conv, dtype)?;
            let patches = c.reshape(patches, [k, ow * rows * batch, 1, 1])?;
            let y = c.mul_mat(patches, flat, true)?; // [ow rows b, n]
            let y = c.reshape(y, [ow, rows, batch, n])?;
            c.permute(y, [0, 1, 3, 2])
        };
        let row_bytes = k.saturating_mul(ow).saturating_mul(batch).saturating_mul(dtype.block_bytes()).max(1);
        let step = (SCRATCH / row_bytes).clamp(1, oh);
        let mut parts = Vec::with_capacity(oh.div_ceil(step));
        if step == oh {
            parts.push(product(c, x, conv, oh)?);
        } else {
            let [_, stride] = conv.stride;
            let span = (kh - 1) * conv.dilation[1] + 1;
            for first in (0..oh).step_by(step) {
                let rows = step.min(oh - first);
                // Rows of the padded image that these output rows see, then those of them that exist.
                let (from, to) = (first * stride, (first + rows - 1) * stride + span);
                let pad = conv.padding[1];
                let (top, bottom) = (from.max(pad) - pad, to.saturating_sub(pad).min(h));
                let above = pad.saturating_sub(from).min(to - from);
                let part = if top < bottom {
                    let part = c.window(x, [0, top, 0, 0], [w, bottom - top, channels, batch])?;
                    let below = (to - from) - above - (bottom - top);
                    if above + below == 0 {
                        part
                    } else {
                        let part = c.cont(part)?;
                        c.pad(part, [0, 0], [above, below])?
                    }
                } else {
                    // Only padding is seen.
                    let zeros = c.leaf(DType::F32, [w, 1, channels, batch])?;
                    constants.push((zeros, Data::F32(vec![0.0; w * channels * batch])));
                    c.pad(zeros, [0, 0], [0, to - from - 1])?
                };
                let conv = Conv { padding: [conv.padding[0], 0], ..conv };
                parts.push(product(c, part, conv, rows)?);
            }
        }
        let y = layout::join(c, parts, 1)?;
        let y = c.reshape(y, ne(&node.shape))?;
        self.bias(node, 2, y, |n| vec![n, 1, 1])
    }

    fn attention(&mut self, node: &Node, scale: f32, causal: bool) -> Result<Id> {
        let (q, q_dims) = self.operand(node, 0)?;
        let (k, k_dims) = self.operand(node, 1)?;
        let (v, v_dims) = self.operand(node, 2)?;
        let (b, tq, h, d) = (q_dims[0], q_dims[1], q_dims[2], q_dims[3]);
        let (tk, dv) = (k_dims[1], v_dims[3]);
        let mask = match node.inputs.get(3) {
            None => None,
            Some(_) => {
                let (m, m_dims) = self.operand(node, 3)?;
                let mut from = vec![1; 4 - m_dims.len()];
                from.extend_from_slice(&m_dims);
                let to = [from[0], from[1], tq, tk];
                Some(layout::expand(&mut self.ctx, m, &from, &to)?)
            }
        };
        let fused = self.fuses_attention && mask.is_none() && !causal && tq >= FUSED_QUERIES;
        let c = &mut self.ctx;
        if fused {
            let q = c.permute(q, [0, 2, 1, 3])?;
            let k = c.permute(k, [0, 2, 1, 3])?;
            let v = c.permute(v, [0, 2, 1, 3])?;
            return c.flash_attention(q, k, v, scale);
        }
        // Scores are multiplied before the mask: a factor that is not positive must not meet `-inf`.
        let (before, after) = if scale > 0.0 { (1.0, scale) } else { (scale, 1.0) };
        let k = c.permute(k, [0, 2, 1, 3])?; // [d, tk, h, b]
        let k = c.cont(k)?;
        let v = c.permute(v, [1, 2, 0, 3])?; // [tk, dv, h, b]
        let v = c.cont(v)?;
        let q = c.permute(q, [0, 2, 1, 3])?; // [d, tq, h, b]
        let row_bytes = tk.saturating_mul(h).saturating_mul(b).saturating_mul(4).max(1);
        let step = (SCRATCH / row_bytes).clamp(1, tq);
        let mut parts = Vec::with_capacity(tq.div_ceil(step));
        for first in (0..tq).step_by(step) {
            let rows = step.min(tq - first);
            let part = c.window(q, [0, first, 0, 0], [d, rows, h, b])?;
            let part = c.cont(part)?;
            let mut scores = c.mul_mat(k, part, true)?; // [tk, rows, h, b]
            if before != 1.0 {
                scores = c.affine(scores, before, 0.0)?;
            }
            if causal {
                scores = c.mask_future(scores, first)?;
            }
            let mask = match mask {
                None => None,
                Some(m) if rows == tq => Some(m),
                Some(m) => {
                    let [_, _, mh, mb] = c.ne(m)?;
                    let m = c.window(m, [0, first, 0, 0], [tk, rows, mh, mb])?;
                    Some(c.cont(m)?)
                }
            };
            let weights = c.soft_max(scores, mask, after)?;
            let y = c.mul_mat(v, weights, true)?; // [dv, rows, h, b]
            parts.push(c.permute(y, [0, 2, 1, 3])?); // [dv, h, rows, b]
        }
        let y = layout::join(c, parts, 2)?;
        c.reshape(y, [dv, h, tq, b])
    }
}
