//! Segments: the runs of nodes between the cuts that are taken.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

use crate::error::{Error, Result};
use crate::graph::{Op, Program, Var};

/// Which cuts are taken.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub enum Cuts {
    /// Those that make the program fit into the memory there is; none where it fits whole. Programs for the CPU are
    /// whole unless it has a budget.
    #[default]
    Auto,
    /// None: the whole program in one go.
    None,
    /// Every cut.
    All,
    /// The cuts with these numbers.
    At(Vec<usize>),
}

/// A run of nodes executed in one go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The module that ends it; empty for the last segment.
    pub label: String,
    /// The nodes. Leaves among them belong to the segments that read them.
    pub nodes: Range<usize>,
    /// Inputs, constants and weights it reads.
    pub leaves: Vec<Var>,
    /// Values of earlier segments it reads.
    pub reads: Vec<Var>,
    /// Values of its own that later segments read or that are outputs of the program.
    pub writes: Vec<Var>,
    /// Values of earlier segments, or its own, that no later segment reads: they can go when it ends, unless
    /// they are outputs.
    pub last_reads: Vec<Var>,
}

impl Segment {
    /// The weights among its leaves.
    pub fn weights<'a>(&'a self, program: &'a Program) -> impl Iterator<Item = Var> + 'a {
        self.leaves.iter().copied().filter(|&v| matches!(program.node(v).op, Op::Weight(_)))
    }
}

/// The segments of `program` when `cuts` are taken, in order; empty ones are left out.
///
/// [`Cuts::Auto`] takes none: memory is not known here.
///
/// # Errors
/// A cut number is out of range.
pub fn segments(program: &Program, cuts: &Cuts) -> Result<Vec<Segment>> {
    let all = program.cuts();
    let taken: Vec<usize> = match cuts {
        Cuts::Auto | Cuts::None => Vec::new(),
        Cuts::All => (0..all.len()).collect(),
        Cuts::At(list) => list.clone(),
    };
    let mut bounds: Vec<(usize, &str)> = Vec::new();
    for i in taken {
        let cut = all.get(i).ok_or_else(|| Error::internal(format!("there is no cut {i} of {}", all.len())))?;
        bounds.push((cut.at, &cut.label));
    }
    bounds.sort_unstable();
    bounds.dedup_by_key(|b| b.0);
    bounds.push((program.nodes().len(), ""));

    let mut out: Vec<Segment> = Vec::new();
    let mut start = 0;
    for (end, label) in bounds {
        let nodes = start..end;
        let (mut leaves, mut reads) = (BTreeSet::new(), BTreeSet::new());
        let mut computes = false;
        for node in program.nodes().get(nodes.clone()).unwrap_or(&[]) {
            computes |= !node.op.is_leaf();
            for &v in &node.inputs {
                if program.node(v).op.is_leaf() {
                    leaves.insert(v);
                } else if v.index() < start {
                    reads.insert(v);
                }
            }
        }
        if computes {
            out.push(Segment {
                label: label.into(),
                nodes,
                leaves: leaves.into_iter().collect(),
                reads: reads.into_iter().collect(),
                writes: Vec::new(),
                last_reads: Vec::new(),
            });
            // Leaves that only come before this segment's first node are no reason to start a segment of their own.
            start = end;
        }
    }
    hand_on(program, &mut out);
    Ok(out)
}

/// Fills in what each segment hands on, and what it reads for the last time.
fn hand_on(program: &Program, segments: &mut [Segment]) {
    let mut last_reader: HashMap<Var, usize> = HashMap::new();
    for (i, s) in segments.iter().enumerate() {
        for &v in &s.reads {
            last_reader.insert(v, i);
        }
    }
    let outputs: BTreeSet<Var> = program.outputs().iter().copied().collect();
    for (i, s) in segments.iter_mut().enumerate() {
        let made = |v: &&Var| s.nodes.contains(&v.index()) && !program.node(**v).op.is_leaf();
        let writes: BTreeSet<Var> = last_reader.keys().chain(&outputs).filter(made).copied().collect();
        s.writes = writes.into_iter().collect();
        let last: BTreeSet<Var> = last_reader.iter().filter(|&(_, &r)| r == i).map(|(&v, _)| v).collect();
        s.last_reads = last.into_iter().collect();
    }
}
