//! The text that says how a picture was made, put into PNG, JPEG and WebP files and read back.
//!
//! PNG: readers such as Pillow, and with it the common web UIs, take `tEXt` for Latin-1 and `iTXt` for UTF-8, while
//! others read `tEXt` as UTF-8 too. A text that both read alike goes into `tEXt`, any other into `iTXt`.
//!
//! JPEG: web UIs read the EXIF user comment, stable-diffusion.cpp a comment segment of `parameters`, NUL and the text;
//! both are written. WebP: web UIs read the EXIF user comment.

use flate2::Crc;
use sd_core::{Error, Result};

use super::{exif, texts};

const PARAMETERS: &str = "parameters";
const KEYWORD: &[u8] = PARAMETERS.as_bytes();

/// The signature, then IHDR with its 13 bytes, length, name and checksum.
const PNG_HEAD: usize = 8 + 13 + 12;

/// What a JPEG segment can hold beside its own length.
const MAX_SEGMENT: usize = 65533;

/// The generation parameters in a PNG, JPEG or WebP file as the A1111 web UI and the programs that follow it write them,
/// if it carries any. [`read_generation`](super::read_generation) takes them apart, and knows other programs, too.
pub fn read_parameters(bytes: &[u8]) -> Option<String> {
    let mut texts = texts::visible(bytes);
    let found =
        [PARAMETERS, texts::USER_COMMENT].into_iter().find_map(|k| texts.iter().position(|t| t.keyword == k));
    found.map(|i| texts.swap_remove(i).text)
}

/// The EXIF block for a WebP file.
pub(crate) fn webp_exif(text: &str) -> Result<Vec<u8>> {
    refuse_nul(text)?;
    Ok(exif::with_comment(text))
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
