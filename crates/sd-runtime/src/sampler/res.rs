//! Refined exponential solvers (Zhang et al. 2023, "Improved order analysis and design of exponential integrator for
//! diffusion models sampling"): steps in the logarithm of the level, of second order.

use sd_core::Result;

use super::step::{Method, Step, blend, phi1, phi2, toward};

/// With the estimate of the step before: ComfyUI's `res_multistep`.
#[derive(Default)]
pub(super) struct Multistep {
    /// The last estimate, and the level that step went down to before noise.
    pub(super) previous: Option<(Vec<f32>, f64)>,
}

impl Method for Multistep {
    fn step(&mut self, at: &mut Step<'_, '_>, x: &mut [f32]) -> Result<Vec<f32>> {
        let from = at.from();
        let d = at.denoised(x, from)?;
        let split = at.ancestral();
        match &self.previous {
            Some((before, down)) if split.down > 0.0 && *down > 0.0 => {
                let h = (from / split.down).ln();
                let c2 = (down / at.level(-1)).ln() / h;
                let b2 = Some(phi2(-h) / c2).filter(|b| b.is_finite()).unwrap_or(0.0);
                let b1 = Some(phi1(-h) - b2).filter(|b| b.is_finite()).unwrap_or(0.0);
                blend(x, (-h).exp(), &[(h * b1, &d), (h * b2, before)]);
            }
            _ => toward(x, &d, split.down / from),
        }
        at.renoise(x, split);
        self.previous = Some((d.clone(), split.down));
        Ok(d)
    }
}

/// With a second evaluation halfway: the single-step solver of two stages, `c2` 1/2.
pub(super) struct TwoStage;

impl Method for TwoStage {
    fn step(&mut self, at: &mut Step<'_, '_>, x: &mut [f32]) -> Result<Vec<f32>> {
        let from = at.from();
        let d = at.denoised(x, from)?;
        let split = at.ancestral();
        if split.down <= 0.0 {
            toward(x, &d, 0.0);
        } else {
            let h = (from / split.down).ln();
            let mut half = x.to_vec();
            toward(&mut half, &d, (-h / 2.0).exp());
            let ahead = at.denoised(&half, from * (-h / 2.0).exp())?;
            let b2 = 2.0 * phi2(-h);
            let b1 = phi1(-h) - b2;
            blend(x, (-h).exp(), &[(h * b1, &d), (h * b2, &ahead)]);
        }
        at.renoise(x, split);
        Ok(d)
    }
}
