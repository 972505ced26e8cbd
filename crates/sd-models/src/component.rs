//! One part of a model, its tensors under the names that the networks use.

use std::collections::BTreeMap;
use std::sync::Arc;

use sd_core::{Bytes, DType, Origin, Result, Scope, TensorMeta, WeightSource};

use crate::names::{Part, Spelling, is_ignored, is_left_out, part_of};
use crate::scaled::{self, ScaledAs};
use crate::view::View;

/// A part of a model, wherever it is stored.
pub struct Component {
    part: Part,
    scope: Scope,
    view: Arc<View>,
    /// What [`Files::prepared`](crate::Files::prepared) has for it.
    prepared: Option<Arc<Prepared>>,
    /// Names in the file of tensors that are left out without a word.
    left_out: Vec<String>,
}

impl Component {
    /// The parts in `file`. With `only`, the file is taken to hold nothing else, so its names need no prefix.
    pub(crate) fn split(file: &Arc<dyn WeightSource>, only: Option<Part>) -> Vec<Component> {
        Component::split_as(file, only, ScaledAs::Blocks)
    }

    /// The same with scaled weights in this form.
    pub(crate) fn split_as(file: &Arc<dyn WeightSource>, only: Option<Part>, form: ScaledAs) -> Vec<Component> {
        let values = scaled::read(file, form);
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
            // What scales another tensor is part of that one's values and has none of its own.
            let unread = |name: &&str| {
                values.meta(name).is_none()
                    || name.strip_prefix(prefix).is_some_and(|n| is_left_out(part, n, &bare))
            };
            let (left_out, names): (Vec<&str>, Vec<&str>) = names.iter().partition(|n| unread(n));
            let view = Arc::new(View::new(file.clone(), values.clone(), spelling, &names));
            let left_out = left_out.into_iter().map(String::from).collect();
            let scope = Scope::root(view.clone());
            out.push(Component { part, scope, view, prepared: None, left_out });
        }
        out
    }

    /// Which part this is.
    pub fn part(&self) -> Part {
        self.part
    }

    /// Its tensors, to run its graphs with.
    pub fn source(&self) -> Arc<dyn WeightSource> {
        match &self.prepared {
            Some(prepared) => prepared.clone(),
            None => self.view.clone(),
        }
    }

    /// Takes the tensors that `source` has from there.
    pub(crate) fn prepare(&mut self, source: Arc<dyn WeightSource>) {
        let prepared = Arc::new(Prepared { first: source, view: self.view.clone() });
        self.scope = Scope::root(prepared.clone());
        self.prepared = Some(prepared);
    }

    /// Its tensors, to build its graphs with.
    pub fn scope(&self) -> &Scope {
        &self.scope
    }

    /// How many elements its tensors have.
    pub fn parameters(&self) -> u64 {
        self.view.names().into_iter().filter_map(|n| self.view.meta(n)).map(|m| m.shape.elements() as u64).sum()
    }

    /// How many bytes its tensors take in the file.
    pub fn bytes(&self) -> u64 {
        self.view.file_bytes()
    }

    /// How its tensors are stored in the file: tensors and bytes by type.
    pub fn stored(&self) -> BTreeMap<DType, (usize, u64)> {
        let mut out: BTreeMap<DType, (usize, u64)> = BTreeMap::new();
        for m in self.view.file_metas() {
            let (count, bytes) = out.entry(m.dtype).or_default();
            *count += 1;
            *bytes += m.dtype.bytes(m.shape.elements(), m.shape.last()).unwrap_or(0) as u64;
        }
        out
    }

    /// How many tensors there are.
    pub fn tensors(&self) -> usize {
        self.view.names().len()
    }

    /// The file it is in.
    pub(crate) fn file(&self) -> &Arc<dyn WeightSource> {
        self.view.file()
    }

    /// Names in the file of tensors that are left out without a word.
    pub(crate) fn left_out(&self) -> &[String] {
        &self.left_out
    }

    /// The names in the file of what makes a tensor.
    pub(crate) fn file_names(&self, here: &str) -> &[String] {
        self.view.sources(here)
    }
}

/// The tensors of a view, some of which are elsewhere in another type.
struct Prepared {
    first: Arc<dyn WeightSource>,
    view: Arc<View>,
}

impl WeightSource for Prepared {
    fn names(&self) -> Vec<&str> {
        self.view.names()
    }

    fn meta(&self, name: &str) -> Option<TensorMeta> {
        let meta = self.view.meta(name)?;
        Some(match self.first.meta(name) {
            Some(first) => TensorMeta { dtype: first.dtype, ..meta },
            None => meta,
        })
    }

    fn bytes(&self, name: &str) -> Result<Bytes> {
        match self.first.meta(name) {
            Some(_) => self.first.bytes(name),
            None => self.view.bytes(name),
        }
    }

    fn origin(&self, name: &str) -> Origin {
        self.view.origin(name)
    }

    fn is_made(&self, name: &str) -> bool {
        self.first.meta(name).is_none() && self.view.is_made(name)
    }
}
