//! What made a picture, and the text form of it that image files carry and web UIs read.

use std::fmt::Write;

use serde::{Deserialize, Serialize};

use crate::rng::RngKind;
use crate::sampler::SamplerKind;
use crate::schedule::SchedulerKind;

/// Everything that determined one picture.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Parameters {
    /// The prompt as given.
    pub prompt: String,
    /// The negative prompt as given.
    pub negative_prompt: String,
    /// Pixels across.
    pub width: u32,
    /// Pixels down.
    pub height: u32,
    /// Sampler steps.
    pub steps: u32,
    /// Guidance scale.
    pub cfg_scale: f32,
    /// How it stepped.
    pub sampler: SamplerKind,
    /// Which noise levels it visited.
    pub scheduler: SchedulerKind,
    /// Noise scale of the sampler.
    pub eta: f32,
    /// The seed of this picture.
    pub seed: i64,
    /// Text encoder layer, counted from the last as 1.
    pub clip_skip: u32,
    /// Generator of the initial noise.
    pub rng: RngKind,
    /// Generator of the sampler's noise, when it was not the same stream.
    pub sampler_rng: Option<RngKind>,
    /// The model's name.
    pub model: String,
}

impl Parameters {
    /// How many predictions a step needs: guidance of 1 leaves out the negative prompt.
    pub(crate) fn conditions(&self) -> usize {
        if self.cfg_scale == 1.0 { 1 } else { 2 }
    }

    /// The text as A1111's web UI writes and reads it: prompt, negative prompt, then one line of `Name: value`
    /// pairs with the names that program uses.
    pub fn to_text(&self) -> String {
        let mut text = self.prompt.clone();
        if !self.negative_prompt.is_empty() {
            let _ = write!(text, "\nNegative prompt: {}", self.negative_prompt);
        }
        let mut pairs = vec![
            ("Steps", self.steps.to_string()),
            ("Sampler", self.sampler.label().to_owned()),
            ("Schedule type", self.scheduler.label().to_owned()),
            ("CFG scale", self.cfg_scale.to_string()),
            ("Seed", self.seed.to_string()),
            ("Size", format!("{}x{}", self.width, self.height)),
            ("Model", self.model.clone()),
        ];
        if self.clip_skip > 1 {
            pairs.push(("Clip skip", self.clip_skip.to_string()));
        }
        if self.eta != self.sampler.default_eta() {
            pairs.push(("Eta", self.eta.to_string()));
        }
        pairs.push(("RNG", rng_label(self.rng).to_owned()));
        if let Some(rng) = self.sampler_rng {
            pairs.push(("Sampler RNG", rng_label(rng).to_owned()));
        }
        pairs.push(("Version", "sd-rs".to_owned()));
        let line: Vec<String> =
            pairs.iter().filter(|(_, v)| !v.is_empty()).map(|(k, v)| format!("{k}: {}", quote(v))).collect();
        let _ = write!(text, "\n{}", line.join(", "));
        text
    }
}

/// A1111's names: NV is CUDA's generator computed anywhere.
fn rng_label(rng: RngKind) -> &'static str {
    match rng {
        RngKind::Cuda => "NV",
        RngKind::Cpu => "CPU",
    }
}

/// A value that holds a separator is written as a JSON string, as A1111 does.
fn quote(value: &str) -> String {
    if value.contains([',', ':', '\n', '"']) {
        serde_json::Value::from(value).to_string()
    } else {
        value.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameters() -> Parameters {
        Parameters {
            prompt: "a red circle, blue".into(),
            negative_prompt: String::new(),
            width: 128,
            height: 192,
            steps: 20,
            cfg_scale: 7.0,
            sampler: SamplerKind::EulerA,
            scheduler: SchedulerKind::Karras,
            eta: 1.0,
            seed: 42,
            clip_skip: 1,
            rng: RngKind::Cuda,
            sampler_rng: None,
            model: "demo".into(),
        }
    }

    #[test]
    fn text() {
        assert_eq!(
            parameters().to_text(),
            "a red circle, blue\n\
             Steps: 20, Sampler: Euler a, Schedule type: Karras, CFG scale: 7, Seed: 42, Size: 128x192, Model: demo, \
             RNG: NV, Version: sd-rs"
        );
        let p = Parameters {
            negative_prompt: "ugly".into(),
            cfg_scale: 7.5,
            clip_skip: 2,
            eta: 0.5,
            rng: RngKind::Cpu,
            sampler_rng: Some(RngKind::Cuda),
            sampler: SamplerKind::DpmPp2m,
            scheduler: SchedulerKind::Discrete,
            model: "my, model: \"x\"".into(),
            ..parameters()
        };
        assert_eq!(
            p.to_text(),
            "a red circle, blue\nNegative prompt: ugly\n\
             Steps: 20, Sampler: DPM++ 2M, Schedule type: Normal, CFG scale: 7.5, Seed: 42, Size: 128x192, \
             Model: \"my, model: \\\"x\\\"\", Clip skip: 2, Eta: 0.5, RNG: CPU, Sampler RNG: NV, Version: sd-rs"
        );
    }

    #[test]
    fn serde_round_trip() {
        let json = serde_json::to_string(&parameters()).unwrap();
        assert_eq!(serde_json::from_str::<Parameters>(&json).unwrap(), parameters());
    }
}
