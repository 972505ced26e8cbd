//! Adaptive projected guidance (Sadat et al. 2024, "Eliminating oversaturation and artifacts of high guidance scales in
//! diffusion models", algorithm 1), on raw predictions as diffusers' `AdaptiveProjectedGuidance` does it.

/// How the difference between guided and unguided is changed before it is amplified.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Apg {
    /// Weight of the part that is parallel to the conditional prediction; 1 keeps it.
    pub eta: f64,
    /// Weight of the differences of earlier steps; negative values push away from them.
    pub momentum: f64,
    /// The largest length of the difference; 0 is off.
    pub norm_threshold: f64,
    /// How softly the length is held: 0 cuts it off.
    pub smoothing: f64,
}

impl Default for Apg {
    fn default() -> Apg {
        Apg { eta: 1.0, momentum: 0.0, norm_threshold: 0.0, smoothing: 0.0 }
    }
}

impl Apg {
    /// Whether anything differs from plain guidance.
    pub fn is_on(&self) -> bool {
        self.eta != 1.0 || self.momentum != 0.0 || self.norm_threshold > 0.0
    }

    /// Changes `difference`, given the conditional prediction; `running` is what earlier steps left.
    pub(super) fn apply(&self, difference: &mut [f64], cond: &[f32], running: &mut Vec<f64>) {
        if self.momentum != 0.0 {
            running.resize(difference.len(), 0.0);
            for (d, r) in difference.iter_mut().zip(running.iter_mut()) {
                *r = *d + self.momentum * *r;
                *d = *r;
            }
        }
        if self.norm_threshold > 0.0 {
            let norm = difference.iter().map(|d| d * d).sum::<f64>().sqrt();
            if norm > 0.0 {
                let scale = self.hold(self.norm_threshold / norm);
                difference.iter_mut().for_each(|d| *d *= scale);
            }
        }
        let square: f64 = cond.iter().map(|c| f64::from(*c).powi(2)).sum();
        if self.eta != 1.0 && square > 0.0 {
            let dot: f64 = difference.iter().zip(cond).map(|(d, c)| d * f64::from(*c)).sum();
            let w = (self.eta - 1.0) * dot / square;
            difference.iter_mut().zip(cond).for_each(|(d, c)| *d += w * f64::from(*c));
        }
    }

    /// The factor for a length of `1 / q` thresholds: `min(1, q)`, or a smooth curve below both.
    fn hold(&self, q: f64) -> f64 {
        if self.smoothing <= 0.0 || !q.powf(1.0 / self.smoothing).is_finite() {
            q.min(1.0)
        } else {
            q / (1.0 + q.powf(1.0 / self.smoothing)).powf(self.smoothing)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smooth_limit_stays_below_the_hard_one() {
        let apg = |smoothing: f64| Apg { norm_threshold: 1.0, smoothing, ..Apg::default() };
        for q in [0.01, 0.5, 1.0, 2.0, 100.0] {
            let (soft, hard) = (apg(0.5).hold(q), apg(0.0).hold(q));
            assert!(soft < hard && soft > 0.7 * hard, "{q}: {soft} {hard}");
            assert!((apg(1e-3).hold(q) - hard).abs() < 1e-3);
        }
        assert!((apg(1.0).hold(1.0) - 0.5).abs() < 1e-12);
    }
}
