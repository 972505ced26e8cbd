//! `cargo xtask <command>`.
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout)] // these commands talk to the terminal

use anyhow::{Result, bail};
use clap::{Parser, Subcommand};
use sd_core::DType;
use std::path::{Path, PathBuf};
use xtask::{accept, networks, oracle, repo_root, synth, tidy};

/// Developer commands of sd-rs.
#[derive(Parser)]
#[command(bin_name = "cargo xtask")]
struct Args {
    #[command(subcommand)]
    command: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Check the rules the compiler does not: crate edges, dependencies, licences, unsafe islands, prints, file sizes.
    Tidy,
    /// Write a random checkpoint with the names and shapes of a real one.
    Synth {
        /// Which model.
        #[arg(value_parser = clap::builder::PossibleValuesParser::new(synth::MODELS))]
        model: String,
        /// The safetensors file to write; without it names and shapes are printed.
        #[arg(short, long)]
        output: Option<PathBuf>,
        /// The same seed gives the same file.
        #[arg(long, default_value_t = 0)]
        seed: u64,
    },
    /// Make the oracle fixtures again; without --python say how.
    Oracle {
        /// A Python interpreter with the packages of oracle/requirements.txt.
        #[arg(long)]
        python: Option<PathBuf>,
        /// Scripts of oracle/ to run instead of all.
        scripts: Vec<String>,
    },
    /// Check real files that lie beside the repository, where they do.
    Accept,
    /// Time the networks of a checkpoint; build with --release for numbers that mean something.
    Bench {
        /// The checkpoint; without it a random one of SD 1.5's size is made under target/.
        #[arg(short, long)]
        model: Option<PathBuf>,
        /// Side of the picture in pixels.
        #[arg(long, default_value_t = 512)]
        size: usize,
        /// Timed runs.
        #[arg(long, default_value_t = 3)]
        runs: usize,
        #[command(flatten)]
        setup: SetupArgs,
    },
    /// Compare the networks of a checkpoint with what oracle/fullsize_sd15.py computed from it.
    Compare {
        /// The checkpoint.
        #[arg(short, long)]
        model: PathBuf,
        /// The file the script wrote.
        #[arg(long)]
        reference: PathBuf,
        #[command(flatten)]
        setup: SetupArgs,
    },
}

#[derive(clap::Args)]
struct SetupArgs {
    /// Device by name; default: the first GPU, else the processor.
    #[arg(long, default_value = "")]
    device: String,
    /// CPU threads; 0 for one per core.
    #[arg(short, long, default_value_t = 0)]
    threads: usize,
    /// Type of the weights in memory; default: as stored.
    #[arg(long = "type", value_parser = |name: &str| DType::parse(name).ok_or("no such type"))]
    weight_type: Option<DType>,
}

impl SetupArgs {
    fn setup(self) -> networks::Setup {
        networks::Setup { device: self.device, threads: self.threads, weight_type: self.weight_type }
    }
}

fn main() -> Result<()> {
    match Args::parse().command {
        Task::Tidy => check_tidiness(),
        Task::Synth { model, output, seed } => synthesize(&model, output.as_deref(), seed),
        Task::Oracle { python: Some(python), scripts } => oracle::run(&repo_root(), &python, &scripts),
        Task::Accept => print_lines(&accept::run(&repo_root())?),
        Task::Bench { model, size, runs, setup } => {
            let model = model.map_or_else(|| random_sd15(&repo_root()), Ok)?;
            print_lines(&[networks::bench(&model, &setup.setup(), size, runs)?])
        }
        Task::Compare { model, reference, setup } => {
            print_lines(&networks::compare(&model, &reference, &setup.setup())?)
        }
        Task::Oracle { python: None, .. } => {
            println!("{}", oracle::INSTRUCTIONS);
            Ok(())
        }
    }
}

fn check_tidiness() -> Result<()> {
    let found = tidy::run(&repo_root())?;
    for finding in &found {
        println!("{finding}");
    }
    match found.len() {
        0 => Ok(()),
        n => bail!("{n} findings"),
    }
}

fn synthesize(model: &str, output: Option<&Path>, seed: u64) -> Result<()> {
    let specs = synth::tensors(model)?;
    match output {
        Some(path) => synth::write(path, &specs, seed),
        None => {
            for spec in &specs {
                println!("{} {:?}", spec.name, spec.shape);
            }
            Ok(())
        }
    }
}

fn print_lines(lines: &[String]) -> Result<()> {
    lines.iter().for_each(|line| println!("{line}"));
    Ok(())
}

/// The random checkpoint of the benches, made when it is not there.
fn random_sd15(root: &Path) -> Result<PathBuf> {
    let path = root.join("target/xtask/sd15.safetensors");
    if !path.is_file() {
        synth::write(&path, &synth::tensors("sd15")?, 0)?;
    }
    Ok(path)
}
