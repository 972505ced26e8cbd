//! What the loop needs to know of a model.

use sd_core::{Error, Result};
use sd_models::{Family, Info, Noise};

use crate::generate::{Facts, Levels};
use crate::guidance::Prediction;
use crate::schedule::{Ays, SigmaTable};

/// The ends of CosXL's noise levels.
const EDM_LEVELS: [f64; 2] = [0.002, 120.0];

/// The model's name for a prediction.
pub(super) fn to_model(prediction: Prediction) -> Result<sd_models::Prediction> {
    match prediction {
        Prediction::Eps => Ok(sd_models::Prediction::Epsilon),
        Prediction::V | Prediction::EdmV => Ok(sd_models::Prediction::V),
        Prediction::Flow => Ok(sd_models::Prediction::Flow),
        Prediction::X0 => Err(Error::request("prediction: no supported model predicts the picture itself")),
    }
}

/// Noise is assumed to be predicted until [`super::networks::Loaded::settle_prediction`].
/// `chosen` is what the user says that the model predicts.
pub(super) fn facts(info: &Info, chosen: Option<Prediction>) -> Result<Facts> {
    let prediction = match info.prediction {
        _ if chosen == Some(Prediction::EdmV) => Prediction::EdmV,
        Some(sd_models::Prediction::Epsilon) | None => Prediction::Eps,
        Some(sd_models::Prediction::V) => Prediction::V,
        Some(sd_models::Prediction::Flow) => Prediction::Flow,
    };
    let levels = match &info.noise {
        _ if prediction == Prediction::EdmV => {
            let [min, max] = EDM_LEVELS;
            Levels::Table(SigmaTable::continuous(min, max))
        }
        Noise::ScaledLinear => Levels::Table(SigmaTable::scaled_linear()),
        Noise::ZeroTerminalSnr => Levels::Table(SigmaTable::zero_terminal_snr()),
        Noise::AlphasCumprod(alphas) => Levels::Table(SigmaTable::from_alphas_cumprod(alphas)?),
        Noise::Continuous { min, max } => Levels::Table(SigmaTable::continuous(*min, *max)),
        Noise::Flow { shift, time_scale } => Levels::Flow { shift: *shift, time_scale: *time_scale },
    };
    let family = info.family.name();
    if (prediction == Prediction::Flow) != matches!(levels, Levels::Flow { .. }) {
        return Err(Error::request(format!("prediction: {prediction} does not fit the noise levels of {family}")));
    }
    if prediction == Prediction::EdmV
        && !matches!(info.noise, Noise::Continuous { .. })
        && info.family != Family::Sdxl
    {
        let [min, max] = EDM_LEVELS;
        tracing::warn!(
            "prediction: {prediction} is for noise levels from {min} to {max}, which {family} was not trained on"
        );
    }
    let pixels = info.latent.compression.max(1);
    // CosXL's editing model, unlike InstructPix2Pix, reads latents in their usual scale (`is_cosxl_edit` of diffusers).
    let cosxl = matches!(info.noise, Noise::Continuous { .. });
    Ok(Facts {
        family,
        channels: info.latent.channels,
        pixels,
        multiple: (info.size_multiple / pixels).max(1),
        prediction,
        levels,
        guidance: info.guidance,
        joined: info.joined,
        references: info.references,
        blocks: info.blocks,
        ays: ays(info.family),
        picture_scale: if cosxl { 1.0 } else { info.latent.scale },
    })
}

/// The families that "Align Your Steps" (Sabour et al. 2024) was optimised for, and those with their noise levels.
fn ays(family: Family) -> Option<Ays> {
    if matches!(family, Family::Sd1 | Family::Sd2) {
        return Some(Ays::Sd1);
    }
    (family == Family::Sdxl).then_some(Ays::Sdxl)
}
