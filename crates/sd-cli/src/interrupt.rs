//! Ctrl-C asks the running request to stop; a second one ends the program at once.

use anyhow::{Context, Result};
use sd_runtime::CancelToken;
use tracing::warn;

/// A token that Ctrl-C cancels.
pub(crate) fn token() -> Result<CancelToken> {
    let token = CancelToken::new();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.context("listen for Ctrl-C")?;
    let listener = token.clone();
    std::thread::spawn(move || runtime.block_on(wait(&listener)));
    Ok(token)
}

async fn wait(token: &CancelToken) {
    if let Err(e) = tokio::signal::ctrl_c().await {
        warn!("Ctrl-C ends the program without cleaning up: {e}");
        return;
    }
    warn!("stopping; press Ctrl-C again to end at once");
    token.cancel();
    if tokio::signal::ctrl_c().await.is_ok() {
        std::process::exit(1);
    }
}
