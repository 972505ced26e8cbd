//! Checks a request and fills it up with the model's defaults.

use sd_core::{Error, Result};
use sd_models::Joined;
use sd_models::adapter::tags::{self, Tag, Tagged};

use crate::cache::{CacheMode, CacheOptions, StepCache};
use crate::generate::{Facts, Levels};
use crate::hires::{Hires, HiresUpscaler};
use crate::input::InputImage;
use crate::parameters::{Parameters, Refiner, Upscaled, UsedControlNet};
use crate::request::{
    ControlChoice, Defaults, ImageRequest, LoraChoice, MAX_BATCH, MAX_PIXELS, MAX_PROMPT, MAX_REFERENCES, MAX_SIDE,
    MAX_STEPS, SkipLayers,
};
use crate::sampler::{SampleOptions, SamplerKind};
use crate::schedule::SchedulerKind;
use crate::upscale::{UpscaleOptions, Upscaler};

/// Sides are multiples of this.
const SIDE_STEP: u32 = 8;
const STRENGTH: f32 = 0.75;
/// What InstructPix2Pix was published with (Brooks et al. 2023, section 3.2.1).
const IMAGE_CFG: f32 = 1.5;
const REFINER_SWITCH: f32 = 0.8;
/// Pixels around a mask that are drawn with it, as A1111's web UI has it.
const MASK_PADDING: u32 = 32;
/// The widest blur of a mask, as in A1111's web UI.
const MAX_MASK_BLUR: u32 = 64;
const REFERENCE_PIXELS: u32 = 1024 * 1024;

/// A checked request with every default filled in.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Resolved {
    /// Parameters of the first image.
    pub(crate) first: Parameters,
    pub(crate) batch_count: u32,
    pub(crate) warnings: Vec<String>,
    /// The prompt without tags.
    pub(crate) prompt: String,
    /// What its tags and the request's own list name.
    pub(crate) loras: Vec<LoraChoice>,
    /// For each of the request's controls.
    pub(crate) controls: Vec<UsedControl>,
}

/// Which of the engine's ControlNets is followed, and how.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct UsedControl {
    pub(crate) net: usize,
    pub(crate) strength: f32,
    pub(crate) start: f64,
    pub(crate) end: f64,
}

/// What a request is resolved against.
pub(crate) struct Given<'a> {
    /// The model's name.
    pub(crate) model: &'a str,
    pub(crate) defaults: &'a Defaults,
    pub(crate) facts: &'a Facts,
    /// The refiner's name, if there is one.
    pub(crate) refiner: Option<&'a str>,
    /// The upscaler, if there is one.
    pub(crate) upscaler: Option<&'a Upscaler>,
    /// Whether there is one for the second pass.
    pub(crate) hires_upscaler: bool,
    /// Whether there is a folder of LoRAs, so that tags are read.
    pub(crate) tags: bool,
    /// The places and names of the ControlNets that the request's controls mean.
    pub(crate) controls: &'a [(usize, String)],
    /// What a negative seed becomes.
    pub(crate) random_seed: i64,
}

impl ImageRequest {
    /// Checks every field and fills in the defaults.
    pub(crate) fn resolve(&self, given: &Given<'_>) -> Result<Resolved> {
        let Given { defaults, facts, .. } = *given;
        let mut warnings = Vec::new();
        for (field, text) in [("prompt", &self.prompt), ("negative_prompt", &self.negative_prompt)] {
            if text.len() > MAX_PROMPT {
                let len = text.len();
                return Err(Error::request(format!("{field}: want at most {MAX_PROMPT} bytes, got {len}")));
            }
            // Files of pictures cannot keep it, which would show when all the work is done.
            if text.contains('\0') {
                return Err(Error::request(format!("{field}: holds a NUL character, want text")));
            }
        }
        if let Some(wrong) =
            self.vae_tiling.and_then(|t| t.relative.into_iter().find(|r| !r.is_finite() || *r < 0.0))
        {
            return Err(Error::request(format!("vae_tiling.relative: want numbers of 0 or more, got {wrong}")));
        }
        let (prompt, loras) = self.tagged(given.tags, &mut warnings)?;
        self.check_pictures(facts)?;
        let [width, height] = self.size(defaults)?;
        let steps = within("steps", self.steps.unwrap_or(defaults.steps), 1, MAX_STEPS)?;
        let sigmas = self.sigmas.as_deref().map(|s| checked_sigmas(s, facts)).transpose()?;
        let steps = sigmas.as_ref().map_or(steps, |s| s.len() as u32 - 1);
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
            Some(seed) if seed < 0 => given.random_seed,
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
        let options: SampleOptions = self.extra_sample_args.parse()?;
        let (scheduler, flow_shift) = self.schedule(given, &mut warnings)?;
        let slg = self.skip_layers(facts)?;
        let image_cfg_scale = self.image_guidance(facts, &mut warnings)?;
        let reads_negative = options.guidance_schedule.is_some()
            || cfg_scale != image_cfg_scale.unwrap_or(1.0)
            || (cfg_scale == 1.0 && sampler.uses_base());
        if slg.is_some() && options.slg_uncond && !reads_negative {
            let why = format!("a cfg_scale of {cfg_scale} reads no negative prompt to leave blocks out of");
            warnings.push(format!("slg_uncond: {why}, so slg has no effect"));
        }
        let cache = self.step_cache(facts, sampler, &mut warnings)?;
        let controls = self.used_controls(given)?;
        let first = Parameters {
            prompt: self.prompt.clone(),
            negative_prompt: self.negative_prompt.clone(),
            width,
            height,
            steps,
            cfg_scale,
            sampler,
            scheduler,
            eta,
            seed,
            clip_skip,
            rng,
            sampler_rng: self.sampler_rng.filter(|kind| *kind != rng),
            model: given.model.to_owned(),
            guidance: self.distilled_guidance(given, &mut warnings)?,
            image_cfg_scale,
            flow_shift,
            sigmas,
            timestep_shift: self.timestep_shift(facts, &mut warnings)?,
            strength: self.strength(facts, &mut warnings)?,
            masked: self.mask.is_some(),
            mask_blur: self.mask_blur(&mut warnings)?,
            mask_padding: self.mask_padding(&mut warnings),
            hires: self.second_pass(given, [width, height])?,
            references: self.ref_images.len() as u32,
            reference_index: self.ref_index,
            ref_resize: self.ref_resize.unwrap_or(true),
            ref_max_pixels: within(
                "ref_max_pixels",
                self.ref_max_pixels.unwrap_or(REFERENCE_PIXELS),
                256,
                u32::MAX,
            )?,
            slg,
            circular_x: self.circular_x,
            circular_y: self.circular_y,
            refiner: self.refiner(given, &mut warnings)?,
            upscale: self.upscaled(given, [width, height])?,
            extra_sample_args: self.extra_sample_args.clone(),
            loras: self.loras.clone(),
            cache,
            controls: controls.iter().map(|c| c.1.clone()).collect(),
        };
        let controls = controls.into_iter().map(|c| c.0).collect();
        Ok(Resolved { first, batch_count, warnings, prompt, loras, controls })
    }

    /// How steps are left out; `None` with a warning where the mode cannot serve the model.
    fn step_cache(
        &self,
        facts: &Facts,
        sampler: SamplerKind,
        warnings: &mut Vec<String>,
    ) -> Result<Option<StepCache>> {
        let Some(cache) = &self.cache else { return Ok(None) };
        CacheOptions::new(cache)?;
        let (mode, family) = (cache.mode, facts.family);
        if mode.is_of_blocks() && facts.blocks == 0 {
            warnings.push(format!(
                "cache_mode: {mode} leaves out blocks of transformers, and {family} is a UNet, for which there are \
                 easycache, ucache and spectrum; every step is computed"
            ));
            return Ok(None);
        }
        if mode == CacheMode::Spectrum && sampler.uses_base() {
            warnings.push(format!(
                "cache_mode: {mode} forecasts no estimate without guidance, which {sampler} reads; every step is computed"
            ));
            return Ok(None);
        }
        Ok(Some(cache.clone()))
    }

    /// How each control's ControlNet is followed.
    fn used_controls(&self, given: &Given<'_>) -> Result<Vec<(UsedControl, UsedControlNet)>> {
        let mut out = Vec::new();
        for (choice, (net, model)) in self.controls.iter().zip(given.controls) {
            choice.image.check("controls.image")?;
            let &ControlChoice { strength, canny, .. } = choice;
            if !strength.is_finite() {
                return Err(Error::request(format!("controls.strength: want a number, got {strength}")));
            }
            let (start, end) = (fraction("controls.start", choice.start)?, fraction("controls.end", choice.end)?);
            if start > end {
                let message = format!("controls: it starts at {start} and ends before, at {end}");
                return Err(Error::request(message));
            }
            let (net, model) = (*net, model.clone());
            out.push((
                UsedControl { net, strength, start, end },
                UsedControlNet { model, strength, start, end, canny },
            ));
        }
        Ok(out)
    }

    /// The prompt without its tags, and the LoRAs that are asked for.
    fn tagged(&self, reads: bool, warnings: &mut Vec<String>) -> Result<(String, Vec<LoraChoice>)> {
        if let Some(LoraChoice { name, strength, .. }) = self.loras.iter().find(|l| !l.strength.is_finite()) {
            return Err(Error::request(format!("loras: the strength of {name} is {strength}, want a number")));
        }
        let Tagged { text, tags, ignored } = tags::extract(&self.prompt);
        if !reads {
            if !tags.is_empty() {
                warnings.push("prompt: there is no folder of LoRAs, so tags are read as text".into());
            }
            return Ok((self.prompt.clone(), self.loras.clone()));
        }
        warnings.extend(ignored.iter().map(|tag| format!("prompt: {tag} has no name or no number, left out")));
        let of_tag = |Tag { name, strength, high_noise }: Tag| LoraChoice { name, strength, high_noise };
        Ok((text, tags.into_iter().map(of_tag).chain(self.loras.iter().cloned()).collect()))
    }

    fn mask_blur(&self, warnings: &mut Vec<String>) -> Result<u32> {
        let blur = within("mask_blur", self.mask_blur, 0, MAX_MASK_BLUR)?;
        if blur > 0 && self.mask.is_none() {
            warnings.push("mask_blur: there is no mask, so it has no effect".into());
            return Ok(0);
        }
        Ok(blur)
    }

    fn mask_padding(&self, warnings: &mut Vec<String>) -> Option<u32> {
        if self.only_masked && self.mask.is_none() {
            warnings.push("only_masked: there is no mask, so it has no effect".into());
        }
        (self.only_masked && self.mask.is_some()).then(|| self.mask_padding.unwrap_or(MASK_PADDING))
    }

    /// The second pass of a first one of `base`.
    fn second_pass(&self, given: &Given<'_>, base: [u32; 2]) -> Result<Option<Hires>> {
        let Some(hires) = &self.hires else { return Ok(None) };
        hires.check()?;
        if hires.upscaler == HiresUpscaler::Model && !given.hires_upscaler {
            return Err(Error::request("hires.upscaler: there is no upscaler")
                .hint("give the file of one with --upscale-model"));
        }
        let [width, height] = hires.size(base, SIDE_STEP);
        side("hires.width", width)?;
        side("hires.height", height)?;
        if u64::from(width) * u64::from(height) > MAX_PIXELS {
            return Err(Error::request(format!(
                "hires: {width}x{height} has more than {MAX_PIXELS} pixels, the most a picture can have"
            )));
        }
        within("hires.steps", hires.steps, 0, MAX_STEPS)?;
        let sigmas = hires.sigmas.as_deref().map(|s| checked_sigmas(s, given.facts)).transpose();
        sigmas.map_err(|e| e.context("hires"))?;
        Ok(Some(hires.clone()))
    }

    /// The upscaler that follows, if the result of this size can be made larger.
    fn upscaled(&self, given: &Given<'_>, size: [u32; 2]) -> Result<Option<Upscaled>> {
        let Some(UpscaleOptions { repeats, tile }) = self.upscale.filter(|u| u.repeats > 0) else {
            return Ok(None);
        };
        let upscaler = given.upscaler.ok_or_else(|| {
            Error::request("upscale: there is no upscaler").hint("give the file of one with --upscale-model")
        })?;
        within("upscale.tile", tile, 1, MAX_SIDE)?;
        let size = self.hires.as_ref().map_or(size, |hires| hires.size(size, SIDE_STEP));
        let own = self.init_image.as_ref().filter(|_| self.only_masked && self.mask.is_some());
        upscaler.check(own.map_or(size, |i| [i.width, i.height]), repeats)?;
        Ok(Some(Upscaled { model: upscaler.name().to_owned(), by: upscaler.scale().saturating_pow(repeats) }))
    }

    /// Whether there are the pictures that the model needs, and none that it cannot read.
    fn check_pictures(&self, facts: &Facts) -> Result<()> {
        for (field, image) in [("init_image", &self.init_image), ("control_image", &self.control_image)] {
            image.iter().try_for_each(|image| image.check(field))?;
        }
        self.ref_images.iter().try_for_each(|image| image.check("ref_images"))?;
        if self.ref_resize == Some(false)
            && let Some(InputImage { width, height, .. }) =
                self.ref_images.iter().find(|i| u64::from(i.width) * u64::from(i.height) > MAX_PIXELS)
        {
            let what = format!(
                "ref_images: {width}x{height} has more than {MAX_PIXELS} pixels, the most of a reference that is not resized"
            );
            return Err(Error::request(what).hint("let it be resized, or give a smaller one"));
        }
        let family = facts.family;
        let wrong = |what: String| Err(Error::request(what));
        if let Some(mask) = &self.mask {
            mask.check("mask")?;
            if self.init_image.is_none() {
                return wrong("mask: there is no picture to paint in".into())
                    .map_err(|e| e.hint("give init_image"));
            }
        }
        if facts.joined == Joined::Picture && self.init_image.is_none() {
            return wrong(format!("init_image: this {family} model edits a picture, and none is given"));
        }
        match (facts.joined == Joined::Control, &self.control_image) {
            (true, None) => {
                wrong(format!("control_image: this {family} model follows edges or depths, and none are given"))
            }
            (false, Some(_)) => wrong(format!("control_image: this {family} model does not read one"))
                .map_err(|e| e.hint("give a ControlNet with --control-net")),
            _ if self.ref_images.len() > MAX_REFERENCES => {
                wrong(format!("ref_images: want at most {MAX_REFERENCES}, got {}", self.ref_images.len()))
            }
            _ if !facts.references && !self.ref_images.is_empty() => {
                wrong(format!("ref_images: this {family} model does not read reference pictures"))
            }
            _ => Ok(()),
        }
    }

    /// Width and height: as asked for; else the first picture's own, or in its aspect if one side is asked for; else
    /// the model's.
    fn size(&self, defaults: &Defaults) -> Result<[u32; 2]> {
        let whole =
            |side: f64| (side / f64::from(SIDE_STEP)).round().max(1.0).min(f64::from(MAX_SIDE)) as u32 * SIDE_STEP;
        let controls = self.control_image.as_ref().or(self.controls.first().map(|c| &c.image));
        let picture = self.init_image.as_ref().or(controls).or(self.ref_images.first());
        let own = |w: f64, h: f64| [whole(w), whole(h)];
        let [width, height] =
            match (self.width, self.height, picture.map(|p| (f64::from(p.width), f64::from(p.height)))) {
                (Some(w), Some(h), _) => [w, h],
                (w, h, None) => [w.unwrap_or(defaults.width), h.unwrap_or(defaults.height)],
                (None, None, Some((w, h))) => own(w, h),
                (Some(width), None, Some((w, h))) => [width, whole(f64::from(width) * h / w)],
                (None, Some(height), Some((w, h))) => [whole(f64::from(height) * w / h), height],
            };
        let (width, height) = (side("width", width)?, side("height", height)?);
        if u64::from(width) * u64::from(height) > MAX_PIXELS {
            return Err(Error::request(format!(
                "width, height: {width}x{height} has more than {MAX_PIXELS} pixels, the most a picture can have"
            )));
        }
        Ok([width, height])
    }

    /// The schedule and the shift of a flow's levels. A shift that is asked for needs a schedule that reads it.
    fn schedule(&self, given: &Given<'_>, warnings: &mut Vec<String>) -> Result<(SchedulerKind, Option<f32>)> {
        let scheduler = self.scheduler.unwrap_or(given.defaults.scheduler);
        if self.sigmas.is_some() && self.scheduler.is_some() {
            warnings.push("scheduler: sigmas are given, so it has no effect".into());
        }
        let Some(shift) = self.flow_shift else { return Ok((scheduler, None)) };
        if !(-10.0..=100.0).contains(&shift) {
            return Err(Error::request(format!("flow_shift: want a number from -10 to 100, got {shift}")));
        }
        match &given.facts.levels {
            Levels::Table(_) => {
                let family = given.facts.family;
                warnings.push(format!("flow_shift: {family} is no flow model, so it has no effect"));
                Ok((scheduler, None))
            }
            Levels::Flow { shift: sd_models::Shift::Constant(_), .. } if shift <= 0.0 => {
                Err(Error::request(format!("flow_shift: want a number above 0, got {shift}")))
            }
            Levels::Flow { .. } if scheduler == SchedulerKind::Flux && self.scheduler.is_none() => {
                Ok((SchedulerKind::Simple, Some(shift)))
            }
            Levels::Flow { .. } => {
                if scheduler == SchedulerKind::Flux {
                    warnings.push("flow_shift: the schedule flux has its own, so it has no effect".into());
                }
                Ok((scheduler, Some(shift)))
            }
        }
    }

    fn distilled_guidance(&self, given: &Given<'_>, warnings: &mut Vec<String>) -> Result<Option<f32>> {
        let guidance = self.guidance.map(|g| not_negative("guidance", g)).transpose()?;
        if guidance.is_some() && !given.facts.guidance {
            warnings
                .push(format!("guidance: this {} model does not read it, so it has no effect", given.facts.family));
        }
        Ok(guidance.or(given.defaults.guidance).filter(|_| given.facts.guidance))
    }

    fn image_guidance(&self, facts: &Facts, warnings: &mut Vec<String>) -> Result<Option<f32>> {
        let scale = self.image_cfg_scale.map(|s| not_negative("image_cfg_scale", s)).transpose()?;
        if facts.joined == Joined::Picture {
            return Ok(Some(scale.unwrap_or(IMAGE_CFG)));
        }
        if scale.is_some() && self.ref_images.is_empty() {
            warnings.push(
                "image_cfg_scale: there is no picture that the network could do without, so it has no effect"
                    .into(),
            );
            return Ok(None);
        }
        Ok(scale)
    }

    fn timestep_shift(&self, facts: &Facts, warnings: &mut Vec<String>) -> Result<Option<u32>> {
        let shift = within("timestep_shift", self.timestep_shift.unwrap_or(0), 0, 1000)?;
        if shift > 0 && matches!(facts.levels, Levels::Flow { .. }) {
            warnings.push(format!("timestep_shift: {} is a flow model, so it has no effect", facts.family));
            return Ok(None);
        }
        Ok(Some(shift).filter(|shift| *shift > 0))
    }

    /// How much of the picture to start from is painted anew; `None` starts from noise alone.
    fn strength(&self, facts: &Facts, warnings: &mut Vec<String>) -> Result<Option<f32>> {
        let strength = self.strength.map(|s| fraction("strength", s)).transpose()?;
        if self.init_image.is_none() {
            if strength.is_some() {
                warnings.push("strength: there is no picture to start from, so it has no effect".into());
            }
            return Ok(None);
        }
        let read_beside = match facts.joined {
            Joined::Picture => true,
            Joined::Inpaint | Joined::Fill => self.mask.is_some(),
            Joined::None | Joined::Control => false,
        };
        let strength = strength.unwrap_or(if read_beside { 1.0 } else { STRENGTH });
        Ok(Some(strength).filter(|s| !read_beside || *s < 1.0))
    }

    fn skip_layers(&self, facts: &Facts) -> Result<Option<SkipLayers>> {
        let Some(slg) = self.slg.as_ref().filter(|s| s.scale != 0.0) else { return Ok(None) };
        if !slg.scale.is_finite() {
            return Err(Error::request(format!("slg.scale: want a number, got {}", slg.scale)));
        }
        let (start, end) = (fraction("slg.start", slg.start)?, fraction("slg.end", slg.end)?);
        if start > end {
            return Err(Error::request(format!("slg: it starts at {start} and ends before, at {end}")));
        }
        if facts.blocks == 0 {
            return Err(Error::request(format!("slg: no blocks of {} can be left out", facts.family)));
        }
        if let Some(layer) = slg.layers.iter().find(|layer| **layer >= facts.blocks) {
            let most = facts.blocks - 1;
            return Err(Error::request(format!("slg.layers: want blocks from 0 to {most}, got {layer}")));
        }
        Ok(Some(slg.clone()).filter(|s| !s.layers.is_empty()))
    }

    fn refiner(&self, given: &Given<'_>, warnings: &mut Vec<String>) -> Result<Option<Refiner>> {
        let switch = self.refiner_switch.map(|s| fraction("refiner_switch", s)).transpose()?;
        let Some(model) = given.refiner else {
            if switch.is_some() {
                warnings.push("refiner_switch: there is no refiner, so it has no effect".into());
            }
            return Ok(None);
        };
        let switch = switch.unwrap_or(REFINER_SWITCH);
        Ok((switch < 1.0).then(|| Refiner { model: model.to_owned(), switch }))
    }
}

/// Levels from the noisiest on, all finite, falling, and none below 0; a flow's are at most 1.
fn checked_sigmas(sigmas: &[f64], facts: &Facts) -> Result<Vec<f64>> {
    let most = MAX_STEPS as usize + 1;
    if sigmas.len() < 2 || sigmas.len() > most {
        return Err(Error::request(format!("sigmas: want 2 to {most} levels, got {}", sigmas.len())));
    }
    if let Some(wrong) = sigmas.iter().find(|s| !s.is_finite() || **s < 0.0) {
        return Err(Error::request(format!("sigmas: want numbers of 0 or more, got {wrong}")));
    }
    if let Some([a, b]) = sigmas.array_windows().find(|[a, b]| a <= b) {
        return Err(Error::request(format!("sigmas: want falling levels, {b} follows {a}")));
    }
    let first = sigmas.first().copied().unwrap_or(0.0);
    if matches!(facts.levels, Levels::Flow { .. }) && first > 1.0 {
        return Err(Error::request(format!("sigmas: levels of {} are from 1 to 0, got {first}", facts.family)));
    }
    Ok(sigmas.to_vec())
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

fn fraction<T: Copy + Into<f64> + std::fmt::Display>(field: &str, value: T) -> Result<T> {
    if !(0.0..=1.0).contains(&value.into()) {
        return Err(Error::request(format!("{field}: want a number from 0 to 1, got {value}")));
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guidance::Prediction;
    use crate::input::InputMask;
    use crate::sampler::SamplerKind;
    use crate::schedule::SigmaTable;

    const DEFAULTS: Defaults = Defaults {
        width: 512,
        height: 512,
        steps: 20,
        cfg_scale: 7.0,
        guidance: Some(3.5),
        sampler: SamplerKind::EulerA,
        scheduler: SchedulerKind::Discrete,
        clip_skip: 1,
    };

    fn facts() -> Facts {
        Facts {
            family: "SD 1.x",
            channels: 4,
            pixels: 8,
            multiple: 8,
            prediction: Prediction::Eps,
            levels: Levels::Table(SigmaTable::scaled_linear()),
            guidance: false,
            joined: Joined::None,
            references: false,
            blocks: 0,
            ays: None,
            picture_scale: 1.0,
        }
    }

    fn flux() -> Facts {
        let shift = sd_models::Shift::Resolution { tokens: [256.0, 4096.0], mu: [0.5, 1.15] };
        Facts {
            family: "Flux.1",
            prediction: Prediction::Flow,
            levels: Levels::Flow { shift, time_scale: 1.0 },
            guidance: true,
            references: true,
            blocks: 57,
            ..facts()
        }
    }

    fn resolve_for(request: &ImageRequest, facts: &Facts) -> Result<Resolved> {
        let given = Given {
            model: "m",
            defaults: &DEFAULTS,
            facts,
            refiner: None,
            upscaler: None,
            hires_upscaler: false,
            tags: false,
            controls: &[],
            random_seed: 7,
        };
        request.resolve(&given)
    }

    fn resolve(request: &ImageRequest) -> Result<Resolved> {
        resolve_for(request, &facts())
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
        let cases: [(&str, ImageRequest); 18] = [
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
            ("prompt: holds a NUL", some(|r| r.prompt = "a\0b".into())),
            ("negative_prompt: holds a NUL", some(|r| r.negative_prompt = "\0".into())),
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

    fn picture(width: u32, height: u32) -> Option<InputImage> {
        Some(InputImage { width, height, rgb: vec![0; (width * height * 3) as usize] })
    }

    fn mask() -> Option<InputMask> {
        Some(InputMask { width: 1, height: 1, values: vec![255] })
    }

    #[test]
    fn sizes_come_from_the_first_picture() {
        for (width, height, want) in [
            (None, None, [104, 48]),
            (Some(64), Some(64), [64, 64]),
            (Some(200), None, [200, 96]),
            (None, Some(96), [200, 96]),
        ] {
            let r = ImageRequest { width, height, init_image: picture(100, 48), ..Default::default() };
            let r = resolve(&r).unwrap().first;
            assert_eq!([r.width, r.height], want);
        }
    }

    #[test]
    fn strength_depends_on_what_the_network_reads() {
        let with = |joined, strength, mask| {
            let r = ImageRequest { init_image: picture(8, 8), strength, mask, ..Default::default() };
            resolve_for(&r, &Facts { joined, ..facts() }).unwrap().first.strength
        };
        assert_eq!(with(Joined::None, None, None), Some(0.75));
        assert_eq!(with(Joined::None, Some(1.0), mask()), Some(1.0));
        assert_eq!(with(Joined::Inpaint, None, None), Some(0.75));
        assert_eq!(with(Joined::Inpaint, None, mask()), None);
        assert_eq!(with(Joined::Inpaint, Some(0.5), mask()), Some(0.5));
        assert_eq!(with(Joined::Picture, None, None), None);
        let r = ImageRequest { strength: Some(0.5), ..Default::default() };
        let r = resolve(&r).unwrap();
        assert!(r.first.strength.is_none() && r.warnings[0].starts_with("strength: there is no picture"));
    }

    #[test]
    fn layers_of_a_negative_prompt_that_is_not_read_are_not_skipped() {
        let warnings = |cfg_scale, args: &str| {
            let slg = Some(SkipLayers { layers: vec![7], scale: 2.5, ..SkipLayers::default() });
            let extra_sample_args = args.to_owned();
            let r = ImageRequest { slg, extra_sample_args, cfg_scale, ..Default::default() };
            resolve_for(&r, &flux()).unwrap().warnings
        };
        let unread = warnings(Some(1.0), "slg_uncond=1");
        assert!(unread.len() == 1 && unread[0].starts_with("slg_uncond: a cfg_scale of 1 reads no"), "{unread:?}");
        assert_eq!(warnings(Some(3.0), "slg_uncond=1"), [""; 0]);
        assert_eq!(warnings(Some(1.0), ""), [""; 0]);
    }

    #[test]
    fn a_flows_shift_needs_a_schedule_that_reads_it() {
        let flux_defaults = Defaults { scheduler: SchedulerKind::Flux, ..DEFAULTS };
        let with = |scheduler| {
            let r = ImageRequest { flow_shift: Some(1.15), scheduler, ..Default::default() };
            let given = Given {
                model: "m",
                defaults: &flux_defaults,
                facts: &flux(),
                refiner: None,
                upscaler: None,
                hires_upscaler: false,
                tags: false,
                controls: &[],
                random_seed: 7,
            };
            let r = r.resolve(&given).unwrap();
            (r.first.scheduler, r.warnings.len())
        };
        assert_eq!(with(None), (SchedulerKind::Simple, 0));
        assert_eq!(with(Some(SchedulerKind::Flux)), (SchedulerKind::Flux, 1));
        assert_eq!(with(Some(SchedulerKind::Karras)), (SchedulerKind::Karras, 0));
        let r = resolve(&ImageRequest { flow_shift: Some(3.0), ..Default::default() }).unwrap();
        assert!(r.warnings[0].starts_with("flow_shift: SD 1.x is no flow model"), "{:?}", r.warnings);
    }

    #[test]
    fn guidance_goes_to_models_that_read_it() {
        let request = ImageRequest { guidance: Some(2.5), ..Default::default() };
        assert_eq!(resolve_for(&request, &flux()).unwrap().first.guidance, Some(2.5));
        assert_eq!(resolve_for(&ImageRequest::default(), &flux()).unwrap().first.guidance, Some(3.5));
        let r = resolve(&request).unwrap();
        assert!(r.first.guidance.is_none() && r.warnings.len() == 1);
        let pix2pix = Facts { joined: Joined::Picture, ..facts() };
        let request = ImageRequest { init_image: picture(8, 8), ..Default::default() };
        assert_eq!(resolve_for(&request, &pix2pix).unwrap().first.image_cfg_scale, Some(1.5));
    }

    #[test]
    fn wrong_pictures_and_levels_are_named() {
        let joined = |joined| Facts { joined, ..facts() };
        let some = |edit: fn(&mut ImageRequest)| {
            let mut r = ImageRequest::default();
            edit(&mut r);
            r
        };
        let layers = |layers| SkipLayers { scale: 1.0, layers, ..SkipLayers::default() };
        let cases: Vec<(&str, ImageRequest, Facts)> = vec![
            (
                "init_image: 8x8 takes",
                some(|r| r.init_image = Some(InputImage { width: 8, height: 8, rgb: vec![] })),
                facts(),
            ),
            ("mask: there is no picture", some(|r| r.mask = mask()), facts()),
            ("init_image: this SD 1.x model edits", ImageRequest::default(), joined(Joined::Picture)),
            ("control_image: this SD 1.x model follows", ImageRequest::default(), joined(Joined::Control)),
            ("control_image: this SD 1.x model does not", some(|r| r.control_image = picture(8, 8)), facts()),
            (
                "ref_images: this SD 1.x model does not",
                some(|r| r.ref_images = picture(8, 8).into_iter().collect()),
                facts(),
            ),
            (
                "ref_images: 4096x2049 has more than",
                some(|r| (r.ref_images, r.ref_resize) = (vec![picture(4096, 2049).unwrap()], Some(false))),
                flux(),
            ),
            ("ref_images: want at most", some(|r| r.ref_images = vec![picture(8, 8).unwrap(); 17]), flux()),
            (
                "strength: want a number from 0",
                some(|r| (r.strength, r.init_image) = (Some(1.5), picture(8, 8))),
                facts(),
            ),
            ("sigmas: want 2 to", some(|r| r.sigmas = Some(vec![1.0])), facts()),
            ("upscale: there is no upscaler", some(|r| r.upscale = Some(UpscaleOptions::default())), facts()),
            ("sigmas: want numbers", some(|r| r.sigmas = Some(vec![1.0, f64::NAN])), facts()),
            ("sigmas: want falling", some(|r| r.sigmas = Some(vec![1.0, 1.0])), facts()),
            ("sigmas: levels of Flux.1", some(|r| r.sigmas = Some(vec![2.0, 1.0])), flux()),
            ("timestep_shift: want 0 to 1000", some(|r| r.timestep_shift = Some(1001)), facts()),
            ("flow_shift: want a number", some(|r| r.flow_shift = Some(f32::NAN)), flux()),
            ("slg: no blocks", ImageRequest { slg: Some(layers(vec![0])), ..Default::default() }, facts()),
            (
                "slg.layers: want blocks from 0 to 56, got 57",
                ImageRequest { slg: Some(layers(vec![57])), ..Default::default() },
                flux(),
            ),
            ("refiner_switch: want", some(|r| r.refiner_switch = Some(-0.1)), facts()),
        ];
        for (want, request, facts) in cases {
            let e = resolve_for(&request, &facts).unwrap_err();
            assert!(e.is_request() && e.to_string().starts_with(want), "{want}: {e}");
        }
        let r = resolve(&some(|r| r.sigmas = Some(vec![14.0, 3.0, 0.0]))).unwrap();
        assert_eq!(r.first.steps, 2);
    }
}
