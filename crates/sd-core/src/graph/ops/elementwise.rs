//! Functions of one or two values, element by element.

use crate::error::Result;
use crate::graph::{Binary, Graph, Op, Unary, Var};
use crate::shape::Shape;

impl Graph {
    fn binary(&self, op: Binary, a: Var, b: Var) -> Result<Var> {
        let op = Op::Binary(op);
        self.want_f32(op.name(), &[a, b])?;
        match self.shape(a).broadcast(&self.shape(b)) {
            Some(shape) => Ok(self.push(op, &[a, b], shape)),
            None => Err(self.bad_op(op.name(), &[a, b], "shapes do not broadcast")),
        }
    }

    fn unary(&self, op: Unary, x: Var) -> Result<Var> {
        let op = Op::Unary(op);
        self.want_f32(op.name(), &[x])?;
        Ok(self.push(op, &[x], self.shape(x)))
    }

    /// `a + b`, broadcast as in NumPy.
    ///
    /// # Errors
    /// The shapes do not broadcast.
    pub fn add(&self, a: Var, b: Var) -> Result<Var> {
        self.binary(Binary::Add, a, b)
    }

    /// `a - b`, broadcast as in NumPy.
    ///
    /// # Errors
    /// The shapes do not broadcast.
    pub fn sub(&self, a: Var, b: Var) -> Result<Var> {
        self.binary(Binary::Sub, a, b)
    }

    /// `a * b`, broadcast as in NumPy.
    ///
    /// # Errors
    /// The shapes do not broadcast.
    pub fn mul(&self, a: Var, b: Var) -> Result<Var> {
        self.binary(Binary::Mul, a, b)
    }

    /// `a / b`, broadcast as in NumPy.
    ///
    /// # Errors
    /// The shapes do not broadcast.
    pub fn div(&self, a: Var, b: Var) -> Result<Var> {
        self.binary(Binary::Div, a, b)
    }

    /// `x (1 + s)`, the modulation of adaptive norms.
    ///
    /// # Errors
    /// The shapes do not broadcast.
    pub fn scale_1p(&self, x: Var, s: Var) -> Result<Var> {
        self.mul(x, self.affine(s, 1.0, 1.0)?)
    }

    /// `x * mul + add`.
    ///
    /// # Errors
    /// `x` is not f32.
    pub fn affine(&self, x: Var, mul: f32, add: f32) -> Result<Var> {
        self.want_f32("affine", &[x])?;
        Ok(self.push(Op::Affine { mul, add }, &[x], self.shape(x)))
    }

    /// `x * factor`.
    ///
    /// # Errors
    /// `x` is not f32.
    pub fn scale(&self, x: Var, factor: f32) -> Result<Var> {
        self.affine(x, factor, 0.0)
    }

    /// `x σ(x)`.
    ///
    /// # Errors
    /// `x` is not f32.
    pub fn silu(&self, x: Var) -> Result<Var> {
        self.unary(Unary::Silu, x)
    }

    /// `x Φ(x)`, exact.
    ///
    /// # Errors
    /// `x` is not f32.
    pub fn gelu(&self, x: Var) -> Result<Var> {
        self.unary(Unary::Gelu, x)
    }

    /// The tanh approximation of [`Graph::gelu`].
    ///
    /// # Errors
    /// `x` is not f32.
    pub fn gelu_tanh(&self, x: Var) -> Result<Var> {
        self.unary(Unary::GeluTanh, x)
    }

    /// `x σ(1.702 x)`, the activation of the first CLIP models.
    ///
    /// # Errors
    /// `x` is not f32.
    pub fn quick_gelu(&self, x: Var) -> Result<Var> {
        self.unary(Unary::QuickGelu, x)
    }

    /// `1 / (1 + e^-x)`.
    ///
    /// # Errors
    /// `x` is not f32.
    pub fn sigmoid(&self, x: Var) -> Result<Var> {
        self.unary(Unary::Sigmoid, x)
    }

    /// Hyperbolic tangent.
    ///
    /// # Errors
    /// `x` is not f32.
    pub fn tanh(&self, x: Var) -> Result<Var> {
        self.unary(Unary::Tanh, x)
    }

    /// `max(x, 0)`.
    ///
    /// # Errors
    /// `x` is not f32.
    pub fn relu(&self, x: Var) -> Result<Var> {
        self.unary(Unary::Relu, x)
    }

    /// `e^x`.
    ///
    /// # Errors
    /// `x` is not f32.
    pub fn exp(&self, x: Var) -> Result<Var> {
        self.unary(Unary::Exp, x)
    }

    /// Softmax over the last axis.
    ///
    /// # Errors
    /// `x` is not f32.
    pub fn softmax(&self, x: Var) -> Result<Var> {
        self.want_f32("softmax", &[x])?;
        Ok(self.push(Op::Softmax, &[x], self.shape(x)))
    }

    /// Timesteps `t [b]` as sinusoids `[b, dim]`: cosines, then sines, of `t max_period^(-2 i / dim)`.
    ///
    /// Source: section 3.5 of Vaswani et al. 2017, with the cosine half first as diffusion UNets have it.
    ///
    /// # Errors
    /// `t` is not `[b]` or `dim` is odd.
    pub fn timestep_embedding(&self, t: Var, dim: usize, max_period: f32) -> Result<Var> {
        self.want_f32("timestep_embedding", &[t])?;
        let [b] = self.dims(t)?;
        if dim == 0 || !dim.is_multiple_of(2) {
            return Err(self.bad_op("timestep_embedding", &[t], format_args!("width {dim} is not even")));
        }
        Ok(self.push(Op::TimestepEmbedding { dim, max_period }, &[t], Shape::new(&[b, dim])?))
    }
}
