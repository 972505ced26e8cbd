//! The KL autoencoder of latent diffusion (Rombach et al. 2022; `AutoencoderKL` of CompVis and diffusers).
//! Golden values: `oracle/vae.py`.
//! `b` pictures, `z` latent channels, `c` channels; a picture of `[H, W]` has a latent of `[H / f, W / f]`.

use sd_core::{AttentionOptions, Conv2dOptions, Error, Graph, Result, Scope, Var};

use crate::diffusion::{conv, pad};

// Layers that read values no norm has bounded are wide: in SDXL's autoencoder these leave the range of f16.

pub(super) const GROUPS: usize = 32;
pub(super) const EPS: f32 = 1e-6;

/// Sizes, read off the weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// `z`.
    pub latent: usize,
    /// Entries of `decoder.up`; each but the last doubles the size.
    pub levels: usize,
}

impl Config {
    /// The sizes of the autoencoder at `w`, which holds at least `decoder`.
    ///
    /// # Errors
    /// A tensor that shows a size is missing or has another number of axes.
    pub fn detect(w: &Scope) -> Result<Config> {
        let w = w.sub("decoder");
        let [_, latent, _, _] = w.dims("conv_in.weight")?;
        Ok(Config { latent, levels: w.count("up")? })
    }

    /// Picture pixels per latent value in each axis, `f`.
    pub fn compression(&self) -> usize {
        1usize.checked_shl(self.levels.saturating_sub(1) as u32).unwrap_or(usize::MAX)
    }
}

/// Pictures `[b, 3, f h, f w]`, about -1 to 1, of `latent [b, z, h, w]` in the autoencoder's own scale. They repeat without
/// a seam down and across as `circular` says.
///
/// # Errors
/// Weights do not fit.
pub fn decode(g: &Graph, w: &Scope, cfg: &Config, latent: Var, circular: [bool; 2]) -> Result<Var> {
    let mut x = decode_middle(g, w, latent, circular)?;
    let w = w.sub("decoder");
    for i in (0..cfg.levels).rev() {
        let w = w.at("up", i);
        x = blocks(g, &w, x, circular)?;
        if w.contains("upsample") {
            let w = w.sub("upsample");
            x = conv(g, &w.conv2d("conv")?.wide(), g.upsample_nearest(x, 2)?, 1, circular)?;
            g.label(x, w.path());
            g.cut(&w, &[x]);
        }
    }
    let x = g.silu(g.group_norm(&w.norm("norm_out")?, x, GROUPS, EPS)?)?;
    conv(g, &w.conv2d("conv_out")?, x, 1, circular)
}

/// Decoding up to the first level.
pub(super) fn decode_middle(g: &Graph, w: &Scope, latent: Var, circular: [bool; 2]) -> Result<Var> {
    let x = quant(g, w, "post_quant_conv", latent)?;
    let w = w.sub("decoder");
    let x = conv(g, &w.conv2d("conv_in")?, x, 1, circular)?;
    middle(g, &w.sub("mid"), x, circular)
}

/// Mean and logarithm of the variance, `[b, 2 z, H / f, W / f]`, of the latents of `image [b, 3, H, W]`, which runs
/// from -1 to 1 and repeats down and across as `circular` says.
///
/// # Errors
/// A side is no multiple of `f`, or weights do not fit.
pub fn encode(g: &Graph, w: &Scope, cfg: &Config, image: Var, circular: [bool; 2]) -> Result<Var> {
    let [_, _, height, width] = g.dims(image)?;
    let f = cfg.compression();
    if !height.is_multiple_of(f) || !width.is_multiple_of(f) {
        return Err(Error::shape(format!("picture {width}x{height}: both sides must be multiples of {f}")));
    }
    let root = w;
    let w = root.sub("encoder");
    let mut x = conv(g, &w.conv2d("conv_in")?, image, 1, circular)?;
    for i in 0..w.count("down")? {
        let w = w.at("down", i);
        x = blocks(g, &w, x, circular)?;
        if w.contains("downsample") {
            let w = w.sub("downsample");
            // Only below and to the right.
            x = pad(g, x, [0, 1], [0, 1], circular)?;
            x = g.conv2d(&w.conv2d("conv")?.wide(), x, Conv2dOptions { stride: 2, ..Conv2dOptions::default() })?;
            g.label(x, w.path());
            g.cut(&w, &[x]);
        }
    }
    encode_end(g, root, x, circular)
}

/// Encoding after the last level.
pub(super) fn encode_end(g: &Graph, root: &Scope, x: Var, circular: [bool; 2]) -> Result<Var> {
    let w = root.sub("encoder");
    let x = middle(g, &w.sub("mid"), x, circular)?;
    let x = g.silu(g.group_norm(&w.norm("norm_out")?, x, GROUPS, EPS)?)?;
    let x = conv(g, &w.conv2d("conv_out")?, x, 1, circular)?;
    quant(g, root, "quant_conv", x)
}

/// A 1×1 convolution that some autoencoders lack.
fn quant(g: &Graph, w: &Scope, name: &str, x: Var) -> Result<Var> {
    if w.contains(name) { g.conv2d(&w.conv2d(name)?, x, Conv2dOptions::default()) } else { Ok(x) }
}

fn middle(g: &Graph, w: &Scope, x: Var, circular: [bool; 2]) -> Result<Var> {
    let x = resnet(g, &w.sub("block_1"), x, circular)?;
    g.cut(&w.sub("block_1"), &[x]);
    let x = attend(g, &w.sub("attn_1"), x)?;
    g.cut(&w.sub("attn_1"), &[x]);
    let x = resnet(g, &w.sub("block_2"), x, circular)?;
    g.cut(&w.sub("block_2"), &[x]);
    Ok(x)
}

pub(super) fn blocks(g: &Graph, w: &Scope, mut x: Var, circular: [bool; 2]) -> Result<Var> {
    for i in 0..w.count("block")? {
        let w = w.at("block", i);
        x = resnet(g, &w, x, circular)?;
        g.cut(&w, &[x]);
    }
    Ok(x)
}

fn resnet(g: &Graph, w: &Scope, x: Var, circular: [bool; 2]) -> Result<Var> {
    let y = g.silu(g.group_norm(&w.norm("norm1")?, x, GROUPS, EPS)?)?;
    let y = conv(g, &w.conv2d("conv1")?, y, 1, circular)?;
    let y = g.silu(g.group_norm(&w.norm("norm2")?, y, GROUPS, EPS)?)?;
    let y = conv(g, &w.conv2d("conv2")?, y, 1, circular)?;
    let x = g.add(shortcut(g, w, x)?, y)?;
    g.label(x, w.path());
    Ok(x)
}

/// What a residual block adds to: its input, with as many channels as its result.
pub(super) fn shortcut(g: &Graph, w: &Scope, x: Var) -> Result<Var> {
    if w.contains("nin_shortcut") {
        g.conv2d(&w.conv2d("nin_shortcut")?.wide(), x, Conv2dOptions::default())
    } else {
        Ok(x)
    }
}

/// One head over all positions. The projections are matrices or 1×1 convolutions.
fn attend(g: &Graph, w: &Scope, x: Var) -> Result<Var> {
    let [_, _, height, width] = g.dims(x)?;
    let y = g.to_tokens(g.group_norm(&w.norm("norm")?, x, GROUPS, EPS)?)?; // [b, h w, c]
    let q = g.split_heads(g.linear(&w.linear("q")?, y)?, 1)?;
    let k = g.split_heads(g.linear(&w.linear("k")?, y)?, 1)?;
    let v = g.split_heads(g.linear(&w.linear("v")?, y)?, 1)?;
    let y = g.merge_heads(g.attention(q, k, v, AttentionOptions::default())?)?;
    let y = g.linear(&w.linear("proj_out")?, y)?;
    let x = g.add(x, g.to_image(y, height, width)?)?;
    g.label(x, w.path());
    Ok(x)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::component::Component;
    use crate::names::Part;
    use crate::testing::{Case, Fixture, Tensors, check, check_circular, check_cuts, real_names};

    fn case(fixture: &str, run: fn(&Case)) {
        case_of(fixture, [false; 2], run);
    }

    fn case_of(fixture: &str, circular: [bool; 2], run: fn(&Case)) {
        let weights = Fixture::open(fixture).weights(str::to_owned).shared();
        let [part] = Component::split(&weights, Some(Part::Autoencoder)).try_into().ok().unwrap();
        let build = |g: &Graph, w: &Scope, inputs: &[Var]| {
            if w.contains("decoder") {
                return Ok(vec![("image", decode(g, w, &Config::detect(w)?, inputs[0], circular)?)]);
            }
            let [moments, ..] = w.sub("encoder.conv_out").dims::<4>("weight")?;
            let latent = moments / 2;
            let moments = encode(g, w, &Config { latent, levels: 4 }, inputs[0], circular)?;
            Ok(vec![("mean", g.slice(moments, 1, 0, latent)?), ("logvar", g.slice(moments, 1, latent, latent)?)])
        };
        run(&Case { fixture, source: part.source(), prefix: "", build: &build });
    }

    #[test]
    fn decoding_agrees_with_diffusers() {
        case("vae_decoder", check);
        case("vae_decoder_large", check);
        case("flux_vae_decoder", check);
    }

    #[test]
    fn encoding_agrees_with_diffusers() {
        case("vae_encoder", check);
        case("vae_encoder_large", check);
        case("flux_vae_encoder", check);
    }

    #[test]
    fn cuts_change_nothing() {
        case("vae_decoder", check_cuts);
        case("vae_encoder", check_cuts);
    }

    #[test]
    fn pictures_repeat_without_a_seam() {
        case_of("vae_decoder", [true; 2], |c| check_circular(c, "latent", [1, 2], |by| by.map(|n| 8 * n)));
        case_of("vae_encoder", [true; 2], |c| check_circular(c, "image", [8, 16], |by| by.map(|n| n / 8)));
        case_of("vae_decoder", [false, true], |c| check_circular(c, "latent", [0, 1], |by| by.map(|n| 8 * n)));
    }

    #[test]
    fn sizes_are_read_off_the_weights() {
        let weights = Fixture::open("vae_decoder").weights(str::to_owned).shared();
        let [part] = Component::split(&weights, Some(Part::Autoencoder)).try_into().ok().unwrap();
        let cfg = Config::detect(part.scope()).unwrap();
        assert_eq!((cfg.latent, cfg.levels, cfg.compression()), (4, 4, 8));
        let g = Graph::new();
        let latent = g.input("latent", &[1, 4, 1, 2], sd_core::DType::F32).unwrap();
        let image = decode(&g, part.scope(), &cfg, latent, [false; 2]).unwrap();
        assert_eq!(g.shape(image).dims(), [1, 3, 8, 16]);
        assert_eq!(part.scope().unused(), Vec::<String>::new());
    }

    #[test]
    fn at_real_size_every_tensor_is_used_and_none_is_missing() {
        for (set, latent) in [("vae_sd", 4), ("vae_flux", 16)] {
            let rows = real_names(set);
            let original: Vec<(String, Vec<usize>)> = rows.iter().map(|r| (r.0.clone(), r.1.clone())).collect();
            let diffusers = rows.into_iter().flat_map(|r| r.3).collect();
            for names in [original, diffusers] {
                let weights = Tensors::of_shapes(names).shared();
                let [part] = Component::split(&weights, None).try_into().ok().unwrap();
                let (g, w) = (Graph::new(), part.scope());
                let cfg = Config::detect(w).unwrap();
                assert_eq!((cfg.latent, cfg.compression()), (latent, 8));
                let input = |name, dims: &[usize]| g.input(name, dims, sd_core::DType::F32).unwrap();
                decode(&g, w, &cfg, input("latent", &[1, latent, 128, 128]), [false; 2]).unwrap();
                let moments = encode(&g, w, &cfg, input("image", &[1, 3, 1024, 1024]), [true; 2]).unwrap();
                assert_eq!(g.shape(moments).dims(), [1, 2 * latent, 128, 128]);
                assert_eq!(w.unused(), Vec::<String>::new());
            }
        }
    }

    #[test]
    fn decoding_holds_two_of_its_largest_values() {
        let names = real_names("vae_sd").into_iter().map(|r| (r.0, r.1)).collect();
        let weights = Tensors::of_shapes(names).shared();
        let [part] = Component::split(&weights, None).try_into().ok().unwrap();
        let (g, w) = (Graph::new(), part.scope());
        let cfg = Config::detect(w).unwrap();
        let latent = g.input("latent", &[1, 4, 64, 64], sd_core::DType::F32).unwrap();
        let program = g.finish(&[decode(&g, w, &cfg, latent, [false; 2]).unwrap()]).unwrap();
        let options = sd_core::RunnerOptions { cuts: sd_core::Cuts::None, ..sd_core::RunnerOptions::default() };
        let mut runner = sd_core::Runner::new(sd_core::Device::cpu().unwrap(), part.source(), options).unwrap();
        let workspace = runner.measure(&program).unwrap()[0].workspace;
        // 256 channels of 512 by 512, enlarged and convolved, and a transformed kernel.
        let largest = 256 * 512 * 512 * 4;
        assert!(workspace < 2 * largest + 16_000_000, "{workspace} bytes");
    }
}
