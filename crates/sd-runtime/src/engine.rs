//! The engine: a model on a device, and the path of one request through it.

use std::path::PathBuf;

use sd_core::{CancelToken, Cuts, DType, Error, Result};

use crate::guidance::Prediction;
use crate::observer::Observer;
use crate::request::{Defaults, GeneratedImage, ImageRequest};

/// What to load and where to run it.
#[derive(Debug, Clone, Default)]
pub struct EngineBuilder {
    model: Option<ModelFile>,
    vae: Option<PathBuf>,
    clip_l: Option<PathBuf>,
    device: Option<String>,
    threads: usize,
    weight_type: Option<DType>,
    prediction: Option<Prediction>,
    cuts: Cuts,
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

    /// An autoencoder that replaces the checkpoint's.
    #[must_use]
    pub fn vae(mut self, path: impl Into<PathBuf>) -> EngineBuilder {
        self.vae = Some(path.into());
        self
    }

    /// A CLIP-L text encoder that replaces the checkpoint's.
    #[must_use]
    pub fn clip_l(mut self, path: impl Into<PathBuf>) -> EngineBuilder {
        self.clip_l = Some(path.into());
        self
    }

    /// The device to compute on, by its name in the device list. Default: the first of them.
    #[must_use]
    pub fn device(mut self, name: impl Into<String>) -> EngineBuilder {
        self.device = Some(name.into());
        self
    }

    /// CPU threads; 0 for one per physical core, the default. Results do not depend on it.
    #[must_use]
    pub fn threads(mut self, threads: usize) -> EngineBuilder {
        self.threads = threads;
        self
    }

    /// The type weight matrices have in memory. Default: as stored.
    #[must_use]
    pub fn weight_type(mut self, dtype: DType) -> EngineBuilder {
        self.weight_type = Some(dtype);
        self
    }

    /// What the network predicts, where the checkpoint does not say or says it wrong.
    #[must_use]
    pub fn prediction(mut self, prediction: Prediction) -> EngineBuilder {
        self.prediction = Some(prediction);
        self
    }

    /// Where graphs are cut. Results do not depend on it.
    #[must_use]
    pub fn cuts(mut self, cuts: Cuts) -> EngineBuilder {
        self.cuts = cuts;
        self
    }

    /// Opens the files, finds the family and checks every name and shape. Weights are read when they are needed.
    ///
    /// # Errors
    /// A file cannot be read or is malformed, the family is unknown, a tensor is missing or misshapen, the device
    /// does not exist.
    pub fn build(self) -> Result<Engine> {
        Err(Error::unsupported("the engine is not connected to the networks yet"))
    }
}

/// What a loaded model is.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelInfo {
    /// The file's name without its extension.
    pub name: String,
    /// The model family, as "SD 1.x".
    pub family: String,
    /// The device it runs on.
    pub device: String,
    /// What the model suggests where a request is silent.
    pub defaults: Defaults,
    /// Names of tensors in the files that nothing uses.
    pub unused: Vec<String>,
}

/// A model ready to generate. Nothing of a request stays in it but caches that cannot change a result.
#[derive(Debug)]
pub struct Engine {
    info: ModelInfo,
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
        let resolved = request.resolve(&self.info.name, &self.info.defaults, 0)?;
        cancel.check()?;
        resolved.warnings.iter().for_each(|w| observer.warning(w));
        Err(Error::unsupported("the engine is not connected to the networks yet"))
    }
}
