//! Stopping in good order, and in time.

use crate::queue::Queue;
use anyhow::{Context, Result};
use axum::Router;
use std::future::IntoFuture;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

/// How long the running request may go on.
const GRACE: Duration = Duration::from_secs(4);
/// How long answers may take to be sent, and half-sent requests may keep their connections.
const SEND: Duration = Duration::from_secs(1);
/// How long an interrupted request may take to end: the longest operation of a network.
const END: Duration = Duration::from_secs(10);

/// Serves until `signal`, then takes no more requests, gives the running one a few seconds and interrupts it. A second
/// signal ends the program at once.
pub(crate) async fn serve_until(
    mut signal: impl Signal,
    listener: TcpListener,
    routes: Router,
    queue: &Arc<Queue>,
    worker: JoinHandle<()>,
) -> Result<()> {
    let (stop, mut stopped) = watch::channel(false);
    let closing = queue.clone();
    tokio::spawn(async move {
        signal.next().await;
        closing.close();
        // Fails when the server has ended by itself.
        let _ = stop.send(true);
        signal.next().await;
        warn!("ended by a second signal");
        std::process::exit(1);
    });
    let mut told = stopped.clone();
    let server = axum::serve(listener, routes).with_graceful_shutdown(async move {
        let _ = told.wait_for(|stop| *stop).await;
    });
    let mut server = std::pin::pin!(server.into_future());
    let ended = tokio::select! {
        ended = &mut server => Some(ended),
        () = async {
            // Fails when nobody can ask to stop any more, which is a reason to stop.
            let _ = stopped.wait_for(|stop| *stop).await;
            // Time is up when the running request has ended, or has had its time.
            let _ = timeout(GRACE, idle(queue)).await;
            queue.interrupt();
            let _ = timeout(END, idle(queue)).await;
            sleep(SEND).await;
        } => None,
    };
    if let Some(ended) = ended {
        ended.context("serve")?;
    }
    queue.close();
    queue.interrupt();
    // ggml must not compute while the process takes its memory down.
    let ended = timeout(END, async {
        while !worker.is_finished() {
            sleep(Duration::from_millis(5)).await;
        }
    });
    if ended.await.is_err() {
        warn!("the running request does not end");
    }
    info!("stopped");
    Ok(())
}

/// Waits until no request runs.
async fn idle(queue: &Queue) {
    while queue.progress().0.is_some() {
        sleep(Duration::from_millis(5)).await;
    }
}

/// Asks to stop, perhaps more than once.
pub(crate) trait Signal: Send + 'static {
    /// Waits for the next time.
    fn next(&mut self) -> impl Future<Output = ()> + Send;
}

/// Ctrl-C, or the signal with which a service manager ends a program. Both are caught from the call on, not only once
/// they are awaited.
#[cfg(unix)]
pub(crate) fn signal() -> Result<impl Signal> {
    use tokio::signal::unix::{Signal as Unix, SignalKind, signal};

    struct Either(Unix, Unix);

    impl Signal for Either {
        async fn next(&mut self) {
            tokio::select! {
                _ = self.0.recv() => {}
                _ = self.1.recv() => {}
            }
        }
    }

    let interrupt = signal(SignalKind::interrupt()).context("wait for Ctrl-C")?;
    let terminate = signal(SignalKind::terminate()).context("wait for SIGTERM")?;
    Ok(Either(interrupt, terminate))
}

/// Ctrl-C.
#[cfg(not(unix))]
pub(crate) fn signal() -> Result<impl Signal> {
    struct CtrlC;

    impl Signal for CtrlC {
        async fn next(&mut self) {
            if let Err(e) = tokio::signal::ctrl_c().await {
                tracing::error!("cannot wait for Ctrl-C: {e}");
                std::future::pending::<()>().await;
            }
        }
    }

    Ok(CtrlC)
}
