//! `cargo xtask <command>`.
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout)] // these commands talk to the terminal

use anyhow::{Result, bail};
use clap::{Parser, Subcommand};
use std::path::{Path, PathBuf};
use xtask::{oracle, repo_root, synth, tidy};

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
}

fn main() -> Result<()> {
    match Args::parse().command {
        Task::Tidy => check_tidiness(),
        Task::Synth { model, output, seed } => synthesize(&model, output.as_deref(), seed),
        Task::Oracle { python: Some(python), scripts } => oracle::run(&repo_root(), &python, &scripts),
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
