//! The sampler's loop.

use sd_core::{Error, Result, Tensor};
use sd_models::{Conditioning, Evaluation};

use super::control::Control;
use super::guide::{Guide, Kind};
use super::pictures::Pictures;
use super::{Branch, Call, Facts, Networks, Place, Watch, non_finite, show};
use crate::cache::{Cache, CacheOptions, Decision};
use crate::guidance::Prediction;
use crate::observer::{Stage, StepLatent};
use crate::parameters::Parameters;
use crate::picture::Sizes;
use crate::rng::Rng;
use crate::sampler::{Estimate, SampleOptions, Sampler, SamplerSetup};
use crate::schedule::{ScheduleInput, SigmaTable, TIMESTEPS};

/// A model with what it is steered by.
pub(super) struct Model<'a> {
    pub(super) net: &'a mut dyn Networks,
    pub(super) conditions: Conditions,
    pub(super) evaluation: Evaluation,
    pub(super) controls: Vec<Control>,
}

/// What the prompts became.
pub(super) struct Conditions {
    pub(super) cond: Conditioning,
    /// Absent when guidance is off.
    pub(super) uncond: Option<Conditioning>,
}

/// The latent of one image, without noise. The second of `models` takes over where the parameters say.
pub(super) fn denoise(
    models: &mut [Model<'_>],
    p: &Parameters,
    size: &Sizes,
    run: &Run,
    pictures: &Pictures,
    place: Place,
    watch: &mut Watch<'_>,
) -> Result<Tensor> {
    let stage = Stage::Denoise;
    let Run { prediction, table, sigmas, options, .. } = run;
    let steps = run.steps();
    tracing::debug!(seed = p.seed, ?sigmas, "denoising");
    let mut rng = Rng::new(p.rng, p.seed as u64);
    let mut sampler_rng = p.sampler_rng.map(|kind| Rng::new(kind, p.seed as u64));

    let dims = size.latent();
    let elements = dims.iter().product();
    // The picture's own draw comes before the noise, as in diffusers.
    let clean = pictures.clean.as_ref().map(|moments| moments.draw(&rng.randn(elements)));
    let from_picture = clean.as_ref().filter(|_| p.strength.is_some());
    let Some(first) = sigmas.first().copied().filter(|_| steps > 0) else {
        return Tensor::f32(&dims, from_picture.cloned().unwrap_or_else(|| vec![0.0; elements]));
    };
    let zeros = vec![0.0; elements];
    let noise = rng.randn(elements);
    let mut x = Tensor::f32(&dims, prediction.noised(from_picture.unwrap_or(&zeros), &noise, first))?;
    let kept = clean.as_deref().zip(pictures.mask.as_deref());

    let mut guide = run.guide(p);
    let (eta, seed) = (f64::from(p.eta), p.seed as u64);
    let setup = SamplerSetup { sigmas: sigmas.clone(), table: table.clone(), eta, seed, options: options.clone() };
    let mut sampler = Sampler::new(p.sampler, setup);
    let mut reuse = Reuse::default();
    place.report(watch, stage, 0, steps);
    for (step, &from) in sigmas.iter().take(steps).enumerate() {
        watch.cancel.check()?;
        let refines = p.refiner.as_ref().is_some_and(|r| table.timestep(from) < r.first_timestep());
        let at = usize::from(refines).min(models.len() - 1);
        let Some(Model { net, conditions, evaluation, controls }) = models.get_mut(at) else {
            return Err(Error::internal("no model"));
        };
        let controls: Vec<_> = controls.iter().filter_map(|c| c.active(step, steps)).collect();
        let kinds = guide.kinds(step);
        if let Some(options) = &run.cache {
            reuse.prepare(options, at, steps, net.facts().blocks, table)?;
        }
        let mut evaluations = 0;
        let mut estimate = |x: &[f32], sigma: f64| {
            let denoised_by = |keeps: Vec<f32>| {
                let mut denoised = keeps;
                if let Some((clean, mask)) = kept {
                    keep(&mut denoised, clean, mask);
                }
                denoised
            };
            // Of several evaluations of a step, the second is the first at the step's end, where the next step's are.
            evaluations += 1;
            reuse.evaluations += 1;
            let mut cache = reuse.cache.as_mut().map(|c| &mut c.1);
            let mut cache = cache.take().filter(|_| p.sampler.evaluations() == 1 || evaluations == 2);
            if let Some(Cache::Spectrum(spectrum)) = &mut cache
                && let Some(denoised) = spectrum.forecast(step)
            {
                return Ok(Estimate { denoised: denoised_by(denoised), base: None });
            }
            let (scalings, timestep) = match p.timestep_shift {
                Some(shift) => prediction.shifted_scalings(table, sigma, f64::from(shift)),
                None => (prediction.scalings(sigma), table.timestep(sigma)),
            };
            let input = Tensor::f32(&dims, scalings.input(x))?;
            let branches = kinds
                .iter()
                .map(|kind| branch(conditions, evaluation, *kind, pictures, guide.skipped_blocks()))
                .collect::<Result<Vec<_>>>()?;
            let call = Call {
                x: &input,
                timestep,
                guidance: p.guidance.unwrap_or(0.0),
                evaluation,
                branches: &branches,
                controls: &controls,
            };
            let (out, computed) = predictions(*net, &call, &kinds, cache.as_deref_mut(), (step, sigma), watch)?;
            reuse.computed += usize::from(computed);
            let (guided, base) =
                guide.combine(step, out).ok_or_else(|| Error::internal("the network predicted nothing"))?;
            let denoised = |prediction: &[f32]| scalings.denoised(x, prediction);
            let guided = denoised(&guided);
            if let Some(Cache::Spectrum(spectrum)) = cache {
                spectrum.store(step, guided.clone());
            }
            let base = base.as_deref().map(|base| denoised_by(denoised(base)));
            Ok(Estimate { denoised: denoised_by(guided), base })
        };
        let mut noise = |n: usize| sampler_rng.as_mut().unwrap_or(&mut rng).randn(n);
        let number = step + 1;
        let denoised = sampler
            .step(x.values_mut(), &mut estimate, &mut noise)
            .map_err(|e| e.context(format!("{} step {number} of {steps}", stage.name())))?;
        let denoised = Tensor::f32(&dims, denoised)?;
        if !denoised.is_finite() || !x.is_finite() {
            return Err(non_finite(&**net, stage, &format!("the prediction of step {number} of {steps}")));
        }
        if let Some(preview) = watch.preview.filter(|p| p.due(number)) {
            let shown = if preview.noisy { &x } else { &denoised };
            show(&mut **net, shown, preview.mode, evaluation.circular, place, number, watch)?;
        }
        watch.observer.step(StepLatent { image: place.image, step: number, latent: &x, denoised: &denoised });
        place.report(watch, stage, number, steps);
    }
    if run.cache.is_some() {
        let Reuse { computed, evaluations, .. } = reuse;
        tracing::info!("step cache: {computed} of {evaluations} evaluations of the network computed");
        watch.observer.computed(place.image, computed, evaluations);
    }
    // A flow's latent is `(1 - s)` of the picture where its last level `s` leaves noise.
    if let (Prediction::Flow, Some(&last)) = (*prediction, sigmas.last())
        && last > 0.0
        && last < 1.0
    {
        x.values_mut().iter_mut().for_each(|v| *v = (f64::from(*v) / (1.0 - last)) as f32);
    }
    Ok(x)
}

/// What a run reuses of its steps.
#[derive(Default)]
struct Reuse {
    /// For which model, and its cache.
    cache: Option<(usize, Cache<Kind>)>,
    computed: usize,
    evaluations: usize,
}

impl Reuse {
    /// Has a cache for model `at`, of `blocks` blocks.
    fn prepare(
        &mut self,
        options: &CacheOptions,
        at: usize,
        steps: usize,
        blocks: usize,
        table: &SigmaTable,
    ) -> Result<()> {
        if self.cache.as_ref().is_none_or(|(of, _)| *of != at) {
            let level = |share: f64| table.sigma((1.0 - share) * (TIMESTEPS as f64 - 1.0));
            self.cache = Some((at, Cache::new(options, steps, blocks, &level)?));
        }
        Ok(())
    }
}

type Predicted = Vec<(Kind, Vec<f32>)>;

/// What the network predicts of each kind in a step at a level, and whether that was computed.
fn predictions(
    net: &mut dyn Networks,
    call: &Call<'_>,
    kinds: &[Kind],
    mut cache: Option<&mut Cache<Kind>>,
    (step, sigma): (usize, f64),
    watch: &Watch<'_>,
) -> Result<(Predicted, bool)> {
    let named = |out: Vec<Vec<f32>>| kinds.iter().copied().zip(out).collect();
    if let Some(Cache::Whole(whole)) = &mut cache
        && let Some(out) = whole.reuse(step, sigma, call.x.values(), kinds)
    {
        return Ok((named(out), false));
    }
    let mut blocks = match &mut cache {
        Some(Cache::Blocks(blocks)) => Some(blocks),
        _ => None,
    };
    if let Some(blocks) = &mut blocks {
        blocks.begin(step);
    }
    let out = net.predict(call, blocks.as_deref_mut(), watch.cancel)?;
    let computed = blocks.is_none_or(|blocks| blocks.decision() != Some(Decision::Reuse));
    let out: Predicted = named(out.into_iter().map(Tensor::into_values).collect());
    if let Some(Cache::Whole(whole)) = cache {
        whole.store(call.x.values(), &out);
    }
    Ok((out, computed))
}

/// What the network is given for one of the predictions.
fn branch<'a>(
    conditions: &'a Conditions,
    evaluation: &Evaluation,
    kind: Kind,
    pictures: &'a Pictures,
    skip: &'a [usize],
) -> Result<Branch<'a>> {
    let negative = matches!(kind, Kind::Negative | Kind::NegativeSkipped | Kind::Blank);
    let conditioning = match (&conditions.uncond, negative) {
        (Some(uncond), true) => uncond,
        (None, true) => return Err(Error::internal("the negative prompt was not encoded")),
        (_, false) => &conditions.cond,
    };
    let blank = kind == Kind::Blank;
    let references = if blank || evaluation.references.is_empty() { &[][..] } else { &pictures.references };
    Ok(Branch {
        conditioning,
        joined: if blank { pictures.blank.as_ref() } else { pictures.joined.as_ref() },
        references,
        skip: if matches!(kind, Kind::Skipped | Kind::NegativeSkipped) { skip } else { &[] },
    })
}

/// What the images of a request have in common.
pub(super) struct Run {
    prediction: Prediction,
    table: SigmaTable,
    /// Falling, one more than the steps; none if there is nothing to do.
    sigmas: Vec<f64>,
    options: SampleOptions,
    cache: Option<CacheOptions>,
}

impl Run {
    pub(super) fn new(p: &Parameters, facts: &Facts, tokens: usize) -> Result<Run> {
        let table = facts.levels.table(tokens, p.flow_shift);
        let options = p.sample_options()?;
        let sigmas = match &p.sigmas {
            Some(sigmas) => sigmas.clone(),
            None => {
                let steps = p.steps as usize;
                let (table, options) = (&table, options.clone());
                p.scheduler.sigmas(&ScheduleInput { table, steps, tokens, ays: facts.ays, options })?
            }
        };
        let sigmas = match p.strength {
            Some(strength) => from_picture(sigmas, strength, facts.prediction, &options),
            None => sigmas,
        };
        let cache = p.cache.as_ref().map(CacheOptions::new).transpose()?;
        let run = Run { prediction: facts.prediction, table, sigmas, options, cache };
        if let Some(options) = run.cache.as_ref().filter(|_| run.steps() > 0) {
            // What does not fit is found before the work.
            Reuse::default().prepare(options, 0, run.steps(), facts.blocks, &run.table)?;
        }
        Ok(run)
    }

    /// How many steps there are.
    pub(super) fn steps(&self) -> usize {
        self.sigmas.len().saturating_sub(1)
    }

    /// How they are guided.
    pub(super) fn guide(&self, p: &Parameters) -> Guide {
        Guide::new(p, &self.options, self.steps())
    }
}

/// The levels of a run that starts from a picture: with `n` steps and strength `s`, those of the last
/// `min(floor(s n), n - 1) + 1` steps, and none for a strength of 0, as A1111's web UI does it.
fn from_picture(sigmas: Vec<f64>, strength: f32, prediction: Prediction, options: &SampleOptions) -> Vec<f64> {
    let steps = sigmas.len().saturating_sub(1);
    if strength == 0.0 || steps == 0 {
        return Vec::new();
    }
    // An f32 may hold a decimal fraction as a little less.
    let strength = f64::from(strength) + 1e-7;
    if options.strength_as_noise_level {
        return from_level(sigmas, prediction, strength, options.force_first_sigma);
    }
    let kept = ((strength * steps as f64).floor() as usize).min(steps - 1) + 1;
    sigmas.into_iter().skip(steps - kept).collect()
}

/// The levels at and below that where noise has a share of `level`, at least one step.
fn from_level(sigmas: Vec<f64>, prediction: Prediction, level: f64, force: bool) -> Vec<f64> {
    let sigma = match prediction {
        Prediction::Flow => level,
        _ if level < 1.0 => level / (1.0 - level),
        _ => f64::INFINITY,
    };
    let last_step = sigmas.len().saturating_sub(2);
    let first = sigmas.iter().position(|s| *s <= sigma).unwrap_or(last_step).min(last_step);
    let mut rest: Vec<f64> = sigmas.into_iter().skip(first).collect();
    if force && let Some(first) = rest.first_mut() {
        *first = if sigma.is_finite() { sigma } else { *first };
    }
    rest
}

/// Puts the picture back where the mask is 0. `mask` holds a value for each position, `clean` one for each channel too.
fn keep(denoised: &mut [f32], clean: &[f32], mask: &[f32]) {
    for (i, (d, c)) in denoised.iter_mut().zip(clean).enumerate() {
        let m = mask.get(i % mask.len().max(1)).copied().unwrap_or(1.0);
        *d = *d * m + *c * (1.0 - m);
    }
}
