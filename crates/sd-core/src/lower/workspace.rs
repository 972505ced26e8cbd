//! Where the intermediate values of a graph lie: computed once, before anything is allocated.

use std::collections::HashMap;

use crate::error::Result;
use crate::ffi::{Context, Dev, Graph, Id};

/// Offsets of the tensors that live while a graph is computed.
#[derive(Debug, Default)]
pub(crate) struct Layout {
    /// Bytes.
    pub(crate) size: usize,
    /// Every tensor with its offset.
    pub(crate) places: Vec<(Id, usize)>,
}

/// Bytes that are used from one call to another, both included.
#[derive(Clone, Copy)]
pub(super) struct Life {
    /// Bytes from the start of what it is placed with.
    pub(super) offset: usize,
    pub(super) size: usize,
    pub(super) from: usize,
    pub(super) until: usize,
}

/// An offset for each of `groups`, whose lives keep their distances, and the end of all. The largest come first, each as
/// low as those allow that live at the same time.
pub(super) fn arrange(groups: &[Vec<Life>]) -> (Vec<usize>, usize) {
    let extent = |i: usize| groups[i].iter().map(|l| l.offset + l.size).max().unwrap_or(0);
    let mut order: Vec<usize> = (0..groups.len()).collect();
    order.sort_by_key(|&i| std::cmp::Reverse(extent(i)));
    let mut offsets = vec![0; groups.len()];
    let mut placed: Vec<(usize, Life)> = Vec::new();
    let mut end = 0;
    for i in order {
        // Where the group may not begin: above the first and below the second.
        let mut taken: Vec<(isize, isize)> = Vec::new();
        for life in &groups[i] {
            let together = |l: &Life| l.from <= life.until && life.from <= l.until;
            for (at, other) in placed.iter().filter(|p| together(&p.1)) {
                let (low, high) = (*at as isize, (at + other.size) as isize);
                taken.push((low - (life.offset + life.size) as isize, high - life.offset as isize));
            }
        }
        taken.sort_unstable();
        let mut at = 0;
        for (low, high) in taken {
            if low >= at {
                break;
            }
            at = at.max(high);
        }
        offsets[i] = at.unsigned_abs();
        end = end.max(offsets[i] + extent(i));
        placed.extend(groups[i].iter().map(|&l| (offsets[i] + l.offset, l)));
    }
    (offsets, end)
}

/// Free ranges, in order, and the end of what was ever used.
#[derive(Default)]
pub(super) struct Free {
    gaps: Vec<(usize, usize)>,
    pub(super) end: usize,
}

impl Free {
    pub(super) fn take(&mut self, size: usize) -> usize {
        let best = (0..self.gaps.len()).filter(|&i| self.gaps[i].1 >= size).min_by_key(|&i| self.gaps[i].1);
        match best {
            Some(i) => {
                let (at, len) = self.gaps[i];
                if len == size {
                    self.gaps.remove(i);
                } else {
                    self.gaps[i] = (at + size, len - size);
                }
                at
            }
            None => {
                // A gap at the very end grows.
                let at = match self.gaps.last() {
                    Some(&(at, len)) if at + len == self.end => {
                        self.gaps.pop();
                        at
                    }
                    _ => self.end,
                };
                self.end = at + size;
                at
            }
        }
    }

    pub(super) fn give(&mut self, at: usize, size: usize) {
        let i = self.gaps.partition_point(|g| g.0 < at);
        self.gaps.insert(i, (at, size));
        if i + 1 < self.gaps.len() && at + size == self.gaps[i + 1].0 {
            self.gaps[i].1 += self.gaps.remove(i + 1).1;
        }
        if i > 0 && self.gaps[i - 1].0 + self.gaps[i - 1].1 == at {
            self.gaps[i - 1].1 += self.gaps.remove(i).1;
        }
    }
}

/// Lays out the tensors of `graph` for which `owned` holds and that are not views: each occupies memory from the node
/// that makes or first writes it to the last that reads it.
pub(crate) fn plan(ctx: &Context, graph: &Graph, dev: Dev, owned: impl Fn(Id) -> bool) -> Result<Layout> {
    let align = dev.alignment();
    let nodes = graph.nodes();
    let mut last = HashMap::new();
    for (i, &node) in nodes.iter().enumerate() {
        for used in ctx.sources(node)?.into_iter().chain([node]) {
            last.insert(ctx.root(used)?, i);
        }
    }
    let mut free = Free::default();
    let mut layout = Layout::default();
    let mut at: HashMap<Id, (usize, usize)> = HashMap::new();
    for (i, &node) in nodes.iter().enumerate() {
        let sources = ctx.sources(node)?;
        for used in sources.iter().copied().chain([node]) {
            let root = ctx.root(used)?;
            if !owned(root) || at.contains_key(&root) {
                continue;
            }
            let size = ctx.alloc_size(root, dev)?.max(1).next_multiple_of(align);
            let mut reused = None;
            if root == node && ctx.may_overwrite_operand(node)? {
                for &s in &sources {
                    let r = ctx.root(s)?;
                    let dies = owned(r) && last.get(&r) == Some(&i) && ctx.bytes(r)? == ctx.bytes(s)?;
                    let place = at.get(&r).copied().filter(|p| p.1 == size);
                    if let (true, Some((offset, _))) = (dies && ctx.same_layout(s, node)?, place) {
                        reused = Some((r, offset));
                        break;
                    }
                }
            }
            let offset = match reused {
                Some((r, offset)) => {
                    // Its memory is now this node's: nothing is left to free.
                    at.insert(r, (offset, 0));
                    offset
                }
                None => free.take(size),
            };
            at.insert(root, (offset, size));
            layout.places.push((root, offset));
        }
        let mut done: Vec<Id> = Vec::new();
        for used in sources.into_iter().chain([node]) {
            let root = ctx.root(used)?;
            if last.get(&root) == Some(&i) && !done.contains(&root) {
                done.push(root);
            }
        }
        for root in done {
            if let Some(&(offset, size)) = at.get(&root)
                && size > 0
            {
                free.give(offset, size);
            }
        }
    }
    layout.size = free.end;
    Ok(layout)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::ffi::Unary;

    #[test]
    fn lives_at_the_same_time_lie_apart_and_large_ones_leave_no_gaps() {
        // A small value before a large one, which outlives it, and another large one that follows.
        let lives = [(64, 0, 1), (256, 1, 3), (64, 3, 5), (256, 4, 6), (128, 2, 6)];
        let lives = lives.map(|(size, from, until)| Life { offset: 0, size, from, until });
        let (offsets, end) = arrange(&lives.map(|l| vec![l]));
        // 256 and 128 and 64 are there at once.
        assert_eq!(end, 448);
        for (i, a) in lives.iter().enumerate() {
            for (j, b) in lives.iter().enumerate().skip(i + 1) {
                let together = a.from <= b.until && b.from <= a.until;
                let apart = offsets[i] + a.size <= offsets[j] || offsets[j] + b.size <= offsets[i];
                assert!(apart || !together, "{i} and {j}: {offsets:?}");
            }
        }
    }

    #[test]
    fn what_ends_early_in_a_group_leaves_its_place_to_others() {
        let life = |offset, size, from, until| Life { offset, size, from, until };
        // Two halves take the place of a whole; the lower one ends before the upper.
        let halves = vec![life(0, 256, 0, 2), life(0, 128, 2, 3), life(128, 128, 2, 9)];
        let (offsets, end) = arrange(&[vec![life(0, 128, 4, 8)], halves.clone(), vec![life(0, 64, 1, 1)]]);
        assert_eq!((offsets, end), (vec![0, 0, 256], 320));
        // What lives longer than the lower half does not fit there.
        assert_eq!(arrange(&[vec![life(0, 128, 3, 8)], halves]), (vec![256, 0], 384));
    }

    #[test]
    fn gaps_are_reused_and_merged() {
        let mut f = Free::default();
        let (a, b, c) = (f.take(10), f.take(20), f.take(30));
        assert_eq!((a, b, c, f.end), (0, 10, 30, 60));
        f.give(a, 10);
        f.give(b, 20);
        assert_eq!(f.gaps, [(0, 30)]);
        assert_eq!((f.take(30), f.end), (0, 60));
        f.give(c, 30);
        assert_eq!((f.take(40), f.end), (30, 70));
    }

    #[test]
    fn chains_of_elementwise_operations_need_one_buffer_and_live_values_are_not_overwritten() {
        let dev = Dev::cpu().unwrap();
        let mut ctx = Context::new();
        let x = ctx.leaf(DType::F32, [256, 1, 1, 1]).unwrap();
        let first = ctx.unary(Unary::Silu, x).unwrap();
        let mut y = first;
        for _ in 0..10 {
            y = ctx.unary(Unary::Tanh, y).unwrap();
        }
        let graph = ctx.graph(&[y]).unwrap();
        assert_eq!(plan(&ctx, &graph, dev, |id| id != x).unwrap().size, 1024);
        // `first` is read at the end again.
        let z = ctx.binary(crate::ffi::Binary::Add, y, first).unwrap();
        let graph = ctx.graph(&[z]).unwrap();
        assert_eq!(plan(&ctx, &graph, dev, |id| id != x).unwrap().size, 2048);
    }
}
