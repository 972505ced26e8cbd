//! Adapters at run time when memory is short: the same results bit for bit under every cut and budget, and their tensors
//! in the accounts.
#![allow(clippy::unwrap_used, clippy::panic, clippy::expect_used)]

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;

use common::{Checkpoint, NET_BLOCKS, Net, Random, new_rpc};
use sd_core::device::DeviceKind;
use sd_core::graph::Program;
use sd_core::passes::adapters::{Adapted, Adapter, Change, Factor, Kind, Magnitude, Mode, Rows};
use sd_core::{
    CancelToken, Cuts, DType, Device, Home, Manager, ManagerOptions, Result, Runner, RunnerOptions, Tensor,
    TypePolicy, WeightSource,
};

/// Bytes of the tensors that a block's change adds beside its weights, all f32: of `q` two factors of rank 4, of `k` two
/// of a Kronecker product, of `conv` three with a core.
const ADDED: usize = 4 * (2 * 4 * 32 + 4 * 4 + 8 * 8 + 4 * 32 + 4 * 4 * 9 + 32 * 4);

/// An adapter of the layers `names` of every block.
fn adapter(r: &mut Random, names: &[&str]) -> Arc<Adapter> {
    let (mut file, mut changes) = (Checkpoint::default(), BTreeMap::new());
    for i in 0..NET_BLOCKS {
        for &name in names {
            let mut put = |part: &str, dims: &[usize]| {
                let tensor = format!("{i}.{name}.{part}");
                file = std::mem::take(&mut file).random(r, &tensor, dims, DType::F16);
                tensor
            };
            let mut magnitude = None;
            let kind = match name {
                "k" => Kind::Kronecker(Factor::Whole(put("left", &[4, 4])), Factor::Whole(put("right", &[8, 8]))),
                "conv" => Kind::LowRank {
                    down: put("down", &[4, 32, 1, 1]),
                    mid: Some(put("mid", &[4, 4, 3, 3])),
                    up: put("up", &[32, 4, 1, 1]),
                },
                _ => Kind::LowRank { down: put("down", &[4, 32]), mid: None, up: put("up", &[32, 4]) },
            };
            if name == "v" {
                magnitude = Some(Magnitude { name: put("magnitude", &[32]), per_input: false });
            }
            let change = Change { kind, scale: 0.5, rows: Rows::All, magnitude };
            changes.insert(format!("blocks.{i}.{name}.weight"), vec![change]);
        }
    }
    Arc::new(Adapter::new(Arc::new(file), changes))
}

fn run(runner: &mut Runner, program: &Program, x: &[Tensor; 2]) -> Result<Vec<Tensor>> {
    runner.run(program, &[("x", &x[0]), ("t", &x[1])], &CancelToken::new())
}

fn inputs(r: &mut Random, h: usize) -> [Tensor; 2] {
    [r.tensor(&[2, 3, h, 6]), Tensor::f32(&[2], vec![3.0, 700.0]).unwrap()]
}

fn adapted(net: &Net, list: &[(&Arc<Adapter>, f32)]) -> Arc<Adapted> {
    let list = list.iter().map(|(adapter, strength)| ((*adapter).clone(), *strength)).collect();
    let source: Arc<dyn WeightSource> = net.source.clone();
    Arc::new(Adapted::new(source, list, Mode::AtRuntime, TypePolicy::Stored).unwrap())
}

fn open(net: &Net, device: &Arc<Device>, manager: &Arc<Manager>, cuts: Cuts, home: Option<Home>) -> Runner {
    let (manager, module) = (Some(manager.clone()), "net".to_owned());
    let options = RunnerOptions { threads: 1, cuts, home, manager, module, ..RunnerOptions::default() };
    Runner::new(device.clone(), net.source.clone(), options).unwrap()
}

#[test]
fn no_cut_and_no_budget_changes_a_result() {
    let mut r = Random::new(11);
    for device in [Device::cpu().unwrap(), new_rpc()] {
        let remote = device.kind() != DeviceKind::Cpu;
        for dtype in [DType::F16, DType::Q8_0] {
            let net = Net::new(&mut r, dtype);
            let (a, b) = (adapter(&mut r, &["q", "k", "conv"]), adapter(&mut r, &["q", "v", "mod"]));
            let adapted = adapted(&net, &[(&a, 0.75), (&b, -0.5)]);
            let (program, x) = (net.program(11), inputs(&mut r, 11));
            let free = Manager::new(ManagerOptions::default());
            let mut whole = open(&net, &device, &free, Cuts::None, None);
            let without = run(&mut whole, &program, &x).unwrap();
            whole.set_adapters(adapted.clone());
            let want = run(&mut whole, &program, &x).unwrap();
            assert!(want != without, "{dtype} on {device}: nothing was changed");
            drop(whole);

            let mut kept = open(&net, &device, &free, Cuts::None, None);
            kept.set_adapters(adapted.clone());
            let cuts = (0..=NET_BLOCKS).map(|i| Cuts::At(vec![i])).chain([Cuts::All]);
            for cuts in cuts {
                kept.set_cuts(cuts.clone());
                assert!(run(&mut kept, &program, &x).unwrap() == want, "{dtype} {cuts:?} on {device}");
            }
            drop(kept);

            let homes = [Home::Device(device.clone()), Home::Ram, Home::File];
            for (home, prefetch) in homes.into_iter().zip([true, false, true]) {
                let manager = Manager::new(ManagerOptions { prefetch, ..ManagerOptions::default() });
                let mut runner = open(&net, &device, &manager, Cuts::Auto, Some(home.clone()));
                runner.set_adapters(adapted.clone());
                let mut segments = std::collections::BTreeSet::new();
                for budget in
                    std::iter::successors(Some(40_000usize), |b| Some(b + b / 6)).take_while(|b| *b < 2_000_000)
                {
                    manager.set_budget(&device, Some(budget));
                    device.reset_peak();
                    match run(&mut runner, &program, &x) {
                        Ok(got) => {
                            assert!(got == want, "{dtype} with {budget} on {device}");
                            // On the CPU it is that of all tests that run side by side.
                            let peak = if remote { device.held().1 } else { 0 };
                            assert!(peak <= budget, "{dtype}: {peak} with {budget} on {device}");
                            segments.insert(runner.measure(&program).unwrap().len());
                        }
                        Err(e) => assert!(segments.is_empty() && e.to_string().contains("budget"), "{e}"),
                    }
                }
                // On the CPU, weights of a file pass by in segments anyway.
                assert!(segments.contains(&(NET_BLOCKS + 2)), "the least memory takes every cut: {segments:?}");
                let passes = !remote && matches!(home, Home::File);
                assert!(passes || segments.contains(&1), "{segments:?}");
            }
        }
    }
}

#[test]
fn their_tensors_are_in_the_accounts_and_leave_with_them() {
    let mut r = Random::new(12);
    let device = new_rpc();
    let net = Net::new(&mut r, DType::Q8_0);
    let a = adapter(&mut r, &["q", "k", "conv"]);
    let (program, x) = (net.program(5), inputs(&mut r, 5));
    let manager = Manager::new(ManagerOptions::default());
    let mut runner = open(&net, &device, &manager, Cuts::None, None);
    let want = run(&mut runner, &program, &x).unwrap();
    let before = runner.memory().0;
    let weights = |manager: &Arc<Manager>| {
        let memory = manager.memory();
        let resident: usize = memory.modules.iter().map(|m| m.resident).sum();
        assert_eq!(memory.devices.iter().map(|d| d.weights).sum::<usize>(), resident);
        resident
    };
    assert_eq!(weights(&manager), before);
    for _ in 0..3 {
        runner.set_adapters(adapted(&net, &[(&a, 1.0)]));
        assert!(run(&mut runner, &program, &x).unwrap() != want);
        let with = runner.memory().0;
        // Each tensor may begin at a multiple of so many bytes.
        let most = NET_BLOCKS * (ADDED + 7 * 128);
        assert!((NET_BLOCKS * ADDED..=most).contains(&(with - before)), "{} more", with - before);
        assert_eq!(weights(&manager), with);
        // Another strength has the same tensors.
        runner.set_adapters(adapted(&net, &[(&a, -0.25)]));
        run(&mut runner, &program, &x).unwrap();
        assert_eq!(runner.memory().0, with);
        runner.set_adapters(adapted(&net, &[]));
        assert!(run(&mut runner, &program, &x).unwrap() == want);
        assert_eq!((runner.memory().0, weights(&manager)), (before, before));
    }
}
