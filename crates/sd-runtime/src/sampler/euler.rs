//! Samplers of one evaluation and one Euler step.

use sd_core::Result;

use super::step::{Method, Step, ancestral, blend, direction, toward};

/// Euler's method on the probability flow (Karras et al. 2022, algorithm 2 without churn).
pub(super) struct Euler;

impl Method for Euler {
    fn step(&mut self, at: &mut Step<'_, '_>, x: &mut [f32]) -> Result<Vec<f32>> {
        let d = at.denoised(x, at.from())?;
        toward(x, &d, at.to() / at.from());
        Ok(d)
    }
}

/// Euler steps with ancestral noise: k-diffusion's `sample_euler_ancestral`, for flows ComfyUI's
/// `sample_euler_ancestral_RF`. It is also DDIM's step (Song et al. 2021, equation 12) in these units.
pub(super) struct EulerA;

impl Method for EulerA {
    fn step(&mut self, at: &mut Step<'_, '_>, x: &mut [f32]) -> Result<Vec<f32>> {
        let d = at.denoised(x, at.from())?;
        let split = at.ancestral();
        toward(x, &d, split.down / at.from());
        at.renoise(x, split);
        Ok(d)
    }
}

/// CFG++ (Chung et al. 2024): the guided estimate, with the noise that the unguided one leaves. ComfyUI's
/// `sample_euler_ancestral_cfg_pp`.
pub(super) struct EulerCfgPp {
    pub(super) ancestral: bool,
}

impl Method for EulerCfgPp {
    fn step(&mut self, at: &mut Step<'_, '_>, x: &mut [f32]) -> Result<Vec<f32>> {
        let (from, to) = (at.from(), at.to());
        let estimate = at.estimate(x, from)?;
        let d = estimate.denoised;
        if to <= 0.0 {
            x.copy_from_slice(&d);
            return Ok(d);
        }
        let base = estimate.base.as_deref().unwrap_or(&d);
        let (alpha_from, alpha_to) = (at.alpha(from), at.alpha(to));
        let eta = if self.ancestral { at.eta } else { 0.0 };
        let (down, up) = ancestral(from / alpha_from, to / alpha_to, eta);
        let down = alpha_to * down / from;
        let unguided = base.to_vec();
        blend(x, down, &[(alpha_to, &d), (-down * alpha_from, &unguided)]);
        at.add_noise(x, alpha_to * up, [from, to]);
        Ok(d)
    }
}

/// Gradient estimation (Permenter and Yuan 2024): the last two directions, extrapolated by `gamma`. ComfyUI's
/// `sample_gradient_estimation`.
pub(super) struct GradientEstimation {
    pub(super) gamma: f64,
    pub(super) previous: Option<Vec<f32>>,
}

impl Method for GradientEstimation {
    fn step(&mut self, at: &mut Step<'_, '_>, x: &mut [f32]) -> Result<Vec<f32>> {
        let from = at.from();
        let d = at.denoised(x, from)?;
        let slope = direction(x, &d, from);
        let split = at.ancestral();
        if split.down <= 0.0 {
            x.copy_from_slice(&d);
        } else {
            let dt = split.down - from;
            match &self.previous {
                Some(before) => blend(x, 1.0, &[(dt * self.gamma, &slope), (dt * (1.0 - self.gamma), before)]),
                None => blend(x, 1.0, &[(dt, &slope)]),
            }
        }
        at.renoise(x, split);
        self.previous = Some(slope);
        Ok(d)
    }
}
