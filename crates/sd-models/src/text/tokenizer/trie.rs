//! A prefix tree over bytes.

type Entry<'a> = (&'a [u8], u32);

/// Strings that are found at the start of other strings. A node's children are neighbours, sorted by their byte.
pub(super) struct Trie {
    nodes: Vec<Node>,
}

#[derive(Clone, Copy)]
struct Node {
    byte: u8,
    value: Option<u32>,
    first: u32,
    children: u16,
}

impl Trie {
    /// The tree of `entries`. Of equal keys the last one counts; empty keys are never found.
    pub(super) fn new<'a>(entries: impl IntoIterator<Item = (&'a str, u32)>) -> Trie {
        let mut sorted: Vec<Entry> = entries.into_iter().map(|(k, v)| (k.as_bytes(), v)).collect();
        // The sort is stable, so that the last of equal keys stays last.
        sorted.sort_by_key(|&(k, _)| k);
        let mut nodes = vec![Node { byte: 0, value: None, first: 0, children: 0 }];
        // Nodes by level, each with the entries below it.
        let mut level: Vec<(usize, &[Entry])> = vec![(0, &sorted)];
        let mut depth = 0;
        while !level.is_empty() {
            let mut next = Vec::new();
            for (parent, entries) in level {
                let (done, deeper) = entries.split_at(entries.partition_point(|(k, _)| k.len() <= depth));
                let first = nodes.len();
                for group in deeper.chunk_by(|(a, _), (b, _)| a.get(depth) == b.get(depth)) {
                    let byte = group.first().and_then(|(k, _)| k.get(depth)).copied().unwrap_or(0);
                    next.push((nodes.len(), group));
                    nodes.push(Node { byte, value: None, first: 0, children: 0 });
                }
                let children = (nodes.len() - first) as u16;
                if let Some(n) = nodes.get_mut(parent) {
                    *n = Node { value: done.last().map(|e| e.1), first: first as u32, children, ..*n };
                }
            }
            level = next;
            depth += 1;
        }
        Trie { nodes }
    }

    /// The keys that `text` starts with, shortest first: their lengths and values.
    pub(super) fn prefixes<'a>(&'a self, text: &'a [u8]) -> impl Iterator<Item = (usize, u32)> + 'a {
        let mut node = self.nodes.first();
        let path = text.iter().map_while(move |&byte| {
            node = node.and_then(|n| self.child(n, byte));
            node
        });
        path.enumerate().filter_map(|(i, n)| Some((i + 1, n.value?)))
    }

    fn child(&self, node: &Node, byte: u8) -> Option<&Node> {
        let first = node.first as usize;
        let children = self.nodes.get(first..first + usize::from(node.children))?;
        children.get(children.binary_search_by_key(&byte, |c| c.byte).ok()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_are_all_found_shortest_first() {
        let keys = ["ab", "", "a", "abcd", "b", "ab", "é", "\u{ff}"];
        let trie = Trie::new(keys.iter().zip(0..).map(|(k, v)| (*k, v)));
        let found = |text: &str| trie.prefixes(text.as_bytes()).collect::<Vec<_>>();
        assert_eq!(found("abcde"), [(1, 2), (2, 5), (4, 3)]);
        assert_eq!(found("abc"), [(1, 2), (2, 5)]);
        assert_eq!(found("é"), [(2, 6)]);
        assert_eq!(found("ÿb"), [(2, 7)]);
        assert_eq!((found("c"), found("")), (vec![], vec![]));
        assert_eq!(Trie::new([]).prefixes(b"a").count(), 0);
    }
}
