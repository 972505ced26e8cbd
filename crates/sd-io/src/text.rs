//! Names from files, made fit for a message.

/// The most characters of a name from a file that a message repeats.
const SHOWN: usize = 160;

/// `name` with control characters escaped and an over-long middle cut out.
pub(crate) fn shown(name: &str) -> String {
    cut(name, SHOWN)
}

/// `text` as [`shown`] gives it, at most about `limit` characters long.
pub(crate) fn cut(text: &str, limit: usize) -> String {
    let escape = |part: &mut dyn Iterator<Item = char>| -> String {
        part.flat_map(|c| {
            let keep = !c.is_control() && c != '\u{fffd}';
            keep.then_some(c).into_iter().chain((!keep).then(|| c.escape_unicode()).into_iter().flatten())
        })
        .collect()
    };
    let len = text.chars().count();
    if len <= limit {
        return escape(&mut text.chars());
    }
    let head = escape(&mut text.chars().take(limit / 2));
    let tail = escape(&mut text.chars().skip(len - limit / 2));
    format!("{head}…{tail} ({len} characters)")
}

/// A path in the temporary directory that no other test uses.
#[cfg(test)]
pub(crate) fn scratch(name: &str) -> std::path::PathBuf {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    let dir = std::env::temp_dir().join(format!("sd-io-unit-{}-{n}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    dir.join(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_and_length() {
        assert_eq!(shown("a.b\nc\u{1b}[0m é"), "a.b\\u{a}c\\u{1b}[0m é");
        let long = shown(&"x".repeat(100_000));
        assert!(long.len() < 200 && long.ends_with("(100000 characters)"), "{long}");
    }
}
