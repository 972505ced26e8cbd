//! Caches of a transformer's middle blocks (DBCache of cache-dit): the first blocks are computed, and decide by how much
//! they do otherwise than before whether the middle is; what it adds is repeated, or forecast by a Taylor expansion (Liu et
//! al. 2025, "From Reusing to Forecasting: Accelerating Diffusion Models with TaylorSeers").

use sd_models::{Evaluation, Stretch};

use super::distance;
use super::mean;
use super::options::BlockOptions;

pub(crate) struct BlockCache {
    options: BlockOptions,
    blocks: usize,
    step: usize,
    /// What was decided in this step.
    decision: Option<Decision>,
    cached: usize,
    streak: usize,
    groups: Vec<Group>,
}

/// Whether the middle blocks are run in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Decision {
    Compute,
    Reuse,
}

/// What is known of branches that run as one batch.
struct Group {
    of: Evaluation,
    /// The step that was computed last.
    step: usize,
    /// What the first blocks added to the first branch's picture then.
    change: Vec<f32>,
    /// What the middle blocks added, and its derivatives by the step.
    derivatives: Vec<Vec<f32>>,
}

impl BlockCache {
    pub(super) fn new(options: BlockOptions, blocks: usize) -> BlockCache {
        BlockCache { options, blocks, step: 0, decision: None, cached: 0, streak: 0, groups: Vec::new() }
    }

    /// What comes before the middle, the middle, and what comes after it.
    pub(crate) fn stretches(&self) -> [Stretch; 3] {
        let [front, back] = self.options.ends;
        let end = self.blocks.saturating_sub(back);
        [Stretch::Front(front), Stretch::Middle([front, end]), Stretch::Back(end)]
    }

    /// A new step begins.
    pub(crate) fn begin(&mut self, step: usize) {
        (self.step, self.decision) = (step, None);
    }

    /// What was decided in this step, if it was.
    pub(crate) fn decision(&self) -> Option<Decision> {
        self.decision
    }

    /// Whether the middle is run for these branches. The first ones of a step decide, the others follow if they can.
    /// `change` begins with what the first blocks added to the first branch's picture, of `batch` branches.
    pub(crate) fn decide(&mut self, of: &Evaluation, change: &[f32]) -> Decision {
        let change = change.get(..change.len() / of.batch.max(1)).unwrap_or_default();
        let known = self.groups.iter().find(|g| g.of == *of);
        let decision = match (self.decision, known) {
            (_, None) => Decision::Compute,
            (Some(decision), Some(_)) => decision,
            (None, Some(group)) => self.look(group, change),
        };
        if self.decision.is_none() {
            self.decision = Some(decision);
            let reuse = decision == Decision::Reuse;
            self.cached += usize::from(reuse);
            self.streak = if reuse { self.streak + 1 } else { 0 };
        }
        if decision == Decision::Compute {
            match self.groups.iter_mut().find(|g| g.of == *of) {
                Some(group) => group.change = change.to_vec(),
                None => self.groups.push(Group {
                    of: of.clone(),
                    step: self.step,
                    change: change.to_vec(),
                    derivatives: Vec::new(),
                }),
            }
        }
        decision
    }

    fn look(&self, group: &Group, change: &[f32]) -> Decision {
        let o = &self.options;
        let full = |limit: Option<usize>, count: usize| limit.is_some_and(|limit| count >= limit);
        let must = self.step < o.warmup
            || group.derivatives.is_empty()
            || o.mask.get(self.step).copied().unwrap_or(false)
            || full(o.most, self.cached)
            || full(o.most_in_a_row, self.streak);
        let near = || {
            let off = distance(change, &group.change) / mean(group.change.iter().copied());
            off < o.threshold
        };
        if !must && (o.fixed || near()) { Decision::Reuse } else { Decision::Compute }
    }

    /// What the middle blocks added in this step.
    pub(crate) fn store(&mut self, of: &Evaluation, added: Vec<f32>) {
        let (step, order) = (self.step, self.options.order);
        let Some(group) = self.groups.iter_mut().find(|g| g.of == *of) else { return };
        let apart = step.saturating_sub(group.step).max(1) as f32;
        let mut derivatives = vec![added];
        for before in group.derivatives.iter().take(order) {
            let Some(now) = derivatives.last() else { break };
            derivatives.push(now.iter().zip(before).map(|(now, before)| (now - before) / apart).collect());
        }
        (group.derivatives, group.step) = (derivatives, step);
    }

    /// Adds to `hidden` what the middle blocks would.
    pub(crate) fn add(&self, of: &Evaluation, hidden: &mut [f32]) {
        let Some(group) = self.groups.iter().find(|g| g.of == *of) else { return };
        let away = self.step.saturating_sub(group.step) as f64;
        let mut factor = 1.0;
        for (i, derivative) in group.derivatives.iter().enumerate() {
            if i > 0 {
                factor *= away / i as f64;
            }
            hidden.iter_mut().zip(derivative).for_each(|(h, d)| *h += (factor * f64::from(*d)) as f32);
        }
    }
}
