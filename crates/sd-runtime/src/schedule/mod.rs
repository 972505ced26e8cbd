//! Noise levels: the table a diffusion model was trained on, and the schedules that pick from it.

mod table;

use crate::names::named;

use table::LAST;
pub use table::{SigmaTable, TIMESTEPS, flux_shift, shifted};

/// How the noise levels of a run are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SchedulerKind {
    /// Evenly spaced timesteps, from the last to the first.
    Discrete,
    /// Karras et al. 2022, equation 5, with rho 7.
    Karras,
    /// Evenly spaced logarithms of the noise level.
    Exponential,
    /// Every so many entries of the table, from the last on.
    Simple,
    /// Flux's: evenly spaced shares of noise, shifted by the size of the picture.
    Flux,
}

named!(
    SchedulerKind,
    "scheduler",
    [
        ("discrete", SchedulerKind::Discrete),
        ("normal", SchedulerKind::Discrete),
        ("karras", SchedulerKind::Karras),
        ("exponential", SchedulerKind::Exponential),
        ("simple", SchedulerKind::Simple),
        ("flux", SchedulerKind::Flux),
    ]
);

impl SchedulerKind {
    /// The name web UIs know it by.
    pub fn label(self) -> &'static str {
        match self {
            SchedulerKind::Discrete => "Normal",
            SchedulerKind::Karras => "Karras",
            SchedulerKind::Exponential => "Exponential",
            SchedulerKind::Simple => "Simple",
            SchedulerKind::Flux => "Flux",
        }
    }

    /// The `steps + 1` noise levels of a run, falling, the last 0.
    pub fn sigmas(self, input: &ScheduleInput<'_>) -> Vec<f64> {
        let ScheduleInput { table, steps, tokens } = *input;
        // The first level alone when there is one step.
        let part = |i: usize| if steps > 1 { i as f64 / (steps - 1) as f64 } else { 0.0 };
        let mut sigmas: Vec<f64> = match self {
            SchedulerKind::Discrete => (0..steps).map(|i| table.sigma(LAST * (1.0 - part(i)))).collect(),
            SchedulerKind::Karras => {
                let root = |sigma: f64| sigma.powf(1.0 / 7.0);
                let (high, low) = (root(table.max()), root(table.min()));
                (0..steps).map(|i| (high + part(i) * (low - high)).powi(7)).collect()
            }
            SchedulerKind::Exponential => {
                let (high, low) = (table.max().ln(), table.min().ln());
                (0..steps).map(|i| (high + part(i) * (low - high)).exp()).collect()
            }
            SchedulerKind::Simple => {
                let skip = |i: usize| (i * TIMESTEPS) as f64 / steps as f64;
                let whole = |t: f64| if steps > TIMESTEPS { t } else { t.floor() };
                (0..steps).map(|i| table.sigma(LAST - whole(skip(i)))).collect()
            }
            SchedulerKind::Flux => {
                let shift = flux_shift(tokens);
                (0..steps).map(|i| shifted(shift, 1.0 - i as f64 / steps as f64)).collect()
            }
        };
        sigmas.push(0.0);
        sigmas
    }
}

/// What the noise levels of a run depend on, besides the kind of schedule.
#[derive(Debug, Clone, Copy)]
pub struct ScheduleInput<'a> {
    /// The levels that the model was trained on.
    pub table: &'a SigmaTable,
    /// Sampler steps.
    pub steps: usize,
    /// Tokens of the picture in the diffusion network, for shifts that depend on the size.
    pub tokens: usize,
}

impl<'a> ScheduleInput<'a> {
    /// `steps` steps for a picture of 1024x1024 pixels.
    pub fn new(table: &'a SigmaTable, steps: usize) -> ScheduleInput<'a> {
        ScheduleInput { table, steps, tokens: 4096 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edges() {
        let table = SigmaTable::scaled_linear();
        let sigmas = |kind: SchedulerKind, steps| kind.sigmas(&ScheduleInput::new(&table, steps));
        for kind in [SchedulerKind::Discrete, SchedulerKind::Karras] {
            assert_eq!(sigmas(kind, 0), [0.0]);
            let one = sigmas(kind, 1);
            assert!(one.len() == 2 && (one[0] - table.max()).abs() < 1e-9 && one[1] == 0.0);
            let many = sigmas(kind, 1500);
            assert!(many.len() == 1501 && many.windows(2).all(|w| w[0] > w[1]));
            let ends = sigmas(kind, 2);
            assert!((ends[0] - table.max()).abs() < 1e-9 && (ends[1] - table.min()).abs() < 1e-9);
        }
    }
}
