//! DPM-Solver++ on the reverse-time SDE: k-diffusion's `sample_dpmpp_*sde`, and ComfyUI's form of them for flows,
//! where steps are measured in the logarithm of the ratio of picture to noise.

use std::collections::VecDeque;

use sd_core::Result;

use super::step::{Method, Step, ancestral, blend};

/// DPM-Solver++(2M) SDE with the midpoint rule, or (3M) SDE.
pub(super) struct MultistepSde {
    pub(super) third_order: bool,
    /// Estimates and step lengths, the latest first.
    pub(super) history: VecDeque<(Vec<f32>, f64)>,
}

impl Method for MultistepSde {
    fn step(&mut self, at: &mut Step<'_, '_>, x: &mut [f32]) -> Result<Vec<f32>> {
        let (from, to) = (at.from(), at.to());
        let d = at.denoised(x, from)?;
        if to <= 0.0 {
            x.copy_from_slice(&d);
            return Ok(d);
        }
        let h = at.lambda(to) - at.lambda(from);
        let (alpha, he) = (at.alpha(to), h * (at.eta + 1.0));
        let mut terms = vec![(-alpha * (-he).exp_m1(), d.as_slice())];
        let known: Vec<(&[f32], f64)> = self.history.iter().map(|(d, h)| (d.as_slice(), *h)).collect();
        match known[..] {
            [(d1, h1), (d2, h2)] if self.third_order && h > 0.0 && h1 > 0.0 && h2 > 0.0 => {
                let (r0, r1) = (h1 / h, h2 / h);
                let phi2 = (-he).exp_m1() / he + 1.0;
                let phi3 = phi2 / he - 0.5;
                // The first divided differences, u = (d - d1) / r0 and v = (d1 - d2) / r1.
                let u = alpha * (phi2 * (1.0 + r0 / (r0 + r1)) - phi3 / (r0 + r1));
                let v = alpha * (-phi2 * r0 / (r0 + r1) + phi3 / (r0 + r1));
                terms.extend([(u / r0, d.as_slice()), (v / r1 - u / r0, d1), (-v / r1, d2)]);
            }
            [(d1, h1), ..] if h > 0.0 && h1 > 0.0 => {
                let gain = if self.third_order { (-he).exp_m1() / he + 1.0 } else { -0.5 * (-he).exp_m1() };
                let w = alpha * gain * h / h1;
                terms.extend([(w, d.as_slice()), (-w, d1)]);
            }
            _ => {}
        }
        blend(x, to / from * (-h * at.eta).exp(), &terms);
        at.add_noise(x, to * (-(-2.0 * h * at.eta).exp_m1()).max(0.0).sqrt(), [from, to]);
        self.history.push_front((d.clone(), h));
        self.history.truncate(2);
        Ok(d)
    }
}

/// DPM-Solver++ (stochastic) of second order with a midpoint: `sample_dpmpp_sde`.
pub(super) struct Sde;

impl Method for Sde {
    fn step(&mut self, at: &mut Step<'_, '_>, x: &mut [f32]) -> Result<Vec<f32>> {
        let (from, to) = (at.from(), at.to());
        let d = at.denoised(x, from)?;
        if to <= 0.0 {
            x.copy_from_slice(&d);
            return Ok(d);
        }
        let (start, end) = (at.lambda(from), at.lambda(to));
        let middle = at.level_of_lambda((start + end) / 2.0);
        let mut half = x.to_vec();
        Self::part(at, &mut half, &d, [from, middle]);
        let ahead = at.denoised(&half, middle)?;
        Self::part(at, x, &ahead, [from, to]);
        Ok(d)
    }
}

impl Sde {
    /// A step between two levels with a constant estimate, and the noise of the interval.
    fn part(at: &mut Step<'_, '_>, x: &mut [f32], d: &[f32], [from, to]: [f64; 2]) {
        let (start, end, alpha) = (at.lambda(from), at.lambda(to), at.alpha(to));
        let (down, up) = ancestral((-start).exp(), (-end).exp(), at.eta);
        let h = -down.ln() - start;
        blend(x, alpha / at.alpha(from) * (-h).exp(), &[(-alpha * (-h).exp_m1(), d)]);
        at.add_noise(x, alpha * up, [from, to]);
    }
}
