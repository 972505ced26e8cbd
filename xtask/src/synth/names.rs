//! Which tensors a published checkpoint has.

use super::{Fill, Spec};
use anyhow::{Context, Result, bail};
use serde_json::Value;

/// Names, shapes and origins of every tensor, made by `oracle/real_names.py` from the reference classes.
const REAL_NAMES: &[u8] = include_bytes!("../../../oracle/fixtures/real_names.json.gz");

/// The models there are, each with its checkpoint in the list.
const CHECKPOINTS: &[(&str, &str)] = &[
    ("sd15", "sd1"),
    ("sd2", "sd2"),
    ("sd2_inpaint", "sd2_inpaint"),
    ("sdxl", "sdxl"),
    ("sdxl_inpaint", "sdxl_inpaint"),
    ("sdxl_refiner", "sdxl_refiner"),
    ("ssd1b", "ssd1b"),
    ("vega", "vega"),
    ("flux", "flux_dev"),
    ("flux_schnell", "flux_schnell"),
    ("flux_fill", "flux_fill"),
    ("flux_control", "flux_control"),
    ("flux_all_in_one", "flux_dev_all_in_one"),
    ("flux_vae", "vae_flux"),
    ("sd3", "sd3"),
    ("sd35_medium", "sd35_medium"),
    ("sd35_large", "sd35_large"),
    ("sd3_all_in_one", "sd3_all_in_one"),
    ("t5xxl", "t5xxl"),
    ("clip_l", "clip_l"),
    ("clip_g", "clip_g"),
];

/// The models that [`tensors`] knows.
pub fn models() -> impl Iterator<Item = &'static str> {
    CHECKPOINTS.iter().map(|row| row.0)
}

/// The tensors of `model`, one of [`models()`], in the order of the modules.
///
/// # Errors
/// There is no such model.
pub fn tensors(model: &str) -> Result<Vec<Spec>> {
    let all: Value = serde_json::from_reader(flate2::read::GzDecoder::new(REAL_NAMES))?;
    let rows = |set: &str| all["sets"][set].as_array().with_context(|| format!("no set {set}"));
    let mut out = Vec::new();
    let Some((_, checkpoint)) = CHECKPOINTS.iter().find(|(name, _)| *name == model) else {
        bail!("no model {model:?}; there are {}", models().collect::<Vec<_>>().join(", "));
    };
    for part in all["checkpoints"][checkpoint].as_array().with_context(|| format!("no checkpoint {checkpoint}"))? {
        for row in rows(text(&part[1])?)? {
            out.push(spec(text(&part[0])?, row)?);
        }
    }
    Ok(out)
}

fn text(value: &Value) -> Result<&str> {
    value.as_str().with_context(|| format!("{value} is no text"))
}

/// `row` starts with name and shape.
fn spec(prefix: &str, row: &Value) -> Result<Spec> {
    let name = text(&row[0])?;
    let shape: Vec<usize> = serde_json::from_value(row[1].clone()).with_context(|| format!("shape of {name}"))?;
    Ok(Spec { name: format!("{prefix}{name}"), fill: fill(name, &shape), shape })
}

/// What a tensor is filled with, by its place.
fn fill(name: &str, shape: &[usize]) -> Fill {
    match shape {
        [_] if name.ends_with("bias") => Fill::Around(0.0),
        [_] => Fill::Around(1.0),
        _ if name.contains("embedding")
            || name == "pos_embed"
            || name == "shared.weight"
            || name.contains("relative_attention_bias") =>
        {
            Fill::Around(0.0)
        }
        // T5 does not divide by the root of the head's 64 channels; its queries are smaller from the start.
        [_, k] if name.ends_with("SelfAttention.q.weight") => Fill::FanIn(64 * k),
        [_, kernel @ ..] => Fill::FanIn(kernel.iter().product()),
        [] => Fill::Around(0.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Parameters of diffusers' and transformers' classes in the published configurations.
    #[test]
    fn sizes_are_those_of_the_reference() {
        let unet = "model.diffusion_model.";
        for (model, prefix, count, parameters) in [
            ("sd15", unet, 686, 859_520_964),
            ("sd15", "first_stage_model.", 248, 83_653_863),
            ("sd15", "cond_stage_model.", 196, 123_060_480),
            ("sdxl", unet, 1680, 2_567_463_684),
            ("sdxl", "conditioner.embedders.1.model.", 389, 694_659_840),
            ("flux", "", 780, 11_901_408_320),
            ("sd3", "", 491, 2_084_951_104),
            ("clip_g", "", 517, 694_659_840),
            ("t5xxl", "", 219, 4_762_310_656),
        ] {
            let all = tensors(model).unwrap();
            let part = || all.iter().filter(|s| s.name.starts_with(prefix));
            assert_eq!(part().count(), count, "{model} {prefix}");
            let sum: usize = part().map(|s| s.shape.iter().product::<usize>()).sum();
            assert_eq!(sum, parameters, "{model} {prefix}");
        }
        for model in models() {
            let all = tensors(model).unwrap();
            let names: BTreeSet<&str> = all.iter().map(|s| s.name.as_str()).collect();
            assert_eq!(names.len(), all.len(), "{model}");
        }
    }

    #[test]
    fn activations_keep_their_size() {
        for (name, shape, want) in [
            ("a.in_layers.0.weight", &[320][..], Fill::Around(1.0)),
            ("a.norm.query_norm.scale", &[128], Fill::Around(1.0)),
            ("a.attn.in_proj_bias", &[3840], Fill::Around(0.0)),
            ("conv_in.weight", &[320, 4, 3, 3], Fill::FanIn(36)),
            ("text_projection", &[1280, 768], Fill::FanIn(768)),
            ("block.0.layer.0.SelfAttention.q.weight", &[4096, 4096], Fill::FanIn(64 * 4096)),
            ("positional_embedding", &[77, 1280], Fill::Around(0.0)),
        ] {
            assert_eq!(fill(name, shape), want, "{name}");
        }
    }
}
