//! Samplers that evaluate the network again within a step, on the direction of the probability flow.

use sd_core::Result;

use super::step::{Method, Step, blend, direction, toward};

/// Heun's method (Karras et al. 2022, algorithm 2 without churn).
pub(super) struct Heun;

impl Method for Heun {
    fn step(&mut self, at: &mut Step<'_, '_>, x: &mut [f32]) -> Result<Vec<f32>> {
        let (from, to) = (at.from(), at.to());
        let d = at.denoised(x, from)?;
        if to <= 0.0 {
            x.copy_from_slice(&d);
            return Ok(d);
        }
        let slope = direction(x, &d, from);
        let (ahead, dt) = (euler(x, &slope, to - from), to - from);
        let next = direction(&ahead, &at.denoised(&ahead, to)?, to);
        blend(x, 1.0, &[(dt / 2.0, &slope), (dt / 2.0, &next)]);
        Ok(d)
    }
}

/// DPM-Solver-2 with a midpoint in the logarithm of the level (k-diffusion's `sample_dpm_2`), or with ancestral
/// noise (`sample_dpm_2_ancestral`, for flows ComfyUI's `sample_dpm_2_ancestral_RF`).
pub(super) struct Dpm2 {
    pub(super) ancestral: bool,
}

impl Method for Dpm2 {
    fn step(&mut self, at: &mut Step<'_, '_>, x: &mut [f32]) -> Result<Vec<f32>> {
        let from = at.from();
        let d = at.denoised(x, from)?;
        let split = at.ancestral();
        let down = if self.ancestral { split.down } else { at.to() };
        if down <= 0.0 {
            toward(x, &d, 0.0);
        } else {
            let middle = (from * down).sqrt();
            let slope = direction(x, &d, from);
            let half = euler(x, &slope, middle - from);
            let slope = direction(&half, &at.denoised(&half, middle)?, middle);
            blend(x, 1.0, &[(down - from, &slope)]);
        }
        if self.ancestral {
            at.renoise(x, split);
        }
        Ok(d)
    }
}

/// Heun++ with up to three directions, weighted by their levels (ComfyUI's `sample_heunpp2`).
pub(super) struct HeunPp2;

impl Method for HeunPp2 {
    fn step(&mut self, at: &mut Step<'_, '_>, x: &mut [f32]) -> Result<Vec<f32>> {
        let (from, to, first) = (at.from(), at.to(), at.sigmas.first().copied().unwrap_or(1.0));
        let d = at.denoised(x, from)?;
        let left = at.sigmas.len().saturating_sub(at.i + 2);
        if left == 0 || to <= 0.0 {
            toward(x, &d, to / from);
            return Ok(d);
        }
        let (slope, dt) = (direction(x, &d, from), to - from);
        let second = euler(x, &slope, dt);
        let slope2 = direction(&second, &at.denoised(&second, to)?, to);
        let after = at.level(2);
        if left == 1 || after <= 0.0 {
            let w2 = to / (2.0 * first);
            blend(x, 1.0, &[(dt * (1.0 - w2), &slope), (dt * w2, &slope2)]);
            return Ok(d);
        }
        let third = euler(&second, &slope2, after - to);
        let slope3 = direction(&third, &at.denoised(&third, after)?, after);
        let (w2, w3) = (to / (3.0 * first), after / (3.0 * first));
        blend(x, 1.0, &[(dt * (1.0 - w2 - w3), &slope), (dt * w2, &slope2), (dt * w3, &slope3)]);
        Ok(d)
    }
}

fn euler(x: &[f32], slope: &[f32], dt: f64) -> Vec<f32> {
    let mut ahead = x.to_vec();
    blend(&mut ahead, 1.0, &[(dt, slope)]);
    ahead
}
