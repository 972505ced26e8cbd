//! Samplers against the references, and their names in the order of the command line (`oracle/samplers.py`).

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod support;

use std::collections::BTreeMap;

use sd_runtime::{
    Estimate, Prediction, SampleOptions, Sampler, SamplerKind, SamplerSetup, SchedulerKind, SigmaTable,
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
    let alpha = if prediction == Prediction::Flow { 1.0 - sigma } else { 1.0 };
    let scalings = prediction.scalings(sigma);
    let raw = x.iter().zip(mu).map(|(x, m)| {
        let (x, m) = (f64::from(*x), f64::from(*m));
        let d = (sigma * sigma * m + alpha * x) / (sigma * sigma + alpha * alpha);
        ((d - scalings.c_skip * x) / scalings.c_out) as f32
    });
    scalings.denoised(x, &raw.collect::<Vec<f32>>())
}

/// x after every step.
fn run(row: &Row<'_>, sigmas: &[f64], prediction: Prediction, data: &Data) -> Vec<Vec<f32>> {
    let kind: SamplerKind = row.sampler.parse().unwrap();
    let (eta, args) = match row.args.strip_prefix("eta=") {
        Some(eta) => (eta.parse().unwrap(), ""),
        None => (f64::from(kind.default_eta()), row.args),
    };
    let table = if row.table == "flow" { SigmaTable::flow(3.0, 1000.0) } else { SigmaTable::scaled_linear() };
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

#[test]
fn trajectories_are_the_references() {
    let file = Fixture::open("samplers.safetensors");
    let config = file.metadata("config");
    let data = Data {
        mu: file.f32s("input.mu"),
        mu_base: file.f32s("input.mu_base"),
        start: file.f32s("input.x"),
        noise: file.f32s("input.noise"),
        seed: config["seed"].as_u64().unwrap(),
    };
    let mut seen: BTreeMap<(String, String), (usize, f64)> = BTreeMap::new();
    for name in file.names() {
        let Some(row) = row(name) else { continue };
        let sigmas = file.f64s(&format!("input.sigmas.{}.{}.{}", row.table, row.schedule, row.steps));
        let want = file.f32s(name);
        let key = format!("{}.{}", row.table, row.sampler);
        let full = if row.args.is_empty() { key.clone() } else { format!("{key}.{}", row.args) };
        let reference = config["references"][&full].as_str().expect(name);
        // TCD's reference ends at its first timestep, not at 0.
        let compared = if row.sampler == "tcd" { row.steps - 1 } else { row.steps };
        let predictions: &[Prediction] =
            if row.table == "flow" { &[Prediction::Flow] } else { &[Prediction::Eps, Prediction::V] };
        for prediction in predictions {
            let states = run(&row, &sigmas, *prediction, &data);
            let entry = seen.entry((key.clone(), reference.to_owned())).or_default();
            for (i, (got, want)) in states.iter().zip(want.chunks(data.start.len())).take(compared).enumerate() {
                let limit = if i == 0 { SINGLE_STEP } else { TRAJECTORY };
                for (g, w) in got.iter().zip(want) {
                    let (g, w) = (f64::from(*g), f64::from(*w));
                    let off = (g - w).abs() / w.abs().max(1.0);
                    assert!(off <= limit, "{name}, {prediction}, step {}: {g}, want {w} ({reference})", i + 1);
                    entry.1 = entry.1.max(off);
                }
            }
            entry.0 += 1;
        }
    }
    for ((name, reference), (count, worst)) in &seen {
        println!("{name:20} {count:3} runs within {worst:.0e} of {reference}");
    }
    for table in ["sd", "flow"] {
        let of_one = |n: &&str| !seen.keys().any(|(key, _)| *key == format!("{table}.{n}"));
        let missing: Vec<&str> = SamplerKind::names().filter(of_one).collect();
        // Both are defined by a table of timesteps.
        assert_eq!(missing, if table == "flow" { vec!["ddim_trailing", "tcd"] } else { vec![] }, "{table}");
    }
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
