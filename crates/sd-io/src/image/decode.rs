//! Pictures in. What a file is, is read from its content; sizes are limited before anything is allocated.

use std::io::Cursor;
use std::path::Path;

use image::metadata::Orientation;
use image::{DynamicImage, ImageDecoder, ImageFormat, ImageReader, Limits};
use sd_core::{Error, Result};

use super::Image;
use super::stealth::Rgba;
use crate::file::{Access, SourceFile};

/// The longest picture file that is read.
const MAX_FILE: u64 = 512 << 20;

/// The most pixels, 16384 by 8192. A file of some kilobytes can claim any number.
const MAX_PIXELS: u64 = 1 << 27;

/// The most memory a decoder may take, enough for [`MAX_PIXELS`] of 16-bit RGBA.
const MAX_MEMORY: u64 = MAX_PIXELS * 8;

impl Image {
    /// Reads a PNG, JPEG, WebP, BMP, GIF, TGA or PNM file. The first frame of an animation counts, EXIF orientation is
    /// applied, grey becomes RGB, 16 bits become 8. [`Image::rgb`] has the colours as they are stored, whatever alpha says.
    ///
    /// # Errors
    /// The file cannot be read, is of another format, malformed, or has more than 2^27 pixels.
    pub fn open(path: impl AsRef<Path>) -> Result<Image> {
        let path = path.as_ref();
        let file = SourceFile::open(path, Access::Read)?;
        if file.len() > MAX_FILE {
            let what = format!("a picture of {} bytes, at most {MAX_FILE} are read", file.len());
            return Err(Error::bad_file(path, what));
        }
        decode(&file.prefix(file.len())?, MAX_PIXELS).map_err(|what| Error::bad_file(path, what))
    }

    /// Reads a picture from memory as [`Image::open`] does.
    ///
    /// # Errors
    /// As [`Image::open`].
    pub fn decode(bytes: &[u8]) -> Result<Image> {
        Image::decode_within(bytes, MAX_PIXELS)
    }

    /// [`Image::decode`] of at most so many pixels: the header of the file is looked at before anything is decoded.
    ///
    /// # Errors
    /// As [`Image::open`]; more pixels.
    pub fn decode_within(bytes: &[u8], pixels: u64) -> Result<Image> {
        decode(bytes, pixels.min(MAX_PIXELS)).map_err(|what| Error::request(format!("picture: {what}")))
    }
}

fn decode(bytes: &[u8], most: u64) -> Result<Image, String> {
    let (mut picture, orientation) = picture(bytes, most)?;
    picture.apply_orientation(orientation);
    let alpha = picture.color().has_alpha().then(|| alpha(&picture)).flatten();
    let rgb = picture.into_rgb8();
    let (width, height) = rgb.dimensions();
    Ok(Image { width, height, rgb: rgb.into_raw(), alpha })
}

/// How opaque each pixel is, if any is not wholly.
fn alpha(picture: &DynamicImage) -> Option<Vec<u8>> {
    let alpha: Vec<u8> = picture.to_rgba8().pixels().map(|pixel| pixel.0[3]).collect();
    alpha.iter().any(|a| *a != u8::MAX).then_some(alpha)
}

/// The pixels as they are stored, with alpha; `None` for a broken picture.
pub(super) fn rgba(bytes: &[u8]) -> Option<Rgba> {
    let rgba = picture(bytes, MAX_PIXELS).ok()?.0.into_rgba8();
    let (width, height) = rgba.dimensions();
    Some(Rgba { width: width as usize, height: height as usize, bytes: rgba.into_raw() })
}

/// The pixels as they are stored, and how they are to be turned; an error if there are more than `most`.
fn picture(bytes: &[u8], most: u64) -> Result<(DynamicImage, Orientation), String> {
    let format = format(bytes)?;
    let failed = |e: image::ImageError| format!("{format:?}: {e}");
    let mut limits = Limits::no_limits();
    limits.max_alloc = Some(MAX_MEMORY);

    let mut reader = ImageReader::with_format(Cursor::new(bytes), format);
    reader.limits(limits);
    let mut decoder = reader.into_decoder().map_err(failed)?;
    let (width, height) = decoder.dimensions();
    let pixels = u64::from(width) * u64::from(height);
    if pixels == 0 || pixels > most || decoder.total_bytes() > MAX_MEMORY {
        return Err(format!("{width}x{height} pixels, between 1 and {most} are read"));
    }
    if let Some(most) = pixels_per_byte(format)
        && pixels / most > bytes.len() as u64
    {
        let len = bytes.len();
        return Err(format!(
            "{format:?}: {len} bytes cannot hold {width}x{height} pixels; the file is cut off or damaged"
        ));
    }
    if format == ImageFormat::Jpeg && !has_end(bytes) {
        return Err(format!("{format:?}: the end is missing; the file is cut off"));
    }
    // EXIF data that make no sense leave the picture as it is stored.
    let orientation = decoder.orientation().map_err(failed)?;
    Ok((DynamicImage::from_decoder(decoder).map_err(failed)?, orientation))
}

/// The most pixels that a byte of such a file can stand for, rounded up. Decoders fill in what a file lacks, so that a
/// few bytes would cost the time and memory of the picture they claim to be.
fn pixels_per_byte(format: ImageFormat) -> Option<u64> {
    match format {
        // At least one bit for each block of 8 by 8.
        ImageFormat::Jpeg => Some(8 * 64),
        // Deflate packs 1032 bytes into one, each of 8 pixels.
        ImageFormat::Png => Some(8 * 1032),
        // A code of 12 bits stands for at most 4096 pixels.
        ImageFormat::Gif => Some(4096),
        // A run of 128 pixels takes at least two bytes.
        ImageFormat::Tga => Some(64),
        // One bit each.
        ImageFormat::Pnm => Some(8),
        // Runs that skip pixels (BMP) and codes that take no bits (WebP) have no such limit.
        _ => None,
    }
}

/// Whether a JPEG file has the mark of its end after the first scan. The decoder fills up what is cut off with grey. Within
/// compressed data 0xff is never followed by this mark's code (ITU-T T.81, section B.1.1.5).
fn has_end(jpeg: &[u8]) -> bool {
    let mut rest = jpeg.get(2..).unwrap_or_default();
    while let [0xff, marker, tail @ ..] = rest {
        rest = match (marker, tail) {
            (0xff, _) => rest.get(1..).unwrap_or_default(), // padding
            (0xda, _) => break,
            (0x01 | 0xd0..=0xd8, _) => tail,
            (_, [a, b, ..]) => tail.get(usize::from(u16::from_be_bytes([*a, *b]))..).unwrap_or_default(),
            _ => &[],
        };
    }
    rest.windows(2).any(|w| w == [0xff, 0xd9])
}

fn format(bytes: &[u8]) -> Result<ImageFormat, String> {
    use ImageFormat::{Bmp, Gif, Jpeg, Png, Pnm, Tga, WebP};
    const EXPECTED: &str = "expected PNG, JPEG, WebP, BMP, GIF, TGA or PNM";
    if bytes.is_empty() {
        return Err("the picture is empty".into());
    }
    match image::guess_format(bytes) {
        Ok(format @ (Png | Jpeg | WebP | Bmp | Gif | Pnm)) => Ok(format),
        Ok(other) => Err(format!("{other:?} pictures are not supported: {EXPECTED}")),
        Err(_) if looks_like_tga(bytes) => Ok(Tga),
        Err(_) => Err(format!("not a picture: {EXPECTED}")),
    }
}

/// TGA has no signature at its start: the fields of the header must be among the few values they can have.
fn looks_like_tga(bytes: &[u8]) -> bool {
    match *bytes {
        [_, map @ 0..=1, kind, _, _, _, _, _, _, _, _, _, w0, w1, h0, h1, depth, ..] => {
            let mapped = matches!(kind, 1 | 9);
            (mapped || matches!(kind, 2 | 3 | 10 | 11))
                && mapped == (map == 1)
                && [w0, w1] != [0, 0]
                && [h0, h1] != [0, 0]
                && matches!(depth, 8 | 15 | 16 | 24 | 32)
        }
        _ => false,
    }
}
