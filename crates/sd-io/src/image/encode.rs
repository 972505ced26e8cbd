//! Pictures out.

use std::borrow::Cow;
use std::path::Path;

use image::codecs::jpeg::JpegEncoder;
use image::codecs::png::{CompressionType, FilterType, PngEncoder};
use image::codecs::webp::WebPEncoder;
use image::{ExtendedColorType, ImageEncoder};
use sd_core::{Error, Result};

use super::{Image, parameters};
use crate::atomic::write_file;

/// The JPEG quality that 0 stands for.
const DEFAULT_QUALITY: u8 = 90;

impl Image {
    /// The picture as a PNG file, with `text` under the keyword `parameters`.
    ///
    /// # Errors
    /// The text holds a NUL.
    pub fn to_png(&self, text: Option<&str>) -> Result<Vec<u8>> {
        let (pixels, kind) = self.pixels();
        let mut out = Vec::new();
        PngEncoder::new_with_quality(&mut out, CompressionType::Default, FilterType::Adaptive)
            .write_image(&pixels, self.width, self.height, kind)
            .map_err(|e| self.failed("PNG", &e))?;
        match text {
            Some(text) => parameters::insert_png(&out, text),
            None => Ok(out),
        }
    }

    /// The picture as a JPEG file, which has no alpha, `quality` from 1 to 100 (0 means 90, more counts as 100), with `text` as an EXIF
    /// user comment and as a comment segment that starts with `parameters`.
    ///
    /// # Errors
    /// The text holds a NUL, or a side is longer than 65535.
    pub fn to_jpeg(&self, quality: u8, text: Option<&str>) -> Result<Vec<u8>> {
        let quality = if quality == 0 { DEFAULT_QUALITY } else { quality.min(100) };
        let mut out = Vec::new();
        JpegEncoder::new_with_quality(&mut out, quality)
            .write_image(&self.rgb, self.width, self.height, ExtendedColorType::Rgb8)
            .map_err(|e| self.failed("JPEG", &e))?;
        match text {
            Some(text) => parameters::insert_jpeg(&out, text),
            None => Ok(out),
        }
    }

    /// The picture as a WebP file, with `text` as an EXIF user comment. It is always lossless: the only encoders with
    /// loss are bindings to C, and those who want a small file have JPEG.
    ///
    /// # Errors
    /// The text holds a NUL, or a side is longer than 16384.
    pub fn to_webp(&self, text: Option<&str>) -> Result<Vec<u8>> {
        let (pixels, kind) = self.pixels();
        let mut out = Vec::new();
        let mut encoder = WebPEncoder::new_lossless(&mut out);
        if let Some(text) = text {
            let set = encoder.set_exif_metadata(parameters::webp_exif(text)?);
            set.map_err(|e| Error::internal(format!("EXIF in WebP: {e}")))?;
        }
        encoder.write_image(&pixels, self.width, self.height, kind).map_err(|e| self.failed("WebP", &e))?;
        Ok(out)
    }

    /// Writes the picture in the format that the extension of `path` names: `.png`, `.jpg`, `.jpeg`, `.jpe` or `.webp`,
    /// in any case. The file appears under its name only when it is complete; missing folders are made.
    ///
    /// # Errors
    /// Another extension, or the disk.
    pub fn save(&self, path: impl AsRef<Path>, quality: u8, text: Option<&str>) -> Result<()> {
        let path = path.as_ref();
        let extension = path.extension().map(|e| e.to_string_lossy().to_ascii_lowercase());
        let bytes = match extension.as_deref() {
            Some("png") => self.to_png(text)?,
            Some("jpg" | "jpeg" | "jpe") => self.to_jpeg(quality, text)?,
            Some("webp") => self.to_webp(text)?,
            _ => {
                let what = format!("{}: pictures are written as .png, .jpg, .jpeg, .jpe or .webp", path.display());
                return Err(Error::unsupported(what));
            }
        };
        write_file(path, &bytes)
    }

    /// The bytes of all channels, pixel by pixel.
    fn pixels(&self) -> (Cow<'_, [u8]>, ExtendedColorType) {
        match &self.alpha {
            None => (Cow::Borrowed(&self.rgb), ExtendedColorType::Rgb8),
            Some(alpha) => {
                let pixel = |(rgb, a): (&[u8], &u8)| rgb.iter().copied().chain([*a]).collect::<Vec<u8>>();
                let all = self.rgb.chunks_exact(3).zip(alpha).flat_map(pixel).collect();
                (Cow::Owned(all), ExtendedColorType::Rgba8)
            }
        }
    }

    fn failed(&self, format: &str, e: &image::ImageError) -> Error {
        Error::unsupported(format!("a {}x{} picture as {format}: {e}", self.width, self.height))
    }
}
