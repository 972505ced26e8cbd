//! Times the networks of a checkpoint beside the machine's ceilings and other programs.

mod ceilings;
mod kernels;
mod work;

pub use ceilings::Ceilings;
pub use work::Work;

use crate::networks::{self, Setup};
use anyhow::{Context, Result, bail, ensure};
use sd_core::graph::Op;
use sd_core::{Computed, DType, Device, Precision, Program, Runner, Tensor, observe, processor_seconds};
use sd_models::{Evaluation, Model, Part};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;

/// What to time.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The checkpoint.
    pub model: PathBuf,
    /// Side of the picture in pixels.
    pub side: usize,
    /// Timed runs of each network; the median counts. One more goes before, which loads weights.
    pub runs: usize,
    /// Other programs to time on the same checkpoint.
    pub peers: Option<Peers>,
}

/// Programs that `oracle/bench_peers.py` knows.
#[derive(Debug, Clone)]
pub struct Peers {
    /// A Python interpreter that has them.
    pub python: PathBuf,
    /// Their names, with commas between.
    pub names: String,
}

/// One network's figures.
#[derive(Debug, Clone, PartialEq)]
struct Row {
    what: &'static str,
    work: Work,
    /// Of all processors together.
    seconds: f64,
    /// What the last run computed.
    computed: Vec<Computed>,
    /// Bytes of intermediate values.
    workspace: usize,
}

/// Times text encoders (two windows), one evaluation of the diffusion network with guidance (a batch of two) and a
/// decoding, and returns a report in Markdown.
///
/// # Errors
/// The build is not optimised, the checkpoint cannot be run, or the peer fails.
pub fn run(plan: &Plan, setup: &Setup) -> Result<String> {
    ensure!(plan.runs > 0, "at least one run is needed");
    ensure!(!cfg!(debug_assertions), "times of an unoptimised build mean nothing; run with --release");
    let ceilings = Ceilings::measure();
    let model = networks::open(&plan.model)?;
    let info = model.info();
    let size = [plan.side / info.latent.compression; 2];
    let e = Evaluation { batch: 2, size, tokens: info.tokens, ..Evaluation::default() };
    let mut rows = Vec::new();
    for component in model.components() {
        let (what, program) = match component.part() {
            Part::Diffusion => ("step with guidance", model.diffusion_program(&e)?),
            Part::Autoencoder => ("decode", model.decode_program(1, size[0], size[1], [false; 2])?),
            part => (part.name(), model.text_program(part, 2, info.defaults.clip_skip)?),
        };
        let tables = if component.part() == Part::Diffusion { model.tables(&e)? } else { Vec::new() };
        let mut runner = setup.runner(component)?;
        let workspace = runner.measure(&program)?.iter().map(|s| s.workspace).max().unwrap_or(0);
        let (seconds, computed) = median(&mut runner, &program, &tables, plan.runs)?;
        rows.push(Row { what, work: Work::of(&program), seconds, computed, workspace });
    }
    let peers = plan.peers.as_ref().map(|peers| times(peers, plan, setup)).transpose()?;
    report(&model, plan, setup, &ceilings, &rows, peers.as_ref())
}

/// Runs a program on smooth patterns for what it reads: seconds, and the computations of the last run.
fn median(
    runner: &mut Runner,
    program: &Program,
    tables: &[(&str, Tensor)],
    runs: usize,
) -> Result<(f64, Vec<Computed>)> {
    let mut inputs: Vec<(String, Tensor)> = Vec::new();
    for (_, node) in program.iter() {
        let Op::Input(name) = &node.op else { continue };
        let table = tables.iter().find(|(table, _)| **table == **name).map(|(_, tensor)| tensor.clone());
        let made = match table {
            Some(table) => table,
            None => pattern(name, node.shape.dims(), node.dtype)?,
        };
        inputs.push((name.to_string(), made));
    }
    let inputs: Vec<(&str, &Tensor)> = inputs.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    networks::run(runner, program, &inputs)?;
    let (mut times, mut computed) = (Vec::new(), Vec::new());
    for _ in 0..runs {
        let start = processor_seconds();
        let (done, seen) = observe(|| networks::run(runner, program, &inputs));
        done?;
        times.push(processor_seconds() - start);
        computed = seen;
    }
    times.sort_by(f64::total_cmp);
    let seconds = times.get(times.len() / 2).copied().context("at least one run is needed")?;
    Ok((seconds, computed))
}

fn pattern(name: &str, dims: &[usize], dtype: DType) -> Result<Tensor> {
    let count = dims.iter().product::<usize>();
    Ok(match (dtype, name) {
        (DType::I32, _) => Tensor::i32(dims, vec![320; count])?,
        (_, "timesteps") => Tensor::f32(dims, vec![500.0; count])?,
        _ => Tensor::f32(dims, (0..count).map(|i| (i as f32 * 0.37).sin()).collect())?,
    })
}

/// Seconds of other programs, by program and type, and by network.
fn times(peers: &Peers, plan: &Plan, setup: &Setup) -> Result<BTreeMap<String, Value>> {
    let script = crate::repo_root().join("oracle/bench_peers.py");
    let threads = setup.threads.max(1);
    let out = Command::new(&peers.python)
        .arg(&script)
        .arg(&plan.model)
        .args([
            "--peers",
            &peers.names,
            "--size",
            &plan.side.to_string(),
            "--runs",
            &plan.runs.to_string(),
            "--threads",
            &threads.to_string(),
        ])
        .output()
        .with_context(|| format!("run {}", peers.python.display()))?;
    if !out.status.success() {
        bail!("{}: {}", script.display(), String::from_utf8_lossy(&out.stderr));
    }
    let text = String::from_utf8_lossy(&out.stdout);
    serde_json::from_str(text.lines().last().unwrap_or_default()).context("read what bench_peers.py printed")
}

fn report(
    model: &Model,
    plan: &Plan,
    setup: &Setup,
    ceilings: &Ceilings,
    rows: &[Row],
    peers: Option<&BTreeMap<String, Value>>,
) -> Result<String> {
    let device = Device::find(&setup.device)?;
    let types = setup.weight_type.map_or("stored".to_owned(), |t| t.to_string());
    let (name, side, runs) = (model.info().family.name(), plan.side, plan.runs);
    let mut out = format!(
        "{name}, {side}x{side}, weights {types}, products {:?}, on {} ({}), {} threads, median of {runs}, seconds of processor.\n\
         Ceilings of a thread: {:.0} GFLOP/s in f32, {:.0} in bf16, {:.0} in int8, {:.1} GB/s read from memory. Peak memory {} MB.\n\n",
        setup.precision,
        device.name(),
        processor().unwrap_or_else(|| device.description().to_owned()),
        setup.threads,
        ceilings.f32,
        ceilings.bf16,
        ceilings.int8,
        ceilings.read,
        peak_memory().unwrap_or(0) / 1000
    );
    let columns: Vec<&str> = peers.iter().flat_map(|t| t.keys().map(String::as_str)).collect();
    let head: String = columns.iter().map(|c| format!(" {c}, s | ratio |")).collect();
    out += &format!("| network | GFLOP | products, convolutions, attention | s | GFLOP/s | of ceiling |{head}\n");
    out += &format!("|---|---|---|---|---|---|{}\n", "---|---|".repeat(columns.len()));
    let most = ceilings.products(setup.precision != Precision::F32);
    for Row { what, work, seconds, .. } in rows {
        let total = work.total();
        let share = |part: f64| 100.0 * part / total.max(1.0);
        let speed = total / seconds / 1e9;
        out += &format!(
            "| {what} | {:.0} | {:.0} %, {:.0} %, {:.0} % | {seconds:.3} | {speed:.0} | {:.0} % |",
            total / 1e9,
            share(work.products),
            share(work.convolutions),
            share(work.attention),
            100.0 * speed / most
        );
        for column in &columns {
            let other = peers.and_then(|t| t.get(*column)?.get(*what)?.as_f64());
            out += &other.map_or(" | |".to_owned(), |other| format!(" {other:.3} | {:.2} |", seconds / other));
        }
        out.push('\n');
    }
    for row in rows {
        out += &kernels::table(row, most, ceilings.read);
    }
    Ok(out)
}

fn processor() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// The most memory this process has had, in kB.
fn peak_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().trim_end_matches(" kB").parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_have_the_type_that_is_read() {
        assert_eq!(pattern("ids", &[2, 3], DType::I32).unwrap(), Tensor::i32(&[2, 3], vec![320; 6]).unwrap());
        assert_eq!(pattern("timesteps", &[2], DType::F32).unwrap().values(), [500.0, 500.0]);
        assert_eq!(pattern("x", &[2], DType::F32).unwrap().values(), [0.0, 0.37f32.sin()]);
    }
}
