//! Running programs of one network.

use std::collections::HashMap;
use std::sync::Arc;

use super::cache::{Plan, SegmentSize};
use super::{RunnerOptions, threads};
use crate::cancel::CancelToken;
use crate::device::Device;
use crate::error::Result;
use crate::ffi::{Backend, Dev};
use crate::graph::Program;
use crate::kernels::{CpuKernels, Pool};
use crate::passes::adapters::Adapted;
use crate::residency::{Loader, Manager, ManagerOptions, Store};
use crate::tensor::{Tensor, WeightSource};

/// How many lowered programs are kept.
pub(super) const KEPT: usize = 4;

/// A device that computes.
pub(super) struct Lane {
    pub(super) device: Arc<Device>,
    pub(super) dev: Dev,
    pub(super) backend: Backend,
    /// The plan whose constants are in the device's buffer of crossing values, and that buffer.
    pub(super) constants_of: Option<(usize, u64)>,
}

/// Runs programs of one network on one device, or on several that each run a part of the segments. Weights are loaded
/// when first needed and stay while memory allows; lowered programs and workspace are reused. After an error it can be
/// used as before.
pub struct Runner {
    device: Arc<Device>,
    /// The device, then the others.
    pub(super) lanes: Vec<Lane>,
    /// Threads of the kernels, started when a program first runs on them.
    pub(super) pool: Option<Pool>,
    pub(super) store: Store,
    pub(super) options: RunnerOptions,
    pub(super) plans: Vec<Plan>,
    /// What loads weights ahead, started when that is first wanted.
    pub(super) loader: Option<Loader>,
    /// Plans made so far.
    pub(super) made: usize,
    pub(super) lowered: usize,
    /// Which lane ran the units that end with these modules, when a program was last divided among several.
    pub(super) divided: HashMap<String, usize>,
    pub(super) kernels: CpuKernels,
    adapted: Option<Arc<Adapted>>,
    /// Programs with adapters, by the signature of those without.
    rewritten: Vec<(u128, Arc<Program>)>,
    /// Operations of ggml that the CPU is to compute although the device can: for tests.
    pub(super) refuse: Vec<&'static str>,
}

impl Runner {
    /// A runner on `device`, and on the others of `options`, for a network whose weights are in `source`.
    ///
    /// # Errors
    /// A device cannot be opened.
    pub fn new(device: Arc<Device>, source: Arc<dyn WeightSource>, options: RunnerOptions) -> Result<Runner> {
        let mut devices = vec![device.clone()];
        devices.extend(options.others.iter().cloned());
        let lane = |device: &Arc<Device>| {
            let dev = device.layout()?;
            let backend = Backend::new(dev, threads(options.threads))?;
            Ok(Lane { device: device.clone(), dev, backend, constants_of: None })
        };
        let lanes = devices.iter().map(lane).collect::<Result<Vec<Lane>>>()?;
        let manager = options.manager.clone().unwrap_or_else(|| Manager::new(ManagerOptions::default()));
        let store = Store::new(manager, &options.module, options.home.clone(), &devices, source);
        Ok(Runner {
            device,
            lanes,
            pool: None,
            store,
            options,
            plans: Vec::new(),
            loader: None,
            made: 0,
            lowered: 0,
            divided: HashMap::new(),
            kernels: CpuKernels::Auto,
            adapted: None,
            rewritten: Vec::new(),
            refuse: Vec::new(),
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

    /// Where it runs; the first of several.
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
        self.run_plan(program, at, inputs, cancel)
    }

    /// What each segment of `program` needs; lowers it, computes nothing.
    ///
    /// # Errors
    /// The program cannot be lowered for this device, or a segment needs more memory than there is.
    pub fn measure(&mut self, program: &Program) -> Result<Vec<SegmentSize>> {
        let rewritten = self.rewritten(program)?;
        let at = self.plan(rewritten.as_deref().unwrap_or(program))?;
        self.has_room(at)?;
        Ok(self.plans.get(at).map_or_else(Vec::new, |plan| plan.sizes(&self.store)))
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
        self.store.manager().release_rooms(self.store.module());
    }

    /// Ends a sequence of runs: frees the memory for intermediate values and, where the weights' home is elsewhere, the
    /// copies of them on the device.
    pub fn finish(&mut self) {
        self.release_workspace();
        self.store.leave();
    }

    /// Loads all weights that `program` reads and that fit, so that its first run need not.
    ///
    /// # Errors
    /// As [`Runner::run`].
    pub fn load(&mut self, program: &Program, cancel: &CancelToken) -> Result<()> {
        cancel.check()?;
        let rewritten = self.rewritten(program)?;
        let at = self.plan(rewritten.as_deref().unwrap_or(program))?;
        self.load_plan(at, cancel)
    }

    /// How many segments have been lowered so far.
    pub fn lowered(&self) -> usize {
        self.lowered
    }

    /// Device memory in use, in bytes: weights that are not used in place, and workspace.
    pub fn memory(&self) -> (usize, usize) {
        self.store.bytes()
    }

    /// Who keeps the accounts of the device.
    pub fn manager(&self) -> &Arc<Manager> {
        self.store.manager()
    }
}

#[cfg(test)]
mod tests {
    use super::super::cache::Form;
    use super::*;
    use crate::graph::{AttentionOptions, Graph};
    use crate::residency::Home;
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
                Form::Host(_) | Form::Noop(_) => 0,
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

    /// Weights that differ from each other and from zero.
    struct Waves(Shapes);

    impl WeightSource for Waves {
        fn names(&self) -> Vec<&str> {
            self.0.names()
        }

        fn meta(&self, name: &str) -> Option<crate::tensor::TensorMeta> {
            self.0.meta(name)
        }

        fn bytes(&self, name: &str) -> Result<crate::tensor::Bytes> {
            let elements = self.0.bytes(name)?.len() / 4;
            let pitch = name.bytes().map(f32::from).sum::<f32>();
            let values = (0..elements).map(|i| (i as f32 * pitch).sin() / 4.0);
            Ok(values.flat_map(f32::to_le_bytes).collect::<Vec<u8>>().into())
        }

        fn origin(&self, name: &str) -> crate::tensor::Origin {
            self.0.origin(name)
        }
    }

    /// A remote device that nobody else uses.
    fn remote() -> Arc<Device> {
        let endpoint = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let at = endpoint.clone();
        std::thread::spawn(move || crate::device::serve_rpc(&at, 1, &[Device::cpu().unwrap()]));
        let found = (0..200).find_map(|_| {
            std::thread::sleep(std::time::Duration::from_millis(20));
            crate::device::add_rpc_server(&endpoint).ok()
        });
        found.unwrap().remove(0)
    }

    #[test]
    fn memory_refused_at_any_moment_is_an_error_and_leaves_nothing_behind() {
        let names = ["l.0.weight", "l.1.weight", "l.2.weight", "l.3.weight", "l.4.weight", "l.5.weight"];
        let source = Arc::new(Waves(Shapes(names.iter().map(|n| (*n, vec![64, 64])).collect())));
        let w = Scope::root(source.clone());
        let g = Graph::new();
        let mut y = g.input("x", &[4, 64], crate::DType::F32).unwrap();
        for i in 0..names.len() {
            let at = w.at("l", i);
            y = g.tanh(g.linear(&at.linear_no_bias("").unwrap(), y).unwrap()).unwrap();
            g.cut(&at, &[y]);
        }
        let program = g.finish(&[y]).unwrap();
        let x = Tensor::f32(&[4, 64], (0..256).map(|i| (i as f32 * 0.3).sin()).collect()).unwrap();
        let device = remote();
        let dev = device.ggml().unwrap();
        let run = |runner: &mut Runner| runner.run(&program, &[("x", &x)], &CancelToken::new());
        let want =
            run(&mut Runner::new(device.clone(), source.clone(), RunnerOptions::default()).unwrap()).unwrap();
        assert_eq!(device.held().0, 0);
        // A matrix has 16 KiB; four of them have room.
        let (budget, main) = (80_000, &crate::device::ram::tests::REFUSE);
        let refuse_main = |more: Option<usize>| std::mem::replace(&mut *main.lock().unwrap(), more).is_none();
        let mut seen = std::collections::BTreeSet::new();
        for (home, of_main) in [(Home::File, false), (Home::Ram, false), (Home::Ram, true)] {
            for more in 0.. {
                let manager = Manager::new(ManagerOptions::default());
                manager.set_budget(&device, Some(budget));
                let (home, module) = (Some(home.clone()), "net".into());
                let options = RunnerOptions { home, module, manager: Some(manager.clone()), ..Default::default() };
                let mut runner = Runner::new(device.clone(), source.clone(), options).unwrap();
                if of_main {
                    refuse_main(Some(more))
                } else {
                    crate::ffi::buffer::tests::refuse(dev, Some(more))
                };
                let result = run(&mut runner);
                let refused =
                    if of_main { refuse_main(None) } else { crate::ffi::buffer::tests::refuse(dev, None) };
                match result {
                    Ok(got) => assert_eq!(got, want),
                    Err(e) => {
                        let e = e.to_string();
                        assert!(refused && e.contains("segment ") && e.contains("could not provide"), "{e}");
                        assert!(of_main || e.contains(" needs ") && e.contains("largest weight"), "{e}");
                        let phases =
                            ["loading weights", "allocating workspace", "allocating values", "main memory"];
                        seen.extend(phases.into_iter().filter(|p| e.contains(p)));
                    }
                }
                let report = manager.memory();
                let counted = report.devices.iter().map(|d| d.weights + d.workspaces + d.crossing).sum::<usize>();
                assert_eq!(counted, device.held().0);
                assert_eq!(run(&mut runner).unwrap(), want);
                drop(runner);
                assert_eq!(device.held().0, 0);
                if !refused {
                    break;
                }
            }
        }
        assert_eq!(seen.len(), 4, "{seen:?}");
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
