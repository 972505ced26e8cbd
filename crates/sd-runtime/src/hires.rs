//! The second, larger pass of a picture.

use sd_core::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::names::named;
use crate::parameters::Parameters;
use crate::resample::Filter;
use crate::upscale::UPSCALE_TILE;

/// How the first pass's picture becomes larger.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum HiresUpscaler {
    /// The latent, bilinear.
    #[default]
    Latent,
    /// The latent, nearest value.
    LatentNearest,
    /// The latent, nearest by centres.
    LatentNearestExact,
    /// The latent, bilinear, antialiased.
    LatentAntialiased,
    /// The latent, bicubic.
    LatentBicubic,
    /// The latent, bicubic, antialiased.
    LatentBicubicAntialiased,
    /// The decoded picture, by Lanczos.
    Lanczos,
    /// The decoded picture, nearest pixel.
    Nearest,
    /// The decoded picture, by the engine's upscaler.
    Model,
}

named!(
    HiresUpscaler,
    "hires.upscaler",
    [
        ("Latent", HiresUpscaler::Latent),
        ("Latent (nearest)", HiresUpscaler::LatentNearest),
        ("Latent (nearest-exact)", HiresUpscaler::LatentNearestExact),
        ("Latent (antialiased)", HiresUpscaler::LatentAntialiased),
        ("Latent (bicubic)", HiresUpscaler::LatentBicubic),
        ("Latent (bicubic antialiased)", HiresUpscaler::LatentBicubicAntialiased),
        ("Lanczos", HiresUpscaler::Lanczos),
        ("Nearest", HiresUpscaler::Nearest),
        ("Model", HiresUpscaler::Model),
    ]
);

impl HiresUpscaler {
    /// How a latent is resized, if it is one that is.
    pub(crate) fn of_latent(self) -> Option<Filter> {
        match self {
            HiresUpscaler::Latent => Some(Filter::Linear),
            HiresUpscaler::LatentNearest => Some(Filter::Nearest),
            HiresUpscaler::LatentNearestExact => Some(Filter::NearestExact),
            HiresUpscaler::LatentAntialiased => Some(Filter::LinearAntialiased),
            HiresUpscaler::LatentBicubic => Some(Filter::Cubic),
            HiresUpscaler::LatentBicubicAntialiased => Some(Filter::CubicAntialiased),
            HiresUpscaler::Lanczos | HiresUpscaler::Nearest | HiresUpscaler::Model => None,
        }
    }
}

/// A second pass: the picture is made larger and painted anew in part, with the same seed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Hires {
    /// How the picture becomes larger.
    pub upscaler: HiresUpscaler,
    /// How many times as many pixels it has along each axis, where no size is given.
    pub scale: f32,
    /// Its width; 0 takes the height where that is given, else the scale.
    pub width: u32,
    /// Its height, likewise.
    pub height: u32,
    /// How many steps run; 0 for as many as in the first pass.
    pub steps: u32,
    /// How much is painted anew, above 0 and at most 1.
    pub strength: f32,
    /// Noise levels that replace the schedule's, falling; the picture gets noise of the first.
    pub sigmas: Option<Vec<f64>>,
    /// Pixels along each side of the pieces of [`HiresUpscaler::Model`].
    pub tile: u32,
}

impl Default for Hires {
    fn default() -> Hires {
        Hires {
            upscaler: HiresUpscaler::default(),
            scale: 2.0,
            width: 0,
            height: 0,
            steps: 0,
            strength: 0.7,
            sigmas: None,
            tile: UPSCALE_TILE,
        }
    }
}

impl Hires {
    /// Width and height of the result of a first pass of `base`, rounded to multiples of `step`.
    pub(crate) fn size(&self, base: [u32; 2], step: u32) -> [u32; 2] {
        let whole =
            |side: f64| ((side / f64::from(step)).round().clamp(1.0, f64::from(u32::MAX / step)) as u32) * step;
        match [self.width, self.height] {
            [0, 0] => base.map(|side| whole(f64::from(side) * f64::from(self.scale))),
            [0, side] | [side, 0] => [whole(f64::from(side)); 2],
            both => both.map(|side| whole(f64::from(side))),
        }
    }

    /// The parameters of the second pass of what `first` describes. Its schedule has so many steps that as many as are
    /// wanted remain of it (`steps / strength`, rounded down).
    pub(crate) fn second(&self, first: &Parameters, [width, height]: [u32; 2]) -> Parameters {
        let wanted = if self.steps > 0 { self.steps } else { first.steps };
        let steps = (f64::from(wanted) / f64::from(self.strength)).floor().max(1.0) as u32;
        Parameters {
            width,
            height,
            steps,
            strength: Some(self.strength),
            // As wide for the picture as in the first pass.
            mask_blur: (f64::from(first.mask_blur) * f64::from(width) / f64::from(first.width.max(1))).round()
                as u32,
            sigmas: self.sigmas.clone(),
            ..first.clone()
        }
    }

    /// An error that names the first wrong field.
    pub(crate) fn check(&self) -> Result<()> {
        let wrong = |field: &str, want: &str, got: &dyn std::fmt::Display| {
            Err(Error::request(format!("hires.{field}: want {want}, got {got}")))
        };
        if !(self.strength > 0.0 && self.strength <= 1.0) {
            return wrong("strength", "a number above 0 and at most 1", &self.strength);
        }
        if !(self.scale > 0.0 && self.scale <= 16.0) {
            return wrong("scale", "a number above 0 and at most 16", &self.scale);
        }
        if self.tile == 0 {
            return wrong("tile", "1 or more", &0);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        let size = |scale, width, height| Hires { scale, width, height, ..Hires::default() }.size([64, 40], 8);
        assert_eq!(size(2.0, 0, 0), [128, 80]);
        assert_eq!(size(1.5, 0, 0), [96, 64]);
        assert_eq!(size(2.0, 100, 0), [104, 104]);
        assert_eq!(size(2.0, 0, 96), [96, 96]);
        assert_eq!(size(2.0, 160, 96), [160, 96]);
    }
}
