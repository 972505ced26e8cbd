//! Lowered programs, kept for the next run of the same program.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::{Precision, RunnerOptions};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::ffi::{Buffer, Dev, DevKind, Id, types};
use crate::graph::{Op, Program, Var};
use crate::kernels::{CpuKernels, Isa};
use crate::lower::{Host, Lowered, Narrow, lower, lower_host};
use crate::plan::{Segment, segments};
use crate::scope::{Role, Weight};
use crate::tensor::Data;

/// A segment with its lowered form.
pub(super) struct Stage {
    pub(super) segment: Segment,
    pub(super) form: Form,
    /// The weights it reads, with their types in memory.
    pub(super) weights: Vec<(Var, Weight, DType)>,
    /// Values the lowering added and constants of the program.
    pub(super) constants: Option<Arc<Buffer>>,
    /// Where in it the constants of the program are.
    pub(super) constant_offsets: HashMap<Var, usize>,
}

/// What a segment was lowered to.
pub(super) enum Form {
    /// A graph of ggml's.
    Ggml(Box<Lowered>),
    /// Calls of the project's own kernels.
    Host(Host),
}

impl Form {
    /// Bytes of workspace.
    pub(super) fn workspace(&self) -> usize {
        match self {
            Form::Ggml(l) => l.layout.size,
            Form::Host(h) => h.workspace,
        }
    }

    /// What it reads from outside and what it writes for others.
    fn vars(&self) -> Vec<Var> {
        match self {
            Form::Ggml(l) => l.leaves.iter().chain(&l.writes).map(|&(v, _)| v).collect(),
            Form::Host(h) => h.vars.clone(),
        }
    }

    /// Bytes that a value of theirs takes.
    fn bytes(&self, program: &Program, v: Var, dev: Dev) -> Result<usize> {
        match self {
            Form::Ggml(l) => match l.leaves.iter().chain(&l.writes).find(|&&(w, _)| w == v) {
                Some(&(_, id)) => l.ctx.alloc_size(id, dev),
                None => Err(Error::internal("a value has no tensor")),
            },
            // Values are f32 or i32.
            Form::Host(_) => Ok(program.node(v).shape.elements().saturating_mul(4)),
        }
    }
}

/// A program as it runs with one choice of cuts.
pub(super) struct Plan {
    pub(super) signature: u128,
    pub(super) stages: Vec<Stage>,
    /// Inputs and what crosses segments, outputs included: offset and bytes.
    pub(super) carried: HashMap<Var, (usize, usize)>,
    /// Bytes of all that is carried.
    pub(super) carried_size: usize,
    /// The most that any segment needs for intermediate values.
    pub(super) workspace: usize,
    /// Inputs that are looked up in tables: ids must be below this.
    pub(super) id_limits: HashMap<Var, (usize, String)>,
}

/// What a segment needs, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentSize {
    /// The module that ends it; empty for the last.
    pub label: String,
    /// Intermediate values.
    pub workspace: usize,
    /// Weights in their memory types, those used in place included.
    pub weights: usize,
}

impl Plan {
    /// The plan of `program` on `dev`. The CPU computes what the device cannot, and `refuse`.
    pub(super) fn new(
        program: &Program,
        dev: Dev,
        options: &RunnerOptions,
        kernels: CpuKernels,
        refuse: &[&str],
    ) -> Result<Plan> {
        let isa = if dev.kind() == DevKind::Cpu { kernels.isa()? } else { None };
        let wide = wide_weights(program);
        let memory_type = |v: Var| -> Result<DType> {
            let Op::Weight(w) = &program.node(v).op else {
                return Err(Error::internal("only weights have memory types"));
            };
            let t = options.types.memory_type(w);
            // Devices round the other factor of an f16 matrix to f16.
            let t = if t == DType::F16 && wide.contains(&v) { DType::F32 } else { t };
            if w.role() == Role::Matrix && !types::multiplies(t) {
                let o = w.origin();
                return Err(Error::unsupported(format!(
                    "{} is {t} ({}), which ggml cannot multiply with",
                    o.name, o.file
                )));
            }
            Ok(t)
        };
        let segments = segments(program, &options.cuts)?;
        let narrow = narrow(program, options);
        // `refuse` names operations of ggml's graphs. Kernels and ggml round differently, so that all segments are for
        // one of them, or cuts would change a result.
        let hosts = match isa.filter(|_| refuse.is_empty()) {
            Some(isa) => {
                let host =
                    |s| lower_host(program, s, isa, &narrow, memory_type).map_err(|e| phase(e, s, "lowering"));
                segments.iter().map(host).collect::<Result<Option<Vec<Host>>>>()?
            }
            None => None,
        };
        let mut hosts = hosts.unwrap_or_default().into_iter();
        let mut stages = Vec::new();
        for segment in segments {
            let form = match hosts.next() {
                Some(host) => Form::Host(host),
                None => Form::Ggml(Box::new(
                    Plan::graph(program, &segment, dev, isa, options, refuse, memory_type)
                        .map_err(|e| phase(e, &segment, "lowering"))?,
                )),
            };
            let mut weights = Vec::new();
            for v in form.vars() {
                if let Op::Weight(w) = &program.node(v).op {
                    weights.push((v, w.clone(), memory_type(v)?));
                }
            }
            stages.push(Stage { segment, form, weights, constants: None, constant_offsets: HashMap::new() });
        }
        let workspace = stages.iter().map(|s| s.form.workspace()).max().unwrap_or(0);
        let mut plan = Plan {
            signature: program.signature(),
            stages,
            carried: HashMap::new(),
            carried_size: 0,
            workspace,
            id_limits: id_limits(program),
        };
        plan.carry(program, dev)?;
        for stage in &mut plan.stages {
            stage.upload_constants(program, dev)?;
        }
        Ok(plan)
    }

    /// `segment` as a graph of ggml's.
    fn graph(
        program: &Program,
        segment: &Segment,
        dev: Dev,
        isa: Option<&'static Isa>,
        options: &RunnerOptions,
        refuse: &[&str],
        memory_type: impl Fn(Var) -> Result<DType>,
    ) -> Result<Lowered> {
        let mut lowered = lower(program, segment, dev, isa.map(Isa::wide), memory_type)?;
        let mut refused = Vec::new();
        for &node in lowered.graph.nodes() {
            let can = lowered.ctx.is_supported(node, dev)?;
            if lowered.ctx.is_computed(node)? && (!can || refuse.contains(&lowered.ctx.op_name(node)?.as_str())) {
                refused.push(node);
            }
        }
        let Lowered { ctx, graph, .. } = &mut lowered;
        ctx.take_over(graph, &refused, super::threads(options.threads))?;
        Ok(lowered)
    }

    /// Gives inputs and crossing values places in one buffer: a value's place is free again after its last reader.
    fn carry(&mut self, program: &Program, dev: Dev) -> Result<()> {
        let align = dev.alignment();
        let mut lives: BTreeMap<Var, (usize, usize, usize)> = BTreeMap::new(); // first, last segment, bytes
        let last = self.stages.len().saturating_sub(1);
        for (i, stage) in self.stages.iter().enumerate() {
            for v in stage.form.vars() {
                if matches!(program.node(v).op, Op::Weight(_) | Op::Constant(_)) {
                    continue;
                }
                let size = stage.form.bytes(program, v, dev)?.max(1).next_multiple_of(align);
                let first = if program.node(v).op.is_leaf() { 0 } else { i };
                let live = lives.entry(v).or_insert((first, i, size));
                live.1 = if program.outputs().contains(&v) { last } else { i };
                live.2 = live.2.max(size);
            }
        }
        let mut placed: Vec<(usize, usize, usize, usize)> = Vec::new(); // first, last, offset, end
        for (v, (first, last, size)) in lives {
            let mut taken: Vec<(usize, usize)> =
                placed.iter().filter(|p| p.0 <= last && first <= p.1).map(|p| (p.2, p.3)).collect();
            taken.sort_unstable();
            let mut offset = 0;
            for (start, end) in taken {
                if start >= offset + size {
                    break;
                }
                offset = offset.max(end);
            }
            placed.push((first, last, offset, offset + size));
            self.carried.insert(v, (offset, size));
            self.carried_size = self.carried_size.max(offset + size);
        }
        Ok(())
    }

    /// What each segment needs.
    pub(super) fn sizes(&self) -> Vec<SegmentSize> {
        let size = |s: &Stage| SegmentSize {
            label: s.segment.label.clone(),
            workspace: s.form.workspace(),
            weights: s
                .weights
                .iter()
                .map(|(_, w, t)| t.bytes(w.shape().elements(), w.shape().last()).unwrap_or(0))
                .sum(),
        };
        self.stages.iter().map(size).collect()
    }
}

impl Stage {
    fn upload_constants(&mut self, program: &Program, dev: Dev) -> Result<()> {
        let l = match &mut self.form {
            Form::Ggml(l) => &mut **l,
            Form::Host(h) => {
                let constants = h.vars.iter().filter_map(|&v| match &program.node(v).op {
                    Op::Constant(t) => Some((v, t)),
                    _ => None,
                });
                let mut bytes = Vec::new();
                for (v, t) in constants {
                    self.constant_offsets.insert(v, bytes.len());
                    match t.data() {
                        Data::F32(x) => bytes.extend(x.iter().flat_map(|x| x.to_ne_bytes())),
                        Data::I32(x) => bytes.extend(x.iter().flat_map(|x| x.to_ne_bytes())),
                    }
                    bytes.resize(bytes.len().next_multiple_of(dev.alignment()), 0);
                }
                if !bytes.is_empty() {
                    let buffer = Arc::new(Buffer::alloc(dev, bytes.len())?);
                    buffer.write(0, &bytes)?;
                    self.constants = Some(buffer);
                }
                return Ok(());
            }
        };
        let mut all: Vec<(Id, Data)> = std::mem::take(&mut l.constants);
        for &(v, id) in &l.leaves {
            if let Op::Constant(t) = &program.node(v).op {
                all.push((id, t.data().clone()));
            }
        }
        if all.is_empty() {
            return Ok(());
        }
        let align = dev.alignment();
        let mut size = 0;
        let mut offsets = Vec::new();
        for (id, _) in &all {
            offsets.push(size);
            size += l.ctx.alloc_size(*id, dev)?.next_multiple_of(align);
        }
        let buffer = Arc::new(Buffer::alloc(dev, size)?);
        for ((id, data), offset) in all.iter().zip(offsets) {
            l.ctx.place(*id, &buffer, offset, dev)?;
            l.ctx.write_elements(*id, &buffer, data)?;
        }
        self.constants = Some(buffer);
        Ok(())
    }
}

/// An error with the segment and what was being done in it.
pub(super) fn phase(e: Error, segment: &Segment, doing: &str) -> Error {
    if e.is_cancelled() {
        return e;
    }
    match segment.label.as_str() {
        "" => e.context(doing),
        label => e.context(doing).context(format!("segment {label}")),
    }
}

/// Weights of layers whose products overflow f16.
fn wide_weights(program: &Program) -> std::collections::HashSet<Var> {
    let wide = |op: &Op| matches!(op, Op::Linear { wide: true } | Op::Conv2d { wide: true, .. });
    program.nodes().iter().filter(|n| wide(&n.op)).filter_map(|n| n.inputs.get(1)).copied().collect()
}

/// What is multiplied as bf16: weights of most elements decide about products of values.
fn narrow(program: &Program, options: &RunnerOptions) -> Narrow {
    let wide = wide_weights(program);
    let mut out = Narrow { weights: Default::default(), values: options.precision == Precision::Bf16 };
    let (mut elements, mut all) = (0, 0);
    for (v, node) in program.iter() {
        let Op::Weight(w) = &node.op else { continue };
        if matches!(w.role(), Role::Matrix | Role::Kernel) {
            let narrow = options.precision.is_narrow(w, &options.types);
            all += w.shape().elements();
            elements += if narrow { w.shape().elements() } else { 0 };
            if narrow && !wide.contains(&v) {
                out.weights.insert(v);
            }
        }
    }
    out.values |= 2 * elements > all;
    out
}

fn id_limits(program: &Program) -> HashMap<Var, (usize, String)> {
    let mut out: HashMap<Var, (usize, String)> = HashMap::new();
    for node in program.nodes().iter().filter(|n| matches!(n.op, Op::Embedding)) {
        if let [table, ids] = node.inputs[..] {
            let rows = program.node(table).shape.dim(0);
            let limit = out.entry(ids).or_insert((rows, program.describe(table)));
            if rows < limit.0 {
                *limit = (rows, program.describe(table));
            }
        }
    }
    out
}
