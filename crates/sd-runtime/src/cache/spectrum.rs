//! Forecasts of the denoised estimate: a ridge fit of Chebyshev polynomials of the step (Han et al. 2026, "Adaptive Spectral
//! Feature Forecasting for Diffusion Sampling Acceleration"), mixed with a straight line.

use std::collections::VecDeque;

use super::options::SpectrumOptions;

/// The fewest estimates that are kept.
const LEAST_KEPT: usize = 6;
/// Steps that the polynomials' range stands for.
const RANGE: f64 = 50.0;

pub(crate) struct Spectrum {
    options: SpectrumOptions,
    steps: usize,
    window: f64,
    streak: usize,
    /// Computed estimates by step, the latest last.
    kept: VecDeque<(usize, Vec<f32>)>,
}

impl Spectrum {
    pub(super) fn new(options: SpectrumOptions, steps: usize) -> Spectrum {
        Spectrum { options, steps, window: options.window, streak: 0, kept: VecDeque::new() }
    }

    /// The estimate of a step, if it is forecast.
    pub(crate) fn forecast(&mut self, step: usize) -> Option<Vec<f32>> {
        let o = self.options;
        let open = step >= o.warmup && (step as f64) < o.stop * self.steps as f64 && self.kept.len() >= 2;
        let every = (self.window.floor() as usize).max(1);
        if !open || (self.streak + 1).is_multiple_of(every) {
            return None;
        }
        let mut weights = fit(&self.kept.iter().map(|k| k.0).collect::<Vec<_>>(), step, o.degree, o.ridge)?;
        weights.iter_mut().for_each(|w| *w *= o.weight);
        let line = [(1, 1.5), (2, -0.5)];
        for (back, share) in line {
            let at = weights.len().checked_sub(back)?;
            *weights.get_mut(at)? += (1.0 - o.weight) * share;
        }
        let size = self.kept.back()?.1.len();
        let value = |i: usize| {
            let terms = self.kept.iter().zip(&weights);
            terms.map(|((_, v), w)| w * f64::from(v.get(i).copied().unwrap_or(0.0))).sum::<f64>() as f32
        };
        self.streak += 1;
        Some((0..size).map(value).collect())
    }

    /// A computed estimate.
    pub(crate) fn store(&mut self, step: usize, estimate: Vec<f32>) {
        if self.kept.len() >= LEAST_KEPT.max(self.options.degree + 1) {
            self.kept.pop_front();
        }
        self.kept.push_back((step, estimate));
        if step >= self.options.warmup {
            self.window += self.options.flex;
        }
        self.streak = 0;
    }
}

/// `T_0` to `T_m` at the place of a step.
fn basis(step: usize, degree: usize) -> Vec<f64> {
    let x = step as f64 / RANGE * 2.0 - 1.0;
    let mut out = vec![1.0, x];
    while out.len() <= degree {
        let (a, b) = (out.len() - 2, out.len() - 1);
        let next = 2.0 * x * out.get(b).copied().unwrap_or(0.0) - out.get(a).copied().unwrap_or(0.0);
        out.push(next);
    }
    out.truncate(degree + 1);
    out
}

/// The weights of the values at `steps` in the value at `to` of their ridge fit: `b' (R' R + l I)^-1 R'`.
fn fit(steps: &[usize], to: usize, degree: usize, ridge: f64) -> Option<Vec<f64>> {
    let rows: Vec<Vec<f64>> = steps.iter().map(|step| basis(*step, degree)).collect();
    let n = degree + 1;
    let entry = |i: usize, j: usize| -> Option<f64> {
        let sum: f64 = rows.iter().map(|r| Some(r.get(i)? * r.get(j)?)).sum::<Option<f64>>()?;
        Some(sum + if i == j { ridge } else { 0.0 })
    };
    // (R' R + l I) z = b, which is symmetric and positive definite, so that elimination needs no exchange of rows.
    let mut system: Vec<Vec<f64>> = (0..n).map(|i| (0..n).map(|j| entry(i, j)).collect()).collect::<Option<_>>()?;
    for (row, b) in system.iter_mut().zip(basis(to, degree)) {
        row.push(b);
    }
    for k in 0..n {
        let pivot = system.get(k)?.clone();
        for row in system.iter_mut().skip(k + 1) {
            let factor = row.get(k)? / pivot.get(k)?;
            row.iter_mut().zip(&pivot).skip(k).for_each(|(x, p)| *x -= factor * p);
        }
    }
    let mut z = vec![0.0; n];
    for k in (0..n).rev() {
        let row = system.get(k)?;
        let known: f64 = row.iter().zip(&z).skip(k + 1).map(|(a, z)| a * z).sum();
        *z.get_mut(k)? = (row.get(n)? - known) / row.get(k)?;
    }
    Some(rows.iter().map(|row| row.iter().zip(&z).map(|(r, z)| r * z).sum()).collect())
}
