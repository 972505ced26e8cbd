//! Texts in the lowest bits of the pixels, as some web UIs hide them so that they survive programs which drop chunks.
//!
//! The bits run down the columns from the left, those of alpha alone or of red, green and blue in turn: a signature of
//! 15 characters, the length in bits as a 32-bit number, the text in UTF-8, compressed with gzip if the signature says
//! so. Source: the `stealth_pnginfo` extension of the A1111 web UI.

use std::io::Read;

use flate2::read::GzDecoder;

use super::decode;
use super::texts::MAX_TEXT;

/// The signatures: where the bits are, and whether the text is compressed.
const SIGNATURES: &[(&[u8], bool, bool)] = &[
    (b"stealth_pnginfo", true, false),
    (b"stealth_pngcomp", true, true),
    (b"stealth_rgbinfo", false, false),
    (b"stealth_rgbcomp", false, true),
];

/// The hidden text of a PNG file, if there is one.
pub(super) fn read(png: &[u8]) -> Option<String> {
    let picture = decode::rgba(png)?;
    [true, false].into_iter().find_map(|alpha| text(&mut Bits { picture: &picture, alpha, at: 0 }))
}

/// Rows of RGBA, 8 bits each.
pub(super) struct Rgba {
    pub(super) width: usize,
    pub(super) height: usize,
    pub(super) bytes: Vec<u8>,
}

struct Bits<'a> {
    picture: &'a Rgba,
    alpha: bool,
    at: usize,
}

impl Bits<'_> {
    fn bit(&mut self) -> Option<u8> {
        let (pixel, channel) = if self.alpha { (self.at, 3) } else { (self.at / 3, self.at % 3) };
        self.at += 1;
        let (x, y) = (pixel / self.picture.height, pixel % self.picture.height);
        if x >= self.picture.width {
            return None;
        }
        self.picture.bytes.get((y * self.picture.width + x) * 4 + channel).map(|b| b & 1)
    }

    fn bytes(&mut self, n: usize) -> Option<Vec<u8>> {
        let mut out = Vec::new();
        for _ in 0..n {
            let mut byte = 0;
            for _ in 0..8 {
                byte = byte << 1 | self.bit()?;
            }
            out.push(byte);
        }
        Some(out)
    }
}

fn text(bits: &mut Bits<'_>) -> Option<String> {
    let signature = bits.bytes(15)?;
    let (_, _, compressed) = SIGNATURES.iter().find(|(s, alpha, _)| *s == signature && *alpha == bits.alpha)?;
    let len = u32::from_be_bytes(bits.bytes(4)?.try_into().ok()?);
    let data = bits.bytes(usize::try_from(len / 8).ok()?)?;
    let data = if *compressed {
        let mut out = Vec::new();
        GzDecoder::new(&data[..]).take(MAX_TEXT).read_to_end(&mut out).ok()?;
        out
    } else {
        data
    };
    String::from_utf8(data).ok()
}
