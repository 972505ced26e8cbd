//! Products with weight matrices, and table look-up.

use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Graph, Op, Var};
use crate::scope::{Linear, Weight};

impl Graph {
    /// `x [.., k]` times `w [n, k]` transposed, plus the bias, gives `[.., n]`; accumulated in f32 whatever `w` is
    /// stored as.
    ///
    /// # Errors
    /// `x` does not end in `k`.
    pub fn linear(&self, w: &Linear, x: Var) -> Result<Var> {
        self.want_f32("linear", &[x])?;
        let [n, k] = w.dims();
        let shape = self.shape(x);
        if shape.rank() == 0 || shape.last() != k {
            return Err(w.weight().mismatch(&self.describe(x), &format!("[*, {}]", shape.last())));
        }
        let mut inputs = vec![x, self.weight(w.weight())];
        inputs.extend(w.bias().map(|b| self.weight(b)));
        let y = self.push(Op::Linear { wide: w.is_wide() }, &inputs, shape.with_last(n)?);
        self.label(y, w.path());
        Ok(y)
    }

    /// Rows of `table [n, c]` at `ids [..]` give `[.., c]`.
    ///
    /// # Errors
    /// `ids` are not i32, or the result has too many axes. Ids outside the table are refused when they are given.
    pub fn embedding(&self, table: &Weight, ids: Var) -> Result<Var> {
        let t = self.weight(table);
        if self.dtype(ids) != DType::I32 {
            return Err(self.bad_op("embedding", &[t, ids], "ids are not i32"));
        }
        let [_, c] = self.dims(t)?;
        let mut dims = self.shape(ids).dims().to_vec();
        dims.push(c);
        Ok(self.push(Op::Embedding, &[t, ids], crate::Shape::new(&dims)?))
    }

    /// `a [.., m, k]` times `b [.., n, k]` transposed gives `[.., m, n]`. Leading axes of `b` may be 1 where those
    /// of `a` are not.
    ///
    /// # Errors
    /// Fewer than two axes, different `k`, or leading axes that do not repeat into those of `a`.
    pub fn matmul_t(&self, a: Var, b: Var) -> Result<Var> {
        self.want_f32("matmul_t", &[a, b])?;
        let (sa, sb) = (self.shape(a), self.shape(b));
        let r = sa.rank();
        let fits = r >= 2
            && sb.rank() == r
            && sa.last() == sb.last()
            && (0..r - 2).all(|i| sb.dim(i) == sa.dim(i) || sb.dim(i) == 1);
        if !fits {
            return Err(self.bad_op("matmul_t", &[a, b], "want [.., m, k] and [.., n, k]"));
        }
        Ok(self.push(Op::MatMulT, &[a, b], sa.with_last(sb.dim(r - 2))?))
    }
}
