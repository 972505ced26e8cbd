//! Pictures of a latent while it is denoised.

use sd_core::{Error, Result, Tensor};
use serde::{Deserialize, Serialize};

use crate::input::InputImage;
use crate::names::named;

/// What a preview is made by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PreviewMode {
    /// A mixture of the latent's channels, a pixel for each latent position; costs nothing.
    Proj,
    /// The tiny autoencoder.
    Tae,
    /// The autoencoder.
    Vae,
}

named!(PreviewMode, "preview", [("proj", PreviewMode::Proj), ("tae", PreviewMode::Tae), ("vae", PreviewMode::Vae)]);

/// Which previews a request wants.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Preview {
    /// What makes them.
    pub mode: PreviewMode,
    /// `n` above 0 for every `n`th step, `-n` for step `n` alone, 0 for the end of the first pass.
    pub interval: i32,
    /// Whether they show the noisy latent instead of the estimate of the clean one.
    pub noisy: bool,
}

impl Preview {
    /// Whether one is due after a step, counted from 1.
    pub(crate) fn due(self, step: usize) -> bool {
        let every = usize::try_from(self.interval.unsigned_abs()).unwrap_or(usize::MAX);
        match self.interval {
            0 => false,
            n if n > 0 => step.is_multiple_of(every),
            _ => step == every,
        }
    }
}

/// How channels of a latent mix: a row of red, green and blue for each, and what is added.
struct Factors {
    rows: &'static [[f32; 3]],
    bias: [f32; 3],
}

// The factors that ComfyUI publishes for each kind of latent, which were fitted to pictures.
const SD1: Factors = Factors {
    rows: &[
        [0.3512, 0.2297, 0.3227],
        [0.3250, 0.4974, 0.2350],
        [-0.2829, 0.1762, 0.2721],
        [-0.2120, -0.2616, -0.7177],
    ],
    bias: [0.0; 3],
};
const SDXL: Factors = Factors {
    rows: &[
        [0.3651, 0.4232, 0.4341],
        [-0.2533, -0.0042, 0.1068],
        [0.1076, 0.1111, -0.0362],
        [-0.3165, -0.2492, -0.2188],
    ],
    bias: [0.1084, -0.0175, -0.0011],
};
const SD3: Factors = Factors {
    rows: &[
        [-0.0922, -0.0175, 0.0749],
        [0.0311, 0.0633, 0.0954],
        [0.1994, 0.0927, 0.0458],
        [0.0856, 0.0339, 0.0902],
        [0.0587, 0.0272, -0.0496],
        [-0.0006, 0.1104, 0.0309],
        [0.0978, 0.0306, 0.0427],
        [-0.0042, 0.1038, 0.1358],
        [-0.0194, 0.0020, 0.0669],
        [-0.0488, 0.0130, -0.0268],
        [0.0922, 0.0988, 0.0951],
        [-0.0278, 0.0524, -0.0542],
        [0.0332, 0.0456, 0.0895],
        [-0.0069, -0.0030, -0.0810],
        [-0.0596, -0.0465, -0.0293],
        [-0.1448, -0.1463, -0.1189],
    ],
    bias: [0.2394, 0.2135, 0.1925],
};
const FLUX: Factors = Factors {
    rows: &[
        [-0.0346, 0.0244, 0.0681],
        [0.0034, 0.0210, 0.0687],
        [0.0275, -0.0668, -0.0433],
        [-0.0174, 0.0160, 0.0617],
        [0.0859, 0.0721, 0.0329],
        [0.0004, 0.0383, 0.0115],
        [0.0405, 0.0861, 0.0915],
        [-0.0236, -0.0185, -0.0259],
        [-0.0245, 0.0250, 0.1180],
        [0.1008, 0.0755, -0.0421],
        [-0.0515, 0.0201, 0.0011],
        [0.0428, -0.0012, -0.0036],
        [0.0817, 0.0765, 0.0749],
        [-0.1264, -0.0522, -0.1103],
        [-0.0280, -0.0881, -0.0499],
        [-0.1262, -0.0982, -0.0778],
    ],
    bias: [-0.0329, -0.0718, -0.0851],
};

/// A pixel for each position of `latent [1, c, h, w]`. Latents of 4 channels are told apart by the scale of their
/// autoencoder, as those of 16 are.
pub(crate) fn projected(latent: &Tensor, scale: f32) -> Result<InputImage> {
    let [_, c, h, w] =
        latent.shape().array().ok_or_else(|| Error::internal(format!("a latent is {}", latent.shape())))?;
    let near = |other: f32| (scale - other).abs() < 0.01;
    let factors = match c {
        4 if near(0.13025) => SDXL,
        4 => SD1,
        16 if near(1.5305) => SD3,
        16 => FLUX,
        _ => {
            return Err(
                Error::request(format!("preview: proj knows no latents of {c} channels")).hint("use tae or vae")
            );
        }
    };
    let values = latent.values();
    let pixel = |i: usize| {
        let mut rgb = factors.bias;
        for (row, plane) in factors.rows.iter().zip(values.chunks_exact((h * w).max(1))) {
            let value = plane.get(i).copied().unwrap_or(0.0);
            rgb.iter_mut().zip(row).for_each(|(sum, factor)| *sum += value * factor);
        }
        rgb.map(|v| ((v / 2.0 + 0.5).clamp(0.0, 1.0) * 255.0).round_ties_even() as u8)
    };
    let (width, height) = (u32::try_from(w).unwrap_or(0), u32::try_from(h).unwrap_or(0));
    Ok(InputImage { width, height, rgb: (0..h * w).flat_map(pixel).collect() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn when_previews_are_due() {
        let due = |interval| -> Vec<usize> {
            let preview = Preview { mode: PreviewMode::Proj, interval, noisy: false };
            (1..=7).filter(|step| preview.due(*step)).collect()
        };
        assert_eq!(due(1), [1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(due(3), [3, 6]);
        assert_eq!(due(-3), [3]);
        assert_eq!(due(0), [0usize; 0]);
        assert_eq!(due(i32::MIN), [0usize; 0]);
    }

    #[test]
    fn channels_mix_to_colours() {
        let latent = |values: [f32; 8]| Tensor::f32(&[1, 4, 1, 2], values.to_vec()).unwrap();
        // One in the first channel of the second position: (0.3512, 0.2297, 0.3227) on a scale from -1 to 1.
        let image = projected(&latent([0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]), 0.18215).unwrap();
        assert_eq!((image.width, image.height), (2, 1));
        assert_eq!(image.rgb, [128, 128, 128, 172, 157, 169]);
        let image = projected(&latent([0.0; 8]), 0.13025).unwrap();
        assert_eq!(image.rgb[..3], [141, 125, 127]);
        let e = projected(&Tensor::zeros(&[1, 5, 1, 1]).unwrap(), 1.0).unwrap_err();
        assert!(e.is_request() && e.to_string().contains("5 channels"), "{e}");
    }
}
