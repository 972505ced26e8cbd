//! Caches of whole predictions: what the network added to its input is added again.

use super::options::UOptions;
use super::{distance, mean};

/// The share of the old value in the average of an output's change.
const SMOOTHING: f64 = 0.8;
/// What that average is multiplied by, and the least it counts as.
const SPREAD: f64 = 1.6;
const LEAST_CHANGE: f64 = 1e-6;
/// How much an error weighs more for each step that was left out before it.
const STREAK: f64 = 0.5;
/// Up to which share of computed steps the threshold is that much lower, and from which higher.
const EARLY: [f64; 2] = [0.2, 0.5];
const LATE: [f64; 2] = [0.8, 1.5];

/// In which steps predictions are reused.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Window {
    /// Above the first and up to the second level of noise.
    Levels([f64; 2]),
    /// From the first step up to the second, which is left out.
    Steps([usize; 2]),
}

/// Predictions under conditions `K`, of which the first decides.
pub(crate) struct Whole<K> {
    window: Window,
    steps: usize,
    threshold: f64,
    /// Of ucache.
    unet: Option<UOptions>,
    /// The input of the last step.
    before: Vec<f32>,
    computed: Option<Computed<K>>,
    /// How much the output changed for the change of the input, when both were computed last.
    rate: Option<f64>,
    /// The average change of the output.
    average: Option<f64>,
    error: f64,
    streak: usize,
    count: usize,
}

struct Computed<K> {
    input: Vec<f32>,
    outputs: Vec<(K, Vec<f32>)>,
}

impl<K: Copy + PartialEq> Whole<K> {
    /// EasyCache (Zhou et al. 2025, algorithm 1).
    pub(crate) fn easy(threshold: f64, window: Window) -> Whole<K> {
        Whole {
            window,
            steps: 1,
            threshold,
            unet: None,
            before: Vec::new(),
            computed: None,
            rate: None,
            average: None,
            error: 0.0,
            streak: 0,
            count: 0,
        }
    }

    pub(crate) fn ucache(options: UOptions, steps: usize) -> Whole<K> {
        let at = |share: f64| (share * steps as f64).floor() as usize;
        let window = Window::Steps([at(options.start), at(options.end)]);
        Whole { steps: steps.max(1), unet: Some(options), ..Whole::easy(options.threshold, window) }
    }

    /// What each condition gives for `input` in a step, if the network need not be asked.
    pub(crate) fn reuse(&mut self, step: usize, sigma: f64, input: &[f32], kinds: &[K]) -> Option<Vec<Vec<f32>>> {
        let inside = match self.window {
            Window::Levels([low, high]) => low < sigma && sigma <= high,
            Window::Steps([first, end]) => first <= step && step < end,
        };
        let change = distance(input, &self.before);
        self.before = input.to_vec();
        let (computed, rate) = (self.computed.as_ref()?, self.rate?);
        let anchor = mean(computed.outputs.first()?.1.iter().copied());
        if !inside {
            return None;
        }
        let missed = rate * change;
        let threshold = match &self.unet {
            None => {
                self.error += missed / anchor;
                self.threshold
            }
            Some(o) => {
                let usual = (SPREAD * self.average.unwrap_or(0.0)).max(LEAST_CHANGE);
                let relative = if o.relative { (anchor * usual).sqrt() } else { 1.0 };
                self.error = self.error * o.decay + missed / relative * (1.0 + STREAK * self.streak as f64);
                let progress = self.count as f64 / self.steps as f64;
                self.threshold
                    * match progress {
                        p if p < EARLY[0] => EARLY[1],
                        p if p > LATE[0] => LATE[1],
                        _ => 1.0,
                    }
            }
        };
        if self.error.is_nan() || self.error >= threshold {
            return None;
        }
        let one = |kind: &K| {
            let (_, output) = computed.outputs.iter().find(|(k, _)| k == kind)?;
            let parts = input.iter().zip(output).zip(&computed.input);
            Some(parts.map(|((x, y), was)| x + (y - was)).collect())
        };
        let out = kinds.iter().map(one).collect::<Option<_>>();
        self.streak += usize::from(out.is_some());
        out
    }

    /// What the network gave after [`Whole::reuse`] gave nothing.
    pub(crate) fn store(&mut self, input: &[f32], outputs: &[(K, Vec<f32>)]) {
        let Some((_, new)) = outputs.first() else { return };
        if let Some((computed, old)) = self.computed.as_ref().and_then(|c| Some((c, &c.outputs.first()?.1))) {
            let change = distance(new, old);
            let moved = distance(input, &computed.input);
            self.rate = (moved > 0.0).then(|| change / moved);
            self.average = Some(self.average.map_or(change, |a| SMOOTHING * a + (1.0 - SMOOTHING) * change));
        }
        if self.unet.is_none_or(|o| o.reset) {
            self.error = 0.0;
        }
        self.streak = 0;
        self.count += 1;
        self.computed = Some(Computed { input: input.to_vec(), outputs: outputs.to_vec() });
    }
}
