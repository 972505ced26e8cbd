//! Linear multistep methods: the next step from the directions at earlier levels.

use std::collections::VecDeque;

use sd_core::Result;

use super::step::{Method, Step, blend, direction};

/// Directions of the flow at the levels visited, the latest first.
#[derive(Default)]
pub(super) struct Directions(VecDeque<Vec<f32>>);

impl Directions {
    /// Evaluates at the start of the step and puts its direction first, keeping `order` of them.
    fn next(&mut self, at: &mut Step<'_, '_>, x: &[f32], order: usize) -> Result<Vec<f32>> {
        let d = at.denoised(x, at.from())?;
        self.0.push_front(direction(x, &d, at.from()));
        self.0.truncate(order.max(1));
        Ok(d)
    }

    /// `x` plus the directions by weight, the latest first.
    fn apply(&self, x: &mut [f32], weights: &[f64]) {
        let terms: Vec<(f64, &[f32])> = weights.iter().copied().zip(self.0.iter().map(Vec::as_slice)).collect();
        blend(x, 1.0, &terms);
    }
}

/// Improved PNDM of up to fourth order (Zhang and Chen 2023; diff-sampler's and ComfyUI's `sample_ipndm` and
/// `sample_ipndm_v`): Adams-Bashforth with constant coefficients, or with those of the steps' true lengths.
#[derive(Default)]
pub(super) struct Ipndm {
    pub(super) variable: bool,
    pub(super) directions: Directions,
}

const ORDER: usize = 4;

impl Method for Ipndm {
    fn step(&mut self, at: &mut Step<'_, '_>, x: &mut [f32]) -> Result<Vec<f32>> {
        let d = self.directions.next(at, x, ORDER)?;
        if at.to() <= 0.0 {
            x.copy_from_slice(&d);
            return Ok(d);
        }
        // This step's length and those before it.
        let h = [0, -1, -2, -3].map(|k| at.level(k + 1) - at.level(k));
        let distinct = h.iter().take(self.directions.0.len()).all(|h| *h != 0.0);
        let weights = match self.directions.0.len() {
            n if self.variable && distinct => variable_weights(n, h),
            1 => vec![1.0],
            2 => vec![3.0 / 2.0, -1.0 / 2.0],
            3 => vec![23.0 / 12.0, -16.0 / 12.0, 5.0 / 12.0],
            _ => vec![55.0 / 24.0, -59.0 / 24.0, 37.0 / 24.0, -9.0 / 24.0],
        };
        let weights: Vec<f64> = weights.into_iter().map(|w| w * h[0]).collect();
        self.directions.apply(x, &weights);
        Ok(d)
    }
}

/// The coefficients of `sample_ipndm_v` for `n` directions; `h` are the lengths of this step and the three before.
fn variable_weights(n: usize, [h0, h1, h2, h3]: [f64; 4]) -> Vec<f64> {
    let r1 = h0 / h1;
    let second = [1.0 + r1 / 2.0, -r1 / 2.0];
    if n == 1 {
        return vec![1.0];
    }
    if n == 2 {
        return second.to_vec();
    }
    let r2 = h1 / h2;
    let near = (1.0 - h0 / (3.0 * (h0 + h1)) * (h0 * (h0 + h1)) / (h1 * (h1 + h2))) / 2.0;
    let third = [second[0] + near, second[1] - (1.0 + r2) * near, near * r2];
    if n == 3 {
        return third.to_vec();
    }
    let far = ((1.0 - h0 / (3.0 * (h0 + h1))) / 2.0 + (1.0 - h0 / (2.0 * (h0 + h1))) * h0 / (6.0 * (h0 + h1 + h2)))
        * (h0 * (h0 + h1) * (h0 + h1 + h2))
        / (h1 * (h1 + h2) * (h1 + h2 + h3));
    let q = h1 * (h1 + h2) / (h2 * (h2 + h3));
    let fourth = [far, -(1.0 + r2 + q) * far, (r2 + q * (1.0 + h2 / h3)) * far, -far * q * r2];
    vec![third[0] + fourth[0], third[1] + fourth[1], third[2] + fourth[2], fourth[3]]
}

/// Linear multistep with the exact integrals of Lagrange's polynomials (k-diffusion's `sample_lms`).
pub(super) struct Lms {
    pub(super) max_order: usize,
    /// How many places later a coefficient's direction is taken: 0 is the method.
    pub(super) shift: usize,
    /// Integrates by the midpoint rule with so many divisions instead of exactly.
    pub(super) divisions: Option<usize>,
    pub(super) directions: Directions,
}

impl Method for Lms {
    fn step(&mut self, at: &mut Step<'_, '_>, x: &mut [f32]) -> Result<Vec<f32>> {
        let d = self.directions.next(at, x, self.max_order)?;
        if at.to() <= 0.0 {
            x.copy_from_slice(&d);
            return Ok(d);
        }
        let order = self.directions.0.len();
        let nodes: Vec<f64> = (0..order).map(|k| at.level(-(k as isize)) - at.from()).collect();
        let mut weights = vec![0.0; order];
        for j in 0..order {
            let w = lagrange_integral(&nodes, j, at.to() - at.from(), self.divisions);
            if let Some(slot) = weights.get_mut(j.saturating_sub(self.shift)) {
                *slot += if w.is_finite() { w } else { 0.0 };
            }
        }
        self.directions.apply(x, &weights);
        Ok(d)
    }
}

/// The integral from 0 to `end` of the polynomial that is 1 at node `j` and 0 at the others.
fn lagrange_integral(nodes: &[f64], j: usize, end: f64, divisions: Option<usize>) -> f64 {
    let own = nodes.get(j).copied().unwrap_or(0.0);
    let others = || nodes.iter().enumerate().filter(|(k, _)| *k != j).map(|(_, t)| *t);
    if let Some(n) = divisions {
        let part = end / n as f64;
        let value = |tau: f64| others().map(|t| (tau - t) / (own - t)).product::<f64>();
        return (0..n).map(|i| value((i as f64 + 0.5) * part)).sum::<f64>() * part;
    }
    // Coefficients of the product of (tau - t) / (own - t), constant first.
    let mut poly = vec![1.0];
    for t in others() {
        let shifted = std::iter::once(0.0).chain(poly.iter().copied());
        let scaled = poly.iter().map(|c| -t * c).chain(std::iter::once(0.0));
        poly = shifted.zip(scaled).map(|(a, b)| (a + b) / (own - t)).collect();
    }
    poly.iter().zip(1..).map(|(c, power)| c * end.powi(power) / f64::from(power)).sum()
}
