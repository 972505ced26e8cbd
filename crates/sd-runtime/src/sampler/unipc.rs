//! UniPC (Zhao et al. 2023) of second order with B2(h): a predictor whose next evaluation also corrects it. diffusers'
//! `UniPCMultistepScheduler`.

use std::collections::VecDeque;

use sd_core::Result;

use super::step::{Method, Step, blend};

const ORDER: usize = 2;

#[derive(Default)]
pub(super) struct UniPc {
    /// Estimates and the logarithms of picture to noise at their levels, the latest first.
    history: VecDeque<(Vec<f32>, f64)>,
    /// The latent that the last step started from, its level, and the order of its prediction.
    last: Option<(Vec<f32>, f64, usize)>,
}

impl Method for UniPc {
    fn step(&mut self, at: &mut Step<'_, '_>, x: &mut [f32]) -> Result<Vec<f32>> {
        let (from, to) = (at.from(), at.to());
        let d = at.denoised(x, from)?;
        if let Some((start, level, order)) = self.last.take() {
            x.copy_from_slice(&start);
            self.solve(at, x, [level, from], order, Some(&d));
        }
        self.history.push_front((d.clone(), at.lambda(from)));
        self.history.truncate(ORDER);
        if to <= 0.0 {
            x.copy_from_slice(&d);
            return Ok(d);
        }
        let left = at.sigmas.len().saturating_sub(at.i + 1);
        let order = ORDER.min(left).min(self.history.len());
        self.last = Some((x.to_vec(), from, order));
        self.solve(at, x, [from, to], order, None);
        Ok(d)
    }
}

impl UniPc {
    /// Moves `x` between two levels from the estimates before, and the one `ahead` at the end where it is known.
    fn solve(&self, at: &Step<'_, '_>, x: &mut [f32], [from, to]: [f64; 2], order: usize, ahead: Option<&[f32]>) {
        let Some((m0, start)) = self.history.front() else { return };
        let (alpha, h) = (at.alpha(to), at.lambda(to) - start);
        let gain = (-h).exp_m1();
        // The moments that the weights of the differences must match, divided by B(h) = e^-h - 1.
        let first = gain / -h - 1.0;
        let moments = [first / gain, 2.0 * (first / -h - 0.5) / gain];
        let before = self.history.get(1).filter(|_| order > 1).map(|(m1, lambda)| (m1, (lambda - start) / h));
        let (past, next) = match (before.map(|(_, r)| r), ahead) {
            (None, _) => (0.0, 0.5),
            (Some(_), None) => (0.5, 0.0),
            (Some(r), Some(_)) => {
                let past = (moments[1] - moments[0]) / (r - 1.0);
                (past, moments[0] - past)
            }
        };
        let mut terms = vec![(-alpha * gain, m0.as_slice())];
        if let Some((m1, r)) = before.filter(|(_, r)| *r != 0.0) {
            let w = -alpha * gain * past / r;
            terms.extend([(w, m1.as_slice()), (-w, m0.as_slice())]);
        }
        if let Some(ahead) = ahead {
            let w = -alpha * gain * next;
            terms.extend([(w, ahead), (-w, m0.as_slice())]);
        }
        if h > 0.0 && terms.iter().all(|(w, _)| w.is_finite()) {
            blend(x, to / from, &terms);
        } else {
            blend(x, to / from, &[(alpha - at.alpha(from) * to / from, m0)]);
        }
    }
}
