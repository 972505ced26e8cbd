//! A run: segment by segment, weights and memory first.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::cache::{Carried, Form, Plan, Stage, phase};
use super::executor::{Lane, Runner};
use super::threads;
use crate::cancel::CancelToken;
use crate::device::{Cells, Device};
use crate::error::{Error, Result};
use crate::ffi::Buffer;
use crate::graph::{Op, Program, Var};
use crate::kernels::{Memory, Pool, run};
use crate::lower::{bytes, given, tensor};
use crate::residency::{
    Loader, Manager, NotLoaded, Pending, Pins, Place, Refusal, RoomKind, Space, Store, Want, shown,
};
use crate::tensor::{Data, Tensor};
use crate::trace::EventKind;

/// Buffers of a runner that others may take once this is gone.
struct Busy {
    manager: Arc<Manager>,
    module: u64,
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.manager.rest(self.module, None);
    }
}

/// What a stage wants of the weights.
fn want<'a>(stage: &'a Stage, workspace: usize, cancel: &'a CancelToken) -> Want<'a> {
    Want { lane: stage.lane, groups: &stage.groups, workspace, segment: &stage.name, cancel }
}

/// Weights for stages to come. It is best effort: what it does not bring is loaded when its stage is reached.
struct Ahead {
    wanted: bool,
    /// The stage whose weights are being loaded, and its device's number.
    pending: Option<(usize, usize, Pending)>,
    /// What keeps the weights of later stages that are there.
    kept: Vec<(usize, Vec<Pins>)>,
    /// The first stage that was not looked at.
    next: usize,
}

impl Ahead {
    fn new(wanted: bool) -> Ahead {
        Ahead { wanted, pending: None, kept: Vec::new(), next: 0 }
    }

    /// Waits for weights of stage `i` that are being loaded.
    fn reach(&mut self, i: usize, store: &mut Store) {
        if let Some(pending) = self.pending.take_if(|p| p.0 <= i) {
            self.take(pending, store);
        }
    }

    fn take(&mut self, (stage, lane, pending): (usize, usize, Pending), store: &mut Store) {
        let (loaded, failed) = pending.wait();
        self.kept.push((stage, loaded.into_iter().map(|l| store.accept(lane, l)).collect()));
        match failed {
            None | Some(NotLoaded::Refused(Refusal::Limit { .. })) => {}
            // The stage meets the same error, or does without.
            Some(NotLoaded::Refused(Refusal::Failed(e)) | NotLoaded::Failed(e)) => {
                tracing::debug!("weights are not loaded ahead any more: {e}");
                self.wanted = false;
            }
        }
    }

    /// Lets go what was kept for stage `i`, whose own pins keep it now.
    fn ran(&mut self, i: usize) {
        self.kept.retain(|k| k.0 > i);
    }

    /// Keeps nothing any more, so that all memory is there for the stage that runs; whether that is a change.
    fn give_up(&mut self, store: &mut Store) -> bool {
        let was = self.pending.is_some() || !self.kept.is_empty();
        if let Some(pending) = self.pending.take() {
            self.take(pending, store);
        }
        self.kept.clear();
        self.wanted = false;
        was
    }

    /// While stage `i` computes, begins to load the weights of the next stage that lacks some. Those of the stages
    /// between them stay.
    fn queue(&mut self, i: usize, plan: &Plan, store: &Store, loader: &mut Option<Loader>, cancel: &CancelToken) {
        if !self.wanted || self.pending.is_some() {
            return;
        }
        self.next = self.next.max(i + 1);
        while let Some(stage) = plan.stages.get(self.next) {
            let want = want(stage, plan.share(stage.lane).workspace, cancel);
            let Ok((pins, loads)) = store.loads(want, EventKind::Prefetch) else {
                return;
            };
            let at = self.next;
            self.next += 1;
            self.kept.push((at, vec![pins]));
            if loads.is_empty() {
                // Of pages, those of one stage are asked for at a time.
                if store.streams(stage.lane) {
                    return;
                }
                continue;
            }
            if loader.is_none() {
                *loader = Loader::start().inspect_err(|e| tracing::debug!("{e}")).ok();
            }
            let begun = loader.as_ref().and_then(|l| l.begin(loads.into_iter().map(|l| l.0).collect()));
            self.pending = begun.map(|p| (at, stage.lane, p));
            if self.pending.is_none() {
                // The thread ended; another run may start a new one.
                *loader = None;
                self.wanted = false;
            }
            return;
        }
    }
}

/// What stays the same from stage to stage.
struct Run<'a> {
    program: &'a Program,
    /// Places in the buffers of crossing values.
    places: HashMap<(usize, Carried), usize>,
    /// Those buffers, of each device that runs a stage.
    carried: Vec<Option<Carrier>>,
    given: HashMap<Var, &'a Tensor>,
    /// Values on their way to other devices than the one with this number.
    sent: HashMap<Var, (usize, Value<'static>)>,
    /// Inputs, constants and values of other devices that are there.
    uploaded: HashSet<(usize, Var)>,
    cancel: &'a CancelToken,
}

/// A buffer of crossing values.
struct Carrier {
    space: Space,
    /// Whether constants are to be written.
    constants: bool,
}

/// A value in main memory.
enum Value<'a> {
    Data(Cow<'a, Data>),
    /// What stands for it on pretend devices.
    Number(u64),
}

impl Value<'_> {
    fn data(&self) -> Result<&Data> {
        match self {
            Value::Data(data) => Ok(data),
            Value::Number(_) => Err(Error::internal("a value of a pretend device")),
        }
    }

    fn number(&self) -> u64 {
        match self {
            Value::Data(data) => given(data),
            Value::Number(n) => *n,
        }
    }
}

impl Runner {
    /// The results of plan `at`.
    pub(super) fn run_plan(
        &mut self,
        program: &Program,
        at: usize,
        inputs: &[(&str, &Tensor)],
        cancel: &CancelToken,
    ) -> Result<Vec<Tensor>> {
        let Runner { lanes, pool, store, options, plans, loader, .. } = self;
        let Some(plan) = plans.get_mut(at) else { return Err(Error::internal("no such plan")) };
        let given = bind(program, plan, inputs)?;
        let (manager, module) = (store.manager().clone(), store.module());
        manager.begin(module);
        let busy = Busy { manager: manager.clone(), module };
        let devices: Vec<Arc<Device>> = lanes.iter().map(|l| l.device.clone()).collect();
        let refuse = |plan: &Plan, stage: &Stage, r: Refusal, store: &Store, doing: &str| {
            let r = match r {
                Refusal::Failed(e) => Refusal::Failed(e.context(doing)),
                limit => limit,
            };
            match devices.get(stage.lane) {
                Some(device) => refused(plan, stage, r, device, store, &options.module),
                None => Error::internal("no such device"),
            }
        };
        let mut outputs: Vec<Option<Tensor>> = program.outputs().iter().map(|_| None).collect();
        let mut carried: Vec<Option<Carrier>> = Vec::new();
        for (number, lane) in lanes.iter_mut().enumerate() {
            let Some(first) = plan.stages.iter().find(|s| s.lane == number) else {
                carried.push(None);
                continue;
            };
            let asker = store.asker(number, first.form.workspace());
            // What the device's first stage reads stays while others make room.
            let space = loop {
                let pins = store.loads(want(first, 0, cancel), EventKind::Load)?.0;
                manager.trim(asker);
                let carried = manager.room(RoomKind::Carried, plan.share(number).carried, 0, asker);
                drop(pins);
                match carried {
                    Err(Refusal::Limit { .. }) if store.shed(want(first, 0, cancel)) => {}
                    Err(r) => return Err(refuse(plan, first, r, store, "allocating values between segments")),
                    Ok(carried) => break carried,
                }
            };
            let constants = lane.constants_of != Some((plan.id, space.serial()));
            lane.constants_of = None;
            carried.push(Some(Carrier { space, constants }));
        }
        let places = std::mem::take(&mut plan.carried);
        let (sent, uploaded) = Default::default();
        let mut run = Run { program, places, carried, given, sent, uploaded, cancel };
        let mut ahead = Ahead::new(manager.options().prefetch && plan.stages.len() > 1);
        let mut all = |ahead: &mut Ahead, store: &mut Store| -> Result<()> {
            for i in 0..plan.stages.len() {
                cancel.check()?;
                ahead.reach(i, store);
                let Some(stage) = plan.stages.get(i) else { continue };
                let want = want(stage, stage.form.workspace(), cancel);
                let (asker, liked) = (store.asker(stage.lane, want.workspace), plan.share(stage.lane).workspace);
                let (held, space) = loop {
                    let mut doing = "loading weights";
                    let both = store.ensure(want, &stage.weights).and_then(|held| {
                        doing = "allocating workspace";
                        let room = manager.room(RoomKind::Workspace, want.workspace, liked, asker);
                        room.map(|space| (held, space)).map_err(NotLoaded::Refused)
                    });
                    match both {
                        Ok(both) => break both,
                        Err(NotLoaded::Refused(Refusal::Limit { .. }))
                            if ahead.give_up(store) || store.shed(want) => {}
                        Err(NotLoaded::Refused(r)) => return Err(refuse(plan, stage, r, store, doing)),
                        Err(NotLoaded::Failed(e)) => return Err(phase(e, &stage.name, doing)),
                    }
                };
                ahead.ran(i);
                cancel.check()?;
                ahead.queue(i, plan, store, loader, cancel);
                let Some(stage) = plan.stages.get_mut(i) else { continue };
                let lane = lanes.get_mut(stage.lane).ok_or_else(|| Error::internal("no such device"))?;
                let started = manager.now();
                run.stage(i, stage, &space, &held.places, lane, || {
                    Ok(match pool {
                        Some(pool) => pool,
                        None => pool.insert(Pool::new(threads(options.threads))?),
                    })
                })?;
                manager.note(started, EventKind::Compute, asker, &stage.name, asker.workspace);
                held.used().map_err(|e| phase(e, &stage.name, "computing"))?;
                drop((held, space));
                manager.rest(module, Some(RoomKind::Workspace));
                let sent = plan.sent.get(i).map_or(&[][..], Vec::as_slice);
                run.results(stage, sent, &mut outputs).map_err(|e| phase(e, &stage.name, "reading results"))?;
            }
            Ok(())
        };
        let done = all(&mut ahead, store);
        ahead.give_up(store);
        plan.carried = std::mem::take(&mut run.places);
        done?;
        for (lane, carrier) in lanes.iter_mut().zip(&run.carried) {
            lane.constants_of = carrier.as_ref().map(|c| (plan.id, c.space.serial()));
        }
        drop(busy);
        finished(outputs, program, &run.given, store)
    }

    /// Loads the weights of plan `at`, on each device from its first segment on, until memory is full.
    pub(super) fn load_plan(&mut self, at: usize, cancel: &CancelToken) -> Result<()> {
        let Some(plan) = self.plans.get(at) else { return Err(Error::internal("no such plan")) };
        let mut full = HashSet::new();
        for stage in &plan.stages {
            cancel.check()?;
            if full.contains(&stage.lane) {
                continue;
            }
            match self.store.fill(want(stage, 0, cancel)) {
                Ok(true) => {}
                Ok(false) => {
                    full.insert(stage.lane);
                }
                Err(e) => return Err(phase(e, &stage.name, "loading weights")),
            }
        }
        Ok(())
    }
}

impl<'a> Run<'a> {
    fn place(&self, lane: usize, c: Carried) -> Result<usize> {
        self.places.get(&(lane, c)).copied().ok_or_else(|| match c {
            Carried::Value(v) => Error::internal(format!("{} has no place", self.program.describe(v))),
            Carried::Added(..) => Error::internal("a constant has no place"),
        })
    }

    fn carrier(&self, lane: usize) -> Result<&Carrier> {
        self.carried.get(lane).and_then(Option::as_ref).ok_or_else(|| Error::internal("a device has no room"))
    }

    /// What is to be written before `v` is read for the first time on a device.
    fn fresh(&mut self, lane: usize, v: Var) -> Option<Value<'_>> {
        let program: &'a Program = self.program;
        let constants = self.carrier(lane).is_ok_and(|c| c.constants);
        let value = match &program.node(v).op {
            Op::Constant(t) if constants => Value::Data(Cow::Borrowed(t.data())),
            Op::Input(_) => Value::Data(Cow::Borrowed(self.given.get(&v)?.data())),
            _ => match self.sent.get(&v)? {
                (made, _) if *made == lane => return None,
                (_, Value::Data(data)) => Value::Data(Cow::Borrowed(data)),
                (_, Value::Number(n)) => Value::Number(*n),
            },
        };
        self.uploaded.insert((lane, v)).then_some(value)
    }

    /// Computes stage number `i` in `space`. `weights` are in the order of its.
    fn stage<'p>(
        &mut self,
        i: usize,
        stage: &mut Stage,
        space: &Space,
        weights: &[Place],
        lane: &mut Lane,
        pool: impl FnOnce() -> Result<&'p mut Pool>,
    ) -> Result<()> {
        let Stage { form, name, lane: number, .. } = stage;
        let number = *number;
        let carried = self.carrier(number)?.space.clone();
        match form {
            Form::Host(h) => {
                let mut buffers: Vec<(Arc<Buffer>, usize)> = vec![(space.ggml()?.clone(), 0)];
                let mut weights = weights.iter();
                for &v in &h.vars {
                    buffers.push(if let Op::Weight(w) = &self.program.node(v).op {
                        let missing = || Error::internal(format!("{} has no place", w.name()));
                        let (space, offset) = weights.next().ok_or_else(missing)?;
                        (space.ggml()?.clone(), *offset)
                    } else {
                        let offset = self.place(number, Carried::Value(v))?;
                        let carried = carried.ggml()?.clone();
                        if let Some(value) = self.fresh(number, v) {
                            let written = value.data().and_then(|data| write(&carried, offset, data));
                            written.map_err(|e| phase(e, name, "preparing"))?;
                        }
                        (carried, offset)
                    });
                }
                let memories: Vec<Memory> = buffers.iter().map(|(b, offset)| Memory::new(b, *offset)).collect();
                run(&h.steps, &memories, pool()?, self.cancel).map_err(|e| phase(e, name, "computing"))
            }
            Form::Noop(n) => {
                let mut places: Vec<(Arc<Cells>, usize)> = Vec::new();
                let mut weights = weights.iter();
                for &v in &n.vars {
                    places.push(if let Op::Weight(w) = &self.program.node(v).op {
                        let missing = || Error::internal(format!("{} has no place", w.name()));
                        let (space, offset) = weights.next().ok_or_else(missing)?;
                        (space.noop()?.clone(), *offset)
                    } else {
                        let offset = self.place(number, Carried::Value(v))?;
                        let (cells, bytes) = (carried.noop()?.clone(), bytes(self.program, v));
                        if let Some(value) = self.fresh(number, v) {
                            cells.write(offset, bytes, value.number())?;
                        }
                        (cells, offset)
                    });
                }
                let places: Vec<(&Cells, usize)> = places.iter().map(|(c, at)| (&**c, *at)).collect();
                n.run(space.noop()?, &places).map_err(|e| phase(e, name, "computing"))
            }
            Form::Ggml(l) => {
                let carried = carried.ggml()?.clone();
                let dev = lane.dev;
                let constants = self.carrier(number)?.constants;
                let space = space.ggml()?.clone();
                let mut held: Vec<Arc<Buffer>> = vec![carried.clone(), space.clone()];
                let mut weights = weights.iter();
                let mut prepare = || -> Result<()> {
                    for &(id, offset) in &l.layout.places {
                        l.ctx.place(id, &space, offset, dev)?;
                    }
                    for (k, (id, data)) in l.constants.iter().enumerate() {
                        l.ctx.place(*id, &carried, self.place(number, Carried::Added(i, k))?, dev)?;
                        if constants {
                            l.ctx.write_elements(*id, &carried, data)?;
                        }
                    }
                    for &(v, id) in l.leaves.iter().chain(&l.writes) {
                        if let Op::Weight(w) = &self.program.node(v).op {
                            let missing = || Error::internal(format!("{} has no place", w.name()));
                            let (space, offset) = weights.next().ok_or_else(missing)?;
                            let buffer = space.ggml()?.clone();
                            l.ctx.place(id, &buffer, *offset, dev)?;
                            held.push(buffer);
                        } else {
                            l.ctx.place(id, &carried, self.place(number, Carried::Value(v))?, dev)?;
                            if let Some(value) = self.fresh(number, v) {
                                l.ctx.write_elements(id, &carried, value.data()?)?;
                            }
                        }
                    }
                    Ok(())
                };
                prepare().map_err(|e| phase(e, name, "preparing"))?;
                l.ctx
                    .compute(&mut l.graph, &mut lane.backend, &held, self.cancel)
                    .map_err(|e| phase(e, name, "computing"))
            }
        }
    }

    /// Copies out what `stage` made of the program's outputs, and what is `sent` to other devices.
    fn results(&mut self, stage: &Stage, sent: &[Var], outputs: &mut [Option<Tensor>]) -> Result<()> {
        for &v in &stage.segment.writes {
            for (slot, _) in outputs.iter_mut().zip(self.program.outputs()).filter(|(_, o)| **o == v) {
                let dims = self.program.node(v).shape;
                *slot = Some(match self.read(stage, v)? {
                    Value::Data(data) => Tensor::new(dims.dims(), data.into_owned())?,
                    Value::Number(n) => tensor(dims.dims(), n)?,
                });
            }
        }
        for &v in sent {
            let value = self.read(stage, v)?;
            self.sent.insert(v, (stage.lane, value));
        }
        Ok(())
    }

    /// A value that `stage` made.
    fn read(&self, stage: &Stage, v: Var) -> Result<Value<'static>> {
        let space = &self.carrier(stage.lane)?.space;
        let offset = || self.place(stage.lane, Carried::Value(v));
        let mut values = Vec::new();
        if !matches!(stage.form, Form::Noop(_)) {
            values.resize(self.program.node(v).shape.elements(), 0.0);
        }
        match &stage.form {
            Form::Noop(_) => return Ok(Value::Number(space.noop()?.read(offset()?)?)),
            Form::Host(_) => space.ggml()?.read(offset()?, &mut values)?,
            Form::Ggml(l) => {
                let id = l.writes.iter().find(|w| w.0 == v).map(|w| w.1);
                let id = id.ok_or_else(|| Error::internal("a result has no tensor"))?;
                l.ctx.read(id, space.ggml()?, &mut values)?;
            }
        }
        Ok(Value::Data(Cow::Owned(Data::F32(values))))
    }
}

/// The error of a segment for which there is no memory.
pub(super) fn refused(
    plan: &Plan,
    stage: &Stage,
    refusal: Refusal,
    device: &Arc<Device>,
    store: &Store,
    module: &str,
) -> Error {
    let what = match (&*stage.name, module) {
        ("", "") => "the program".to_owned(),
        ("", module) => module.to_owned(),
        (name, _) => format!("segment {name}"),
    };
    let mut message = format!("{what} needs {} on {device}", shown(plan.need(stage)));
    let mut raise = false;
    match &refusal {
        Refusal::Limit { limit, others, budget } => {
            message += &format!(", {} {}", if *budget { "budget" } else { "free" }, shown(*limit));
            if *others > 0 {
                message += &format!(", of which others use {}", shown(*others));
            }
            raise = *budget;
        }
        // The device gives less than it could have.
        Refusal::Failed(_) => {
            if let Some(budget) = store.manager().budget(device) {
                message += &format!(", budget {}", shown(budget));
            }
        }
    }
    let ids = stage.groups.iter().flat_map(|g| &g.1);
    let largest = ids.max_by_key(|id| store.stored(**id)).and_then(|id| Some((store.weight(*id)?, *id)));
    let advice = match (store.manager().options().segmented, raise) {
        (false, _) => "let it run in segments",
        (true, true) => "raise --max-vram",
        (true, false) => "free memory of the device",
    };
    let hint = match largest {
        Some((w, id)) => format!("{advice}; largest weight {} {}", w.name(), shown(store.stored(id))),
        None => advice.to_owned(),
    };
    match refusal {
        Refusal::Limit { .. } => Error::device(message).hint(hint),
        Refusal::Failed(e) => e.context(message).or_hint(hint),
    }
}

/// Results in order: those computed, and leaves that are results.
fn finished(
    outputs: Vec<Option<Tensor>>,
    program: &Program,
    given: &HashMap<Var, &Tensor>,
    store: &Store,
) -> Result<Vec<Tensor>> {
    let finish = |(slot, &v): (Option<Tensor>, &Var)| match slot {
        Some(t) => Ok(t),
        None => leaf_value(program, v, given, store),
    };
    outputs.into_iter().zip(program.outputs()).map(finish).collect()
}

/// Copies elements to `offset` of memory of this machine.
fn write(to: &Buffer, offset: usize, data: &Data) -> Result<()> {
    match data {
        Data::F32(v) => to.write(offset, v),
        Data::I32(v) => to.write(offset, v),
    }
}

/// The tensor given for each input of `program`, checked.
fn bind<'a>(program: &Program, plan: &Plan, inputs: &[(&str, &'a Tensor)]) -> Result<HashMap<Var, &'a Tensor>> {
    let mut out = HashMap::new();
    for (v, node) in program.iter() {
        let tensor = match &node.op {
            Op::Input(name) => {
                let found = inputs.iter().find(|(n, _)| *n == &**name);
                let (_, t) = found.ok_or_else(|| Error::shape(format!("input {name} is not given")))?;
                if t.shape() != node.shape || t.dtype() != node.dtype {
                    return Err(Error::shape(format!(
                        "input {name} should be {} {}, got {} {}",
                        node.shape,
                        node.dtype,
                        t.shape(),
                        t.dtype()
                    )));
                }
                out.insert(v, *t);
                *t
            }
            Op::Constant(t) => t,
            _ => continue,
        };
        if let (Some((rows, table)), Data::I32(ids)) = (plan.id_limits.get(&v), tensor.data()) {
            let outside = |id: &&i32| usize::try_from(**id).map_or(true, |id| id >= *rows);
            if let Some(id) = ids.iter().find(outside) {
                return Err(Error::shape(format!("id {id} is outside {table}")));
            }
        }
    }
    Ok(out)
}

/// The value of an output that is not computed.
fn leaf_value(program: &Program, v: Var, given: &HashMap<Var, &Tensor>, store: &Store) -> Result<Tensor> {
    match &program.node(v).op {
        Op::Input(_) => given.get(&v).map(|t| (*t).clone()).ok_or_else(|| Error::internal("an input is not bound")),
        Op::Constant(t) => Ok((**t).clone()),
        Op::Weight(w) => store.value(w),
        _ => Err(Error::internal(format!("{} was not computed", program.describe(v)))),
    }
}
