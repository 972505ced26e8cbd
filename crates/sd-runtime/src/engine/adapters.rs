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

/// Where files are looked for.
#[derive(Debug, Clone, Default)]
pub(super) struct Folders {
    pub(super) loras: Option<PathBuf>,
    /// Whether names of LoRAs may lead out of their folder.
    pub(super) any_lora_path: bool,
    pub(super) embeddings: Option<PathBuf>,
}

impl Folders {
    /// The error of a file as it is told to who named it: those who may name files of the folder only are at fault, and
    /// do not learn where it is.
    fn told(&self, e: Error, folder: &Path, name: &str) -> Error {
        let of_file = matches!(
            e.kind(),
            Kind::Io { .. }
                | Kind::BadFile { .. }
                | Kind::MissingTensor { .. }
                | Kind::Shape(_)
                | Kind::Unsupported(_)
        );
        if self.any_lora_path || !of_file {
            return e;
        }
        let text = e.to_string();
        Error::request(format!("LoRA {name}: {}", text.replace(&*folder.join("").to_string_lossy(), "")))
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Path> {
        [&self.loras, &self.embeddings].into_iter().flatten().map(PathBuf::as_path)
    }
}

/// What a request adds to a model.
#[derive(Clone, Default)]
pub(super) struct Chosen {
    loras: Vec<(Arc<Lora>, f32)>,
    embeddings: Vec<Arc<Embedding>>,
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

    /// The files that a request names, with warnings. Strengths of one file add up.
    ///
    /// # Errors
    /// A LoRA is not there, is outside of its folder, is malformed, or changes nothing of the model.
    pub(super) fn choose(
        &mut self,
        model: &Model,
        loras: &[LoraChoice],
        prompts: [&str; 2],
    ) -> Result<(Chosen, Vec<String>)> {
        let mut warnings = Vec::new();
        let mut chosen = Chosen::default();
        for LoraChoice { name, strength, high_noise } in loras {
            if *high_noise {
                warnings.push(format!(
                    "LoRA {name}: is for a network of high noise levels, which {} does not have; left out",
                    model.info().family.name()
                ));
                continue;
            }
            let folder = self.folders.loras.as_deref().ok_or_else(|| {
                Error::request(format!("LoRA {name}: there is no folder of LoRAs"))
                    .hint("name it with --lora-model-dir")
            })?;
            let path = tags::find(folder, name, self.folders.any_lora_path)?;
            let opened = self.loras.get(&path, |file| Lora::open(file, model));
            let (lora, new) = opened.map_err(|e| self.folders.told(e, folder, name))?;
            let report = lora.report();
            if new {
                tracing::info!("LoRA {report}");
            }
            if let Some(first) = report.unfit.first() {
                let count = report.unfit.len();
                warnings.push(format!("LoRA {name}: {count} of {} layers do not fit: {first}", report.layers));
            }
            match chosen.loras.iter_mut().find(|(other, _)| Arc::ptr_eq(other, &lora)) {
                Some((_, sum)) => *sum += strength,
                None => chosen.loras.push((lora, *strength)),
            }
        }
        chosen.embeddings = self.named_in(model, prompts, &mut warnings)?;
        Ok((chosen, warnings))
    }

    /// The embeddings whose names are in the prompts. One that is not for the model is left as a word.
    fn named_in(
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
struct Opened<T>(Vec<(PathBuf, Stamp, Arc<T>)>);

/// When a file was changed, and its size.
type Stamp = (Option<SystemTime>, u64);

impl<T> Opened<T> {
    /// What `open` makes of a file, and whether it was opened now: a file that has changed is opened again.
    fn get(&mut self, path: &Path, open: impl FnOnce(&Arc<Checkpoint>) -> Result<T>) -> Result<(Arc<T>, bool)> {
        let named = |e| Error::io(path, e);
        let real = path.canonicalize().map_err(named)?;
        let meta = fs::metadata(&real).map_err(named)?;
        let stamp = (meta.modified().ok(), meta.len());
        let known = self.0.iter().position(|(p, ..)| *p == real).map(|at| self.0.remove(at));
        let (value, new) = match known.filter(|(_, s, _)| *s == stamp) {
            Some((.., value)) => (value, false),
            None => (Arc::new(open(&Arc::new(Checkpoint::open(path)?))?), true),
        };
        if self.0.len() >= KEPT {
            self.0.remove(0);
        }
        self.0.push((real, stamp, value.clone()));
        Ok((value, new))
    }
}
