//! Tokens that are written out in a text and are not cut into pieces.

/// The ids of `text`: those that `special` finds at the start of a rest of it, with how many bytes they take, and between
/// them what `plain` appends.
pub(super) fn encode(
    text: &str,
    special: impl Fn(&str) -> Option<(usize, u32)>,
    plain: impl Fn(&str, &mut Vec<u32>),
) -> Vec<u32> {
    let mut out = Vec::new();
    let mut start = 0;
    for (at, _) in text.char_indices() {
        if at < start {
            continue;
        }
        let Some((len, id)) = text.get(at..).and_then(&special) else { continue };
        plain(text.get(start..at).unwrap_or_default(), &mut out);
        out.push(id);
        start = at + len;
    }
    plain(text.get(start..).unwrap_or_default(), &mut out);
    out
}
