//! `sd-cli`: parses the command line, asks the engine, writes files.
#![forbid(unsafe_code)]

mod args;
mod console;
mod convert;
mod generate;
mod interrupt;
mod later;
mod metadata;
mod model_info;
mod request;
mod upscale;
mod worker;

use anyhow::{Context, Result, bail};
use args::{Args, Mode};
use clap::Parser;
use console::Console;
use std::io::{self, Write};
use std::process::ExitCode;
use tracing::{debug, error};
use worker::Worker;

fn main() -> ExitCode {
    let console = Console::default();
    let mut argv = std::env::args_os();
    let result = if argv.nth(1).is_some_and(|word| word == worker::NAME) {
        Worker::try_parse_from(std::env::args_os().skip(1)).map(|worker| worker.run(&console))
    } else {
        Args::read(std::env::args_os()).map(|args| draw(&args, &console))
    };
    match result {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(e)) => {
            error!("{e:#}");
            ExitCode::FAILURE
        }
        // Help and version are errors to clap; both go to stdout.
        Err(e) => {
            let printed = e.print();
            if e.use_stderr() || printed.is_err() { ExitCode::FAILURE } else { ExitCode::SUCCESS }
        }
    }
}

/// Starts to log, and does what `args` say.
fn draw(args: &Args, console: &Console) -> Result<()> {
    console.log(args.cli.log_level, args.cli.color);
    debug!("sd-rs {}", env!("CARGO_PKG_VERSION"));
    debug!("{args:?}");
    run(args, console)
}

fn run(args: &Args, console: &Console) -> Result<()> {
    if let Some(shell) = args.cli.completions {
        return io::stdout().lock().write_all(&Args::completions(shell)).context("--completions");
    }
    args.model.add_servers()?;
    if args.context.list_devices {
        let list = sd_options::list_devices();
        io::stdout().lock().write_all(list.as_bytes()).context("--list-devices")?;
        return Ok(());
    }
    if let Some(file) = &args.cli.model_info {
        return model_info::run(args, file.as_deref());
    }
    match args.cli.mode {
        Mode::ImgGen if !args.context.tensor_type_rules.is_empty() => {
            bail!("--tensor-type-rules is supported with -M convert only")
        }
        Mode::ImgGen if !args.cli.imat_in.is_empty() && args.cli.imat_out.is_none() => {
            bail!("--imat-in says nothing without --imat-out or -M convert")
        }
        Mode::ImgGen => generate::run(args, console, &interrupt::token()?),
        Mode::Upscale => upscale::run(args, console, &interrupt::token()?),
        Mode::Metadata => metadata::run(&args.metadata),
        Mode::Convert => convert::run(args, console, &interrupt::token()?),
    }
}
