//! Scaled dot-product attention.

use crate::error::Result;
use crate::graph::{Graph, Op, Var};
use crate::shape::Shape;

/// What an attention does besides the plain formula.
#[derive(Clone, Copy, Debug, Default)]
pub struct AttentionOptions {
    /// Factor of the scores; `1 / √d` if not given.
    pub scale: Option<f32>,
    /// Position `i` attends to positions up to `i` only.
    pub causal: bool,
    /// Added to the scores, broadcast to `[b, h, tq, tk]`.
    pub mask: Option<Var>,
}

impl Graph {
    /// `softmax(scale q kᵀ + mask) v` for each head: `q [b, tq, h, d]`, `k [b, tk, h, d]`, `v [b, tk, h, dv]`
    /// give `[b, tq, h, dv]`.
    ///
    /// # Errors
    /// The shapes do not fit, or `causal` with `tq ≠ tk`.
    pub fn attention(&self, q: Var, k: Var, v: Var, options: AttentionOptions) -> Result<Var> {
        let mut inputs = vec![q, k, v];
        inputs.extend(options.mask);
        self.want_f32("attention", &inputs)?;
        let bad = |why: &str| Err(self.bad_op("attention", &inputs, why));
        let ([b, tq, h, d], [kb, tk, kh, kd], [vb, vt, vh, dv]) = (self.dims(q)?, self.dims(k)?, self.dims(v)?);
        if (kb, kh, kd) != (b, h, d) || (vb, vt, vh) != (b, tk, h) || tk == 0 {
            return bad("want [b, tq, h, d], [b, tk, h, d] and [b, tk, h, dv]");
        }
        if options.causal && tq != tk {
            return bad("a causal mask needs as many queries as keys");
        }
        if let Some(m) = options.mask {
            let full = Shape::new(&[b, h, tq, tk])?;
            if self.shape(m).broadcast(&full) != Some(full) {
                return bad("the mask does not broadcast to [b, h, tq, tk]");
            }
        }
        let scale = options.scale.unwrap_or(1.0 / (d as f32).sqrt());
        let op = Op::Attention { scale, causal: options.causal };
        Ok(self.push(op, &inputs, Shape::new(&[b, tq, h, dv])?))
    }
}
