//! What a picture file is made of: the chunks of PNG and WebP, the segments of JPEG, with what is known decoded.

mod exif;
mod jpeg;
mod png;
mod webp;

use sd_core::{Error, Result};
use serde::Serialize;
use serde_json::Value;

use super::texts::PNG_SIGNATURE;

/// Bytes that a preview shows.
const PREVIEW: usize = 64;

/// The most entries that are listed; a file of some megabytes can have a million empty chunks.
const MAX_ENTRIES: usize = 1 << 16;

/// The structure of a picture file.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Container {
    /// `PNG`, `JPEG` or `WEBP`.
    pub format: &'static str,
    /// Its parts in the order of the file.
    pub entries: Vec<Entry>,
}

/// Whether a part is called a chunk or a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum EntryType {
    /// Of PNG and WebP.
    Chunk,
    /// Of JPEG.
    Segment,
}

/// A part of a picture file.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Entry {
    /// What such files call it.
    pub entry_type: EntryType,
    /// The name of a chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The marker of a segment, such as `APP1`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub marker: Option<String>,
    /// Bytes of its payload.
    pub length: usize,
    /// The checksum in the file, of a PNG chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub crc: Option<String>,
    /// Whether readers must understand a PNG chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub critical: Option<bool>,
    /// What it says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<Value>,
    /// Why it could not be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The first bytes of a payload that is not taken apart.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub raw_hex_preview: Option<String>,
    /// Whether it is about the picture rather than about where the picture is from.
    #[serde(skip)]
    pub structural: bool,
}

/// What became of a payload.
type Decoded = std::result::Result<Option<Value>, String>;

impl Entry {
    fn new(entry_type: EntryType, name: &str, payload: &[u8], decoded: Decoded, structural: bool) -> Entry {
        let (data, error) = match decoded {
            Ok(data) => (data, None),
            Err(error) => (None, Some(error)),
        };
        let raw = (data.is_none() && !payload.is_empty()).then(|| hex(payload));
        let named = |of: EntryType| (entry_type == of).then(|| name.to_owned());
        Entry {
            entry_type,
            name: named(EntryType::Chunk),
            marker: named(EntryType::Segment),
            length: payload.len(),
            crc: None,
            critical: None,
            data,
            error,
            raw_hex_preview: raw,
            structural,
        }
    }
}

impl Container {
    /// Takes a PNG, JPEG or WebP file apart. Nothing of the pixels is decoded.
    ///
    /// # Errors
    /// Another kind of file, a chunk or segment that leaves the file, a missing end. A part whose payload makes no sense
    /// is listed with what is wrong.
    pub fn read(bytes: &[u8]) -> Result<Container> {
        let (format, entries) = if let Some(rest) = bytes.strip_prefix(PNG_SIGNATURE) {
            ("PNG", png::entries(rest))
        } else if let Some(rest) = bytes.strip_prefix(b"\xff\xd8") {
            ("JPEG", jpeg::entries(rest))
        } else if bytes.starts_with(b"RIFF") && bytes.get(8..12) == Some(b"WEBP") {
            ("WEBP", webp::entries(bytes))
        } else {
            return Err(Error::request("unsupported image format: expected PNG, JPEG or WebP"));
        };
        let entries = entries.map_err(|what| Error::request(format!("{format}: {what}")))?;
        Ok(Container { format, entries })
    }
}

/// An error if there are too many entries.
fn count(entries: &[Entry]) -> std::result::Result<(), String> {
    if entries.len() < MAX_ENTRIES { Ok(()) } else { Err(format!("has more than {MAX_ENTRIES} parts")) }
}

/// The first bytes in hexadecimal.
fn hex(bytes: &[u8]) -> String {
    let shown: Vec<String> = bytes.iter().take(PREVIEW).map(|b| format!("{b:02x}")).collect();
    shown.join(" ")
}

/// A big-endian number.
fn be32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// A big-endian number.
fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}
