//! An EXIF block as a tree of directories. Source: TIFF 6.0, section 2; Exif 2.3, section 4.6.

use serde_json::{Map, Value, json};

use super::super::exif::{Tiff, utf16};
use super::hex;

/// Fields that are read of all directories together.
const MAX_FIELDS: usize = 2000;

/// Elements that are shown of a field.
const MAX_ELEMENTS: usize = 64;

/// The names of types by their numbers, with the bytes of an element.
const TYPES: [(&str, usize); 13] = [
    ("?", 0),
    ("BYTE", 1),
    ("ASCII", 1),
    ("SHORT", 2),
    ("LONG", 4),
    ("RATIONAL", 8),
    ("SBYTE", 1),
    ("UNDEFINED", 1),
    ("SSHORT", 2),
    ("SLONG", 4),
    ("SRATIONAL", 8),
    ("FLOAT", 4),
    ("DOUBLE", 8),
];

/// Fields that lead to directories, with the directories' names.
const CHILDREN: [(usize, &str); 3] = [(0x8769, "Exif"), (0x8825, "GPS"), (0xa005, "Interoperability")];

const NAMES: [(usize, &str); 40] = [
    (0x0100, "ImageWidth"),
    (0x0101, "ImageLength"),
    (0x0102, "BitsPerSample"),
    (0x0103, "Compression"),
    (0x0106, "PhotometricInterpretation"),
    (0x010e, "ImageDescription"),
    (0x010f, "Make"),
    (0x0110, "Model"),
    (0x0112, "Orientation"),
    (0x0115, "SamplesPerPixel"),
    (0x011a, "XResolution"),
    (0x011b, "YResolution"),
    (0x0128, "ResolutionUnit"),
    (0x0131, "Software"),
    (0x0132, "DateTime"),
    (0x013b, "Artist"),
    (0x0201, "JPEGInterchangeFormat"),
    (0x0202, "JPEGInterchangeFormatLength"),
    (0x0213, "YCbCrPositioning"),
    (0x8298, "Copyright"),
    (0x829a, "ExposureTime"),
    (0x829d, "FNumber"),
    (0x8769, "ExifIFDPointer"),
    (0x8825, "GPSInfoIFDPointer"),
    (0x8827, "PhotographicSensitivity"),
    (0x9000, "ExifVersion"),
    (0x9003, "DateTimeOriginal"),
    (0x9004, "DateTimeDigitized"),
    (0x9101, "ComponentsConfiguration"),
    (0x920a, "FocalLength"),
    (0x927c, "MakerNote"),
    (0x9286, "UserComment"),
    (0xa000, "FlashpixVersion"),
    (0xa001, "ColorSpace"),
    (0xa002, "PixelXDimension"),
    (0xa003, "PixelYDimension"),
    (0xa005, "InteroperabilityIFDPointer"),
    (0xa402, "ExposureMode"),
    (0xa403, "WhiteBalance"),
    (0xa420, "ImageUniqueID"),
];

/// The directories of a block.
pub(super) fn tree(block: &[u8]) -> Result<Value, String> {
    let (tiff, mut at) = Tiff::open(block).ok_or("is no EXIF block")?;
    let mut reader = Reader { tiff, seen: Vec::new(), left: MAX_FIELDS, warning: None };
    let mut ifds = Vec::new();
    while at != 0 && ifds.len() < 8 {
        let Some((ifd, next)) = reader.directory(&format!("IFD{}", ifds.len()), at, 0) else { break };
        ifds.push(ifd);
        at = next;
    }
    let order = if reader.tiff.big { "big-endian" } else { "little-endian" };
    let mut out = json!({"byte_order": order, "ifds": ifds});
    if let (Some(warning), Value::Object(map)) = (reader.warning, &mut out) {
        map.insert("warning".to_owned(), json!(warning));
    }
    Ok(out)
}

struct Reader<'a> {
    tiff: Tiff<'a>,
    seen: Vec<usize>,
    left: usize,
    /// The first thing that is wrong.
    warning: Option<String>,
}

impl Reader<'_> {
    fn warn<T>(&mut self, what: String) -> Option<T> {
        self.warning.get_or_insert(what);
        None
    }

    /// The directory at `at`, and where the next one is.
    fn directory(&mut self, name: &str, at: usize, depth: usize) -> Option<(Value, usize)> {
        if depth > 3 || self.seen.contains(&at) {
            return self.warn(format!("{name} leads back to a directory before it"));
        }
        self.seen.push(at);
        let Some(count) = self.tiff.u16(at) else { return self.warn(format!("{name} leaves the block")) };
        let (mut tags, mut children) = (Vec::new(), Vec::new());
        for i in 0..usize::from(count) {
            let place = at + 2 + 12 * i;
            let Some((id, kind, elements)) = self.field(place) else {
                self.warn::<()>(format!("{name} leaves the block after {i} of {count} fields"));
                break;
            };
            if self.left == 0 {
                self.warn::<()>(format!("there are more than {MAX_FIELDS} fields"));
                break;
            }
            self.left -= 1;
            tags.push(self.tag(id, kind, elements, place + 8));
            if let Some((_, child)) = CHILDREN.iter().find(|c| c.0 == id)
                && let Some(to) = self.tiff.u32(place + 8)
                && let Some((ifd, _)) = self.directory(child, to, depth + 1)
            {
                children.push(ifd);
            }
        }
        let next = self.tiff.u32(at + 2 + 12 * usize::from(count)).unwrap_or(0);
        let mut out = Map::new();
        out.insert("name".to_owned(), json!(name));
        out.insert("tags".to_owned(), json!(tags));
        if !children.is_empty() {
            out.insert("children".to_owned(), json!(children));
        }
        if next != 0 {
            out.insert("next_ifd".to_owned(), json!(next));
        }
        Some((Value::Object(out), next))
    }

    fn field(&self, at: usize) -> Option<(usize, usize, usize)> {
        self.tiff.bytes.get(at..at.checked_add(12)?)?;
        Some((usize::from(self.tiff.u16(at)?), usize::from(self.tiff.u16(at + 2)?), self.tiff.u32(at + 4)?))
    }

    fn tag(&self, id: usize, kind: usize, count: usize, place: usize) -> Value {
        let name = NAMES.iter().find(|n| n.0 == id).map_or_else(|| format!("0x{id:04x}"), |n| n.1.to_owned());
        let (type_name, size) = TYPES.get(kind).copied().unwrap_or(("?", 0));
        let mut out = Map::new();
        for (key, value) in [("id", json!(id)), ("name", json!(name)), ("type", json!(type_name))] {
            out.insert(key.to_owned(), value);
        }
        out.insert("count".to_owned(), json!(count));
        match self.value(id, kind, size, count, place) {
            Ok(value) => out.insert("value".to_owned(), value),
            Err(error) => out.insert("error".to_owned(), json!(error)),
        };
        Value::Object(out)
    }

    fn value(&self, id: usize, kind: usize, size: usize, count: usize, place: usize) -> Result<Value, String> {
        let bytes = count.checked_mul(size).filter(|n| size > 0 && *n <= self.tiff.bytes.len());
        let bytes = bytes.ok_or_else(|| format!("{count} elements of type {kind}"))?;
        // Four bytes stand in the field itself.
        let start = if bytes <= 4 { Some(place) } else { self.tiff.u32(place) };
        let data = start.and_then(|s| self.tiff.bytes.get(s..s.checked_add(bytes)?));
        let data = data.ok_or("leaves the block")?;
        let text = |b: &[u8]| json!(String::from_utf8_lossy(b).trim_end_matches('\0'));
        if kind == 2 {
            return Ok(text(data));
        }
        if id == 0x9286
            && let Some((code, rest)) = data.split_first_chunk::<8>()
        {
            match code {
                b"UNICODE\0" => return Ok(json!(utf16(rest))),
                b"ASCII\0\0\0" => return Ok(text(rest)),
                _ => {}
            }
        }
        if kind == 7 {
            let printable = data.iter().all(|b| b.is_ascii_graphic() || *b == b' ');
            return Ok(if printable && !data.is_empty() { text(data) } else { json!(hex(data)) });
        }
        let mut values: Vec<Value> =
            data.chunks_exact(size).take(MAX_ELEMENTS).map(|e| self.number(kind, e)).collect();
        Ok(if values.len() == 1 { values.remove(0) } else { json!(values) })
    }

    fn number(&self, kind: usize, bytes: &[u8]) -> Value {
        let raw = bytes.iter();
        let fold = |n: u64, b: &u8| n << 8 | u64::from(*b);
        let read =
            |part: &[u8]| if self.tiff.big { part.iter().fold(0, fold) } else { part.iter().rev().fold(0, fold) };
        let bits = if self.tiff.big { raw.fold(0, fold) } else { raw.rev().fold(0, fold) };
        let halves = bytes.split_at_checked(bytes.len() / 2).map(|(n, d)| (read(n) as u32, read(d) as u32));
        match (kind, halves) {
            (5, Some((n, d))) => json!(format!("{n}/{d} ({})", f64::from(n) / f64::from(d))),
            (10, Some((n, d))) => {
                let (n, d) = (n as i32, d as i32);
                json!(format!("{n}/{d} ({})", f64::from(n) / f64::from(d)))
            }
            (6, _) => json!(bits as u8 as i8),
            (8, _) => json!(bits as u16 as i16),
            (9, _) => json!(bits as u32 as i32),
            (11, _) => json!(f32::from_bits(bits as u32)),
            (12, _) => json!(f64::from_bits(bits)),
            _ => json!(bits),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_and_types() {
        // One directory, little-endian: orientation 6; resolution 72/1, whose value stands after the directory.
        let mut block = b"II\x2a\0\x08\0\0\0\x02\0".to_vec();
        block.extend(b"\x12\x01\x03\0\x01\0\0\0\x06\0\0\0");
        block.extend(b"\x1a\x01\x05\0\x01\0\0\0\x26\0\0\0");
        block.extend(b"\0\0\0\0\x48\0\0\0\x01\0\0\0");
        let got = tree(&block).unwrap();
        let ifd = &got["ifds"][0];
        assert_eq!((&got["byte_order"], &ifd["name"]), (&json!("little-endian"), &json!("IFD0")));
        assert_eq!(
            ifd["tags"][0],
            json!({"id": 274, "name": "Orientation", "type": "SHORT", "count": 1, "value": 6})
        );
        assert_eq!(ifd["tags"][1]["value"], "72/1 (72)");
        assert_eq!(got.get("warning"), None);
        let cut = tree(&block[..30]).unwrap();
        assert!(cut["warning"].as_str().unwrap().contains("after 1 of 2 fields"), "{cut}");
        // A directory that is its own successor.
        let mut looped = block.clone();
        looped[34] = 8;
        assert!(tree(&looped).unwrap()["warning"].as_str().unwrap().contains("leads back"));
        assert!(tree(b"nothing").is_err());
    }

    #[test]
    fn what_this_program_writes_is_read() {
        let got = tree(&crate::image::exif::with_comment("Größe, 猫")).unwrap();
        let tag = &got["ifds"][0]["children"][0]["tags"][0];
        assert_eq!((&tag["name"], &tag["value"]), (&json!("UserComment"), &json!("Größe, 猫")));
    }
}
