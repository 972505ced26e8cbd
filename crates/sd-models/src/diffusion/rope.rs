//! Rotary tables for positions of several axes, as diffusion transformers use them: each axis turns its own share of a
//! head's channels.

use std::f64::consts::TAU;

use sd_core::{Error, Result, Tensor};

/// Cosines and sines `[t, d / 2]` of `t` positions, where `d` is the sum of `axes`. Pair `i` of an axis of `n` channels
/// turns by `theta^(-2 i / n)` per step (Su et al. 2021, section 3.2.2).
///
/// Along an axis with a period, each frequency is replaced by the nearest that repeats with it, so that what leaves the
/// picture on one side comes in on the other.
///
/// # Errors
/// An axis has an odd number of channels.
pub(super) fn tables<const N: usize>(
    axes: [usize; N],
    theta: f64,
    positions: &[[i32; N]],
    periods: [Option<usize>; N],
) -> Result<[Tensor; 2]> {
    let mut frequencies: Vec<(usize, f64)> = Vec::new();
    for (axis, (n, period)) in axes.into_iter().zip(periods).enumerate() {
        if !n.is_multiple_of(2) {
            return Err(Error::internal(format!("rotary axis {axis} has {n} channels")));
        }
        for i in (0..n).step_by(2) {
            let f = theta.powf(-(i as f64) / n as f64);
            let step = period.filter(|&p| p > 0).map(|p| TAU / p as f64);
            frequencies.push((axis, step.map_or(f, |s| (f / s).round() * s)));
        }
    }
    let angle = |p: &[i32; N], (axis, f): (usize, f64)| f64::from(p.get(axis).copied().unwrap_or(0)) * f;
    let table = |of: fn(f64) -> f64| {
        let values = positions.iter().flat_map(|p| frequencies.iter().map(move |&f| of(angle(p, f)) as f32));
        Tensor::f32(&[positions.len(), frequencies.len()], values.collect())
    };
    Ok([table(f64::cos)?, table(f64::sin)?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_axis_turns_its_own_pairs() {
        let [cos, sin] = tables([4, 2], 100.0, &[[0, 0], [2, 3], [-1, 0]], [None; 2]).unwrap();
        // Frequencies 1 and 1/10 of the first axis, 1 of the second.
        let angles = [0.0, 0.0, 0.0, 2.0, 0.2, 3.0, -1.0, -0.1, 0.0f64];
        let near = |t: &Tensor, f: fn(f64) -> f64| {
            assert_eq!(t.dims(), [3, 3]);
            assert!(t.values().iter().zip(angles).all(|(&v, a)| (f64::from(v) - f(a)).abs() < 1e-7));
        };
        near(&cos, f64::cos);
        near(&sin, f64::sin);
        assert!(tables([3], 100.0, &[[0]], [None]).is_err());
    }

    #[test]
    fn with_a_period_both_sides_meet() {
        let [cos, sin] =
            tables([8, 8], 1e4, &[[0, 0], [12, 0], [5, 0], [17, 0], [0, 12]], [Some(12), None]).unwrap();
        let row = |t: &Tensor, i: usize| t.values()[8 * i..8 * i + 8].to_vec();
        let equal = |a: usize, b: usize| {
            [&cos, &sin].iter().all(|t| row(t, a).iter().zip(row(t, b)).all(|(x, y)| (x - y).abs() < 1e-6))
        };
        assert!(equal(0, 1) && equal(2, 3));
        assert!(!equal(0, 2) && !equal(0, 4));
    }
}
