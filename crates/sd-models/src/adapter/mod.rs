//! Adapter files: LoRA, LoCon, LoHa, LoKr, DoRA and differences of whole weights, in the spellings that trainers and
//! programs write. What they do to weights is in [`sd_core::passes::adapters`].
//!
//! ```text
//! let lora = Lora::open(&Arc::new(Checkpoint::open(path)?), &model)?;
//! tracing::info!("{}", lora.report());
//! // Per request and part; without adapters and embeddings, this is the part as it is.
//! let adapted = adapter::adapted(component, &[(Arc::new(lora), 0.8)], &embeddings, Mode::Auto, types)?;
//! runner.set_adapters(adapted);
//! ```

mod alphas;
mod build;
pub mod controlnet;
pub mod embedding;
mod keys;
mod modules;
mod ordered;
mod shelf;
pub mod tags;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use sd_core::passes::adapters::{Adapted, Adapter, Change, Kind, Mode, Rows};
use sd_core::{Error, Result, TypePolicy, WeightSource};
use sd_io::Checkpoint;

use crate::component::Component;
use crate::model::Model;
use crate::names::{Form, Part};
use alphas::Alphas;
use build::Made;
use embedding::Embeddings;
use keys::Group;
use modules::{Modules, Place};
use ordered::Ordered;

/// How many groups of unused keys a report lists.
const LISTED: usize = 6;

/// An adapter file, fitted to a model.
pub struct Lora {
    parts: BTreeMap<Part, Arc<Adapter>>,
    report: LoraReport,
}

/// What was made of an adapter file. Its `Display` is one line.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraReport {
    /// The file.
    pub file: String,
    /// The convention of its names, such as `kohya`.
    pub spelling: &'static str,
    /// Layers of each part that it changes.
    pub applied: BTreeMap<Part, usize>,
    /// Layers in the file.
    pub layers: usize,
    /// Tensors of layers that the model lacks, in groups of names that differ in numbers only, with how many there are.
    pub unused: Vec<(String, usize)>,
    /// Layers that do not fit the model, with what is wrong.
    pub unfit: Vec<String>,
}

impl Lora {
    /// Finds the model's weights that a file changes. Reads headers, and the numbers that products are multiplied by.
    ///
    /// # Errors
    /// The file is no adapter.
    pub fn open(file: &Arc<Checkpoint>, model: &Model) -> Result<Lora> {
        let source: Arc<dyn WeightSource> = file.clone();
        let name = file.path().display().to_string();
        read(&source, &name, &Alphas::read(file)?, &modules(model.components()))
    }

    /// The same for the tensors of an adapter and of a model's file, without metadata.
    ///
    /// # Errors
    /// As for [`Lora::open`].
    pub fn fit(source: Arc<dyn WeightSource>, model: &Arc<dyn WeightSource>) -> Result<Lora> {
        let first = source.names().first().map(|n| source.origin(n).file).unwrap_or_default();
        let components = Component::split(model, None);
        read(&source, &first, &Alphas::default(), &modules(components.iter()))
    }

    /// Checks that it changes something of the model.
    ///
    /// # Errors
    /// It changes nothing; the message says what was found.
    pub fn check(&self) -> Result<()> {
        if !self.parts.is_empty() {
            return Ok(());
        }
        let e = Error::bad_file(&self.report.file, format!("changes nothing of this model ({})", self.report));
        Err(e.hint("it was made for another family; --allow-unused-loras draws without it"))
    }

    /// What it changes of a part; `None` if nothing.
    pub fn part(&self, part: Part) -> Option<&Arc<Adapter>> {
        self.parts.get(&part)
    }

    /// What was made of the file.
    pub fn report(&self) -> &LoraReport {
        &self.report
    }
}

/// A part's weights with adapters, each at its strength, and with the vectors of embeddings after its table of tokens.
/// `types` are those of the part's runner.
///
/// # Errors
/// A change does not fit its weight.
pub fn adapted(
    component: &Component,
    loras: &[(Arc<Lora>, f32)],
    embeddings: &Embeddings,
    mode: Mode,
    types: TypePolicy,
) -> Result<Arc<Adapted>> {
    let part = component.part();
    let list = loras.iter().filter_map(|(lora, strength)| Some((lora.part(part)?.clone(), *strength))).collect();
    let adapted = Adapted::new(component.source(), list, mode, types)?;
    adapted.with_rows(embedding::TOKEN_TABLE, embeddings.rows(part)).map(Arc::new)
}

impl LoraReport {
    /// How many layers are applied.
    pub fn count(&self) -> usize {
        self.applied.values().sum()
    }

    /// How many layers are applied and to what, as `2 of 9 layers applied (2 of the CLIP text encoder)`.
    pub fn summary(&self) -> String {
        let parts: Vec<String> = self.applied.iter().map(|(p, n)| format!("{n} of the {}", p.name())).collect();
        let parts = if parts.is_empty() { String::new() } else { format!(" ({})", parts.join(", ")) };
        format!("{} of {} layers applied{parts}", self.count(), self.layers)
    }
}

impl fmt::Display for LoraReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}, {}", self.file, self.spelling, self.summary())?;
        if let Some(first) = self.unfit.first() {
            write!(f, "; {} do not fit: {first}", self.unfit.len())?;
        }
        let unused: usize = self.unused.iter().map(|u| u.1).sum();
        if unused > 0 {
            let listed = self.unused.iter().take(LISTED).map(|(group, n)| format!("{group} ({n})"));
            write!(f, "; {unused} keys unused: {}", listed.collect::<Vec<_>>().join(", "))?;
        }
        Ok(())
    }
}

/// The tensors of a model's parts.
fn modules<'a>(components: impl Iterator<Item = &'a Component>) -> Modules {
    let mut tensors = Vec::new();
    for component in components {
        let source = component.source();
        let named = |n: &str| source.meta(n).map(|m| (component.part(), n.to_owned(), m.shape));
        tensors.extend(source.names().into_iter().filter_map(named));
    }
    Modules::new(tensors)
}

/// A module of the file, found in the model.
struct Layer {
    name: String,
    made: Vec<Made>,
}

/// A change and where it goes.
struct Placed {
    layer: usize,
    place: Place,
    change: Change,
    rows: usize,
}

/// Reads a file against the tensors of a model.
fn read(source: &Arc<dyn WeightSource>, file: &str, alphas: &Alphas, modules: &Modules) -> Result<Lora> {
    let names = source.names();
    let ordered = ordered::is_ordered(&names).then(|| Ordered::new(modules));
    let spelling = if ordered.is_some() { "numbered layers" } else { keys::spelling(&names) };
    let (groups, rest) = groups(&**source, &names, ordered.as_ref());
    if groups.is_empty() {
        return Err(
            Error::bad_file(file, "holds no LoRA").hint("a LoRA's names end in lora_down.weight, lora_A.weight, …")
        );
    }
    let mut report = LoraReport {
        file: file.to_owned(),
        spelling,
        applied: BTreeMap::new(),
        layers: groups.len(),
        unused: Vec::new(),
        unfit: Vec::new(),
    };
    let mut unused: BTreeMap<String, usize> = BTreeMap::new();
    let mut changes: BTreeMap<(Part, String), Vec<Placed>> = BTreeMap::new();
    let mut layers: Vec<Layer> = Vec::new();
    for (name, group) in groups {
        // A lone alpha says nothing.
        if group.slots.keys().all(|s| matches!(s, keys::Slot::Alpha | keys::Slot::Scale)) {
            report.layers -= 1;
            group.slots.values().for_each(|n| *unused.entry(grouped(n)).or_default() += 1);
            continue;
        }
        let found = ["weight", "bias"].iter().any(|t| !modules.find(&name, t).is_empty());
        if !found {
            group.slots.values().for_each(|n| *unused.entry(grouped(n)).or_default() += 1);
            continue;
        }
        let alpha = alphas.of(&name).map_err(|what| Error::bad_file(file, what))?;
        match build::changes(&group, &**source, alpha)? {
            Ok(made) => layers.push(Layer { name, made }),
            Err(what) => report.unfit.push(format!("{name}: {what}")),
        }
    }
    for name in rest {
        match whole(name, &**source, modules) {
            Some(made) => {
                report.layers += 1;
                layers.push(Layer { name: name.to_owned(), made: vec![made] });
            }
            None => *unused.entry(grouped(name)).or_default() += 1,
        }
    }
    for (i, layer) in layers.iter().enumerate() {
        for made in &layer.made {
            let places = modules.find(&layer.name, made.tensor);
            if places.is_empty() {
                report.unfit.push(format!("{}: the model has no {} there", layer.name, made.tensor));
            }
            for place in places {
                let spatial = place.shape.dims().iter().skip(2).product();
                match made.change.dims(&**source, spatial) {
                    Ok([rows, _]) => {
                        let placed = Placed { layer: i, place: place.clone(), change: made.change.clone(), rows };
                        changes.entry((place.part, place.here.clone())).or_default().push(placed);
                    }
                    Err(e) => report.unfit.push(format!("{}: {e}", layer.name)),
                }
            }
        }
    }
    let parts = finish(source, changes, &layers, &mut report);
    report.unused = unused.into_iter().collect();
    Ok(Lora { parts, report })
}

/// The file's tensors by module, and those whose names are no adapter's.
fn groups<'a>(
    source: &dyn WeightSource,
    names: &[&'a str],
    ordered: Option<&Ordered>,
) -> (BTreeMap<String, Group>, Vec<&'a str>) {
    let (mut groups, mut rest) = (BTreeMap::<String, Group>::new(), Vec::new());
    for name in names {
        let elements = source.meta(name).map_or(0, |m| m.shape.elements());
        let parsed = match ordered {
            Some(o) => o.parse(name),
            None => keys::parse(name, elements),
        };
        match parsed {
            Some((module, slot)) => {
                groups.entry(module).or_default().slots.entry(slot).or_insert_with(|| (*name).to_owned());
            }
            None => rest.push(*name),
        }
    }
    (groups, rest)
}

/// A tensor that takes the place of the model's, as norms do in control adapters.
fn whole(name: &str, source: &dyn WeightSource, modules: &Modules) -> Option<Made> {
    let place = modules.find(name, "").first()?;
    let shape = source.meta(name)?.shape;
    let same = place.form == Form::Same && place.shape == shape;
    let kind = Kind::Replacement(name.to_owned());
    same.then_some(Made { tensor: "", change: Change { kind, scale: 1.0, rows: Rows::All, magnitude: None } })
}

/// Checks every change against its weight and puts together those of each part.
fn finish(
    source: &Arc<dyn WeightSource>,
    changes: BTreeMap<(Part, String), Vec<Placed>>,
    layers: &[Layer],
    report: &mut LoraReport,
) -> BTreeMap<Part, Arc<Adapter>> {
    let mut parts: BTreeMap<Part, BTreeMap<String, Vec<Change>>> = BTreeMap::new();
    let mut applied: BTreeMap<usize, Part> = BTreeMap::new();
    for ((part, here), placed) in changes {
        let sizes: BTreeMap<usize, usize> = placed
            .iter()
            .filter_map(|p| if let Form::Part(i) = p.place.form { Some((i, p.rows)) } else { None })
            .collect();
        for Placed { layer, place, mut change, rows } in placed {
            let fits = match rows_of(&place, rows, &sizes) {
                Some(rows) => {
                    change.rows = rows;
                    change.check(&**source, &place.shape).map_err(|e| e.to_string())
                }
                None => Err("cannot be applied to a matrix whose axes are exchanged".to_owned()),
            };
            match fits {
                Ok(()) => {
                    applied.insert(layer, part);
                    parts.entry(part).or_default().entry(here.clone()).or_default().push(change);
                }
                Err(what) => {
                    let name = layers.get(layer).map_or("", |l| l.name.as_str());
                    report.unfit.push(format!("{name}: {what}"));
                }
            }
        }
    }
    for part in applied.into_values() {
        *report.applied.entry(part).or_default() += 1;
    }
    parts.into_iter().map(|(part, changes)| (part, Arc::new(Adapter::new(source.clone(), changes)))).collect()
}

/// Which rows of the model's tensor a change of `rows` rows means. `sizes` are the rows of the changes beside it of those
/// that the model has joined.
fn rows_of(place: &Place, rows: usize, sizes: &BTreeMap<usize, usize>) -> Option<Rows> {
    Some(match place.form {
        Form::Same => Rows::All,
        Form::Swap => Rows::Swapped,
        Form::Slice { part, of } => Rows::Of(part * (rows / of.max(1))),
        Form::Part(i) if i + 1 == place.of => {
            Rows::From(place.shape.dim(0).checked_sub(rows).unwrap_or(usize::MAX))
        }
        Form::Part(i) => {
            let before: Option<usize> = (0..i).map(|j| sizes.get(&j).copied()).sum();
            // Without those before it: queries, keys and values have the same number of rows.
            Rows::From(before.unwrap_or(i * rows))
        }
        Form::Transpose => return None,
    })
}

/// A name with its numbers left out.
fn grouped(name: &str) -> String {
    let mut out = String::with_capacity(name.len());
    for c in name.chars() {
        match c {
            '0'..='9' if out.ends_with('*') => {}
            '0'..='9' => out.push('*'),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests;
