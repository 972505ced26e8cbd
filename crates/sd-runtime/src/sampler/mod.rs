//! Samplers: how a latent moves from one noise level to the next. Formulas are k-diffusion's, written with
//! the denoised estimate `D` and the ratio of noise levels, so that the last step lands on `D` exactly.

use sd_core::Result;

use crate::names::named;

/// Which sampler.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SamplerKind {
    /// Euler's method on the probability flow (Karras et al. 2022, algorithm 2 without churn).
    Euler,
    /// Euler steps with ancestral noise.
    EulerA,
    /// DPM-Solver++(2M) (Lu et al. 2022).
    DpmPp2m,
}

named!(
    SamplerKind,
    "sampler",
    [("euler", SamplerKind::Euler), ("euler_a", SamplerKind::EulerA), ("dpm++2m", SamplerKind::DpmPp2m),]
);

impl SamplerKind {
    /// The name web UIs know it by.
    pub fn label(self) -> &'static str {
        match self {
            SamplerKind::Euler => "Euler",
            SamplerKind::EulerA => "Euler a",
            SamplerKind::DpmPp2m => "DPM++ 2M",
        }
    }

    /// The noise scale when a request names none.
    pub fn default_eta(self) -> f32 {
        if self.uses_eta() { 1.0 } else { 0.0 }
    }

    /// Whether the sampler adds noise.
    pub fn uses_eta(self) -> bool {
        match self {
            SamplerKind::EulerA => true,
            SamplerKind::Euler | SamplerKind::DpmPp2m => false,
        }
    }
}

/// The denoised estimate `D` of a latent at a noise level.
pub type Denoise<'a> = dyn FnMut(&[f32], f64) -> Result<Vec<f32>> + 'a;

/// That many fresh standard normal values.
pub type Noise<'a> = dyn FnMut(usize) -> Vec<f32> + 'a;

/// A sampler in the middle of one run. It holds what earlier steps left, nothing else.
#[derive(Debug, Clone)]
pub struct Sampler {
    kind: SamplerKind,
    eta: f64,
    previous: Option<Previous>,
}

#[derive(Debug, Clone)]
struct Previous {
    denoised: Vec<f32>,
    /// The length of the step in ln sigma.
    h: f64,
}

impl Sampler {
    /// A sampler at the start of a run.
    pub fn new(kind: SamplerKind, eta: f64) -> Sampler {
        Sampler { kind, eta, previous: None }
    }

    /// Moves `x` from noise level `from` to `to`, 0 for the last step, and returns the estimate it used. Noise
    /// is drawn once per step that adds any.
    ///
    /// # Errors
    /// Those of `denoise`.
    pub fn step(
        &mut self,
        x: &mut [f32],
        from: f64,
        to: f64,
        denoise: &mut Denoise<'_>,
        noise: &mut Noise<'_>,
    ) -> Result<Vec<f32>> {
        let d = denoise(x, from)?;
        match self.kind {
            SamplerKind::Euler => toward(x, &d, to / from),
            SamplerKind::EulerA => {
                let (down, up) = ancestral(from, to, self.eta);
                toward(x, &d, down / from);
                if up > 0.0 {
                    let fresh = noise(x.len());
                    zip(x, &fresh, |x, e| x + up * e);
                }
            }
            SamplerKind::DpmPp2m => self.dpm_pp_2m(x, &d, from, to),
        }
        Ok(d)
    }

    /// First order for the first and the last step, second order between.
    fn dpm_pp_2m(&mut self, x: &mut [f32], d: &[f32], from: f64, to: f64) {
        let h = (from / to).ln();
        match &self.previous {
            Some(previous) if to > 0.0 => {
                let w = 0.5 * h / previous.h;
                let mut ahead = d.to_vec();
                zip(&mut ahead, &previous.denoised, |d, d_prev| (1.0 + w) * d - w * d_prev);
                toward(x, &ahead, to / from);
            }
            _ => toward(x, d, to / from),
        }
        self.previous = Some(Previous { denoised: d.to_vec(), h });
    }
}

/// The noise level to step down to, and the noise to add after, so that together they make `to`.
fn ancestral(from: f64, to: f64, eta: f64) -> (f64, f64) {
    let up = (eta * (to * to * (from * from - to * to) / (from * from)).max(0.0).sqrt()).min(to);
    ((to * to - up * up).max(0.0).sqrt(), up)
}

/// `x = r x + (1 - r) d`: the exact step of the flow when `d` is constant.
fn toward(x: &mut [f32], d: &[f32], r: f64) {
    zip(x, d, |x, d| r * x + (1.0 - r) * d);
}

fn zip(x: &mut [f32], y: &[f32], f: impl Fn(f64, f64) -> f64) {
    for (x, y) in x.iter_mut().zip(y) {
        *x = f(f64::from(*x), f64::from(*y)) as f32;
    }
}
