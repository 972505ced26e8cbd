//! Rotary positions.

use crate::error::Result;
use crate::graph::{Graph, Op, RopeLayout, Var};
use crate::shape::Shape;

impl Graph {
    /// `x [b, t, h, d]` with pair `i` of each head, `(p, q)`, turned to `(p cos - q sin, p sin + q cos)`. The tables are
    /// `[t, d / 2]`, or `[b, t, d / 2]` where positions differ within the batch.
    ///
    /// Source: Su et al. 2021, equation 34. Any angles may be given, so positions may have several axes.
    ///
    /// # Errors
    /// `d` is odd, or the tables do not fit.
    pub fn rope(&self, x: Var, cos: Var, sin: Var, layout: RopeLayout) -> Result<Var> {
        let inputs = [x, cos, sin];
        self.want_f32("rope", &inputs)?;
        let [b, t, _, d] = self.dims(x)?;
        let (one, each) = (Shape::new(&[t, d / 2])?, Shape::new(&[b, t, d / 2])?);
        let table = self.shape(cos);
        if !d.is_multiple_of(2) || self.shape(sin) != table || (table != one && table != each) {
            return Err(self.bad_op(
                "rope",
                &inputs,
                format_args!("want tables {one} or {each} for an even width"),
            ));
        }
        Ok(self.push(Op::Rope { layout }, &inputs, self.shape(x)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

    #[test]
    fn tables_must_fit() {
        let g = Graph::new();
        let x = |name: &str, dims: &[usize]| g.input(name, dims, DType::F32).unwrap();
        let (q, odd) = (x("q", &[2, 3, 4, 6]), x("odd", &[2, 3, 4, 5]));
        let (a, b, c) = (x("a", &[3, 3]), x("b", &[2, 3, 3]), x("c", &[3, 2]));
        for (cos, sin) in [(a, a), (b, b)] {
            let y = g.rope(q, cos, sin, RopeLayout::Halves).unwrap();
            assert_eq!(g.shape(y), g.shape(q));
        }
        for (q, cos, sin) in [(q, a, b), (q, c, c), (odd, c, c), (q, q, q)] {
            assert!(g.rope(q, cos, sin, RopeLayout::Interleaved).is_err());
        }
        let e = g.rope(q, a, c, RopeLayout::Halves).unwrap_err().to_string();
        assert_eq!(
            e,
            "rope of q [2, 3, 4, 6] f32 and a [3, 3] f32 and c [3, 2] f32: want tables [3, 3] or [2, 3, 3] for an even \
             width"
        );
    }
}
