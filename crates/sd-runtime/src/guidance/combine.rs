//! One prediction from those under each condition.

use super::apg::Apg;

/// The raw predictions of one evaluation.
#[derive(Debug, Clone, Default)]
pub struct Predictions {
    /// Under the prompt, with all pictures.
    pub cond: Vec<f32>,
    /// Under the negative prompt, with all pictures.
    pub uncond: Option<Vec<f32>>,
    /// Under the negative prompt, without the pictures.
    pub image_uncond: Option<Vec<f32>>,
    /// Under the prompt, with layers skipped.
    pub skipped: Option<Vec<f32>>,
}

/// How strongly to follow what.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scales {
    /// The prompt against the negative prompt; 1 is no guidance.
    pub text: f64,
    /// With the pictures against without; read only where there is a prediction without.
    pub image: f64,
    /// All layers against skipped ones; 0 is no guidance.
    pub skip: f64,
}

impl Predictions {
    /// The prediction with the least guidance, which CFG++ takes noise from.
    pub fn base(&self) -> &[f32] {
        self.image_uncond.as_deref().or(self.uncond.as_deref()).unwrap_or(&self.cond)
    }
}

/// Combines predictions, with what adaptive projected guidance keeps from step to step.
#[derive(Debug, Clone, Default)]
pub struct Guidance {
    apg: Apg,
    running: Vec<f64>,
}

impl Guidance {
    /// Guidance at the start of a run.
    pub fn new(apg: Apg) -> Guidance {
        Guidance { apg, running: Vec::new() }
    }

    /// Classifier-free guidance (Ho and Salimans 2022), `u + text (c - u)`; with pictures InstructPix2Pix's, `i + image
    /// (u - i) + text (c - u)` (Brooks et al. 2023, equation 3); then skipped layers, `+ skip (c - s)`. Without an
    /// unconditional prediction, the conditional one.
    pub fn combine(&mut self, p: &Predictions, scales: Scales) -> Vec<f32> {
        let Scales { text, image, skip } = scales;
        // Weights of c, u, i: the combination is c + (text - 1) * difference.
        let (uncond, image_uncond) = (p.uncond.as_deref(), p.image_uncond.as_deref());
        let weights = match (uncond, image_uncond) {
            (None, None) => [1.0, 0.0, 0.0],
            (Some(_), None) => [text, 1.0 - text, 0.0],
            (None, Some(_)) => [text, 0.0, 1.0 - text],
            (Some(_), Some(_)) => [text, image - text, 1.0 - image],
        };
        let guided = uncond.is_some() || image_uncond.is_some();
        let value = |v: Option<&[f32]>, i: usize| v.and_then(|v| v.get(i)).map_or(0.0, |v| f64::from(*v));
        let sum =
            |w: [f64; 3], i: usize, c: f64| w[0] * c + w[1] * value(uncond, i) + w[2] * value(image_uncond, i);
        let terms = |w: [f64; 3]| p.cond.iter().enumerate().map(move |(i, c)| sum(w, i, f64::from(*c)));
        let mut out: Vec<f64> = if guided && self.apg.is_on() && text != 1.0 {
            let [_, u, i] = weights.map(|w| w / (text - 1.0));
            let mut difference: Vec<f64> = terms([1.0, u, i]).collect();
            self.apg.apply(&mut difference, &p.cond, &mut self.running);
            p.cond.iter().zip(&difference).map(|(c, d)| f64::from(*c) + (text - 1.0) * d).collect()
        } else {
            terms(weights).collect()
        };
        if let Some(skipped) = p.skipped.as_deref().filter(|_| skip != 0.0) {
            for ((out, c), s) in out.iter_mut().zip(&p.cond).zip(skipped) {
                *out += skip * (f64::from(*c) - f64::from(*s));
            }
        }
        out.into_iter().map(|v| v as f32).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(cond: f32, uncond: Option<f32>, image_uncond: Option<f32>, scales: [f64; 3]) -> f32 {
        let some = |v: Option<f32>| v.map(|v| vec![v]);
        let (uncond, image_uncond) = (some(uncond), some(image_uncond));
        let p = Predictions { cond: vec![cond], uncond, image_uncond, skipped: Some(vec![1.5]) };
        let [text, image, skip] = scales;
        Guidance::default().combine(&p, Scales { text, image, skip })[0]
    }

    #[test]
    fn formulas() {
        assert_eq!(one(2.0, Some(1.0), None, [7.0, 1.0, 0.0]), 8.0);
        assert_eq!(one(2.0, None, None, [7.0, 1.0, 0.0]), 2.0);
        assert_eq!(one(2.0, Some(1.0), None, [0.0, 1.0, 0.0]), 1.0);
        assert_eq!(one(2.0, Some(1.0), Some(0.5), [7.0, 1.5, 0.0]), 0.5 + 1.5 * 0.5 + 7.0);
        assert_eq!(one(2.0, None, Some(0.5), [7.0, 1.5, 0.0]), 0.5 + 7.0 * 1.5);
        assert_eq!(one(2.0, Some(1.0), None, [7.0, 1.0, 3.0]), 8.0 + 1.5);
        assert_eq!(one(2.0, None, None, [7.0, 1.0, 3.0]), 2.0 + 1.5);
    }

    #[test]
    fn neutral_apg_is_plain_guidance() {
        // A threshold that is never reached, so that the path of APG runs.
        let apg = Apg { norm_threshold: 1e9, ..Apg::default() };
        let p = Predictions {
            cond: vec![2.0, -1.0, 0.3],
            uncond: Some(vec![1.0, 0.5, -0.2]),
            image_uncond: Some(vec![0.1, 0.2, 0.3]),
            skipped: None,
        };
        let scales = Scales { text: 7.5, image: 1.5, skip: 0.0 };
        let (got, want) = (Guidance::new(apg).combine(&p, scales), Guidance::default().combine(&p, scales));
        got.iter().zip(&want).for_each(|(g, w)| assert!((g - w).abs() < 1e-5, "{g} {w}"));
    }
}
