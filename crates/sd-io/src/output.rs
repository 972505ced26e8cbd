//! The names of generated files.

use std::path::PathBuf;

/// Extensions that say how a picture is written; any other gets [`DEFAULT`] appended.
const PICTURES: &[&str] = &["png", "jpg", "jpeg", "jpe", "webp"];
const DEFAULT: &str = "png";

/// The path of picture `k` of `total`, counted from 0.
///
/// `%d`, and `%4d` or `%04d` for a width, in `pattern` stand for the number `begin + k`, `%%` for a percent sign.
/// Without such a place the picture is called `pattern` if it is the only one, and otherwise gets `_` and its number
/// before the extension. A pattern without a picture's extension gets `.png`.
pub fn output_path(pattern: &str, begin: u64, k: usize, total: usize) -> PathBuf {
    let number = begin.saturating_add(k as u64);
    let (name, numbered) = expand(pattern, number);
    let (base, extension) = split_extension(if numbered { &name } else { pattern });
    if numbered || total <= 1 {
        format!("{base}.{extension}").into()
    } else {
        format!("{base}_{number}.{extension}").into()
    }
}

/// The name without its picture extension, and the extension to write.
fn split_extension(name: &str) -> (&str, &str) {
    match name.rsplit_once('.') {
        Some((base, extension)) if PICTURES.iter().any(|p| p.eq_ignore_ascii_case(extension)) => (base, extension),
        _ => (name, DEFAULT),
    }
}

/// The pattern with its places filled, and whether there were any.
fn expand(pattern: &str, number: u64) -> (String, bool) {
    let mut out = String::new();
    let mut numbered = false;
    let mut rest = pattern;
    while let Some((before, after)) = rest.split_once('%') {
        out.push_str(before);
        if let Some(tail) = after.strip_prefix('%') {
            out.push('%');
            rest = tail;
        } else if let Some((digits, tail)) = place(after) {
            let width = digits.parse().unwrap_or(0);
            let text = number.to_string();
            let fill = if digits.starts_with('0') { '0' } else { ' ' };
            out.extend(std::iter::repeat_n(fill, usize::saturating_sub(width, text.len())));
            out.push_str(&text);
            numbered = true;
            rest = tail;
        } else {
            out.push('%');
            rest = after;
        }
    }
    out.push_str(rest);
    (out, numbered)
}

/// Up to three digits and a `d`: the digits, and what follows.
fn place(after: &str) -> Option<(&str, &str)> {
    let digits = after.bytes().take_while(u8::is_ascii_digit).count();
    let (digits, tail) = after.split_at_checked(digits).filter(|(d, _)| d.len() <= 3)?;
    Some((digits, tail.strip_prefix('d')?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        // (pattern, begin, k, total, path)
        let cases = [
            ("out.png", 0, 0, 1, "out.png"),
            ("out.png", 7, 0, 1, "out.png"),
            ("out.png", 0, 0, 3, "out_0.png"),
            ("out.png", 5, 2, 3, "out_7.png"),
            ("a.b/out.JPG", 1, 1, 2, "a.b/out_2.JPG"),
            ("out.jpe", 0, 0, 1, "out.jpe"),
            ("out.webp", 0, 1, 2, "out_1.webp"),
            ("x.gif", 0, 0, 1, "x.gif.png"),
            ("x.gif", 0, 1, 2, "x.gif_1.png"),
            ("a.b/out", 0, 0, 1, "a.b/out.png"),
            ("out", 0, 0, 2, "out_0.png"),
            ("o_%d.png", 0, 0, 1, "o_0.png"),
            ("o_%03d.png", 9, 1, 3, "o_010.png"),
            ("o_%3d.png", 0, 4, 9, "o_  4.png"),
            ("o_%012d.jpg", 1, 0, 1, "o_000000000001.jpg"),
            ("o_%1d.png", 1234, 0, 1, "o_1234.png"),
            ("%d/%02d.png", 3, 0, 2, "3/03.png"),
            ("100%%_%d.png", 1, 0, 1, "100%_1.png"),
            ("100%%.png", 0, 0, 1, "100%%.png"),
            ("%%d.png", 0, 0, 2, "%%d_0.png"),
            ("%%%d.png", 4, 0, 2, "%4.png"),
            ("%1234d.png", 0, 0, 1, "%1234d.png"),
            ("50%.png", 0, 0, 1, "50%.png"),
            ("%d", 2, 0, 1, "2.png"),
            ("é%d.png", 2, 0, 1, "é2.png"),
        ];
        for (pattern, begin, k, total, want) in cases {
            assert_eq!(output_path(pattern, begin, k, total), PathBuf::from(want), "{pattern}");
        }
    }
}
