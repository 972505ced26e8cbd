//! The merge loop of byte pair encoding, for words of any length.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

/// Pairs of symbols and the rank at which they merge. The merge of rank `r` gives symbol `first + r`.
pub(super) struct Merges {
    ranks: HashMap<(u32, u32), u32>,
    first: u32,
}

impl Merges {
    pub(super) fn new(first: u32, capacity: usize) -> Merges {
        Merges { ranks: HashMap::with_capacity(capacity), first }
    }

    /// Adds the next merge and returns its symbol.
    pub(super) fn push(&mut self, left: u32, right: u32) -> u32 {
        let rank = self.ranks.len() as u32;
        self.ranks.insert((left, right), rank);
        self.first + rank
    }

    fn rank(&self, left: u32, right: u32) -> Option<u32> {
        self.ranks.get(&(left, right)).copied()
    }

    /// Merges the symbols of one word, lowest rank first and leftmost first within a rank, and appends what is
    /// left to `out`. Takes O(n log n) for n symbols.
    pub(super) fn apply(&self, word: &[u32], out: &mut Vec<u32>) {
        let mut links: Vec<Link> = word
            .iter()
            .enumerate()
            .map(|(i, &symbol)| Link { symbol, prev: i.checked_sub(1), next: i + 1, alive: true })
            .collect();
        let mut queue: BinaryHeap<Reverse<(u32, usize, u32, u32)>> = word
            .windows(2)
            .enumerate()
            .filter_map(|(i, pair)| match *pair {
                [a, b] => self.rank(a, b).map(|rank| Reverse((rank, i, a, b))),
                _ => None,
            })
            .collect();

        while let Some(Reverse((rank, at, a, b))) = queue.pop() {
            // Entries whose pair has since become part of another symbol are stale.
            let Some(left) = links.get(at).filter(|l| l.alive && l.symbol == a).copied() else { continue };
            let Some(right) = links.get(left.next).filter(|r| r.symbol == b).copied() else { continue };
            let merged = self.first + rank;
            if let Some(l) = links.get_mut(left.next) {
                l.alive = false;
            }
            if let Some(l) = links.get_mut(at) {
                *l = Link { symbol: merged, next: right.next, ..left };
            }
            if let Some(after) = links.get_mut(right.next) {
                after.prev = Some(at);
                let symbol = after.symbol;
                if let Some(rank) = self.rank(merged, symbol) {
                    queue.push(Reverse((rank, at, merged, symbol)));
                }
            }
            if let Some((i, before)) = left.prev.and_then(|i| links.get(i).map(|l| (i, l)))
                && let Some(rank) = self.rank(before.symbol, merged)
            {
                queue.push(Reverse((rank, i, before.symbol, merged)));
            }
        }
        out.extend(links.iter().filter(|l| l.alive).map(|l| l.symbol));
    }
}

/// A symbol in the doubly linked list of a word; `next` of the last one is past the end.
#[derive(Clone, Copy)]
struct Link {
    symbol: u32,
    prev: Option<usize>,
    next: usize,
    alive: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition: find the best pair anywhere, merge its leftmost occurrence, repeat.
    fn by_definition(m: &Merges, word: &[u32]) -> Vec<u32> {
        let mut w = word.to_vec();
        while let Some((rank, i)) =
            (1..w.len()).filter_map(|i| m.rank(w[i - 1], w[i]).map(|rank| (rank, i - 1))).min()
        {
            w[i] = m.first + rank;
            w.remove(i + 1);
        }
        w
    }

    #[test]
    fn agrees_with_the_definition() {
        let mut m = Merges::new(4, 8);
        let aa = m.push(0, 0);
        let ab = m.push(0, 1);
        let aab = m.push(aa, 1);
        m.push(ab, 2);
        m.push(aa, aa);
        m.push(aab, aab);
        m.push(1, 2);
        let mut state = 1u32;
        for len in 0..200 {
            let word: Vec<u32> = (0..len)
                .map(|_| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (state >> 24) % 3
                })
                .collect();
            let mut got = Vec::new();
            m.apply(&word, &mut got);
            assert_eq!(got, by_definition(&m, &word), "{word:?}");
        }
    }
}
