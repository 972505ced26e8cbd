//! What a caller asks for, how it is checked, and what comes back.

use sd_core::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::parameters::Parameters;
use crate::rng::RngKind;
use crate::sampler::SamplerKind;
use crate::schedule::SchedulerKind;

/// The longest side a picture can have, in pixels.
pub const MAX_SIDE: u32 = 16_384;
/// The most pixels a picture can have; 3840x2160 is below it.
pub const MAX_PIXELS: u64 = 1 << 23;
/// The most steps a request can ask for.
pub const MAX_STEPS: u32 = 10_000;
/// The most images of one request.
pub const MAX_BATCH: u32 = 1_024;
/// The longest prompt in bytes. Reading one takes time by the square of its open brackets.
const MAX_PROMPT: usize = 1 << 16;

/// A text-to-image request. What is `None` takes the model's default.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ImageRequest {
    /// What the picture should show, with A1111 weights and `BREAK`.
    pub prompt: String,
    /// What it should not show.
    pub negative_prompt: String,
    /// Pixels across, a multiple of 8.
    pub width: Option<u32>,
    /// Pixels down, a multiple of 8.
    pub height: Option<u32>,
    /// Sampler steps.
    pub steps: Option<u32>,
    /// Classifier-free guidance scale; 1 turns guidance and the negative prompt off.
    pub cfg_scale: Option<f32>,
    /// How to step.
    pub sampler: Option<SamplerKind>,
    /// Which noise levels to visit.
    pub scheduler: Option<SchedulerKind>,
    /// Noise scale of ancestral samplers.
    pub eta: Option<f32>,
    /// Seed of the first image; image `i` has `seed + i`. Negative draws one. Default 42.
    pub seed: Option<i64>,
    /// Number of images. Default 1.
    pub batch_count: Option<u32>,
    /// 1 uses the text encoder's last layer, 2 the one before, and so on; 0 or less is the model's default.
    pub clip_skip: Option<i32>,
    /// Generator of the initial noise.
    pub rng: Option<RngKind>,
    /// Generator of the sampler's noise. Without it, or when it is the same kind, the stream of the initial noise
    /// goes on.
    pub sampler_rng: Option<RngKind>,
}

/// What a model suggests where a request is silent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Defaults {
    /// Pixels across.
    pub width: u32,
    /// Pixels down.
    pub height: u32,
    /// Sampler steps.
    pub steps: u32,
    /// Guidance scale.
    pub cfg_scale: f32,
    /// How to step.
    pub sampler: SamplerKind,
    /// Which noise levels to visit.
    pub scheduler: SchedulerKind,
    /// Text encoder layer, counted from the last as 1.
    pub clip_skip: u32,
}

/// A finished picture.
#[derive(Debug, Clone, PartialEq)]
pub struct GeneratedImage {
    /// Pixels across.
    pub width: u32,
    /// Pixels down.
    pub height: u32,
    /// Rows from the top, three bytes a pixel.
    pub rgb: Vec<u8>,
    /// Everything that made this picture, defaults filled in.
    pub parameters: Parameters,
}

/// A checked request with every default filled in.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Resolved {
    /// Parameters of the first image.
    pub(crate) first: Parameters,
    pub(crate) batch_count: u32,
    pub(crate) warnings: Vec<String>,
}

impl ImageRequest {
    /// Checks every field and fills in the defaults. `random_seed` is what a negative seed becomes.
    pub(crate) fn resolve(&self, model: &str, defaults: &Defaults, random_seed: i64) -> Result<Resolved> {
        let mut warnings = Vec::new();
        for (field, text) in [("prompt", &self.prompt), ("negative_prompt", &self.negative_prompt)] {
            if text.len() > MAX_PROMPT {
                let len = text.len();
                return Err(Error::request(format!("{field}: want at most {MAX_PROMPT} bytes, got {len}")));
            }
        }
        let width = side("width", self.width.unwrap_or(defaults.width))?;
        let height = side("height", self.height.unwrap_or(defaults.height))?;
        if u64::from(width) * u64::from(height) > MAX_PIXELS {
            return Err(Error::request(format!(
                "width, height: {width}x{height} has more than {MAX_PIXELS} pixels, the most a picture can have"
            )));
        }
        let steps = within("steps", self.steps.unwrap_or(defaults.steps), 1, MAX_STEPS)?;
        let batch_count = within("batch_count", self.batch_count.unwrap_or(1), 1, MAX_BATCH)?;
        let cfg_scale = not_negative("cfg_scale", self.cfg_scale.unwrap_or(defaults.cfg_scale))?;
        if cfg_scale < 1.0 {
            warnings.push(format!("cfg_scale: {cfg_scale} is below 1 and pulls towards the negative prompt"));
        }
        let sampler = self.sampler.unwrap_or(defaults.sampler);
        let eta = match self.eta {
            None => sampler.default_eta(),
            Some(eta) => {
                let eta = not_negative("eta", eta)?;
                if !sampler.uses_eta() && eta != 0.0 {
                    warnings.push(format!("eta: {sampler} adds no noise, so it has no effect"));
                }
                eta
            }
        };
        let seed = match self.seed {
            Some(seed) if seed < 0 => random_seed,
            Some(seed) => seed,
            None => 42,
        };
        if seed.checked_add(i64::from(batch_count) - 1).is_none() {
            return Err(Error::request(format!(
                "seed: {seed} leaves no room for {batch_count} images, the last has seed + {}",
                batch_count - 1
            )));
        }
        let clip_skip = match self.clip_skip {
            Some(k) => u32::try_from(k).ok().filter(|k| *k > 0).unwrap_or(defaults.clip_skip),
            None => defaults.clip_skip,
        };
        let rng = self.rng.unwrap_or_default();
        let first = Parameters {
            prompt: self.prompt.clone(),
            negative_prompt: self.negative_prompt.clone(),
            width,
            height,
            steps,
            cfg_scale,
            sampler,
            scheduler: self.scheduler.unwrap_or(defaults.scheduler),
            eta,
            seed,
            clip_skip,
            rng,
            sampler_rng: self.sampler_rng.filter(|kind| *kind != rng),
            model: model.to_owned(),
        };
        Ok(Resolved { first, batch_count, warnings })
    }
}

fn side(field: &str, pixels: u32) -> Result<u32> {
    if pixels == 0 || !pixels.is_multiple_of(8) || pixels > MAX_SIDE {
        return Err(Error::request(format!("{field}: want a multiple of 8 from 8 to {MAX_SIDE}, got {pixels}")));
    }
    Ok(pixels)
}

fn within(field: &str, value: u32, least: u32, most: u32) -> Result<u32> {
    if value < least || value > most {
        return Err(Error::request(format!("{field}: want {least} to {most}, got {value}")));
    }
    Ok(value)
}

fn not_negative(field: &str, value: f32) -> Result<f32> {
    if !value.is_finite() || value < 0.0 {
        return Err(Error::request(format!("{field}: want a number of 0 or more, got {value}")));
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEFAULTS: Defaults = Defaults {
        width: 512,
        height: 512,
        steps: 20,
        cfg_scale: 7.0,
        sampler: SamplerKind::EulerA,
        scheduler: SchedulerKind::Discrete,
        clip_skip: 1,
    };

    fn resolve(request: &ImageRequest) -> Result<Resolved> {
        request.resolve("m", &DEFAULTS, 7)
    }

    #[test]
    fn defaults_fill_in() {
        let r = resolve(&ImageRequest::default()).unwrap();
        assert_eq!((r.first.width, r.first.height, r.first.steps, r.first.seed), (512, 512, 20, 42));
        assert_eq!((r.first.cfg_scale, r.first.eta, r.batch_count), (7.0, 1.0, 1));
        assert!(r.warnings.is_empty());
        let euler = ImageRequest { sampler: Some(SamplerKind::Euler), ..Default::default() };
        assert_eq!(resolve(&euler).unwrap().first.eta, 0.0);
    }

    #[test]
    fn a_negative_seed_is_drawn() {
        let request = ImageRequest { seed: Some(-1), ..Default::default() };
        assert_eq!(resolve(&request).unwrap().first.seed, 7);
    }

    #[test]
    fn wrong_values_name_the_field() {
        let some = |edit: fn(&mut ImageRequest)| {
            let mut r = ImageRequest::default();
            edit(&mut r);
            r
        };
        let cases: [(&str, ImageRequest); 16] = [
            ("width: want a multiple of 8", some(|r| r.width = Some(0))),
            ("width: want a multiple of 8", some(|r| r.width = Some(129))),
            ("width: want a multiple of 8", some(|r| r.width = Some(u32::MAX - 7))),
            ("height: want a multiple of 8", some(|r| r.height = Some(4))),
            ("width, height:", some(|r| (r.width, r.height) = (Some(16_384), Some(16_384)))),
            ("steps: want 1 to", some(|r| r.steps = Some(0))),
            ("steps: want 1 to", some(|r| r.steps = Some(u32::MAX))),
            ("batch_count: want 1 to", some(|r| r.batch_count = Some(0))),
            ("batch_count: want 1 to", some(|r| r.batch_count = Some(u32::MAX))),
            ("cfg_scale: want a number", some(|r| r.cfg_scale = Some(f32::NAN))),
            ("cfg_scale: want a number", some(|r| r.cfg_scale = Some(-1.0))),
            ("eta: want a number", some(|r| r.eta = Some(f32::INFINITY))),
            ("eta: want a number", some(|r| r.eta = Some(-0.5))),
            ("prompt: want at most", some(|r| r.prompt = "(a".repeat(1 << 20))),
            ("negative_prompt: want at most", some(|r| r.negative_prompt = " ".repeat(MAX_PROMPT + 1))),
            ("seed: ", some(|r| (r.seed, r.batch_count) = (Some(i64::MAX), Some(2)))),
        ];
        for (want, request) in cases {
            let e = resolve(&request).unwrap_err();
            assert!(e.is_request() && e.to_string().starts_with(want), "{want}: {e}");
        }
    }

    #[test]
    fn what_has_no_effect_is_said() {
        let request = ImageRequest { sampler: Some(SamplerKind::Euler), eta: Some(1.0), ..Default::default() };
        assert!(resolve(&request).unwrap().warnings.iter().any(|w| w.starts_with("eta: euler")));
        let request = ImageRequest { cfg_scale: Some(0.5), ..Default::default() };
        assert!(resolve(&request).unwrap().warnings.iter().any(|w| w.starts_with("cfg_scale")));
    }

    #[test]
    fn json_by_name() {
        let r: ImageRequest =
            serde_json::from_str(r#"{"prompt":"a","sampler":"dpm++2m","scheduler":"normal","rng":"cpu"}"#).unwrap();
        assert_eq!((r.sampler, r.scheduler), (Some(SamplerKind::DpmPp2m), Some(SchedulerKind::Discrete)));
        let e = serde_json::from_str::<ImageRequest>(r#"{"sampler":"dpm++2n"}"#).unwrap_err();
        assert!(e.to_string().contains("did you mean dpm++2m?"), "{e}");
        let e = serde_json::from_str::<ImageRequest>(r#"{"promt":"a"}"#).unwrap_err();
        assert!(e.to_string().contains("promt"), "{e}");
        let back: ImageRequest = serde_json::from_str(&serde_json::to_string(&r).unwrap()).unwrap();
        assert_eq!(back, r);
    }
}
