//! Extended reverse-time SDE solvers (Cui et al. 2023) of up to third order: ComfyUI's `sample_er_sde`.

use sd_core::Result;

use super::step::{Method, Step, blend};

/// Points of the Riemann sums.
const POINTS: usize = 200;

/// Holds the last estimate and its change per level.
#[derive(Default)]
pub(super) struct ErSde {
    pub(super) denoised: Option<Vec<f32>>,
    pub(super) slope: Option<Vec<f32>>,
}

/// The paper's noise scale.
fn scale(lambda: f64) -> f64 {
    lambda * (lambda.powf(0.3).exp() + 10.0)
}

impl Method for ErSde {
    fn step(&mut self, at: &mut Step<'_, '_>, x: &mut [f32]) -> Result<Vec<f32>> {
        let (from, to) = (at.from(), at.to());
        let d = at.denoised(x, from)?;
        if to <= 0.0 {
            x.copy_from_slice(&d);
            self.denoised = Some(d.clone());
            return Ok(d);
        }
        // Noise over picture at this level, the next, and earlier ones.
        let lambda = |sigma: f64| sigma / at.alpha(sigma);
        let (start, end) = (lambda(from), lambda(to));
        let (before, before2) = (lambda(at.level(-1)), lambda(at.level(-2)));
        let (alpha, r) = (at.alpha(to), scale(end) / scale(start));
        blend(x, alpha / at.alpha(from) * r, &[(alpha * (1.0 - r), &d)]);
        if let Some(old) = self.denoised.as_deref().filter(|_| start != before && start != end) {
            let (dt, part) = (end - start, (start - end) / POINTS as f64);
            let points = || (0..POINTS).map(|i| end + i as f64 * part);
            let s = points().map(|l| 1.0 / scale(l)).sum::<f64>() * part;
            let mut slope = d.clone();
            blend(&mut slope, 1.0 / (start - before), &[(-1.0 / (start - before), old)]);
            blend(x, 1.0, &[(alpha * (dt + s * scale(end)), &slope)]);
            if let Some(old) = self.slope.as_deref().filter(|_| start != before2) {
                let s_u = points().map(|l| (l - start) / scale(l)).sum::<f64>() * part;
                let w = alpha * (dt * dt / 2.0 + s_u * scale(end)) / ((start - before2) / 2.0);
                blend(x, 1.0, &[(w, &slope), (-w, old)]);
            }
            self.slope = Some(slope);
        }
        let up = alpha * (end * end - start * start * r * r).max(0.0).sqrt();
        at.add_noise(x, at.eta * up, [from, to]);
        self.denoised = Some(d.clone());
        Ok(d)
    }
}
