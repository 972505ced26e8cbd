//! How strong guidance is at which step.

use std::str::FromStr;

use sd_core::{Error, Result};

/// Guidance scales by step, `scale x count` after one another: `7x10+3x5`.
#[derive(Debug, Clone, PartialEq)]
pub struct GuidanceSchedule(Vec<(f64, usize)>);

/// How many steps an item may span.
const MOST: usize = 100_000;

impl GuidanceSchedule {
    /// The scale of each of `steps` steps, the first step first: `rest` for those that the list does not reach.
    pub fn scales(&self, steps: usize, rest: f64) -> Vec<f64> {
        let listed = self.0.iter().flat_map(|(scale, count)| std::iter::repeat_n(*scale, *count));
        listed.chain(std::iter::repeat(rest)).take(steps).collect()
    }
}

impl FromStr for GuidanceSchedule {
    type Err = Error;

    /// # Errors
    /// An item that is not a number of at least 0, `x` and a count of at least 1.
    fn from_str(text: &str) -> Result<GuidanceSchedule> {
        let item = |item: &str| {
            let (scale, count) = item.trim().split_once(['x', 'X'])?;
            let scale = scale.trim().parse().ok().filter(|s: &f64| s.is_finite() && *s >= 0.0)?;
            let count = count.trim().parse().ok().filter(|n| (1..=MOST).contains(n))?;
            Some((scale, count))
        };
        let items = text.split('+').map(|part| {
            item(part).ok_or_else(|| {
                let what =
                    format!("extra-sample-args: guidance_schedule wants scale x count, as 7x10+3x5, got {part:?}");
                Error::request(what)
            })
        });
        Ok(GuidanceSchedule(items.collect::<Result<_>>()?))
    }
}

/// A part of a run, as shares of its steps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interval {
    /// Where it starts, from 0.
    pub start: f64,
    /// Where it stops, at most 1.
    pub stop: f64,
}

impl Interval {
    /// The whole run.
    pub const ALL: Interval = Interval { start: 0.0, stop: 1.0 };

    /// Whether step `step` of `steps`, counted from 0, is in it (Kynkaanniemi et al. 2024; the rule of diffusers'
    /// guiders: both ends rounded down, the last one outside).
    pub fn contains(self, step: usize, steps: usize) -> bool {
        let at = |share: f64| (share * steps as f64) as usize;
        (at(self.start)..at(self.stop)).contains(&step)
    }

    /// The rule for skipped layers, where the first step is outside too (diffusers' `StableDiffusion3Pipeline`):
    /// strictly between the ends.
    pub fn is_inside(self, step: usize, steps: usize) -> bool {
        let (step, steps) = (step as f64, steps as f64);
        step > self.start * steps && step < self.stop * steps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedules() {
        let s: GuidanceSchedule = "7x2+3.5x1".parse().unwrap();
        assert_eq!(s.scales(5, 1.0), [7.0, 7.0, 3.5, 1.0, 1.0]);
        assert_eq!(s.scales(1, 1.0), [7.0]);
        for bad in ["", "7", "7x", "x2", "7x0", "-1x2", "nanx2", "7x2+", "7x1.5"] {
            assert!(bad.parse::<GuidanceSchedule>().is_err(), "{bad}");
        }
    }

    #[test]
    fn intervals() {
        let inside =
            |i: Interval, f: fn(Interval, usize, usize) -> bool| (0..28).filter(|s| f(i, *s, 28)).collect();
        let of: Vec<usize> = inside(Interval { start: 0.01, stop: 0.2 }, Interval::is_inside);
        assert_eq!(of, [1, 2, 3, 4, 5]);
        let of: Vec<usize> = inside(Interval { start: 0.25, stop: 0.4 }, Interval::contains);
        assert_eq!(of, [7, 8, 9, 10]);
        assert!((0..7).all(|s| Interval::ALL.contains(s, 7)));
    }
}
