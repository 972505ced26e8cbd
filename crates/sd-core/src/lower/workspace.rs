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
pub(super) struct Life {
    pub(super) size: usize,
    pub(super) from: usize,
    pub(super) until: usize,
}

/// An offset for each of `lives`, and the end of all. The largest come first, each as low as those allow that live at
/// the same time.
pub(super) fn arrange(lives: &[Life]) -> (Vec<usize>, usize) {
    let mut order: Vec<usize> = (0..lives.len()).collect();
    order.sort_by_key(|&i| std::cmp::Reverse(lives[i].size));
    let mut offsets = vec![0; lives.len()];
    // Those that have a place, by offset.
    let mut placed: Vec<usize> = Vec::with_capacity(lives.len());
    let mut end = 0;
    for i in order {
        let life = &lives[i];
        let mut at = 0;
        for &j in placed.iter().filter(|&&j| lives[j].from <= life.until && life.from <= lives[j].until) {
            if offsets[j] >= at + life.size {
                break;
            }
            at = at.max(offsets[j] + lives[j].size);
        }
        offsets[i] = at;
        end = end.max(at + life.size);
        placed.insert(placed.partition_point(|&j| offsets[j] <= at), i);
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
        let lives = lives.map(|(size, from, until)| Life { size, from, until });
        let (offsets, end) = arrange(&lives);
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
