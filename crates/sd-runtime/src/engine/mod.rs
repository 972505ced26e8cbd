//! The engine: a model on a device, and the path of one request through it.

mod evaluate;
mod facts;
mod networks;

use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sd_core::{Bytes, CancelToken, Cuts, DType, Device, Error, Result};
use sd_io::Checkpoint;
use sd_models::{Files, Info, Model, Part};

use crate::generate::{self, Networks, Watch};
use crate::guidance::Prediction;
use crate::observer::Observer;
use crate::request::{Defaults, GeneratedImage, ImageRequest};
use crate::resolve::Given;
use networks::{Loaded, Options};

/// What to load and where to run it.
#[derive(Debug, Clone, Default)]
pub struct EngineBuilder {
    model: Option<ModelFile>,
    parts: BTreeMap<Part, PathBuf>,
    device: String,
    options: Options,
}

#[derive(Debug, Clone)]
enum ModelFile {
    Path(PathBuf),
    Bytes { name: String, bytes: &'static [u8] },
}

impl EngineBuilder {
    /// The checkpoint: a file or a folder.
    #[must_use]
    pub fn model(mut self, path: impl Into<PathBuf>) -> EngineBuilder {
        self.model = Some(ModelFile::Path(path.into()));
        self
    }

    /// A checkpoint that is part of the program; `name` is its file name in messages and parameters.
    #[must_use]
    pub fn model_bytes(mut self, name: impl Into<String>, bytes: &'static [u8]) -> EngineBuilder {
        self.model = Some(ModelFile::Bytes { name: name.into(), bytes });
        self
    }

    /// A diffusion network that replaces the checkpoint's.
    #[must_use]
    pub fn diffusion_model(self, path: impl Into<PathBuf>) -> EngineBuilder {
        self.part(Part::Diffusion, path)
    }

    /// An autoencoder that replaces the checkpoint's.
    #[must_use]
    pub fn vae(self, path: impl Into<PathBuf>) -> EngineBuilder {
        self.part(Part::Autoencoder, path)
    }

    /// A CLIP-L text encoder that replaces the checkpoint's.
    #[must_use]
    pub fn clip_l(self, path: impl Into<PathBuf>) -> EngineBuilder {
        self.part(Part::ClipL, path)
    }

    /// An OpenCLIP bigG text encoder that replaces the checkpoint's.
    #[must_use]
    pub fn clip_g(self, path: impl Into<PathBuf>) -> EngineBuilder {
        self.part(Part::ClipG, path)
    }

    fn part(mut self, part: Part, path: impl Into<PathBuf>) -> EngineBuilder {
        self.parts.insert(part, path.into());
        self
    }

    /// The device to compute on, by its name in [`Device::all`], the beginning of one, `cpu` or `gpu`. Default: the
    /// first GPU, else the processor.
    #[must_use]
    pub fn device(mut self, name: impl Into<String>) -> EngineBuilder {
        self.device = name.into();
        self
    }

    /// CPU threads; 0 for one per physical core, the default. Results do not depend on it.
    #[must_use]
    pub fn threads(mut self, threads: usize) -> EngineBuilder {
        self.options.threads = threads;
        self
    }

    /// The type weight matrices have in memory. Default: as stored.
    #[must_use]
    pub fn weight_type(mut self, dtype: DType) -> EngineBuilder {
        self.options.weight_type = Some(dtype);
        self
    }

    /// What the network predicts, where the checkpoint does not say or says it wrong.
    #[must_use]
    pub fn prediction(mut self, prediction: Prediction) -> EngineBuilder {
        self.options.prediction = Some(prediction);
        self
    }

    /// Where graphs are cut. Results do not depend on it.
    #[must_use]
    pub fn cuts(mut self, cuts: Cuts) -> EngineBuilder {
        self.options.cuts = cuts;
        self
    }

    /// Opens the files, finds the family and checks every name and shape. Weights are read when they are needed.
    ///
    /// # Errors
    /// A file cannot be read or is malformed, the family is unknown, a tensor is missing or misshapen, the device
    /// does not exist, weights cannot have the chosen type.
    pub fn build(self) -> Result<Engine> {
        if let Some(dtype) = self.options.weight_type.filter(|d| !d.is_weight_type()) {
            return Err(Error::request(format!("weight_type: weights cannot be converted to {dtype}")));
        }
        let diffusion = self.parts.get(&Part::Diffusion).map(|p| stem(p));
        let name = self.model.as_ref().map(ModelFile::name).or(diffusion).unwrap_or_default();
        let open = |(part, path): (&Part, &PathBuf)| Ok((*part, Arc::new(Checkpoint::open(path)?)));
        let files = Files {
            model: self.model.as_ref().map(ModelFile::open).transpose()?,
            parts: self.parts.iter().map(open).collect::<Result<_>>()?,
            ..Files::default()
        };
        let mut model = Model::open(&files)?;
        if let Some(prediction) = self.options.prediction {
            model.set_prediction(facts::to_model(prediction)?);
        }
        let report = model.dry_run()?;
        let device = Device::find(&self.device)?;
        let unused = report
            .unused
            .iter()
            .map(|u| format!("{}: {} tensors such as {}", u.file.display(), u.count, u.example));
        let info = ModelInfo {
            name,
            family: model.info().family.name(),
            device: device.name().to_owned(),
            defaults: defaults(model.info())?,
            unused: unused.collect(),
        };
        Ok(Engine { info, networks: Loaded::new(model, device, self.options)? })
    }
}

impl ModelFile {
    fn name(&self) -> String {
        match self {
            ModelFile::Path(path) => stem(path),
            ModelFile::Bytes { name, .. } => stem(Path::new(name)),
        }
    }

    fn open(&self) -> Result<Arc<Checkpoint>> {
        let checkpoint = match self {
            ModelFile::Path(path) => Checkpoint::open(path)?,
            ModelFile::Bytes { name, bytes } => Checkpoint::from_bytes(name, Bytes::new(Arc::new(*bytes)))?,
        };
        Ok(Arc::new(checkpoint))
    }
}

fn stem(path: &Path) -> String {
    path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default()
}

fn defaults(info: &Info) -> Result<Defaults> {
    let d = &info.defaults;
    let small = |n: usize| u32::try_from(n).map_err(|_| Error::internal(format!("a default of {n}")));
    Ok(Defaults {
        width: small(d.size[0])?,
        height: small(d.size[1])?,
        steps: small(d.steps)?,
        cfg_scale: d.cfg,
        guidance: info.guidance.then_some(d.guidance),
        sampler: d.sampler.parse()?,
        scheduler: d.schedule.parse()?,
        clip_skip: small(d.clip_skip)?,
    })
}

/// What a loaded model is.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelInfo {
    /// The file's name without its extension.
    pub name: String,
    /// The model family, as "SD 1.x".
    pub family: &'static str,
    /// The device it runs on.
    pub device: String,
    /// What the model suggests where a request is silent.
    pub defaults: Defaults,
    /// What the files hold that nothing reads, a line per group of tensors.
    pub unused: Vec<String>,
}

/// A model ready to generate. Nothing of a request stays in it but caches that cannot change a result.
pub struct Engine {
    info: ModelInfo,
    networks: Loaded,
}

impl Engine {
    /// Starts describing an engine.
    pub fn builder() -> EngineBuilder {
        EngineBuilder::default()
    }

    /// What was loaded.
    pub fn info(&self) -> &ModelInfo {
        &self.info
    }

    /// Makes the pictures of a request, each computed alone: image `i` is what a request with `seed + i` gives.
    /// `cancel` stops it within one operation of a network.
    ///
    /// # Errors
    /// A wrong field, which the message names; a value that became NaN or infinite, with the stage; a device
    /// failure; cancellation.
    pub fn generate(
        &mut self,
        request: &ImageRequest,
        observer: &mut dyn Observer,
        cancel: &CancelToken,
    ) -> Result<Vec<GeneratedImage>> {
        if self.networks.settle_prediction(cancel)? {
            self.info.defaults = defaults(self.networks.info())?;
        }
        let resolved = request.resolve(&Given {
            model: &self.info.name,
            defaults: &self.info.defaults,
            facts: self.networks.facts(),
            refiner: None,
            random_seed: random_seed(),
        })?;
        let mut images = Vec::new();
        let mut watch = Watch { observer, cancel };
        generate::run(&mut self.networks, None, request, &resolved, &mut watch, &mut |image| images.push(image))?;
        Ok(images)
    }

    /// Frees the memory that weights, workspaces and kept conditioning take; the next request loads them again.
    pub fn release(&mut self) {
        self.networks.release();
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("info", &self.info).finish_non_exhaustive()
    }
}

/// A seed of 31 bits, so that every program that reads it back can hold it. The standard library keys its hashers
/// from the system's randomness.
fn random_seed() -> i64 {
    (RandomState::new().build_hasher().finish() & 0x7FFF_FFFF) as i64
}
