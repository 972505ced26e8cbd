//! The path of one request: conditioning, noise, the sampler's loop, the picture.

use sd_core::{CancelToken, Error, Result, Tensor};
use sd_models::{Conditioning, Prompt};

use crate::guidance::{Prediction, classifier_free};
use crate::observer::{Observer, Progress, Stage, StepLatent};
use crate::parameters::Parameters;
use crate::picture;
use crate::request::{GeneratedImage, Resolved};
use crate::rng::Rng;
use crate::sampler::Sampler;
use crate::schedule::{ScheduleInput, SigmaTable};

/// The networks of a model, as the loop sees them.
pub(crate) trait Networks {
    /// What latents look like and how noise relates to timesteps.
    fn latents(&self) -> &Latents;

    /// An error if the device cannot hold what a latent of this shape needs under that many conditions, before
    /// anything is allocated.
    fn fits(&mut self, latent: [usize; 4], conditions: usize) -> Result<()>;

    /// What a prompt conditions the diffusion network on.
    fn condition(&mut self, prompt: &Prompt<'_>, cancel: &CancelToken) -> Result<Conditioning>;

    /// The raw prediction for `x` `[1, c, h, w]` under each of `conditions`.
    fn predict(
        &mut self,
        x: &Tensor,
        t: f64,
        conditions: &[&Conditioning],
        cancel: &CancelToken,
    ) -> Result<Vec<Tensor>>;

    /// The picture `[1, 3, h, w]`, values from -1 to 1, of a latent; `precise` computes with f32 weights.
    fn decode(&mut self, latent: &Tensor, precise: bool, cancel: &CancelToken) -> Result<Tensor>;

    /// The first weight with a NaN or an infinity in the part that runs in `stage`, for messages.
    fn broken_weight(&self, stage: Stage) -> Option<String>;
}

/// The space a model denoises in.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Latents {
    pub(crate) channels: usize,
    /// Pixels to a latent position, along each axis.
    pub(crate) pixels: usize,
    /// Sides of a latent are multiples of this.
    pub(crate) multiple: usize,
    pub(crate) prediction: Prediction,
    pub(crate) table: SigmaTable,
}

/// Who hears about the request, and who may stop it.
pub(crate) struct Watch<'a> {
    pub(crate) observer: &'a mut dyn Observer,
    pub(crate) cancel: &'a CancelToken,
}

/// What a request's images are steered by.
struct Conditions {
    cond: Conditioning,
    /// Absent when guidance is off.
    uncond: Option<Conditioning>,
}

/// Which image of how many.
#[derive(Clone, Copy)]
struct Place {
    image: usize,
    images: usize,
}

impl Place {
    fn report(self, watch: &mut Watch<'_>, stage: Stage, step: usize, total: usize) {
        let Place { image, images } = self;
        watch.observer.progress(Progress { stage, step, total, image, images });
    }
}

/// The images of a request, each computed alone.
pub(crate) fn run(
    net: &mut dyn Networks,
    request: &Resolved,
    watch: &mut Watch<'_>,
) -> Result<Vec<GeneratedImage>> {
    request.warnings.iter().for_each(|w| watch.observer.warning(w));
    let size = picture::Sizes::new(&request.first, net.latents());
    if let Some(message) = size.message() {
        watch.observer.warning(&message);
    }
    net.fits(size.latent(), request.first.conditions())?;
    let images = request.batch_count as usize;
    let conditions = conditions(net, &request.first, Place { image: 0, images }, watch)?;
    let mut done = Vec::new();
    for image in 0..images {
        let parameters = Parameters { seed: request.first.seed + image as i64, ..request.first.clone() };
        let place = Place { image, images };
        let latent = denoise(net, &parameters, &size, &conditions, place, watch)?;
        let pixels = decode(net, &latent, place, watch)?;
        let rgb = size.crop_to_rgb(&pixels)?;
        let image = GeneratedImage { width: parameters.width, height: parameters.height, rgb, parameters };
        watch.observer.image(place.image, &image);
        done.push(image);
    }
    Ok(done)
}

fn conditions(net: &mut dyn Networks, p: &Parameters, place: Place, watch: &mut Watch<'_>) -> Result<Conditions> {
    let stage = Stage::TextEncode;
    let total = p.conditions();
    let mut encode = |done: usize, field: &str, text: &str| {
        place.report(watch, stage, done, total);
        watch.cancel.check()?;
        let size = [p.width as usize, p.height as usize];
        let prompt = Prompt { text, negative: done > 0, clip_skip: p.clip_skip as usize, size };
        let states = net.condition(&prompt, watch.cancel).map_err(|e| e.context(stage.name()))?;
        if states.is_finite() { Ok(states) } else { Err(non_finite(net, stage, &format!("the {field}'s states"))) }
    };
    let cond = encode(0, "prompt", &p.prompt)?;
    let uncond = if total > 1 { Some(encode(1, "negative prompt", &p.negative_prompt)?) } else { None };
    place.report(watch, stage, total, total);
    Ok(Conditions { cond, uncond })
}

fn denoise(
    net: &mut dyn Networks,
    p: &Parameters,
    size: &picture::Sizes,
    conditions: &Conditions,
    place: Place,
    watch: &mut Watch<'_>,
) -> Result<Tensor> {
    let stage = Stage::Denoise;
    let Latents { prediction, table, .. } = net.latents().clone();
    let steps = p.steps as usize;
    let sigmas = p.scheduler.sigmas(&ScheduleInput::new(&table, steps));
    tracing::debug!(seed = p.seed, ?sigmas, "denoising");
    let mut rng = Rng::new(p.rng, p.seed as u64);
    let mut sampler_rng = p.sampler_rng.map(|kind| Rng::new(kind, p.seed as u64));

    let dims = size.latent();
    let first = sigmas.first().copied().unwrap_or(0.0);
    let noise = rng.randn(dims.iter().product());
    let mut x = Tensor::f32(&dims, prediction.noised(&vec![0.0; noise.len()], &noise, first))?;
    let mut sampler = Sampler::new(p.sampler, f64::from(p.eta));
    place.report(watch, stage, 0, steps);
    for (step, level) in (1..).zip(sigmas.windows(2)) {
        let &[from, to] = level else { continue };
        watch.cancel.check()?;
        let mut estimate = |x: &[f32], sigma: f64| {
            let scalings = prediction.scalings(sigma);
            let input = Tensor::f32(&dims, scalings.input(x))?;
            let all: Vec<&Conditioning> = std::iter::once(&conditions.cond).chain(&conditions.uncond).collect();
            let mut out = net.predict(&input, table.timestep(sigma), &all, watch.cancel)?.into_iter();
            let cond = out.next().ok_or_else(|| Error::internal("the network predicted nothing"))?;
            let uncond = out.next();
            let guided =
                classifier_free(cond.into_values(), uncond.as_ref().map(Tensor::values), f64::from(p.cfg_scale));
            Ok(scalings.denoised(x, &guided))
        };
        let mut noise = |n: usize| sampler_rng.as_mut().unwrap_or(&mut rng).randn(n);
        let denoised = sampler
            .step(x.values_mut(), from, to, &mut estimate, &mut noise)
            .map_err(|e| e.context(format!("{} step {step} of {steps}", stage.name())))?;
        let denoised = Tensor::f32(&dims, denoised)?;
        if !denoised.is_finite() || !x.is_finite() {
            return Err(non_finite(net, stage, &format!("the prediction of step {step} of {steps}")));
        }
        watch.observer.step(StepLatent { image: place.image, step, latent: &x, denoised: &denoised });
        place.report(watch, stage, step, steps);
    }
    Ok(x)
}

fn decode(net: &mut dyn Networks, latent: &Tensor, place: Place, watch: &mut Watch<'_>) -> Result<Tensor> {
    let stage = Stage::Decode;
    place.report(watch, stage, 0, 1);
    watch.cancel.check()?;
    let context = |e: Error| e.context(stage.name());
    let mut pixels = net.decode(latent, false, watch.cancel).map_err(context)?;
    if !pixels.is_finite() {
        watch.observer.warning("decoding gave NaN or infinite values; decoding again with f32 weights");
        pixels = net.decode(latent, true, watch.cancel).map_err(context)?;
        if !pixels.is_finite() {
            return Err(non_finite(net, stage, "the picture"));
        }
    }
    place.report(watch, stage, 1, 1);
    Ok(pixels)
}

/// The error that names the stage, and the damaged weight if that is the cause.
fn non_finite(net: &dyn Networks, stage: Stage, what: &str) -> Error {
    let message = format!("{}: NaN or infinite values in {what}", stage.name());
    match net.broken_weight(stage) {
        Some(weight) => Error::non_finite(format!("{message}, because there are such in {weight}")),
        None => Error::non_finite(message).hint("choose a weight type with a wider range, such as f32"),
    }
}

#[cfg(test)]
mod tests;
