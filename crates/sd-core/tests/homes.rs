//! Weights in mapped files: read for devices, used in place on the CPU with pages that come and go, and what happens when
//! a file, a load or a request goes wrong half way.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{Checkpoint, NET_BLOCKS, Net, Random, new_rpc};
use sd_core::graph::Program;
use sd_core::{
    Advice, Bytes, CancelToken, Cuts, DType, Device, Error, Home, Manager, ManagerOptions, Mapped, Origin, Result,
    Runner, RunnerOptions, Tensor, TensorMeta, WeightSource,
};

/// A file of one tensor that claims to be mapped, and what was asked of all of them.
struct File {
    name: String,
    bytes: Bytes,
    log: Arc<Log>,
}

#[derive(Default)]
struct Log {
    asked: Mutex<Vec<(String, What)>>,
    /// From this request on the files are shorter.
    truncated: AtomicUsize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum What {
    Advice(Advice),
    Read,
}

impl Log {
    fn note(&self, name: &str, what: What) -> Result<()> {
        let mut asked = self.asked.lock().unwrap();
        asked.push((name.to_owned(), what));
        if asked.len() > self.truncated.load(Ordering::SeqCst) && what != What::Advice(Advice::Cold) {
            return Err(Error::bad_file("heron.gguf", "the file has become shorter"));
        }
        Ok(())
    }

    fn take(&self) -> Vec<(String, What)> {
        std::mem::take(&mut self.asked.lock().unwrap())
    }
}

impl AsRef<[u8]> for File {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Mapped for File {
    fn advise(&self, range: Range<usize>, advice: Advice) -> Result<()> {
        assert_eq!(range, 0..self.bytes.len());
        self.log.note(&self.name, What::Advice(advice))
    }

    fn check(&self) -> Result<()> {
        Ok(())
    }

    fn read(&self, range: Range<usize>) -> Result<Vec<u8>> {
        self.log.note(&self.name, What::Read)?;
        Ok(self.bytes[range].to_vec())
    }
}

struct Files {
    weights: Arc<Checkpoint>,
    log: Arc<Log>,
}

impl Files {
    fn new(weights: &Arc<Checkpoint>) -> Arc<Files> {
        let log = Log { truncated: usize::MAX.into(), ..Log::default() };
        Arc::new(Files { weights: weights.clone(), log: Arc::new(log) })
    }
}

impl WeightSource for Files {
    fn names(&self) -> Vec<&str> {
        self.weights.names()
    }
    fn meta(&self, name: &str) -> Option<TensorMeta> {
        self.weights.meta(name)
    }
    fn bytes(&self, name: &str) -> Result<Bytes> {
        let bytes = self.weights.bytes(name)?;
        Ok(Bytes::mapped(Arc::new(File { name: name.into(), bytes, log: self.log.clone() })))
    }
    fn origin(&self, name: &str) -> Origin {
        self.weights.origin(name)
    }
}

fn inputs(r: &mut Random) -> [Tensor; 2] {
    [r.tensor(&[2, 3, 5, 6]), Tensor::f32(&[2], vec![3.0, 700.0]).unwrap()]
}

fn run(runner: &mut Runner, program: &Program, x: &[Tensor; 2], cancel: &CancelToken) -> Result<Vec<Tensor>> {
    runner.run(program, &[("x", &x[0]), ("t", &x[1])], cancel)
}

fn runner(device: &Arc<Device>, source: Arc<dyn WeightSource>, home: Home, budget: Option<usize>) -> Runner {
    let manager = Manager::new(ManagerOptions::default());
    manager.set_budget(device, budget);
    let options =
        RunnerOptions { threads: 1, manager: Some(manager), home: Some(home), ..RunnerOptions::default() };
    Runner::new(device.clone(), source, options).unwrap()
}

#[test]
fn pages_come_before_a_segment_and_go_after_it() {
    let mut r = Random::new(1);
    let net = Net::new(&mut r, DType::F16);
    let (program, x, cancel) = (net.program(5), inputs(&mut r), CancelToken::new());
    let cpu = Device::cpu().unwrap();
    let want = run(&mut runner(&cpu, net.source.clone(), Home::Ram, None), &program, &x, &cancel).unwrap();
    let source = Files::new(&net.source);
    let mut runner = runner(&cpu, source.clone(), Home::File, None);
    for step in 0..2 {
        assert!(run(&mut runner, &program, &x, &cancel).unwrap() == want);
        let log = source.log.take();
        let when = |block: usize, advice: Advice| {
            let name = format!("blocks.{block}.conv.weight");
            log.iter().position(|(n, w)| *n == name && *w == What::Advice(advice)).unwrap()
        };
        assert!(log.iter().all(|(_, w)| *w != What::Read), "weights are used in place");
        for block in 1..NET_BLOCKS {
            assert!(when(block, Advice::WillNeed) < when(block, Advice::Cold));
            // In the first step another thread maps the weights, which may be late.
            if step > 0 {
                assert!(when(block, Advice::WillNeed) < when(block - 1, Advice::Cold), "{block}");
            }
            if step > 0 && block > 1 {
                assert!(when(block, Advice::WillNeed) > when(block - 2, Advice::Cold), "one segment ahead");
            }
        }
    }
    assert_eq!(runner.measure(&program).unwrap().len(), NET_BLOCKS + 2);
}

#[test]
fn devices_get_weights_that_were_read_not_looked_at() {
    let mut r = Random::new(2);
    let net = Net::new(&mut r, DType::F16);
    let (program, x, cancel) = (net.program(5), inputs(&mut r), CancelToken::new());
    let device = new_rpc();
    let want = run(&mut runner(&device, net.source.clone(), Home::Ram, None), &program, &x, &cancel).unwrap();
    for home in [Home::Device(device.clone()), Home::Ram, Home::File] {
        let source = Files::new(&net.source);
        let mut runner = runner(&device, source.clone(), home, None);
        assert!(run(&mut runner, &program, &x, &cancel).unwrap() == want);
        let log = source.log.take();
        assert!(log.iter().all(|(_, w)| *w == What::Read) && log.len() >= net.source.names().len());
    }
}

#[test]
fn a_file_that_shrinks_at_any_moment_is_an_error() {
    let mut r = Random::new(3);
    let net = Net::new(&mut r, DType::F16);
    let (program, x, cancel) = (net.program(5), inputs(&mut r), CancelToken::new());
    for device in [Device::cpu().unwrap(), new_rpc()] {
        let budget = (device.name() != "CPU").then_some(250_000);
        let want = run(&mut runner(&device, net.source.clone(), Home::Ram, None), &program, &x, &cancel).unwrap();
        let source = Files::new(&net.source);
        let mut runner = runner(&device, source.clone(), Home::File, budget);
        let mut failures = 0;
        for after in (0..).step_by(11) {
            source.log.take();
            source.log.truncated.store(after, Ordering::SeqCst);
            let result = run(&mut runner, &program, &x, &cancel);
            source.log.truncated.store(usize::MAX, Ordering::SeqCst);
            match result {
                Ok(got) => {
                    assert!(got == want);
                    break;
                }
                Err(e) => {
                    let e = e.to_string();
                    assert!(
                        e.contains("loading weights: ") && e.contains("heron.gguf: the file has become"),
                        "{e}"
                    );
                    failures += 1;
                }
            }
            assert!(run(&mut runner, &program, &x, &cancel).unwrap() == want, "after {after}");
        }
        assert!(failures > 5, "{failures}");
    }
}

/// A source that does something while the tensor with this number is read.
struct Acting {
    weights: Arc<Checkpoint>,
    left: AtomicUsize,
    /// Whether only tensors count that are loaded ahead.
    ahead: bool,
    act: Box<dyn Fn() -> Result<()> + Send + Sync>,
}

impl WeightSource for Acting {
    fn names(&self) -> Vec<&str> {
        self.weights.names()
    }
    fn meta(&self, name: &str) -> Option<TensorMeta> {
        self.weights.meta(name)
    }
    fn bytes(&self, name: &str) -> Result<Bytes> {
        let counts = !self.ahead || std::thread::current().name() == Some("load weights");
        if counts && self.left.fetch_sub(1, Ordering::SeqCst) == 0 {
            (self.act)()?;
        }
        self.weights.bytes(name)
    }
    fn origin(&self, name: &str) -> Origin {
        self.weights.origin(name)
    }
}

#[test]
fn cancelling_while_any_weight_is_loaded_stops_and_leaves_the_runner_usable() {
    let mut r = Random::new(4);
    let net = Net::new(&mut r, DType::F16);
    let (program, x) = (net.program(5), inputs(&mut r));
    for device in [Device::cpu().unwrap(), new_rpc()] {
        let budget = (device.name() != "CPU").then_some(250_000);
        let want =
            run(&mut runner(&device, net.source.clone(), Home::Ram, None), &program, &x, &CancelToken::new())
                .unwrap();
        for number in (0..net.source.names().len()).step_by(7) {
            let cancel = CancelToken::new();
            let asked = cancel.clone();
            let act = Box::new(move || {
                asked.cancel();
                std::thread::sleep(Duration::from_millis(5));
                Ok(())
            });
            let source = Acting { weights: net.source.clone(), left: number.into(), ahead: false, act };
            let mut runner = runner(&device, Arc::new(source), Home::File, budget);
            let e = run(&mut runner, &program, &x, &cancel).unwrap_err();
            assert!(e.is_cancelled(), "{e}");
            assert!(run(&mut runner, &program, &x, &CancelToken::new()).unwrap() == want);
        }
    }
}

/// The thread that loads stops, the one that computes does not wait for it in vain, and nothing stays behind.
#[test]
fn cancelling_while_weights_are_loaded_ahead_stops_both_threads() {
    let mut r = Random::new(7);
    let net = Net::new(&mut r, DType::F16);
    let (program, x) = (net.program(5), inputs(&mut r));
    let device = new_rpc();
    let plain = CancelToken::new();
    let want = run(&mut runner(&device, net.source.clone(), Home::Ram, None), &program, &x, &plain).unwrap();
    for (number, home) in [(0, Home::File), (3, Home::Ram), (17, Home::File), (30, Home::Device(device.clone()))] {
        let cancel = CancelToken::new();
        let (asked, reads) = (cancel.clone(), Arc::new(AtomicUsize::new(0)));
        let seen = reads.clone();
        let act = Box::new(move || {
            asked.cancel();
            seen.fetch_add(1, Ordering::SeqCst);
            Ok(())
        });
        let source = Arc::new(Acting { weights: net.source.clone(), left: number.into(), ahead: true, act });
        let mut runner = runner(&device, source.clone(), home, Some(250_000));
        let e = run(&mut runner, &program, &x, &cancel).unwrap_err();
        assert!(e.is_cancelled() && reads.load(Ordering::SeqCst) == 1, "{e}");
        let report = runner.manager().memory();
        let counted: usize = report.devices.iter().map(|d| d.weights + d.workspaces + d.crossing).sum();
        assert_eq!(counted, device.held().0);
        assert!(run(&mut runner, &program, &x, &plain).unwrap() == want);
        drop(runner);
        assert_eq!(device.held().0, 0);
    }
}

#[test]
fn a_failure_while_loading_ahead_is_that_of_the_segment_or_none() {
    let mut r = Random::new(5);
    let net = Net::new(&mut r, DType::F16);
    let (program, x, cancel) = (net.program(5), inputs(&mut r), CancelToken::new());
    let device = new_rpc();
    let want = run(&mut runner(&device, net.source.clone(), Home::Ram, None), &program, &x, &cancel).unwrap();
    for (number, panics) in [(0, false), (9, false), (40, false), (40, true)] {
        let act = Box::new(move || {
            assert!(!panics, "a source that panics");
            Err(Error::bad_file("heron.gguf", "cannot be read"))
        });
        let source = Acting { weights: net.source.clone(), left: number.into(), ahead: false, act };
        let mut runner = runner(&device, Arc::new(source), Home::File, Some(250_000));
        // The first segment has nobody who loads ahead for it. Later ones try once more themselves.
        match run(&mut runner, &program, &x, &cancel) {
            Ok(got) => assert!(number > 0 && got == want),
            Err(e) => assert!(number == 0 && e.to_string().contains("heron.gguf: cannot be read"), "{e}"),
        }
        assert!(run(&mut runner, &program, &x, &cancel).unwrap() == want);
        assert!(device.held().0 <= 250_000);
    }
}

/// Every cut by itself and all of them, and every budget from barely enough on; weights in memory or in a mapped file, at
/// home on the device, in main memory or in the file, loaded ahead or not.
#[test]
fn neither_cuts_nor_homes_nor_budgets_change_a_bit() {
    let mut r = Random::new(6);
    let net = Net::of(&mut r, DType::F16, 5);
    let (program, x, cancel) = (net.program(5), inputs(&mut r), CancelToken::new());
    for device in [Device::cpu().unwrap(), new_rpc()] {
        let whole = RunnerOptions { threads: 1, cuts: Cuts::None, ..RunnerOptions::default() };
        let mut whole = Runner::new(device.clone(), net.source.clone(), whole).unwrap();
        let want = run(&mut whole, &program, &x, &cancel).unwrap();
        let everything = whole.memory().0 + whole.memory().1;
        let sources: [Arc<dyn WeightSource>; 2] = [net.source.clone(), Files::new(&net.source)];
        let homes = [Home::Device(device.clone()), Home::Ram, Home::File];
        for (source, home) in sources.iter().flat_map(|s| homes.iter().map(move |h| (s, h))) {
            for prefetch in [true, false] {
                let manager = Manager::new(ManagerOptions { prefetch, ..ManagerOptions::default() });
                let options = RunnerOptions {
                    threads: 1,
                    manager: Some(manager.clone()),
                    home: Some(home.clone()),
                    ..RunnerOptions::default()
                };
                let mut runner = Runner::new(device.clone(), source.clone(), options).unwrap();
                let single = (0..program.cuts().len()).map(|cut| Cuts::At(vec![cut]));
                for cuts in single.chain([Cuts::All, Cuts::Auto]) {
                    runner.set_cuts(cuts.clone());
                    let got = run(&mut runner, &program, &x, &cancel).unwrap();
                    assert!(got == want, "{cuts:?} from {home:?} on {device}");
                }
                let mut enough = 0;
                let budgets = std::iter::successors(Some(everything / 10), |b| Some(b + b / 8));
                for budget in budgets.take_while(|b| *b < everything * 5 / 4) {
                    manager.set_budget(&device, Some(budget));
                    match run(&mut runner, &program, &x, &cancel) {
                        Ok(got) => {
                            assert!(got == want, "{budget} of {everything} from {home:?} on {device}");
                            enough += 1;
                        }
                        Err(e) => assert!(enough == 0 && e.to_string().contains("largest weight"), "{e}"),
                    }
                }
                assert!(enough > 1, "{enough} budgets of {everything} on {device}");
            }
        }
    }
}
