//! From parsed options to what the engine is asked for; reads the files that options name.

use crate::args::Args;
use anyhow::{Context, Result, bail};
use sd_io::Image;
use sd_runtime::{
    ControlChoice, ImageRequest, InputImage, InputMask, MAX_PROMPT, ReferenceIndex, SkipLayers, UpscaleOptions,
};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use tracing::warn;

/// Sides are multiples of this: the autoencoder shrinks them eight times.
const SIDE_STEP: u32 = 8;
/// The most bytes that a file of prompts may have.
const MAX_PROMPTS_FILE: u64 = 16 << 20;

/// What `args` ask for: a request for each prompt.
pub(crate) fn requests(args: &Args) -> Result<Vec<ImageRequest>> {
    let one = request(args)?;
    let Some(file) = &args.generation.prompts_file else { return Ok(vec![one]) };
    let lines = lines(file).with_context(|| format!("--prompts-file {}", file.display()))?;
    Ok(lines.into_iter().map(|prompt| ImageRequest { prompt, ..one.clone() }).collect())
}

/// The lines of a file, or of stdin for `-`, without empty ones.
fn lines(file: &Path) -> Result<Vec<String>> {
    let reader: Box<dyn BufRead> = if file == Path::new("-") {
        Box::new(std::io::stdin().lock())
    } else {
        Box::new(BufReader::new(File::open(file)?))
    };
    let mut lines = Vec::new();
    // A device such as /dev/zero has no end.
    for (number, line) in (1..).zip(reader.take(MAX_PROMPTS_FILE + 1).lines()) {
        let line = line?;
        if line.len() > MAX_PROMPT {
            bail!("line {number}: more than {MAX_PROMPT} bytes, the most a prompt can have");
        }
        if line.contains('\0') {
            bail!("line {number}: holds a NUL character, want text");
        }
        if !line.trim().is_empty() {
            lines.push(line.trim().to_owned());
        }
    }
    if lines.is_empty() {
        bail!("holds no prompt");
    }
    if lines.iter().map(|line| line.len() as u64).sum::<u64>() > MAX_PROMPTS_FILE {
        bail!("more than {MAX_PROMPTS_FILE} bytes");
    }
    Ok(lines)
}

fn request(args: &Args) -> Result<ImageRequest> {
    let Args { context, generation, steps, pictures, model, .. } = args;
    let by_model = model.control_net.is_empty();
    let references = References::new(args)?;
    let sigmas: Vec<f64> = steps.sigmas.iter().flat_map(|list| &list.0).copied().collect();
    Ok(ImageRequest {
        prompt: text("--prompt-file", &generation.prompt, generation.prompt_file.as_deref())?,
        negative_prompt: text(
            "--negative-prompt-file",
            &generation.negative_prompt,
            generation.negative_prompt_file.as_deref(),
        )?,
        width: generation.width.map(|pixels| whole_blocks("--width", pixels)),
        height: generation.height.map(|pixels| whole_blocks("--height", pixels)),
        steps: generation.steps,
        cfg_scale: generation.cfg_scale,
        sampler: generation.sampling_method,
        scheduler: generation.scheduler,
        eta: generation.eta,
        seed: Some(generation.seed),
        batch_count: Some(generation.batch_count),
        clip_skip: Some(generation.clip_skip),
        rng: Some(context.rng),
        sampler_rng: context.sampler_rng,
        guidance: steps.guidance,
        image_cfg_scale: pictures.img_cfg_scale,
        flow_shift: steps.flow_shift,
        sigmas: (!steps.sigmas.is_empty()).then_some(sigmas),
        timestep_shift: Some(steps.timestep_shift).filter(|shift| *shift > 0),
        extra_sample_args: steps.extra_sample_args.join(","),
        init_image: picture("--init-img", pictures.init_img.as_deref())?,
        strength: pictures.strength,
        mask: picture("--mask", pictures.mask.as_deref())?.map(|image| InputMask::luma(&image, false)),
        ref_images: pictures
            .ref_image
            .iter()
            .filter_map(|path| picture("--ref-image", Some(path)).transpose())
            .collect::<Result<_>>()?,
        ref_index: references.index,
        ref_resize: references.resize,
        ref_max_pixels: references.max_pixels,
        control_image: match pictures.control_image.last().filter(|_| by_model) {
            Some(path) => picture("--control-image", Some(path))?,
            None => None,
        },
        canny: pictures.canny,
        controls: if by_model { Vec::new() } else { controls(args)? },
        slg: (steps.slg_scale != 0.0).then(|| SkipLayers {
            scale: steps.slg_scale,
            layers: steps.skip_layers.0.clone(),
            start: steps.skip_layer_start,
            end: steps.skip_layer_end,
        }),
        circular_x: pictures.circular || pictures.circularx,
        circular_y: pictures.circular || pictures.circulary,
        refiner_switch: steps.refiner_switch,
        mask_blur: pictures.mask_blur,
        only_masked: pictures.inpaint_only_masked,
        mask_padding: pictures.inpaint_only_masked.then_some(pictures.inpaint_padding),
        preview: args.preview.preview(),
        hires: args.hires.hires(),
        cache: args.cache.step_cache()?,
        vae_tiling: args.larger.vae_tiling(),
        upscale: args.model.upscale_model.is_some().then(|| upscale(args)),
        loras: Vec::new(),
    })
}

/// How `--upscale-model` makes pictures larger.
pub(crate) fn upscale(args: &Args) -> UpscaleOptions {
    UpscaleOptions { repeats: args.larger.upscale_repeats, tile: args.larger.upscale_tile_size }
}

/// A picture for each ControlNet. What is given once counts for all.
fn controls(args: &Args) -> Result<Vec<ControlChoice>> {
    let (pictures, nets) = (&args.pictures, args.model.control_net.len());
    let given = [
        ("--control-image", pictures.control_image.len()),
        ("--control-strength", pictures.control_strength.len()),
        ("--control-start", pictures.control_start.len()),
        ("--control-end", pictures.control_end.len()),
    ];
    if let Some((option, count)) = given.into_iter().find(|(_, count)| *count > 1 && *count != nets) {
        bail!("{option}: given {count} times for {nets} of --control-net, want one for each or one for all");
    }
    let Some(first) = pictures.control_image.first() else {
        warn!("--control-net: there is no --control-image to follow, so it has no effect");
        return Ok(Vec::new());
    };
    let mut out = Vec::new();
    for i in 0..nets {
        let path = pictures.control_image.get(i).unwrap_or(first);
        let Some(image) = picture("--control-image", Some(path))? else { continue };
        let default = ControlChoice::new(image);
        out.push(ControlChoice {
            strength: of(&pictures.control_strength, i).unwrap_or(default.strength),
            start: of(&pictures.control_start, i).unwrap_or(default.start),
            end: of(&pictures.control_end, i).unwrap_or(default.end),
            canny: pictures.canny,
            ..default
        });
    }
    Ok(out)
}

/// The value for place `i`, or the only one.
fn of<T: Copy>(values: &[T], i: usize) -> Option<T> {
    values.get(i).or(values.first()).copied()
}

fn picture(option: &str, path: Option<&Path>) -> Result<Option<InputImage>> {
    let Some(path) = path else { return Ok(None) };
    let image = Image::open(path).context(option.to_owned())?;
    Ok(Some(InputImage { width: image.width(), height: image.height(), rgb: image.rgb().to_vec() }))
}

/// What `--ref-image-args` and the options that stand for a part of it say. What is open is the engine's choice.
#[derive(Debug, Default, PartialEq)]
struct References {
    index: ReferenceIndex,
    resize: Option<bool>,
    max_pixels: Option<u32>,
}

impl References {
    fn new(args: &Args) -> Result<References> {
        let pictures = &args.pictures;
        let mut references = References::default();
        if pictures.increase_ref_index {
            references.index = ReferenceIndex::Increase;
        }
        if pictures.disable_auto_resize_ref_image {
            references.resize = Some(false);
        }
        let items = pictures.ref_image_args.iter().flat_map(|list| list.split([',', ';']));
        for item in items.map(str::trim).filter(|item| !item.is_empty()) {
            references.set(item).with_context(|| format!("--ref-image-args {item}"))?;
        }
        Ok(references)
    }

    fn set(&mut self, item: &str) -> Result<()> {
        let Some((key, value)) = item.split_once('=') else { bail!("want key=value") };
        let value = value.trim();
        match key.trim() {
            "ref_index_mode" => self.index = value.parse()?,
            "resize_before_vae" => self.resize = Some(switch(value)?),
            "vae_input_max_pixels" => {
                let pixels: i64 = value.parse().ok().context("want a whole number")?;
                // The predecessor's -1 stands for its default.
                self.max_pixels = if pixels < 0 { None } else { Some(u32::try_from(pixels)?) };
            }
            "preset" => match value {
                "flux_kontext" | "default" => *self = References::default(),
                _ => bail!("no such preset for the models there are; want flux_kontext or default"),
            },
            "pass_to_vlm"
            | "pass_to_dit"
            | "force_ref_timestep_zero"
            | "vlm_resize_mode"
            | "vlm_min_size"
            | "vlm_max_size"
            | "vlm_size" => bail!("not supported yet"),
            _ => bail!("no such key; want preset, ref_index_mode, resize_before_vae or vae_input_max_pixels"),
        }
        Ok(())
    }
}

fn switch(value: &str) -> Result<bool> {
    match value.to_ascii_lowercase().as_str() {
        "1" | "true" | "yes" | "on" => Ok(true),
        "0" | "false" | "no" | "off" => Ok(false),
        _ => bail!("want on or off"),
    }
}

/// A prompt: the contents of `file` when there is one.
fn text(option: &str, given: &str, file: Option<&Path>) -> Result<String> {
    let Some(file) = file else { return Ok(given.to_owned()) };
    let mut text = String::new();
    // A device such as /dev/zero has no end.
    let opened = File::open(file).and_then(|file| file.take(MAX_PROMPT as u64 + 1).read_to_string(&mut text));
    opened.with_context(|| format!("{option} {}", file.display()))?;
    if text.len() > MAX_PROMPT {
        bail!("{option} {}: more than {MAX_PROMPT} bytes, the most a prompt can have", file.display());
    }
    if text.contains('\0') {
        bail!("{option} {}: holds a NUL character, want text", file.display());
    }
    Ok(text)
}

/// `pixels` rounded up to a size that networks can have.
fn whole_blocks(option: &str, pixels: u32) -> u32 {
    let rounded = pixels.next_multiple_of(SIDE_STEP);
    if rounded != pixels {
        warn!("{option}: {pixels} is not a multiple of {SIDE_STEP}, using {rounded}");
    }
    rounded
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(argv: &[&str]) -> Result<References> {
        let argv = std::iter::once("sd-cli").chain(argv.iter().copied()).map(Into::into);
        References::new(&Args::read(argv).map_err(|e| anyhow::anyhow!("{e}"))?)
    }

    #[test]
    fn how_references_are_read() {
        assert_eq!(read(&[]).unwrap(), References::default());
        let index = ReferenceIndex::Increase;
        assert_eq!(read(&["--increase-ref-index"]).unwrap(), References { index, ..Default::default() });
        let all = [
            "--ref-image-args",
            "ref_index_mode=decrease; resize_before_vae=off",
            "--ref-image-args",
            "vae_input_max_pixels=4096",
        ];
        let want = References { index: ReferenceIndex::Decrease, resize: Some(false), max_pixels: Some(4096) };
        assert_eq!(read(&all).unwrap(), want);
        assert_eq!(read(&["--ref-image-args", "vae_input_max_pixels=-1"]).unwrap(), References::default());
        for wrong in ["x", "x=1", "ref_index_mode=up", "resize_before_vae=maybe", "pass_to_vlm=1", "preset=qwen"] {
            let e = format!("{:#}", read(&["--ref-image-args", wrong]).unwrap_err());
            assert!(e.starts_with(&format!("--ref-image-args {wrong}: ")), "{e}");
        }
    }
}
