//! Schedules of rectified flows whose shift depends on the size of the picture.

use super::table::{linear_mu, shifted};
use super::{ScheduleInput, SchedulerKind, quantile};

/// Sizes in 2x2 patches of the latent, and mu there: Black Forest Labs' `get_schedule` for Flux.1 dev.
const FLUX_TOKENS: [f64; 2] = [256.0, 4096.0];
const FLUX_MU: [f64; 2] = [0.5, 1.15];
/// Lightricks' sizes and their mu.
const LTX_TOKENS: [f64; 2] = [1024.0, 4096.0];
const LTX_MU: [f64; 2] = [0.95, 2.05];

/// The levels above 0.
pub(super) fn levels(kind: SchedulerKind, input: &ScheduleInput<'_>) -> Vec<f64> {
    let ScheduleInput { steps, tokens, options, .. } = input;
    let n = *steps;
    let mu = |sizes: [f64; 2], ends: [f64; 2]| {
        let ends = [options.base_shift.unwrap_or(ends[0]), options.max_shift.unwrap_or(ends[1])];
        linear_mu(*tokens, sizes, ends)
    };
    let even = |mu: f64| (0..n).map(|i| shifted(mu.exp(), 1.0 - i as f64 / n as f64)).collect::<Vec<f64>>();
    match kind {
        SchedulerKind::Flux2 => even(flux2_mu(*tokens, n)),
        SchedulerKind::Ltx2 => {
            let levels = even(mu(LTX_TOKENS, LTX_MU));
            let end = levels.last().map_or(0.0, |s| 1.0 - s);
            if !options.stretch || end <= 0.0 {
                return levels;
            }
            let scale = end / (1.0 - options.terminal);
            levels.into_iter().map(|s| 1.0 - (1.0 - s) / scale).collect()
        }
        SchedulerKind::LogitNormal => {
            let size = if options.resolution_aware { 0.5 * (*tokens as f64 / 1024.0).ln() } else { 0.0 };
            let logistic = |x: f64| 1.0 / (1.0 + (-x).exp());
            let [low, high] = options.logsnr.map(|l| logistic(0.5 * l));
            let level = |i: usize| {
                let z = quantile::normal(1.0 - i as f64 / n as f64);
                logistic(options.mu + size + options.std * z).clamp(low, high)
            };
            (0..n).map(level).collect()
        }
        _ => even(mu(FLUX_TOKENS, FLUX_MU)),
    }
}

/// Flux.2's mu, a plane through measured sizes and step counts (diffusers' `compute_empirical_mu`).
fn flux2_mu(tokens: usize, steps: usize) -> f64 {
    let line = |slope: f64, start: f64| slope * tokens as f64 + start;
    let at_200 = line(0.00016927, 0.45666666);
    if tokens > 4300 {
        return at_200;
    }
    let at_10 = line(8.73809524e-05, 1.89833333);
    at_200 + (at_200 - at_10) / 190.0 * (steps as f64 - 200.0)
}
