//! Which cuts a runner takes.

use super::cache::{Lowering, Plan, Stage};
use super::executor::{KEPT, Runner};
use crate::error::{Error, Result};
use crate::graph::Program;
use crate::plan::Cuts;
use crate::residency::{Refusal, shown};
use crate::trace::EventKind;

impl Runner {
    /// The index of the plan of `program`, made if there is none that fits; the plan moves to the end, where recent ones
    /// are.
    pub(super) fn plan(&mut self, program: &Program) -> Result<usize> {
        let pool = self.store.asker(0, 0).pool;
        let capacity = self.store.manager().capacity(self.store.module(), pool);
        let known = self.plans.iter().position(|p| p.signature == program.signature());
        let streams = self.store.streams(0);
        let known = known.map(|i| self.plans.remove(i)).filter(|p| still_fits(p, capacity, streams));
        let plan = match known {
            Some(plan) => plan,
            None => {
                let started = self.store.manager().now();
                let mut plan = self.choose(program, capacity)?;
                self.made += 1;
                plan.id = self.made;
                let who = self.store.asker(0, 0);
                self.store.manager().note(started, EventKind::Plan, who, &"".into(), 0);
                plan
            }
        };
        if self.plans.len() >= KEPT {
            self.plans.remove(0);
        }
        self.plans.push(plan);
        Ok(self.plans.len() - 1)
    }

    fn choose(&mut self, program: &Program, capacity: usize) -> Result<Plan> {
        let Cuts::Auto = self.options.cuts else {
            let cuts = self.options.cuts.clone();
            return self.lower(program, &cuts, Vec::new());
        };
        let manager = self.store.manager().clone();
        let pool = self.store.asker(0, 0).pool;
        let mut whole = self.lower(program, &Cuts::None, Vec::new())?;
        let limited = manager.is_limited(pool) || self.store.streams(0);
        if !manager.options().segmented || !limited || program.cuts().is_empty() {
            return Ok(whole);
        }
        let need = whole.largest().map_or(0, |s| whole.need(s));
        // Pages of a mapped file come and go with segments.
        let streams = self.store.streams(0);
        if need <= capacity && !streams {
            whole.whole = Some(need);
            return Ok(whole);
        }
        let mut units = self.lower(program, &Cuts::All, Vec::new())?;
        if streams && units.largest().is_none_or(|s| units.need(s) <= capacity) {
            units.whole = Some(need);
            return Ok(units);
        }
        let sizes = units.units(&self.store);
        let starts: Vec<usize> = units.stages.iter().map(|s| s.segment.nodes.start).collect();
        let ranges = match sizes.merge(capacity) {
            Ok(ranges) => ranges,
            // Without cuts nothing crosses them.
            Err(_) if need <= capacity => {
                whole.whole = Some(need);
                return Ok(whole);
            }
            Err(too_large) => {
                let refusal = manager.refusal(self.store.module(), pool);
                return Err(match units.stages.get(too_large.unit) {
                    Some(stage) => self.refused(&units, stage, refusal),
                    None => Error::internal("no such unit"),
                });
            }
        };
        // The cuts that begin segments but the first.
        let cuts = |ranges: &[std::ops::Range<usize>]| {
            let begins: Vec<usize> = ranges.iter().skip(1).filter_map(|r| starts.get(r.start).copied()).collect();
            let taken = program.cuts().iter().enumerate().filter(|(_, c)| begins.contains(&c.at));
            Cuts::At(taken.map(|(i, _)| i).collect())
        };
        let mut plan = self.lower(program, &cuts(&ranges), units.stages)?;
        // What merging costs was an estimate.
        if plan.largest().is_some_and(|s| plan.need(s) > capacity) {
            plan = self.lower(program, &Cuts::All, plan.stages)?;
        }
        plan.whole = Some(need);
        tracing::debug!(
            module = self.options.module,
            segments = plan.stages.len(),
            need = shown(need),
            room = shown(capacity),
            "runs in segments"
        );
        Ok(plan)
    }

    fn lower(&mut self, program: &Program, cuts: &Cuts, known: Vec<Stage>) -> Result<Plan> {
        let Runner { dev, options, kernels, refuse, .. } = self;
        let pretend = self.device.noop_device().is_some();
        let how = Lowering { dev: *dev, pretend, options, kernels: *kernels, refuse };
        let (plan, lowered) = Plan::new(program, cuts, known, &how, &mut self.store)?;
        self.lowered += lowered;
        Ok(plan)
    }

    /// The error of a segment for which there is no memory.
    pub(super) fn refused(&self, plan: &Plan, stage: &Stage, refusal: Refusal) -> Error {
        super::run::refused(plan, stage, refusal, &self.device, &self.store, &self.options.module)
    }
}

/// Whether a plan is as good as a new one. One in segments is not where the program fits whole with a little to spare,
/// unless it is in segments for the sake of pages that come and go.
fn still_fits(plan: &Plan, capacity: usize, streams: bool) -> bool {
    let Some(whole) = plan.whole else { return true };
    let fits = plan.largest().is_none_or(|s| plan.need(s) <= capacity);
    fits && (plan.stages.len() == 1 || streams || whole.saturating_add(whole / 16) > capacity)
}
