//! A model's networks on a device.

use std::collections::BTreeMap;
use std::sync::Arc;

use sd_core::exec::Runner;
use sd_core::{
    CancelToken, Cuts, DType, Device, Error, Program, Result, RunnerOptions, Tensor, TypePolicy, WeightSource,
    convert,
};
use sd_models::{Conditioning, Evaluation, Info, Model, Noise, Part, Prompt};

use crate::guidance::Prediction;
use crate::observer::Stage;
use crate::schedule::SigmaTable;
use crate::txt2img::{Latents, Networks};

/// How many prompts' conditioning is kept.
const KEPT_PROMPTS: usize = 16;

/// How networks run.
#[derive(Debug, Clone, Default)]
pub(super) struct Options {
    pub(super) threads: usize,
    pub(super) weight_type: Option<DType>,
    pub(super) prediction: Option<Prediction>,
    pub(super) cuts: Cuts,
}

/// The networks of a model with what they keep between runs: weights, lowered programs, conditioning.
pub(super) struct Loaded {
    model: Model,
    device: Arc<Device>,
    options: Options,
    latents: Latents,
    /// One for each of the model's components.
    runners: Runners,
    /// The autoencoder with f32 weights, once it was needed.
    precise_vae: Option<Runner>,
    /// Conditioning by prompt, the latest last.
    prompts: Vec<(Key, Conditioning)>,
    /// The network of the last evaluation.
    network: Option<(Evaluation, Program)>,
}

type Runners = BTreeMap<Part, Runner>;
/// A [`Prompt`].
type Key = (String, bool, usize, [usize; 2]);

impl Loaded {
    pub(super) fn new(model: Model, device: Arc<Device>, options: Options) -> Result<Loaded> {
        let latents = latents(model.info())?;
        let runner = |part: Part| runner_options(&options, part == Part::Diffusion);
        let runners = model
            .components()
            .map(|c| Ok((c.part(), Runner::new(device.clone(), c.source(), runner(c.part()))?)))
            .collect::<Result<_>>()?;
        let (prompts, network) = (Vec::new(), None);
        Ok(Loaded { model, device, options, latents, runners, precise_vae: None, prompts, network })
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
        self.latents = latents(self.model.info())?;
        Ok(true)
    }

    /// Frees weights, workspaces and conditioning.
    pub(super) fn release(&mut self) {
        for runner in self.runners.values_mut() {
            runner.release_weights();
            runner.release_workspace();
        }
        self.precise_vae = None;
        self.prompts.clear();
    }

    /// Evaluates the diffusion network once for conditions that have the same number of tokens.
    fn evaluate(
        &mut self,
        x: &Tensor,
        t: f64,
        conditions: &[&Conditioning],
        cancel: &CancelToken,
    ) -> Result<Vec<Tensor>> {
        let batch = conditions.len();
        let [_, c, h, w] = dims(x)?;
        let context = Tensor::concat_batch(&conditions.iter().map(|c| &c.context).collect::<Vec<_>>())?;
        let vectors: Vec<&Tensor> = conditions.iter().filter_map(|c| c.vector.as_ref()).collect();
        let vector = if vectors.is_empty() { None } else { Some(Tensor::concat_batch(&vectors)?) };
        let tokens = context.shape().dim(1);
        let key = Evaluation { batch, size: [h, w], tokens, ..Evaluation::default() };
        if self.network.as_ref().is_none_or(|(k, _)| *k != key) {
            let program = self.model.diffusion_program(&key)?;
            self.network = Some((key, program));
        }
        let Some((_, program)) = &self.network else { return Err(Error::internal("no diffusion program")) };
        let timesteps = Tensor::f32(&[batch], vec![t as f32; batch])?;
        let x = Tensor::concat_batch(&vec![x; batch])?;
        let mut inputs = vec![("x", &x), ("timesteps", &timesteps), ("context", &context)];
        inputs.extend(vector.iter().map(|v| ("vector", v)));
        let out = only(runner(&mut self.runners, Part::Diffusion)?.run(program, &inputs, cancel)?)?;
        out.values().chunks(c * h * w).map(|part| Tensor::f32(&[1, c, h, w], part.to_vec())).collect()
    }
}

fn runner(runners: &mut Runners, part: Part) -> Result<&mut Runner> {
    runners.get_mut(&part).ok_or_else(|| Error::internal(format!("no runner for the {}", part.name())))
}

impl Networks for Loaded {
    fn latents(&self) -> &Latents {
        &self.latents
    }

    fn fits(&mut self, latent: [usize; 4], conditions: usize) -> Result<()> {
        let [_, _, h, w] = latent;
        let total = self.device.memory().total;
        let tokens = self.info().tokens;
        let evaluation = Evaluation { batch: conditions, size: [h, w], tokens, ..Evaluation::default() };
        let network = self.model.diffusion_program(&evaluation)?;
        let decoder = self.model.decode_program(1, h, w, [false; 2])?;
        for (stage, part, program) in
            [(Stage::Denoise, Part::Diffusion, network), (Stage::Decode, Part::Autoencoder, decoder)]
        {
            let steps = runner(&mut self.runners, part)?.measure(&program)?;
            let need = steps.iter().map(|s| s.workspace).max().unwrap_or(0);
            has_room(stage, need, self.device.name(), total)?;
        }
        Ok(())
    }

    fn condition(&mut self, prompt: &Prompt<'_>, cancel: &CancelToken) -> Result<Conditioning> {
        let key: Key = (prompt.text.to_owned(), prompt.negative, prompt.clip_skip, prompt.size);
        if let Some(at) = self.prompts.iter().position(|(k, _)| *k == key) {
            let entry = self.prompts.remove(at);
            let conditioning = entry.1.clone();
            self.prompts.push(entry);
            return Ok(conditioning);
        }
        tracing::debug!(prompt = prompt.text, "text encoding");
        let runners = &mut self.runners;
        let conditioning = self
            .model
            .condition(prompt, &mut |part, program, inputs| runner(runners, part)?.run(program, inputs, cancel))?;
        if conditioning.is_finite() {
            self.prompts.push((key, conditioning.clone()));
            if self.prompts.len() > KEPT_PROMPTS {
                self.prompts.remove(0);
            }
        }
        Ok(conditioning)
    }

    fn predict(
        &mut self,
        x: &Tensor,
        t: f64,
        conditions: &[&Conditioning],
        cancel: &CancelToken,
    ) -> Result<Vec<Tensor>> {
        let mut shapes = conditions.iter().map(|c| c.context.shape());
        let first = shapes.next();
        if shapes.all(|s| Some(s) == first) {
            return self.evaluate(x, t, conditions, cancel);
        }
        let mut out = Vec::new();
        for condition in conditions {
            out.append(&mut self.evaluate(x, t, &[condition], cancel)?);
        }
        Ok(out)
    }

    fn decode(&mut self, latent: &Tensor, precise: bool, cancel: &CancelToken) -> Result<Tensor> {
        let [_, _, h, w] = dims(latent)?;
        let program = self.model.decode_program(1, h, w, [false; 2])?;
        let mut latent = latent.clone();
        self.model.info().latent.to_autoencoder(&mut latent);
        let runner = if precise {
            if self.precise_vae.is_none() {
                let types = TypePolicy::Convert(DType::F32);
                let options = RunnerOptions { types, ..runner_options(&self.options, false) };
                let source = self.model.component(Part::Autoencoder)?.source();
                self.precise_vae = Some(Runner::new(self.device.clone(), source, options)?);
            }
            self.precise_vae.as_mut().ok_or_else(|| Error::internal("no f32 autoencoder"))?
        } else {
            runner(&mut self.runners, Part::Autoencoder)?
        };
        only(runner.run(&program, &[("latent", &latent)], cancel)?)
    }

    fn broken_weight(&self, stage: Stage) -> Option<String> {
        let runs = |part: Part| match part {
            Part::Diffusion => stage == Stage::Denoise,
            Part::Autoencoder => stage == Stage::Decode,
            Part::ClipL | Part::ClipG | Part::T5 => stage == Stage::TextEncode,
        };
        self.model.components().filter(|c| runs(c.part())).find_map(|c| broken_weight(&*c.source()))
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

/// The model's name for a prediction.
pub(super) fn to_model(prediction: Prediction) -> Result<sd_models::Prediction> {
    match prediction {
        Prediction::Eps => Ok(sd_models::Prediction::Epsilon),
        Prediction::V => Ok(sd_models::Prediction::V),
        Prediction::Flow => Ok(sd_models::Prediction::Flow),
    }
}

/// Noise is assumed to be predicted until [`Loaded::settle_prediction`].
fn latents(info: &Info) -> Result<Latents> {
    let prediction = match info.prediction {
        Some(sd_models::Prediction::Epsilon) | None => Prediction::Eps,
        Some(sd_models::Prediction::V) => Prediction::V,
        Some(sd_models::Prediction::Flow) => Prediction::Flow,
    };
    let pixels = info.latent.compression.max(1);
    let table = match &info.noise {
        Noise::ScaledLinear => SigmaTable::scaled_linear(),
        Noise::ZeroTerminalSnr => SigmaTable::zero_terminal_snr(),
        Noise::AlphasCumprod(alphas) => SigmaTable::from_alphas_cumprod(alphas)?,
        Noise::Continuous { min, max } => SigmaTable::continuous(*min, *max),
        Noise::Flow { .. } => return Err(Error::unsupported("noise levels of a flow")),
    };
    Ok(Latents {
        channels: info.latent.channels,
        pixels,
        multiple: (info.size_multiple / pixels).max(1),
        prediction,
        table,
    })
}

/// Numbered cuts are those of the diffusion network.
fn runner_options(options: &Options, diffusion: bool) -> RunnerOptions {
    let types = options.weight_type.map_or(TypePolicy::Stored, TypePolicy::Convert);
    let cuts = match &options.cuts {
        Cuts::At(_) if !diffusion => Cuts::None,
        cuts => cuts.clone(),
    };
    RunnerOptions { threads: options.threads, types, cuts }
}

/// An error if a stage needs more than the device has; `total` is 0 where it does not say.
fn has_room(stage: Stage, need: usize, device: &str, total: usize) -> Result<()> {
    if total == 0 || need <= total {
        return Ok(());
    }
    let gib = |bytes: usize| bytes as f64 / (1u64 << 30) as f64;
    let (stage, need, total) = (stage.name(), gib(need), gib(total));
    let message = format!("width, height: {stage} needs {need:.1} GiB of workspace, {device} has {total:.1} GiB");
    Err(Error::request(message).hint("ask for a smaller picture"))
}

fn dims(x: &Tensor) -> Result<[usize; 4]> {
    x.shape().array().ok_or_else(|| Error::internal(format!("a latent is {}", x.shape())))
}

fn only(outputs: Vec<Tensor>) -> Result<Tensor> {
    let mut outputs = outputs.into_iter();
    outputs.next().ok_or_else(|| Error::internal("a program without a result"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_needs_room() {
        assert!(has_room(Stage::Decode, 3 << 30, "CUDA0", 3 << 30).is_ok());
        assert!(has_room(Stage::Decode, 3 << 30, "CUDA0", 0).is_ok());
        let e = has_room(Stage::Decode, 3 << 29, "CUDA0", 1 << 30).unwrap_err();
        let want = "width, height: decoding needs 1.5 GiB of workspace, CUDA0 has 1.0 GiB";
        assert!(e.is_request() && e.to_string().starts_with(want), "{e}");
    }
}
