//! The noise levels that a model was trained on.

use sd_core::{Error, Result};

/// The number of training timesteps.
pub const TIMESTEPS: usize = 1000;
const LAST: f64 = (TIMESTEPS - 1) as f64;
/// The levels that schedules of Flux pick from.
const FLUX_ENTRIES: usize = 10 * TIMESTEPS;
/// The smallest noise level of a table; a stored one may claim no noise at all at its first timestep.
const LEAST_SIGMA: f64 = 1e-6;

/// The noise levels a network was trained on: sigma = sqrt((1 - a) / a), `a` the cumulative product of alphas.
#[derive(Debug, Clone, PartialEq)]
pub struct SigmaTable {
    levels: Levels,
}

#[derive(Debug, Clone, PartialEq)]
enum Levels {
    /// The logarithms of the levels of [`TIMESTEPS`] timesteps, rising.
    Table(Vec<f64>),
    /// The logarithms of the least and the largest. The timestep of a level is a quarter of its logarithm.
    Continuous([f64; 2]),
    /// Rectified flow: the level is the share of noise, evenly spaced and shifted; the timestep is a multiple of it.
    Flow { shift: f64, time_scale: f64, entries: usize },
}

impl SigmaTable {
    /// Stable Diffusion's "scaled linear" betas: the squares of evenly spaced values from sqrt(0.00085) to sqrt(0.012).
    pub fn scaled_linear() -> SigmaTable {
        SigmaTable { levels: Levels::Table(scaled_linear().into_iter().map(log_sigma).collect()) }
    }

    /// The same, rescaled to end in noise alone (Lin et al. 2023, algorithm 1), but for 2^-24 of the signal, so that
    /// the last level stays finite.
    pub fn zero_terminal_snr() -> SigmaTable {
        let roots: Vec<f64> = scaled_linear().into_iter().map(f64::sqrt).collect();
        let first = roots.first().copied().unwrap_or(1.0);
        let last = roots.last().copied().unwrap_or(0.0);
        let alpha = |root: &f64| ((root - last) * first / (first - last)).powi(2).max(2f64.powi(-24));
        SigmaTable { levels: Levels::Table(roots.iter().map(|r| log_sigma(alpha(r))).collect()) }
    }

    /// Every level from `min` to `max`, both above 0 (Karras et al. 2022).
    pub fn continuous(min: f64, max: f64) -> SigmaTable {
        SigmaTable { levels: Levels::Continuous([min.ln(), max.ln()]) }
    }

    /// The levels of a rectified flow, from just above 0 to 1: the share of noise `(t + 1) / TIMESTEPS`, shifted (see
    /// [`shifted`]). `time_scale` times a level is what the network is told: 1000 for SD3 and its kin, 1 for Flux, whose
    /// network multiplies by 1000 itself (Esser et al. 2024, section 5.3.2).
    pub fn flow(shift: f64, time_scale: f64) -> SigmaTable {
        SigmaTable { levels: Levels::Flow { shift, time_scale, entries: TIMESTEPS } }
    }

    /// The same for models whose shift depends on the size, such as Flux: schedules pick from ten times as many levels
    /// (ComfyUI's `ModelSamplingFlux`).
    pub fn flux(shift: f64, time_scale: f64) -> SigmaTable {
        SigmaTable { levels: Levels::Flow { shift, time_scale, entries: FLUX_ENTRIES } }
    }

    /// Whether levels are shares of noise, from 0 to 1.
    pub fn is_flow(&self) -> bool {
        matches!(self.levels, Levels::Flow { .. })
    }

    /// The level of a flow at a share `u` of noise before the shift; other tables' level at that share of their
    /// timesteps.
    pub(crate) fn flow_level(&self, u: f64) -> f64 {
        self.sigma(u * TIMESTEPS as f64 - 1.0)
    }

    /// The timestep of [`TIMESTEPS`] at which [`SigmaTable::sigma`] is `sigma`, held to the table.
    pub fn place(&self, sigma: f64) -> f64 {
        match &self.levels {
            Levels::Table(_) => self.timestep(sigma),
            Levels::Continuous([min, max]) if max > min => {
                ((sigma.ln() - min) / (max - min)).clamp(0.0, 1.0) * LAST
            }
            Levels::Continuous(_) => 0.0,
            Levels::Flow { shift, .. } => {
                let u = sigma / (shift - (shift - 1.0) * sigma);
                (u * TIMESTEPS as f64 - 1.0).clamp(0.0, LAST)
            }
        }
    }

    /// A table stored in a checkpoint.
    ///
    /// # Errors
    /// Not [`TIMESTEPS`] values, a value outside (0, 1], or one above its predecessor.
    pub fn from_alphas_cumprod(alphas: &[f32]) -> Result<SigmaTable> {
        let bad = |what: String| Err(Error::unsupported(format!("alphas_cumprod: {what}")));
        if alphas.len() != TIMESTEPS {
            return bad(format!("want {TIMESTEPS} values, got {}", alphas.len()));
        }
        let mut before = 1.0;
        for (i, &a) in alphas.iter().enumerate() {
            if !(a > 0.0 && a <= 1.0) {
                return bad(format!("value {i} is {a}, want it above 0 and at most 1"));
            }
            if a > before {
                return bad(format!("value {i} is {a}, above the {before} before it"));
            }
            before = a;
        }
        let levels = Levels::Table(alphas.iter().map(|a| log_sigma(f64::from(*a))).collect());
        Ok(SigmaTable { levels })
    }

    /// The smallest noise level.
    pub fn min(&self) -> f64 {
        self.entry(0.0)
    }

    /// How many levels schedules pick from.
    pub(super) fn entries(&self) -> usize {
        match self.levels {
            Levels::Flow { entries, .. } => entries,
            Levels::Table(_) | Levels::Continuous(_) => TIMESTEPS,
        }
    }

    /// The level at a place in those that schedules pick from, from 0 for the smallest, interpolated and held to them.
    pub(super) fn entry(&self, k: f64) -> f64 {
        match self.levels {
            Levels::Flow { shift, entries, .. } => {
                shifted(shift, (k + 1.0).clamp(1.0, entries as f64) / entries as f64)
            }
            Levels::Table(_) | Levels::Continuous(_) => self.sigma(k),
        }
    }

    /// The level at a share of the way from the largest to the smallest, in even timesteps. In a flow both ends of the
    /// way are levels, which are shifted once more: so do Stability AI's reference, diffusers and ComfyUI.
    pub(super) fn even(&self, part: f64) -> f64 {
        match self.levels {
            Levels::Flow { shift, .. } => shifted(shift, 1.0 + part * (self.min() - 1.0)),
            Levels::Table(_) | Levels::Continuous(_) => self.sigma(LAST * (1.0 - part)),
        }
    }

    /// The largest noise level.
    pub fn max(&self) -> f64 {
        self.sigma(LAST)
    }

    /// The noise level at a timestep of [`TIMESTEPS`], interpolated in the logarithm; `t` is held to the table.
    pub fn sigma(&self, t: f64) -> f64 {
        let t = t.clamp(0.0, LAST);
        match &self.levels {
            Levels::Table(logs) => {
                let low = (t.floor() as usize).min(TIMESTEPS - 2);
                let (a, b) = pair(logs, low);
                (a + (b - a) * (t - low as f64)).exp()
            }
            Levels::Continuous([min, max]) => (min + (max - min) * t / LAST).exp(),
            Levels::Flow { shift, .. } => shifted(*shift, (t + 1.0) / TIMESTEPS as f64),
        }
    }

    /// What the network is told of a noise level: its place in the table, the inverse of [`SigmaTable::sigma`] and held
    /// to the table; a quarter of its logarithm where levels are continuous; a multiple of it in a flow.
    pub fn timestep(&self, sigma: f64) -> f64 {
        let x = sigma.ln();
        match &self.levels {
            Levels::Table(logs) => {
                let low = logs.partition_point(|s| *s <= x).saturating_sub(1).min(TIMESTEPS - 2);
                let (a, b) = pair(logs, low);
                let part = if b > a { ((x - a) / (b - a)).clamp(0.0, 1.0) } else { 0.0 };
                low as f64 + part
            }
            Levels::Continuous([min, max]) => x.clamp(*min, *max) / 4.0,
            Levels::Flow { time_scale, .. } => sigma * time_scale,
        }
    }
}

/// A level `u` of a rectified flow after a shift that gives more of the run to noise: `s u / (1 + (s - 1) u)` (Esser
/// et al. 2024, equation 23). A shift by `mu` in the exponent, `e^mu / (e^mu + 1/u - 1)`, is one of `s = e^mu`.
pub fn shifted(shift: f64, u: f64) -> f64 {
    shift * u / (1.0 + (shift - 1.0) * u)
}

/// A shift's exponent `mu` for a picture of that many tokens: the line through two sizes and their mu, not clamped.
pub(crate) fn linear_mu(tokens: usize, [x1, x2]: [f64; 2], [y1, y2]: [f64; 2]) -> f64 {
    let slope = (y2 - y1) / (x2 - x1);
    slope * tokens as f64 + y1 - slope * x1
}

fn pair(logs: &[f64], low: usize) -> (f64, f64) {
    let at = |i: usize| logs.get(i).copied().unwrap_or(0.0);
    (at(low), at(low + 1))
}

/// Cumulative products of alphas.
fn scaled_linear() -> Vec<f64> {
    let (first, last) = (0.00085f64.sqrt(), 0.012f64.sqrt());
    let mut product = 1.0;
    let alpha = |i: usize| {
        let root = first + (last - first) * i as f64 / LAST;
        product *= 1.0 - root * root;
        product
    };
    (0..TIMESTEPS).map(alpha).collect()
}

fn log_sigma(alpha: f64) -> f64 {
    ((1.0 - alpha) / alpha).sqrt().max(LEAST_SIGMA).ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_ends_of_the_table() {
        // Stable Diffusion's noise range as k-diffusion's model wrappers print it.
        let table = SigmaTable::scaled_linear();
        assert!((table.max() - 14.6146).abs() < 1e-4 && (table.min() - 0.0292).abs() < 1e-4);
    }

    #[test]
    fn timestep_inverts_sigma() {
        let table = SigmaTable::scaled_linear();
        for t in [0.0, 0.25, 1.0, 499.5, 998.0, 998.75, 999.0] {
            assert!((table.timestep(table.sigma(t)) - t).abs() < 1e-6, "{t}");
        }
        assert_eq!((table.timestep(1e9), table.timestep(0.0)), (999.0, 0.0));
    }

    #[test]
    fn a_shift_in_the_exponent_is_a_factor() {
        for (mu, u) in [(0.5f64, 0.25), (1.15, 0.75), (1.8, 0.001)] {
            let want = mu.exp() / (mu.exp() + 1.0 / u - 1.0);
            assert!((shifted(mu.exp(), u) - want).abs() < 1e-12);
        }
    }

    #[test]
    fn stored_tables_are_checked() {
        let falling: Vec<f32> = (0..1000).map(|i| 0.999f32.powi(i)).collect();
        let table = SigmaTable::from_alphas_cumprod(&falling).unwrap();
        assert_eq!(table.min(), 1e-6f64.ln().exp(), "an alpha of 1 is held above no noise");
        let with = |i: usize, v: f32| {
            let mut a = falling.clone();
            a[i] = v;
            SigmaTable::from_alphas_cumprod(&a).map_err(|e| e.to_string())
        };
        for (bad, message) in [
            (SigmaTable::from_alphas_cumprod(&falling[1..]).map_err(|e| e.to_string()), "got 999"),
            (with(999, 0.0), "value 999 is 0"),
            (with(3, f32::NAN), "value 3 is NaN"),
            (with(3, 1.5), "value 3 is 1.5"),
            (with(500, 1.0), "value 500 is 1, above"),
        ] {
            let e = bad.unwrap_err();
            assert!(e.starts_with("alphas_cumprod: ") && e.contains(message), "{e}");
        }
        // Half precision repeats neighbours; the inverse stays finite.
        let flat = SigmaTable::from_alphas_cumprod(&[0.5; 1000]).unwrap();
        assert!(flat.timestep(1.0).is_finite() && flat.sigma(3.5) == 1.0);
    }
}
