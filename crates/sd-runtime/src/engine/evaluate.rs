//! Evaluations of the diffusion network: branches that are alike run as one batch.

use sd_core::{CancelToken, Error, Program, Result, Tensor};
use sd_models::{Evaluation, Model, Part, Run, Stretch};

use super::control::Control;
use super::networks::{dims, only};
use crate::cache::{BlockCache, Decision};
use crate::generate::{Branch, Call};

/// How many programs are kept: as many as a step may need.
const KEPT: usize = 8;

/// The programs of the diffusion network that were needed last, the latest at the end.
#[derive(Default)]
pub(super) struct Evaluator {
    built: Vec<Built>,
}

struct Built {
    evaluation: Evaluation,
    program: Program,
    /// Inputs that follow from the evaluation.
    tables: Vec<(&'static str, Tensor)>,
}

impl Evaluator {
    /// The prediction of each branch, in order.
    pub(super) fn predict(&mut self, on: &mut On<'_>, call: &Call<'_>) -> Result<Vec<Tensor>> {
        let mut out: Vec<Option<Tensor>> = call.branches.iter().map(|_| None).collect();
        let evaluations: Vec<Evaluation> =
            call.branches.iter().map(|b| evaluation(call, b)).collect::<Result<_>>()?;
        for (first, evaluation) in evaluations.iter().enumerate() {
            if evaluations.iter().take(first).any(|e| e == evaluation) {
                continue;
            }
            let alike: Vec<(usize, &Branch<'_>)> =
                call.branches.iter().enumerate().filter(|(i, _)| evaluations.get(*i) == Some(evaluation)).collect();
            let evaluation = Evaluation { batch: alike.len(), ..evaluation.clone() };
            let branches: Vec<&Branch<'_>> = alike.iter().map(|(_, b)| *b).collect();
            let results = self.run(on, call, evaluation, &branches)?;
            for ((at, _), result) in alike.iter().zip(results) {
                if let Some(slot) = out.get_mut(*at) {
                    *slot = Some(result);
                }
            }
        }
        let missing = || Error::internal("the network gave fewer predictions than branches");
        out.into_iter().map(|prediction| prediction.ok_or_else(missing)).collect()
    }

    fn run(
        &mut self,
        on: &mut On<'_>,
        call: &Call<'_>,
        evaluation: Evaluation,
        branches: &[&Branch<'_>],
    ) -> Result<Vec<Tensor>> {
        let batch = branches.len();
        let all = |of: &dyn Fn(&Branch<'_>) -> Option<Tensor>| -> Result<Option<Tensor>> {
            let parts: Vec<Tensor> = branches.iter().filter_map(|b| of(b)).collect();
            if parts.is_empty() {
                Ok(None)
            } else {
                Tensor::concat_batch(&parts.iter().collect::<Vec<_>>()).map(Some)
            }
        };
        let x = Tensor::concat_batch(&vec![call.x; batch])?;
        let timesteps = Tensor::f32(&[batch], vec![call.timestep as f32; batch])?;
        let guidance = Tensor::f32(&[batch], vec![call.guidance; batch])?;
        let context = all(&|b| Some(b.conditioning.context.clone()))?;
        let vector = all(&|b| b.conditioning.vector.clone())?;
        let joined = all(&|b| b.joined.cloned())?;
        let references = (0..evaluation.references.len())
            .map(|i| Ok((format!("reference.{i}"), all(&|b| b.references.get(i).cloned())?)))
            .collect::<Result<Vec<_>>>()?;
        let mut inputs = vec![("x", &x), ("timesteps", &timesteps), ("guidance", &guidance)];
        inputs.extend(
            [("context", &context), ("vector", &vector), ("joined", &joined)]
                .iter()
                .filter_map(|(n, t)| Some((*n, t.as_ref()?))),
        );
        inputs.extend(references.iter().filter_map(|(n, t)| Some((n.as_str(), t.as_ref()?))));
        let added = on.added(call, &evaluation, &inputs)?;
        let added: Vec<(String, &Tensor)> =
            added.iter().enumerate().map(|(i, t)| (format!("control.{i}"), t)).collect();
        inputs.extend(added.iter().map(|(n, t)| (n.as_str(), *t)));
        let out = match on.blocks.take().filter(|_| evaluation.skip.is_empty()) {
            Some(blocks) => {
                let out = self.in_parts(on, &evaluation, &inputs, blocks);
                on.blocks = Some(blocks);
                only(out?)?
            }
            None => only(self.outputs(on, evaluation, &inputs)?)?,
        };
        let [_, c, h, w] = dims(&out)?;
        out.values().chunks((c * h * w).max(1)).map(|part| Tensor::f32(&[1, c, h, w], part.to_vec())).collect()
    }

    /// The results of the program of an evaluation.
    fn outputs(
        &mut self,
        on: &mut On<'_>,
        evaluation: Evaluation,
        inputs: &[(&str, &Tensor)],
    ) -> Result<Vec<Tensor>> {
        let built = self.built(on.model, evaluation)?;
        let tables = built.tables.iter().map(|(n, t)| (*n, t));
        let inputs: Vec<(&str, &Tensor)> = inputs.iter().copied().chain(tables).collect();
        (on.run)(Part::Diffusion, &built.program, &inputs)
    }

    /// The same by the first blocks, the middle ones unless the cache has what they add, and the last ones.
    fn in_parts(
        &mut self,
        on: &mut On<'_>,
        e: &Evaluation,
        inputs: &[(&str, &Tensor)],
        cache: &mut BlockCache,
    ) -> Result<Vec<Tensor>> {
        let [front, middle, back] = cache.stretches();
        let mut stretch = |stretch: Stretch, hidden: Option<&Tensor>| {
            let inputs: Vec<_> = inputs.iter().copied().chain(hidden.map(|h| ("hidden", h))).collect();
            self.outputs(on, Evaluation { stretch, ..e.clone() }, &inputs)
        };
        let [mut hidden, change]: [Tensor; 2] = stretch(front, None)?
            .try_into()
            .map_err(|_| Error::internal("the first blocks do not give states and their change"))?;
        match cache.decide(e, change.values()) {
            Decision::Reuse => cache.add(e, hidden.values_mut()),
            Decision::Compute => {
                let after = only(stretch(middle, Some(&hidden))?)?;
                cache.store(e, after.values().iter().zip(hidden.values()).map(|(a, b)| a - b).collect());
                hidden = after;
            }
        }
        stretch(back, Some(&hidden))
    }

    fn built(&mut self, model: &Model, evaluation: Evaluation) -> Result<&Built> {
        if let Some(at) = self.built.iter().position(|b| b.evaluation == evaluation) {
            let built = self.built.remove(at);
            self.built.push(built);
        } else {
            let (program, tables) = (model.diffusion_program(&evaluation)?, model.tables(&evaluation)?);
            if self.built.len() >= KEPT {
                self.built.remove(0);
            }
            self.built.push(Built { evaluation, program, tables });
        }
        self.built.last().ok_or_else(|| Error::internal("no diffusion program"))
    }
}

/// What evaluations run on.
pub(super) struct On<'a> {
    pub(super) model: &'a Model,
    pub(super) run: &'a mut Run<'a>,
    pub(super) controls: &'a mut [Control],
    pub(super) blocks: Option<&'a mut BlockCache>,
    pub(super) cancel: &'a CancelToken,
}

impl On<'_> {
    /// What the ControlNets of a call add to the network's blocks; none if it has none.
    fn added(&mut self, call: &Call<'_>, e: &Evaluation, inputs: &[(&str, &Tensor)]) -> Result<Vec<Tensor>> {
        let mut sums = Vec::new();
        for active in call.controls {
            let missing = || Error::internal(format!("no ControlNet {}", active.net));
            let control = self.controls.get_mut(active.net).ok_or_else(missing)?;
            let inputs: Vec<_> = inputs.iter().copied().chain([("hint", active.hint)]).collect();
            control.add(e, &inputs, active.strength, &mut sums, self.cancel)?;
        }
        Ok(sums)
    }
}

/// What one branch is evaluated by, alone.
fn evaluation(call: &Call<'_>, branch: &Branch<'_>) -> Result<Evaluation> {
    let size = |latent: &Tensor| dims(latent).map(|[_, _, h, w]| [h, w]);
    Ok(Evaluation {
        batch: 1,
        size: size(call.x)?,
        tokens: branch.conditioning.context.shape().dim(1),
        references: branch.references.iter().map(size).collect::<Result<_>>()?,
        skip: branch.skip.to_vec(),
        control: !call.controls.is_empty(),
        ..call.evaluation.clone()
    })
}
