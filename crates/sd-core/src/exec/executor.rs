//! Running programs of one network on one device.

use std::sync::Arc;

use super::cache::{Form, Plan, SegmentSize, phase};
use super::workspace::Arena;
use super::{RunnerOptions, threads};
use crate::cancel::CancelToken;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::ffi::{Backend, Buffer, Dev};
use crate::graph::{Op, Program, Var};
use crate::kernels::{CpuKernels, Memory, Pool, run};
use crate::passes::adapters::Adapted;
use crate::residency::Store;
use crate::tensor::{Data, Tensor, WeightSource};

/// How many lowered programs are kept.
const KEPT: usize = 4;

/// Runs programs of one network on one device. Weights are loaded when first needed and stay; lowered programs and
/// workspace are reused. After an error it can be used as before.
pub struct Runner {
    device: Arc<Device>,
    dev: Dev,
    backend: Backend,
    /// Threads of the kernels, started when a program first runs on them.
    pool: Option<Pool>,
    store: Store,
    options: RunnerOptions,
    plans: Vec<Plan>,
    workspace: Arena,
    carried: Arena,
    lowered: usize,
    kernels: CpuKernels,
    adapted: Option<Arc<Adapted>>,
    /// Programs with adapters, by the signature of those without.
    rewritten: Vec<(u128, Arc<Program>)>,
    /// Operations of ggml that the CPU is to compute although the device can: for tests.
    refuse: Vec<&'static str>,
}

impl Runner {
    /// A runner on `device` for a network whose weights are in `source`.
    ///
    /// # Errors
    /// The device cannot be opened.
    pub fn new(device: Arc<Device>, source: Arc<dyn WeightSource>, options: RunnerOptions) -> Result<Runner> {
        let dev = device.ggml()?;
        let backend = Backend::new(dev, threads(options.threads))?;
        let store = Store::new(device.clone(), source);
        let (workspace, carried, refuse) = (Arena::default(), Arena::default(), Vec::new());
        Ok(Runner {
            device,
            dev,
            backend,
            pool: None,
            store,
            options,
            plans: Vec::new(),
            workspace,
            carried,
            lowered: 0,
            kernels: CpuKernels::Auto,
            adapted: None,
            rewritten: Vec::new(),
            refuse,
        })
    }

    /// Runs programs with these adapters from now on, until others are set. Weights that they do not need are freed.
    pub fn set_adapters(&mut self, adapted: Arc<Adapted>) {
        self.store.set_source(adapted.clone(), |name| adapted.keeps(name));
        self.rewritten.clear();
        self.adapted = Some(adapted);
    }

    /// `program` with adapters; `None` if they change nothing of it.
    fn rewritten(&mut self, program: &Program) -> Result<Option<Arc<Program>>> {
        let Some(adapted) = self.adapted.as_ref().filter(|a| a.changes_any(program)) else { return Ok(None) };
        if let Some((_, known)) = self.rewritten.iter().find(|(s, _)| *s == program.signature()) {
            return Ok(Some(known.clone()));
        }
        let made = Arc::new(adapted.apply(program)?);
        if self.rewritten.len() >= KEPT {
            self.rewritten.remove(0);
        }
        self.rewritten.push((program.signature(), made.clone()));
        Ok(Some(made))
    }

    /// Where it runs.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The results of `program`, in the order given to [`Graph::finish`](crate::Graph::finish). `inputs` are by the
    /// names given to [`Graph::input`](crate::Graph::input); those the program does not read are ignored.
    ///
    /// # Errors
    /// An input is missing or has another shape or type, an id is outside its table, a weight cannot be read, the
    /// device cannot allocate or compute, or `cancel` was cancelled. The message names segment and phase.
    pub fn run(
        &mut self,
        program: &Program,
        inputs: &[(&str, &Tensor)],
        cancel: &CancelToken,
    ) -> Result<Vec<Tensor>> {
        cancel.check()?;
        let rewritten = self.rewritten(program)?;
        let program = rewritten.as_deref().unwrap_or(program);
        let at = self.plan(program)?;
        let given = bind(program, &self.plans[at], inputs)?;
        let Runner { dev, backend, pool, store, options, plans, workspace, carried, .. } = self;
        let dev = *dev;
        let plan = &mut plans[at];
        let carried = carried.get(dev, plan.carried_size).map_err(|e| e.context("values between segments"))?;
        let mut outputs: Vec<Option<Tensor>> = program.outputs().iter().map(|_| None).collect();
        let mut uploaded = std::collections::HashSet::new();
        for stage in &mut plan.stages {
            cancel.check()?;
            let segment = &stage.segment;
            let wanted: Vec<_> = stage.weights.iter().map(|(_, w, t)| (w, *t)).collect();
            let weights = store.ensure(&wanted, cancel).map_err(|e| phase(e, segment, "loading weights"))?;
            cancel.check()?;
            let space =
                workspace.get(dev, plan.workspace).map_err(|e| phase(e, segment, "allocating workspace"))?;

            let l = match &mut stage.form {
                Form::Ggml(l) => l,
                Form::Host(h) => {
                    let mut resident = weights.iter();
                    let mut memories = vec![Memory::new(&space, 0)];
                    for &v in &h.vars {
                        let missing = || Error::internal(format!("{} has no place", program.describe(v)));
                        memories.push(match &program.node(v).op {
                            Op::Weight(_) => {
                                let r = resident.next().ok_or_else(missing)?;
                                Memory::new(&r.buffer, r.offset)
                            }
                            Op::Constant(_) => {
                                let offset = stage.constant_offsets.get(&v).ok_or_else(missing)?;
                                Memory::new(stage.constants.as_ref().ok_or_else(missing)?, *offset)
                            }
                            _ => {
                                let &(offset, _) = plan.carried.get(&v).ok_or_else(missing)?;
                                if let Some(t) = given.get(&v)
                                    && uploaded.insert(v)
                                {
                                    write(&carried, offset, t.data())
                                        .map_err(|e| phase(e, segment, "preparing"))?;
                                }
                                Memory::new(&carried, offset)
                            }
                        });
                    }
                    let pool = match pool {
                        Some(pool) => pool,
                        None => pool.insert(Pool::new(threads(options.threads))?),
                    };
                    run(&h.steps, &memories, pool, cancel).map_err(|e| phase(e, segment, "computing"))?;
                    for &v in &segment.writes {
                        for (slot, _) in outputs.iter_mut().zip(program.outputs()).filter(|(_, o)| **o == v) {
                            let dims = program.node(v).shape;
                            let mut values = vec![0.0; dims.elements()];
                            let at = plan.carried.get(&v).map_or(0, |c| c.0);
                            carried.read(at, &mut values).map_err(|e| phase(e, segment, "reading results"))?;
                            *slot = Some(Tensor::f32(dims.dims(), values)?);
                        }
                    }
                    continue;
                }
            };
            let mut held: Vec<Arc<Buffer>> = vec![carried.clone(), space.clone()];
            held.extend(stage.constants.iter().cloned());
            let mut resident = stage.weights.iter().zip(weights);
            let mut prepare = || -> Result<()> {
                for &(id, offset) in &l.layout.places {
                    l.ctx.place(id, &space, offset, dev)?;
                }
                for &(v, id) in l.leaves.iter().chain(&l.writes) {
                    match &program.node(v).op {
                        Op::Constant(_) => {}
                        Op::Weight(w) => {
                            let Some(((_, _, _), r)) = resident.next() else {
                                return Err(Error::internal(format!("{} has no place", w.name())));
                            };
                            l.ctx.place(id, &r.buffer, r.offset, dev)?;
                            held.push(r.buffer);
                        }
                        _ => {
                            let &(offset, _) =
                                plan.carried.get(&v).ok_or_else(|| Error::internal("a value has no place"))?;
                            l.ctx.place(id, &carried, offset, dev)?;
                            if let Some(t) = given.get(&v)
                                && uploaded.insert(v)
                            {
                                l.ctx.write_elements(id, &carried, t.data())?;
                            }
                        }
                    }
                }
                Ok(())
            };
            prepare().map_err(|e| phase(e, segment, "preparing"))?;
            l.ctx.compute(&mut l.graph, backend, &held, cancel).map_err(|e| phase(e, segment, "computing"))?;
            for &(v, id) in &l.writes {
                for (slot, _) in outputs.iter_mut().zip(program.outputs()).filter(|(_, o)| **o == v) {
                    let dims = program.node(v).shape;
                    let mut values = vec![0.0; dims.elements()];
                    l.ctx.read(id, &carried, &mut values).map_err(|e| phase(e, segment, "reading results"))?;
                    *slot = Some(Tensor::f32(dims.dims(), values)?);
                }
            }
        }
        let finish = |(slot, &v): (Option<Tensor>, &Var)| match slot {
            Some(t) => Ok(t),
            None => leaf_value(program, v, &given, store),
        };
        outputs.into_iter().zip(program.outputs()).map(finish).collect()
    }

    /// What each segment of `program` needs; lowers it, computes nothing.
    ///
    /// # Errors
    /// The program cannot be lowered for this device.
    pub fn measure(&mut self, program: &Program) -> Result<Vec<SegmentSize>> {
        let rewritten = self.rewritten(program)?;
        let at = self.plan(rewritten.as_deref().unwrap_or(program))?;
        Ok(self.plans[at].sizes())
    }

    /// Which cuts later runs take. Programs are lowered anew if that is a change.
    pub fn set_cuts(&mut self, cuts: crate::plan::Cuts) {
        if self.options.cuts != cuts {
            self.options.cuts = cuts;
            self.plans.clear();
        }
    }

    /// Uses other kernels on the CPU device from the next run on.
    ///
    /// # Errors
    /// The machine cannot run them.
    pub fn set_kernels(&mut self, kernels: CpuKernels) -> Result<()> {
        kernels.isa()?;
        if self.kernels != kernels {
            self.kernels = kernels;
            self.plans.clear();
        }
        Ok(())
    }

    /// Frees the weights; the next run loads them again.
    pub fn release_weights(&mut self) {
        self.store.clear();
    }

    /// Frees the memory for intermediate values; the next run allocates it again.
    pub fn release_workspace(&mut self) {
        self.workspace.clear();
        self.carried.clear();
    }

    /// How many segments have been lowered so far.
    pub fn lowered(&self) -> usize {
        self.lowered
    }

    /// Device memory in use, in bytes: weights that are not used in place, and workspace.
    pub fn memory(&self) -> (usize, usize) {
        (self.store.bytes(), self.workspace.size() + self.carried.size())
    }

    /// The index of the plan of `program`, made if there is none; the plan moves to the end, where recent ones are.
    fn plan(&mut self, program: &Program) -> Result<usize> {
        if let Some(i) = self.plans.iter().position(|p| p.signature == program.signature()) {
            let plan = self.plans.remove(i);
            self.plans.push(plan);
        } else {
            let plan = Plan::new(program, self.dev, &self.options, self.kernels, &self.refuse)?;
            self.lowered += plan.stages.len();
            if self.plans.len() >= KEPT {
                self.plans.remove(0);
            }
            self.plans.push(plan);
        }
        Ok(self.plans.len() - 1)
    }
}

/// Copies elements to `offset` of memory of this machine.
fn write(to: &Buffer, offset: usize, data: &Data) -> Result<()> {
    match data {
        Data::F32(v) => to.write(offset, v),
        Data::I32(v) => to.write(offset, v),
    }
}

/// The tensor given for each input of `program`, checked.
fn bind<'a>(
    program: &Program,
    plan: &Plan,
    inputs: &[(&str, &'a Tensor)],
) -> Result<std::collections::HashMap<Var, &'a Tensor>> {
    let mut out = std::collections::HashMap::new();
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
fn leaf_value(
    program: &Program,
    v: Var,
    given: &std::collections::HashMap<Var, &Tensor>,
    store: &Store,
) -> Result<Tensor> {
    match &program.node(v).op {
        Op::Input(_) => given.get(&v).map(|t| (*t).clone()).ok_or_else(|| Error::internal("an input is not bound")),
        Op::Constant(t) => Ok((**t).clone()),
        Op::Weight(w) => store.value(w),
        _ => Err(Error::internal(format!("{} was not computed", program.describe(v)))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{AttentionOptions, Graph};
    use crate::scope::{Scope, tests::Shapes};

    #[test]
    fn the_cpu_takes_over_what_a_device_lacks() {
        let source = Arc::new(Shapes(vec![("n.weight", vec![32]), ("a.weight", vec![32, 32])]));
        let w = Scope::root(source.clone());
        let g = Graph::new();
        let x = g.input("x", &[1, 5, 32], crate::DType::F32).unwrap();
        let heads = g.split_heads(x, 4).unwrap();
        let y = g.attention(heads, heads, heads, AttentionOptions { causal: true, ..Default::default() }).unwrap();
        let y = g.gelu(g.merge_heads(y).unwrap()).unwrap();
        let z = g.layer_norm(&crate::scope::Norm::plain("n"), y, 1e-5).unwrap();
        let z = g.concat(&[z, y, g.slice(z, 2, 3, 7).unwrap()], 2).unwrap();
        let zero = g.linear(&w.linear_no_bias("a").unwrap(), y).unwrap();
        let program = g.finish(&[z, zero]).unwrap();
        let values: Vec<f32> = (0..160).map(|i| (i as f32 * 0.7).sin()).collect();
        let x = Tensor::f32(&[1, 5, 32], values).unwrap();

        let run = |kernels: CpuKernels, refuse: &[&'static str]| {
            let options = RunnerOptions { threads: 1, ..RunnerOptions::default() };
            let mut runner = Runner::new(Device::cpu().unwrap(), source.clone(), options).unwrap();
            runner.set_kernels(kernels).unwrap();
            runner.refuse = refuse.to_vec();
            let first = runner.run(&program, &[("x", &x)], &CancelToken::new()).unwrap();
            assert_eq!(runner.run(&program, &[("x", &x)], &CancelToken::new()).unwrap(), first);
            let taken = match &runner.plans[0].stages[0].form {
                Form::Ggml(l) => l.graph.taken_over(),
                Form::Host(_) => 0,
            };
            (first, taken)
        };
        let with_none = |kernels| {
            // No operation has this name.
            let (want, none) = run(kernels, &["?"]);
            assert_eq!(none, 0);
            assert!(want[0].values().iter().any(|&v| v != 0.0) && want[0].is_finite());
            want
        };
        let ours = with_none(CpuKernels::Portable);
        let ggmls = with_none(CpuKernels::Ggml);
        // The names are ggml's; its products are the scores, the weighted values and the linear layer.
        for (kernels, names, count) in [
            (CpuKernels::Portable, &["CUSTOM"][..], 2),
            (CpuKernels::Ggml, &["MUL_MAT"], 3),
            (CpuKernels::Ggml, &["SOFT_MAX", "DIAG_MASK_INF"], 2),
            (CpuKernels::Ggml, &["SET"], 3),
            (CpuKernels::Ggml, &["NORM", "GELU_ERF"], 2),
            (CpuKernels::Ggml, &["CONT"], 4),
        ] {
            let want = if kernels == CpuKernels::Ggml { &ggmls } else { &ours };
            let (got, taken) = run(kernels, names);
            assert_eq!(got, *want, "{names:?}");
            assert!(taken >= count, "{names:?}: {taken}");
        }
    }

    /// A source that asks to stop when its second weight is read.
    struct Impatient {
        weights: Shapes,
        read: std::sync::atomic::AtomicUsize,
        cancel: CancelToken,
    }

    impl WeightSource for Impatient {
        fn names(&self) -> Vec<&str> {
            self.weights.names()
        }

        fn meta(&self, name: &str) -> Option<crate::tensor::TensorMeta> {
            self.weights.meta(name)
        }

        fn bytes(&self, name: &str) -> Result<crate::tensor::Bytes> {
            if self.read.fetch_add(1, std::sync::atomic::Ordering::SeqCst) == 1 {
                self.cancel.cancel();
            }
            self.weights.bytes(name)
        }

        fn origin(&self, name: &str) -> crate::tensor::Origin {
            self.weights.origin(name)
        }
    }

    #[test]
    fn loading_weights_can_be_cancelled() {
        let names = ["a.weight", "b.weight", "c.weight", "d.weight"];
        let weights = Shapes(names.iter().map(|n| (*n, vec![32, 32])).collect());
        let cancel = CancelToken::new();
        let source = Arc::new(Impatient { weights, read: Default::default(), cancel: cancel.clone() });
        let w = Scope::root(source.clone());
        let g = Graph::new();
        let mut x = g.input("x", &[1, 32], crate::DType::F32).unwrap();
        for name in names {
            x = g.linear(&w.linear_no_bias(name.trim_end_matches(".weight")).unwrap(), x).unwrap();
        }
        let program = g.finish(&[x]).unwrap();
        let given = Tensor::zeros(&[1, 32]).unwrap();
        let mut runner = Runner::new(Device::cpu().unwrap(), source.clone(), RunnerOptions::default()).unwrap();
        let e = runner.run(&program, &[("x", &given)], &cancel).unwrap_err();
        assert!(e.is_cancelled(), "{e}");
        assert_eq!(source.read.load(std::sync::atomic::Ordering::SeqCst), 2);
        assert!(runner.run(&program, &[("x", &given)], &CancelToken::new()).is_ok());
    }
}
