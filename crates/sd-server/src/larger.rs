//! Fields that make pictures larger, and that run the autoencoder in pieces.

use crate::failure::Failure;
use crate::fields::Fields;
use crate::limits;
use sd_runtime::{Hires, HiresUpscaler, ImageRequest, MAX_SIDE, VaeTiling};

/// A second pass by the fields of A1111's web UI, if it is switched on. `strength` is its `denoising_strength`.
pub(crate) fn second_pass(fields: &mut Fields, strength: Option<f32>) -> Result<Option<Hires>, Failure> {
    let on = fields.flag("enable_hr")?.unwrap_or(false);
    let mut hires = Hires::default();
    let upscaler = fields.choice("hr_upscaler", upscaler)?;
    hires.scale = fields.not_negative("hr_scale")?.unwrap_or(hires.scale);
    hires.steps = fields.small("hr_second_pass_steps", 0, limits::STEPS)?.unwrap_or(hires.steps);
    hires.width = fields.small("hr_resize_x", 0, limits::SIDE)?.unwrap_or(hires.width);
    hires.height = fields.small("hr_resize_y", 0, limits::SIDE)?.unwrap_or(hires.height);
    hires.strength = strength.unwrap_or(hires.strength);
    if !on {
        return Ok(None);
    }
    fields.unsupported(&[
        "hr_checkpoint_name",
        "hr_sampler_name",
        "hr_scheduler",
        "hr_prompt",
        "hr_negative_prompt",
    ])?;
    hires.upscaler = match upscaler {
        Some(None) => return Ok(None),
        Some(Some(upscaler)) => upscaler,
        None => hires.upscaler,
    };
    bounded(hires).map(Some)
}

/// The fields `hires`, `upscale_model` with its kin and `vae_tiling_params` of stable-diffusion.cpp's schema. Returns
/// warnings.
pub(crate) fn apply(fields: &mut Fields, request: &mut ImageRequest) -> Result<Vec<String>, Failure> {
    let mut warnings = Vec::new();
    if let Some(mut given) = fields.object("hires")? {
        let mut hires = Hires::default();
        let on = given.flag("enabled")?.unwrap_or(false);
        let upscaler = given.choice("upscaler", upscaler)?;
        hires.upscaler = upscaler.flatten().unwrap_or(hires.upscaler);
        hires.scale = given.not_negative("scale")?.unwrap_or(hires.scale);
        hires.width = given.small("target_width", 0, limits::SIDE)?.unwrap_or(hires.width);
        hires.height = given.small("target_height", 0, limits::SIDE)?.unwrap_or(hires.height);
        hires.steps = given.small("steps", 0, limits::STEPS)?.unwrap_or(hires.steps);
        hires.strength = given.not_negative("denoising_strength")?.unwrap_or(hires.strength);
        let sigmas = given.numbers("custom_sigmas", limits::STEPS as usize + 1)?;
        hires.sigmas = sigmas.filter(|sigmas| !sigmas.is_empty());
        hires.tile = given.small("upscale_tile_size", 1, MAX_SIDE)?.unwrap_or(hires.tile);
        warnings.extend(given.unknown());
        let on = on && upscaler != Some(None);
        request.hires = if on { Some(bounded(hires)?) } else { None };
    }
    let chosen = fields.choice("upscale_model", |name| match upscaler(name)? {
        Some(HiresUpscaler::Model) => Ok(true),
        None => Ok(false),
        Some(_) => Err("want Model, which is the server's --upscale-model".to_owned()),
    })?;
    let mut upscale = request.upscale.unwrap_or_default();
    upscale.repeats = fields.small("upscale_repeats", 1, limits::UPSCALES)?.unwrap_or(upscale.repeats);
    upscale.tile = fields.small("upscale_tile_size", 1, MAX_SIDE)?.unwrap_or(upscale.tile);
    if let Some(on) = chosen {
        request.upscale = on.then_some(upscale);
    }
    if let Some(mut given) = fields.object("vae_tiling_params")? {
        let on = given.flag("enabled")?.unwrap_or(false);
        let mut tiling = VaeTiling::default();
        for (axis, name) in ["tile_size_x", "tile_size_y"].into_iter().enumerate() {
            if let (Some(to), Some(tile)) = (tiling.tile.get_mut(axis), given.small(name, 0, MAX_SIDE)?) {
                *to = tile;
            }
        }
        for (axis, name) in ["rel_size_x", "rel_size_y"].into_iter().enumerate() {
            if let (Some(to), Some(share)) = (tiling.relative.get_mut(axis), given.not_negative(name)?) {
                *to = share;
            }
        }
        given.ignore(&["target_overlap", "temporal_tiling", "extra_tiling_args"]);
        warnings.extend(given.unknown());
        request.vae_tiling = on.then_some(tiling);
    }
    Ok(warnings)
}

/// An upscaler by its name; `None` is none.
fn upscaler(name: &str) -> Result<Option<HiresUpscaler>, String> {
    if name == "None" {
        return Ok(None);
    }
    name.parse().map(Some).map_err(|e: sd_runtime::Error| {
        let message = e.to_string();
        message.split_once(": ").map_or(message.clone(), |(_, rest)| rest.to_owned())
    })
}

/// An error if the result of twice the largest size would be larger than what can be asked for.
fn bounded(hires: Hires) -> Result<Hires, Failure> {
    if hires.scale > 4.0 {
        return Err(Failure::bad(format!("hires: want a scale of at most 4, got {}", hires.scale)));
    }
    Ok(hires)
}

#[cfg(test)]
mod tests {
    use super::*;
    use sd_runtime::UpscaleOptions;

    fn fields(json: &str) -> Fields {
        Fields::parse(json.as_bytes()).unwrap()
    }

    #[test]
    fn the_web_uis_second_pass() {
        let read = |json: &str| second_pass(&mut fields(json), Some(0.4));
        assert_eq!(read(r#"{"hr_scale":2,"hr_upscaler":"Latent"}"#).unwrap(), None);
        let got = read(
            r#"{"enable_hr":true,"hr_scale":1.5,"hr_upscaler":"Latent (bicubic)","hr_second_pass_steps":7,
            "hr_resize_x":0,"hr_resize_y":640,"hr_prompt":""}"#,
        );
        let want = Hires {
            upscaler: HiresUpscaler::LatentBicubic,
            scale: 1.5,
            height: 640,
            steps: 7,
            strength: 0.4,
            ..Hires::default()
        };
        assert_eq!(got.unwrap(), Some(want));
        assert_eq!(read(r#"{"enable_hr":true,"hr_upscaler":"None"}"#).unwrap(), None);
        for (json, want) in [
            (r#"{"enable_hr":true,"hr_upscaler":"4x-x"}"#, "hr_upscaler: no \"4x-x\" (one of Latent"),
            (r#"{"enable_hr":true,"hr_scale":9}"#, "hires: want a scale of at most 4"),
            (r#"{"enable_hr":true,"hr_prompt":"b"}"#, "hr_prompt: not supported yet"),
        ] {
            let e = read(json).unwrap_err();
            assert!(e.message().starts_with(want), "{json}: {}", e.message());
        }
    }

    #[test]
    fn the_schema() {
        let mut r = ImageRequest::default();
        let json = r#"{"hires":{"enabled":true,"upscaler":"Lanczos","target_width":128,"custom_sigmas":[1,0],"odd":1},
            "upscale_model":"Model","upscale_repeats":2,
            "vae_tiling_params":{"enabled":true,"tile_size_x":16,"rel_size_y":0.5,"target_overlap":0.5}}"#;
        let warnings = apply(&mut fields(json), &mut r).unwrap();
        assert_eq!(warnings, ["hires.odd: unknown, ignored"]);
        let hires = r.hires.clone().unwrap();
        assert_eq!(
            (hires.upscaler, hires.width, hires.sigmas),
            (HiresUpscaler::Lanczos, 128, Some(vec![1.0, 0.0]))
        );
        assert_eq!(r.upscale, Some(UpscaleOptions { repeats: 2, ..UpscaleOptions::default() }));
        assert_eq!(r.vae_tiling, Some(VaeTiling { tile: [16, 0], relative: [0.0, 0.5] }));
        let off = r#"{"hires":{"enabled":false},"upscale_model":"None","vae_tiling_params":{"enabled":false}}"#;
        apply(&mut fields(off), &mut r).unwrap();
        assert_eq!((r.hires, r.upscale, r.vae_tiling), (None, None, None));
        let e = apply(&mut fields(r#"{"upscale_model":"Lanczos"}"#), &mut ImageRequest::default()).unwrap_err();
        assert_eq!(e.message(), "upscale_model: want Model, which is the server's --upscale-model");
    }
}
