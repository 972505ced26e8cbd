//! Lowered programs, kept for the next run of the same program.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use super::{Precision, RunnerOptions};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::ffi::{Dev, DevKind, types};
use crate::graph::{Op, Program, Var};
use crate::kernels::{CpuKernels, Isa, can_read};
use crate::lower::{Host, Lowered, Narrow, Pretend, bytes, lower, lower_host, pretend};
use crate::plan::{Crossing, Cuts, Segment, Sizes, Unit, segments};
use crate::residency::{Store, WeightId};
use crate::scope::Role;

/// A segment with its lowered form.
pub(super) struct Stage {
    pub(super) segment: Segment,
    /// What messages call it.
    pub(super) name: Arc<str>,
    pub(super) form: Form,
    /// The weights it reads, in the order of the form's.
    pub(super) weights: Vec<WeightId>,
    /// The same weights, each once, by the unit that first reads them.
    pub(super) groups: Vec<(usize, Vec<WeightId>)>,
    /// Bytes of device memory that they take together.
    pub(super) weight_bytes: usize,
    /// The device that runs it, by its number.
    pub(super) lane: usize,
}

/// What a segment was lowered to.
pub(super) enum Form {
    /// A graph of ggml's.
    Ggml(Box<Lowered>),
    /// Calls of the project's own kernels.
    Host(Host),
    /// What a pretend device does.
    Noop(Pretend),
}

impl Form {
    /// Bytes of workspace.
    pub(super) fn workspace(&self) -> usize {
        match self {
            Form::Ggml(l) => l.layout.size,
            Form::Host(h) => h.workspace,
            Form::Noop(n) => n.workspace,
        }
    }

    /// What it reads from outside and what it writes for others.
    fn vars(&self) -> Vec<Var> {
        match self {
            Form::Ggml(l) => l.leaves.iter().chain(&l.writes).map(|&(v, _)| v).collect(),
            Form::Host(h) => h.vars.clone(),
            Form::Noop(n) => n.vars.clone(),
        }
    }

    /// Bytes that a value of theirs takes.
    fn bytes(&self, program: &Program, v: Var, dev: Dev) -> Result<usize> {
        match self {
            Form::Ggml(l) => match l.leaves.iter().chain(&l.writes).find(|&&(w, _)| w == v) {
                Some(&(_, id)) => l.ctx.alloc_size(id, dev),
                None => Err(Error::internal("a value has no tensor")),
            },
            Form::Host(_) | Form::Noop(_) => Ok(bytes(program, v)),
        }
    }
}

/// Something that a plan keeps in a buffer of crossing values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Carried {
    /// An input, a value that crosses segments, an output, or a constant of the program.
    Value(Var),
    /// A constant that the lowering of a stage added.
    Added(usize, usize),
}

/// A program as it runs with one choice of cuts.
pub(super) struct Plan {
    /// What tells it from all other plans of its runner.
    pub(super) id: usize,
    pub(super) signature: u128,
    pub(super) stages: Vec<Stage>,
    /// Where in the buffer of crossing values of a device, by its number, each lies.
    pub(super) carried: HashMap<(usize, Carried), usize>,
    /// For each stage the values it makes that stages on other devices read.
    pub(super) sent: Vec<Vec<Var>>,
    /// What it needs on each device.
    pub(super) shares: Vec<Share>,
    /// Values that cross from stage to stage.
    crossing: Vec<Crossing>,
    /// Inputs that are looked up in tables: ids must be below this.
    pub(super) id_limits: HashMap<Var, (usize, String)>,
    /// What it would need in one segment, if its segments were chosen so that it fits.
    pub(super) whole: Option<usize>,
    /// The capacities that it was divided for among devices, in bytes.
    pub(super) divided_for: Vec<usize>,
}

/// What a plan needs on one device, in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Share {
    /// All that is carried.
    pub(super) carried: usize,
    /// The most that any stage needs for intermediate values.
    pub(super) workspace: usize,
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

/// How segments are lowered.
pub(super) struct Lowering<'a> {
    /// The device's number.
    pub(super) lane: usize,
    pub(super) dev: Dev,
    /// Whether the device is a pretend one, which only has the sizes of `dev`.
    pub(super) pretend: bool,
    pub(super) options: &'a RunnerOptions,
    pub(super) kernels: CpuKernels,
    /// Operations of ggml that the CPU computes although the device could.
    pub(super) refuse: &'a [&'a str],
}

impl Plan {
    /// The plan of `program` with these cuts, and how many stages were lowered for it: those among `known` are taken from
    /// there. `parts` are the nodes, in their order, with which devices begin their parts, and how programs are lowered
    /// for each; the first has what comes before.
    pub(super) fn new(
        program: &Program,
        cuts: &Cuts,
        known: Vec<Stage>,
        parts: &[(usize, Lowering<'_>)],
        store: &mut Store,
    ) -> Result<(Plan, usize)> {
        let segments = segments(program, cuts)?;
        let [first, ..] = parts else { return Err(Error::internal("no device")) };
        let lowering = |s: &Segment| &parts.iter().rfind(|p| p.0 <= s.nodes.start).unwrap_or(first).1;
        // Kernels and ggml round differently, so that all segments of a device are for one of them, or cuts would change
        // a result.
        let by_ggml: HashSet<usize> =
            known.iter().filter(|s| !matches!(s.form, Form::Host(_))).map(|s| s.lane).collect();
        let mut known: HashMap<(usize, usize), Stage> =
            known.into_iter().map(|s| ((s.lane, s.segment.nodes.start), s)).collect();
        let mut take = |s: &Segment| match known.remove(&(lowering(s).lane, s.nodes.start)) {
            Some(stage) if stage.segment == *s => Some(stage),
            _ => None,
        };
        let mut stages: Vec<Stage> = Vec::new();
        let mut new: BTreeMap<usize, (&Lowering<'_>, Vec<Segment>)> = BTreeMap::new();
        for segment in segments {
            match take(&segment) {
                Some(stage) => stages.push(stage),
                None => {
                    let how = lowering(&segment);
                    new.entry(how.lane).or_insert_with(|| (how, Vec::new())).1.push(segment);
                }
            }
        }
        let lowered = new.values().map(|(_, segments)| segments.len()).sum();
        for (how, segments) in new.into_values() {
            let by_kernels = !by_ggml.contains(&how.lane);
            stages.extend(lower_stages(program, segments, by_kernels, how, store)?);
        }
        stages.sort_by_key(|s| s.segment.nodes.start);
        let mut sent: Vec<Vec<Var>> = stages.iter().map(|_| Vec::new()).collect();
        for (made, values) in stages.iter().zip(&mut sent) {
            let elsewhere = |v: &Var| stages.iter().any(|s| s.lane != made.lane && s.segment.reads.contains(v));
            values.extend(made.segment.writes.iter().copied().filter(elsewhere));
        }
        let mut plan = Plan {
            id: 0,
            signature: program.signature(),
            stages,
            carried: HashMap::new(),
            sent,
            shares: Vec::new(),
            crossing: Vec::new(),
            id_limits: id_limits(program),
            whole: None,
            divided_for: Vec::new(),
        };
        for (_, how) in parts {
            plan.carry(program, how.lane, how.dev)?;
        }
        Ok((plan, lowered))
    }

    /// Gives inputs, constants and crossing values that stages of a device touch places in one buffer: the place of a
    /// value is free again after its last reader, those of constants never.
    fn carry(&mut self, program: &Program, lane: usize, dev: Dev) -> Result<()> {
        let align = dev.alignment();
        let end = self.stages.len().saturating_sub(1);
        let mut share = Share::default();
        let mut lives: BTreeMap<Carried, (usize, usize, usize)> = BTreeMap::new(); // first, last segment, bytes
        for (i, stage) in self.stages.iter().enumerate().filter(|(_, s)| s.lane == lane) {
            share.workspace = share.workspace.max(stage.form.workspace());
            for v in stage.form.vars() {
                let op = &program.node(v).op;
                if matches!(op, Op::Weight(_)) {
                    continue;
                }
                let size = stage.form.bytes(program, v, dev)?.max(1).next_multiple_of(align);
                let constant = matches!(op, Op::Constant(_));
                let live = lives.entry(Carried::Value(v)).or_insert((if constant { 0 } else { i }, i, size));
                live.1 = if constant { end } else { i };
                live.2 = live.2.max(size);
            }
            if let Form::Ggml(l) = &stage.form {
                for (k, (id, _)) in l.constants.iter().enumerate() {
                    let size = l.ctx.alloc_size(*id, dev)?.next_multiple_of(align);
                    lives.insert(Carried::Added(i, k), (0, end, size));
                }
            }
        }
        let crosses = |(c, &(made, read, bytes)): (&Carried, &(usize, usize, usize))| match c {
            Carried::Value(v) if !program.node(*v).op.is_leaf() => Some(Crossing { made, read, bytes }),
            _ => None,
        };
        self.crossing.extend(lives.iter().filter_map(crosses));
        // Large ones first leave fewer gaps.
        let mut order: Vec<_> = lives.into_iter().collect();
        order.sort_by_key(|(c, l)| (std::cmp::Reverse(l.2), *c));
        let mut placed: Vec<(usize, usize, usize, usize)> = Vec::new(); // first, last, offset, end
        for (c, (first, last, size)) in order {
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
            self.carried.insert((lane, c), offset);
            share.carried = share.carried.max(offset + size);
        }
        self.shares.resize(self.shares.len().max(lane + 1), Share::default());
        if let Some(s) = self.shares.get_mut(lane) {
            *s = share;
        }
        Ok(())
    }

    /// What it needs on a device.
    pub(super) fn share(&self, lane: usize) -> Share {
        self.shares.get(lane).copied().unwrap_or_default()
    }

    /// Bytes of device memory that a stage needs while it runs.
    pub(super) fn need(&self, stage: &Stage) -> usize {
        stage.weight_bytes + stage.form.workspace() + self.share(stage.lane).carried
    }

    /// Whether each stage has what it needs where devices give so many bytes.
    pub(super) fn fits(&self, capacities: &[usize]) -> bool {
        self.stages.iter().all(|s| capacities.get(s.lane).is_some_and(|&c| self.need(s) <= c))
    }

    /// The stage that needs most.
    pub(super) fn largest(&self) -> Option<&Stage> {
        self.stages.iter().max_by_key(|s| self.need(s))
    }

    /// What each segment needs.
    pub(super) fn sizes(&self, store: &Store) -> Vec<SegmentSize> {
        let bytes = |id: &WeightId| store.stored(*id);
        let size = |s: &Stage| SegmentSize {
            label: s.segment.label.clone(),
            workspace: s.form.workspace(),
            weights: s.groups.iter().flat_map(|g| &g.1).map(bytes).sum(),
        };
        self.stages.iter().map(size).collect()
    }

    /// Its stages as units that segments are made of.
    pub(super) fn units(&self, store: &Store) -> Sizes {
        let mut numbers: BTreeMap<WeightId, usize> = BTreeMap::new();
        let mut sizes =
            Sizes { carried: self.share(0).carried, crossing: self.crossing.clone(), ..Sizes::default() };
        for stage in &self.stages {
            let mut unit = Unit { workspace: stage.form.workspace(), weights: Vec::new() };
            for &id in stage.groups.iter().flat_map(|g| &g.1) {
                let number = *numbers.entry(id).or_insert_with(|| {
                    sizes.weights.push(store.size(id, 0));
                    sizes.weights.len() - 1
                });
                unit.weights.push(number);
            }
            sizes.units.push(unit);
        }
        sizes
    }
}

/// Stages of these segments for one device; with the project's own kernels only if `by_kernels`.
fn lower_stages(
    program: &Program,
    segments: Vec<Segment>,
    by_kernels: bool,
    how: &Lowering<'_>,
    store: &mut Store,
) -> Result<Vec<Stage>> {
    let isa = if how.dev.kind() == DevKind::Cpu { how.kernels.isa()? } else { None };
    let wide = wide_weights(program);
    let memory_type = |v: Var, kernels: bool| -> Result<DType> {
        let Op::Weight(w) = &program.node(v).op else {
            return Err(Error::internal("only weights have memory types"));
        };
        let t = how.options.types.memory_type(w, kernels);
        // Devices round the other factor of an f16 matrix to f16; kernels do not.
        let t = if t == DType::F16 && wide.contains(&v) && !kernels { DType::F32 } else { t };
        if w.role() == Role::Matrix && !types::multiplies(t) && !(kernels && can_read(t)) {
            let o = w.origin();
            return Err(Error::unsupported(format!(
                "{} is {t} ({}), which ggml cannot multiply with",
                o.name, o.file
            )));
        }
        Ok(t)
    };
    let narrow = narrow(program, how.options);
    // `refuse` names operations of ggml's graphs.
    let hosts = match isa.filter(|_| by_kernels && how.refuse.is_empty() && !how.pretend) {
        Some(isa) => {
            let host = |s| {
                lower_host(program, s, isa, &narrow, |v| memory_type(v, true))
                    .map_err(|e| phase(e, &name(program, s), "lowering"))
            };
            segments.iter().map(host).collect::<Result<Option<Vec<Host>>>>()?
        }
        None => None,
    };
    let kernels = hosts.is_some();
    let mut hosts = hosts.unwrap_or_default().into_iter();
    let first_unit = first_units(program);
    let mut stages = Vec::with_capacity(segments.len());
    for segment in segments {
        let name: Arc<str> = name(program, &segment).into();
        let form = match hosts.next() {
            Some(host) => Form::Host(host),
            None if how.pretend => Form::Noop(pretend(program, &segment)?),
            None => Form::Ggml(Box::new(
                graph(program, &segment, how, isa, |v| memory_type(v, kernels))
                    .map_err(|e| phase(e, &name, "lowering"))?,
            )),
        };
        let mut weights = Vec::new();
        let mut groups: BTreeMap<usize, Vec<WeightId>> = BTreeMap::new();
        let mut seen = HashSet::new();
        for v in form.vars() {
            if let Op::Weight(w) = &program.node(v).op {
                let id = store.intern(w, memory_type(v, kernels)?)?;
                weights.push(id);
                if seen.insert(id) {
                    groups.entry(first_unit.get(&v).copied().unwrap_or(0)).or_default().push(id);
                }
            }
        }
        let weight_bytes = seen.iter().map(|&id| store.size(id, how.lane)).sum();
        let groups = groups.into_iter().collect();
        stages.push(Stage { segment, name, form, weights, groups, weight_bytes, lane: how.lane });
    }
    Ok(stages)
}

/// `segment` as a graph of ggml's.
fn graph(
    program: &Program,
    segment: &Segment,
    how: &Lowering<'_>,
    isa: Option<&'static Isa>,
    memory_type: impl Fn(Var) -> Result<DType>,
) -> Result<Lowered> {
    let mut lowered = lower(program, segment, how.dev, isa.map(Isa::wide), memory_type)?;
    let mut refused = Vec::new();
    for &node in lowered.graph.nodes() {
        let can = lowered.ctx.is_supported(node, how.dev)?;
        let named = || Ok::<_, Error>(how.refuse.contains(&lowered.ctx.op_name(node)?.as_str()));
        if lowered.ctx.is_computed(node)? && (!can || named()?) {
            refused.push(node);
        }
    }
    let Lowered { ctx, graph, .. } = &mut lowered;
    ctx.take_over(graph, &refused, super::threads(how.options.threads))?;
    Ok(lowered)
}

/// For each weight the number of cuts before the node that first reads it.
fn first_units(program: &Program) -> HashMap<Var, usize> {
    let mut out = HashMap::new();
    let mut cuts = program.cuts().iter().map(|c| c.at).collect::<Vec<_>>();
    cuts.sort_unstable();
    cuts.dedup();
    for (v, node) in program.iter().filter(|(_, n)| !n.op.is_leaf()) {
        let unit = cuts.partition_point(|&at| at <= v.index());
        for &w in node.inputs.iter().filter(|&&w| matches!(program.node(w).op, Op::Weight(_))) {
            out.entry(w).or_insert(unit);
        }
    }
    out
}

/// What messages call a segment: the modules that end its units.
fn name(program: &Program, segment: &Segment) -> String {
    let inside = |c: &&crate::graph::Cut| c.at > segment.nodes.start && c.at < segment.nodes.end;
    let last = match segment.label.as_str() {
        // The whole program.
        "" if segment.nodes.start == 0 => return String::new(),
        "" => "end",
        label => label,
    };
    let Some(first) = program.cuts().iter().filter(inside).min_by_key(|c| c.at).map(|c| &*c.label) else {
        return last.to_owned();
    };
    let last = match (first.rsplit_once('.'), last.rsplit_once('.')) {
        (Some((a, _)), Some((b, n))) if a == b => n,
        _ => last,
    };
    format!("{first}..{last}")
}

/// An error with the segment and what was being done in it.
pub(super) fn phase(e: Error, segment: &str, doing: &str) -> Error {
    if e.is_cancelled() {
        return e;
    }
    match segment {
        "" => e.context(doing),
        name => e.context(doing).context(format!("segment {name}")),
    }
}

/// Weights of layers whose products overflow f16.
fn wide_weights(program: &Program) -> HashSet<Var> {
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
