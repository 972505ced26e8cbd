//! DPM-Solver++ (Lu et al. 2022) on the probability flow, as k-diffusion writes it.

use sd_core::Result;

use super::step::{Method, Step, toward};

/// The level to which ComfyUI's `sample_dpmpp_2s_ancestral_RF` moves the midpoint of a step from pure noise, where
/// the logarithm of the signal is infinite.
const NEAR_NOISE: f64 = 0.9999;

/// DPM-Solver++(2S) with ancestral noise: `sample_dpmpp_2s_ancestral`.
pub(super) struct TwoSAncestral;

impl Method for TwoSAncestral {
    fn step(&mut self, at: &mut Step<'_, '_>, x: &mut [f32]) -> Result<Vec<f32>> {
        let from = at.from();
        let d = at.denoised(x, from)?;
        let split = at.ancestral();
        if split.down <= 0.0 {
            toward(x, &d, 0.0);
        } else {
            let middle = if at.flow() && from >= 1.0 {
                NEAR_NOISE
            } else {
                at.level_of_lambda((at.lambda(from) + at.lambda(split.down)) / 2.0)
            };
            let mut half = x.to_vec();
            toward(&mut half, &d, middle / from);
            let ahead = at.denoised(&half, middle)?;
            toward(x, &ahead, split.down / from);
        }
        at.renoise(x, split);
        Ok(d)
    }
}

/// DPM-Solver++(2M): `sample_dpmpp_2m`.
#[derive(Default)]
pub(super) struct TwoM {
    /// Hallatore's variant (k-diffusion, issue 56): the ratio and the mean of the longer and the shorter of two steps.
    pub(super) v2: bool,
    pub(super) previous: Option<Previous>,
}

/// What a step leaves to the next.
pub(super) struct Previous {
    pub(super) denoised: Vec<f32>,
    /// The length of the step, in the logarithm of the level.
    pub(super) h: f64,
}

impl Method for TwoM {
    fn step(&mut self, at: &mut Step<'_, '_>, x: &mut [f32]) -> Result<Vec<f32>> {
        let (from, to) = (at.from(), at.to());
        let d = at.denoised(x, from)?;
        let h = (from / to).ln();
        match &self.previous {
            Some(previous) if to > 0.0 && previous.h > 0.0 && h > 0.0 => {
                let (r, h) = if self.v2 {
                    (previous.h.max(h) / previous.h.min(h), (previous.h + h) / 2.0)
                } else {
                    (previous.h / h, h)
                };
                let w = 0.5 / r;
                let gain = -(-h).exp_m1();
                super::step::blend(x, to / from, &[(gain * (1.0 + w), &d), (-gain * w, &previous.denoised)]);
            }
            _ => toward(x, &d, to / from),
        }
        self.previous = Some(Previous { denoised: d.clone(), h });
        Ok(d)
    }
}
