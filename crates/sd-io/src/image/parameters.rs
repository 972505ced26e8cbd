//! The text that says how a picture was made, put into PNG and JPEG files and read back.
//!
//! PNG: readers such as Pillow, and with it the common web UIs, take `tEXt` for Latin-1 and `iTXt` for UTF-8, while
//! others read `tEXt` as UTF-8 too. A text that both read alike goes into `tEXt`, any other into `iTXt`.
//!
//! JPEG: web UIs read the EXIF user comment, stable-diffusion.cpp a comment segment of `parameters`, NUL and the text;
//! both are written.

use std::io::Read;

use flate2::Crc;
use flate2::read::ZlibDecoder;
use sd_core::{Error, Result};

use super::exif;

const KEYWORD: &[u8] = b"parameters";
const PNG_SIGNATURE: &[u8] = b"\x89PNG\r\n\x1a\n";

/// The signature, then IHDR with its 13 bytes, length, name and checksum.
const PNG_HEAD: usize = 8 + 13 + 12;

/// What a JPEG segment can hold beside its own length.
const MAX_SEGMENT: usize = 65533;

/// The longest text that compressed chunks may unpack to.
const MAX_TEXT: u64 = 16 << 20;

/// The generation parameters in a PNG or JPEG file, if it carries any.
pub fn read_parameters(bytes: &[u8]) -> Option<String> {
    if let Some(chunks) = bytes.strip_prefix(PNG_SIGNATURE) {
        return read_png(chunks);
    }
    read_jpeg(bytes.strip_prefix(b"\xff\xd8")?)
}

/// The PNG file with a text chunk after IHDR.
pub(crate) fn insert_png(png: &[u8], text: &str) -> Result<Vec<u8>> {
    refuse_nul(text)?;
    let head = png.split_at_checked(PNG_HEAD);
    let (head, rest) = head.ok_or_else(|| Error::internal("the PNG encoder wrote no header"))?;
    let mut out = head.to_vec();
    match latin1(text) {
        Some(latin) => chunk(&mut out, b"tEXt", &[KEYWORD, b"\0", &latin]),
        // Uncompressed, no language, no translated keyword.
        None => chunk(&mut out, b"iTXt", &[KEYWORD, b"\0\0\0\0\0", text.as_bytes()]),
    }
    out.extend_from_slice(rest);
    Ok(out)
}

/// The JPEG file with the text as EXIF user comment and as comment segment. A text too long for a segment is left out
/// of that segment, and a warning says so.
pub(crate) fn insert_jpeg(jpeg: &[u8], text: &str) -> Result<Vec<u8>> {
    refuse_nul(text)?;
    // The segments go after the JFIF segment, which must come first.
    let at = match jpeg {
        [0xff, 0xd8, 0xff, 0xe0, a, b, ..] => 4 + usize::from(u16::from_be_bytes([*a, *b])),
        _ => 2,
    };
    let head = jpeg.split_at_checked(at);
    let (head, rest) = head.ok_or_else(|| Error::internal("the JPEG encoder wrote no header"))?;
    let mut out = head.to_vec();
    let exif = [b"Exif\0\0".to_vec(), exif::with_comment(text)].concat();
    let comment = [KEYWORD, b"\0", text.as_bytes()].concat();
    for (marker, name, payload) in [(0xe1, "EXIF comment", exif), (0xfe, "comment", comment)] {
        let Some(len) = u16::try_from(payload.len() + 2).ok().filter(|_| payload.len() <= MAX_SEGMENT) else {
            tracing::warn!("parameters of {} bytes do not fit in the {name} of a JPEG file", text.len());
            continue;
        };
        out.extend_from_slice(&[0xff, marker]);
        out.extend_from_slice(&len.to_be_bytes());
        out.extend_from_slice(&payload);
    }
    out.extend_from_slice(rest);
    Ok(out)
}

fn refuse_nul(text: &str) -> Result<()> {
    if text.contains('\0') {
        return Err(Error::request("the parameters text holds a NUL character, which picture files cannot keep"));
    }
    Ok(())
}

/// The text in Latin-1, if it has that and no reader can take it for UTF-8.
fn latin1(text: &str) -> Option<Vec<u8>> {
    let bytes: Option<Vec<u8>> = text.chars().map(|c| u8::try_from(u32::from(c)).ok()).collect();
    bytes.filter(|b| text.is_ascii() || std::str::from_utf8(b).is_err())
}

fn chunk(out: &mut Vec<u8>, name: &[u8; 4], parts: &[&[u8]]) {
    let len: usize = parts.iter().map(|p| p.len()).sum();
    out.extend_from_slice(&u32::try_from(len).unwrap_or(u32::MAX).to_be_bytes());
    let mut crc = Crc::new();
    for part in [&name[..]].iter().chain(parts) {
        crc.update(part);
        out.extend_from_slice(part);
    }
    out.extend_from_slice(&crc.sum().to_be_bytes());
}

fn read_png(mut rest: &[u8]) -> Option<String> {
    loop {
        let (len, tail) = rest.split_first_chunk()?;
        let (name, tail) = tail.split_first_chunk::<4>()?;
        let (data, tail) = tail.split_at_checked(usize::try_from(u32::from_be_bytes(*len)).ok()?)?;
        rest = tail.get(4..)?; // past the checksum
        let Some(data) = data.strip_prefix(KEYWORD).and_then(|d| d.strip_prefix(b"\0")) else { continue };
        match name {
            b"tEXt" => return Some(utf8_or_latin1(data)),
            b"zTXt" => return Some(utf8_or_latin1(&inflate(data.strip_prefix(b"\0")?)?)),
            b"iTXt" => {
                let (&[compressed, _method], tail) = data.split_first_chunk()?;
                let mut fields = tail.splitn(3, |b| *b == 0).skip(2); // past language and translated keyword
                let text = fields.next()?;
                let text = if compressed == 1 { inflate(text)? } else { text.to_vec() };
                return Some(String::from_utf8_lossy(&text).into_owned());
            }
            _ => {}
        }
    }
}

fn read_jpeg(mut rest: &[u8]) -> Option<String> {
    let mut comment = None;
    loop {
        let (&[0xff, marker], tail) = rest.split_first_chunk()? else { return comment };
        // The first scan ends the headers; markers without a length do not occur before it.
        if matches!(marker, 0xda | 0xd9 | 0x01 | 0xd0..=0xd8) {
            return comment;
        }
        if marker == 0xff {
            rest = rest.get(1..)?; // padding
            continue;
        }
        let len = usize::from(u16::from_be_bytes(*tail.first_chunk()?));
        let Some(payload) = tail.get(2..len) else { return comment };
        rest = tail.get(len..)?;
        match marker {
            0xfe => {
                if let Some(text) = payload.strip_prefix(KEYWORD).and_then(|p| p.strip_prefix(b"\0")) {
                    return Some(utf8_or_latin1(text));
                }
            }
            0xe1 if comment.is_none() => comment = payload.strip_prefix(b"Exif\0\0").and_then(exif::comment),
            _ => {}
        }
    }
}

fn utf8_or_latin1(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().copied().map(char::from).collect(),
    }
}

fn inflate(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    ZlibDecoder::new(bytes).take(MAX_TEXT).read_to_end(&mut out).ok()?;
    Some(out)
}
