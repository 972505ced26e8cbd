//! The engine: a model on a device, and the path of one request through it.

mod adapters;
mod control;
mod evaluate;
mod facts;
mod importance;
mod networks;
mod opened;
mod places;
mod prepared;
mod steps;
mod tiny;

use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sd_core::convert::needs_importance;
use sd_core::device::add_rpc_server;
use sd_core::residency::MemoryReport;
use sd_core::{Bytes, CancelToken, Cuts, DType, Error, Precision, Result, Trace};
use sd_io::{Checkpoint, Importance};
use sd_models::{Files, Info, Model, Part, VaeFormat};

use crate::files::ModelFiles;
use crate::generate::{self, Models, Networks, Watch};
use crate::guidance::Prediction;
use crate::input::InputImage;
use crate::observer::Observer;
use crate::placement::{Machine, Written};
use crate::preview::PreviewMode;
use crate::request::{Defaults, GeneratedImage, ImageRequest};
use crate::resolve::Given;
use crate::upscale::{UpscaleOptions, Upscaler};
pub use adapters::LoraMode;
pub use networks::PartOutline;
use networks::{Loaded, Options};
use places::Placed;

/// What to load and where to run it.
#[derive(Debug, Clone, Default)]
pub struct EngineBuilder {
    model: Option<ModelFile>,
    parts: BTreeMap<Part, PathBuf>,
    refiner: Option<ModelFile>,
    control_nets: Vec<PathBuf>,
    vae_format: Option<VaeFormat>,
    cache: Option<PathBuf>,
    upscaler: Option<PathBuf>,
    hires_upscaler: Option<PathBuf>,
    taesd: Option<PathBuf>,
    taesd_preview_only: bool,
    written: Written,
    eager: bool,
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

    /// These files, beside those that were given already.
    #[must_use]
    pub fn files(mut self, files: ModelFiles) -> EngineBuilder {
        self.model = files.model.map(ModelFile::Path).or(self.model);
        self.parts.extend(files.parts);
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

    /// A T5-XXL text encoder that replaces the checkpoint's.
    #[must_use]
    pub fn t5xxl(self, path: impl Into<PathBuf>) -> EngineBuilder {
        self.part(Part::T5, path)
    }

    /// Whose latents the autoencoder makes, where they are not those of the family.
    #[must_use]
    pub fn vae_format(mut self, format: VaeFormat) -> EngineBuilder {
        self.vae_format = Some(format);
        self
    }

    /// A checkpoint that takes over from the model for the last part of the noise, such as SDXL's refiner. See
    /// [`ImageRequest::refiner_switch`].
    #[must_use]
    pub fn refiner(mut self, path: impl Into<PathBuf>) -> EngineBuilder {
        self.refiner = Some(ModelFile::Path(path.into()));
        self
    }

    /// An upscaler that makes pictures larger where requests ask for it, see [`ImageRequest::upscale`].
    #[must_use]
    pub fn upscaler(mut self, path: impl Into<PathBuf>) -> EngineBuilder {
        self.upscaler = Some(path.into());
        self
    }

    /// A ControlNet beside those that were given already; requests follow it by [`ImageRequest::controls`].
    #[must_use]
    pub fn control_net(mut self, path: impl Into<PathBuf>) -> EngineBuilder {
        self.control_nets.push(path.into());
        self
    }

    /// Where more ControlNets are, which requests name by [`crate::ControlChoice::net`]. Those of the latest requests stay open.
    #[must_use]
    pub fn control_net_folder(mut self, path: impl Into<PathBuf>) -> EngineBuilder {
        self.options.folders.controls = Some(path.into());
        self
    }

    /// A tiny autoencoder, which decodes and encodes in place of the model's, and shows previews.
    #[must_use]
    pub fn taesd(mut self, path: impl Into<PathBuf>) -> EngineBuilder {
        self.taesd = Some(path.into());
        self
    }

    /// Whether the tiny autoencoder shows previews alone. Default false.
    #[must_use]
    pub fn taesd_preview_only(mut self, only: bool) -> EngineBuilder {
        self.taesd_preview_only = only;
        self
    }

    /// The upscaler of second passes, if it is another, see [`crate::HiresUpscaler::Model`].
    #[must_use]
    pub fn hires_upscaler(mut self, path: impl Into<PathBuf>) -> EngineBuilder {
        self.hires_upscaler = Some(path.into());
        self
    }

    fn part(mut self, part: Part, path: impl Into<PathBuf>) -> EngineBuilder {
        self.parts.insert(part, path.into());
        self
    }

    /// The device to compute on, by its name in [`sd_core::Device::all`], the beginning of one, `cpu` or `gpu`; replaces
    /// [`EngineBuilder::backend`].
    #[must_use]
    pub fn device(self, name: impl Into<String>) -> EngineBuilder {
        self.backend(name)
    }

    /// Which devices compute: a list, separated by commas, of `device` for all modules, `module=device`, or
    /// `module=device&device` to divide one. Default: see [`EngineBuilder::auto_fit`].
    #[must_use]
    pub fn backend(mut self, list: impl Into<String>) -> EngineBuilder {
        self.written.backend = list.into();
        self
    }

    /// Where weights are between uses: a list as for [`EngineBuilder::backend`] of devices, `cpu` for main memory, and
    /// `disk`. Default: the device that computes.
    #[must_use]
    pub fn params_backend(mut self, list: impl Into<String>) -> EngineBuilder {
        self.written.params_backend = list.into();
        self
    }

    /// How several devices share a module, `layer` or `row`: a list as for [`EngineBuilder::backend`]. None of ggml's devices
    /// divides rows, so that they share layers either way.
    #[must_use]
    pub fn split_mode(mut self, list: impl Into<String>) -> EngineBuilder {
        self.written.split_mode = list.into();
        self
    }

    /// How many GiB of each device may be used: a number for all but the processor, or `device=number`, separated by
    /// commas. Negative leaves so much of what is free when the engine is built; 0, the default, sets no limit.
    #[must_use]
    pub fn max_vram(mut self, list: impl Into<String>) -> EngineBuilder {
        self.written.max_vram = list.into();
        self
    }

    /// Whether places are found for modules and weights where neither [`EngineBuilder::backend`] nor
    /// [`EngineBuilder::params_backend`] says any. Default true; else all is on the first GPU, or the processor.
    #[must_use]
    pub fn auto_fit(mut self, on: bool) -> EngineBuilder {
        self.written.auto_fit = on;
        self
    }

    /// Whether weights are loaded when the engine is built. Default false.
    #[must_use]
    pub fn eager_load(mut self, on: bool) -> EngineBuilder {
        self.eager = on;
        self
    }

    /// Whether the weights of the next segment are loaded while one computes. Default true; results do not depend on it.
    #[must_use]
    pub fn prefetch(mut self, on: bool) -> EngineBuilder {
        self.options.memory.prefetch = on;
        self
    }

    /// Whether networks that do not fit are computed in segments. Default true; results do not depend on it.
    #[must_use]
    pub fn segmented(mut self, on: bool) -> EngineBuilder {
        self.options.memory.segmented = on;
        self
    }

    /// Who records what is loaded, computed and let go on devices, and when.
    #[must_use]
    pub fn trace(mut self, trace: Arc<Trace>) -> EngineBuilder {
        self.options.memory.trace = Some(trace);
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

    /// Keeps weights that [`EngineBuilder::weight_type`] quantises in files of this folder, so that later engines need not
    /// convert them again. Results do not depend on it.
    #[must_use]
    pub fn cache_folder(mut self, path: impl Into<PathBuf>) -> EngineBuilder {
        self.cache = Some(path.into());
        self
    }

    /// What the factors of products are on the processor, if it can multiply bf16. Default: [`Precision::Auto`], bf16
    /// where weights take 16 bits or less.
    #[must_use]
    pub fn precision(mut self, precision: Precision) -> EngineBuilder {
        self.options.precision = precision;
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

    /// Where the files of LoRAs are. With it, `<lora:name:strength>` in a prompt are tags.
    #[must_use]
    pub fn lora_folder(mut self, path: impl Into<PathBuf>) -> EngineBuilder {
        self.options.folders.loras = Some(path.into());
        self
    }

    /// Whether names of LoRAs may be absolute or lead out of the folder. Default false, as wants who takes prompts from
    /// others.
    #[must_use]
    pub fn any_lora_path(mut self, allow: bool) -> EngineBuilder {
        self.options.folders.any_lora_path = allow;
        self
    }

    /// Whether a LoRA that changes nothing of the model is left out with a warning; without this it is an error.
    pub fn allow_unused_loras(mut self, allow: bool) -> EngineBuilder {
        self.options.folders.unused_loras = allow;
        self
    }

    /// Where the changes of LoRAs are made. Default: beside weights that are quantised, in all others.
    #[must_use]
    pub fn lora_mode(mut self, mode: LoraMode) -> EngineBuilder {
        self.options.lora_mode = mode;
        self
    }

    /// Where the files of embeddings are. Their names, without extensions, are words in prompts that stand for vectors.
    #[must_use]
    pub fn embedding_folder(mut self, path: impl Into<PathBuf>) -> EngineBuilder {
        self.options.folders.embeddings = Some(path.into());
        self
    }

    /// Whether to collect what weights of text encoders and of the diffusion network are multiplied by, see
    /// [`Engine::importance`]. Default false; pictures do not depend on it.
    #[must_use]
    pub fn collect_importance(mut self, collect: bool) -> EngineBuilder {
        self.options.collects = collect;
        self
    }

    /// Opens the files, finds the family and checks every name and shape. Weights are read when they are needed.
    ///
    /// # Errors
    /// A file cannot be read or is malformed, the family is unknown, a tensor is missing or misshapen, the device
    /// does not exist, weights cannot have the chosen type, a list of places is malformed.
    pub fn build(self) -> Result<Engine> {
        if let Some(dtype) = self.options.weight_type.filter(|d| !d.is_weight_type()) {
            return Err(Error::request(format!("weight_type: weights cannot be converted to {dtype}")));
        }
        if let Some(dtype) = self.options.weight_type.filter(|d| needs_importance(*d)) {
            let e = Error::request(format!("weight_type: {dtype} wants to know which columns matter"));
            return Err(e.hint("convert the model with -M convert and --imat-in first, or choose another type"));
        }
        if let Some(folder) = self.options.folders.all().find(|folder| !folder.is_dir()) {
            return Err(Error::request(format!("{} is not a folder", folder.display())));
        }
        let wishes = self.written.read()?;
        let machine = Machine::here();
        wishes.check(&machine)?;
        let diffusion = self.parts.get(&Part::Diffusion).map(|p| stem(p));
        let name = self.model.as_ref().map(ModelFile::name).or(diffusion).unwrap_or_default();
        let open = |(part, path): (&Part, &PathBuf)| Ok((*part, Arc::new(Checkpoint::open(path)?)));
        let files = Files {
            model: self.model.as_ref().map(ModelFile::open).transpose()?,
            parts: self.parts.iter().map(open).collect::<Result<_>>()?,
            vae_format: self.vae_format,
            ..Files::default()
        };
        let mut model = Model::open(&files)?;
        if let Some(folder) = &self.cache {
            let prepared = prepared::prepared(folder, &model, self.options.types())?;
            model = Model::open(&Files { prepared, ..files.clone() })?;
        }
        if let Some(prediction) = self.options.prediction {
            model.set_prediction(facts::to_model(prediction)?);
        }
        let report = model.dry_run()?;
        let refiner = self.refiner.as_ref().map(|file| open_refiner(file, &files, &model)).transpose()?;
        let models: Vec<&Model> = std::iter::once(&model).chain(&refiner).collect();
        let enlarges = self.upscaler.is_some() || self.hires_upscaler.is_some();
        let placed = Placed::new(&wishes, &machine, &models, enlarges, &self.options)?;
        opened::tell(&files, &model, self.options.types(), |part| placed.of(part))?;
        let unused = report
            .unused
            .iter()
            .map(|u| format!("{}: {} tensors such as {}", u.file.display(), u.count, u.example));
        let info = ModelInfo {
            name,
            family: model.info().family.name(),
            device: placed.of(Part::Diffusion)?.main()?.name().to_owned(),
            defaults: defaults(model.info())?,
            unused: unused.collect(),
            control_nets: Vec::new(),
            refiner: self.refiner.as_ref().map(ModelFile::name),
        };
        let open = |model| Loaded::new(model, placed.clone(), refiner_options(&self.options));
        let refiner = refiner.map(open).transpose()?;
        let mut networks = Loaded::new(model, placed, self.options)?;
        if let Some(path) = &self.taesd {
            networks.set_tiny(path, self.taesd_preview_only).map_err(|e| e.context("taesd"))?;
        }
        let mut engine = Engine {
            info,
            networks,
            refiner,
            upscaler: None,
            hires_upscaler: None,
            upscaler_files: [self.upscaler, self.hires_upscaler],
        };
        engine.open_upscalers()?;
        engine.set_control_nets(&self.control_nets)?;
        if self.eager {
            engine.load(&CancelToken::new())?;
        }
        Ok(engine)
    }

    /// The upscaler alone, where it is placed.
    ///
    /// # Errors
    /// None is given, its file cannot be read or holds no upscaler, a list of places is malformed or names no device.
    pub fn open_upscaler(self) -> Result<Upscaler> {
        let path = self.upscaler.ok_or_else(|| Error::request("no upscaler is given"))?;
        let (wishes, machine) = (self.written.read()?, Machine::here());
        Placed::new(&wishes, &machine, &[], true, &self.options)?.upscaler(&path, &self.options)
    }
}

/// The refiner's model. It shares the autoencoder of the model whose latents it finishes.
fn open_refiner(file: &ModelFile, files: &Files, model: &Model) -> Result<Model> {
    let context = |e: Error| e.context("refiner");
    let mut parts = BTreeMap::new();
    if let Some(vae) = files.parts.get(&Part::Autoencoder).or(files.model.as_ref()) {
        parts.insert(Part::Autoencoder, vae.clone());
    }
    let own = Some(file.open().map_err(context)?);
    let files = Files { model: own, parts, vae_format: files.vae_format, ..Files::default() };
    let refiner = Model::open(&files).map_err(context)?;
    refiner.dry_run().map_err(context)?;
    let (own, other) = (model.info().latent, refiner.info().latent);
    if own != other {
        let message = format!("refiner: it denoises latents {other:?}, the model's are {own:?}");
        return Err(Error::request(message).hint("the refiner belongs to another family"));
    }
    Ok(refiner)
}

/// What the user says of the model's prediction and cuts says nothing of the refiner's.
fn refiner_options(options: &Options) -> Options {
    Options { prediction: None, cuts: Cuts::default(), collects: false, ..options.clone() }
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
    /// The names of the ControlNets.
    pub control_nets: Vec<String>,
    /// The refiner's file name without its extension, if there is one.
    pub refiner: Option<String>,
}

/// A model ready to generate. Nothing of a request stays in it but caches that cannot change a result.
pub struct Engine {
    info: ModelInfo,
    networks: Loaded,
    refiner: Option<Loaded>,
    upscaler: Option<Upscaler>,
    hires_upscaler: Option<Upscaler>,
    /// Their files.
    upscaler_files: [Option<PathBuf>; 2],
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

    /// Opens these ControlNets in place of those before, whose memory is freed. Reads headers only.
    ///
    /// # Errors
    /// The model takes none, or a file cannot be read, holds none, or one for another family of models. The ControlNets are
    /// then those before.
    pub fn set_control_nets(&mut self, paths: &[PathBuf]) -> Result<()> {
        self.info.control_nets = self.networks.set_controls(paths)?;
        Ok(())
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
        let mut images = Vec::new();
        self.draw(request, observer, cancel, &mut |image| images.push(image))?;
        Ok(images)
    }

    /// As [`Engine::generate`], but keeps no picture: `observer` sees each when it is finished.
    ///
    /// # Errors
    /// As [`Engine::generate`].
    pub fn generate_each(
        &mut self,
        request: &ImageRequest,
        observer: &mut dyn Observer,
        cancel: &CancelToken,
    ) -> Result<()> {
        self.draw(request, observer, cancel, &mut drop)
    }

    fn draw(
        &mut self,
        request: &ImageRequest,
        observer: &mut dyn Observer,
        cancel: &CancelToken,
        each: &mut dyn FnMut(GeneratedImage),
    ) -> Result<()> {
        self.reconnect()?;
        if self.networks.settle_prediction(cancel)? {
            self.info.defaults = defaults(self.networks.info())?;
        }
        if request.preview.is_some_and(|p| p.mode == PreviewMode::Tae) && !self.networks.shows_tiny() {
            return Err(Error::request("preview: there is no tiny autoencoder to show tae by")
                .hint("give the file of one with --taesd"));
        }
        let controls = self.networks.choose_controls(&request.controls)?;
        let mut resolved = request.resolve(&Given {
            model: &self.info.name,
            defaults: &self.info.defaults,
            facts: self.networks.facts(),
            refiner: self.info.refiner.as_deref(),
            upscaler: self.upscaler.as_ref(),
            hires_upscaler: self.hires_upscaler.is_some() || self.upscaler.is_some(),
            tags: self.networks.reads_tags(),
            controls: &controls,
            random_seed: random_seed(),
        })?;
        let prompts = [resolved.prompt.as_str(), &resolved.first.negative_prompt];
        let mut refiner = self.refiner.as_mut().filter(|_| resolved.first.refiner.is_some());
        let warnings = self.networks.choose(refiner.as_deref_mut(), &resolved.loras, prompts)?;
        resolved.warnings.extend(warnings);
        let refiner = refiner.map(|networks| networks as &mut dyn Networks);
        let mut watch = Watch { observer, cancel, preview: request.preview };
        let models = Models {
            net: &mut self.networks,
            refiner,
            upscaler: self.upscaler.as_mut(),
            hires: self.hires_upscaler.as_mut(),
        };
        let drawn = generate::run(models, request, &resolved, &mut watch, each);
        self.networks.finish();
        if let Some(refiner) = &mut self.refiner {
            refiner.finish();
        }
        drawn
    }

    /// Where each part would run for a request, and how much memory it would take there. Reads no weights and computes
    /// nothing.
    ///
    /// # Errors
    /// A wrong field, or a part for which there is not enough memory.
    pub fn outline(&mut self, request: &ImageRequest) -> Result<Vec<PartOutline>> {
        let controls = self.networks.choose_controls(&request.controls)?;
        let resolved = request.resolve(&Given {
            model: &self.info.name,
            defaults: &self.info.defaults,
            facts: self.networks.facts(),
            refiner: self.info.refiner.as_deref(),
            upscaler: self.upscaler.as_ref(),
            hires_upscaler: self.hires_upscaler.is_some() || self.upscaler.is_some(),
            tags: self.networks.reads_tags(),
            controls: &controls,
            random_seed: 0,
        })?;
        let (evaluation, encodes) = generate::outline(request, &resolved, self.networks.facts())?;
        self.networks.outline(&evaluation, encodes, request.vae_tiling)
    }

    /// What is in the memory of which device, and where the weights of each part are.
    pub fn memory(&self) -> MemoryReport {
        self.networks.manager().memory()
    }

    /// Loads the weights of all parts, as far as there is room.
    ///
    /// # Errors
    /// A weight cannot be read, a device has no room for the least that must be on it, or `cancel` was cancelled.
    pub fn load(&mut self, cancel: &CancelToken) -> Result<()> {
        self.networks.load(cancel)?;
        self.refiner.as_mut().map_or(Ok(()), |refiner| refiner.load(cancel))
    }

    /// Connects again to remote workers that were lost. What was on them is loaded anew.
    fn reconnect(&mut self) -> Result<()> {
        let lost = self.networks.lost_workers();
        if lost.is_empty() && !self.networks.is_closed() {
            return Ok(());
        }
        let mut all: Vec<&mut Loaded> = std::iter::once(&mut self.networks).chain(&mut self.refiner).collect();
        (self.upscaler, self.hires_upscaler) = (None, None);
        // Nothing of before may be used once a worker is there again.
        all.iter_mut().for_each(|networks| networks.close());
        for endpoint in lost {
            add_rpc_server(&endpoint)?;
            tracing::info!("connected again to the RPC worker {endpoint}");
        }
        all.into_iter().try_for_each(Loaded::reopen)?;
        self.open_upscalers()
    }

    fn open_upscalers(&mut self) -> Result<()> {
        let open =
            |path: &Option<PathBuf>| path.as_deref().map(|path| self.networks.open_upscaler(path)).transpose();
        let [upscaler, hires] = &self.upscaler_files;
        (self.upscaler, self.hires_upscaler) = (open(upscaler)?, open(hires)?);
        Ok(())
    }

    /// What weights were multiplied by in all requests so far, under the names that the networks use; `None` if
    /// [`EngineBuilder::collect_importance`] was not asked for it. Nothing is collected of a refiner.
    pub fn importance(&self) -> Option<&Importance> {
        self.networks.importance()
    }

    /// Makes a picture larger with the engine's upscaler. `cancel` stops it within one operation of the network.
    ///
    /// # Errors
    /// There is no upscaler, or as for [`Upscaler::upscale`].
    pub fn upscale(
        &mut self,
        image: &InputImage,
        options: UpscaleOptions,
        observer: &mut dyn Observer,
        cancel: &CancelToken,
    ) -> Result<InputImage> {
        let upscaler = self.upscaler.as_mut().ok_or_else(|| {
            Error::request("upscale: there is no upscaler").hint("give the file of one with --upscale-model")
        })?;
        upscaler.upscale(image, options, [false; 2], observer, cancel)
    }

    /// How many times larger the engine's upscaler makes a picture, if there is one.
    pub fn upscaler_scale(&self) -> Option<u32> {
        self.upscaler.as_ref().map(Upscaler::scale)
    }

    /// Frees the memory that weights, workspaces and kept conditioning take; the next request loads them again.
    pub fn release(&mut self) {
        self.networks.release();
        if let Some(refiner) = &mut self.refiner {
            refiner.release();
        }
        for upscaler in self.upscaler.iter_mut().chain(&mut self.hires_upscaler) {
            upscaler.release();
        }
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
