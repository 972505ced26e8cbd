//! What made a picture, and the text form of it that image files carry and web UIs read.

use std::fmt::{self, Write};

use sd_core::Result;
use serde::{Deserialize, Serialize};

use crate::cache::StepCache;
use crate::hires::Hires;
use crate::request::{LoraChoice, ReferenceIndex, SkipLayers};
use crate::rng::RngKind;
use crate::sampler::{SampleOptions, SamplerKind};
use crate::schedule::{SchedulerKind, TIMESTEPS};

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
    /// Strength of distilled guidance, where the network reads it.
    pub guidance: Option<f32>,
    /// Guidance towards the picture that was edited.
    pub image_cfg_scale: Option<f32>,
    /// The shift of a flow's noise levels, if it was not the model's own.
    pub flow_shift: Option<f32>,
    /// Noise levels that replaced the schedule's.
    pub sigmas: Option<Vec<f64>>,
    /// The shift of the timesteps that the network was told.
    pub timestep_shift: Option<u32>,
    /// How much of the picture to start from was painted anew; `None` if it started from noise alone.
    pub strength: Option<f32>,
    /// Whether a mask said which part was painted anew.
    pub masked: bool,
    /// The deviation by which it was blurred.
    pub mask_blur: u32,
    /// How many pixels around the mask were drawn with it, if nothing else was.
    pub mask_padding: Option<u32>,
    /// The second pass.
    pub hires: Option<Hires>,
    /// How many reference pictures there were.
    pub references: u32,
    /// How they were placed.
    pub reference_index: ReferenceIndex,
    /// Whether they were resized to the number of pixels of the result.
    pub ref_resize: bool,
    /// The most pixels they were resized to.
    pub ref_max_pixels: u32,
    /// Skip-layer guidance.
    pub slg: Option<SkipLayers>,
    /// Whether the left and right edges meet.
    pub circular_x: bool,
    /// Whether the top and bottom edges meet.
    pub circular_y: bool,
    /// The refiner that finished it.
    pub refiner: Option<Refiner>,
    /// The upscaler that made it larger.
    pub upscale: Option<Upscaled>,
    /// Fine tuning of sampler, schedule and guidance, as the request spells it.
    pub extra_sample_args: String,
    /// LoRAs that the request named beside the prompt.
    pub loras: Vec<LoraChoice>,
    /// How steps were left out.
    pub cache: Option<StepCache>,
    /// ControlNets that it followed.
    pub controls: Vec<UsedControlNet>,
}

/// A ControlNet and how it was followed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct UsedControlNet {
    /// Its name.
    pub model: String,
    /// What it added was multiplied by this.
    pub strength: f32,
    /// The share of the steps after which it was followed.
    pub start: f64,
    /// The share of the steps before whose end it was followed.
    pub end: f64,
    /// Whether the picture was reduced to its edges.
    pub canny: bool,
}

/// As the extension of A1111's web UI writes it.
impl fmt::Display for UsedControlNet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let UsedControlNet { model, strength, start, end, canny } = self;
        let module = if *canny { "canny" } else { "none" };
        write!(f, "Module: {module}, Model: {model}, Weight: {strength}, ")?;
        write!(f, "Guidance Start: {start}, Guidance End: {end}")
    }
}

/// An upscaler and how often the picture went through it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Upscaled {
    /// Its name.
    pub model: String,
    /// How many times as many pixels along each axis the picture has, all passes together.
    pub by: u32,
}

/// A refiner and when it took over.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Refiner {
    /// Its name.
    pub model: String,
    /// The share of the noise's timesteps that were done before.
    pub switch: f32,
}

impl Refiner {
    /// It does the steps that begin below this timestep (`denoising_end` and `denoising_start` of diffusers).
    pub(crate) fn first_timestep(&self) -> f64 {
        let all = TIMESTEPS as f64;
        (all - f64::from(self.switch) * all).round()
    }
}

impl Parameters {
    /// [`Parameters::extra_sample_args`], read.
    pub(crate) fn sample_options(&self) -> Result<SampleOptions> {
        self.extra_sample_args.parse()
    }

    /// Whether the picture repeats down and across.
    pub(crate) fn circular(&self) -> [bool; 2] {
        [self.circular_y, self.circular_x]
    }

    /// The text as A1111's web UI writes and reads it: prompt, negative prompt, then one line of `Name: value`
    /// pairs with the names that program uses. LoRAs are tags in the prompt.
    pub fn to_text(&self) -> String {
        let mut text = self.prompt.clone();
        self.loras.iter().for_each(|lora| text.push_str(&lora.to_string()));
        if !self.negative_prompt.is_empty() {
            let _ = write!(text, "\nNegative prompt: {}", self.negative_prompt);
        }
        let mut pairs: Vec<(&str, String)> = vec![
            ("Steps", self.steps.to_string()),
            ("Sampler", self.sampler.label().to_owned()),
            ("Schedule type", self.scheduler.label().to_owned()),
            ("CFG scale", self.cfg_scale.to_string()),
            ("Seed", self.seed.to_string()),
            ("Size", format!("{}x{}", self.width, self.height)),
            ("Model", self.model.clone()),
        ];
        pairs.extend(self.optional_pairs());
        let numbered: Vec<String> = (0..self.controls.len()).map(|i| format!("ControlNet {i}")).collect();
        pairs.extend(numbered.iter().zip(&self.controls).map(|(name, c)| (name.as_str(), c.to_string())));
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

    /// What only some pictures have, by the names of A1111's web UI and of its descendants.
    fn optional_pairs(&self) -> Vec<(&'static str, String)> {
        let mut pairs = Vec::new();
        let mut add = |name: &'static str, value: Option<String>| pairs.extend(value.map(|v| (name, v)));
        let number = |value: Option<f32>| value.map(|v| v.to_string());
        let second = self.hires.as_ref();
        add("Denoising strength", number(self.strength.or(second.map(|h| h.strength))));
        if let Some(hires) = second {
            let [width, height] = hires.size([self.width, self.height], 8);
            let sized = (hires.width, hires.height) != (0, 0);
            add("Hires upscale", (!sized).then(|| hires.scale.to_string()));
            add("Hires resize", sized.then(|| format!("{width}x{height}")));
            add("Hires steps", Some(hires.steps).filter(|n| *n > 0).map(|n| n.to_string()));
            add("Hires upscaler", Some(hires.upscaler.to_string()));
            add("Hires denoising strength", self.strength.map(|_| hires.strength.to_string()));
            add("Hires sigmas", hires.sigmas.as_deref().map(list));
        }
        add("Mask blur", Some(self.mask_blur).filter(|b| *b > 0).map(|b| b.to_string()));
        if let Some(padding) = self.mask_padding {
            add("Inpaint area", Some("Only masked".to_owned()));
            add("Masked area padding", Some(padding.to_string()));
        }
        add("Distilled CFG Scale", number(self.guidance));
        add("Image CFG scale", number(self.image_cfg_scale));
        add("Shift", number(self.flow_shift));
        add("Sigmas", self.sigmas.as_deref().map(list));
        add("Timestep shift", self.timestep_shift.map(|t| t.to_string()));
        add("References", Some(self.references).filter(|n| *n > 0).map(|n| n.to_string()));
        if let Some(slg) = &self.slg {
            add("SLG scale", Some(slg.scale.to_string()));
            add("SLG layers", Some(list(&slg.layers)));
            add("SLG start", Some(slg.start.to_string()));
            add("SLG end", Some(slg.end.to_string()));
        }
        if let Some(cache) = &self.cache {
            add("Cache mode", Some(cache.mode.to_string()));
            add("Cache option", Some(cache.option.clone()));
            let mask: Vec<u8> = cache.scm_mask.iter().copied().map(u8::from).collect();
            add("SCM mask", Some(list(&mask)));
            add("SCM policy", cache.scm_static.then(|| "static".to_owned()));
        }
        add("Extra sample args", Some(self.extra_sample_args.clone()));
        let tiling = match (self.circular_x, self.circular_y) {
            (true, true) => Some("True"),
            (true, false) => Some("X"),
            (false, true) => Some("Y"),
            (false, false) => None,
        };
        add("Tiling", tiling.map(str::to_owned));
        if let Some(refiner) = &self.refiner {
            add("Refiner", Some(refiner.model.clone()));
            add("Refiner switch at", Some(refiner.switch.to_string()));
        }
        if let Some(Upscaled { model, by }) = &self.upscale {
            add("Postprocess upscale by", Some(by.to_string()));
            add("Postprocess upscaler", Some(model.clone()));
        }
        pairs
    }
}

fn list<T: ToString>(values: &[T]) -> String {
    values.iter().map(T::to_string).collect::<Vec<_>>().join(", ")
}

/// A1111's names: NV is CUDA's generator computed anywhere.
fn rng_label(rng: RngKind) -> &'static str {
    match rng {
        RngKind::Cuda => "NV",
        RngKind::Cpu => "CPU",
        RngKind::StdDefault => "STD",
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
            guidance: None,
            image_cfg_scale: None,
            flow_shift: None,
            sigmas: None,
            timestep_shift: None,
            strength: None,
            masked: false,
            mask_blur: 0,
            mask_padding: None,
            hires: None,
            references: 0,
            reference_index: ReferenceIndex::Fixed,
            ref_resize: true,
            ref_max_pixels: 1 << 20,
            slg: None,
            circular_x: false,
            circular_y: false,
            refiner: None,
            upscale: None,
            extra_sample_args: String::new(),
            loras: Vec::new(),
            cache: None,
            controls: Vec::new(),
        }
    }

    #[test]
    fn loras_are_tags() {
        let lora = |name: &str, strength, high_noise| LoraChoice { name: name.into(), strength, high_noise };
        let loras = vec![lora("a/b", 0.5, false), lora("c", -1.0, true)];
        let text = Parameters { prompt: "<lora:x:1> cat".into(), loras, ..parameters() }.to_text();
        assert!(text.starts_with("<lora:x:1> cat<lora:a/b:0.5><lora:|high_noise|c:-1>\nSteps: "), "{text}");
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
    fn text_of_what_only_some_pictures_have() {
        let p = Parameters {
            strength: Some(0.75),
            guidance: Some(3.5),
            image_cfg_scale: Some(1.5),
            sigmas: Some(vec![1.0, 0.5, 0.0]),
            slg: Some(SkipLayers { scale: 2.5, ..SkipLayers::default() }),
            circular_x: true,
            circular_y: true,
            refiner: Some(Refiner { model: "sd_xl_refiner_1.0".into(), switch: 0.8 }),
            upscale: Some(Upscaled { model: "RealESRGAN_x2plus".into(), by: 4 }),
            controls: vec![UsedControlNet {
                model: "edges".into(),
                strength: 0.9,
                start: 0.0,
                end: 0.5,
                canny: true,
            }],
            ..parameters()
        };
        let want = "Model: demo, Denoising strength: 0.75, Distilled CFG Scale: 3.5, Image CFG scale: 1.5, \
                    Sigmas: \"1, 0.5, 0\", SLG scale: 2.5, SLG layers: \"7, 8, 9\", SLG start: 0.01, SLG end: 0.2, \
                    Tiling: True, Refiner: sd_xl_refiner_1.0, Refiner switch at: 0.8, Postprocess upscale by: 4, \
                    Postprocess upscaler: RealESRGAN_x2plus, \
                    ControlNet 0: \"Module: canny, Model: edges, Weight: 0.9, Guidance Start: 0, Guidance End: 0.5\", \
                    RNG: NV";
        assert!(p.to_text().contains(want), "{}", p.to_text());
    }

    #[test]
    fn serde_round_trip() {
        let json = serde_json::to_string(&parameters()).unwrap();
        assert_eq!(serde_json::from_str::<Parameters>(&json).unwrap(), parameters());
    }
}
