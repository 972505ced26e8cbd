//! Ctrl-C or SIGTERM asks the running request to stop; a second one ends the program at once.

use anyhow::{Context, Result};
use sd_runtime::CancelToken;
use std::io;
use tracing::warn;

/// A token that Ctrl-C and SIGTERM cancel.
pub(crate) fn token() -> Result<CancelToken> {
    let token = CancelToken::new();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.context("listen for Ctrl-C")?;
    let listener = token.clone();
    std::thread::spawn(move || runtime.block_on(wait(&listener)));
    Ok(token)
}

async fn wait(token: &CancelToken) {
    if let Err(e) = signal().await {
        warn!("Ctrl-C ends the program without cleaning up: {e}");
        return;
    }
    warn!("stopping; press Ctrl-C again to end at once");
    token.cancel();
    if signal().await.is_ok() {
        std::process::exit(1);
    }
}

/// The next request to stop.
async fn signal() -> io::Result<()> {
    #[cfg(unix)]
    {
        let mut terminated = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
        tokio::select! {
            pressed = tokio::signal::ctrl_c() => pressed,
            _ = terminated.recv() => Ok(()),
        }
    }
    #[cfg(not(unix))]
    tokio::signal::ctrl_c().await
}
