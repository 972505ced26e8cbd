//! Which cuts are taken so that a program fits into so much memory: sizes in, ranges of units out.
//!
//! A *unit* is what lies between two neighbouring cuts of a program. Units are merged into segments. While a segment
//! runs its weights, its workspace and what crosses cuts are in memory together.

use std::collections::HashSet;
use std::ops::Range;

/// What one unit needs, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Unit {
    /// The weights it reads, by number; several units may read one.
    pub(crate) weights: Vec<usize>,
    /// Intermediate values.
    pub(crate) workspace: usize,
}

/// A value that crosses cuts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Crossing {
    /// The unit that makes it.
    pub(crate) made: usize,
    /// The last unit that reads it.
    pub(crate) read: usize,
    /// Its size.
    pub(crate) bytes: usize,
}

/// A program as a list of units.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sizes {
    /// Bytes of each weight.
    pub(crate) weights: Vec<usize>,
    /// In the order they run.
    pub(crate) units: Vec<Unit>,
    /// Values that cross cuts.
    pub(crate) crossing: Vec<Crossing>,
    /// Inputs, and values that cross cuts, in the buffer that holds them for the whole run.
    pub(crate) carried: usize,
}

/// The unit that needs most, which is more than there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TooLarge {
    pub(crate) unit: usize,
    pub(crate) need: usize,
}

/// Of the memory for weights, the part that a segment takes whose weights are loaded anew at each run. Two such parts
/// move, one that runs and one that comes, and the others keep what they hold from run to run.
const PARTS: usize = 8;

impl Sizes {
    /// Bytes of the weights that these units read.
    pub(crate) fn weights_of(&self, range: Range<usize>) -> usize {
        let mut seen = HashSet::new();
        let read = self.units.get(range).unwrap_or_default().iter().flat_map(|u| &u.weights);
        read.filter(|&&w| seen.insert(w)).filter_map(|&w| self.weights.get(w)).sum()
    }

    /// At most what these units need of workspace when they run as one segment: values that crossed cuts between them
    /// are intermediate then.
    fn workspace_of(&self, range: Range<usize>) -> usize {
        let inside = |c: &&Crossing| range.contains(&c.made) && range.contains(&c.read);
        let inner: Vec<&Crossing> = self.crossing.iter().filter(inside).collect();
        let alive = |i: usize| inner.iter().filter(move |c| c.made <= i && i <= c.read).map(|c| c.bytes);
        let each = range.clone().map(|i| self.units.get(i).map_or(0, |u| u.workspace) + alive(i).sum::<usize>());
        each.max().unwrap_or(0)
    }

    /// What a segment of these units needs while it runs.
    pub(crate) fn need(&self, range: Range<usize>) -> usize {
        self.weights_of(range.clone()) + self.workspace_of(range) + self.carried
    }

    /// The unit of these that needs most.
    fn largest(&self, units: Range<usize>) -> Option<TooLarge> {
        units.map(|unit| TooLarge { unit, need: self.need(unit..unit + 1) }).max_by_key(|t| t.need)
    }

    /// Segments of the units `of`, each of which needs at most `capacity` bytes while it runs: the fewest that leave all
    /// weights in memory if they fit beside the workspace of some cut, else the fewest that do not exceed a part of the
    /// memory, so that few weights have to move at each run.
    ///
    /// # Errors
    /// A unit by itself needs more.
    pub(crate) fn merge(&self, of: Range<usize>, capacity: usize) -> Result<Vec<Range<usize>>, TooLarge> {
        if let Some(too_large) = self.largest(of.clone()).filter(|t| t.need > capacity) {
            return Err(too_large);
        }
        let units = || self.units.get(of.clone()).unwrap_or_default().iter();
        let all = self.weights_of(of.clone());
        let least = units().map(|u| u.workspace).max().unwrap_or(0);
        let most = units().map(|u| self.weights_of_unit(u)).max().unwrap_or(0);
        let (weights, workspace) = match capacity.checked_sub(all + self.carried) {
            Some(workspace) if workspace >= least => (usize::MAX, workspace),
            _ => {
                let room = capacity.saturating_sub(self.carried);
                let workspace = least + room.saturating_sub(least + 2 * most) / PARTS;
                (most.max(room.saturating_sub(workspace) / PARTS), workspace)
            }
        };
        let fits = |r: Range<usize>| {
            self.weights_of(r.clone()) <= weights
                && self.workspace_of(r.clone()) <= workspace
                && self.need(r) <= capacity
        };
        let mut out = Vec::new();
        let mut start = of.start;
        while start < of.end {
            let mut end = start + 1;
            while end < of.end && fits(start..end + 1) {
                end += 1;
            }
            out.push(start..end);
            start = end;
        }
        Ok(out)
    }

    /// The units that each of several devices runs, one device after the other: as little as can be exceeds what they give,
    /// which is `capacities` in bytes, as that has to be loaded at every run; and the first devices have as much as they
    /// can. `before` is for each unit the device that had it, if that is known, which is kept where it is as good.
    ///
    /// # Errors
    /// A unit needs more than any device gives.
    pub(crate) fn share(
        &self,
        capacities: &[usize],
        before: Option<&[usize]>,
    ) -> Result<Vec<Range<usize>>, TooLarge> {
        let n = self.units.len();
        // What units exceed a capacity by, if each of them fits.
        let excess = |range: Range<usize>, capacity: usize| -> Option<usize> {
            let fits = self.largest(range.clone()).is_none_or(|t| t.need <= capacity);
            fits.then(|| if range.is_empty() { 0 } else { self.need(range).saturating_sub(capacity) })
        };
        // From unit `i` on, with the devices from one on: the least excess, and where the first of them ends.
        let mut best: Vec<Option<(usize, usize)>> = vec![None; n];
        best.push(Some((0, n)));
        let mut choices = Vec::new();
        for &capacity in capacities.iter().rev() {
            let from = |i: usize| {
                let choice = |end: usize| {
                    let rest = best.get(end).copied().flatten()?.0;
                    Some((rest + excess(i..end, capacity)?, end))
                };
                // More units at once need no less.
                (i..=n).filter_map(choice).min_by_key(|&(excess, end)| (excess, std::cmp::Reverse(end)))
            };
            best = (0..=n).map(from).collect();
            choices.push(best.clone());
        }
        let Some(least) = choices.last().and_then(|c| *c.first()?) else {
            // A device that could run the largest could run all.
            return Err(self.largest(0..n).unwrap_or(TooLarge { unit: 0, need: 0 }));
        };
        if let Some(ranges) = before.and_then(|b| ranges(b, capacities.len())) {
            let each = ranges.iter().zip(capacities).map(|(r, &c)| excess(r.clone(), c));
            if each.sum::<Option<usize>>() == Some(least.0) {
                return Ok(ranges);
            }
        }
        let mut start = 0;
        let mut out = Vec::new();
        for choice in choices.iter().rev() {
            let end = choice.get(start).copied().flatten().map_or(n, |c| c.1);
            out.push(start..end);
            start = end;
        }
        Ok(out)
    }

    fn weights_of_unit(&self, unit: &Unit) -> usize {
        unit.weights.iter().filter_map(|&w| self.weights.get(w)).sum()
    }
}

/// The ranges of units that have each of `count` numbers, if numbers only grow.
fn ranges(numbers: &[usize], count: usize) -> Option<Vec<Range<usize>>> {
    let grow = numbers.is_sorted() && numbers.iter().all(|&k| k < count);
    let range = |k: usize| numbers.partition_point(|&m| m < k)..numbers.partition_point(|&m| m <= k);
    grow.then(|| (0..count).map(range).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Units that read one weight each, and hand one value on.
    fn sizes(weights: &[usize], workspace: usize, crossing: usize) -> Sizes {
        let n = weights.len();
        let unit = |i: usize| Unit { weights: vec![i], workspace };
        let hand_on = |i: usize| Crossing { made: i - 1, read: i, bytes: crossing };
        let (units, crossing) = ((0..n).map(unit).collect(), (1..n).map(hand_on).collect());
        Sizes { weights: weights.to_vec(), units, crossing, carried: 20 }
    }

    /// Where segments end.
    fn ends(s: &Sizes, capacity: usize) -> Vec<usize> {
        s.merge(0..s.units.len(), capacity).unwrap().into_iter().map(|r| r.end).collect()
    }

    #[test]
    fn everything_that_fits_is_one_segment() {
        let s = sizes(&[100; 6], 50, 10);
        // 600 of weights, 50 of workspace with two values of 10 in it, 20 carried.
        assert_eq!(s.need(0..6), 690);
        assert_eq!(s.need(0..1), 170);
        assert_eq!(ends(&s, 690), [6]);
        assert_eq!(ends(&s, usize::MAX), [6]);
    }

    #[test]
    fn segments_for_workspace_alone_are_the_fewest() {
        let mut s = sizes(&[10; 6], 100, 0);
        s.crossing[2].bytes = 500;
        // All weights and the workspace fit, but not with what crosses the third cut as an intermediate value.
        assert_eq!(ends(&s, 200), [3, 6]);
    }

    #[test]
    fn too_little_memory_names_the_unit() {
        let mut s = sizes(&[100, 300, 200], 50, 10);
        assert_eq!(s.merge(0..3, 369), Err(TooLarge { unit: 1, need: 370 }));
        assert_eq!(ends(&s, 370), [1, 2, 3]);
        s.units[2].workspace = 500;
        assert_eq!(s.merge(0..3, 400), Err(TooLarge { unit: 2, need: 720 }));
        assert!(Sizes::default().merge(0..0, 0).unwrap().is_empty());
    }

    #[test]
    fn segments_that_move_are_a_part_of_the_memory() {
        let s = sizes(&[10; 100], 0, 0);
        // An eighth of 800 is 80.
        assert_eq!(s.merge(0..100, 820).unwrap().iter().map(|r| r.len()).max(), Some(8));
        assert_eq!(s.merge(0..100, 820).unwrap().len(), 13);
        // Units larger than that go one by one.
        assert_eq!(s.merge(0..100, 95).unwrap().len(), 100);
    }

    #[test]
    fn devices_share_units_in_their_order() {
        let s = sizes(&[100; 6], 50, 10);
        let share = |capacities: &[usize], before: Option<&[usize]>| {
            s.share(capacities, before).map(|r| r.into_iter().map(|r| r.len()).collect::<Vec<_>>())
        };
        // One unit needs 170, each further one 100 more, and 10 for what lives between units.
        for (capacities, want) in [
            (&[690][..], &[6][..]),
            (&[690, 690], &[6, 0]),
            (&[689, 690], &[5, 1]),
            // Three fit into 390.
            (&[400, 400], &[3, 3]),
            (&[170, 1000], &[1, 5]),
            (&[100, 1000], &[0, 6]),
            (&[1000, 100], &[6, 0]),
            (&[280, 280, 280], &[2, 2, 2]),
            (&[usize::MAX, usize::MAX], &[6, 0]),
            // Too little for all.
            (&[170, 170], &[5, 1]),
            (&[170, 400], &[1, 5]),
        ] {
            assert_eq!(share(capacities, None).unwrap(), want, "{capacities:?}");
        }
        // As good as before stays as it was.
        assert_eq!(share(&[690, 690], Some(&[0, 0, 1, 1, 1, 1])), Ok(vec![2, 4]));
        assert_eq!(share(&[300, 690], Some(&[0, 0, 0, 0, 0, 1])), Ok(vec![2, 4]));
        assert_eq!(share(&[690, 690], Some(&[0, 1, 0, 1, 1, 1])), Ok(vec![6, 0]));
        assert_eq!(share(&[690, 690], Some(&[0, 0, 2, 2, 2, 2])), Ok(vec![6, 0]));
        assert_eq!(share(&[169, 169], None), Err(TooLarge { unit: 5, need: 170 }));
    }

    #[test]
    fn shared_weights_count_once() {
        let mut s = sizes(&[100; 4], 0, 0);
        s.units.iter_mut().for_each(|u| u.weights = vec![0, 1]);
        assert_eq!((s.weights_of(0..4), s.need(0..4)), (200, 220));
        assert_eq!(ends(&s, 220), [4]);
    }

    #[test]
    fn every_segment_fits_and_every_unit_runs_once() {
        let mut state = 1u64;
        let mut random = move |n: usize| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as usize % n
        };
        for _ in 0..500 {
            let n = 1 + random(20);
            let mut s = sizes(&(0..n).map(|_| random(100)).collect::<Vec<_>>(), 0, 0);
            for i in 0..n {
                s.units[i] = Unit { weights: vec![i, random(n)], workspace: random(60) };
                s.crossing.push(Crossing { made: i, read: i + random(n - i), bytes: random(10) });
            }
            let capacity = random(1500);
            match s.merge(0..s.units.len(), capacity) {
                Ok(ranges) => {
                    assert!(ranges.iter().all(|r| !r.is_empty() && s.need(r.clone()) <= capacity), "{s:?}");
                    assert_eq!(
                        ranges.iter().flat_map(Clone::clone).collect::<Vec<_>>(),
                        (0..n).collect::<Vec<_>>()
                    );
                }
                Err(e) => assert!(s.need(e.unit..e.unit + 1) == e.need && e.need > capacity),
            }
        }
    }
}
