//! Sizes of latents and pictures, and pixels from values.

use sd_core::{Error, Result, Tensor};

use crate::parameters::Parameters;
use crate::txt2img::Latents;

/// The size a request wants, and the size the networks compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sizes {
    width: usize,
    height: usize,
    latent: [usize; 4],
    pixels: usize,
}

impl Sizes {
    /// Sides that the networks cannot do are rounded up; the picture is cut out of the middle.
    pub(crate) fn new(p: &Parameters, latents: &Latents) -> Sizes {
        let (width, height) = (p.width as usize, p.height as usize);
        let side = |pixels: usize| pixels.div_ceil(latents.pixels).next_multiple_of(latents.multiple);
        let latent = [1, latents.channels, side(height), side(width)];
        Sizes { width, height, latent, pixels: latents.pixels }
    }

    /// The shape of the latent.
    pub(crate) fn latent(&self) -> [usize; 4] {
        self.latent
    }

    fn computed(&self) -> (usize, usize) {
        let [.., h, w] = self.latent;
        (w * self.pixels, h * self.pixels)
    }

    /// What the user should know, if the sizes differ.
    pub(crate) fn message(&self) -> Option<String> {
        let (w, h) = self.computed();
        ((w, h) != (self.width, self.height)).then(|| {
            let (width, height) = (self.width, self.height);
            format!("width, height: the network computes {w}x{h}; the picture is its middle {width}x{height}")
        })
    }

    /// The middle of a picture `[1, 3, h, w]` as rows of bytes: (y + 1) / 2 held to 0..1, times 255, rounded to the
    /// nearest, ties to even.
    pub(crate) fn crop_to_rgb(&self, picture: &Tensor) -> Result<Vec<u8>> {
        let (w, h) = self.computed();
        if picture.dims() != [1, 3, h, w] {
            return Err(Error::internal(format!("the picture is {}, want [1, 3, {h}, {w}]", picture.shape())));
        }
        let (left, top) = ((w - self.width) / 2, (h - self.height) / 2);
        let planes: Vec<&[f32]> = picture.values().chunks_exact(w * h).collect();
        let mut rgb = Vec::with_capacity(self.width * self.height * 3);
        for row in top..top + self.height {
            for at in row * w + left..row * w + left + self.width {
                rgb.extend(planes.iter().map(|plane| byte(plane.get(at).copied().unwrap_or(0.0))));
            }
        }
        Ok(rgb)
    }
}

fn byte(y: f32) -> u8 {
    ((y / 2.0 + 0.5).clamp(0.0, 1.0) * 255.0).round_ties_even() as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_round_to_the_nearest() {
        for (y, b) in [(-2.0, 0), (-1.0, 0), (1.0, 255), (7.0, 255), (0.0, 128), (1.0 / 255.0, 128), (-0.2, 102)] {
            assert_eq!(byte(y), b, "{y}");
        }
    }

    #[test]
    fn the_middle_is_kept() {
        // Four pixels to a latent position, so 2x2 positions of which the middle 4x6 pixels of 8x8 are kept.
        let sizes = Sizes { width: 4, height: 6, latent: [1, 4, 2, 2], pixels: 4 };
        let values: Vec<f32> = (0..3 * 64).map(|i| (i as f32 / 255.0) * 2.0 - 1.0).collect();
        let rgb = sizes.crop_to_rgb(&Tensor::f32(&[1, 3, 8, 8], values).unwrap()).unwrap();
        assert_eq!(rgb.len(), 4 * 6 * 3);
        // First kept pixel: row 1, column 2.
        assert_eq!(rgb[..3], [10, 74, 138]);
        assert_eq!(rgb[69..], [53, 117, 181]);
        assert!(sizes.crop_to_rgb(&Tensor::zeros(&[1, 3, 8, 4]).unwrap()).is_err());
    }
}
