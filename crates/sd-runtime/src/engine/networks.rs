//! A model's networks on a device.

use std::collections::BTreeMap;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;

use sd_core::device::DeviceKind;
use sd_core::exec::Runner;
use sd_core::{
    CancelToken, Cuts, DType, Error, Home, Manager, ManagerOptions, Precision, Program, Result, RunnerOptions,
    Tensor, TypePolicy, WeightSource, convert,
};
use sd_models::{Component, Conditioning, Evaluation, Info, Model, Part, Prompt, Step};

use super::adapters::{self, Chosen, Fitting, Folders, Library, LoraMode, Loras};
use super::control::{self, Control};
use super::evaluate::{Evaluator, On};
use super::facts::facts;
use super::importance::Collector;
use super::places::{Placed, size};
use super::steps::{Steps, made};
use super::tiny::Tiny;
use crate::cache::BlockCache;
use crate::generate::{Call, Coding, Facts, Moments, Networks, fitting};
use crate::guidance::Prediction;
use crate::input::InputImage;
use crate::observer::Stage;
use crate::picture::to_image;
use crate::placement::Module;
use crate::preview::{PreviewMode, projected};
use crate::request::{ControlChoice, LoraChoice, VaeTiling};
use crate::upscale::Upscaler;

/// How many prompts' conditioning is kept.
const KEPT_PROMPTS: usize = 16;

/// How networks run.
#[derive(Debug, Clone, Default)]
pub(super) struct Options {
    pub(super) threads: usize,
    pub(super) weight_type: Option<DType>,
    pub(super) precision: Precision,
    pub(super) prediction: Option<Prediction>,
    pub(super) cuts: Cuts,
    pub(super) folders: Folders,
    pub(super) lora_mode: LoraMode,
    /// Whether to collect what weights are multiplied by.
    pub(super) collects: bool,
    pub(super) memory: ManagerOptions,
}

/// The networks of a model with what they keep between runs: weights, lowered programs, conditioning.
pub(super) struct Loaded {
    model: Model,
    placed: Placed,
    options: Options,
    facts: Facts,
    /// One for each of the model's components.
    runners: Runners,
    /// The autoencoder with f32 weights, once it was needed.
    precise_vae: Option<Runner>,
    tiny: Option<Tiny>,
    /// Conditioning by prompt, the latest last.
    prompts: Vec<(Key, Conditioning)>,
    library: Library,
    /// What the runners have now.
    chosen: Chosen,
    evaluator: Evaluator,
    control_files: Vec<PathBuf>,
    controls: Vec<Control>,
    /// The file of the tiny autoencoder, and whether it shows previews alone.
    tiny_file: Option<(PathBuf, bool)>,
    collector: Collector,
    /// Whether text encoders ran since the diffusion network did.
    encoded: bool,
}

impl Options {
    /// The types that weights have in memory.
    pub(super) fn types(&self) -> TypePolicy {
        self.weight_type.map_or(TypePolicy::Stored, TypePolicy::Convert)
    }
}

/// What one part takes for a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartOutline {
    /// Which.
    pub part: &'static str,
    /// The devices that compute it, with `&` between.
    pub device: String,
    /// Where its weights are between uses: a device's name, `ram` or `disk`.
    pub home: String,
    /// Bytes of its weights in the types they have in memory.
    pub weights: u64,
    /// Bytes of intermediate values at once.
    pub workspace: usize,
    /// In how many pieces it is computed.
    pub segments: usize,
}

type Runners = BTreeMap<Part, Runner>;
/// A [`Prompt`], and what changes its meaning.
type Key = (String, bool, usize, [usize; 2], Chosen);

impl Loaded {
    pub(super) fn new(model: Model, placed: Placed, options: Options) -> Result<Loaded> {
        let facts = facts(model.info(), options.prediction)?;
        let mut loaded = Loaded {
            library: Library::new(options.folders.clone()),
            chosen: Chosen::default(),
            precise_vae: None,
            tiny: None,
            prompts: Vec::new(),
            evaluator: Evaluator::default(),
            control_files: Vec::new(),
            controls: Vec::new(),
            tiny_file: None,
            collector: if options.collects { Collector::on() } else { Collector::default() },
            encoded: false,
            model,
            placed,
            options,
            facts,
            runners: Runners::new(),
        };
        loaded.reopen()?;
        Ok(loaded)
    }

    /// An upscaler in its place.
    pub(super) fn open_upscaler(&self, path: &Path) -> Result<Upscaler> {
        self.placed.upscaler(path, &self.options)
    }

    /// Endpoints of remote workers that were lost.
    pub(super) fn lost_workers(&self) -> Vec<String> {
        let mut lost: Vec<String> =
            self.placed.lost().iter().map(|device| device.description().to_owned()).collect();
        lost.sort_unstable();
        lost.dedup();
        lost
    }

    /// Drops everything that is on devices.
    pub(super) fn close(&mut self) {
        self.runners.clear();
        self.precise_vae = None;
        self.tiny = None;
        self.controls.clear();
        self.chosen = Chosen::default();
    }

    /// Whether [`Loaded::reopen`] is due.
    pub(super) fn is_closed(&self) -> bool {
        self.runners.is_empty()
    }

    /// Opens a runner for each part, with nothing loaded.
    pub(super) fn reopen(&mut self) -> Result<()> {
        let open = |c: &Component| Ok((c.part(), open(c, &self.placed, &self.options, self.options.types())?));
        self.runners = self.model.components().map(open).collect::<Result<_>>()?;
        let files = std::mem::take(&mut self.control_files);
        self.set_controls(&files)?;
        if let Some((path, preview_only)) = self.tiny_file.take() {
            self.set_tiny(&path, preview_only)?;
        }
        Ok(())
    }

    /// Opens these ControlNets in place of those before, whose memory is freed. Returns their names.
    pub(super) fn set_controls(&mut self, paths: &[PathBuf]) -> Result<Vec<String>> {
        let (device, options) = self.placed.runner(Module::ControlNet, &self.options)?;
        let open = |path: &PathBuf| Control::open(path, &self.model, device.clone(), options.clone());
        let given = paths.iter().map(open).collect::<Result<Vec<Control>>>();
        let given = given.map_err(|e| e.context("control_net"))?;
        let names = given.iter().map(|c| c.name().to_owned()).collect();
        self.controls.retain(|c| !c.is_given());
        self.controls.splice(0..0, given);
        self.control_files = paths.to_vec();
        Ok(names)
    }

    /// The places and names of the ControlNets that a request follows. Files of the folder are opened.
    pub(super) fn choose_controls(&mut self, choices: &[ControlChoice]) -> Result<Vec<(usize, String)>> {
        if choices.is_empty() {
            return Ok(Vec::new());
        }
        let (device, options) = self.placed.runner(Module::ControlNet, &self.options)?;
        let make = |path: &Path| Control::open(path, &self.model, device.clone(), options.clone());
        control::choose(&mut self.controls, choices, self.options.folders.controls.as_deref(), make)
    }

    /// What weights were multiplied by, if that was to be collected.
    pub(super) fn importance(&self) -> Option<&sd_io::Importance> {
        self.collector.found()
    }

    /// Takes the tiny autoencoder of a file.
    pub(super) fn set_tiny(&mut self, path: &Path, preview_only: bool) -> Result<()> {
        let latents = [self.facts.channels, self.facts.pixels];
        let (device, options) = self.placed.runner(Module::Vae, &self.options)?;
        self.tiny = Some(Tiny::open(path, device, options, latents, preview_only)?);
        self.tiny_file = Some((path.to_owned(), preview_only));
        Ok(())
    }

    /// Whether there is a tiny autoencoder that can show latents.
    pub(super) fn shows_tiny(&self) -> bool {
        self.tiny.as_ref().is_some_and(Tiny::shows)
    }

    /// Facts about the model.
    pub(super) fn info(&self) -> &Info {
        self.model.info()
    }

    /// Tries what the network predicts if nothing says so; whether it did.
    pub(super) fn settle_prediction(&mut self, cancel: &CancelToken) -> Result<bool> {
        if self.info().prediction.is_some() {
            return Ok(false);
        }
        let runners = &mut self.runners;
        let prediction = self
            .model
            .try_prediction(&mut |part, program, inputs| runner(runners, part)?.run(program, inputs, cancel))?;
        tracing::info!("the checkpoint does not say what it predicts; a try says {prediction:?}");
        self.model.set_prediction(prediction);
        self.facts = facts(self.model.info(), self.options.prediction)?;
        Ok(true)
    }

    /// Whether prompts can name LoRAs.
    pub(super) fn reads_tags(&self) -> bool {
        self.options.folders.loras.is_some()
    }

    /// From now on runs with these LoRAs, and with the embeddings that the prompts name, in place of those before; `refiner`
    /// likewise. Returns warnings.
    pub(super) fn choose(
        &mut self,
        refiner: Option<&mut Loaded>,
        loras: &[LoraChoice],
        prompts: [&str; 2],
    ) -> Result<Vec<String>> {
        let mut all: Vec<(&'static str, &mut Loaded)> = vec![("model", self)];
        all.extend(refiner.map(|refiner| ("refiner", refiner)));
        let mut models: Vec<Fitting<'_>> = all.iter_mut().map(|(name, loaded)| loaded.fitting(name)).collect();
        let (fitted, mut warnings) = adapters::fit(&mut models, loras)?;
        for ((_, loaded), loras) in all.into_iter().zip(fitted) {
            loaded.take(loras, prompts, &mut warnings)?;
        }
        Ok(warnings)
    }

    fn fitting(&mut self, name: &'static str) -> Fitting<'_> {
        Fitting { name, library: &mut self.library, model: &self.model }
    }

    /// Runs with these LoRAs, which are fitted to the model, and the prompts' embeddings.
    fn take(&mut self, loras: Loras, prompts: [&str; 2], warnings: &mut Vec<String>) -> Result<()> {
        let embeddings = self.library.named_in(&self.model, prompts, warnings)?;
        let chosen = Chosen { loras, embeddings };
        if chosen != self.chosen {
            let types = self.options.types();
            let adapt = |c: &Component| Ok((c.part(), chosen.adapt(c, self.lora_mode(c.part())?, types)?));
            let adapted = self.model.components().map(adapt).collect::<Result<Vec<_>>>()?;
            for (part, adapted) in adapted {
                runner(&mut self.runners, part)?.set_adapters(adapted);
            }
            self.precise_vae = None;
            self.chosen = chosen;
        }
        Ok(())
    }

    /// Where the changes of LoRAs to a part are made. Those of weights that come to the device again and again are not
    /// made every time.
    fn lora_mode(&self, part: Part) -> Result<LoraMode> {
        let comes_and_goes = self.placed.of(part)?.home.is_some();
        Ok(match self.options.lora_mode {
            LoraMode::Auto if comes_and_goes => LoraMode::AtRuntime,
            mode => mode,
        })
    }

    /// Who keeps the accounts of memory.
    pub(super) fn manager(&self) -> &Arc<Manager> {
        self.placed.manager()
    }

    /// Loads weights of all parts, as far as there is room.
    pub(super) fn load(&mut self, cancel: &CancelToken) -> Result<()> {
        let side = self.facts.multiple;
        let e = Evaluation { batch: 1, size: [side; 2], tokens: self.info().tokens, ..Evaluation::default() };
        let skip = self.info().defaults.clip_skip;
        let mut programs = vec![
            (Part::Diffusion, self.model.diffusion_program(&e)?),
            (Part::Autoencoder, self.model.decode_program(1, side, side, [false; 2])?),
        ];
        for part in self.model.components().map(Component::part).filter(|p| is_encoder(*p)) {
            programs.push((part, self.model.text_program(part, 1, skip)?));
        }
        for (part, program) in programs {
            runner(&mut self.runners, part)?.load(&program, cancel)?;
        }
        Ok(())
    }

    /// What each part takes for such an evaluation. Computes nothing.
    ///
    /// # Errors
    /// A part does not fit.
    pub(super) fn outline(
        &mut self,
        evaluation: &Evaluation,
        encodes: bool,
        tiling: Option<VaeTiling>,
    ) -> Result<Vec<PartOutline>> {
        let coding = fitting(self, evaluation, encodes, tiling)?;
        let autoencoder = self.coding_takes(evaluation, encodes, coding)?;
        let evaluation = Evaluation { tokens: self.info().tokens, ..evaluation.clone() };
        let mut programs = vec![(Part::Diffusion, self.model.diffusion_program(&evaluation)?)];
        let skip = self.info().defaults.clip_skip;
        for part in self.model.components().map(Component::part).filter(|p| is_encoder(*p)) {
            programs.push((part, self.model.text_program(part, 1, skip)?));
        }
        let mut out = Vec::new();
        for component in self.model.components() {
            let part = component.part();
            let place = self.placed.of(part)?;
            let (weights, _) = size(component, &self.options.types())?;
            let runner = runner(&mut self.runners, part)?;
            let (mut workspace, mut segments) = if part == Part::Autoencoder { autoencoder } else { (0, 0) };
            for (_, program) in programs.iter().filter(|(p, _)| *p == part) {
                let steps = runner.measure(program)?;
                segments = segments.max(steps.len());
                workspace = steps.iter().map(|s| s.workspace).fold(workspace, usize::max);
            }
            let devices = place.devices.iter().map(|d| d.name()).collect::<Vec<_>>().join("&");
            out.push(PartOutline {
                part: part.name(),
                home: match &place.home {
                    None => devices.clone(),
                    Some(Home::Device(device)) => device.name().to_owned(),
                    Some(Home::Ram) => "ram".to_owned(),
                    Some(Home::File) => "disk".to_owned(),
                },
                device: devices,
                weights,
                workspace,
                segments,
            });
        }
        Ok(out)
    }

    /// Ends a request: frees workspaces, and weights on devices where their home is elsewhere.
    pub(super) fn finish(&mut self) {
        self.runners.values_mut().chain(&mut self.precise_vae).for_each(Runner::finish);
        self.controls.iter_mut().for_each(Control::finish);
        self.tiny.iter_mut().for_each(Tiny::finish);
    }

    /// Frees the text encoders' place, if there is not room for all: on devices their manager does that when memory is
    /// short; main memory has none.
    fn leave_text(&mut self) {
        for (_, runner) in self.runners.iter_mut().filter(|(part, _)| is_encoder(**part)) {
            runner.finish();
            let of_processor = runner.device().kind() == DeviceKind::Cpu && runner.memory().0 > 0;
            if of_processor && self.placed.lacks_ram_for_network() {
                runner.release_weights();
            }
        }
    }

    /// Frees weights, workspaces and conditioning.
    pub(super) fn release(&mut self) {
        for runner in self.runners.values_mut() {
            runner.release_weights();
            runner.release_workspace();
        }
        self.precise_vae = None;
        if let Some(tiny) = &mut self.tiny {
            tiny.release();
        }
        self.prompts.clear();
        self.controls.iter_mut().for_each(Control::release);
    }

    /// The most workspace that a segment of a program takes.
    fn workspace(&mut self, part: Part, program: &Program) -> Result<usize> {
        let segments = runner(&mut self.runners, part)?.measure(program)?;
        Ok(segments.iter().map(|s| s.workspace).max().unwrap_or(0))
    }

    /// What an autoencoder's steps make of `x`, in pieces of as many pixels as `piece` has latent positions.
    fn in_steps(
        &mut self,
        steps: &[Step],
        x: Tensor,
        piece: [usize; 2],
        coding: Coding,
        cancel: &CancelToken,
    ) -> Result<Tensor> {
        let piece = piece.map(|side| side.saturating_mul(self.facts.pixels));
        self.autoencoder(coding.precise)?;
        let runner = match (&mut self.precise_vae, coding.precise) {
            (Some(precise), true) => precise,
            _ => runner(&mut self.runners, Part::Autoencoder)?,
        };
        Steps { model: &self.model, runner, piece, circular: coding.circular }.run(steps, x, cancel)
    }

    /// The workspace of the autoencoder in bytes, and its segments, where a latent of the evaluation's size is decoded in
    /// that way, and its references and, if `encodes`, a picture of that size are encoded.
    fn coding_takes(&mut self, evaluation: &Evaluation, encodes: bool, coding: Coding) -> Result<(usize, usize)> {
        let Loaded { model, runners, facts, tiny, .. } = self;
        let runner = runner(runners, Part::Autoencoder)?;
        let device = runner.device().clone();
        let total = device.memory().total;
        let circular = evaluation.circular;
        let (mut workspace, mut segments) = (0, 0);
        let mut take = |stage, runner: &mut Runner, program: &Program| {
            let steps = runner.measure(program)?;
            let need = steps.iter().map(|s| s.workspace).max().unwrap_or(0);
            (workspace, segments) = (workspace.max(need), segments.max(steps.len()));
            has_room("width, height", stage, need, device.name(), total)
        };
        let piece = coding.piece.map(|piece| piece.map(|side| side.saturating_mul(facts.pixels)));
        // A tiny autoencoder needs little.
        if !tiny.as_ref().is_some_and(Tiny::decodes) {
            let [h, w] = evaluation.size;
            match piece {
                None => take(Stage::Decode, runner, &model.decode_program(1, h, w, circular)?)?,
                Some(piece) => {
                    let (start, steps) = model.decode_steps(h, w, circular)?;
                    take(Stage::Decode, runner, &start)?;
                    let take = |runner: &mut Runner, program: &Program| take(Stage::Decode, runner, program);
                    Steps { model, runner, piece, circular }.check(&steps, made(&start)?, take)?;
                }
            }
        }
        // The largest need most.
        let largest = evaluation.references.iter().max_by_key(|[h, w]| h * w);
        for size in encodes.then_some(&evaluation.size).into_iter().chain(largest) {
            let [h, w] = size.map(|side| side * facts.pixels);
            let mut take = |runner: &mut Runner, program: &Program| take(Stage::Encode, runner, program);
            match piece {
                None => take(runner, &model.encode_program(1, h, w, circular)?)?,
                Some(piece) => {
                    let mut walk = Steps { model, runner, piece, circular };
                    let [_, c, h, w] = walk.check(&model.encode_steps()?, [1, 3, h, w], &mut take)?;
                    take(walk.runner, &model.encode_end_program([c, h, w], circular)?)?;
                }
            }
        }
        Ok((workspace, segments))
    }

    /// The runner of the autoencoder, with f32 weights if `precise`.
    fn autoencoder(&mut self, precise: bool) -> Result<&mut Runner> {
        if !precise {
            return runner(&mut self.runners, Part::Autoencoder);
        }
        if self.precise_vae.is_none() {
            let types = TypePolicy::Convert(DType::F32);
            let component = self.model.component(Part::Autoencoder)?;
            let mut runner = open(component, &self.placed, &self.options, types)?;
            runner.set_adapters(self.chosen.adapt(component, self.lora_mode(Part::Autoencoder)?, types)?);
            self.precise_vae = Some(runner);
        }
        self.precise_vae.as_mut().ok_or_else(|| Error::internal("no f32 autoencoder"))
    }
}

fn runner(runners: &mut Runners, part: Part) -> Result<&mut Runner> {
    runners.get_mut(&part).ok_or_else(|| Error::internal(format!("no runner for the {}", part.name())))
}

impl Networks for Loaded {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn fits(&mut self, evaluation: &Evaluation) -> Result<()> {
        let evaluation = Evaluation { tokens: self.info().tokens, ..evaluation.clone() };
        let [h, w] = evaluation.size;
        // What an autoencoder does not do in pieces.
        let (start, _) = self.model.decode_steps(h, w, evaluation.circular)?;
        let programs = [
            (Stage::Denoise, Part::Diffusion, self.model.diffusion_program(&evaluation)?),
            (Stage::Decode, Part::Autoencoder, start),
        ];
        for (stage, part, program) in programs {
            let need = self.workspace(part, &program)?;
            let device = runner(&mut self.runners, part)?.device();
            has_room("width, height", stage, need, device.name(), device.memory().total)?;
        }
        for control in self.controls.iter_mut().filter(|c| evaluation.control && c.is_followed()) {
            let need = control.workspace(&evaluation)?;
            let device = control.device();
            has_room("width, height", Stage::Denoise, need, device.name(), device.memory().total)?;
        }
        Ok(())
    }

    fn fits_coding(&mut self, evaluation: &Evaluation, encodes: bool, coding: Coding) -> Result<()> {
        self.coding_takes(evaluation, encodes, coding).map(drop)
    }

    fn condition(&mut self, prompt: &Prompt<'_>, cancel: &CancelToken) -> Result<Conditioning> {
        let text = prompt.text.to_owned();
        let key: Key = (text, prompt.negative, prompt.clip_skip, prompt.size, self.chosen.of_text());
        if let Some(at) = self.prompts.iter().position(|(k, _)| *k == key) {
            let entry = self.prompts.remove(at);
            let conditioning = entry.1.clone();
            self.prompts.push(entry);
            return Ok(conditioning);
        }
        tracing::debug!(prompt = prompt.text, "text encoding");
        self.encoded = true;
        let (runners, collector) = (&mut self.runners, &mut self.collector);
        let conditioning =
            self.model.condition_with(prompt, &self.chosen.embeddings(), &mut |part, program, inputs| {
                collector.run(part, runner(runners, part)?, program, inputs, cancel)
            })?;
        if conditioning.is_finite() {
            self.prompts.push((key, conditioning.clone()));
            if self.prompts.len() > KEPT_PROMPTS {
                self.prompts.remove(0);
            }
        }
        Ok(conditioning)
    }

    fn hint(&mut self, net: usize, picture: &Tensor, cancel: &CancelToken) -> Result<Tensor> {
        let pixels = self.facts.pixels;
        let control = self.controls.get_mut(net).ok_or_else(|| Error::internal(format!("no ControlNet {net}")))?;
        control.hint(picture, pixels, cancel)
    }

    fn predict(
        &mut self,
        call: &Call<'_>,
        blocks: Option<&mut BlockCache>,
        cancel: &CancelToken,
    ) -> Result<Vec<Tensor>> {
        if std::mem::take(&mut self.encoded) {
            self.leave_text();
        }
        let (runners, collector) = (&mut self.runners, &mut self.collector);
        let mut run = |part: Part, program: &Program, inputs: &[(&str, &Tensor)]| {
            collector.run(part, runner(runners, part)?, program, inputs, cancel)
        };
        let mut on = On { model: &self.model, run: &mut run, controls: &mut self.controls, blocks, cancel };
        self.evaluator.predict(&mut on, call)
    }

    fn encode(&mut self, picture: &Tensor, coding: Coding, cancel: &CancelToken) -> Result<Moments> {
        if let Some(tiny) = self.tiny.as_mut().filter(|t| t.encodes() && !coding.precise) {
            let mean = tiny.encode(picture, coding.circular, cancel)?;
            let deviation = Tensor::zeros(mean.dims())?;
            return Ok(Moments { mean, deviation });
        }
        let moments = match coding.piece {
            Some(piece) => {
                let steps = self.model.encode_steps()?;
                let x = self.in_steps(&steps, picture.clone(), piece, coding, cancel)?;
                let [_, c, h, w] = dims(&x)?;
                let program = self.model.encode_end_program([c, h, w], coding.circular)?;
                self.autoencoder(coding.precise)?.run(&program, &[("x", &x)], cancel)?
            }
            None => {
                let [_, _, h, w] = dims(picture)?;
                let program = self.model.encode_program(1, h, w, coding.circular)?;
                self.autoencoder(coding.precise)?.run(&program, &[("image", picture)], cancel)?
            }
        };
        let moments = only(moments)?;
        let [_, c, h, w] = dims(&moments)?;
        let (mean, log_variance) = moments.values().split_at(moments.values().len() / 2);
        let latent = self.model.info().latent;
        let mut mean = Tensor::f32(&[1, c / 2, h, w], mean.to_vec())?;
        latent.to_network(&mut mean);
        // The bounds are those of `DiagonalGaussianDistribution` in CompVis' and diffusers' autoencoders.
        let deviation = |v: &f32| latent.scale * (0.5 * v.clamp(-30.0, 20.0)).exp();
        let deviation = Tensor::f32(&[1, c / 2, h, w], log_variance.iter().map(deviation).collect())?;
        Ok(Moments { mean, deviation })
    }

    fn decode(&mut self, latent: &Tensor, coding: Coding, cancel: &CancelToken) -> Result<Tensor> {
        if let Some(tiny) = self.tiny.as_mut().filter(|t| t.decodes() && !coding.precise) {
            return tiny.decode(latent, coding.circular, cancel);
        }
        let [_, _, h, w] = dims(latent)?;
        let mut latent = latent.clone();
        self.model.info().latent.to_autoencoder(&mut latent);
        let Some(piece) = coding.piece else {
            let program = self.model.decode_program(1, h, w, coding.circular)?;
            return only(self.autoencoder(coding.precise)?.run(&program, &[("latent", &latent)], cancel)?);
        };
        let (start, steps) = self.model.decode_steps(h, w, coding.circular)?;
        let x = only(self.autoencoder(coding.precise)?.run(&start, &[("latent", &latent)], cancel)?)?;
        self.in_steps(&steps, x, piece, coding, cancel)
    }

    fn preview(
        &mut self,
        latent: &Tensor,
        mode: PreviewMode,
        circular: [bool; 2],
        cancel: &CancelToken,
    ) -> Result<InputImage> {
        let picture = match (mode, &mut self.tiny) {
            (PreviewMode::Proj, _) => return projected(latent, self.info().latent.scale),
            (PreviewMode::Tae, Some(tiny)) => tiny.decode(latent, circular, cancel)?,
            (PreviewMode::Tae, None) => return Err(Error::internal("no tiny autoencoder")),
            (PreviewMode::Vae, _) => self.decode(latent, Coding { circular, ..Coding::default() }, cancel)?,
        };
        to_image(&picture)
    }

    fn broken_weight(&self, stage: Stage) -> Option<String> {
        let runs = |part: Part| match part {
            Part::Diffusion => stage == Stage::Denoise,
            Part::Autoencoder => matches!(stage, Stage::Encode | Stage::Decode),
            Part::ClipL | Part::ClipG | Part::T5 => stage == Stage::TextEncode,
        };
        let controls = self.controls.iter().map(|c| c.net().source()).filter(|_| stage == Stage::Denoise);
        let parts = self.model.components().filter(|c| runs(c.part())).map(Component::source);
        parts.chain(controls).find_map(|source| broken_weight(&*source))
    }
}

fn broken_weight(source: &dyn WeightSource) -> Option<String> {
    let broken = |name: &&str| {
        let finite = source.meta(name).filter(|m| m.dtype.is_float()).and_then(|m| {
            let values =
                convert::to_f32(m.dtype, &source.bytes(name).ok()?.read().ok()?, m.shape.elements()).ok()?;
            Some(values.iter().all(|v| v.is_finite()))
        });
        finite == Some(false)
    };
    let origin = source.origin(source.names().into_iter().find(broken)?);
    Some(format!("{} ({})", origin.name, origin.file))
}

fn is_encoder(part: Part) -> bool {
    matches!(part, Part::ClipL | Part::ClipG | Part::T5)
}

/// A runner of a part where it is placed. Numbered cuts are those of the diffusion network.
fn open(component: &Component, placed: &Placed, options: &Options, types: TypePolicy) -> Result<Runner> {
    let part = component.part();
    let place = placed.of(part)?;
    let cuts = match &options.cuts {
        Cuts::At(_) if part != Part::Diffusion => Cuts::None,
        cuts => cuts.clone(),
    };
    let options = RunnerOptions {
        threads: options.threads,
        types,
        cuts,
        precision: options.precision,
        module: part.name().to_owned(),
        home: place.home.clone(),
        others: place.others().to_vec(),
        manager: Some(placed.manager().clone()),
    };
    Runner::new(place.main()?.clone(), component.source(), options)
}

/// An error if a stage needs more than the device has; `total` is 0 where it does not say.
fn has_room(field: &str, stage: Stage, need: usize, device: &str, total: usize) -> Result<()> {
    if total == 0 || need <= total {
        return Ok(());
    }
    let gib = |bytes: usize| bytes as f64 / (1u64 << 30) as f64;
    let (stage, need, total) = (stage.name(), gib(need), gib(total));
    let message = format!("{field}: {stage} needs {need:.1} GiB of workspace, {device} has {total:.1} GiB");
    Err(Error::request(message).hint("ask for a smaller picture"))
}

pub(super) fn dims(x: &Tensor) -> Result<[usize; 4]> {
    x.shape().array().ok_or_else(|| Error::internal(format!("a latent is {}", x.shape())))
}

pub(super) fn only(outputs: Vec<Tensor>) -> Result<Tensor> {
    let mut outputs = outputs.into_iter();
    outputs.next().ok_or_else(|| Error::internal("a program without a result"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_needs_room() {
        assert!(has_room("width, height", Stage::Decode, 3 << 30, "CUDA0", 3 << 30).is_ok());
        assert!(has_room("width, height", Stage::Decode, 3 << 30, "CUDA0", 0).is_ok());
        let e = has_room("width, height", Stage::Decode, 3 << 29, "CUDA0", 1 << 30).unwrap_err();
        let want = "width, height: decoding needs 1.5 GiB of workspace, CUDA0 has 1.0 GiB";
        assert!(e.is_request() && e.to_string().starts_with(want), "{e}");
    }
}
