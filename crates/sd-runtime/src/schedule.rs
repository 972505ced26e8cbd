//! Noise levels: the table a diffusion model was trained on, and the schedules that pick from it.

use sd_core::{Error, Result};

use crate::names::named;

/// How the noise levels of a run are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SchedulerKind {
    /// Evenly spaced timesteps, from the last to the first.
    Discrete,
    /// Karras et al. 2022, equation 5, with rho 7.
    Karras,
}

named!(
    SchedulerKind,
    "scheduler",
    [("discrete", SchedulerKind::Discrete), ("normal", SchedulerKind::Discrete), ("karras", SchedulerKind::Karras),]
);

impl SchedulerKind {
    /// The name web UIs know it by.
    pub fn label(self) -> &'static str {
        match self {
            SchedulerKind::Discrete => "Normal",
            SchedulerKind::Karras => "Karras",
        }
    }

    /// The `steps + 1` noise levels of a run, falling, the last 0.
    pub fn sigmas(self, table: &SigmaTable, steps: usize) -> Vec<f64> {
        // The first level alone when there is one step.
        let part = |i: usize| if steps > 1 { i as f64 / (steps - 1) as f64 } else { 0.0 };
        let mut sigmas: Vec<f64> = match self {
            SchedulerKind::Discrete => (0..steps).map(|i| table.sigma(LAST * (1.0 - part(i)))).collect(),
            SchedulerKind::Karras => {
                let root = |sigma: f64| sigma.powf(1.0 / 7.0);
                let (high, low) = (root(table.max()), root(table.min()));
                (0..steps).map(|i| (high + part(i) * (low - high)).powi(7)).collect()
            }
        };
        sigmas.push(0.0);
        sigmas
    }
}

/// The number of training timesteps.
pub const TIMESTEPS: usize = 1000;
const LAST: f64 = (TIMESTEPS - 1) as f64;
/// The smallest noise level of a table; a stored one may claim no noise at all at its first timestep.
const LEAST_SIGMA: f64 = 1e-6;

/// The noise level of every training timestep: sigma = sqrt((1 - a) / a), `a` the cumulative product of alphas.
#[derive(Debug, Clone, PartialEq)]
pub struct SigmaTable {
    /// Rising, [`TIMESTEPS`] of them.
    log_sigmas: Vec<f64>,
}

impl SigmaTable {
    /// Stable Diffusion's "scaled linear" betas: the squares of evenly spaced values from sqrt(0.00085) to sqrt(0.012).
    pub fn scaled_linear() -> SigmaTable {
        let (first, last) = (0.00085f64.sqrt(), 0.012f64.sqrt());
        let mut product = 1.0;
        let alphas = (0..TIMESTEPS).map(|i| {
            let root = first + (last - first) * i as f64 / LAST;
            product *= 1.0 - root * root;
            product
        });
        SigmaTable { log_sigmas: alphas.map(log_sigma).collect() }
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
        Ok(SigmaTable { log_sigmas: alphas.iter().map(|a| log_sigma(f64::from(*a))).collect() })
    }

    /// The smallest noise level.
    pub fn min(&self) -> f64 {
        self.sigma(0.0)
    }

    /// The largest noise level.
    pub fn max(&self) -> f64 {
        self.sigma(LAST)
    }

    /// The noise level at a timestep, interpolated in the logarithm; `t` is held to the table.
    pub fn sigma(&self, t: f64) -> f64 {
        let t = t.clamp(0.0, LAST);
        let low = (t.floor() as usize).min(TIMESTEPS - 2);
        let (a, b) = self.pair(low);
        (a + (b - a) * (t - low as f64)).exp()
    }

    /// The timestep of a noise level, the inverse of [`SigmaTable::sigma`]; held to the table.
    pub fn timestep(&self, sigma: f64) -> f64 {
        let x = sigma.ln();
        let low = self.log_sigmas.partition_point(|s| *s <= x).saturating_sub(1).min(TIMESTEPS - 2);
        let (a, b) = self.pair(low);
        let part = if b > a { ((x - a) / (b - a)).clamp(0.0, 1.0) } else { 0.0 };
        low as f64 + part
    }

    fn pair(&self, low: usize) -> (f64, f64) {
        let at = |i: usize| self.log_sigmas.get(i).copied().unwrap_or(0.0);
        (at(low), at(low + 1))
    }
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
    fn edges() {
        let table = SigmaTable::scaled_linear();
        for kind in [SchedulerKind::Discrete, SchedulerKind::Karras] {
            assert_eq!(kind.sigmas(&table, 0), [0.0]);
            let one = kind.sigmas(&table, 1);
            assert!(one.len() == 2 && (one[0] - table.max()).abs() < 1e-9 && one[1] == 0.0);
            let many = kind.sigmas(&table, 1500);
            assert!(many.len() == 1501 && many.windows(2).all(|w| w[0] > w[1]));
            let ends = kind.sigmas(&table, 2);
            assert!((ends[0] - table.max()).abs() < 1e-9 && (ends[1] - table.min()).abs() < 1e-9);
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
