//! One segment of a program for a pretend device: which values are made of which, and where each would lie.

use std::collections::HashMap;

use super::workspace::Free;
use crate::device::{Cells, number};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::graph::{Program, Var};
use crate::plan::Segment;
use crate::tensor::{Data, Tensor};

/// What offsets of values are multiples of, in bytes.
const ALIGNMENT: usize = 32;

/// A segment for a pretend device.
pub(crate) struct Pretend {
    steps: Vec<Step>,
    /// Leaves, values of earlier segments, and those that are written.
    pub(crate) vars: Vec<Var>,
    /// Bytes of workspace.
    pub(crate) workspace: usize,
}

/// A node that is computed.
struct Step {
    /// What stands for it without its operands.
    number: u64,
    operands: Vec<At>,
    out: At,
    /// Bytes of the result.
    bytes: usize,
}

#[derive(Clone, Copy)]
enum At {
    /// An offset of the workspace.
    Workspace(usize),
    /// One of the segment's variables.
    Var(usize),
}

/// Lowers `segment`. Values are in the workspace from the node that makes them to the last one that reads them, unless
/// they are for others.
pub(crate) fn lower(program: &Program, segment: &Segment) -> Result<Pretend> {
    let vars: Vec<Var> = segment.leaves.iter().chain(&segment.reads).chain(&segment.writes).copied().collect();
    let mut at: HashMap<Var, At> = vars.iter().enumerate().map(|(i, &v)| (v, At::Var(i))).collect();
    let nodes = || segment.nodes.clone().map(|i| Var(i as u32)).filter(|&v| !program.node(v).op.is_leaf());
    let mut last = HashMap::new();
    for v in nodes() {
        last.insert(v, v);
        last.extend(program.node(v).inputs.iter().map(|&operand| (operand, v)));
    }
    let mut free = Free::default();
    let mut steps = Vec::new();
    for v in nodes() {
        let node = program.node(v);
        let bytes = bytes(program, v);
        let out = *at.entry(v).or_insert_with(|| At::Workspace(free.take(bytes.next_multiple_of(ALIGNMENT))));
        let find = |operand: &Var| {
            at.get(operand)
                .copied()
                .ok_or_else(|| Error::internal(format!("{} is lost", program.describe(*operand))))
        };
        let operands = node.inputs.iter().map(find).collect::<Result<Vec<_>>>()?;
        // `Debug` of floats is exact.
        let number = number((format!("{:?}", node.op), node.shape, node.dtype));
        steps.push(Step { number, operands, out, bytes });
        let mut done: Vec<Var> = node.inputs.iter().copied().chain([v]).collect();
        done.sort_unstable();
        done.dedup();
        for value in done.into_iter().filter(|value| last.get(value) == Some(&v)) {
            if let Some(&At::Workspace(offset)) = at.get(&value) {
                free.give(offset, self::bytes(program, value).next_multiple_of(ALIGNMENT));
            }
        }
    }
    Ok(Pretend { steps, vars, workspace: free.end })
}

/// Bytes of a value, whose elements are f32 or i32.
pub(crate) fn bytes(program: &Program, v: Var) -> usize {
    program.node(v).shape.elements().saturating_mul(DType::F32.block_bytes())
}

/// What stands for a tensor.
pub(crate) fn given(data: &Data) -> u64 {
    match data {
        Data::F32(v) => number(v.iter().map(|x| x.to_bits()).collect::<Vec<_>>()),
        Data::I32(v) => number(v),
    }
}

/// A tensor of values below 1 that tell what stands for it.
pub(crate) fn tensor(dims: &[usize], value: u64) -> Result<Tensor> {
    let element = |i: usize| (number((value, i)) >> 40) as f32 / (1 << 24) as f32;
    Tensor::f32(dims, (0..dims.iter().product()).map(element).collect())
}

impl Pretend {
    /// Pretends to compute in `space`; `outside` are the places of the variables.
    pub(crate) fn run(&self, space: &Cells, outside: &[(&Cells, usize)]) -> Result<()> {
        let place = |at: At| match at {
            At::Workspace(offset) => Ok((space, offset)),
            At::Var(i) => outside.get(i).copied().ok_or_else(|| Error::internal("a variable has no place")),
        };
        for step in &self.steps {
            let mut value = step.number;
            for &operand in &step.operands {
                let (cells, offset) = place(operand)?;
                value = number((value, cells.read(offset)?));
            }
            let (cells, offset) = place(step.out)?;
            cells.write(offset, step.bytes, value)?;
        }
        space.noop().compute(self.steps.len());
        Ok(())
    }
}
