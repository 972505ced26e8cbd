//! `cargo xtask <command>`.
#![forbid(unsafe_code)]

use anyhow::{Result, bail};
use clap::{Parser, Subcommand};

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
        /// Which model: sd15.
        #[arg(value_parser = ["sd15"])]
        model: String,
        /// Print names and shapes and write nothing.
        #[arg(long)]
        list: bool,
    },
}

fn main() -> Result<()> {
    match Args::parse().command {
        Task::Tidy => tidy(),
        Task::Synth { list, .. } => {
            for spec in xtask::synth::sd15::tensors() {
                if list {
                    println!("{} {:?}", spec.name, spec.shape);
                }
            }
            Ok(())
        }
    }
}

fn tidy() -> Result<()> {
    let found = xtask::tidy::run(&xtask::repo_root())?;
    for finding in &found {
        println!("{finding}");
    }
    match found.len() {
        0 => Ok(()),
        n => bail!("{n} findings"),
    }
}
