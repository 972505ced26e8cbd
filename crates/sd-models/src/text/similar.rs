//! How alike names are.

/// Characters of a name that a comparison looks at.
const LONGEST: usize = 256;

/// How many characters to insert, remove or change to get from `a` to `b` (Levenshtein), in their first 256.
pub fn distance(a: &str, b: &str) -> usize {
    let start = |s: &str| s.chars().take(LONGEST).collect::<Vec<char>>();
    let (a, b) = (start(a), start(b));
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = i;
        let mut left = i + 1;
        for (cell, y) in row.iter_mut().skip(1).zip(&b) {
            left = (diagonal + usize::from(x != y)).min(*cell + 1).min(left + 1);
            diagonal = std::mem::replace(cell, left);
        }
        if let Some(first) = row.first_mut() {
            *first = i + 1;
        }
    }
    row.last().copied().unwrap_or(a.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn similar_names_are_found() {
        for (a, b, want) in [
            ("", "", 0),
            ("kitten", "sitting", 3),
            ("flaw", "lawn", 2),
            ("abc", "", 3),
            ("", "ab", 2),
            ("é", "e", 1),
        ] {
            assert_eq!(distance(a, b), want, "{a} {b}");
        }
    }
}
