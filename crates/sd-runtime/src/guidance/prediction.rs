//! From a network's raw prediction to a denoised estimate.

use crate::names::named;
use crate::schedule::{SigmaTable, TIMESTEPS};

/// What a network was trained to predict.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Prediction {
    /// The noise.
    #[default]
    Eps,
    /// The velocity (Salimans and Ho 2022).
    V,
    /// The velocity over continuous levels, whose timestep is a quarter of their logarithm (Karras et al. 2022).
    EdmV,
    /// The velocity of a rectified flow, noise minus picture (Liu et al. 2022).
    Flow,
    /// The picture itself, along a flow that starts from noise of twice the usual size (MiniT2I).
    X0,
}

named!(
    Prediction,
    "prediction",
    [
        ("eps", Prediction::Eps),
        ("v", Prediction::V),
        ("edm_v", Prediction::EdmV),
        ("flow", Prediction::Flow),
        ("sd3_flow", Prediction::Flow),
        ("flux_flow", Prediction::Flow),
        ("minit2i_flow", Prediction::X0),
    ]
);

/// `D = c_skip * x + c_out * F(c_in * x)` at one noise level.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scalings {
    /// Weight of the latent.
    pub c_skip: f64,
    /// Weight of the prediction.
    pub c_out: f64,
    /// Scale of the network's input.
    pub c_in: f64,
}

impl Prediction {
    /// The scalings at noise level `sigma`, for latents as [`Prediction::noised`] makes them.
    pub fn scalings(self, sigma: f64) -> Scalings {
        let variance = sigma * sigma + 1.0;
        let c_in = 1.0 / variance.sqrt();
        match self {
            Prediction::Eps => Scalings { c_skip: 1.0, c_out: -sigma, c_in },
            Prediction::V | Prediction::EdmV => Scalings { c_skip: 1.0 / variance, c_out: -sigma * c_in, c_in },
            Prediction::Flow => Scalings { c_skip: 1.0, c_out: -sigma, c_in: 1.0 },
            Prediction::X0 => Scalings { c_skip: 0.0, c_out: 1.0, c_in: 1.0 },
        }
    }

    /// The scalings and the timestep at noise level `sigma` for a distilled SDXL model that reads timesteps shifted
    /// from 1000 to `shift` (NitroSD, Chen et al. 2024): the input keeps its level's scale, and the prediction is read
    /// as one at the level of the shifted timestep.
    pub fn shifted_scalings(self, table: &SigmaTable, sigma: f64, shift: f64) -> (Scalings, f64) {
        let t = (table.timestep(sigma) * shift / TIMESTEPS as f64).round().clamp(0.0, (TIMESTEPS - 1) as f64);
        let (own, read) = (self.scalings(sigma), self.scalings(table.sigma(t)));
        (Scalings { c_skip: read.c_skip * own.c_in / read.c_in, c_out: read.c_out, c_in: own.c_in }, t)
    }

    /// The clean latent `x0` with noise of level `sigma`: `x0 + sigma noise`, in a flow `(1 - sigma) x0 + sigma noise`.
    pub fn noised(self, x0: &[f32], noise: &[f32], sigma: f64) -> Vec<f32> {
        let (clean, sigma) = match self {
            Prediction::Eps | Prediction::V | Prediction::EdmV => (1.0, sigma),
            Prediction::Flow => (1.0 - sigma, sigma),
            Prediction::X0 => (1.0 - sigma, 2.0 * sigma),
        };
        x0.iter().zip(noise).map(|(x, n)| (clean * f64::from(*x) + sigma * f64::from(*n)) as f32).collect()
    }
}

impl Scalings {
    /// What the network is given.
    pub fn input(&self, x: &[f32]) -> Vec<f32> {
        x.iter().map(|x| (f64::from(*x) * self.c_in) as f32).collect()
    }

    /// The denoised estimate from the guided prediction `f`.
    pub fn denoised(&self, x: &[f32], f: &[f32]) -> Vec<f32> {
        x.iter().zip(f).map(|(x, f)| (self.c_skip * f64::from(*x) + self.c_out * f64::from(*f)) as f32).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A network that is right gives the clean latent back: eps predicts n, v predicts alpha n - sigma' x0 in the
    /// variance-preserving frame, a flow n - x0.
    #[test]
    fn a_right_prediction_denoises_exactly() {
        let (x0, n) = (0.7, -1.3);
        for sigma in [0.03, 1.0, 14.6] {
            let alpha = 1.0 / (sigma * sigma + 1.0f64).sqrt();
            let v = alpha * n - sigma * alpha * x0;
            for (kind, f) in
                [(Prediction::Eps, n), (Prediction::V, v), (Prediction::Flow, n - x0), (Prediction::X0, x0)]
            {
                let x = kind.noised(&[x0 as f32], &[n as f32], sigma);
                let d = kind.scalings(sigma).denoised(&x, &[f as f32])[0];
                assert!((f64::from(d) - x0).abs() < 1e-5, "{kind} at {sigma}: {d}");
            }
        }
    }

    #[test]
    fn a_shifted_timestep_reads_the_input_as_its_own_level() {
        // x / sqrt(1 + sigma^2) = alpha x0 + beta n with the alpha, beta of the shifted level gives x0 back.
        let table = SigmaTable::scaled_linear();
        let (x0, n, sigma) = (0.7, -1.3, 9.0);
        for (kind, shift) in [(Prediction::Eps, 250.0), (Prediction::V, 500.0), (Prediction::Eps, 1000.0)] {
            let (scalings, t) = kind.shifted_scalings(&table, sigma, shift);
            assert_eq!(t, (table.timestep(sigma) * shift / 1000.0).round());
            let alpha = 1.0 / (table.sigma(t).powi(2) + 1.0).sqrt();
            let beta = table.sigma(t) * alpha;
            let x = (alpha * x0 + beta * n) / scalings.c_in;
            let f = if kind == Prediction::Eps { n } else { alpha * n - beta * x0 };
            let d = scalings.denoised(&[x as f32], &[f as f32])[0];
            assert!((f64::from(d) - x0).abs() < 1e-5, "{kind}: {d}");
        }
    }
}
