//! A model's networks on a device.

use std::sync::Arc;

use sd_core::exec::Runner;
use sd_core::{
    CancelToken, Cuts, DType, Device, Error, Program, Result, RunnerOptions, Tensor, TypePolicy, convert,
};
use sd_models::{Component, Info, Model};

use crate::guidance::Prediction;
use crate::observer::Stage;
use crate::schedule::SigmaTable;
use crate::txt2img::{Latents, Networks};

/// The most windows of tokens a prompt can have; attention over them grows with the picture.
const MAX_WINDOWS: usize = 64;
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
    text: Runner,
    diffusion: Runner,
    vae: Runner,
    /// The autoencoder with f32 weights, once it was needed.
    precise_vae: Option<Runner>,
    /// Conditioning by prompt and layer, the latest last.
    prompts: Vec<((String, u32), Tensor)>,
    /// The network for the last batch, height, width and tokens.
    network: Option<([usize; 4], Program)>,
}

impl Loaded {
    pub(super) fn new(model: Model, device: Arc<Device>, options: Options) -> Result<Loaded> {
        let latents = latents(model.info(), options.prediction)?;
        let runner = |component: &Component, diffusion: bool| {
            Runner::new(device.clone(), component.source(), runner_options(&options, diffusion))
        };
        let (text, diffusion, vae) =
            (runner(model.text(), false)?, runner(model.diffusion(), true)?, runner(model.vae(), false)?);
        let (prompts, network) = (Vec::new(), None);
        Ok(Loaded { model, device, options, latents, text, diffusion, vae, precise_vae: None, prompts, network })
    }

    /// Frees weights, workspaces and conditioning.
    pub(super) fn release(&mut self) {
        for runner in [&mut self.text, &mut self.diffusion, &mut self.vae] {
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
        conditions: &[&Tensor],
        cancel: &CancelToken,
    ) -> Result<Vec<Tensor>> {
        let batch = conditions.len();
        let [_, c, h, w] = dims(x)?;
        let context = Tensor::concat_batch(conditions)?;
        let key = [batch, h, w, context.shape().dim(1)];
        if self.network.as_ref().is_none_or(|(k, _)| *k != key) {
            let program = self.model.diffusion_program(batch, h, w, key[3])?;
            self.network = Some((key, program));
        }
        let Some((_, program)) = &self.network else { return Err(Error::internal("no diffusion program")) };
        let timesteps = Tensor::f32(&[batch], vec![t as f32; batch])?;
        let x = Tensor::concat_batch(&vec![x; batch])?;
        let inputs = [("x", &x), ("timesteps", &timesteps), ("context", &context)];
        let out = only(self.diffusion.run(program, &inputs, cancel)?)?;
        out.values().chunks(c * h * w).map(|part| Tensor::f32(&[1, c, h, w], part.to_vec())).collect()
    }

    fn component(&self, stage: Stage) -> &Component {
        match stage {
            Stage::TextEncode => self.model.text(),
            Stage::Denoise => self.model.diffusion(),
            Stage::Decode => self.model.vae(),
        }
    }
}

impl Networks for Loaded {
    fn latents(&self) -> &Latents {
        &self.latents
    }

    fn fits(&mut self, latent: [usize; 4], conditions: usize) -> Result<()> {
        let [_, _, h, w] = latent;
        let total = self.device.memory().total;
        let window = self.model.info().window + 2;
        let network = self.model.diffusion_program(conditions, h, w, window)?;
        let decoder = self.model.decode_program(1, h, w)?;
        for (stage, runner, program) in
            [(Stage::Denoise, &mut self.diffusion, network), (Stage::Decode, &mut self.vae, decoder)]
        {
            let need = runner.measure(&program)?.iter().map(|s| s.workspace).max().unwrap_or(0);
            has_room(stage, need, self.device.name(), total)?;
        }
        Ok(())
    }

    fn condition(&mut self, prompt: &str, clip_skip: u32, cancel: &CancelToken) -> Result<Tensor> {
        let known = |(p, skip): &(String, u32)| p == prompt && *skip == clip_skip;
        if let Some(at) = self.prompts.iter().position(|(key, _)| known(key)) {
            let entry = self.prompts.remove(at);
            let context = entry.1.clone();
            self.prompts.push(entry);
            return Ok(context);
        }
        let windows = self.model.tokenise(prompt)?;
        if windows.len() > MAX_WINDOWS {
            let (most, each) = (MAX_WINDOWS * self.model.info().window, self.model.info().window);
            return Err(Error::request(format!("prompt: more than {most} tokens, in windows of {each}")));
        }
        tracing::debug!(windows = windows.len(), prompt, "text encoding");
        let program =
            self.model.text_program(windows.len(), clip_skip as usize).map_err(|e| e.context("clip_skip"))?;
        let ids: Vec<i32> = windows.iter().flat_map(|w| w.ids.iter().copied()).collect();
        let ids = Tensor::i32(&[windows.len(), ids.len() / windows.len().max(1)], ids)?;
        let states = only(self.text.run(&program, &[("ids", &ids)], cancel)?)?;
        let context = self.model.context(&states, &windows)?;
        if context.is_finite() {
            self.prompts.push(((prompt.to_owned(), clip_skip), context.clone()));
            if self.prompts.len() > KEPT_PROMPTS {
                self.prompts.remove(0);
            }
        }
        Ok(context)
    }

    fn predict(&mut self, x: &Tensor, t: f64, conditions: &[&Tensor], cancel: &CancelToken) -> Result<Vec<Tensor>> {
        let same =
            conditions.windows(2).all(|pair| pair.first().map(|c| c.shape()) == pair.last().map(|c| c.shape()));
        if same {
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
        let program = self.model.decode_program(1, h, w)?;
        let mut latent = latent.clone();
        self.model.info().latent.to_autoencoder(&mut latent);
        let runner = if precise {
            if self.precise_vae.is_none() {
                let types = TypePolicy::Convert(DType::F32);
                let options = RunnerOptions { types, ..runner_options(&self.options, false) };
                self.precise_vae = Some(Runner::new(self.device.clone(), self.model.vae().source(), options)?);
            }
            self.precise_vae.as_mut().ok_or_else(|| Error::internal("no f32 autoencoder"))?
        } else {
            &mut self.vae
        };
        only(runner.run(&program, &[("latent", &latent)], cancel)?)
    }

    fn broken_weight(&self, stage: Stage) -> Option<String> {
        let source = self.component(stage).source();
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
}

fn latents(info: &Info, prediction: Option<Prediction>) -> Result<Latents> {
    let stored = match info.prediction {
        sd_models::Prediction::Epsilon => Prediction::Eps,
        sd_models::Prediction::V => Prediction::V,
    };
    let pixels = info.latent.compression.max(1);
    let table = match &info.alphas_cumprod {
        Some(alphas) => SigmaTable::from_alphas_cumprod(alphas)?,
        None => SigmaTable::scaled_linear(),
    };
    Ok(Latents {
        channels: info.latent.channels,
        pixels,
        multiple: (info.size_multiple / pixels).max(1),
        prediction: prediction.unwrap_or(stored),
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
