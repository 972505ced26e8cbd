//! Adapters: changes of weights that come with a request, such as LoRA.
//!
//! An [`Adapter`] says which tensors of a file change which weights of one network, and how. An [`Adapted`] applies
//! adapters, each with a strength, to a network: it is the source of the weights and rewrites its programs. Every
//! tensor it adds has a name of its own, so nothing that was loaded or lowered for other adapters is ever read.
//!
//! ```text
//! let adapted = Arc::new(Adapted::new(base, list, mode, types)?);
//! runner.set_adapters(adapted); // every program that it runs from now on has them
//! ```

mod adapted;
mod change;
mod rewrite;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::tensor::WeightSource;

pub use adapted::{Adapted, Mode};
pub use change::{Change, Factor, Kind, Magnitude, Rows};

/// The changes that a file makes to the weights of one network.
pub struct Adapter {
    /// Differs between all adapters of a process.
    serial: u64,
    source: Arc<dyn WeightSource>,
    changes: BTreeMap<String, Vec<Change>>,
}

impl Adapter {
    /// Changes by the name of the weight they change; `source` holds the tensors they are made of.
    pub fn new(source: Arc<dyn WeightSource>, changes: BTreeMap<String, Vec<Change>>) -> Adapter {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Adapter { serial: NEXT.fetch_add(1, Ordering::Relaxed), source, changes }
    }

    /// The names of the weights it changes.
    pub fn targets(&self) -> impl Iterator<Item = &str> {
        self.changes.keys().map(String::as_str)
    }

    /// How it changes a weight.
    pub fn changes(&self, target: &str) -> &[Change] {
        self.changes.get(target).map_or(&[], Vec::as_slice)
    }

    /// Where the tensors come from.
    pub fn source(&self) -> &Arc<dyn WeightSource> {
        &self.source
    }
}
