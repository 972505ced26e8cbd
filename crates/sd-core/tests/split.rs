//! Networks that several devices run by turns, and weights that are on a device which does not compute.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{Checkpoint, Net, Random, new_rpc};
use sd_core::graph::Program;
use sd_core::trace::EventKind;
use sd_core::{
    Bytes, CancelToken, Cuts, DType, Device, Home, Manager, ManagerOptions, Origin, Result, Runner, RunnerOptions,
    Tensor, TensorMeta, Trace, WeightSource,
};

fn inputs(r: &mut Random, h: usize) -> [Tensor; 2] {
    [r.tensor(&[2, 3, h, 6]), Tensor::f32(&[2], vec![3.0, 700.0]).unwrap()]
}

fn run(runner: &mut Runner, program: &Program, x: &[Tensor; 2]) -> Result<Vec<Tensor>> {
    runner.run(program, &[("x", &x[0]), ("t", &x[1])], &CancelToken::new())
}

fn options(manager: &Arc<Manager>, others: &[Arc<Device>]) -> RunnerOptions {
    let (manager, others) = (Some(manager.clone()), others.to_vec());
    RunnerOptions { threads: 1, manager, others, module: "net".into(), ..RunnerOptions::default() }
}

/// So many that one needs little of what all need.
const BLOCKS: usize = 32;

/// What a program gives in one piece, and the memory that this takes.
fn whole(device: &Arc<Device>, net: &Net, program: &Program, x: &[Tensor; 2]) -> (Vec<Tensor>, usize) {
    let options = RunnerOptions { threads: 1, cuts: Cuts::None, ..RunnerOptions::default() };
    let mut runner = Runner::new(device.clone(), net.source.clone(), options).unwrap();
    let want = run(&mut runner, program, x).unwrap();
    (want, runner.memory().0 + runner.memory().1)
}

/// A source that counts the bytes that are read of it.
struct Counting {
    weights: Arc<Checkpoint>,
    read: AtomicUsize,
}

impl Counting {
    fn new(weights: &Arc<Checkpoint>) -> Arc<Counting> {
        Arc::new(Counting { weights: weights.clone(), read: AtomicUsize::new(0) })
    }

    /// Bytes read since this was asked last.
    fn taken(&self) -> usize {
        self.read.swap(0, Ordering::SeqCst)
    }
}

impl WeightSource for Counting {
    fn names(&self) -> Vec<&str> {
        self.weights.names()
    }
    fn meta(&self, name: &str) -> Option<TensorMeta> {
        self.weights.meta(name)
    }
    fn bytes(&self, name: &str) -> Result<Bytes> {
        let bytes = self.weights.bytes(name)?;
        self.read.fetch_add(bytes.len(), Ordering::SeqCst);
        Ok(bytes)
    }
    fn origin(&self, name: &str) -> Origin {
        self.weights.origin(name)
    }
}

#[test]
fn two_devices_give_what_one_gives() {
    let mut r = Random::new(1);
    let (a, b, c) = (new_rpc(), new_rpc(), new_rpc());
    for dtype in [DType::F16, DType::Q8_0] {
        let net = Net::of(&mut r, dtype, BLOCKS);
        let (program, x) = (net.program(3), inputs(&mut r, 3));
        let (want, need) = whole(&a, &net, &program, &x);
        let homes = [
            None,
            Some(Home::Ram),
            Some(Home::File),
            Some(Home::Device(a.clone())),
            Some(Home::Device(b.clone())),
            Some(Home::Device(c.clone())),
        ];
        for (i, home) in homes.into_iter().enumerate() {
            let mut computed = BTreeSet::new();
            for parts in [[120, 120], [90, 40], [60, 60], [50, 100], [30, 25], [20, 90], [20, 20], [1, 120], [1, 1]]
            {
                let trace = Trace::new();
                let manager = Manager::new(ManagerOptions {
                    prefetch: i % 2 == 0,
                    trace: Some(trace.clone()),
                    ..ManagerOptions::default()
                });
                let budgets = parts.map(|part| need * part / 100);
                manager.set_budget(&a, Some(budgets[0]));
                manager.set_budget(&b, Some(budgets[1]));
                let options = RunnerOptions { home: home.clone(), ..options(&manager, std::slice::from_ref(&b)) };
                let mut runner = Runner::new(a.clone(), net.source.clone(), options).unwrap();
                [&a, &b].into_iter().for_each(|d| d.reset_peak());
                for step in 0..2 {
                    match run(&mut runner, &program, &x) {
                        Ok(got) => assert!(got == want, "{dtype} {home:?} {parts:?} step {step}"),
                        Err(e) => {
                            let e = e.to_string();
                            assert!(e.contains(" needs ") && e.contains("budget") && parts == [1, 1], "{e}");
                        }
                    }
                    assert!(a.held().1 <= budgets[0] && b.held().1 <= budgets[1], "{home:?} {parts:?}");
                }
                let ran = |d: &Device| {
                    trace.events().iter().any(|e| e.kind == EventKind::Compute && &*e.device == d.name())
                };
                computed.insert([ran(&a), ran(&b)]);
                runner.finish();
                let left = [&a, &b, &c].map(|d| d.held().0 > 0);
                match &home {
                    Some(Home::Ram | Home::File) => assert_eq!(left, [false; 3]),
                    Some(Home::Device(d)) => {
                        assert_eq!(
                            left,
                            [&a, &b, &c].map(|other| other.is_same(d) && parts != [1, 1]),
                            "{parts:?}"
                        );
                    }
                    None => assert!(!left[2]),
                }
            }
            // All on the first, both, all on the second, and none.
            let every: BTreeSet<_> = [[true, false], [true, true], [false, true], [false, false]].into();
            assert_eq!(computed, every);
        }
    }
    assert_eq!([&a, &b, &c].map(|d| d.held().0), [0; 3]);
}

#[test]
fn the_part_of_a_device_may_begin_at_any_cut() {
    let mut r = Random::new(2);
    let net = Net::of(&mut r, DType::F16, BLOCKS);
    let (program, x) = (net.program(3), inputs(&mut r, 3));
    let (a, b) = (new_rpc(), new_rpc());
    let (want, _) = whole(&a, &net, &program, &x);
    for cut in 0..program.cuts().len() {
        let trace = Trace::new();
        let manager = Manager::new(ManagerOptions { trace: Some(trace.clone()), ..ManagerOptions::default() });
        let cuts = Cuts::At(vec![cut]);
        let both = RunnerOptions { cuts: cuts.clone(), ..options(&manager, std::slice::from_ref(&b)) };
        // The first segment has room on the first device, and no other.
        let sizes = {
            let alone = RunnerOptions { cuts, threads: 1, ..RunnerOptions::default() };
            Runner::new(a.clone(), net.source.clone(), alone).unwrap().measure(&program).unwrap()
        };
        let carried = 40_000;
        manager.set_budget(&a, Some(sizes[0].weights + sizes[0].workspace + carried));
        let mut runner = Runner::new(a.clone(), net.source.clone(), both).unwrap();
        for _ in 0..2 {
            assert!(run(&mut runner, &program, &x).unwrap() == want, "cut {cut}");
        }
        let events = trace.events();
        let computed: Vec<&str> =
            events.iter().filter(|e| e.kind == EventKind::Compute).map(|e| &*e.device).collect();
        if cut < BLOCKS / 2 {
            assert_eq!(computed, [a.name(), b.name(), a.name(), b.name()], "cut {cut}");
        }
    }
}

#[test]
fn steps_of_a_divided_network_load_nothing() {
    let mut r = Random::new(3);
    let net = Net::of(&mut r, DType::F16, BLOCKS);
    let x = inputs(&mut r, 3);
    let (a, b) = (new_rpc(), new_rpc());
    let (want, need) = whole(&a, &net, &net.program(3), &x);
    let manager = Manager::new(ManagerOptions::default());
    manager.set_budget(&a, Some(need * 6 / 10));
    manager.set_budget(&b, Some(need * 8 / 10));
    let source = Counting::new(&net.source);
    let mut runner = Runner::new(a.clone(), source.clone(), options(&manager, std::slice::from_ref(&b))).unwrap();
    assert!(run(&mut runner, &net.program(3), &x).unwrap() == want);
    let all: usize = net.source.names().iter().map(|n| net.source.bytes(n).unwrap().len()).sum();
    // What both parts read is on both.
    assert!((all..all + 3000).contains(&source.taken()));
    let lowered = runner.lowered();
    for _ in 0..2 {
        assert!(run(&mut runner, &net.program(3), &x).unwrap() == want);
    }
    assert_eq!((source.taken(), runner.lowered()), (0, lowered));
    // A picture of another size is divided where the one before was.
    run(&mut runner, &net.program(2), &inputs(&mut r, 2)).unwrap();
    assert_eq!(source.taken(), 0);
    // With less on the first, more of it moves to the second.
    manager.set_budget(&a, Some(need * 3 / 10));
    assert!(run(&mut runner, &net.program(3), &x).unwrap() == want);
    let moved = source.taken();
    assert!(moved > 0 && moved < all / 2, "{moved} of {all}");
    assert_eq!(manager.memory().modules[0].home, format!("{}&{}", a.name(), b.name()));
}

#[test]
fn weights_come_from_another_device() {
    let mut r = Random::new(4);
    let net = Net::of(&mut r, DType::F16, BLOCKS);
    let (program, x) = (net.program(3), inputs(&mut r, 3));
    let (a, shelf) = (new_rpc(), new_rpc());
    let (want, need) = whole(&a, &net, &program, &x);
    let all: usize = net.source.names().iter().map(|n| net.source.bytes(n).unwrap().len()).sum();
    for (room, most) in [(100, 0), (50, 60), (0, 100)] {
        for part in [100, 30] {
            let manager = Manager::new(ManagerOptions::default());
            manager.set_budget(&a, Some(need * part / 100));
            manager.set_budget(&shelf, Some(need * room / 100));
            let source = Counting::new(&net.source);
            let home = Some(Home::Device(shelf.clone()));
            let options = RunnerOptions { home, ..options(&manager, &[]) };
            let mut runner = Runner::new(a.clone(), source.clone(), options).unwrap();
            assert!(run(&mut runner, &program, &x).unwrap() == want);
            runner.finish();
            assert_eq!(a.held().0, 0);
            assert!(shelf.held().0 <= need * room / 100);
            assert!(source.taken() >= all);
            // What has room there is not read again.
            assert!(run(&mut runner, &program, &x).unwrap() == want);
            let read = source.taken();
            assert!(read <= all * most / 100 && (room > 0 || read == all), "{read} of {all}, {room} {part}");
        }
    }
}
