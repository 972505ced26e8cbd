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

use anyhow::{Context, Result, bail};
use args::{Args, Mode};
use console::Console;
use sd_runtime::Device;
use std::io::{self, Write};
use std::process::ExitCode;
use tracing::{debug, error};

fn main() -> ExitCode {
    let args = match Args::read(std::env::args_os()) {
        Ok(args) => args,
        // Help and version are errors to clap; both go to stdout.
        Err(e) => {
            let printed = e.print();
            return if e.use_stderr() || printed.is_err() { ExitCode::FAILURE } else { ExitCode::SUCCESS };
        }
    };
    let console = Console::default();
    console.log(args.cli.log_level, args.cli.color);
    debug!("sd-rs {}", env!("CARGO_PKG_VERSION"));
    debug!("{args:?}");
    match run(&args, &console) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            error!("{e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args, console: &Console) -> Result<()> {
    args.model.add_servers()?;
    if args.context.list_devices {
        let mut stdout = io::stdout().lock();
        for device in Device::all() {
            writeln!(stdout, "{}\t{}", device.name(), device.description()).context("--list-devices")?;
        }
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
