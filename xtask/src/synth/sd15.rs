//! Names and shapes of a Stable Diffusion 1.5 checkpoint in its original single-file layout.
//!
//! Sources: the model's published configuration (`v1-inference.yaml`) and the module names of its reference
//! implementation, CompVis/stable-diffusion; CLIP names are those of `transformers`' `CLIPTextModel`.

use super::{Fill, Spec};

const UNET: &str = "model.diffusion_model";
const VAE: &str = "first_stage_model";
const CLIP: &str = "cond_stage_model.transformer.text_model";

/// UNet: `model_channels`, `channel_mult`, residual blocks per level, width of the text context.
const CHANNELS: usize = 320;
const MULT: [usize; 4] = [1, 2, 4, 4];
const RES_BLOCKS: usize = 2;
const CONTEXT: usize = 768;
/// Levels with attention: downsampling by 1, 2 and 4.
const ATTENTION_LEVELS: usize = 3;

/// Autoencoder: `ch`, `ch_mult`, residual blocks per level, latent channels.
const VAE_CHANNELS: usize = 128;
const VAE_MULT: [usize; 4] = [1, 2, 4, 4];
const VAE_RES_BLOCKS: usize = 2;
const LATENT: usize = 4;

/// CLIP ViT-L/14 text encoder.
const VOCABULARY: usize = 49408;
const POSITIONS: usize = 77;
const WIDTH: usize = 768;
const LAYERS: usize = 12;

/// Every tensor, in the order of the modules.
pub fn tensors() -> Vec<Spec> {
    let mut list = List::default();
    unet(&mut list);
    vae(&mut list);
    clip(&mut list);
    list.0
}

#[derive(Default)]
struct List(Vec<Spec>);

impl List {
    fn push(&mut self, name: String, shape: &[usize], fill: Fill) {
        self.0.push(Spec { name, shape: shape.to_vec(), fill });
    }

    fn norm(&mut self, name: &str, channels: usize) {
        self.push(format!("{name}.weight"), &[channels], Fill::Around(1.0));
        self.push(format!("{name}.bias"), &[channels], Fill::Around(0.0));
    }

    fn matrix(&mut self, name: &str, out: usize, from: usize) {
        self.push(format!("{name}.weight"), &[out, from], Fill::FanIn(from));
    }

    fn linear(&mut self, name: &str, out: usize, from: usize) {
        self.matrix(name, out, from);
        self.push(format!("{name}.bias"), &[out], Fill::Around(0.0));
    }

    /// A convolution with a `side` x `side` kernel.
    fn conv(&mut self, name: &str, out: usize, from: usize, side: usize) {
        self.push(format!("{name}.weight"), &[out, from, side, side], Fill::FanIn(from * side * side));
        self.push(format!("{name}.bias"), &[out], Fill::Around(0.0));
    }
}

fn unet(list: &mut List) {
    let time = 4 * CHANNELS;
    list.linear(&format!("{UNET}.time_embed.0"), time, CHANNELS);
    list.linear(&format!("{UNET}.time_embed.2"), time, time);

    // Widths of what the way down leaves for the way up.
    let mut skips = vec![CHANNELS];
    let mut width = CHANNELS;
    list.conv(&format!("{UNET}.input_blocks.0.0"), CHANNELS, LATENT, 3);
    for (level, mult) in MULT.into_iter().enumerate() {
        for _ in 0..RES_BLOCKS {
            let block = format!("{UNET}.input_blocks.{}", skips.len());
            unet_res(list, &format!("{block}.0"), mult * CHANNELS, width);
            width = mult * CHANNELS;
            if level < ATTENTION_LEVELS {
                spatial_transformer(list, &format!("{block}.1"), width);
            }
            skips.push(width);
        }
        if level + 1 < MULT.len() {
            list.conv(&format!("{UNET}.input_blocks.{}.0.op", skips.len()), width, width, 3);
            skips.push(width);
        }
    }

    unet_res(list, &format!("{UNET}.middle_block.0"), width, width);
    spatial_transformer(list, &format!("{UNET}.middle_block.1"), width);
    unet_res(list, &format!("{UNET}.middle_block.2"), width, width);

    let mut index = 0;
    for (level, mult) in MULT.into_iter().enumerate().rev() {
        for i in 0..=RES_BLOCKS {
            let block = format!("{UNET}.output_blocks.{index}");
            index += 1;
            unet_res(list, &format!("{block}.0"), mult * CHANNELS, width + skips.pop().unwrap_or_default());
            width = mult * CHANNELS;
            let attends = level < ATTENTION_LEVELS;
            if attends {
                spatial_transformer(list, &format!("{block}.1"), width);
            }
            if level > 0 && i == RES_BLOCKS {
                list.conv(&format!("{block}.{}.conv", 1 + usize::from(attends)), width, width, 3);
            }
        }
    }
    list.norm(&format!("{UNET}.out.0"), width);
    list.conv(&format!("{UNET}.out.2"), LATENT, width, 3);
}

fn unet_res(list: &mut List, name: &str, out: usize, from: usize) {
    list.norm(&format!("{name}.in_layers.0"), from);
    list.conv(&format!("{name}.in_layers.2"), out, from, 3);
    list.linear(&format!("{name}.emb_layers.1"), out, 4 * CHANNELS);
    list.norm(&format!("{name}.out_layers.0"), out);
    list.conv(&format!("{name}.out_layers.3"), out, out, 3);
    if out != from {
        list.conv(&format!("{name}.skip_connection"), out, from, 1);
    }
}

fn spatial_transformer(list: &mut List, name: &str, width: usize) {
    list.norm(&format!("{name}.norm"), width);
    list.conv(&format!("{name}.proj_in"), width, width, 1);
    let block = format!("{name}.transformer_blocks.0");
    for (attention, context) in [("attn1", width), ("attn2", CONTEXT)] {
        list.matrix(&format!("{block}.{attention}.to_q"), width, width);
        list.matrix(&format!("{block}.{attention}.to_k"), width, context);
        list.matrix(&format!("{block}.{attention}.to_v"), width, context);
        list.linear(&format!("{block}.{attention}.to_out.0"), width, width);
    }
    list.linear(&format!("{block}.ff.net.0.proj"), 8 * width, width);
    list.linear(&format!("{block}.ff.net.2"), width, 4 * width);
    for norm in ["norm1", "norm2", "norm3"] {
        list.norm(&format!("{block}.{norm}"), width);
    }
    list.conv(&format!("{name}.proj_out"), width, width, 1);
}

fn vae(list: &mut List) {
    let mut width = VAE_CHANNELS;
    list.conv(&format!("{VAE}.encoder.conv_in"), width, 3, 3);
    for (level, mult) in VAE_MULT.into_iter().enumerate() {
        for block in 0..VAE_RES_BLOCKS {
            vae_res(list, &format!("{VAE}.encoder.down.{level}.block.{block}"), mult * VAE_CHANNELS, width);
            width = mult * VAE_CHANNELS;
        }
        if level + 1 < VAE_MULT.len() {
            list.conv(&format!("{VAE}.encoder.down.{level}.downsample.conv"), width, width, 3);
        }
    }
    vae_middle(list, &format!("{VAE}.encoder"), width);
    list.norm(&format!("{VAE}.encoder.norm_out"), width);
    list.conv(&format!("{VAE}.encoder.conv_out"), 2 * LATENT, width, 3);
    list.conv(&format!("{VAE}.quant_conv"), 2 * LATENT, 2 * LATENT, 1);

    list.conv(&format!("{VAE}.post_quant_conv"), LATENT, LATENT, 1);
    list.conv(&format!("{VAE}.decoder.conv_in"), width, LATENT, 3);
    vae_middle(list, &format!("{VAE}.decoder"), width);
    for (level, mult) in VAE_MULT.into_iter().enumerate().rev() {
        for block in 0..=VAE_RES_BLOCKS {
            vae_res(list, &format!("{VAE}.decoder.up.{level}.block.{block}"), mult * VAE_CHANNELS, width);
            width = mult * VAE_CHANNELS;
        }
        if level > 0 {
            list.conv(&format!("{VAE}.decoder.up.{level}.upsample.conv"), width, width, 3);
        }
    }
    list.norm(&format!("{VAE}.decoder.norm_out"), width);
    list.conv(&format!("{VAE}.decoder.conv_out"), 3, width, 3);
}

fn vae_res(list: &mut List, name: &str, out: usize, from: usize) {
    list.norm(&format!("{name}.norm1"), from);
    list.conv(&format!("{name}.conv1"), out, from, 3);
    list.norm(&format!("{name}.norm2"), out);
    list.conv(&format!("{name}.conv2"), out, out, 3);
    if out != from {
        list.conv(&format!("{name}.nin_shortcut"), out, from, 1);
    }
}

fn vae_middle(list: &mut List, name: &str, width: usize) {
    vae_res(list, &format!("{name}.mid.block_1"), width, width);
    list.norm(&format!("{name}.mid.attn_1.norm"), width);
    for part in ["q", "k", "v", "proj_out"] {
        list.conv(&format!("{name}.mid.attn_1.{part}"), width, width, 1);
    }
    vae_res(list, &format!("{name}.mid.block_2"), width, width);
}

fn clip(list: &mut List) {
    let embeddings = format!("{CLIP}.embeddings");
    list.push(format!("{embeddings}.token_embedding.weight"), &[VOCABULARY, WIDTH], Fill::Around(0.0));
    list.push(format!("{embeddings}.position_embedding.weight"), &[POSITIONS, WIDTH], Fill::Around(0.0));
    list.push(format!("{embeddings}.position_ids"), &[1, POSITIONS], Fill::Count);
    for layer in 0..LAYERS {
        let layer = format!("{CLIP}.encoder.layers.{layer}");
        for part in ["q_proj", "k_proj", "v_proj", "out_proj"] {
            list.linear(&format!("{layer}.self_attn.{part}"), WIDTH, WIDTH);
        }
        list.norm(&format!("{layer}.layer_norm1"), WIDTH);
        list.linear(&format!("{layer}.mlp.fc1"), 4 * WIDTH, WIDTH);
        list.linear(&format!("{layer}.mlp.fc2"), WIDTH, 4 * WIDTH);
        list.norm(&format!("{layer}.layer_norm2"), WIDTH);
    }
    list.norm(&format!("{CLIP}.final_layer_norm"), WIDTH);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Tensors and parameters of diffusers' `UNet2DConditionModel` and `AutoencoderKL` and of transformers'
    /// `CLIPTextModel` in the SD 1.5 configuration.
    #[test]
    fn sizes_are_those_of_the_reference() {
        let all = tensors();
        for (prefix, tensors, parameters) in
            [(UNET, 686, 859_520_964), (VAE, 248, 83_653_863), (CLIP, 196, 123_060_480)]
        {
            let part = || all.iter().filter(|s| s.name.starts_with(prefix) && s.fill != Fill::Count);
            assert_eq!(part().count(), tensors, "{prefix}");
            assert_eq!(part().map(|s| s.shape.iter().product::<usize>()).sum::<usize>(), parameters, "{prefix}");
        }
        let names: BTreeSet<&str> = all.iter().map(|s| s.name.as_str()).collect();
        assert_eq!(names.len(), all.len());
    }
}
