//! One step as a sampler sees it, and the arithmetic on latents that samplers share.

use sd_core::Result;

use super::brownian::Brownian;
use super::{Denoise, Estimate, Noise};
use crate::schedule::SigmaTable;

/// A sampler's way to step: it holds what earlier steps left, nothing else.
pub(super) trait Method {
    /// Moves `x` along and returns the denoised estimate at its start.
    fn step(&mut self, at: &mut Step<'_, '_>, x: &mut [f32]) -> Result<Vec<f32>>;
}

/// Where a run stands, and what a step may ask for.
pub(super) struct Step<'a, 'f> {
    /// The noise levels of the whole run, the last 0 or above.
    pub(super) sigmas: &'a [f64],
    /// Which step, from 0.
    pub(super) i: usize,
    /// The model's levels.
    pub(super) table: &'a SigmaTable,
    /// How much fresh noise, 1 as much as the diffusion itself.
    pub(super) eta: f64,
    pub(super) denoise: &'a mut Denoise<'f>,
    pub(super) noise: &'a mut Noise<'f>,
    /// Noise that depends on the interval, where the sampler wants it.
    pub(super) brownian: Option<&'a mut Brownian>,
}

/// An ancestral step: down to the level `down` without noise, then `x = keep x + up noise`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ancestral {
    pub(super) down: f64,
    pub(super) keep: f64,
    pub(super) up: f64,
}

impl Step<'_, '_> {
    /// The level `k` steps from the start of this one; beyond the ends, the nearest.
    pub(super) fn level(&self, k: isize) -> f64 {
        let last = self.sigmas.len().saturating_sub(1);
        let at = self.i.saturating_add_signed(k).min(last);
        self.sigmas.get(at).copied().unwrap_or(0.0)
    }

    pub(super) fn from(&self) -> f64 {
        self.level(0)
    }

    pub(super) fn to(&self) -> f64 {
        self.level(1)
    }

    pub(super) fn flow(&self) -> bool {
        self.table.is_flow()
    }

    /// The share of the picture in a latent of that level: 1, or what noise leaves of it in a flow.
    pub(super) fn alpha(&self, sigma: f64) -> f64 {
        if self.flow() { 1.0 - sigma } else { 1.0 }
    }

    /// The logarithm of the ratio of picture to noise at a level: half the logarithm of the signal-to-noise ratio.
    pub(super) fn lambda(&self, sigma: f64) -> f64 {
        (self.alpha(sigma) / sigma).ln()
    }

    /// The level with that [`Step::lambda`].
    pub(super) fn level_of_lambda(&self, lambda: f64) -> f64 {
        if self.flow() { 1.0 / (1.0 + lambda.exp()) } else { (-lambda).exp() }
    }

    pub(super) fn estimate(&mut self, x: &[f32], sigma: f64) -> Result<Estimate> {
        (self.denoise)(x, sigma)
    }

    pub(super) fn denoised(&mut self, x: &[f32], sigma: f64) -> Result<Vec<f32>> {
        Ok(self.estimate(x, sigma)?.denoised)
    }

    /// `x = x + amount * noise`, noise of the interval between two levels; none is drawn for an amount of 0.
    pub(super) fn add_noise(&mut self, x: &mut [f32], amount: f64, [from, to]: [f64; 2]) {
        if amount > 0.0 && amount.is_finite() {
            let fresh = match &mut self.brownian {
                Some(tree) => tree.increment(from, to),
                None => (self.noise)(x.len()),
            };
            blend(x, 1.0, &[(amount, &fresh)]);
        }
    }

    /// How a step of this one's levels splits into one down and fresh noise.
    pub(super) fn ancestral(&self) -> Ancestral {
        let (from, to) = (self.from(), self.to());
        if self.flow() {
            let ratio = if from > 0.0 { to / from } else { 0.0 };
            renoised_flow(to * (1.0 + (ratio - 1.0) * self.eta.clamp(0.0, 1.0)), to)
        } else {
            let (down, up) = ancestral(from, to, self.eta);
            Ancestral { down, keep: 1.0, up }
        }
    }

    /// `x = keep x + up noise` after a step down.
    pub(super) fn renoise(&mut self, x: &mut [f32], by: Ancestral) {
        if by.up > 0.0 {
            blend(x, by.keep, &[]);
            let levels = [self.from(), self.to()];
            self.add_noise(x, by.up, levels);
        }
    }
}

/// From level `down` of a flow up to `to`: the picture's share shrinks by `keep`, noise fills the rest.
pub(super) fn renoised_flow(down: f64, to: f64) -> Ancestral {
    if down >= to || down >= 1.0 {
        return Ancestral { down: to, keep: 1.0, up: 0.0 };
    }
    let keep = (1.0 - to) / (1.0 - down);
    Ancestral { down, keep, up: (to * to - (down * keep).powi(2)).max(0.0).sqrt() }
}

/// The noise level to step down to, and the noise to add after, so that together they make `to` (k-diffusion's
/// `get_ancestral_step`).
pub(super) fn ancestral(from: f64, to: f64, eta: f64) -> (f64, f64) {
    let ratio = if from > 0.0 { to / from } else { 0.0 };
    let up = (eta * to * (1.0 - ratio * ratio).max(0.0).sqrt()).min(to);
    ((to * to - up * up).max(0.0).sqrt(), up)
}

/// `x = keep x + sum of weight * term`, summed in f64.
pub(super) fn blend(x: &mut [f32], keep: f64, terms: &[(f64, &[f32])]) {
    for (i, x) in x.iter_mut().enumerate() {
        let sum: f64 = terms.iter().map(|(w, v)| w * f64::from(v.get(i).copied().unwrap_or(0.0))).sum();
        *x = (keep * f64::from(*x) + sum) as f32;
    }
}

/// `x = r x + (1 - r) d`: the exact step of the probability flow when `d` is constant.
pub(super) fn toward(x: &mut [f32], d: &[f32], r: f64) {
    blend(x, r, &[(1.0 - r, d)]);
}

/// The direction of the probability flow, `(x - d) / sigma`.
pub(super) fn direction(x: &[f32], d: &[f32], sigma: f64) -> Vec<f32> {
    let mut out = x.to_vec();
    blend(&mut out, 1.0 / sigma, &[(-1.0 / sigma, d)]);
    out
}

/// `(e^z - 1) / z`, 1 at 0.
pub(super) fn phi1(z: f64) -> f64 {
    if z.abs() < 1e-9 { 1.0 + z / 2.0 } else { z.exp_m1() / z }
}

/// `(phi1(z) - 1) / z`, 1/2 at 0.
pub(super) fn phi2(z: f64) -> f64 {
    if z.abs() < 1e-4 { 0.5 + z / 6.0 + z * z / 24.0 } else { (phi1(z) - 1.0) / z }
}
