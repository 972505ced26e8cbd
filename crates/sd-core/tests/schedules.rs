//! Random programs with random cuts under random budgets: whatever is cut, loaded ahead, let go and read again, memory
//! stays within the budget and the results are those of the program in one piece.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::sync::Arc;

use common::{Checkpoint, Random, distance};
use proptest::prelude::*;
use sd_core::convert::to_f32;
use sd_core::device::{Noop, NoopOptions};
use sd_core::graph::{Graph, Program, Var};
use sd_core::{
    CancelToken, Cuts, DType, Device, Home, Kind, Manager, ManagerOptions, Precision, Result, Runner,
    RunnerOptions, Scope, Tensor, WeightSource,
};

const ROWS: usize = 3;
/// What widths are multiples of, so that every type has whole blocks.
const UNIT: usize = 32;
const WIDEST: usize = 4 * UNIT;

/// One node, by numbers that are taken modulo what there is.
#[derive(Clone, Copy, Debug)]
struct Step {
    kind: u8,
    a: usize,
    b: usize,
    cut: bool,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    // Mostly recent values, so that programs are deep.
    let operand = || prop_oneof![3 => 0..3usize, 1 => 0..40usize];
    let step = (0..8u8, operand(), operand(), prop::bool::weighted(0.4));
    prop::collection::vec(step.prop_map(|(kind, a, b, cut)| Step { kind, a, b, cut }), 4..40)
}

/// A program, its weights, and what it makes of an input by the definitions of its operations.
struct Case {
    source: Arc<Checkpoint>,
    program: Program,
    x: Tensor,
    naive: Vec<f64>,
}

/// A value with its width and its elements.
struct Value {
    var: Var,
    width: usize,
    naive: Vec<f64>,
}

fn linear(x: &Value, weight: &[f64], n: usize) -> Vec<f64> {
    let row = |r: usize, c: usize| {
        let (x, w) = (&x.naive[r * x.width..][..x.width], &weight[c * x.width..][..x.width]);
        x.iter().zip(w).map(|(x, w)| x * w).sum()
    };
    (0..ROWS).flat_map(|r| (0..n).map(move |c| (r, c))).map(|(r, c)| row(r, c)).collect()
}

fn by_rows(a: &Value, range: std::ops::Range<usize>) -> impl Iterator<Item = &[f64]> {
    a.naive.chunks(a.width).map(move |row| &row[range.clone()])
}

fn case(steps: &[Step], seed: u64, dtype: DType) -> Case {
    let mut r = Random::new(seed);
    // Every matrix that may be wanted: from each width to each, three of a kind.
    let mut weights = Checkpoint::default();
    let widths: Vec<usize> = (1..=WIDEST / UNIT).map(|i| i * UNIT).collect();
    for (&from, &to) in widths.iter().flat_map(|from| widths.iter().map(move |to| (from, to))) {
        for i in 0..3 {
            weights = weights.random(&mut r, &format!("{from}.{to}.{i}.weight"), &[to, from], dtype);
        }
    }
    let source = Arc::new(weights);
    let w = Scope::root(source.clone());
    let matrix = |name: &str, elements: usize| -> Vec<f64> {
        let bytes = source.bytes(&format!("{name}.weight")).unwrap();
        to_f32(dtype, &bytes, elements).unwrap().into_iter().map(f64::from).collect()
    };
    let x = r.tensor(&[ROWS, UNIT]);
    let g = Graph::new();
    let var = g.input("x", &[ROWS, UNIT], DType::F32).unwrap();
    let mut values = vec![Value { var, width: UNIT, naive: x.values().iter().map(|&v| f64::from(v)).collect() }];
    for (i, step) in steps.iter().enumerate() {
        let n = values.len();
        let (a, b) = (&values[n - 1 - step.a % n], &values[n - 1 - step.b % n]);
        let joined = (a.width == b.width, a.width + b.width <= WIDEST);
        let made = match (step.kind, joined) {
            (0, (true, _)) => {
                let naive = a.naive.iter().zip(&b.naive).map(|(a, b)| a + b).collect();
                Value { var: g.add(a.var, b.var).unwrap(), width: a.width, naive }
            }
            (1, (true, _)) => {
                // Powers would grow without end.
                let naive = a.naive.iter().zip(&b.naive).map(|(a, b)| (a * b).tanh()).collect();
                Value { var: g.tanh(g.mul(a.var, b.var).unwrap()).unwrap(), width: a.width, naive }
            }
            (2, (_, true)) => {
                let rows = by_rows(a, 0..a.width).zip(by_rows(b, 0..b.width));
                let naive = rows.flat_map(|(a, b)| a.iter().chain(b)).copied().collect();
                Value { var: g.concat(&[a.var, b.var], 1).unwrap(), width: a.width + b.width, naive }
            }
            (3, _) if a.width > UNIT => {
                let naive = by_rows(a, UNIT..a.width).flatten().copied().collect();
                let var = g.slice(a.var, 1, UNIT, a.width - UNIT).unwrap();
                Value { var, width: a.width - UNIT, naive }
            }
            (0..=4, _) => {
                let naive = a.naive.iter().map(|v| v.tanh()).collect();
                Value { var: g.tanh(a.var).unwrap(), width: a.width, naive }
            }
            _ => {
                let to = widths[step.b % widths.len()];
                let name = format!("{}.{to}.{}", a.width, i % 3);
                let naive = linear(a, &matrix(&name, a.width * to), to);
                let y = g.linear(&w.linear_no_bias(&name).unwrap(), a.var).unwrap();
                // Values stay near one however deep the program is.
                Value { var: g.tanh(y).unwrap(), width: to, naive: naive.iter().map(|v| v.tanh()).collect() }
            }
        };
        values.push(made);
        if step.cut {
            let live: Vec<Var> = values.iter().map(|v| v.var).collect();
            g.cut(&w.at("step", i), &live);
        }
    }
    // The last value, and one from the middle that stays until the end.
    let outputs = [values.len() - 1, values.len() / 2];
    let program = g.finish(&outputs.map(|i| values[i].var)).unwrap();
    let naive = outputs.iter().flat_map(|&i| values[i].naive.clone()).collect();
    Case { source, program, x, naive }
}

impl Case {
    fn runner(&self, device: &Arc<Device>, options: RunnerOptions) -> Runner {
        let options = RunnerOptions { threads: 1, precision: Precision::F32, module: "net".into(), ..options };
        Runner::new(device.clone(), self.source.clone(), options).unwrap()
    }

    fn run(&self, runner: &mut Runner) -> Result<Vec<Tensor>> {
        runner.run(&self.program, &[("x", &self.x)], &CancelToken::new())
    }
}

fn noop(memory: usize) -> Arc<Device> {
    Noop::new(NoopOptions { memory, ..NoopOptions::default() }).device()
}

fn manager(prefetch: bool) -> Arc<Manager> {
    Manager::new(ManagerOptions { prefetch, margin: 0, ..ManagerOptions::default() })
}

fn home(number: usize, device: &Arc<Device>) -> Home {
    [Home::Device(device.clone()), Home::Ram, Home::File].into_iter().cycle().nth(number).unwrap_or(Home::Ram)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// On a pretend device of any size, with a second network that takes turns on it.
    #[test]
    fn never_over_budget_and_never_without_a_value(
        steps in prop::collection::vec(steps(), 2),
        seed in 0..1000u64,
        parts in prop::collection::vec(0.0..1.2f64, 6),
        choice in 0..12usize,
    ) {
        let cases = [case(&steps[0], seed, DType::F32), case(&steps[1], seed + 1, DType::F32)];
        let large = noop(1 << 30);
        let mut need = 0;
        let want = cases.each_ref().map(|case| {
            let whole = RunnerOptions { cuts: Cuts::None, manager: Some(manager(false)), ..RunnerOptions::default() };
            let mut runner = case.runner(&large, whole);
            let got = case.run(&mut runner).unwrap();
            need = need.max(runner.memory().0 + runner.memory().1);
            got
        });
        let device = noop(1 << 30);
        let manager = manager(choice % 2 == 0);
        let mut runners = [0, 1].map(|i| {
            let home = Some(home(choice + i, &device));
            cases[i].runner(&device, RunnerOptions { home, manager: Some(manager.clone()), ..RunnerOptions::default() })
        });
        // What is enough once is enough always.
        let mut enough = [usize::MAX; 2];
        for part in parts {
            let budget = (need as f64 * part) as usize;
            manager.set_budget(&device, Some(budget));
            for (i, (case, runner)) in cases.iter().zip(&mut runners).enumerate() {
                // What was there under a larger budget goes when the next run begins.
                let before = device.held().0;
                device.reset_peak();
                match case.run(runner) {
                    Ok(got) => {
                        prop_assert!(got == want[i], "other values with {budget} of {need}");
                        enough[i] = enough[i].min(budget);
                    }
                    Err(e) => {
                        prop_assert!(matches!(e.kind(), Kind::Device(_)), "{e}");
                        prop_assert!(e.to_string().contains("needs"), "{e}");
                        prop_assert!(budget < enough[i], "{e}: before, {} was enough", enough[i]);
                    }
                }
                let peak = device.held().1;
                prop_assert!(peak <= budget.max(before), "{peak} with {budget}");
                let report = manager.memory();
                let counted: usize = report.devices.iter().map(|d| d.weights + d.workspaces + d.crossing).sum();
                prop_assert_eq!(counted, device.held().0);
            }
        }
        prop_assert!(runners.into_iter().map(drop).count() == 2 && device.held().0 == 0);
    }

    /// On a device that is as small as that, so that what is free is the limit.
    #[test]
    fn a_device_that_is_full_is_no_problem_while_a_segment_fits(
        steps in steps(),
        seed in 0..1000u64,
        part in 0.3..1.1f64,
        choice in 0..6usize,
    ) {
        let case = case(&steps, seed, DType::F32);
        let large = noop(1 << 30);
        let mut whole = case.runner(&large, RunnerOptions { cuts: Cuts::None, ..RunnerOptions::default() });
        let want = case.run(&mut whole).unwrap();
        let need = whole.memory().0 + whole.memory().1;
        let memory = (need as f64 * part) as usize;
        let device = noop(memory);
        let home = Some(home(choice, &device));
        let options = RunnerOptions { home, manager: Some(manager(choice < 3)), ..RunnerOptions::default() };
        let mut runner = case.runner(&device, options);
        for _ in 0..3 {
            match case.run(&mut runner) {
                Ok(got) => prop_assert!(got == want),
                Err(e) => {
                    prop_assert!(memory < need && e.to_string().contains("free"), "{e}");
                    prop_assert!(e.to_string().contains("largest weight") || e.to_string().contains("hint"), "{e}");
                }
            }
            prop_assert!(device.held().1 <= memory);
        }
    }

    /// Divided among devices of any sizes, with weights between uses on one of them, on one that does not compute, or
    /// elsewhere.
    #[test]
    fn devices_that_share_a_network_are_each_within_their_budget(
        steps in steps(),
        seed in 0..1000u64,
        parts in prop::collection::vec(prop::collection::vec(0.0..1.1f64, 4), 3),
        count in 2..4usize,
        choice in 0..14usize,
    ) {
        let case = case(&steps, seed, DType::F32);
        let devices: Vec<Arc<Device>> = (0..4).map(|_| noop(1 << 30)).collect();
        let mut whole = case.runner(&devices[0], RunnerOptions { cuts: Cuts::None, ..RunnerOptions::default() });
        let want = case.run(&mut whole).unwrap();
        let need = whole.memory().0 + whole.memory().1;
        drop(whole);
        let manager = manager(choice % 2 == 0);
        let home = match choice / 2 {
            0 => None,
            1 => Some(Home::Ram),
            2 => Some(Home::File),
            i => Some(Home::Device(devices[i - 3].clone())),
        };
        let others = devices[1..count].to_vec();
        let options = RunnerOptions { home, others, manager: Some(manager.clone()), ..RunnerOptions::default() };
        let mut runner = case.runner(&devices[0], options);
        for parts in parts {
            let budgets: Vec<usize> = parts.iter().map(|part| (need as f64 * part) as usize).collect();
            let before: Vec<usize> = devices.iter().map(|d| d.held().0).collect();
            for (device, &budget) in devices.iter().zip(&budgets) {
                manager.set_budget(device, Some(budget));
                device.reset_peak();
            }
            for _ in 0..2 {
                match case.run(&mut runner) {
                    Ok(got) => prop_assert!(got == want, "other values with {budgets:?} of {need}"),
                    Err(e) => {
                        prop_assert!(e.to_string().contains("needs"), "{e}");
                        prop_assert!(budgets[..count].iter().all(|&b| b < need), "{e}: {budgets:?}, {need}");
                    }
                }
            }
            for ((device, budget), before) in devices.iter().zip(budgets).zip(before) {
                prop_assert!(device.held().1 <= budget.max(before), "{} with {budget}", device.held().1);
            }
            let report = manager.memory();
            let counted: usize = report.devices.iter().map(|d| d.weights + d.workspaces + d.crossing).sum();
            prop_assert_eq!(counted, devices.iter().map(|d| d.held().0).sum::<usize>());
        }
        drop(runner);
        prop_assert!(devices.iter().all(|d| d.held().0 == 0));
    }

    /// Two networks that run at the same time: each is right, or says what is missing.
    #[test]
    fn networks_side_by_side_wait_for_nobody(
        steps in prop::collection::vec(steps(), 2),
        seed in 0..1000u64,
        part in 0.5..2.2f64,
    ) {
        let cases = [case(&steps[0], seed, DType::F32), case(&steps[1], seed + 1, DType::F32)];
        let large = noop(1 << 30);
        let mut need = 0;
        let want = cases.each_ref().map(|case| {
            let mut runner = case.runner(&large, RunnerOptions { cuts: Cuts::None, ..RunnerOptions::default() });
            let got = case.run(&mut runner).unwrap();
            need = need.max(runner.memory().0 + runner.memory().1);
            got
        });
        let budget = (need as f64 * part) as usize;
        let device = noop(budget);
        let manager = manager(true);
        let results: Vec<Vec<Result<Vec<Tensor>>>> = std::thread::scope(|s| {
            let threads: Vec<_> = cases.iter().map(|case| {
                let options = RunnerOptions { manager: Some(manager.clone()), ..RunnerOptions::default() };
                let mut runner = case.runner(&device, options);
                s.spawn(move || (0..4).map(|_| case.run(&mut runner)).collect())
            }).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        for (results, want) in results.iter().zip(&want) {
            for result in results {
                match result {
                    Ok(got) => prop_assert!(got == want),
                    Err(e) => prop_assert!(matches!(e.kind(), Kind::Device(_)), "{e}"),
                }
            }
        }
        prop_assert!(device.held() .1 <= budget && device.held().0 == 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..ProptestConfig::default() })]

    /// On the processor, whose values are also those of the definitions.
    #[test]
    fn every_schedule_gives_the_values_of_the_naive_execution(
        steps in steps(),
        seed in 0..1000u64,
        half in any::<bool>(),
        parts in prop::collection::vec(0.05..1.2f64, 4),
        choice in 0..6usize,
    ) {
        let case = case(&steps, seed, if half { DType::F16 } else { DType::F32 });
        let device = Device::cpu().unwrap();
        let mut whole = case.runner(&device, RunnerOptions { cuts: Cuts::None, ..RunnerOptions::default() });
        let want = case.run(&mut whole).unwrap();
        let values: Vec<f32> = want.iter().flat_map(Tensor::values).copied().collect();
        let far = distance(&values, &case.naive);
        prop_assert!(far < 1e-4, "{far} away from the definitions");

        let manager = manager(choice < 3);
        let options = RunnerOptions {
            home: Some(home(choice, &device)),
            manager: Some(manager.clone()),
            ..RunnerOptions::default()
        };
        let mut runner = case.runner(&device, options);
        for cut in 0..case.program.cuts().len() {
            runner.set_cuts(Cuts::At(vec![cut]));
            prop_assert!(case.run(&mut runner).unwrap() == want, "cut {cut}");
        }
        for cuts in [Cuts::All, Cuts::Auto] {
            runner.set_cuts(cuts);
            prop_assert!(case.run(&mut runner).unwrap() == want);
        }
        let need = whole.memory().1;
        for part in parts {
            manager.set_budget(&device, Some((need as f64 * part) as usize));
            match case.run(&mut runner) {
                Ok(got) => prop_assert!(got == want, "with {part} of {need}"),
                Err(e) => prop_assert!(part < 1.0 && e.to_string().contains("needs"), "{e}"),
            }
        }
    }
}
