//! A model's networks on a device.

use std::collections::BTreeMap;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;

use sd_core::exec::Runner;
use sd_core::{
    CancelToken, Cuts, DType, Device, Error, Precision, Program, Result, RunnerOptions, Tensor, TypePolicy,
    WeightSource, convert,
};
use sd_models::{Component, Conditioning, Evaluation, Info, Model, Part, Prompt, Step};

use super::adapters::{Chosen, Folders, Library, LoraMode};
use super::control::Control;
use super::evaluate::{Evaluator, On};
use super::facts::facts;
use super::importance::Collector;
use super::steps::Steps;
use super::tiny::Tiny;
use crate::cache::BlockCache;
use crate::generate::{Call, Coding, Facts, Moments, Networks};
use crate::guidance::Prediction;
use crate::input::InputImage;
use crate::observer::Stage;
use crate::picture::to_image;
use crate::preview::{PreviewMode, projected};
use crate::request::LoraChoice;

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
}

/// The networks of a model with what they keep between runs: weights, lowered programs, conditioning.
pub(super) struct Loaded {
    model: Model,
    device: Arc<Device>,
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
    controls: Vec<Control>,
    collector: Collector,
}

impl Options {
    /// The types that weights have in memory.
    pub(super) fn types(&self) -> TypePolicy {
        self.weight_type.map_or(TypePolicy::Stored, TypePolicy::Convert)
    }
}

type Runners = BTreeMap<Part, Runner>;
/// A [`Prompt`], and what changes its meaning.
type Key = (String, bool, usize, [usize; 2], Chosen);

impl Loaded {
    pub(super) fn new(model: Model, device: Arc<Device>, options: Options) -> Result<Loaded> {
        let facts = facts(model.info(), options.prediction)?;
        let runner = |part: Part| runner_options(&options, part == Part::Diffusion);
        let runners = model
            .components()
            .map(|c| Ok((c.part(), Runner::new(device.clone(), c.source(), runner(c.part()))?)))
            .collect::<Result<_>>()?;
        Ok(Loaded {
            library: Library::new(options.folders.clone()),
            chosen: Chosen::default(),
            precise_vae: None,
            tiny: None,
            prompts: Vec::new(),
            evaluator: Evaluator::default(),
            controls: Vec::new(),
            collector: if options.collects { Collector::on() } else { Collector::default() },
            model,
            device,
            options,
            facts,
            runners,
        })
    }

    /// Opens these ControlNets in place of those before, whose memory is freed. Returns their names.
    pub(super) fn set_controls(&mut self, paths: &[PathBuf]) -> Result<Vec<String>> {
        let options = runner_options(&self.options, false);
        let open = |path: &PathBuf| Control::open(path, &self.model, self.device.clone(), options.clone());
        self.controls = paths.iter().map(open).collect::<Result<_>>()?;
        Ok(self.controls.iter().map(|c| c.name().to_owned()).collect())
    }

    /// What weights were multiplied by, if that was to be collected.
    pub(super) fn importance(&self) -> Option<&sd_io::Importance> {
        self.collector.found()
    }

    /// Takes the tiny autoencoder of a file.
    pub(super) fn set_tiny(&mut self, path: &Path, preview_only: bool) -> Result<()> {
        let latents = [self.facts.channels, self.facts.pixels];
        let threads = self.options.threads;
        self.tiny = Some(Tiny::open(path, self.device.clone(), threads, latents, preview_only)?);
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

    /// From now on runs with these LoRAs, and with the embeddings that the prompts name, in place of those before.
    /// Returns warnings.
    pub(super) fn choose(&mut self, loras: &[LoraChoice], prompts: [&str; 2]) -> Result<Vec<String>> {
        let (chosen, warnings) = self.library.choose(&self.model, loras, prompts)?;
        if chosen != self.chosen {
            let adapt = |c: &Component| {
                let types = runner_options(&self.options, c.part() == Part::Diffusion).types;
                Ok((c.part(), chosen.adapt(c, self.options.lora_mode, types)?))
            };
            let adapted = self.model.components().map(adapt).collect::<Result<Vec<_>>>()?;
            for (part, adapted) in adapted {
                runner(&mut self.runners, part)?.set_adapters(adapted);
            }
            self.precise_vae = None;
            self.chosen = chosen;
        }
        Ok(warnings)
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
        Steps { model: &self.model, runner, piece, circular: coding.circular, cancel }.run(steps, x)
    }

    /// The runner of the autoencoder, with f32 weights if `precise`.
    fn autoencoder(&mut self, precise: bool) -> Result<&mut Runner> {
        if !precise {
            return runner(&mut self.runners, Part::Autoencoder);
        }
        if self.precise_vae.is_none() {
            let types = TypePolicy::Convert(DType::F32);
            let options = RunnerOptions { types, ..runner_options(&self.options, false) };
            let component = self.model.component(Part::Autoencoder)?;
            let mut runner = Runner::new(self.device.clone(), component.source(), options)?;
            runner.set_adapters(self.chosen.adapt(component, self.options.lora_mode, types)?);
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
            has_room("width, height", stage, need, self.device.name(), self.device.memory().total)?;
        }
        for control in self.controls.iter_mut().filter(|_| evaluation.control) {
            let need = control.workspace(&evaluation)?;
            has_room("width, height", Stage::Denoise, need, self.device.name(), self.device.memory().total)?;
        }
        Ok(())
    }

    fn fits_whole(&mut self, evaluation: &Evaluation, encodes: bool) -> Result<bool> {
        let [h, w] = evaluation.size;
        let mut programs = Vec::new();
        // A tiny autoencoder needs little.
        if !self.tiny.as_ref().is_some_and(Tiny::decodes) {
            programs.push(self.model.decode_program(1, h, w, evaluation.circular)?);
        }
        // The largest need most.
        let largest = evaluation.references.iter().max_by_key(|[h, w]| h * w);
        for size in encodes.then_some(&evaluation.size).into_iter().chain(largest) {
            let [h, w] = size.map(|side| side * self.facts.pixels);
            programs.push(self.model.encode_program(1, h, w, evaluation.circular)?);
        }
        let total = self.device.memory().total;
        for program in programs {
            if total > 0 && self.workspace(Part::Autoencoder, &program)? > total {
                return Ok(false);
            }
        }
        Ok(true)
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
            let values = convert::to_f32(m.dtype, &source.bytes(name).ok()?, m.shape.elements()).ok()?;
            Some(values.iter().all(|v| v.is_finite()))
        });
        finite == Some(false)
    };
    let origin = source.origin(source.names().into_iter().find(broken)?);
    Some(format!("{} ({})", origin.name, origin.file))
}

/// Numbered cuts are those of the diffusion network.
fn runner_options(options: &Options, diffusion: bool) -> RunnerOptions {
    let types = options.types();
    let cuts = match &options.cuts {
        Cuts::At(_) if !diffusion => Cuts::None,
        cuts => cuts.clone(),
    };
    RunnerOptions {
        threads: options.threads,
        types,
        cuts,
        precision: options.precision,
        ..RunnerOptions::default()
    }
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
