//! Noise levels: the table a diffusion model was trained on, and the schedules that pick from it.

mod flows;
mod kind;
mod quantile;
mod table;
mod tables;

use sd_core::{Error, Result};

use crate::sampler::SampleOptions;

pub use kind::SchedulerKind;
pub(crate) use table::linear_mu;
pub use table::{SigmaTable, TIMESTEPS, shifted};
pub use tables::Ays;

/// What the noise levels of a run depend on, besides the kind of schedule.
#[derive(Debug, Clone)]
pub struct ScheduleInput<'a> {
    /// The levels that the model was trained on.
    pub table: &'a SigmaTable,
    /// Sampler steps.
    pub steps: usize,
    /// Tokens of the picture in the diffusion network, for shifts that depend on the size; of a video, times frames.
    pub tokens: usize,
    /// Whose levels `ays` takes.
    pub ays: Option<Ays>,
    /// Fine tuning.
    pub options: SampleOptions,
}

impl<'a> ScheduleInput<'a> {
    /// `steps` steps for a picture of 1024x1024 pixels.
    pub fn new(table: &'a SigmaTable, steps: usize) -> ScheduleInput<'a> {
        ScheduleInput { table, steps, tokens: 4096, ays: None, options: SampleOptions::default() }
    }
}

/// The smallest level from which curves are drawn.
const LEAST: f64 = 1e-6;
/// Karras et al.'s exponent.
const RHO: f64 = 7.0;
/// How many timesteps latent consistency models are distilled to.
const LCM_STEPS: usize = 50;

impl SchedulerKind {
    /// The noise levels of a run, falling, the last 0: one more than the steps, but fewer where `beta` would repeat one.
    ///
    /// # Errors
    /// A schedule that the model has no levels for, or options with which levels are no numbers.
    pub fn sigmas(self, input: &ScheduleInput<'_>) -> Result<Vec<f64>> {
        let ScheduleInput { table, steps, options, .. } = input;
        let (table, n) = (*table, *steps);
        if n == 0 {
            return Ok(vec![0.0]);
        }
        let (high, low) = (table.max(), table.min().max(LEAST));
        // Shares of the way that reach its end, and that stop before it.
        let part = |i: usize| if n > 1 { i as f64 / (n - 1) as f64 } else { 0.0 };
        let open = |i: usize| i as f64 / n as f64;
        let last = (table.entries() - 1) as f64;
        let each = |level: &dyn Fn(usize) -> f64| (0..n).map(level).collect::<Vec<f64>>();
        let mut sigmas = match self {
            SchedulerKind::Discrete => each(&|i| table.even(part(i))),
            SchedulerKind::SgmUniform => each(&|i| table.even(open(i))),
            SchedulerKind::Karras => {
                let (high, low) = (high.powf(1.0 / RHO), low.powf(1.0 / RHO));
                each(&|i| (high + part(i) * (low - high)).powf(RHO))
            }
            SchedulerKind::Exponential => each(&|i| (high.ln() + part(i) * (low.ln() - high.ln())).exp()),
            SchedulerKind::KlOptimal => each(&|i| (part(i) * low.atan() + (1.0 - part(i)) * high.atan()).tan()),
            SchedulerKind::Simple => {
                let stride = (last + 1.0) / n as f64;
                each(&|i| table.entry(last - whole(i as f64 * stride, n, table.entries())))
            }
            SchedulerKind::Smoothstep => each(&|i| {
                let u = 1.0 - open(i);
                table.entry((last * u * u * (3.0 - 2.0 * u)).round())
            }),
            SchedulerKind::Lcm => {
                let stride = (TIMESTEPS / LCM_STEPS) as f64;
                each(&|i| {
                    let skipped = whole((i * LCM_STEPS) as f64 / n as f64, n, LCM_STEPS);
                    table.sigma((LCM_STEPS as f64 - skipped) * stride - 1.0)
                })
            }
            SchedulerKind::Beta => {
                let [alpha, beta] = options.beta;
                // A quantile that is halfway but for its last digits is rounded as the half.
                let rounded = |k: f64| ((k * 1e9).round() / 1e9).round_ties_even();
                let mut places = each(&|i| rounded(quantile::beta(1.0 - open(i), alpha, beta) * last));
                places.dedup();
                places.into_iter().map(|k| table.entry(k)).collect()
            }
            SchedulerKind::BongTangent => bong_tangent(n).into_iter().map(|u| u * high).collect(),
            SchedulerKind::Ays => {
                let Some(ays) = input.ays else {
                    return Err(self.unfit("it has levels for SD1, SD2, SDXL and SVD alone"));
                };
                if table.is_flow() {
                    return Err(self.unfit("this model is a rectified flow"));
                }
                log_linear(ays.levels(), n)
            }
            SchedulerKind::Gits => {
                if table.is_flow() {
                    return Err(self.unfit("this model is a rectified flow"));
                }
                match tables::GITS.get(n.wrapping_sub(2)).or(tables::GITS.last()) {
                    Some(row) if row.len() == n + 1 => row.iter().take(n).copied().collect(),
                    Some(row) => log_linear(row, n),
                    None => Vec::new(),
                }
            }
            SchedulerKind::Flux | SchedulerKind::Flux2 | SchedulerKind::Ltx2 | SchedulerKind::LogitNormal => {
                if !table.is_flow() {
                    return Err(self.unfit("this model is not a rectified flow"));
                }
                flows::levels(self, input)
            }
        };
        if let Some(wrong) = sigmas.iter().find(|s| !s.is_finite()) {
            let message = format!("extra-sample-args: {self} has a noise level of {wrong} with these options");
            return Err(Error::request(message));
        }
        sigmas.push(0.0);
        Ok(sigmas)
    }

    fn unfit(self, why: &str) -> Error {
        Error::request(format!("scheduler: {self} does not fit, {why}"))
            .hint("choose discrete, which fits every model")
    }
}

/// Rounded down, unless there are more steps than levels to pick from, where that would repeat one.
fn whole(k: f64, steps: usize, entries: usize) -> f64 {
    if steps > entries { k } else { k.floor() }
}

/// The first `n` of `n + 1` levels between the ends of `levels`, interpolated in the logarithm.
fn log_linear(levels: &[f64], n: usize) -> Vec<f64> {
    let last = levels.len().saturating_sub(1);
    let at = |k: usize| levels.get(k.min(last)).copied().unwrap_or(LEAST).ln();
    let one = |i: usize| {
        let place = i as f64 / n as f64 * last as f64;
        let low = place.floor() as usize;
        (at(low) + (at(low + 1) - at(low)) * (place - low as f64)).exp()
    };
    (0..n).map(one).collect()
}

/// RES4LYF's `bong_tangent` with its defaults: two arcs of the arctangent, from 1 to 1/2 and from there to 0, without
/// the end.
fn bong_tangent(n: usize) -> Vec<f64> {
    if n == 1 {
        return vec![1.0];
    }
    let total = n + 2;
    let pivot = (total as f64 * 0.6) as usize;
    let slope = 0.2 / (total as f64 / 40.0);
    let arc = |len: usize, pivot: f64, start: f64, end: f64| {
        let f = move |x: usize| (-slope * (x as f64 - pivot)).atan();
        let (top, bottom) = (f(0), f(len.saturating_sub(1)));
        (0..len).map(move |x| (f(x) - bottom) / (top - bottom) * (start - end) + end)
    };
    let first = arc(pivot, pivot as f64, 1.0, 0.5).take(pivot.saturating_sub(1));
    first.chain(arc(total - pivot, 0.0, 0.5, 0.0)).take(n).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sigmas(kind: SchedulerKind, table: &SigmaTable, steps: usize) -> Vec<f64> {
        let input = ScheduleInput { ays: Some(Ays::Sd1), ..ScheduleInput::new(table, steps) };
        kind.sigmas(&input).unwrap()
    }

    #[test]
    fn every_schedule_falls_to_0_at_any_number_of_steps() {
        let tables = [SigmaTable::scaled_linear(), SigmaTable::flow(3.0, 1000.0), SigmaTable::flux(3.0, 1.0)];
        let mut seen = 0;
        for (table, name) in tables.iter().flat_map(|t| SchedulerKind::names().map(move |n| (t, n))) {
            let kind: SchedulerKind = name.parse().unwrap();
            let input = ScheduleInput { ays: Some(Ays::Sd1), ..ScheduleInput::new(table, 4) };
            if kind.sigmas(&input).is_err() {
                continue;
            }
            seen += 1;
            assert_eq!(sigmas(kind, table, 0), [0.0]);
            for steps in [1, 2, 3, 4, 7, 20, 21, 50, 51, 1000, 1500] {
                let got = sigmas(kind, table, steps);
                let whole = kind == SchedulerKind::Beta || got.len() == steps + 1;
                assert!(whole && got.len() > 1 && got.len() <= steps + 1, "{kind} {steps}: {}", got.len());
                assert!(got.iter().all(|s| s.is_finite()) && got.last() == Some(&0.0), "{kind} {steps}");
                assert!(got.windows(2).all(|w| w[0] >= w[1]), "{kind} {steps}: {got:?}");
                // The most noise, or as near as the schedule means to start.
                let start = got[0] / table.max();
                assert!(start > 0.99 && start < 1.0 + 1e-6, "{kind} {steps}: starts at {start}");
            }
        }
        assert!(seen >= 40, "{seen}");
    }

    #[test]
    fn a_schedule_that_does_not_fit_is_refused() {
        let (table, flow) = (SigmaTable::scaled_linear(), SigmaTable::flow(3.0, 1000.0));
        let check = |kind: SchedulerKind, table: &SigmaTable| {
            let e = kind.sigmas(&ScheduleInput::new(table, 4)).unwrap_err();
            assert!(e.is_request() && e.to_string().contains(&format!("scheduler: {kind} does not fit")), "{e}");
        };
        for kind in [SchedulerKind::Flux, SchedulerKind::Flux2, SchedulerKind::Ltx2, SchedulerKind::LogitNormal] {
            check(kind, &table);
        }
        check(SchedulerKind::Gits, &flow);
        check(SchedulerKind::Ays, &flow);
        check(SchedulerKind::Ays, &table);
    }

    #[test]
    fn options_without_levels_are_refused() {
        let table = SigmaTable::flux(3.0, 1.0);
        let options = "base_shift=1e6,max_shift=1e6".parse().unwrap();
        let e =
            SchedulerKind::Flux.sigmas(&ScheduleInput { options, ..ScheduleInput::new(&table, 4) }).unwrap_err();
        assert!(e.is_request() && e.to_string().starts_with("extra-sample-args: flux has"), "{e}");
    }

    #[test]
    fn ends() {
        let table = SigmaTable::scaled_linear();
        for kind in [SchedulerKind::Discrete, SchedulerKind::Karras] {
            let one = sigmas(kind, &table, 1);
            assert!(one.len() == 2 && (one[0] - table.max()).abs() < 1e-9);
            let ends = sigmas(kind, &table, 2);
            assert!((ends[0] - table.max()).abs() < 1e-9 && (ends[1] - table.min()).abs() < 1e-9);
        }
    }
}
