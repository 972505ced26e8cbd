//! `sd-server`: the HTTP front end. One model, one worker, and a queue before it.
#![forbid(unsafe_code)]

mod app;
mod args;
mod control;
mod failure;
mod fields;
mod larger;
mod limits;
mod named;
mod native;
mod openai;
mod page;
mod queue;
mod stop;
mod webui;

use anyhow::{Context, Result};
use app::App;
use args::Args;
use clap::Parser;
use native::Jobs;
use queue::Queue;
use std::process::ExitCode;
use std::sync::Arc;
use tracing::{debug, error, info};

#[tokio::main]
async fn main() -> ExitCode {
    let args = match Args::try_parse() {
        Ok(args) => args,
        // Help and version are errors to clap; both go to stdout.
        Err(e) => {
            let printed = e.print();
            return if e.use_stderr() || printed.is_err() { ExitCode::FAILURE } else { ExitCode::SUCCESS };
        }
    };
    tracing_subscriber::fmt()
        .with_max_level(args.level())
        // Where stderr cannot be written, a complaint about that on stderr would end the program.
        .log_internal_errors(false)
        .without_time()
        .with_target(false)
        .with_ansi(args.color)
        .with_writer(std::io::stderr)
        .init();
    match serve(&args).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            error!("{e:#}");
            ExitCode::FAILURE
        }
    }
}

/// Opens the model and serves until a signal asks to stop.
async fn serve(args: &Args) -> Result<()> {
    if let Some(path) = &args.serve_html_path {
        std::fs::metadata(path).with_context(|| format!("--serve-html-path {}", path.display()))?;
    }
    let address = (args.listen_ip, args.listen_port);
    let listener = tokio::net::TcpListener::bind(address).await;
    let listener = listener.with_context(|| format!("listen on {}:{}", args.listen_ip, args.listen_port))?;
    let mut engine = args.open()?;
    let model = engine.info().clone();
    info!("{} model {} on {}", model.family, model.name, model.device);
    for unused in &model.unused {
        debug!("not used: {unused}");
    }
    let queue = Arc::new(Queue::default());
    let work = queue.clone();
    let worker = std::thread::Builder::new().name("worker".into()).spawn(move || work.work(&mut engine));
    let worker = worker.context("start the worker")?;
    let app = App {
        queue: queue.clone(),
        jobs: Jobs::default(),
        model,
        defaults: args.defaults()?,
        page: args.serve_html_path.clone(),
        loras: args.lora_model_dir.clone(),
        control_nets: args.control_net_dir.clone(),
        reading: Arc::default(),
    };
    let signal = stop::signal()?;
    info!("listening on: http://{}", listener.local_addr().context("listen")?);
    stop::serve_until(signal, listener, app::routes(Arc::new(app)), &queue, worker).await
}
