//! `cargo xtask <command>`.
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout)] // these commands talk to the terminal

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand};
use sd_core::{DType, Precision};
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;
use xtask::{accept, bench, dist, files, larger, memory, networks, oracle, plot, repo_root, synth, tidy};

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
        #[arg(value_parser = clap::builder::PossibleValuesParser::new(synth::models()))]
        model: String,
        /// The file to write, GGUF if it ends in .gguf, else safetensors; without it names and shapes are printed.
        #[arg(short, long)]
        output: Option<PathBuf>,
        /// Type of the matrices, such as f16, q8_0 or q4_K; the rest is f16.
        #[arg(long = "type", default_value = "f16", value_parser = dtype)]
        dtype: DType,
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
    /// Check real files that lie beside the repository, where they do, what opening and converting a checkpoint of real size
    /// takes, and what `memory` does.
    Accept,
    /// Draw with SD 1.5 on a worker with little memory and measure what it takes; writes 2 GB below target/.
    Memory {
        /// Instead, take a step with a FLUX.1 that is larger than memory, 34 GB in a file of holes, on the processor.
        #[arg(long)]
        large: bool,
    },
    /// Draw what a trace of sd-cli's --trace shows: memory over time, computations and movements.
    Plot {
        /// The trace.
        trace: PathBuf,
        /// The SVG to write.
        #[arg(short, long)]
        output: PathBuf,
    },
    /// Serve the processor at host:port for `memory`.
    #[command(hide = true)]
    Serve {
        /// Where to listen.
        endpoint: String,
    },
    /// Build an archive of the programs that runs on any machine of this architecture, below target/dist.
    Dist {
        /// Draw with each of its libraries that this machine runs, and at each level of the kernels.
        #[arg(long)]
        check: bool,
    },
    /// Time the networks of a checkpoint; build with --release for numbers that mean something.
    Bench {
        /// The checkpoint; without it a random one of SD 1.5's size is made under target/.
        #[arg(short, long)]
        model: Option<PathBuf>,
        /// Side of the picture in pixels.
        #[arg(long, default_value_t = 512)]
        size: usize,
        /// Timed runs.
        #[arg(long, default_value_t = 5)]
        runs: usize,
        /// Other programs to time on the same SD 1.x checkpoint: torch, openvino, or both with a comma between.
        #[arg(long, requires = "python")]
        peers: Option<String>,
        /// A Python interpreter that has them and diffusers.
        #[arg(long)]
        python: Option<PathBuf>,
        /// A Markdown file to append the report to, such as docs/performance.md.
        #[arg(short, long)]
        output: Option<PathBuf>,
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
    #[arg(long = "type", value_parser = dtype)]
    weight_type: Option<DType>,
    /// Factors of products on the processor: auto, f32 or bf16.
    #[arg(long, default_value = "auto")]
    precision: Precision,
}

fn dtype(name: &str) -> Result<DType, &'static str> {
    DType::parse(name).ok_or("no such type")
}

impl SetupArgs {
    fn setup(self) -> networks::Setup {
        let SetupArgs { device, threads, weight_type, precision } = self;
        networks::Setup { device, threads, weight_type, precision }
    }
}

fn main() -> Result<()> {
    match Args::parse().command {
        Task::Tidy => check_tidiness(),
        Task::Synth { model, output, dtype, seed } => synthesize(&model, output.as_deref(), dtype, seed),
        Task::Oracle { python: Some(python), scripts } => oracle::run(&repo_root(), &python, &scripts),
        Task::Accept => {
            // First, as memory that others gave back would hide what opening takes.
            print_lines(&files::run(&random_sd15(&repo_root())?)?)?;
            print_lines(&accept::run(&repo_root())?)?;
            print_lines(&memory::run(&random_sd15(&repo_root())?)?)
        }
        Task::Memory { large: true } => print_lines(&larger::run(&holes(&repo_root())?)?),
        Task::Memory { large: false } => print_lines(&memory::run(&random_sd15(&repo_root())?)?),
        Task::Plot { trace, output } => {
            let text = std::fs::read_to_string(&trace).with_context(|| format!("read {}", trace.display()))?;
            let svg = plot::svg(&text).with_context(|| trace.display().to_string())?;
            std::fs::write(&output, svg).with_context(|| format!("write {}", output.display()))
        }
        Task::Dist { check } => {
            let (folder, archive) = dist::make(&repo_root())?;
            println!("{}", archive.display());
            if check { print_lines(&dist::check(&folder)?) } else { Ok(()) }
        }
        Task::Serve { endpoint } => memory::serve(&endpoint),
        Task::Bench { model, size, runs, peers, python, output, setup } => {
            let model = model.map_or_else(|| random_sd15(&repo_root()), Ok)?;
            let peers = python.map(|python| bench::Peers { python, names: peers.unwrap_or("torch".to_owned()) });
            let report = bench::run(&bench::Plan { model, side: size, runs, peers }, &setup.setup())?;
            println!("{report}");
            output.map_or(Ok(()), |path| append(&path, &report))
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

fn synthesize(model: &str, output: Option<&Path>, dtype: DType, seed: u64) -> Result<()> {
    let specs = synth::tensors(model)?;
    let Some(path) = output else {
        specs.iter().for_each(|spec| println!("{} {:?}", spec.name, spec.shape));
        return Ok(());
    };
    let start = Instant::now();
    let bytes = synth::write(path, &specs, dtype, seed)?;
    let (mb, seconds) = (bytes as f64 / 1e6, start.elapsed().as_secs_f64());
    println!("{}: {} tensors, {mb:.0} MB in {seconds:.1} s, {:.0} MB/s", path.display(), specs.len(), mb / seconds);
    Ok(())
}

fn print_lines(lines: &[String]) -> Result<()> {
    lines.iter().for_each(|line| println!("{line}"));
    Ok(())
}

fn append(path: &Path, report: &str) -> Result<()> {
    let mut file = OpenOptions::new().create(true).append(true).open(path)?;
    writeln!(file, "\n{report}").with_context(|| format!("write {}", path.display()))
}

/// A FLUX.1 with its text encoders and autoencoder of which only the small tensors are on the disk.
fn holes(root: &Path) -> Result<PathBuf> {
    let path = root.join("target/xtask/flux-holes.safetensors");
    std::fs::create_dir_all(root.join("target/xtask"))?;
    synth::write_sparse(&path, &synth::tensors("flux_all_in_one")?, 0)?;
    Ok(path)
}

/// The random checkpoint of the benches, made when it is not there.
fn random_sd15(root: &Path) -> Result<PathBuf> {
    let path = root.join("target/xtask/sd15.safetensors");
    if !path.is_file() {
        synth::write(&path, &synth::tensors("sd15")?, DType::F16, 0)?;
    }
    Ok(path)
}
