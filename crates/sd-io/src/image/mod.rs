//! Pictures: any common format in, PNG, JPEG and WebP with generation parameters out; and what other programs have
//! written into theirs.

mod container;
mod decode;
mod encode;
mod exif;
mod generation;
mod parameters;
mod stealth;
mod texts;

pub use container::{Container, Entry, EntryType};
pub use generation::{Generation, Generator, generation, read_generation};
pub use parameters::read_parameters;
pub use texts::{PictureText, read_texts};

use sd_core::{Error, Result};

/// An RGB picture, 8 bits per channel, rows from the top, pixels from the left, three bytes each.
#[derive(Clone, PartialEq, Eq)]
pub struct Image {
    width: u32,
    height: u32,
    rgb: Vec<u8>,
    /// A byte for each pixel, if any is not opaque.
    alpha: Option<Vec<u8>>,
}

impl Image {
    /// A picture from its bytes, `3 * width * height` of them.
    ///
    /// # Errors
    /// Another number of bytes, or a side of 0.
    pub fn new(width: u32, height: u32, rgb: Vec<u8>) -> Result<Image> {
        let want = u64::from(width) * u64::from(height) * 3;
        if want == 0 || rgb.len() as u64 != want {
            let got = rgb.len();
            return Err(Error::shape(format!("a {width}x{height} picture takes {want} bytes, got {got}")));
        }
        Ok(Image { width, height, rgb, alpha: None })
    }

    /// The picture with an alpha channel, a byte for each pixel.
    ///
    /// # Errors
    /// Another number of bytes.
    pub fn with_alpha(mut self, alpha: Vec<u8>) -> Result<Image> {
        if alpha.len() * 3 != self.rgb.len() {
            let (want, got) = (self.rgb.len() / 3, alpha.len());
            return Err(Error::shape(format!("the alpha of a {self:?} takes {want} bytes, got {got}")));
        }
        self.alpha = Some(alpha);
        Ok(self)
    }

    /// The width in pixels.
    pub fn width(&self) -> u32 {
        self.width
    }

    /// The height in pixels.
    pub fn height(&self) -> u32 {
        self.height
    }

    /// The bytes.
    pub fn rgb(&self) -> &[u8] {
        &self.rgb
    }

    /// How opaque each pixel is, a byte each; `None` if all are.
    pub fn alpha(&self) -> Option<&[u8]> {
        self.alpha.as_deref()
    }

    /// The red, green and blue of a pixel; `None` outside.
    pub fn pixel(&self, x: u32, y: u32) -> Option<[u8; 3]> {
        if x >= self.width || y >= self.height {
            return None;
        }
        let at = (y as usize * self.width as usize + x as usize) * 3;
        self.rgb.get(at..at + 3)?.try_into().ok()
    }
}

impl std::fmt::Debug for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}x{} picture", self.width, self.height)
    }
}
