//! Module paths of diffusers and transformers, with the original ones. Golden values: `oracle/sd1_pipeline.py`, whose
//! pairs of names diffusers' own converter confirms.

use std::collections::BTreeSet;

use super::Row;

type Pairs = &'static [(&'static str, &'static str)];

const RESNET: Pairs = &[
    ("norm1", "in_layers.0"),
    ("conv1", "in_layers.2"),
    ("time_emb_proj", "emb_layers.1"),
    ("norm2", "out_layers.0"),
    ("conv2", "out_layers.3"),
    ("conv_shortcut", "skip_connection"),
];
const DOWNSAMPLER: Pairs = &[("conv", "op")];
const SAME: Pairs = &[];
const VAE_RESNET: Pairs = &[("conv_shortcut", "nin_shortcut")];
/// The first spelling is the current one; older files use the second.
const VAE_ATTENTION: Pairs = &[
    ("group_norm", "norm"),
    ("to_q", "q"),
    ("to_k", "k"),
    ("to_v", "v"),
    ("to_out.0", "proj_out"),
    ("query", "q"),
    ("key", "k"),
    ("value", "v"),
    ("proj_attn", "proj_out"),
];

/// Rows for the names of a UNet; none if they are the original ones.
pub(super) fn unet(names: &[&str]) -> Vec<Row> {
    let levels = children(names, "down_blocks.").len();
    if levels == 0 {
        return Vec::new();
    }
    let layers = children(names, "down_blocks.0.resnets.").len();
    let mut rows = vec![
        row("time_embedding.linear_1", "time_embed.0", SAME),
        row("time_embedding.linear_2", "time_embed.2", SAME),
        row("add_embedding.linear_1", "label_emb.0.0", SAME),
        row("add_embedding.linear_2", "label_emb.0.2", SAME),
        row("conv_in", "input_blocks.0.0", SAME),
        row("mid_block.resnets.0", "middle_block.0", RESNET),
        row("mid_block.attentions.0", "middle_block.1", SAME),
        row("mid_block.resnets.1", "middle_block.2", RESNET),
        row("conv_norm_out", "out.0", SAME),
        row("conv_out", "out.2", SAME),
    ];
    for level in 0..levels {
        let first = level * (layers + 1);
        for i in 0..layers {
            let (down, block) = (format!("down_blocks.{level}"), format!("input_blocks.{}", first + i + 1));
            rows.push(row(format!("{down}.resnets.{i}"), format!("{block}.0"), RESNET));
            rows.push(row(format!("{down}.attentions.{i}"), format!("{block}.1"), SAME));
        }
        let block = format!("input_blocks.{}.0", first + layers + 1);
        rows.push(row(format!("down_blocks.{level}.downsamplers.0"), block, DOWNSAMPLER));

        let up = format!("up_blocks.{level}");
        for i in 0..=layers {
            let block = format!("output_blocks.{}", first + i);
            rows.push(row(format!("{up}.resnets.{i}"), format!("{block}.0"), RESNET));
            rows.push(row(format!("{up}.attentions.{i}"), format!("{block}.1"), SAME));
        }
        // The upsampler is the last module of its block: the third where the level has attention.
        let place = 1 + usize::from(!children(names, &format!("{up}.attentions.")).is_empty());
        rows.push(row(format!("{up}.upsamplers.0"), format!("output_blocks.{}.{place}", first + layers), SAME));
    }
    rows
}

/// Rows for the names of an autoencoder; none if they are the original ones.
pub(super) fn autoencoder(names: &[&str]) -> Vec<Row> {
    let down = children(names, "encoder.down_blocks.").len();
    let up = children(names, "decoder.up_blocks.").len();
    let mut rows = Vec::new();
    if down + up == 0 {
        return rows;
    }
    for same in ["quant_conv", "post_quant_conv"] {
        rows.push(row(same, same, SAME));
    }
    for side in ["encoder", "decoder"] {
        for (file, here) in [("conv_in", "conv_in"), ("conv_norm_out", "norm_out"), ("conv_out", "conv_out")] {
            rows.push(row(format!("{side}.{file}"), format!("{side}.{here}"), SAME));
        }
        for i in 0..2 {
            let here = format!("{side}.mid.block_{}", i + 1);
            rows.push(row(format!("{side}.mid_block.resnets.{i}"), here, VAE_RESNET));
        }
        rows.push(row(format!("{side}.mid_block.attentions.0"), format!("{side}.mid.attn_1"), VAE_ATTENTION));
    }
    for level in 0..down {
        let (file, here) = (format!("encoder.down_blocks.{level}"), format!("encoder.down.{level}"));
        for i in 0..children(names, &format!("{file}.resnets.")).len() {
            rows.push(row(format!("{file}.resnets.{i}"), format!("{here}.block.{i}"), VAE_RESNET));
        }
        rows.push(row(format!("{file}.downsamplers.0"), format!("{here}.downsample"), SAME));
    }
    for level in 0..up {
        // Original decoders count their levels from the picture, diffusers from the latent.
        let (file, here) = (format!("decoder.up_blocks.{level}"), format!("decoder.up.{}", up - 1 - level));
        for i in 0..children(names, &format!("{file}.resnets.")).len() {
            rows.push(row(format!("{file}.resnets.{i}"), format!("{here}.block.{i}"), VAE_RESNET));
        }
        rows.push(row(format!("{file}.upsamplers.0"), format!("{here}.upsample"), SAME));
    }
    rows
}

/// Rows for the names of a CLIP text encoder; none if they are as inside original checkpoints.
pub(super) fn text(names: &[&str]) -> Vec<Row> {
    let bare = names.iter().any(|n| n.starts_with("embeddings."));
    if bare { vec![row("", "text_model", SAME)] } else { Vec::new() }
}

fn row(file: impl Into<String>, here: impl Into<String>, inside: Pairs) -> Row {
    Row::new(file, here, inside)
}

/// The numbers directly below `prefix`.
pub(super) fn children(names: &[&str], prefix: &str) -> BTreeSet<usize> {
    names.iter().filter_map(|n| n.strip_prefix(prefix)?.split('.').next()?.parse().ok()).collect()
}
