//! The operations of the graph. Each variant says what its operands are; shapes are row-major.

use std::sync::Arc;

use crate::scope::Weight;
use crate::shape::MAX_RANK;
use crate::tensor::Tensor;

/// What a node computes. Operands are listed in order; `?` marks an optional last operand.
#[derive(Clone, Debug)]
pub enum Op {
    /// No operands: a value given at each run.
    Input(Arc<str>),
    /// No operands: a value fixed at build time.
    Constant(Arc<Tensor>),
    /// No operands: a stored weight.
    Weight(Weight),
    /// `x [.., k]`, `w [n, k]`, `bias? [n]` → `[.., n]`.
    Linear {
        /// The products overflow f16: they must be accumulated and stored in f32.
        wide: bool,
    },
    /// `x [b, c, h, w]`, `w [n, c, kh, kw]`, `bias? [n]` → `[b, n, h', w']`, zero padding.
    Conv2d {
        /// Step in both axes.
        stride: usize,
        /// Zeros added on each side of both axes.
        padding: usize,
        /// Distance between kernel elements in both axes.
        dilation: usize,
        /// As for `Linear`.
        wide: bool,
    },
    /// `table [n, c]`, `ids [..]` i32 → `[.., c]`; ids are below `n`, checked when they are given.
    Embedding,
    /// `a`, `b` broadcast as in NumPy.
    Binary(Binary),
    /// `x` → `x * mul + add`.
    Affine {
        /// Factor.
        mul: f32,
        /// Offset.
        add: f32,
    },
    /// `x`, element by element.
    Unary(Unary),
    /// `x`, `weight? `, `bias?` → normalised `x`, times weight, plus bias. Two operands mean no bias.
    Norm {
        /// What is normalised over.
        kind: Norm,
        /// Added to the variance.
        eps: f32,
    },
    /// `x`: softmax over the last axis.
    Softmax,
    /// `a [.., m, k]`, `b [.., n, k]` → `a bᵀ [.., m, n]`; leading axes of `b` repeat as in NumPy.
    MatMulT,
    /// `q [b, tq, h, d]`, `k [b, tk, h, d]`, `v [b, tk, h, dv]`, `mask?` broadcast to `[b, h, tq, tk]`
    /// → `softmax(scale q kᵀ + mask) v [b, tq, h, dv]`.
    Attention {
        /// Factor of the scores.
        scale: f32,
        /// Position `i` attends to positions up to `i` only (`tq = tk`).
        causal: bool,
    },
    /// `x [b, t, h, d]`, `cos` and `sin`, both `[t, d / 2]` or `[b, t, d / 2]`: pair `i` of each head turns by the angle
    /// of its position.
    Rope {
        /// Which two elements are a pair.
        layout: RopeLayout,
    },
    /// `x` with the same elements in the node's shape.
    Reshape,
    /// `x`: axis `i` of the result is axis `axes[i]` of `x`.
    Permute {
        /// As many as `x` has axes; the rest is unused.
        axes: [u8; MAX_RANK],
    },
    /// Any number of operands, joined along `axis`.
    Concat {
        /// The axis that grows.
        axis: usize,
    },
    /// `x[.., start .. start + node.shape[axis], ..]`.
    Slice {
        /// The axis that shrinks.
        axis: usize,
        /// First position.
        start: usize,
    },
    /// `x [.., h, w]` with zeros around its last two axes.
    Pad2d {
        /// Rows above and below.
        rows: [usize; 2],
        /// Columns left and right.
        columns: [usize; 2],
    },
    /// `x [b, c, h, w]` → `[b, c, factor h, factor w]`, each value repeated.
    UpsampleNearest {
        /// Repeats in both axes.
        factor: usize,
    },
    /// `t [b]` → `[b, dim]`: `cos(t f_i)` for `i < dim / 2`, then `sin(t f_i)`, `f_i = max_period^(-2 i / dim)`
    /// by way of its logarithm in f32.
    TimestepEmbedding {
        /// Width, even.
        dim: usize,
        /// Longest wavelength over 2π.
        max_period: f32,
    },
}

/// Two-operand elementwise functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Binary {
    Add,
    Sub,
    Mul,
    Div,
}

/// One-operand elementwise functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Unary {
    /// `x σ(x)`.
    Silu,
    /// `x Φ(x)` with the exact normal distribution.
    Gelu,
    /// The tanh approximation of `Gelu`.
    GeluTanh,
    /// `x σ(1.702 x)`.
    QuickGelu,
    /// `1 / (1 + e^-x)`.
    Sigmoid,
    /// Hyperbolic tangent.
    Tanh,
    /// `max(x, 0)`.
    Relu,
    /// `e^x`.
    Exp,
}

/// What a normalisation runs over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Norm {
    /// Mean and variance of the last axis.
    Layer,
    /// Root mean square of the last axis.
    Rms,
    /// Mean and variance of each of `groups` equal runs of channels with all positions, `x [b, c, ..]`.
    Group {
        /// How many runs.
        groups: usize,
    },
}

/// Which two elements of the last axis turn together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RopeLayout {
    /// Pair `i` is `x[2 i]` and `x[2 i + 1]`.
    Interleaved,
    /// Pair `i` is `x[i]` and `x[i + d / 2]`.
    Halves,
}

impl Op {
    /// A word for messages.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Input(_) => "input",
            Op::Constant(_) => "constant",
            Op::Weight(_) => "weight",
            Op::Linear { .. } => "linear",
            Op::Conv2d { .. } => "conv2d",
            Op::Embedding => "embedding",
            Op::Binary(Binary::Add) => "add",
            Op::Binary(Binary::Sub) => "sub",
            Op::Binary(Binary::Mul) => "mul",
            Op::Binary(Binary::Div) => "div",
            Op::Affine { .. } => "affine",
            Op::Unary(u) => match u {
                Unary::Silu => "silu",
                Unary::Gelu => "gelu",
                Unary::GeluTanh => "gelu_tanh",
                Unary::QuickGelu => "quick_gelu",
                Unary::Sigmoid => "sigmoid",
                Unary::Tanh => "tanh",
                Unary::Relu => "relu",
                Unary::Exp => "exp",
            },
            Op::Norm { kind: Norm::Layer, .. } => "layer_norm",
            Op::Norm { kind: Norm::Rms, .. } => "rms_norm",
            Op::Norm { kind: Norm::Group { .. }, .. } => "group_norm",
            Op::Softmax => "softmax",
            Op::MatMulT => "matmul_t",
            Op::Attention { .. } => "attention",
            Op::Rope { .. } => "rope",
            Op::Reshape => "reshape",
            Op::Permute { .. } => "permute",
            Op::Concat { .. } => "concat",
            Op::Slice { .. } => "slice",
            Op::Pad2d { .. } => "pad2d",
            Op::UpsampleNearest { .. } => "upsample_nearest",
            Op::TimestepEmbedding { .. } => "timestep_embedding",
        }
    }

    /// Whether the value is there before anything is computed: it can be read from any segment.
    pub fn is_leaf(&self) -> bool {
        matches!(self, Op::Input(_) | Op::Constant(_) | Op::Weight(_))
    }
}
