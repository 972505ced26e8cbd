//! Noise and schedules against what torch, k-diffusion and diffusers compute (`oracle/rng.py`, `schedules*.py`).

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod support;

use sd_runtime::{Ays, Prediction, Rng, RngKind, ScheduleInput, SchedulerKind, SigmaTable, shifted};
use support::{Fixture, json};

/// Both slices agree within `abs`; a failure names the first place where they do not.
fn check(what: &str, got: &[f32], want: &[f32], abs: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((f64::from(*g) - f64::from(*w)).abs() <= abs, "{what}: value {i} is {g}, want {w}");
    }
}

/// One unit in the last place of the largest values: torch's vectorised f32 logarithm, sine and cosine are not
/// correctly rounded, and differ between instruction sets.
const NOISE: f64 = 5e-7;

#[test]
fn noise_is_torchs() {
    let file = Fixture::open("rng.safetensors");
    let mut compared = 0;
    for name in file.names() {
        let Some(path) = name.strip_prefix("output.") else { continue };
        let mut parts: Vec<&str> = path.split('.').collect();
        let kind = match parts.remove(0) {
            "cpu" => RngKind::Cpu,
            "cuda" => RngKind::Cuda,
            _ => continue, // The words before the transform; the unit tests hold them.
        };
        let mut rng = Rng::new(kind, parts.remove(0).parse().unwrap());
        let want = file.f32s(name);
        let n = |s: &str| s.parse::<usize>().unwrap();
        let got = match parts[..] {
            ["sequence", sizes, i] => {
                let draws: Vec<Vec<f32>> = sizes.split('_').map(|size| rng.randn(n(size))).collect();
                draws[n(i)].clone()
            }
            [size, part @ ("first" | "last" | "every_61")] if kind == RngKind::Cpu => {
                subset(&rng.randn(n(size)), part)
            }
            [_, size, part @ ("first" | "last" | "every_61")] => subset(&rng.randn(n(size)), part),
            [size] => rng.randn(n(size)),
            [call, size] => {
                let draws: Vec<Vec<f32>> = (0..=n(call)).map(|_| rng.randn(n(size))).collect();
                draws[n(call)].clone()
            }
            _ => panic!("{name}"),
        };
        check(name, &got, &want, NOISE);
        compared += 1;
    }
    assert!(compared > 60, "{compared}");
}

#[test]
fn the_default_engine_is_libstdcpps() {
    let json = json("rng_std.json");
    for row in json["rows"].as_array().unwrap() {
        let (seed, count) = (row["seed"].as_u64().unwrap(), row["count"].as_u64().unwrap() as usize);
        let want: Vec<f32> = row["values"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap() as f32).collect();
        let mut rng = Rng::new(RngKind::StdDefault, seed);
        let got: Vec<f32> = (0..2).flat_map(|_| rng.randn(count)).collect();
        check(&format!("seed {seed}, twice {count}"), &got, &want, NOISE);
    }
}

fn subset(values: &[f32], part: &str) -> Vec<f32> {
    match part {
        "first" => values[..64].to_vec(),
        "last" => values[values.len() - 64..].to_vec(),
        _ => values.iter().step_by(61).copied().collect(),
    }
}

fn close(what: &str, got: f64, want: f64) {
    assert!((got - want).abs() <= 1e-9 * want.abs().max(1.0), "{what}: {got}, want {want}");
}

#[test]
fn schedules_are_k_diffusions() {
    let json = json("schedules.json");
    let number = |v: &serde_json::Value| v.as_f64().unwrap();
    let list = |v: &serde_json::Value| v.as_array().unwrap().clone();
    let table = SigmaTable::scaled_linear();
    close("least sigma", table.min(), number(&json["sigma_min"]));
    close("largest sigma", table.max(), number(&json["sigma_max"]));
    for row in list(&json["table"]) {
        close("table", table.sigma(number(&row["i"])), number(&row["sigma"]));
    }
    for pair in list(&json["sigma_of_t"]) {
        close("sigma of t", table.sigma(number(&pair[0])), number(&pair[1]));
    }
    for pair in list(&json["t_of_sigma"]) {
        close("t of sigma", table.timestep(number(&pair[0])), number(&pair[1]));
    }
    let mut compared = 0;
    for schedule in list(&json["schedules"]) {
        let name = schedule["name"].as_str().unwrap();
        if !SchedulerKind::names().any(|n| n == name) {
            continue;
        }
        let want: Vec<f64> = list(&schedule["sigmas"]).iter().map(number).collect();
        let got =
            name.parse::<SchedulerKind>().unwrap().sigmas(&ScheduleInput::new(&table, want.len() - 1)).unwrap();
        assert_eq!(got.len(), want.len());
        got.iter().zip(&want).for_each(|(g, w)| close(name, *g, *w));
        compared += 1;
    }
    assert!(compared >= 12, "{compared}");
}

#[test]
fn sdxls_other_noise_levels_are_diffusers() {
    let json = json("schedules_sdxl.json");
    let list = |key: &str| json[key].as_array().unwrap().clone();
    let number = |v: &serde_json::Value| v.as_f64().unwrap();
    let table = SigmaTable::zero_terminal_snr();
    for row in list("zsnr") {
        close("zero terminal SNR", table.sigma(number(&row["i"])), number(&row["sigma"]));
    }
    let continuous = SigmaTable::continuous(0.002, 120.0);
    for row in list("edm_v") {
        let sigma = number(&row["sigma"]);
        let scalings = Prediction::V.scalings(sigma);
        close("timestep", continuous.timestep(sigma), number(&row["t"]));
        close("c_in", scalings.c_in, number(&row["c_in"]));
        close("c_skip", scalings.c_skip, number(&row["c_skip"]));
        close("c_out", scalings.c_out, number(&row["c_out"]));
    }
    for row in list("edm_v_exponential") {
        let want: Vec<f64> = row["sigmas"].as_array().unwrap().iter().map(number).collect();
        let got = SchedulerKind::Exponential.sigmas(&ScheduleInput::new(&continuous, want.len() - 1)).unwrap();
        assert_eq!(got.len(), want.len());
        got.iter().zip(&want).for_each(|(g, w)| close("exponential", *g, *w));
    }
}

/// diffusers keeps these levels in f32.
const F32_LEVEL: f64 = 2e-7;

#[test]
fn flows_levels_are_diffusers() {
    let json = json("schedules_flux.json");
    let list = |key: &str| json[key].as_array().unwrap().clone();
    let numbers = |v: &serde_json::Value| v.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect();
    let compare = |what: &str, got: &[f64], want: &serde_json::Value| {
        let want: Vec<f64> = numbers(want);
        assert_eq!(got.len(), want.len(), "{what}");
        got.iter().zip(&want).for_each(|(g, w)| assert!((g - w).abs() < F32_LEVEL, "{what}: {g}, want {w}"));
    };
    let (mut shifts, mut seen) = (Vec::new(), 0);
    for row in list("dev") {
        let [tokens, steps] = ["tokens", "steps"].map(|k| row[k].as_u64().unwrap() as usize);
        let table = SigmaTable::flow(1.0, 1.0);
        let input = ScheduleInput { tokens, ..ScheduleInput::new(&table, steps) };
        compare("flux", &SchedulerKind::Flux.sigmas(&input).unwrap(), &row["sigmas"]);
        seen += 1;
    }
    for row in list("constant") {
        let (shift, steps) = (row["shift"].as_f64().unwrap(), row["steps"].as_u64().unwrap() as usize);
        let table = SigmaTable::flow(shift, 1000.0);
        assert!((table.timestep(0.25) - 250.0).abs() < 1e-9 && table.max() == 1.0);
        let got = SchedulerKind::Simple.sigmas(&ScheduleInput::new(&table, steps)).unwrap();
        // Levels are picked from a table of 1000, so only divisors of 1000 land on even shares.
        if 1000 % steps == 0 {
            compare("simple", &got, &row["sigmas"]);
            shifts.push(shift);
        }
    }
    for row in list("shift") {
        let mu = row["mu"].as_f64().unwrap();
        let got: Vec<f64> = numbers(&row["u"]);
        let got: Vec<f64> = got.into_iter().map(|u| shifted(mu.exp(), u)).collect();
        compare("shift", &got, &row["sigma"]);
    }
    assert!(seen == 24 && shifts.len() == 6, "{seen} {}", shifts.len());
}

/// References keep many of these levels in f32.
const NAMED_LEVEL: f64 = 1e-6;

#[test]
fn schedules_are_their_references() {
    let json = json("schedules_named.json");
    let tables = [
        ("sd", SigmaTable::scaled_linear()),
        ("flow", SigmaTable::flow(3.0, 1000.0)),
        ("flux", SigmaTable::flux(1.15f64.exp(), 1.0)),
    ];
    let mut seen = std::collections::BTreeMap::new();
    for row in json["rows"].as_array().unwrap() {
        let [table, name, reference] = ["table", "name", "reference"].map(|k| row[k].as_str().unwrap());
        let steps = row["steps"].as_u64().unwrap() as usize;
        let (kind, ays) = match name.split_once('.') {
            Some((kind, _)) => (kind, Ays::Sdxl),
            None => (name, Ays::Sd1),
        };
        let input = ScheduleInput {
            tokens: row["tokens"].as_u64().unwrap_or(4096) as usize,
            ays: Some(ays),
            options: row["args"].as_str().unwrap_or("").parse().unwrap(),
            ..ScheduleInput::new(&tables.iter().find(|(t, _)| *t == table).unwrap().1, steps)
        };
        let got = kind.parse::<SchedulerKind>().unwrap().sigmas(&input).unwrap();
        let want: Vec<f64> = row["sigmas"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect();
        let what = format!("{name} of {table}, {steps} steps, {} tokens, against {reference}", input.tokens);
        assert_eq!(got.len(), want.len(), "{what}: {got:?}, want {want:?}");
        let off = got.iter().zip(&want).map(|(g, w)| (g - w).abs() / w.max(1.0)).fold(0.0, f64::max);
        assert!(off < NAMED_LEVEL, "{what}: off by {off}: {got:?}, want {want:?}");
        let (count, worst) = seen.entry((kind.to_owned(), reference.to_owned())).or_insert((0, 0.0f64));
        (*count, *worst) = (*count + 1, worst.max(off));
    }
    for ((name, reference), (count, worst)) in &seen {
        println!("{name:14} {count:3} lists within {worst:.0e} of {reference}");
    }
    let names: std::collections::BTreeSet<_> = seen.keys().map(|(name, _)| name.as_str()).collect();
    let missing: Vec<&str> = SchedulerKind::names().filter(|n| *n != "normal" && !names.contains(n)).collect();
    assert!(missing.is_empty(), "no reference for {missing:?}");
}
