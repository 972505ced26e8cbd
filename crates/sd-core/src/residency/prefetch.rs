//! A thread that loads weights while the device computes.

use std::sync::mpsc::{Receiver, Sender, channel};

use super::load::{Load, Loaded, NotLoaded};
use crate::error::{Error, Result};

/// What came of loads: everything up to the first that failed, and that failure.
pub(crate) type Outcome = (Vec<Loaded>, Option<NotLoaded>);

/// The thread; it ends when this is dropped and what it was given is done.
pub(crate) struct Loader {
    jobs: Sender<(Vec<Load>, Sender<Outcome>)>,
}

/// Loads that the thread was given.
pub(crate) struct Pending(Receiver<Outcome>);

impl Loader {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system gives none.
    pub(crate) fn start() -> Result<Loader> {
        let (jobs, given) = channel::<(Vec<Load>, Sender<Outcome>)>();
        let work = move || {
            while let Ok((loads, answer)) = given.recv() {
                let mut done = Vec::new();
                let mut failed = None;
                for load in loads {
                    match load.run() {
                        Ok(loaded) => done.push(loaded),
                        Err(e) => {
                            failed = Some(e);
                            break;
                        }
                    }
                }
                // Nobody waits any more if the run panicked.
                let _ = answer.send((done, failed));
            }
        };
        let spawned = std::thread::Builder::new().name("load weights".into()).spawn(work);
        spawned.map_err(|e| Error::device(format!("no thread to load weights: {e}")))?;
        Ok(Loader { jobs })
    }

    /// Begins `loads`, one after the other.
    pub(crate) fn begin(&self, loads: Vec<Load>) -> Option<Pending> {
        let (answer, wait) = channel();
        self.jobs.send((loads, answer)).ok()?;
        Some(Pending(wait))
    }
}

impl Pending {
    /// Waits for what came of them; nothing if the thread ended in a panic.
    pub(crate) fn wait(self) -> Outcome {
        self.0.recv().unwrap_or_default()
    }
}
