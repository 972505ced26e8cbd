//! Samplers: how a latent moves from one noise level to the next. Formulas are the references', written with the
//! denoised estimate `D` and the ratio of noise levels, so that the last step lands on `D` exactly.

mod brownian;
mod consistency;
mod dpmpp;
mod dpmpp_sde;
mod er_sde;
mod euler;
mod heun;
mod kind;
mod multistep;
mod options;
mod res;
mod step;
mod unipc;

use std::collections::VecDeque;

use sd_core::{Error, Result};

use crate::schedule::SigmaTable;
use brownian::Brownian;
use multistep::Directions;
use step::{Method, Step};

pub use kind::SamplerKind;
pub use options::SampleOptions;

/// What a network makes of a latent at a noise level.
#[derive(Debug, Clone, PartialEq)]
pub struct Estimate {
    /// The denoised latent `D`, guided.
    pub denoised: Vec<f32>,
    /// The denoised latent without guidance: under the picture's condition alone, else the negative prompt's. Absent
    /// when there is no such pass, and read only by samplers with [`SamplerKind::uses_base`].
    pub base: Option<Vec<f32>>,
}

impl From<Vec<f32>> for Estimate {
    fn from(denoised: Vec<f32>) -> Estimate {
        Estimate { denoised, base: None }
    }
}

/// The estimate for a latent at a noise level.
pub type Denoise<'a> = dyn FnMut(&[f32], f64) -> Result<Estimate> + 'a;

/// That many fresh standard normal values.
pub type Noise<'a> = dyn FnMut(usize) -> Vec<f32> + 'a;

/// What a run of a sampler depends on, besides its kind.
#[derive(Debug, Clone)]
pub struct SamplerSetup {
    /// The noise levels to visit, falling.
    pub sigmas: Vec<f64>,
    /// The model's levels; they also say whether it is a rectified flow.
    pub table: SigmaTable,
    /// How much fresh noise, 1 as much as the diffusion itself.
    pub eta: f64,
    /// Seed of noise that is not drawn from the caller's stream: the Brownian path of some samplers.
    pub seed: u64,
    /// Fine tuning.
    pub options: SampleOptions,
}

/// A sampler in the middle of one run. It holds what earlier steps left, nothing else.
pub struct Sampler {
    kind: SamplerKind,
    setup: SamplerSetup,
    method: Box<dyn Method>,
    done: usize,
    /// The least level above 0 and the largest, between which the Brownian path runs.
    range: [f64; 2],
    brownian: Option<Brownian>,
}

impl Sampler {
    /// A sampler at the start of a run.
    pub fn new(kind: SamplerKind, mut setup: SamplerSetup) -> Sampler {
        let positive = setup.sigmas.iter().copied().filter(|s| *s > 0.0);
        let range = positive.fold([f64::INFINITY, 0.0], |[low, high], s| [s.min(low), s.max(high)]);
        // Pure noise of a flow has no finite ratio of picture to noise (ComfyUI's `offset_first_sigma_for_snr`; diffusers'
        // UniPC takes less off).
        if kind.steps_in_lambda() && setup.table.is_flow() {
            let near = if kind == SamplerKind::UniPc { 1.0 - 1e-6 } else { setup.table.flow_level(0.9999) };
            setup.sigmas.iter_mut().filter(|s| **s >= 1.0).for_each(|s| *s = near);
        }
        Sampler { kind, method: method(kind, &setup.options), setup, done: 0, range, brownian: None }
    }

    /// How many steps the run has.
    pub fn steps(&self) -> usize {
        self.setup.sigmas.len().saturating_sub(1)
    }

    /// Moves `x` from the level it is at to the next and returns the estimate at the start of the step.
    ///
    /// # Errors
    /// Those of `denoise`; a step after the last.
    pub fn step(&mut self, x: &mut [f32], denoise: &mut Denoise<'_>, noise: &mut Noise<'_>) -> Result<Vec<f32>> {
        if self.done >= self.steps() {
            return Err(Error::internal("a sampler was stepped past its last noise level"));
        }
        if self.kind.uses_brownian() && self.brownian.is_none() {
            let [low, high] = self.range;
            self.brownian = Some(Brownian::new(self.setup.seed, x.len(), low, high));
        }
        let SamplerSetup { sigmas, table, eta, .. } = &self.setup;
        let brownian = self.brownian.as_mut();
        let mut at = Step { sigmas, i: self.done, table, eta: *eta, denoise, noise, brownian };
        let denoised = self.method.step(&mut at, x)?;
        self.done += 1;
        Ok(denoised)
    }
}

fn method(kind: SamplerKind, o: &SampleOptions) -> Box<dyn Method> {
    use SamplerKind as K;
    match kind {
        K::Euler => Box::new(euler::Euler),
        K::EulerA | K::DdimTrailing => Box::new(euler::EulerA),
        K::EulerCfgPp => Box::new(euler::EulerCfgPp { ancestral: false }),
        K::EulerACfgPp => Box::new(euler::EulerCfgPp { ancestral: true }),
        K::EulerGe => Box::new(euler::GradientEstimation { gamma: o.gamma, previous: None }),
        K::Heun => Box::new(heun::Heun),
        K::HeunPp2 => Box::new(heun::HeunPp2),
        K::Dpm2 => Box::new(heun::Dpm2 { ancestral: false }),
        K::Dpm2A => Box::new(heun::Dpm2 { ancestral: true }),
        K::DpmPp2sA => Box::new(dpmpp::TwoSAncestral),
        K::DpmPp2m => Box::new(dpmpp::TwoM::default()),
        K::DpmPp2mV2 => Box::new(dpmpp::TwoM { v2: true, previous: None }),
        K::DpmPpSde => Box::new(dpmpp_sde::Sde),
        K::DpmPp2mSde | K::DpmPp2mSdeBt => {
            Box::new(dpmpp_sde::MultistepSde { third_order: false, history: VecDeque::new() })
        }
        K::DpmPp3mSde => Box::new(dpmpp_sde::MultistepSde { third_order: true, history: VecDeque::new() }),
        K::Ipndm => Box::new(multistep::Ipndm::default()),
        K::IpndmV => Box::new(multistep::Ipndm { variable: true, directions: Directions::default() }),
        K::Lms => Box::new(multistep::Lms {
            max_order: o.lms_max_order,
            shift: o.lms_shift,
            divisions: o.lms_divisions,
            directions: Directions::default(),
        }),
        K::Lcm => Box::new(consistency::Lcm { clip_std: o.noise_clip_std, scale: o.noise_scale }),
        K::Tcd => Box::new(consistency::Tcd),
        K::ResMultistep => Box::new(res::Multistep::default()),
        K::Res2s => Box::new(res::TwoStage),
        K::UniPc => Box::new(unipc::UniPc::default()),
        K::ErSde => Box::new(er_sde::ErSde::default()),
    }
}

#[cfg(test)]
mod tests;
