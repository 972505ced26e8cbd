//! One part of a model, its tensors under the names that the networks use.

use std::collections::BTreeMap;
use std::sync::Arc;

use sd_core::{Bytes, Error, Origin, Result, Scope, TensorMeta, WeightSource};

use crate::names::{Part, Spelling, is_ignored, part_of};

/// A part of a model, wherever it is stored.
pub struct Component {
    part: Part,
    scope: Scope,
    view: Arc<View>,
}

/// The tensors of a file that belong to one part, renamed.
struct View {
    file: Arc<dyn WeightSource>,
    spelling: Spelling,
    /// Names used here, with those of the file.
    names: BTreeMap<String, String>,
}

impl Component {
    /// The parts in `file`. With `only`, the file is taken to hold nothing else, so its names need no prefix.
    pub(crate) fn split(file: &Arc<dyn WeightSource>, only: Option<Part>) -> Vec<Component> {
        let mut found: BTreeMap<(Part, &'static str), Vec<&str>> = BTreeMap::new();
        for name in file.names().into_iter().filter(|n| !is_ignored(n)) {
            if let Some(place) = part_of(name, only) {
                found.entry(place).or_default().push(name);
            }
        }
        let mut out: Vec<Component> = Vec::new();
        for part in Part::ALL {
            // A part that is there under two prefixes is taken from the one with more tensors.
            let places = found.iter().filter(|((p, _), _)| *p == part);
            let Some(((_, prefix), names)) = places.max_by_key(|(_, names)| names.len()) else { continue };
            let bare: Vec<&str> = names.iter().filter_map(|n| n.strip_prefix(prefix)).collect();
            let spelling = Spelling::detect(part, prefix, &bare);
            let mut map = BTreeMap::new();
            for name in names {
                if let Some(here) = spelling.here(name) {
                    map.entry(here).or_insert_with(|| (*name).to_owned());
                }
            }
            let view = Arc::new(View { file: file.clone(), spelling, names: map });
            out.push(Component { part, scope: Scope::root(view.clone()), view });
        }
        out
    }

    /// Which part this is.
    pub fn part(&self) -> Part {
        self.part
    }

    /// Its tensors, to run its graphs with.
    pub fn source(&self) -> Arc<dyn WeightSource> {
        self.view.clone()
    }

    /// Its tensors, to build its graphs with.
    pub fn scope(&self) -> &Scope {
        &self.scope
    }

    /// How many elements its tensors have.
    pub fn parameters(&self) -> u64 {
        self.metas().map(|m| m.shape.elements() as u64).sum()
    }

    /// How many bytes its tensors take in the file.
    pub fn bytes(&self) -> u64 {
        self.metas().filter_map(|m| m.dtype.bytes(m.shape.elements(), m.shape.last())).map(|n| n as u64).sum()
    }

    /// How many tensors there are.
    pub fn tensors(&self) -> usize {
        self.view.names.len()
    }

    /// The file it is in.
    pub(crate) fn file(&self) -> &Arc<dyn WeightSource> {
        &self.view.file
    }

    /// The name in the file of a tensor.
    pub(crate) fn file_name<'a>(&'a self, here: &'a str) -> &'a str {
        self.view.names.get(here).map_or(here, String::as_str)
    }

    fn metas(&self) -> impl Iterator<Item = TensorMeta> + '_ {
        self.view.names.values().filter_map(|n| self.view.file.meta(n))
    }
}

impl View {
    fn file_name(&self, here: &str) -> Result<&str> {
        self.names.get(here).map(String::as_str).ok_or_else(|| {
            let Origin { name, file } = self.origin(here);
            Error::missing(name, file)
        })
    }
}

impl WeightSource for View {
    fn names(&self) -> Vec<&str> {
        self.names.keys().map(String::as_str).collect()
    }

    fn meta(&self, name: &str) -> Option<TensorMeta> {
        self.file.meta(self.names.get(name)?)
    }

    fn bytes(&self, name: &str) -> Result<Bytes> {
        self.file.bytes(self.file_name(name)?)
    }

    fn origin(&self, name: &str) -> Origin {
        match self.names.get(name) {
            Some(n) => self.file.origin(n),
            None => self.file.origin(&self.spelling.file(name)),
        }
    }
}
