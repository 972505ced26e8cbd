//! Programs that also say what their weights are multiplied by, from which importance matrices are made.

use std::collections::HashMap;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::graph::{Cut, Graph, Op, Program, Var};
use crate::scope::Role;
use crate::tensor::Tensor;

/// A result that a tapped program has beside its own: over all rows of what a weight is multiplied by, the sum of squares in
/// each column.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tap {
    /// The weight.
    pub weight: String,
    /// How many rows are summed over.
    pub rows: usize,
}

/// `program` with further results after its own, one for each matrix that something is multiplied by, in the order of the
/// taps. What it computes otherwise stays.
///
/// # Errors
/// An internal one: a program that does not hold together.
pub fn input_squares(program: &Program) -> Result<(Program, Vec<Tap>)> {
    let g = Graph::new();
    let mut map: Vec<Var> = Vec::new();
    let mut taps: Vec<Tap> = Vec::new();
    let mut results: Vec<Var> = Vec::new();
    // Layers that read the same value have the same sums.
    let mut sums: HashMap<Var, Var> = HashMap::new();
    let moved = |map: &[Var], v: &Var| {
        map.get(v.index()).copied().ok_or_else(|| Error::internal("an operand comes after its user"))
    };
    let cut = |g: &Graph, map: &[Var], cut: &Cut| -> Result<()> {
        let later = program.nodes().iter().skip(cut.at).flat_map(|n| n.inputs.iter());
        let live: std::collections::BTreeSet<Var> = later.copied().filter(|v| v.index() < cut.at).collect();
        g.cut_here(Arc::clone(&cut.label), live.iter().map(|v| moved(map, v)).collect::<Result<_>>()?);
        Ok(())
    };
    let mut cuts = program.cuts().iter().peekable();
    for (v, node) in program.iter() {
        while let Some(c) = cuts.next_if(|c| c.at <= v.index()) {
            cut(&g, &map, c)?;
            // What stands before a cut is not there after it.
            sums.clear();
        }
        let mut copy = node.clone();
        copy.inputs = node.inputs.iter().map(|v| moved(&map, v)).collect::<Result<_>>()?;
        let operands = copy.inputs.clone();
        map.push(g.copy(copy));
        let (Op::Linear { .. }, [x, _, ..], Some(w)) = (&node.op, &operands[..], node.inputs.get(1)) else {
            continue;
        };
        let Op::Weight(w) = &program.node(*w).op else { continue };
        if w.role() != Role::Matrix {
            continue;
        }
        let columns = g.shape(*x).last();
        let rows = g.shape(*x).elements() / columns.max(1);
        let sum = match sums.get(x) {
            Some(sum) => *sum,
            None => {
                let x2 = g.reshape(*x, &[rows, columns])?;
                let x2 = g.permute(g.mul(x2, x2)?, &[1, 0])?;
                let ones = g.constant(Tensor::f32(&[1, rows], vec![1.0; rows])?);
                let sum = g.matmul_t(ones, x2)?;
                sums.insert(*x, sum);
                sum
            }
        };
        taps.push(Tap { weight: w.name().to_owned(), rows });
        results.push(sum);
    }
    for c in cuts {
        cut(&g, &map, c)?;
    }
    let own = program.outputs().iter().map(|v| moved(&map, v)).collect::<Result<Vec<_>>>()?;
    Ok((g.finish(&own.into_iter().chain(results).collect::<Vec<_>>())?, taps))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::Runner;
    use crate::scope::{Scope, tests::Shapes};
    use crate::{CancelToken, Cuts, DType, Device, RunnerOptions};

    #[test]
    fn sums_of_squares_by_column() {
        let source =
            Arc::new(Shapes(vec![("a.weight", vec![8, 4]), ("b.weight", vec![8, 4]), ("c.weight", vec![4, 8])]));
        let w = Scope::root(source.clone());
        let g = Graph::new();
        let x = g.input("x", &[2, 3, 4], DType::F32).unwrap();
        let a = g.linear(&w.linear_no_bias("a").unwrap(), x).unwrap();
        g.keep(&[x]);
        g.cut(&w.sub("first"), &[a]);
        let b = g.linear(&w.linear_no_bias("b").unwrap(), x).unwrap();
        let y =
            g.linear(&w.linear_no_bias("c").unwrap(), g.affine(g.add(a, b).unwrap(), 0.0, 2.0).unwrap()).unwrap();
        let program = g.finish(&[y]).unwrap();
        let (tapped, taps) = input_squares(&program).unwrap();
        let named: Vec<(&str, usize)> = taps.iter().map(|t| (t.weight.as_str(), t.rows)).collect();
        assert_eq!(named, [("a.weight", 6), ("b.weight", 6), ("c.weight", 6)]);
        let values: Vec<f32> = (0..24).map(|i| i as f32 - 11.5).collect();
        let want: Vec<f32> = (0..4).map(|c| values.iter().skip(c).step_by(4).map(|v| v * v).sum()).collect();
        let x = Tensor::f32(&[2, 3, 4], values).unwrap();
        for cuts in [Cuts::None, Cuts::All] {
            let options = RunnerOptions { threads: 1, cuts, ..RunnerOptions::default() };
            let mut runner = Runner::new(Device::cpu().unwrap(), source.clone(), options).unwrap();
            let plain = runner.run(&program, &[("x", &x)], &CancelToken::new()).unwrap();
            let got = runner.run(&tapped, &[("x", &x)], &CancelToken::new()).unwrap();
            assert_eq!(got[0], plain[0]);
            assert_eq!((got[1].values(), got[2].values()), (&want[..], &want[..]));
            // Six rows of twos, squared.
            assert_eq!(got[3].values(), [24.0; 8]);
        }
    }
}
