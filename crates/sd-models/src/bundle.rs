//! The tensors of several files as those of one, under names that say which part they belong to.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use sd_core::{Bytes, Error, Origin, Result, TensorMeta, WeightSource};
use sd_io::Checkpoint;

use crate::component::Component;
use crate::detect::{Kind, detect};
use crate::model::Files;
use crate::names::{Part, part_of};
use crate::scaled::{self, ScaledAs};

/// Tensors of a model, from one or more files.
pub struct Bundle {
    entries: Vec<Entry>,
    index: HashMap<String, usize>,
    /// Names by which the networks know tensors, by the names they have in the bundle.
    known: HashMap<String, String>,
}

struct Entry {
    name: String,
    source: Arc<dyn WeightSource>,
    /// Its name in `source`.
    from: String,
}

impl Bundle {
    /// The tensors of `files`. Those of a part given apart have its place put before their names, unless they have one,
    /// and replace the part in the model. With `rename`, every tensor that a network knows gets the name that the network
    /// uses and the layout it has there.
    ///
    /// # Errors
    /// A file is no model or does not hold the part it is given as, a name stands for two tensors, or, with `rename`, a
    /// tensor cannot be put together.
    pub fn new(files: &Files, rename: bool) -> Result<Bundle> {
        let mut out = Bundle { entries: Vec::new(), index: HashMap::new(), known: HashMap::new() };
        let apart: BTreeSet<Part> = files.parts.keys().copied().collect();
        if let Some(model) = &files.model {
            check(model)?;
            out.add(model, None, rename, &apart)?;
        }
        for (part, file) in &files.parts {
            out.add(file, Some(*part), rename, &BTreeSet::new()).map_err(|e| e.context(part.option()))?;
        }
        Ok(out)
    }

    fn add(
        &mut self,
        file: &Arc<Checkpoint>,
        only: Option<Part>,
        rename: bool,
        skip: &BTreeSet<Part>,
    ) -> Result<()> {
        let source: Arc<dyn WeightSource> = file.clone();
        let belongs = |name: &str| match (part_of(name, only), only) {
            (Some((part, _)), Some(only)) => part == only,
            (None, Some(_)) => false,
            (Some((part, _)), None) => !skip.contains(&part),
            (None, None) => true,
        };
        // With `rename` scaled weights become values, and what scales them is left out.
        if rename {
            scaled::check(&source)?;
        }
        let form = ScaledAs::Values(sd_core::DType::BF16);
        let values = if rename { scaled::read(&source, form) } else { source.clone() };
        let names = source.names().into_iter().filter(|name| belongs(name) && values.meta(name).is_some());
        let names: Vec<&str> = names.collect();
        if let (Some(part), []) = (only, names.as_slice()) {
            return Err(Error::bad_file(file.path(), format!("holds no {}", part.name())));
        }
        let mut done: HashSet<String> = HashSet::new();
        let mut known: HashMap<String, String> = HashMap::new();
        let parts = Component::split_as(&source, only, form);
        for c in parts.iter().filter(|c| !skip.contains(&c.part()) && only.is_none_or(|only| only == c.part())) {
            for here in c.source().names() {
                let placed = format!("{}{here}", c.part().place());
                if rename {
                    self.push(placed, c.source(), here)?;
                    done.extend(c.file_names(here).iter().cloned());
                } else {
                    known.extend(c.file_names(here).iter().map(|name| (name.clone(), placed.clone())));
                }
            }
        }
        for name in names.into_iter().filter(|name| !done.contains(*name)) {
            let named = match only {
                Some(part) if part_of(name, None).is_none_or(|(p, prefix)| p != part || prefix.is_empty()) => {
                    format!("{}{name}", part.place())
                }
                _ => name.to_owned(),
            };
            if let Some(known) = known.remove(name) {
                self.known.insert(named.clone(), known);
            }
            self.push(named, source.clone(), name)?;
        }
        Ok(())
    }

    fn push(&mut self, name: String, source: Arc<dyn WeightSource>, from: &str) -> Result<()> {
        if source.meta(from).is_none() {
            let Origin { name, file } = source.origin(from);
            return Err(Error::missing(name, file));
        }
        if self.index.insert(name.clone(), self.entries.len()).is_some() {
            return Err(Error::bad_file(source.origin(from).file, format!("two tensors would be called {name}")));
        }
        self.entries.push(Entry { name, source, from: from.to_owned() });
        Ok(())
    }

    /// The name by which a network knows a tensor, with the place of its part before it: the tensor's own if no network
    /// knows it.
    pub fn known<'a>(&'a self, name: &'a str) -> &'a str {
        self.known.get(name).map_or(name, String::as_str)
    }

    fn entry(&self, name: &str) -> Option<&Entry> {
        self.entries.get(*self.index.get(name)?)
    }
}

impl WeightSource for Bundle {
    fn names(&self) -> Vec<&str> {
        self.entries.iter().map(|e| e.name.as_str()).collect()
    }

    fn meta(&self, name: &str) -> Option<TensorMeta> {
        let e = self.entry(name)?;
        e.source.meta(&e.from)
    }

    fn bytes(&self, name: &str) -> Result<Bytes> {
        let e = self.entry(name).ok_or_else(|| Error::missing(name, "the given files"))?;
        e.source.bytes(&e.from)
    }

    fn is_made(&self, name: &str) -> bool {
        self.entry(name).is_some_and(|e| e.source.is_made(&e.from))
    }

    fn origin(&self, name: &str) -> Origin {
        match self.entry(name) {
            Some(e) => e.source.origin(&e.from),
            None => Origin { name: name.to_owned(), file: String::new() },
        }
    }
}

impl Part {
    /// What stands before its names in a file of several.
    pub fn place(self) -> &'static str {
        match self {
            Part::Diffusion => "model.diffusion_model.",
            Part::Autoencoder => "first_stage_model.",
            Part::ClipL => "text_encoders.clip_l.transformer.",
            Part::ClipG => "text_encoders.clip_g.transformer.",
            Part::T5 => "text_encoders.t5xxl.transformer.",
        }
    }
}

/// An error unless `file` holds something of a model.
fn check(file: &Arc<Checkpoint>) -> Result<()> {
    match detect(&**file) {
        Kind::Runs(_) | Kind::Known(_) => Ok(()),
        Kind::NotAModel(name, _) => Err(Error::bad_file(file.path(), format!("is {name}, not a model"))),
        Kind::NoNetwork => {
            let source: Arc<dyn WeightSource> = file.clone();
            match Component::split(&source, None).as_slice() {
                [] => Err(Error::bad_file(file.path(), "holds no tensor of a known model")),
                _ => Ok(()),
            }
        }
    }
}
