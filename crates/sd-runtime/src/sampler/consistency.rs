//! Samplers of consistency models: each step lands on the estimate and makes new noise.

use sd_core::Result;

use super::step::{Ancestral, Method, Step, blend, renoised_flow, toward};

/// Latent consistency models (Luo et al. 2023): the estimate, with fresh noise of the next level. ComfyUI's
/// `sample_lcm`.
pub(super) struct Lcm {
    /// Holds noise to so many of its standard deviations; 0 is off.
    pub(super) clip_std: f64,
    /// Factors of the noise of the first and the last step.
    pub(super) scale: [f64; 2],
}

impl Method for Lcm {
    fn step(&mut self, at: &mut Step<'_, '_>, x: &mut [f32]) -> Result<Vec<f32>> {
        let to = at.to();
        let d = at.denoised(x, at.from())?;
        x.copy_from_slice(&d);
        if to > 0.0 {
            let mut noise = (at.noise)(x.len());
            if self.clip_std > 0.0 {
                let most = (self.clip_std * deviation(&noise)) as f32;
                noise.iter_mut().for_each(|n| *n = n.clamp(-most, most));
            }
            let steps = at.sigmas.len().saturating_sub(1);
            let part = if steps > 1 { at.i as f64 / (steps - 1) as f64 } else { 0.0 };
            let [start, end] = self.scale;
            blend(x, at.alpha(to), &[(to * (start + (end - start) * part), &noise)]);
        }
        Ok(d)
    }
}

/// The standard deviation, with Bessel's correction as torch has it.
fn deviation(values: &[f32]) -> f64 {
    let n = values.len() as f64;
    let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / n;
    let square = values.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>();
    (square / (n - 1.0).max(1.0)).sqrt()
}

/// Trajectory consistency distillation (Zheng et al. 2024, algorithm 4): down to the level of a share `1 - eta` of
/// the next timestep, then up with noise. diffusers' `TCDScheduler`, but that the last step lands on the estimate.
pub(super) struct Tcd;

impl Method for Tcd {
    fn step(&mut self, at: &mut Step<'_, '_>, x: &mut [f32]) -> Result<Vec<f32>> {
        let (from, to) = (at.from(), at.to());
        let d = at.denoised(x, from)?;
        if to <= 0.0 {
            toward(x, &d, 0.0);
            return Ok(d);
        }
        let place = at.table.place(to).round();
        let down = at.table.sigma(((1.0 - at.eta.clamp(0.0, 1.0)) * place).floor()).min(to);
        let split = if at.eta <= 0.0 {
            Ancestral { down: to, keep: 1.0, up: 0.0 }
        } else if at.flow() {
            renoised_flow(down, to)
        } else {
            Ancestral { down, keep: 1.0, up: (to * to - down * down).max(0.0).sqrt() }
        };
        toward(x, &d, split.down / from);
        at.renoise(x, split);
        Ok(d)
    }
}
