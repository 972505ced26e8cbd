//! Which cuts a runner takes.

use std::collections::{HashMap, HashSet};

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
        let capacities = self.capacities();
        let known = self.plans.iter().position(|p| p.signature == program.signature());
        let streams = self.store.streams(0);
        let known = known.map(|i| self.plans.remove(i)).filter(|p| still_fits(p, &capacities, streams));
        let plan = match known {
            Some(plan) => plan,
            None => {
                let started = self.store.manager().now();
                let mut plan = match self.lanes.len() {
                    1 => self.choose(program, capacities.first().copied().unwrap_or(0))?,
                    _ => self.divide(program, &capacities)?,
                };
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

    /// An error if a segment of plan `at` needs more than there is.
    pub(super) fn has_room(&self, at: usize) -> Result<()> {
        let (Some(plan), capacities) = (self.plans.get(at), self.capacities()) else { return Ok(()) };
        let lacks = |s: &&Stage| capacities.get(s.lane).is_none_or(|&c| plan.need(s) > c);
        let Some(stage) = plan.stages.iter().filter(lacks).max_by_key(|s| plan.need(s)) else { return Ok(()) };
        let pool = self.store.asker(stage.lane, 0).pool;
        let refusal = self.store.manager().refusal(self.store.module(), pool);
        Err(self.refused(plan, stage, stage.lane, refusal))
    }

    /// Bytes that its module may have at most on each device.
    fn capacities(&self) -> Vec<usize> {
        let (manager, module) = (self.store.manager(), self.store.module());
        let capacity = |lane| manager.capacity(module, self.store.asker(lane, 0).pool);
        (0..self.lanes.len()).map(capacity).collect()
    }

    /// A plan for several devices: each runs a part, in one segment where that fits.
    fn divide(&mut self, program: &Program, capacities: &[usize]) -> Result<Plan> {
        let manager = self.store.manager().clone();
        let explicit = self.options.cuts.clone();
        let automatic = explicit == Cuts::Auto;
        let finest = if automatic { Cuts::All } else { explicit };
        let units = self.lower(program, &finest, Vec::new(), &[(0, 0)])?;
        let sizes = units.units(&self.store);
        let ends: Vec<&str> = units.stages.iter().map(|s| s.segment.label.as_str()).collect();
        let before: Option<Vec<usize>> = ends.iter().map(|&end| self.divided.get(end).copied()).collect();
        let shares = sizes.share(capacities, before.as_deref());
        let ranges = shares.and_then(|shares| {
            let mut ranges = Vec::new();
            for (share, &capacity) in shares.iter().zip(capacities).filter(|(share, _)| !share.is_empty()) {
                if !automatic {
                    ranges.extend(share.clone().map(|i| i..i + 1));
                } else if sizes.need(share.clone()) <= capacity || !manager.options().segmented {
                    ranges.push(share.clone());
                } else {
                    ranges.extend(sizes.merge(share.clone(), capacity)?);
                }
            }
            Ok((shares, ranges))
        });
        let (shares, ranges) = match ranges {
            Ok(both) => both,
            Err(too_large) => {
                // Without cuts nothing crosses them.
                for (lane, &capacity) in capacities.iter().enumerate().filter(|_| automatic) {
                    let mut whole = self.lower(program, &Cuts::None, Vec::new(), &[(0, lane)])?;
                    let need = whole.largest().map_or(0, |s| whole.need(s));
                    if need <= capacity {
                        (whole.whole, whole.divided_for) = (Some(need), capacities.to_vec());
                        return Ok(whole);
                    }
                }
                let most = (0..capacities.len()).max_by_key(|&l| capacities.get(l)).unwrap_or(0);
                let refusal = manager.refusal(self.store.module(), self.store.asker(most, 0).pool);
                return Err(match units.stages.get(too_large.unit) {
                    Some(stage) => self.refused(&units, stage, most, refusal),
                    None => Error::internal("no such unit"),
                });
            }
        };
        self.divided = HashMap::new();
        let mut parts = Vec::new();
        let mut said = Vec::new();
        for (lane, share) in shares.iter().enumerate().filter(|(_, share)| !share.is_empty()) {
            parts.push((units.stages.get(share.start).map_or(0, |s| s.segment.nodes.start), lane));
            let of = ends.get(share.clone()).unwrap_or_default();
            self.divided.extend(of.iter().map(|&end| (end.to_owned(), lane)));
            let device = self.lanes.get(lane).map_or("", |l| l.device.name());
            said.push(format!("{device} {} of {}", share.len(), sizes.units.len()));
        }
        let message = format!("{}: parts of the network: {}", self.options.module, said.join(", "));
        if parts.len() > 1 {
            tracing::info!("{message}");
        } else {
            tracing::debug!("{message}");
        }
        let whole = Some(sizes.need(0..sizes.units.len()));
        let (cuts, units) = match automatic {
            true => (begins(program, &units, &ranges), units.stages),
            false => (finest.clone(), units.stages),
        };
        let mut plan = self.lower(program, &cuts, units, &parts)?;
        // What merging costs was an estimate.
        if automatic && manager.options().segmented && !plan.fits(capacities) {
            plan = self.lower(program, &Cuts::All, plan.stages, &parts)?;
        }
        plan.whole = whole;
        plan.divided_for = capacities.to_vec();
        Ok(plan)
    }

    /// A plan for one device.
    fn choose(&mut self, program: &Program, capacity: usize) -> Result<Plan> {
        const ALL: &[(usize, usize)] = &[(0, 0)];
        let Cuts::Auto = self.options.cuts else {
            let cuts = self.options.cuts.clone();
            return self.lower(program, &cuts, Vec::new(), ALL);
        };
        let manager = self.store.manager().clone();
        let pool = self.store.asker(0, 0).pool;
        let mut whole = self.lower(program, &Cuts::None, Vec::new(), ALL)?;
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
        let mut units = self.lower(program, &Cuts::All, Vec::new(), ALL)?;
        if streams && units.fits(&[capacity]) {
            units.whole = Some(need);
            return Ok(units);
        }
        let sizes = units.units(&self.store);
        let ranges = match sizes.merge(0..sizes.units.len(), capacity) {
            Ok(ranges) => ranges,
            // Without cuts nothing crosses them.
            Err(_) if need <= capacity => {
                whole.whole = Some(need);
                return Ok(whole);
            }
            Err(too_large) => {
                let refusal = manager.refusal(self.store.module(), pool);
                return Err(match units.stages.get(too_large.unit) {
                    Some(stage) => self.refused(&units, stage, 0, refusal),
                    None => Error::internal("no such unit"),
                });
            }
        };
        let cuts = begins(program, &units, &ranges);
        let mut plan = self.lower(program, &cuts, units.stages, ALL)?;
        // What merging costs was an estimate.
        if !plan.fits(&[capacity]) {
            plan = self.lower(program, &Cuts::All, plan.stages, ALL)?;
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

    /// `parts` are the nodes from which on devices run the program, and the devices' numbers.
    fn lower(
        &mut self,
        program: &Program,
        cuts: &Cuts,
        known: Vec<Stage>,
        parts: &[(usize, usize)],
    ) -> Result<Plan> {
        let Runner { lanes, options, kernels, refuse, .. } = self;
        let how = |&(start, number): &(usize, usize)| {
            let lane = lanes.get(number).ok_or_else(|| Error::internal("no such device"))?;
            let pretend = lane.device.noop_device().is_some();
            Ok((start, Lowering { lane: number, dev: lane.dev, pretend, options, kernels: *kernels, refuse }))
        };
        let parts = parts.iter().map(how).collect::<Result<Vec<_>>>()?;
        let (plan, lowered) = Plan::new(program, cuts, known, &parts, &mut self.store)?;
        self.lowered += lowered;
        Ok(plan)
    }

    /// The error of a segment for which there is no memory on a device.
    fn refused(&self, plan: &Plan, stage: &Stage, lane: usize, refusal: Refusal) -> Error {
        let device = self.lanes.get(lane).map_or(self.device(), |l| &l.device);
        super::run::refused(plan, stage, refusal, device, &self.store, &self.options.module)
    }
}

/// The cuts that begin `ranges` of units, but that before the first.
fn begins(program: &Program, units: &Plan, ranges: &[std::ops::Range<usize>]) -> Cuts {
    let start = |unit: usize| units.stages.get(unit).map(|s| s.segment.nodes.start);
    let begins: Vec<usize> = ranges.iter().skip(1).filter_map(|r| start(r.start)).collect();
    let taken = program.cuts().iter().enumerate().filter(|(_, c)| begins.contains(&c.at));
    Cuts::At(taken.map(|(i, _)| i).collect())
}

/// Whether a plan is as good as a new one. One in segments is not where the program fits whole with a little to spare,
/// unless it is in segments for the sake of pages that come and go.
fn still_fits(plan: &Plan, capacities: &[usize], streams: bool) -> bool {
    let Some(whole) = plan.whole else { return true };
    let devices: HashSet<usize> = plan.stages.iter().map(|s| s.lane).collect();
    let more = match (capacities, &*plan.divided_for) {
        (&[capacity], _) => whole.saturating_add(whole / 16) <= capacity,
        (now, then) => now.iter().zip(then).any(|(&now, &then)| now - now / 16 > then),
    };
    plan.fits(capacities) && (plan.stages.len() <= devices.len() || streams || !more)
}
