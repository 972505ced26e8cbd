//! The LoRAs and embeddings of requests, and the files they are in.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use sd_core::passes::adapters::{Adapted, Mode};
use sd_core::{Error, Kind, Result, TypePolicy};
use sd_io::Checkpoint;
use sd_models::adapter::embedding::{Embedding, Embeddings};
use sd_models::adapter::{self, Lora, tags};
use sd_models::{Component, Model, Part};

use crate::names::named;
use crate::request::LoraChoice;

/// How many open files of a kind are kept.
const KEPT: usize = 32;
/// Files of embeddings; of two with the same name the first of these counts.
const EMBEDDINGS: &[&str] = &["safetensors", "pt", "bin", "gguf", "ckpt"];
/// The parts whose weights the text's states hang on.
const ENCODERS: [Part; 3] = [Part::ClipL, Part::ClipG, Part::T5];

/// Where the changes of LoRAs are made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum LoraMode {
    /// At run time for weights that are quantised or 8-bit in memory, immediately for all others.
    #[default]
    Auto,
    /// In the weights when they are loaded; quantised ones become f16.
    Immediately,
    /// Beside the weights in every run.
    AtRuntime,
}

named!(
    LoraMode,
    "lora_apply_mode",
    [("auto", LoraMode::Auto), ("immediately", LoraMode::Immediately), ("at_runtime", LoraMode::AtRuntime)]
);

impl From<LoraMode> for Mode {
    fn from(mode: LoraMode) -> Mode {
        match mode {
            LoraMode::Auto => Mode::Auto,
            LoraMode::Immediately => Mode::Immediately,
            LoraMode::AtRuntime => Mode::AtRuntime,
        }
    }
}

/// Where files are looked for, and which are taken.
#[derive(Debug, Clone, Default)]
pub(super) struct Folders {
    pub(super) loras: Option<PathBuf>,
    /// Whether names of LoRAs may lead out of their folder.
    pub(super) any_lora_path: bool,
    /// Whether LoRAs may change nothing.
    pub(super) unused_loras: bool,
    pub(super) embeddings: Option<PathBuf>,
    pub(super) controls: Option<PathBuf>,
}

impl Folders {
    fn told(&self, e: Error, name: &str) -> Error {
        match &self.loras {
            Some(folder) if !self.any_lora_path => told(e, folder, &format!("LoRA {name}")),
            _ => e,
        }
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Path> {
        [&self.loras, &self.embeddings, &self.controls].into_iter().flatten().map(PathBuf::as_path)
    }
}

/// The error of a file as it is told to who named it: those who may name files of the folder only are at fault, and do not
/// learn where it is.
pub(super) fn told(e: Error, folder: &Path, what: &str) -> Error {
    let of_file = matches!(
        e.kind(),
        Kind::Io { .. } | Kind::BadFile { .. } | Kind::MissingTensor { .. } | Kind::Shape(_) | Kind::Unsupported(_)
    );
    if !of_file {
        return e;
    }
    let text = e.to_string().replace(&*folder.join("").to_string_lossy(), "");
    Error::request(format!("{what}: {text}"))
}

/// LoRAs that are fitted to a model, each with its strength.
pub(super) type Loras = Vec<(Arc<Lora>, f32)>;

/// What a request adds to a model.
#[derive(Clone, Default)]
pub(super) struct Chosen {
    pub(super) loras: Loras,
    pub(super) embeddings: Vec<Arc<Embedding>>,
}

impl Chosen {
    /// A part of the model with what is added to it.
    pub(super) fn adapt(&self, component: &Component, mode: LoraMode, types: TypePolicy) -> Result<Arc<Adapted>> {
        adapter::adapted(component, &self.loras, &self.embeddings(), mode.into(), types)
    }

    pub(super) fn embeddings(&self) -> Embeddings {
        Embeddings::new(self.embeddings.clone())
    }

    /// What of it the states of a text hang on.
    pub(super) fn of_text(&self) -> Chosen {
        let encodes = |(lora, _): &&(Arc<Lora>, f32)| ENCODERS.iter().any(|part| lora.part(*part).is_some());
        Chosen { loras: self.loras.iter().filter(encodes).cloned().collect(), embeddings: self.embeddings.clone() }
    }
}

/// The same open files at the same strengths.
impl PartialEq for Chosen {
    fn eq(&self, other: &Chosen) -> bool {
        let mut loras = self.loras.iter().zip(&other.loras);
        let mut embeddings = self.embeddings.iter().zip(&other.embeddings);
        self.loras.len() == other.loras.len()
            && self.embeddings.len() == other.embeddings.len()
            && loras.all(|((a, x), (b, y))| Arc::ptr_eq(a, b) && x.to_bits() == y.to_bits())
            && embeddings.all(|(a, b)| Arc::ptr_eq(a, b))
    }
}

/// A model to which files are fitted.
pub(super) struct Fitting<'a> {
    /// What messages call it.
    pub(super) name: &'static str,
    pub(super) library: &'a mut Library,
    pub(super) model: &'a Model,
}

/// The files that a request names, fitted to each of `models`: the one that begins, and its refiner if there is one. Each
/// takes the layers that it has. With warnings. Strengths of one file add up.
///
/// # Errors
/// A LoRA is not there, is outside of its folder, is malformed, or changes nothing of any model where that is not allowed.
pub(super) fn fit(models: &mut [Fitting<'_>], choices: &[LoraChoice]) -> Result<(Vec<Loras>, Vec<String>)> {
    let (mut fitted, mut warnings) = (vec![Loras::new(); models.len()], Vec::new());
    for LoraChoice { name, strength, high_noise } in choices {
        if *high_noise {
            let family = models.first().map_or("the model", |m| m.model.info().family.name());
            warnings.push(format!(
                "LoRA {name}: is for a network of high noise levels, which {family} does not have; left out"
            ));
            continue;
        }
        let open = |fitting: &mut Fitting<'_>| fitting.library.open(fitting.model, name);
        let opened = models.iter_mut().map(open).collect::<Result<Vec<_>>>()?;
        warnings.extend(reported(models, &opened, name)?);
        for (loras, (lora, _)) in fitted.iter_mut().zip(opened) {
            match loras.iter_mut().find(|(other, _)| Arc::ptr_eq(other, &lora)) {
                Some((_, sum)) => *sum += strength,
                None => loras.push((lora, *strength)),
            }
        }
    }
    Ok((fitted, warnings))
}

/// Logs what became of a file that was opened now, and warns of layers that do not fit. The model that takes most of it is
/// the one that it was made for.
fn reported(models: &[Fitting<'_>], opened: &[(Arc<Lora>, bool)], name: &str) -> Result<Option<String>> {
    let all = || models.iter().zip(opened);
    let Some((fitting, (lora, _))) = all().rev().max_by_key(|(_, (lora, _))| lora.report().count()) else {
        return Ok(None);
    };
    let unused = match lora.check() {
        Err(e) if !fitting.library.folders.unused_loras => return Err(fitting.library.told(e, name)),
        checked => checked.is_err(),
    };
    let report = lora.report();
    if opened.iter().any(|(_, new)| *new) {
        let others = all().filter(|(other, _)| other.name != fitting.name);
        let others: String =
            others.map(|(m, (lora, _))| format!("; {}: {}", m.name, lora.report().summary())).collect();
        let of = if others.is_empty() { String::new() } else { format!(" of the {}", fitting.name) };
        tracing::info!("LoRA{of} {report}{others}");
    }
    if unused {
        let what = report.summary();
        return Ok(Some(format!("LoRA {name}: changes nothing of this model ({what}); drawn without it")));
    }
    let count = report.unfit.len();
    let warning = |first| format!("LoRA {name}: {count} of {} layers do not fit: {first}", report.layers);
    Ok(report.unfit.first().map(warning))
}

/// The files of adapters that a model was asked for, opened once.
pub(super) struct Library {
    folders: Folders,
    loras: Opened<Lora>,
    embeddings: Opened<Embedding>,
}

impl Library {
    pub(super) fn new(folders: Folders) -> Library {
        Library { folders, loras: Opened(Vec::new()), embeddings: Opened(Vec::new()) }
    }

    /// A LoRA for a model, and whether it was opened now.
    fn open(&mut self, model: &Model, name: &str) -> Result<(Arc<Lora>, bool)> {
        let folder = self.folders.loras.as_deref().ok_or_else(|| {
            Error::request(format!("LoRA {name}: there is no folder of LoRAs"))
                .hint("name it with --lora-model-dir")
        })?;
        let path = tags::find(folder, name, self.folders.any_lora_path)?;
        self.loras.get(&path, |file| Lora::open(file, model)).map_err(|e| self.folders.told(e, name))
    }

    fn told(&self, e: Error, name: &str) -> Error {
        self.folders.told(e, name)
    }

    /// The embeddings whose names are in the prompts. One that is not for the model is left as a word.
    pub(super) fn named_in(
        &mut self,
        model: &Model,
        prompts: [&str; 2],
        warnings: &mut Vec<String>,
    ) -> Result<Vec<Arc<Embedding>>> {
        let Some(folder) = &self.folders.embeddings else { return Ok(Vec::new()) };
        let files = embeddings(folder)?;
        let names: Vec<&str> = files.iter().map(|(name, _)| name.as_str()).collect();
        let mut found: Vec<usize> = prompts.iter().flat_map(|p| Embeddings::named_in(p, &names)).collect();
        found.sort_unstable();
        found.dedup();
        let mut out = Vec::new();
        for (name, path) in found.into_iter().filter_map(|i| files.get(i)) {
            match self.embeddings.get(path, |file| Embedding::open(file, name, model)) {
                Ok((embedding, new)) => {
                    if new {
                        tracing::info!("embedding {name}: {} vectors ({})", embedding.count, path.display());
                    }
                    out.push(embedding);
                }
                Err(e) => warnings.push(format!("embedding {name}: {e}; in the prompt it is a word")),
            }
        }
        Ok(out)
    }
}

/// The embeddings in a folder by name, in order.
fn embeddings(folder: &Path) -> Result<Vec<(String, PathBuf)>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(|e| Error::io(folder, e))? {
        let path = entry.map_err(|e| Error::io(folder, e))?.path();
        let extension = path.extension().and_then(|e| e.to_str());
        let Some(rank) = EMBEDDINGS.iter().position(|e| Some(*e) == extension) else { continue };
        let stem = path.file_stem().and_then(|s| s.to_str()).filter(|s| !s.is_empty());
        if let Some(stem) = stem.filter(|_| path.is_file()) {
            files.push((stem.to_owned(), rank, path.clone()));
        }
    }
    files.sort();
    files.dedup_by(|later, first| later.0 == first.0);
    Ok(files.into_iter().map(|(name, _, path)| (name, path)).collect())
}

/// Open files, the latest last.
struct Opened<T>(Vec<(Stamps, Arc<T>)>);

/// What tells whether a file has changed: which it is, when it was changed, and its size; and the same of the
/// configuration beside it.
type Stamps = (Stamp, Option<Stamp>);
pub(super) type Stamp = (PathBuf, Option<SystemTime>, u64);

pub(super) fn stamp(path: &Path) -> Result<Stamp> {
    let named = |e| Error::io(path, e);
    let real = path.canonicalize().map_err(named)?;
    let meta = fs::metadata(&real).map_err(named)?;
    Ok((real, meta.modified().ok(), meta.len()))
}

impl<T> Opened<T> {
    /// What `open` makes of a file, and whether it was opened now: a file that has changed is opened again.
    fn get(&mut self, path: &Path, open: impl FnOnce(&Arc<Checkpoint>) -> Result<T>) -> Result<(Arc<T>, bool)> {
        let now = (stamp(path)?, tags::config_of(path).map(|config| stamp(&config)).transpose()?);
        let known = self.0.iter().position(|(s, _)| s.0.0 == now.0.0).map(|at| self.0.remove(at));
        let (value, new) = match known.filter(|(s, _)| *s == now) {
            Some((.., value)) => (value, false),
            None => (Arc::new(open(&Arc::new(Checkpoint::open(path)?))?), true),
        };
        if self.0.len() >= KEPT {
            self.0.remove(0);
        }
        self.0.push((now, value.clone()));
        Ok((value, new))
    }
}
