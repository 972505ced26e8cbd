//! `sd-server`: the HTTP front end. So far it answers `GET /health`.
#![forbid(unsafe_code)]

use anyhow::{Context, Result};
use axum::http::StatusCode;
use axum::routing::get;
use axum::{Json, Router};
use clap::{ArgAction, Parser};
use serde_json::{Value, json};
use std::net::IpAddr;
use std::process::ExitCode;
use tracing::{error, info};

/// Answers over HTTP.
#[derive(Debug, Parser)]
#[command(
    name = "sd-rs",
    bin_name = "sd-server",
    version = concat!("version ", env!("CARGO_PKG_VERSION")),
    disable_version_flag = true,
    args_override_self = true,
    max_term_width = 120
)]
struct Args {
    /// Address to listen on
    #[arg(short, long, value_name = "string", default_value = "127.0.0.1")]
    listen_ip: IpAddr,
    /// Port to listen on; 0 lets the system choose one
    #[arg(long, value_name = "int", default_value_t = 1234)]
    listen_port: u16,
    /// Print the version
    #[arg(long, action = ArgAction::Version)]
    version: Option<bool>,
}

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
        // Where stderr cannot be written, a complaint about that on stderr would end the program.
        .log_internal_errors(false)
        .without_time()
        .with_target(false)
        .with_ansi(false)
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

/// Serves until a signal asks to stop, then finishes the requests that have begun.
async fn serve(args: &Args) -> Result<()> {
    let address = (args.listen_ip, args.listen_port);
    let listener = tokio::net::TcpListener::bind(address).await;
    let listener = listener.with_context(|| format!("listen on {}:{}", args.listen_ip, args.listen_port))?;
    let stop = stop_signal()?;
    info!("listening on: http://{}", listener.local_addr().context("listen")?);
    axum::serve(listener, routes()).with_graceful_shutdown(stop).await.context("serve")?;
    info!("stopped");
    Ok(())
}

fn routes() -> Router {
    Router::new().route("/health", get(health)).fallback(not_found).method_not_allowed_fallback(not_found)
}

async fn health() -> Json<Value> {
    Json(json!({"status": "ok"}))
}

async fn not_found() -> (StatusCode, Json<Value>) {
    (StatusCode::NOT_FOUND, Json(json!({"error": "not found"})))
}

/// Ctrl-C, or on Unix the signal with which a service manager ends a program. Both are caught from the call on, not
/// only once the result is awaited.
#[cfg(unix)]
fn stop_signal() -> Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut interrupt = signal(SignalKind::interrupt()).context("wait for Ctrl-C")?;
    let mut terminate = signal(SignalKind::terminate()).context("wait for SIGTERM")?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    })
}

/// Ctrl-C.
#[cfg(not(unix))]
fn stop_signal() -> Result<impl Future<Output = ()>> {
    Ok(async {
        if let Err(e) = tokio::signal::ctrl_c().await {
            error!("cannot wait for Ctrl-C: {e}");
            std::future::pending::<()>().await;
        }
    })
}
