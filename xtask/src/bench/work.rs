//! How much arithmetic a program is.

use sd_core::Program;
use sd_core::graph::Op;

/// Multiplications and additions of a program by kind of operation, in floating-point operations.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Work {
    /// Linear layers and products of matrices.
    pub products: f64,
    /// Convolutions.
    pub convolutions: f64,
    /// Attention: scores and weighted sums.
    pub attention: f64,
}

impl Work {
    /// That of `program`. What is linear in the number of values, such as norms, is left out.
    pub fn of(program: &Program) -> Work {
        let mut out = Work::default();
        for (_, node) in program.iter() {
            let operand = |i: usize| node.inputs.get(i).map(|v| program.node(*v).shape);
            let results = node.shape.elements() as f64;
            match (&node.op, operand(0), operand(1)) {
                (Op::Linear { .. } | Op::MatMulT, Some(x), _) => out.products += 2.0 * results * x.last() as f64,
                (Op::Conv2d { .. }, _, Some(w)) => {
                    let kernel = w.elements() as f64 / w.dims().first().copied().unwrap_or(1).max(1) as f64;
                    out.convolutions += 2.0 * results * kernel;
                }
                // [b, tq, h, d] with tk keys: a score and a weighted value for each pair.
                (Op::Attention { .. }, Some(q), Some(k)) => {
                    let keys = k.dims().get(1).copied().unwrap_or(0) as f64;
                    out.attention += 2.0 * keys * (q.elements() as f64 + results);
                }
                _ => {}
            }
        }
        out
    }

    /// All of it.
    pub fn total(&self) -> f64 {
        self.products + self.convolutions + self.attention
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sd_core::{AttentionOptions, DType, Graph};

    #[test]
    fn attention_counts_pairs_of_queries_and_keys() {
        let g = Graph::new();
        let q = g.input("q", &[2, 5, 3, 8], DType::F32).unwrap();
        let k = g.input("k", &[2, 7, 3, 8], DType::F32).unwrap();
        let y = g.attention(q, k, k, AttentionOptions::default()).unwrap();
        let work = Work::of(&g.finish(&[y]).unwrap());
        assert_eq!(work, Work { attention: (2 * 3 * 5 * 7 * (2 * 8 + 2 * 8)) as f64, ..Work::default() });
    }
}
