//! Samplers against the references, and their names in the order of the command line (`oracle/samplers.py`).

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;

use sd_runtime::{
    Ays, Estimate, Prediction, SampleOptions, Sampler, SamplerKind, SamplerSetup, ScheduleInput, SchedulerKind,
    SigmaTable,
};
use support::Fixture;

/// Of the largest of 1 and the value: f32 latents, and f32 predictions at levels up to 15, against the references' f64.
const SINGLE_STEP: f64 = 1e-5;
const TRAJECTORY: f64 = 2e-5;

/// One trajectory of the fixture.
struct Row<'a> {
    table: &'a str,
    sampler: &'a str,
    args: &'a str,
    schedule: &'a str,
    steps: usize,
}

fn row(name: &str) -> Option<Row<'_>> {
    let (table, rest) = name.strip_prefix("output.")?.split_once('.')?;
    let mut parts = rest.rsplitn(3, '.');
    let (steps, schedule, sampler) = (parts.next()?.parse().ok()?, parts.next()?, parts.next()?);
    let (sampler, args) = sampler.split_once('.').unwrap_or((sampler, ""));
    Some(Row { table, sampler, args, schedule, steps })
}

struct Data {
    mu: Vec<f32>,
    mu_base: Vec<f32>,
    start: Vec<f32>,
    noise: Vec<f32>,
    seed: u64,
}

/// The mean of x0 given x, where x0 is distributed as N(mu, 1), by way of what a network would predict.
fn estimate(x: &[f32], sigma: f64, prediction: Prediction, mu: &[f32]) -> Vec<f32> {
    let alpha = if matches!(prediction, Prediction::Flow | Prediction::X0) { 1.0 - sigma } else { 1.0 };
    let scalings = prediction.scalings(sigma);
    let raw = x.iter().zip(mu).map(|(x, m)| {
        let (x, m) = (f64::from(*x), f64::from(*m));
        let d = (sigma * sigma * m + alpha * x) / (sigma * sigma + alpha * alpha);
        ((d - scalings.c_skip * x) / scalings.c_out) as f32
    });
    scalings.denoised(x, &raw.collect::<Vec<f32>>())
}

/// What a network predicts, with the levels of the models that do.
struct Predicts {
    name: &'static str,
    prediction: fn() -> Prediction,
    table: fn() -> SigmaTable,
    /// Whether levels are those of a flow.
    flow: bool,
}

const PREDICTIONS: [Predicts; 6] = [
    Predicts { name: "eps", prediction: || Prediction::Eps, table: SigmaTable::scaled_linear, flow: false },
    Predicts { name: "v", prediction: || Prediction::V, table: SigmaTable::scaled_linear, flow: false },
    Predicts {
        name: "edm_v",
        prediction: || Prediction::EdmV,
        table: || SigmaTable::continuous(0.002, 120.0),
        flow: false,
    },
    Predicts {
        name: "sd3_flow",
        prediction: || Prediction::Flow,
        table: || SigmaTable::flow(3.0, 1000.0),
        flow: true,
    },
    // The shift of the fixture's levels, as timesteps of Flux.
    Predicts {
        name: "flux_flow",
        prediction: || Prediction::Flow,
        table: || SigmaTable::flow(3.0, 1.0),
        flow: true,
    },
    Predicts {
        name: "minit2i_flow",
        prediction: || Prediction::X0,
        table: || SigmaTable::flow(3.0, 1000.0),
        flow: true,
    },
];

impl Predicts {
    /// Whether it makes sense for a row. Samplers that are defined by a table of timesteps have no other.
    fn suits(&self, row: &Row<'_>) -> bool {
        let by_timesteps = ["tcd", "ddim_trailing"].contains(&row.sampler);
        self.flow == (row.table == "flow") && !(by_timesteps && self.name == "edm_v")
    }
}

/// x after every step.
fn run(row: &Row<'_>, sigmas: &[f64], of: &Predicts, data: &Data) -> Vec<Vec<f32>> {
    let (prediction, table) = ((of.prediction)(), (of.table)());
    let kind: SamplerKind = row.sampler.parse().unwrap();
    let (eta, args) = match row.args.strip_prefix("eta=") {
        Some(eta) => (eta.parse().unwrap(), ""),
        None => (f64::from(kind.default_eta()), row.args),
    };
    let options: SampleOptions = args.parse().unwrap();
    let mut sampler =
        Sampler::new(kind, SamplerSetup { sigmas: sigmas.to_vec(), table, eta, seed: data.seed, options });
    let mut x: Vec<f32> = data.start.iter().map(|x| (f64::from(*x) * sigmas[0]) as f32).collect();
    let mut draws = data.noise.chunks(x.len());
    (0..row.steps)
        .map(|_| {
            let mut denoise = |x: &[f32], sigma: f64| {
                let denoised = estimate(x, sigma, prediction, &data.mu);
                let base = kind.uses_base().then(|| estimate(x, sigma, prediction, &data.mu_base));
                Ok(Estimate { denoised, base })
            };
            let mut noise = |n: usize| draws.next().filter(|d| d.len() == n).expect("noise").to_vec();
            sampler.step(&mut x, &mut denoise, &mut noise).unwrap();
            x.clone()
        })
        .collect()
}

/// What was compared of a sampler with a reference.
#[derive(Default)]
struct Compared {
    /// By prediction.
    schedules: BTreeMap<&'static str, BTreeSet<String>>,
    runs: usize,
    /// The largest difference after one step, and after more.
    worst: [f64; 2],
    /// The steps of the longest run.
    longest: usize,
}

/// The fixture's levels are those that the schedules here give, and every sampler takes the references' steps along every
/// schedule, whatever the network predicts. Prints which reference each row has.
#[test]
fn every_sampler_schedule_and_prediction_is_its_reference() {
    let file = Fixture::open("samplers.safetensors");
    let config = file.metadata("config");
    let data = Data {
        mu: file.f32s("input.mu"),
        mu_base: file.f32s("input.mu_base"),
        start: file.f32s("input.x"),
        noise: file.f32s("input.noise"),
        seed: config["seed"].as_u64().unwrap(),
    };
    let mut seen: BTreeMap<(String, String), Compared> = BTreeMap::new();
    for name in file.names() {
        let Some(row) = row(name) else { continue };
        let sigmas = file.f64s(&format!("input.sigmas.{}.{}.{}", row.table, row.schedule, row.steps));
        let want = file.f32s(name);
        let key = format!("{}.{}", row.table, row.sampler);
        let full = if row.args.is_empty() { key.clone() } else { format!("{key}.{}", row.args) };
        let reference = config["references"][&full].as_str().expect(name);
        // TCD's reference ends at its first timestep, not at 0.
        let compared = if row.sampler == "tcd" { row.steps - 1 } else { row.steps };
        for predicts in PREDICTIONS.iter().filter(|p| p.suits(&row)) {
            let states = run(&row, &sigmas, predicts, &data);
            let entry = seen.entry((key.clone(), reference.to_owned())).or_default();
            for (i, (got, want)) in states.iter().zip(want.chunks(data.start.len())).take(compared).enumerate() {
                let limit = if i == 0 { SINGLE_STEP } else { TRAJECTORY };
                for (g, w) in got.iter().zip(want) {
                    let (g, w) = (f64::from(*g), f64::from(*w));
                    let off = (g - w).abs() / w.abs().max(1.0);
                    let what = predicts.name;
                    assert!(off <= limit, "{name}, {what}, step {}: {g}, want {w} ({reference})", i + 1);
                    let worst = &mut entry.worst[usize::from(i > 0)];
                    *worst = worst.max(off);
                }
            }
            entry.runs += 1;
            entry.longest = entry.longest.max(row.steps);
            entry.schedules.entry(predicts.name).or_default().insert(row.schedule.to_owned());
        }
    }
    let mut schedules: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for name in file.names() {
        let Some(rest) = name.strip_prefix("input.sigmas.") else { continue };
        let [table, schedule, steps] = rest.split('.').collect::<Vec<_>>().try_into().unwrap();
        // Not a schedule, but DDIM's and TCD's own timesteps.
        if schedule == "trailing" {
            continue;
        }
        let levels = if table == "flow" { SigmaTable::flow(3.0, 1000.0) } else { SigmaTable::scaled_linear() };
        let input = ScheduleInput {
            tokens: 4096,
            ays: Some(Ays::Sd1),
            ..ScheduleInput::new(&levels, steps.parse().unwrap())
        };
        let got = schedule.parse::<SchedulerKind>().unwrap().sigmas(&input).unwrap();
        let want = file.f64s(name);
        assert_eq!(got.len(), want.len(), "{rest}");
        for (g, w) in got.iter().zip(&want) {
            assert!((g - w).abs() <= 1e-6 * w.max(1.0), "{rest}: {g}, want {w}");
        }
        schedules.entry(if table == "flow" { "flow" } else { "sd" }).or_default().insert(schedule.to_owned());
    }
    let mut table = String::new();
    for ((name, reference), c) in &seen {
        let predictions: Vec<&str> = c.schedules.keys().copied().collect();
        let count = c.schedules.values().map(BTreeSet::len).max().unwrap();
        let ([one, more], predictions) = (c.worst, predictions.join(" "));
        table += &format!(
            "{name:20} {count:2} schedules x {predictions:31} {:4} runs of up to {} steps, off by {one:.0e} and {more:.0e}: {reference}\n",
            c.runs, c.longest
        );
    }
    // Beside what the test harness keeps to itself.
    std::io::stdout().write_all(table.as_bytes()).unwrap();
    for sampler in SamplerKind::names() {
        for (table, levels) in &schedules {
            let by_timesteps = ["tcd", "ddim_trailing"].contains(&sampler);
            // Both are defined by a table of timesteps, which a flow does not have.
            if by_timesteps && *table == "flow" {
                continue;
            }
            let all = seen.iter().filter(|((name, _), _)| *name == format!("{table}.{sampler}"));
            let all: Vec<&Compared> = all.map(|(_, c)| c).collect();
            assert!(all.iter().any(|c| c.longest == 20), "{sampler} on {table}: no run of 20 steps");
            for predicts in PREDICTIONS.iter().filter(|p| p.flow == (*table == "flow")) {
                if by_timesteps {
                    continue;
                }
                let of = all.iter().find_map(|c| c.schedules.get(predicts.name));
                assert_eq!(of, Some(levels), "{sampler} of {}", predicts.name);
            }
        }
    }
    // With the schedules of one table alone, all of them.
    let named: BTreeSet<String> = SchedulerKind::names().filter(|n| *n != "normal").map(str::to_owned).collect();
    assert_eq!(schedules.values().flatten().cloned().collect::<BTreeSet<_>>(), named);
}

#[test]
fn names_are_those_of_the_command_line() {
    let samplers: Vec<&str> = SamplerKind::names().collect();
    let first = "euler euler_a heun dpm2 dpm++2s_a dpm++2m dpm++2mv2 ipndm ipndm_v lcm ddim_trailing tcd res_multistep \
                 res_2s er_sde euler_cfg_pp euler_a_cfg_pp euler_ge dpm++2m_sde dpm++2m_sde_bt lms";
    assert_eq!(samplers[..21], first.split_whitespace().collect::<Vec<_>>());
    let schedulers: Vec<&str> = SchedulerKind::names().filter(|n| *n != "normal").collect();
    let all = "discrete karras exponential ays gits sgm_uniform simple smoothstep kl_optimal lcm bong_tangent ltx2 \
               logit_normal flux2 flux beta";
    assert_eq!(schedulers, all.split_whitespace().collect::<Vec<_>>());
    assert_eq!("normal".parse::<SchedulerKind>().unwrap(), SchedulerKind::Discrete);
}
