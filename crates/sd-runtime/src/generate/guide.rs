//! Which predictions a step needs, and how strongly each is followed.

use crate::guidance::{Guidance, Interval, Predictions, Scales};
use crate::parameters::Parameters;
use crate::request::SkipLayers;
use crate::sampler::SampleOptions;

/// A prediction of the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Under the prompt.
    Prompt,
    /// Under the negative prompt.
    Negative,
    /// Under the negative prompt and without pictures.
    Blank,
    /// Under the prompt, by a network that lacks some blocks.
    Skipped,
    /// Under the negative prompt, by a network that lacks some blocks.
    NegativeSkipped,
}

/// How strongly a run follows prompt and pictures.
#[derive(Debug, Clone)]
pub(super) struct Guide {
    /// For each step.
    text: Vec<f64>,
    /// 1 where there is no picture to follow.
    picture: f64,
    skip: Option<SkipLayers>,
    /// Whether blocks are left out of the negative prompt's prediction rather than of one more.
    skip_negative: bool,
    guidance: Guidance,
    /// Whether the sampler reads a prediction without guidance.
    base: bool,
}

impl Guide {
    /// For a run of `steps` steps.
    pub(super) fn new(p: &Parameters, options: &SampleOptions, steps: usize) -> Guide {
        let scale = f64::from(p.cfg_scale);
        let text = match &options.guidance_schedule {
            Some(schedule) => schedule.scales(steps, scale),
            None => vec![scale; steps],
        };
        Guide {
            text,
            picture: f64::from(p.image_cfg_scale.unwrap_or(1.0)),
            skip: p.slg.clone(),
            skip_negative: options.slg_uncond,
            guidance: Guidance::new(options.apg),
            base: p.sampler.uses_base(),
        }
    }

    /// Whether any step needs the negative prompt.
    pub(super) fn reads_negative(&self) -> bool {
        self.any(|kind| *kind != Kind::Prompt && *kind != Kind::Skipped)
    }

    fn any(&self, of: impl Fn(&Kind) -> bool) -> bool {
        (0..self.text.len()).any(|step| self.kinds(step).iter().any(&of))
    }

    /// The most predictions that a step needs.
    pub(super) fn most_branches(&self) -> usize {
        (0..self.text.len()).map(|step| self.kinds(step).len()).max().unwrap_or(1)
    }

    fn scales(&self, step: usize) -> Scales {
        let text = self.text.get(step).copied().unwrap_or(1.0);
        let skip = self.skip.as_ref().filter(|_| !self.skip_negative).map_or(0.0, |s| f64::from(s.scale));
        Scales { text, image: self.picture, skip }
    }

    fn skips(&self, step: usize) -> bool {
        let inside = |s: &SkipLayers| {
            let interval = Interval { start: s.start, stop: s.end };
            interval.is_inside(step, self.text.len())
        };
        self.skip.as_ref().is_some_and(inside)
    }

    /// What a step, counted from 0, needs.
    pub(super) fn kinds(&self, step: usize) -> Vec<Kind> {
        let text = self.scales(step).text;
        let mut kinds = match (text, self.picture) {
            (1.0, 1.0) if self.base => vec![Kind::Prompt, Kind::Negative],
            (1.0, 1.0) => vec![Kind::Prompt],
            (_, 1.0) => vec![Kind::Prompt, Kind::Negative],
            // What the negative prompt adds cancels out.
            (text, picture) if text == picture => vec![Kind::Prompt, Kind::Blank],
            _ => vec![Kind::Prompt, Kind::Negative, Kind::Blank],
        };
        if self.skips(step) {
            match kinds.iter_mut().find(|kind| **kind == Kind::Negative) {
                Some(negative) if self.skip_negative => *negative = Kind::NegativeSkipped,
                _ if self.skip_negative => {}
                _ => kinds.push(Kind::Skipped),
            }
        }
        kinds
    }

    /// The blocks that are left out.
    pub(super) fn skipped_blocks(&self) -> &[usize] {
        self.skip.as_ref().map_or(&[], |s| &s.layers)
    }

    /// The guided prediction of a step from those of [`Guide::kinds`], and the one without guidance if the sampler reads
    /// it. `None` if the prompt's is missing.
    pub(super) fn combine(
        &mut self,
        step: usize,
        predictions: Vec<(Kind, Vec<f32>)>,
    ) -> Option<(Vec<f32>, Option<Vec<f32>>)> {
        let mut cond = None;
        let mut all = Predictions::default();
        for (kind, values) in predictions {
            match kind {
                Kind::Prompt => cond = Some(values),
                Kind::Negative | Kind::NegativeSkipped => all.uncond = Some(values),
                Kind::Blank => all.image_uncond = Some(values),
                Kind::Skipped => all.skipped = Some(values),
            }
        }
        all.cond = cond?;
        let guided = self.guidance.combine(&all, self.scales(step));
        let base = self.base.then(|| all.base().to_vec());
        Some((guided, base))
    }
}

#[cfg(test)]
mod tests {
    use super::Kind::{Blank, Negative, NegativeSkipped, Prompt, Skipped};
    use super::*;

    fn guide(text: f64, picture: f64) -> Guide {
        let guidance = Guidance::default();
        Guide { text: vec![text; 20], picture, skip: None, skip_negative: false, guidance, base: false }
    }

    fn combine(mut guide: Guide, step: usize, of: &[(Kind, f32)]) -> f32 {
        guide.combine(step, of.iter().map(|(k, v)| (*k, vec![*v])).collect()).unwrap().0[0]
    }

    #[test]
    fn only_what_is_needed_is_computed() {
        assert_eq!(guide(1.0, 1.0).kinds(0), [Prompt]);
        assert_eq!(guide(7.0, 1.0).kinds(0), [Prompt, Negative]);
        assert_eq!(guide(7.0, 1.5).kinds(0), [Prompt, Negative, Blank]);
        assert_eq!(guide(1.0, 1.5).kinds(0), [Prompt, Negative, Blank]);
        assert_eq!(guide(1.5, 1.5).kinds(0), [Prompt, Blank]);
        assert_eq!(Guide { base: true, ..guide(1.0, 1.0) }.kinds(0), [Prompt, Negative]);
        assert!(!guide(1.0, 1.0).reads_negative() && guide(1.5, 1.5).reads_negative());
        let late = Guide { text: vec![1.0, 1.0, 7.0], ..guide(1.0, 1.0) };
        assert_eq!((late.kinds(0), late.kinds(2)), (vec![Prompt], vec![Prompt, Negative]));
        assert!(late.reads_negative() && late.most_branches() == 2);
    }

    #[test]
    fn predictions_are_combined() {
        assert_eq!(combine(guide(1.0, 1.0), 0, &[(Prompt, 2.0)]), 2.0);
        assert_eq!(combine(guide(7.0, 1.0), 0, &[(Prompt, 2.0), (Negative, 1.0)]), 8.0);
        // 1 + 1.5 (3 - 1) + 7 (4 - 3)
        assert_eq!(combine(guide(7.0, 1.5), 0, &[(Prompt, 4.0), (Negative, 3.0), (Blank, 1.0)]), 11.0);
        // Equal scales: 1 + 2 (4 - 1), whatever the negative prompt predicts.
        assert_eq!(combine(guide(2.0, 2.0), 0, &[(Prompt, 4.0), (Blank, 1.0)]), 7.0);
        // 1 + 7 (2 - 1) + 2.5 (2 - 4)
        let with = Guide { skip: Some(SkipLayers { scale: 2.5, ..SkipLayers::default() }), ..guide(7.0, 1.0) };
        assert_eq!(combine(with, 1, &[(Prompt, 2.0), (Negative, 1.0), (Skipped, 4.0)]), 3.0);
    }

    /// Steps of 20 between 1 % and 20 %, both left out: 0.2 < i < 4.
    #[test]
    fn blocks_are_left_out_for_a_part_of_the_run() {
        let skip = Some(SkipLayers { scale: 2.5, layers: vec![7], start: 0.01, end: 0.2 });
        let of =
            |guide: &Guide, kind| -> Vec<usize> { (0..20).filter(|i| guide.kinds(*i).contains(&kind)).collect() };
        let one_more = Guide { skip: skip.clone(), ..guide(1.0, 1.0) };
        assert_eq!(of(&one_more, Skipped), [1, 2, 3]);
        assert_eq!(one_more.skipped_blocks(), [7]);
        assert_eq!(one_more.most_branches(), 2);
        let instead = Guide { skip, skip_negative: true, ..guide(7.0, 1.0) };
        assert_eq!((of(&instead, NegativeSkipped), of(&instead, Skipped)), (vec![1, 2, 3], vec![]));
        assert_eq!(instead.kinds(1), [Prompt, NegativeSkipped]);
    }
}
