//! What runners promise when memory is short: never over budget, the same results bit for bit, errors that say what was
//! needed, and nothing done twice.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::sync::Arc;

use common::{NET_BLOCKS, Net, Random, new_rpc};
use sd_core::device::DeviceKind;
use sd_core::graph::Program;
use sd_core::{
    CancelToken, Cuts, DType, Device, Home, Manager, ManagerOptions, Result, Runner, RunnerOptions, Tensor,
};

fn inputs(r: &mut Random, h: usize) -> [Tensor; 2] {
    [r.tensor(&[2, 3, h, 6]), Tensor::f32(&[2], vec![3.0, 700.0]).unwrap()]
}

fn run(runner: &mut Runner, program: &Program, x: &[Tensor; 2]) -> Result<Vec<Tensor>> {
    runner.run(program, &[("x", &x[0]), ("t", &x[1])], &CancelToken::new())
}

fn options(manager: &Arc<Manager>) -> RunnerOptions {
    RunnerOptions { threads: 1, manager: Some(manager.clone()), module: "net".into(), ..RunnerOptions::default() }
}

/// Budgets from far too little to plenty, each about a sixth more than the one before.
fn budgets() -> Vec<usize> {
    std::iter::successors(Some(30_000usize), |b| Some(b + b / 6)).take_while(|b| *b < 4_000_000).collect()
}

#[test]
fn under_every_budget_the_result_is_the_same_or_an_error() {
    let mut r = Random::new(1);
    for device in [Device::cpu().unwrap(), new_rpc()] {
        let remote = device.kind() != DeviceKind::Cpu;
        for dtype in [DType::F16, DType::Q8_0] {
            let net = Net::new(&mut r, dtype);
            let program = net.program(11);
            let x = inputs(&mut r, 11);
            let manager = Manager::new(ManagerOptions::default());
            let whole = RunnerOptions { cuts: Cuts::None, ..options(&manager) };
            let want =
                run(&mut Runner::new(device.clone(), net.source.clone(), whole).unwrap(), &program, &x).unwrap();
            for home in [Home::Device(device.clone()), Home::Ram, Home::File] {
                let mut segments = std::collections::BTreeSet::new();
                let manager = Manager::new(ManagerOptions::default());
                let options = RunnerOptions { home: Some(home), ..options(&manager) };
                let mut kept = Runner::new(device.clone(), net.source.clone(), options.clone()).unwrap();
                for budget in budgets() {
                    manager.set_budget(&device, Some(budget));
                    let mut new = Runner::new(device.clone(), net.source.clone(), options.clone()).unwrap();
                    for runner in [&mut kept, &mut new] {
                        // What the other left is let go.
                        device.reset_peak();
                        let result = run(runner, &program, &x);
                        match result {
                            Ok(got) => {
                                assert!(got == want, "{dtype} with {budget} on {device}");
                                let (_, peak) = device.held();
                                // On the CPU it is that of all tests that run side by side.
                                let peak = if remote { peak } else { 0 };
                                assert!(peak <= budget, "{dtype}: {peak} with {budget} on {device}");
                                segments.insert(runner.measure(&program).unwrap().len());
                            }
                            Err(e) => {
                                assert!(segments.is_empty(), "{e}, and with less it could");
                                let e = e.to_string();
                                assert!(
                                    e.contains("segment ") && e.contains(" needs ") && e.contains("budget"),
                                    "{e}"
                                );
                                assert!(e.contains("hint: raise --max-vram; largest weight "), "{e}");
                            }
                        }
                    }
                }
                assert!(segments.contains(&1) && segments.len() > 1, "{segments:?}");
                assert_eq!(segments.last(), Some(&(NET_BLOCKS + 2)), "the least memory takes every cut");
            }
        }
    }
}
