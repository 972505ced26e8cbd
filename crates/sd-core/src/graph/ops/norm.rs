//! Normalisations.

use crate::error::Result;
use crate::graph::{Graph, Norm, Op, Var};
use crate::scope;

impl Graph {
    /// `x [.., c]` minus its mean over `c`, over its standard deviation, times weight, plus bias.
    ///
    /// # Errors
    /// The weights are not `[c]`.
    pub fn layer_norm(&self, w: &scope::Norm, x: Var, eps: f32) -> Result<Var> {
        self.norm(Norm::Layer, w, x, self.shape(x).last(), eps)
    }

    /// `x [.., c]` over its root mean square over `c`, times weight.
    ///
    /// # Errors
    /// The weight is not `[c]`.
    pub fn rms_norm(&self, w: &scope::Norm, x: Var, eps: f32) -> Result<Var> {
        self.norm(Norm::Rms, w, x, self.shape(x).last(), eps)
    }

    /// `x [b, c, h, w]` normalised over each of `groups` runs of channels, times weight `[c]`, plus bias `[c]`.
    ///
    /// # Errors
    /// `c` is not a multiple of `groups`, or the weights are not `[c]`.
    pub fn group_norm(&self, w: &scope::Norm, x: Var, groups: usize, eps: f32) -> Result<Var> {
        let [_, c, _, _] = self.dims(x)?;
        if groups == 0 || !c.is_multiple_of(groups) {
            return Err(self.bad_op(
                "group_norm",
                &[x],
                format_args!("{c} channels are not {groups} equal groups"),
            ));
        }
        self.norm(Norm::Group { groups }, w, x, c, eps)
    }

    fn norm(&self, kind: Norm, w: &scope::Norm, x: Var, c: usize, eps: f32) -> Result<Var> {
        let op = Op::Norm { kind, eps };
        self.want_f32(op.name(), &[x])?;
        for v in [w.weight(), w.bias()].into_iter().flatten() {
            if v.shape().dims() != [c] {
                return Err(v.mismatch(&self.describe(x), &format!("[{c}]")));
            }
        }
        let mut inputs = vec![x];
        inputs.extend(w.weight().map(|v| self.weight(v)));
        // A bias without a weight does not occur in any published network; `Scope::norm` refuses it.
        inputs.extend(w.bias().map(|v| self.weight(v)));
        let y = self.push(op, &inputs, self.shape(x));
        self.label(y, w.path());
        Ok(y)
    }
}
