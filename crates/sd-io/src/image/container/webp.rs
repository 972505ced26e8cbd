//! Chunks of WebP. Source: RFC 9649, section 2.

use serde_json::{Value, json};

use super::super::texts::utf8_or_latin1;
use super::{Decoded, Entry, EntryType, count, exif};

/// The chunks of a whole file.
pub(super) fn entries(file: &[u8]) -> Result<Vec<Entry>, String> {
    let size = file.get(4..8).and_then(|b| Some(u32::from_le_bytes(*b.first_chunk()?))).ok_or("is too short")?;
    let end = usize::try_from(size).ok().and_then(|n| n.checked_add(8));
    let cut = || format!("its header claims {size} bytes, the file has {}", file.len().saturating_sub(8));
    let mut rest = end.and_then(|end| file.get(12..end)).ok_or_else(cut)?;
    let mut out = Vec::new();
    while !rest.is_empty() {
        count(&out)?;
        let ([a, b, c, d, len @ ..], tail) = rest.split_first_chunk::<8>().ok_or("ends within a chunk")?;
        let name = [*a, *b, *c, *d];
        let shown = utf8_or_latin1(&name);
        let len = u32::from_le_bytes(*len);
        let data = usize::try_from(len).ok().and_then(|n| tail.split_at_checked(n));
        let (data, tail) = data.ok_or_else(|| format!("chunk {shown:?} of {len} bytes leaves the file"))?;
        let structural = !matches!(&name, b"ICCP" | b"EXIF" | b"XMP ");
        out.push(Entry::new(EntryType::Chunk, &shown, data, decode(&name, data), structural));
        rest = tail.get(data.len() % 2..).unwrap_or_default(); // chunks start at even places
    }
    if out.is_empty() { Err("has no chunks".to_owned()) } else { Ok(out) }
}

fn decode(name: &[u8; 4], data: &[u8]) -> Decoded {
    let value = match name {
        b"VP8X" => extended(data).ok_or("is too short")?,
        b"EXIF" => exif::tree(data.strip_prefix(b"Exif\0\0").unwrap_or(data))?,
        b"XMP " => json!({"text": utf8_or_latin1(data)}),
        b"ICCP" => json!({"bytes": data.len()}),
        _ => return Ok(None),
    };
    Ok(Some(value))
}

fn extended(data: &[u8]) -> Option<Value> {
    let &[flags, _, _, _, w0, w1, w2, h0, h1, h2] = data.first_chunk()?;
    let side = |a: u8, b: u8, c: u8| u32::from_le_bytes([a, b, c, 0]) + 1;
    let has = |bit: u8| flags & bit != 0;
    Some(json!({"width": side(w0, w1, w2), "height": side(h0, h1, h2), "icc": has(0x20), "alpha": has(0x10),
        "exif": has(0x08), "xmp": has(0x04), "animation": has(0x02)}))
}
