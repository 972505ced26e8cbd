//! A finished graph: immutable, without dead nodes, with what crosses each cut verified.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use super::{Node, Op, Var};
use crate::error::{Error, Result};
use crate::tensor::Data;

/// A point where execution may stop: before node `at`.
#[derive(Clone, Debug)]
pub struct Cut {
    /// The module that ends here.
    pub label: Arc<str>,
    /// The first node after the cut.
    pub at: usize,
    /// Values that later nodes may read, besides leaves and kept values.
    pub live: Vec<Var>,
}

/// A finished graph. [`Var`]s of the program are not those of the graph it came from.
#[derive(Clone, Debug)]
pub struct Program {
    nodes: Vec<Node>,
    cuts: Vec<Cut>,
    outputs: Vec<Var>,
    signature: u128,
}

impl Program {
    pub(super) fn new(nodes: &[Node], cuts: &[Cut], kept: &[Var], outputs: &[Var]) -> Result<Program> {
        let mut alive = vec![false; nodes.len()];
        for o in outputs {
            alive[o.index()] = true;
        }
        // Operands come before their users, so one backward pass finds everything that is needed.
        for i in (0..nodes.len()).rev() {
            if alive[i] {
                nodes[i].inputs.iter().for_each(|v| alive[v.index()] = true);
            }
        }
        let mut place = Vec::with_capacity(nodes.len() + 1);
        let mut kept_nodes = 0u32;
        for &a in &alive {
            place.push(kept_nodes);
            kept_nodes += u32::from(a);
        }
        place.push(kept_nodes);
        let moved = |v: &Var| alive[v.index()].then(|| Var(place[v.index()]));

        let mut out = Vec::with_capacity(kept_nodes as usize);
        for (node, _) in nodes.iter().zip(&alive).filter(|(_, alive)| **alive) {
            if node.shape.elements() == 0 {
                let name = node.label.as_deref().unwrap_or(node.op.name());
                return Err(Error::shape(format!("{name} is empty: {}", node.shape)));
            }
            let inputs = node.inputs.iter().filter_map(moved).collect();
            out.push(Node { inputs, ..node.clone() });
        }
        let cuts: Vec<Cut> = cuts
            .iter()
            .map(|c| Cut {
                label: c.label.clone(),
                at: place[c.at] as usize,
                live: c.live.iter().filter_map(moved).collect(),
            })
            .collect();
        let kept: HashSet<Var> = kept.iter().filter_map(moved).collect();
        let outputs: Vec<Var> = outputs.iter().filter_map(moved).collect();
        let mut program = Program { nodes: out, cuts, outputs, signature: 0 };
        program.check_cuts(&kept)?;
        program.signature = program.sign();
        Ok(program)
    }

    /// The nodes; operands come before their users.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The node that makes `v`.
    pub fn node(&self, v: Var) -> &Node {
        &self.nodes[v.index()]
    }

    /// Every node with its variable.
    pub fn iter(&self) -> impl Iterator<Item = (Var, &Node)> {
        self.nodes.iter().enumerate().map(|(i, n)| (Var(i as u32), n))
    }

    /// Where execution may stop, in order.
    pub fn cuts(&self) -> &[Cut] {
        &self.cuts
    }

    /// The results, in the order [`Graph::finish`](super::Graph::finish) was given them.
    pub fn outputs(&self) -> &[Var] {
        &self.outputs
    }

    /// Equal for programs that compute the same from the same inputs and weights.
    pub fn signature(&self) -> u128 {
        self.signature
    }

    /// A value as messages show it.
    pub fn describe(&self, v: Var) -> String {
        let n = self.node(v);
        let name = n.label.as_deref().unwrap_or(n.op.name());
        format!("{name} {} {}", n.shape, n.dtype)
    }

    fn check_cuts(&self, kept: &HashSet<Var>) -> Result<()> {
        for cut in &self.cuts {
            let live: HashSet<Var> = cut.live.iter().copied().collect();
            for (user, node) in self.iter().skip(cut.at) {
                for &v in &node.inputs {
                    let crosses = v.index() < cut.at && !self.node(v).op.is_leaf();
                    if crosses && !live.contains(&v) && !kept.contains(&v) {
                        return Err(Error::internal(format!(
                            "cut {}: {} crosses it to {} but is neither listed nor kept",
                            cut.label,
                            self.describe(v),
                            self.describe(user)
                        )));
                    }
                }
            }
        }
        Ok(())
    }

    fn sign(&self) -> u128 {
        let half = |seed: u64| {
            let mut h = DefaultHasher::new();
            seed.hash(&mut h);
            for n in &self.nodes {
                n.op.name().hash(&mut h);
                match &n.op {
                    Op::Weight(w) => (w.name(), w.shape(), w.dtype(), w.role()).hash(&mut h),
                    // Values of constants are part of what is computed.
                    Op::Constant(t) => match t.data() {
                        Data::F32(v) => v.iter().for_each(|x| x.to_bits().hash(&mut h)),
                        Data::I32(v) => v.hash(&mut h),
                    },
                    // `Debug` of floats is exact.
                    op => format!("{op:?}").hash(&mut h),
                }
                (&n.inputs, n.shape, n.dtype).hash(&mut h);
            }
            for c in &self.cuts {
                c.at.hash(&mut h);
            }
            self.outputs.hash(&mut h);
            h.finish()
        };
        u128::from(half(0)) << 64 | u128::from(half(1))
    }
}
