//! Every text that a picture file carries, by where it is.
//!
//! PNG: `tEXt`, `zTXt` and `iTXt` chunks before and after the pixels, and EXIF. JPEG: comments and EXIF. WebP: EXIF and
//! XMP. Last of all, what some programs hide in the lowest bits of the pixels ([`super::stealth`]).

use std::io::Read;

use flate2::read::ZlibDecoder;
use serde::Serialize;

use super::{exif, stealth};

pub(super) const PNG_SIGNATURE: &[u8] = b"\x89PNG\r\n\x1a\n";

/// The keyword of texts from the EXIF user comment.
pub(super) const USER_COMMENT: &str = "UserComment";

/// The longest text that compressed chunks may unpack to.
pub(super) const MAX_TEXT: u64 = 16 << 20;

/// The most texts that are kept.
const MAX_TEXTS: usize = 256;

/// A text in a picture file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PictureText {
    /// The keyword of a PNG chunk, the name of an EXIF field such as `UserComment`, `Comment` for the comment of a
    /// JPEG file, `XMP`, or `stealth` for what is hidden in pixels.
    pub keyword: String,
    /// The text.
    pub text: String,
}

/// The texts of a PNG, JPEG or WebP file in the order of the file; none for other files. Damaged ones give what comes
/// before the damage.
pub fn read_texts(bytes: &[u8]) -> Vec<PictureText> {
    let mut out = visible(bytes);
    if bytes.starts_with(PNG_SIGNATURE)
        && let Some(text) = stealth::read(bytes)
    {
        out.push(PictureText { keyword: "stealth".into(), text });
    }
    out
}

/// [`read_texts`] without looking at pixels.
pub(super) fn visible(bytes: &[u8]) -> Vec<PictureText> {
    let mut out = Vec::new();
    if let Some(chunks) = bytes.strip_prefix(PNG_SIGNATURE) {
        png(chunks, &mut out);
    } else if let Some(segments) = bytes.strip_prefix(b"\xff\xd8") {
        jpeg(segments, &mut out);
    } else if bytes.starts_with(b"RIFF") && bytes.get(8..12) == Some(b"WEBP") {
        webp(bytes.get(12..).unwrap_or_default(), &mut out);
    }
    out.truncate(MAX_TEXTS);
    out
}

fn push(out: &mut Vec<PictureText>, keyword: &str, text: String) {
    if out.len() < MAX_TEXTS {
        out.push(PictureText { keyword: keyword.to_owned(), text });
    }
}

fn png(mut rest: &[u8], out: &mut Vec<PictureText>) -> Option<()> {
    loop {
        let (len, tail) = rest.split_first_chunk()?;
        let (name, tail) = tail.split_first_chunk::<4>()?;
        let (data, tail) = tail.split_at_checked(usize::try_from(u32::from_be_bytes(*len)).ok()?)?;
        rest = tail.get(4..)?; // past the checksum
        if name == b"eXIf" {
            exif_texts(data, out);
            continue;
        }
        if !matches!(name, b"tEXt" | b"zTXt" | b"iTXt") || out.len() >= MAX_TEXTS {
            continue;
        }
        let Some(end) = data.iter().position(|b| *b == 0) else { continue };
        let (keyword, data) = data.split_at_checked(end)?;
        let data = data.get(1..)?;
        let text = match name {
            b"tEXt" => Some(utf8_or_latin1(data)),
            b"zTXt" => data.strip_prefix(b"\0").and_then(inflate).map(|t| utf8_or_latin1(&t)),
            _ => international(data),
        };
        if let Some(text) = text {
            push(out, &utf8_or_latin1(keyword), text);
        }
    }
}

/// The text of an `iTXt` chunk after its keyword.
fn international(data: &[u8]) -> Option<String> {
    let (&[compressed, _method], tail) = data.split_first_chunk()?;
    let text = tail.splitn(3, |b| *b == 0).nth(2)?; // past language and translated keyword
    let text = if compressed == 1 { inflate(text)? } else { text.to_vec() };
    Some(String::from_utf8_lossy(&text).into_owned())
}

fn jpeg(mut rest: &[u8], out: &mut Vec<PictureText>) -> Option<()> {
    loop {
        let (&[0xff, marker], tail) = rest.split_first_chunk()? else { return None };
        // The first scan ends the headers; markers without a length do not occur before it.
        if matches!(marker, 0xda | 0xd9 | 0x01 | 0xd0..=0xd8) {
            return None;
        }
        if marker == 0xff {
            rest = rest.get(1..)?; // padding
            continue;
        }
        let len = usize::from(u16::from_be_bytes(*tail.first_chunk()?));
        let payload = tail.get(2..len)?;
        rest = tail.get(len..)?;
        match marker {
            0xfe => match split_keyword(payload) {
                Some((keyword, text)) => push(out, keyword, utf8_or_latin1(text)),
                None => push(out, "Comment", utf8_or_latin1(payload)),
            },
            0xe1 => {
                if let Some(exif) = payload.strip_prefix(b"Exif\0\0") {
                    exif_texts(exif, out);
                }
            }
            _ => {}
        }
    }
}

/// A comment of stable-diffusion.cpp: a keyword, NUL and the text.
pub(super) fn split_keyword(payload: &[u8]) -> Option<(&str, &[u8])> {
    let end = payload.iter().position(|b| *b == 0).filter(|n| (1..80).contains(n))?;
    let (keyword, text) = payload.split_at_checked(end)?;
    let keyword = std::str::from_utf8(keyword).ok().filter(|k| k.bytes().all(|b| b.is_ascii_graphic()))?;
    Some((keyword, text.get(1..)?))
}

fn webp(mut rest: &[u8], out: &mut Vec<PictureText>) -> Option<()> {
    loop {
        let (name, tail) = rest.split_first_chunk::<4>()?;
        let (len, tail) = tail.split_first_chunk()?;
        let len = usize::try_from(u32::from_le_bytes(*len)).ok()?;
        let (data, tail) = tail.split_at_checked(len)?;
        match name {
            // Some writers put JPEG's prefix here, too.
            b"EXIF" => exif_texts(data.strip_prefix(b"Exif\0\0").unwrap_or(data), out),
            b"XMP " => push(out, "XMP", utf8_or_latin1(data)),
            _ => {}
        }
        rest = tail.get(len % 2..)?; // chunks start at even places
    }
}

fn exif_texts(block: &[u8], out: &mut Vec<PictureText>) {
    if let Some(text) = exif::comment(block) {
        push(out, USER_COMMENT, text);
    }
    for (name, text) in exif::texts(block) {
        push(out, name, text);
    }
}

pub(super) fn utf8_or_latin1(bytes: &[u8]) -> String {
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
