//! What a dry run finds: sizes of parts, tensors that nothing reads, and names that look like a missing one.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use sd_core::{Error, Kind, WeightSource};
use sd_io::Checkpoint;

use crate::component::Component;
use crate::names::{Part, is_ignored};
use crate::text::similar::distance;

/// How many unread names a search for similar ones looks at: a file may hold a million.
const LIKELY: usize = 10_000;

/// What a dry run found.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// The parts.
    pub parts: Vec<PartReport>,
    /// Tensors that no graph reads, in groups of similar names.
    pub unused: Vec<Unused>,
}

/// The size of a part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartReport {
    /// Which.
    pub part: Part,
    /// Tensors.
    pub tensors: usize,
    /// Elements.
    pub parameters: u64,
    /// Bytes as stored.
    pub bytes: u64,
}

/// Tensors of a file that no graph reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unused {
    /// The first two components of their names.
    pub group: String,
    /// How many.
    pub count: usize,
    /// One of them.
    pub example: String,
    /// The file.
    pub file: PathBuf,
}

impl Report {
    pub(crate) fn new(parts: &[&Component], files: &[Arc<Checkpoint>]) -> Report {
        let part = |c: &&Component| PartReport {
            part: c.part(),
            tensors: c.tensors(),
            parameters: c.parameters(),
            bytes: c.bytes(),
        };
        Report { parts: parts.iter().map(part).collect(), unused: unused(parts, &[], files) }
    }
}

/// What neither the graphs of `parts`, which are built, nor those of `unbuilt` would read.
pub(crate) fn unused(parts: &[&Component], unbuilt: &[&Component], files: &[Arc<Checkpoint>]) -> Vec<Unused> {
    let mut out: BTreeMap<(PathBuf, String), Unused> = BTreeMap::new();
    for file in files {
        let source: Arc<dyn WeightSource> = file.clone();
        let mut left: BTreeSet<&str> = source.names().into_iter().filter(|n| !is_ignored(n)).collect();
        let here = |c: &&&Component| std::ptr::addr_eq(Arc::as_ptr(c.file()), Arc::as_ptr(&source));
        let built = parts.iter().filter(here).map(|c| (c, c.scope().unused()));
        for (c, unused) in built.chain(unbuilt.iter().filter(here).map(|c| (c, Vec::new()))) {
            c.left_out().iter().for_each(|n| _ = left.remove(n.as_str()));
            let unused: BTreeSet<String> = unused.into_iter().collect();
            for here in c.source().names().into_iter().filter(|n| !unused.contains(*n)) {
                c.file_names(here).iter().for_each(|n| _ = left.remove(n.as_str()));
            }
        }
        for name in left {
            let group: String = name.split('.').take(2).collect::<Vec<_>>().join(".");
            let path = file.path().to_owned();
            out.entry((path.clone(), group.clone()))
                .or_insert_with(|| Unused { group, count: 0, example: name.into(), file: path })
                .count += 1;
        }
    }
    out.into_values().collect()
}

/// Adds to the error of building a part what the graph does not know: the most similar name that nothing reads where
/// a tensor is missing, and the part with its file where shapes do not fit.
pub(crate) fn explain(e: Error, c: &Component) -> Error {
    let name = match e.kind() {
        Kind::MissingTensor { name, .. } => name,
        Kind::Shape(what) => {
            let scope = c.scope();
            let first = scope.source().names().first().map(|n| scope.source().origin(n).file).unwrap_or_default();
            let known = what.contains(&first);
            return if known { e } else { e.context(format!("{first}: {}", c.part().name())) };
        }
        _ => return e,
    };
    let unused = c.scope().unused();
    let names = unused.iter().take(LIKELY).flat_map(|n| c.file_names(n)).map(String::as_str);
    let limit = 2.max(name.len() / 6);
    let near = names.map(|n| (distance(n, name), n)).filter(|(d, _)| *d <= limit).min();
    let Some(near) = near.map(|(_, n)| format!("the file has {n}, which nothing reads")) else { return e };
    e.hint(near)
}
