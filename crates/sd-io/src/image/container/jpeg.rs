//! Segments of JPEG. Sources: ITU-T T.81, annex B; JFIF 1.02; Exif 2.3, section 4.7; ICC.1, annex B.4.

use serde_json::{Value, json};

use super::super::texts::{split_keyword, utf8_or_latin1};
use super::{Decoded, Entry, EntryType, be16, count, exif};

/// The segments after the mark of the beginning.
pub(super) fn entries(mut rest: &[u8]) -> Result<Vec<Entry>, String> {
    let mut out = Vec::new();
    loop {
        count(&out)?;
        let (&[mark, marker], tail) = rest.split_first_chunk().ok_or("the file ends without EOI")?;
        if mark != 0xff || marker == 0 {
            return Err(format!("has {mark:02x} {marker:02x} where a segment begins"));
        }
        if marker == 0xff {
            rest = rest.get(1..).unwrap_or_default(); // padding
            continue;
        }
        let name = name(marker);
        if matches!(marker, 0x01 | 0xd0..=0xd9) {
            out.push(Entry::new(EntryType::Segment, &name, &[], Ok(None), true));
            if marker == 0xd9 {
                return Ok(out);
            }
            rest = tail;
            continue;
        }
        let cut = || format!("segment {name} leaves the file");
        let len = usize::from(be16(tail, 0).ok_or_else(cut)?);
        let payload = tail.get(2..len).ok_or_else(cut)?;
        rest = tail.get(len..).unwrap_or_default();
        let structural = !matches!(marker, 0xe0..=0xef | 0xfe);
        out.push(Entry::new(EntryType::Segment, &name, payload, decode(marker, payload), structural));
        if marker == 0xda {
            // A marker ends what is compressed; 0 and the marks of restarts are part of it.
            let ends = |w: &[u8]| matches!(w, [0xff, m] if *m != 0 && *m != 0xff && !(0xd0..=0xd7).contains(m));
            let end = rest.windows(2).position(ends).ok_or("the file ends without EOI")?;
            rest = rest.get(end..).unwrap_or_default();
        }
    }
}

fn name(marker: u8) -> String {
    match marker {
        0xc4 => "DHT".to_owned(),
        0xc8 | 0xcc => format!("0x{marker:02x}"),
        0xc0..=0xcf => format!("SOF{}", marker & 15),
        0xd0..=0xd7 => format!("RST{}", marker & 7),
        0xd8 => "SOI".to_owned(),
        0xd9 => "EOI".to_owned(),
        0xda => "SOS".to_owned(),
        0xdb => "DQT".to_owned(),
        0xdd => "DRI".to_owned(),
        0xe0..=0xef => format!("APP{}", marker & 15),
        0xfe => "COM".to_owned(),
        other => format!("0x{other:02x}"),
    }
}

fn decode(marker: u8, payload: &[u8]) -> Decoded {
    let value = match marker {
        0xfe => match split_keyword(payload) {
            Some((label, text)) => json!({"label": label, "text": utf8_or_latin1(text)}),
            None => json!({"text": utf8_or_latin1(payload)}),
        },
        0xe0 if payload.starts_with(b"JFIF\0") => jfif(payload).ok_or("is too short for JFIF")?,
        0xe1 => {
            if let Some(block) = payload.strip_prefix(b"Exif\0\0") {
                json!({"kind": "Exif", "exif": exif::tree(block)?})
            } else if let Some(xmp) = payload.strip_prefix(b"http://ns.adobe.com/xap/1.0/\0") {
                json!({"kind": "XMP", "text": utf8_or_latin1(xmp)})
            } else {
                return Ok(None);
            }
        }
        0xe2 => match payload.strip_prefix(b"ICC_PROFILE\0") {
            Some(&[part, of, ref profile @ ..]) => {
                json!({"kind": "ICC", "part": part, "of": of, "bytes": profile.len()})
            }
            Some(_) => return Err("is too short for a profile".to_owned()),
            None => return Ok(None),
        },
        0xee => match payload.strip_prefix(b"Adobe") {
            Some(&[_, _, _, _, _, _, transform, ..]) => {
                json!({"kind": "Adobe", "version": be16(payload, 5), "flags": [be16(payload, 7), be16(payload, 9)],
                    "transform": transform})
            }
            Some(_) => return Err("is too short".to_owned()),
            None => return Ok(None),
        },
        _ => return Ok(None),
    };
    Ok(Some(value))
}

fn jfif(payload: &[u8]) -> Option<Value> {
    let &[major, minor, unit] = payload.get(5..)?.first_chunk()?;
    let unit = match unit {
        1 => "inch",
        2 => "centimetre",
        _ => "none",
    };
    let version = format!("{major}.{minor:02}");
    Some(json!({"kind": "JFIF", "version": version, "unit": unit, "x": be16(payload, 8)?, "y": be16(payload, 10)?}))
}
