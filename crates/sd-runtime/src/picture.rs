//! Sizes of latents and pictures, and pixels from values.

use sd_core::{Error, Result, Tensor};

use crate::generate::Facts;
use crate::input::InputImage;
use crate::parameters::Parameters;

/// The size a request wants, and the size the networks compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sizes {
    width: usize,
    height: usize,
    latent: [usize; 4],
    pixels: usize,
    /// Sides of a latent are multiples of this.
    multiple: usize,
}

impl Sizes {
    /// Sides that the networks cannot do are rounded up; the picture is cut out of the middle. Sides of a latent are
    /// multiples of what `facts` say, and of `other`, powers of two.
    pub(crate) fn new(p: &Parameters, facts: &Facts, other: usize) -> Sizes {
        let multiple = facts.multiple.max(other);
        let (width, height) = (p.width as usize, p.height as usize);
        let side = |pixels: usize| pixels.div_ceil(facts.pixels).next_multiple_of(multiple);
        let latent = [1, facts.channels, side(height), side(width)];
        Sizes { width, height, latent, pixels: facts.pixels, multiple }
    }

    /// The shape of the latent.
    pub(crate) fn latent(&self) -> [usize; 4] {
        self.latent
    }

    /// Tokens of 2x2 latent values, which shifts of the noise levels count.
    pub(crate) fn tokens(&self) -> usize {
        let [.., h, w] = self.latent;
        h.div_ceil(2) * w.div_ceil(2)
    }

    /// Width and height of the picture that the networks compute.
    pub(crate) fn computed(&self) -> [usize; 2] {
        let [.., h, w] = self.latent;
        [w * self.pixels, h * self.pixels]
    }

    /// An error if a picture that repeats down or across would be cut.
    pub(crate) fn check_circular(&self, [down, across]: [bool; 2]) -> Result<()> {
        let [w, h] = self.computed();
        let step = self.pixels * self.multiple;
        for (field, wrong, side) in
            [("width", across && w != self.width, self.width), ("height", down && h != self.height, self.height)]
        {
            if wrong {
                let message = format!("{field}: {side} cannot repeat, want a multiple of {step}");
                return Err(Error::request(message));
            }
        }
        Ok(())
    }

    /// Values of the picture as those of the computed one: it lies in the middle, its edges reach outwards.
    pub(crate) fn embed<T: Copy>(&self, values: &[T], channels: usize) -> Vec<T> {
        let [w, h] = self.computed();
        let (left, top) = ((w - self.width) / 2, (h - self.height) / 2);
        let inside = |i: usize, before: usize, side: usize| i.saturating_sub(before).min(side.saturating_sub(1));
        let mut out = Vec::with_capacity(w * h * channels);
        for y in 0..h {
            let row = inside(y, top, self.height) * self.width;
            for x in 0..w {
                let at = (row + inside(x, left, self.width)) * channels;
                out.extend(values.get(at..at + channels).unwrap_or_default());
            }
        }
        out
    }

    /// For each latent position 1 if any of its pixels is set, else 0.
    pub(crate) fn pool(&self, pixels: &[bool]) -> Vec<f32> {
        let [.., h, w] = self.latent;
        let mut out = vec![0.0; h * w];
        for (y, row) in pixels.chunks_exact((w * self.pixels).max(1)).enumerate() {
            for (x, _) in row.iter().enumerate().filter(|(_, set)| **set) {
                if let Some(value) = out.get_mut(y / self.pixels * w + x / self.pixels) {
                    *value = 1.0;
                }
            }
        }
        out
    }

    /// The pixels of each latent position as channels, row by row: `[1, f f, h, w]`, 1 where set.
    pub(crate) fn fold(&self, pixels: &[bool]) -> Result<Tensor> {
        let ([.., h, w], f) = (self.latent, self.pixels);
        let value = |i: usize| {
            let (channel, y, x) = (i / (h * w), i / w % h, i % w);
            let at = (y * f + channel / f) * w * f + x * f + channel % f;
            f32::from(u8::from(pixels.get(at).copied().unwrap_or(false)))
        };
        Tensor::f32(&[1, f * f, h, w], (0..f * f * h * w).map(value).collect())
    }

    /// What the user should know, if the sizes differ.
    pub(crate) fn message(&self) -> Option<String> {
        let [w, h] = self.computed();
        ([w, h] != [self.width, self.height]).then(|| {
            let (width, height) = (self.width, self.height);
            format!("width, height: the network computes {w}x{h}; the picture is its middle {width}x{height}")
        })
    }

    /// The middle of a picture `[1, 3, h, w]` as rows of bytes: (y + 1) / 2 held to 0..1, times 255, rounded to the
    /// nearest, ties to even.
    pub(crate) fn crop_to_rgb(&self, picture: &Tensor) -> Result<Vec<u8>> {
        let [w, h] = self.computed();
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

/// All of a picture `[1, 3, h, w]`.
pub(crate) fn to_image(picture: &Tensor) -> Result<InputImage> {
    let Some([1, 3, h, w]) = picture.shape().array() else {
        return Err(Error::internal(format!("a picture is {}", picture.shape())));
    };
    let planes: Vec<&[f32]> = picture.values().chunks_exact((h * w).max(1)).collect();
    let pixel = |i: usize| planes.iter().map(move |plane| byte(plane.get(i).copied().unwrap_or(0.0)));
    let rgb = (0..h * w).flat_map(pixel).collect();
    Ok(InputImage { width: u32::try_from(w).unwrap_or(0), height: u32::try_from(h).unwrap_or(0), rgb })
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
        let sizes = Sizes { width: 4, height: 6, latent: [1, 4, 2, 2], pixels: 4, multiple: 2 };
        let values: Vec<f32> = (0..3 * 64).map(|i| (i as f32 / 255.0) * 2.0 - 1.0).collect();
        let rgb = sizes.crop_to_rgb(&Tensor::f32(&[1, 3, 8, 8], values).unwrap()).unwrap();
        assert_eq!(rgb.len(), 4 * 6 * 3);
        // First kept pixel: row 1, column 2.
        assert_eq!(rgb[..3], [10, 74, 138]);
        assert_eq!(rgb[69..], [53, 117, 181]);
        assert!(sizes.crop_to_rgb(&Tensor::zeros(&[1, 3, 8, 4]).unwrap()).is_err());
    }

    #[test]
    fn inputs_are_embedded_pooled_and_folded() {
        let sizes = Sizes { width: 2, height: 4, latent: [1, 4, 2, 2], pixels: 2, multiple: 2 };
        let pixels = [false, true, false, false, false, false, true, false];
        let all = sizes.embed(&pixels, 1);
        let rows = [[false, false, true, true], [false; 4], [false; 4], [true, true, false, false]];
        assert_eq!(all, rows.concat());
        assert_eq!(sizes.pool(&all), [0.0, 1.0, 1.0, 0.0]);
        let folded = sizes.fold(&all).unwrap();
        assert_eq!(folded.dims(), [1, 4, 2, 2]);
        // Channels are the places of a 2x2 cell: above left, above right, below left, below right.
        let want = [[0.0, 1.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 1.0, 0.0]];
        assert_eq!(folded.values(), want.concat());
        assert_eq!(
            sizes.embed(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], 3)[..12],
            [1, 2, 3, 1, 2, 3, 4, 5, 6, 4, 5, 6]
        );
    }

    #[test]
    fn what_repeats_is_not_cut() {
        let sizes = Sizes { width: 2, height: 4, latent: [1, 4, 2, 2], pixels: 2, multiple: 2 };
        assert!(sizes.check_circular([true, false]).is_ok());
        let e = sizes.check_circular([false, true]).unwrap_err();
        assert_eq!(e.to_string(), "width: 2 cannot repeat, want a multiple of 4");
    }
}
