//! Blanks out comments, strings and character literals, so that rules see only Rust code.

/// `source` with every comment and literal replaced by blanks; line breaks stay where they are.
pub(crate) fn code_only(source: &str) -> String {
    let chars: Vec<char> = source.chars().collect();
    let mut out = String::with_capacity(source.len());
    let mut at = 0;
    while let Some(&c) = chars.get(at) {
        let next = chars.get(at + 1).copied();
        let end = match (c, next) {
            ('/', Some('/')) => line_end(&chars, at),
            ('/', Some('*')) => block_comment_end(&chars, at),
            ('"', _) => string_end(&chars, at + 1),
            ('r', Some('"' | '#')) if !continues_word(&chars, at) => raw_string_end(&chars, at + 1),
            ('\'', _) => char_end(&chars, at),
            _ => at,
        };
        if end == at {
            out.push(c);
            at += 1;
        } else {
            for &blanked in chars.get(at..end).unwrap_or_default() {
                out.push(if blanked == '\n' { '\n' } else { ' ' });
            }
            at = end;
        }
    }
    out
}

fn line_end(chars: &[char], from: usize) -> usize {
    (from..chars.len()).find(|&i| chars.get(i) == Some(&'\n')).unwrap_or(chars.len())
}

fn block_comment_end(chars: &[char], from: usize) -> usize {
    let (mut at, mut depth) = (from, 0usize);
    while at < chars.len() {
        match (chars.get(at), chars.get(at + 1)) {
            (Some('/'), Some('*')) => (at, depth) = (at + 2, depth + 1),
            (Some('*'), Some('/')) => (at, depth) = (at + 2, depth.saturating_sub(1)),
            _ => at += 1,
        }
        if depth == 0 {
            break;
        }
    }
    at.min(chars.len())
}

/// The place after the closing quote of a string whose content starts at `from`.
fn string_end(chars: &[char], from: usize) -> usize {
    let mut at = from;
    while let Some(c) = chars.get(at) {
        match c {
            '\\' => at += 2,
            '"' => return at + 1,
            _ => at += 1,
        }
    }
    chars.len()
}

/// `from` is the place after `r`. Returns the place before `from` when this is no raw string (as in `r#type`).
fn raw_string_end(chars: &[char], from: usize) -> usize {
    let hashes = chars.get(from..).unwrap_or_default().iter().take_while(|&&c| c == '#').count();
    if chars.get(from + hashes) != Some(&'"') {
        return from - 1;
    }
    let mut at = from + hashes + 1;
    while at < chars.len() {
        let closing = chars.get(at + 1..at + 1 + hashes).is_some_and(|tail| tail.iter().all(|&c| c == '#'));
        if chars.get(at) == Some(&'"') && closing {
            return at + 1 + hashes;
        }
        at += 1;
    }
    chars.len()
}

/// A quote starts a character literal or a lifetime; only the former is blanked.
fn char_end(chars: &[char], from: usize) -> usize {
    match (chars.get(from + 1), chars.get(from + 2)) {
        (Some('\\'), _) => {
            let close = (from + 3..chars.len()).find(|&i| chars.get(i) == Some(&'\''));
            close.map_or(chars.len(), |i| i + 1)
        }
        (Some(_), Some('\'')) => from + 3,
        _ => from,
    }
}

fn continues_word(chars: &[char], at: usize) -> bool {
    at.checked_sub(1).and_then(|i| chars.get(i)).is_some_and(|c| c.is_alphanumeric() || *c == '_')
}

/// The words (identifiers and keywords) of stripped code, each with what follows it directly.
pub(crate) fn words(line: &str) -> impl Iterator<Item = (&str, &str)> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut rest = line;
    std::iter::from_fn(move || {
        let start = rest.find(is_word)?;
        let from = rest.get(start..)?;
        let len = from.find(|c| !is_word(c)).unwrap_or(from.len());
        let (word, after) = from.split_at(len);
        rest = after;
        Some((word, after))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literals_and_comments_are_blanked_and_lines_kept() {
        let source =
            "a // unsafe\nb /* x /* y */ unsafe */ c \"unsafe \\\" {\" d\nr#\"un\"safe\"# 'u' '\\'' 'life r#type";
        let code = code_only(source);
        assert_eq!(code.lines().count(), source.lines().count());
        let seen: Vec<&str> = code.lines().flat_map(words).map(|(word, _)| word).collect();
        assert_eq!(seen, ["a", "b", "c", "d", "life", "r", "type"]);
    }

    #[test]
    fn a_word_knows_what_follows_it() {
        let found: Vec<_> = words("x.unwrap(); dbg!(y)").collect();
        assert_eq!(found, [("x", ".unwrap(); dbg!(y)"), ("unwrap", "(); dbg!(y)"), ("dbg", "!(y)"), ("y", ")")]);
    }
}
