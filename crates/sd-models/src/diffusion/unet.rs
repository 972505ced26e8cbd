//! The UNet of latent diffusion (Rombach et al. 2022; `UNetModel` of CompVis, `UNet2DConditionModel` of diffusers).
//! Golden values: `oracle/unet.py`.
//! `b` images, `c` channels, `[h, w]` latent size, `t` context tokens, `e` channels of the time embedding.
//!
//! Which modules a block has is read off their weights, so pruned networks need no description of their own.

use sd_core::{AttentionOptions, Conv2dOptions, DType, Error, Graph, Result, Scope, Var};

use super::{Evaluation, Facts, Given, Network, conv};
use crate::family::Joined;

/// Groups of every group norm, and the two epsilons in use.
const GROUPS: usize = 32;
const EPS: f32 = 1e-5;
const EPS_ATTENTION: f32 = 1e-6;
/// The longest period of the time embedding.
const MAX_PERIOD: f32 = 10_000.0;

/// How channels are split into heads. No tensor tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Heads {
    /// So many heads, whatever the width: 8 in SD 1.x (`num_heads` in CompVis' `v1-inference.yaml`).
    Count(usize),
    /// Heads of so many channels: 64 in SD 2.x and SDXL (`num_head_channels`).
    Width(usize),
}

impl Heads {
    fn count(self, channels: usize) -> usize {
        match self {
            Heads::Count(n) => n,
            Heads::Width(d) => channels.checked_div(d).unwrap_or(0),
        }
    }
}

/// Sizes, read off the weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Channels of the latent with what is joined to it: 4, or 9 and 8 in inpainting and editing networks.
    pub in_channels: usize,
    /// Channels of the prediction.
    pub out_channels: usize,
    /// Channels of the first level, and the width of the sinusoid.
    pub channels: usize,
    /// Channels of a context token.
    pub context: usize,
    /// Channels of the vector that conditions all positions alike, where there is one.
    pub vector: Option<usize>,
    /// Entries of `input_blocks` and of `output_blocks`.
    pub blocks: [usize; 2],
    /// How often the size is halved.
    pub halvings: usize,
    /// Given by the family.
    pub heads: Heads,
}

impl Config {
    /// The sizes of the network at `w`.
    ///
    /// # Errors
    /// A tensor that shows a size is missing or has another number of axes.
    pub fn detect(w: &Scope, heads: Heads) -> Result<Config> {
        let [channels, in_channels, _, _] = w.sub("input_blocks.0.0").dims("weight")?;
        let [out_channels, _, _, _] = w.sub("out.2").dims("weight")?;
        let blocks = [w.count("input_blocks")?, w.count("output_blocks")?];
        let (mut halvings, mut context) = (0, None);
        for i in 0..blocks[0] {
            let w = w.at("input_blocks", i);
            halvings += usize::from(w.contains("0.op"));
            let attention = w.sub("1.transformer_blocks.0.attn2");
            if context.is_none() && attention.contains("to_k") {
                let [_, k] = attention.dims("to_k.weight")?;
                context = Some(k);
            }
        }
        let context = context
            .ok_or_else(|| Error::unsupported("the network has no cross-attention, so no prompt can steer it"))?;
        let vector = match w.contains("label_emb") {
            true => Some(w.sub("label_emb.0.0").dims("weight").map(|[_, k]| k)?),
            false => None,
        };
        let cfg = Config { in_channels, out_channels, channels, context, vector, blocks, halvings, heads };
        cfg.joined().map(|_| cfg)
    }

    /// What is joined to the latent, of which as much is predicted as there is.
    fn joined(&self) -> Result<Joined> {
        let (n, out) = (self.in_channels, self.out_channels);
        match n.checked_sub(out) {
            Some(0) => Ok(Joined::None),
            Some(k) if k == Joined::Inpaint.channels(out) => Ok(Joined::Inpaint),
            Some(k) if k == Joined::Picture.channels(out) => Ok(Joined::Picture),
            _ => Err(Error::unsupported(format!("a UNet that reads {n} channels and predicts {out}"))),
        }
    }

    /// Sides of a latent are multiples of this.
    fn multiple(&self) -> usize {
        1usize.checked_shl(self.halvings as u32).unwrap_or(0)
    }
}

impl Network for Config {
    fn facts(&self) -> Facts {
        Facts {
            latent: self.out_channels,
            joined: self.joined().unwrap_or(Joined::None),
            context: self.context,
            vector: self.vector,
            guidance: false,
            references: false,
            blocks: 0,
            multiple: self.multiple(),
            control: Some(self.heads),
        }
    }

    fn build(&self, g: &Graph, w: &Scope, given: &Given, e: &Evaluation) -> Result<Var> {
        let x = g.concat(&[given.x].into_iter().chain(given.joined).collect::<Vec<_>>(), 1)?;
        let &Given { timesteps, context, vector, .. } = given;
        build(g, w, self, Inputs { x, timesteps, context, vector, circular: e.circular, control: e.control })
    }
}

/// What a network reads.
#[derive(Debug, Clone, Copy)]
pub struct Inputs {
    /// `[b, in, h, w]`.
    pub x: Var,
    /// `[b]`.
    pub timesteps: Var,
    /// `[b, t, k]`.
    pub context: Var,
    /// `[b, v]`, where the network has one.
    pub vector: Option<Var>,
    /// Whether the picture repeats down and across.
    pub circular: [bool; 2],
    /// Whether what ControlNets add is an input, `control.0`, … for the input blocks and the last for the middle.
    pub control: bool,
}

/// The prediction `[b, out, h, w]`.
///
/// # Errors
/// `h` or `w` cannot be halved as often as the network does it, or weights do not fit.
pub fn build(g: &Graph, w: &Scope, cfg: &Config, inputs: Inputs) -> Result<Var> {
    let Inputs { mut x, timesteps, context, vector, circular, control } = inputs;
    let [_, _, height, width] = g.dims(x)?;
    let step = cfg.multiple();
    if step == 0 || !height.is_multiple_of(step) || !width.is_multiple_of(step) {
        return Err(Error::shape(format!("latent {height}x{width}: both must be multiples of {step}")));
    }
    let time = embed(g, w, cfg.channels, timesteps, vector)?; // [b, e]
    let cond = Cond { time, context, heads: cfg.heads, circular };
    g.keep(&[cond.time]);
    let controlled = |i: usize, x: Var| match control {
        true => g.add(x, g.input(&format!("control.{i}"), g.shape(x).dims(), DType::F32)?),
        false => Ok(x),
    };

    let mut skips = Vec::new();
    for i in 0..cfg.blocks[0] {
        let w = w.at("input_blocks", i);
        x = block(g, &w, x, &cond)?;
        skips.push(x);
        g.cut(&w, &live(x, &skips));
    }
    if w.contains("middle_block") {
        let w = w.sub("middle_block");
        x = block(g, &w, x, &cond)?;
        g.cut(&w, &live(x, &skips));
    }
    x = controlled(cfg.blocks[0], x)?;
    for i in 0..cfg.blocks[1] {
        let w = w.at("output_blocks", i);
        let skip = skips.pop().ok_or_else(|| {
            Error::shape(format!("{} has no input block to join: {} input blocks", w.path(), cfg.blocks[0]))
        })?;
        let skip = controlled(skips.len(), skip)?;
        x = block(g, &w, g.concat(&[x, skip], 1)?, &cond)?;
        g.cut(&w, &live(x, &skips));
    }
    let w = w.sub("out");
    let x = g.silu(g.group_norm(&w.norm("0")?, x, GROUPS, EPS)?)?;
    g.label(x, &format!("{}.1", w.path()));
    conv(g, &w.conv2d("2")?, x, 1, circular)
}

/// Values every block reads. They stay live across all cuts.
pub(crate) struct Cond {
    /// What [`embed`] gives, `[b, e]`.
    pub(crate) time: Var,
    /// `[b, t, k]`.
    pub(crate) context: Var,
    pub(crate) heads: Heads,
    pub(crate) circular: [bool; 2],
}

fn live(x: Var, skips: &[Var]) -> Vec<Var> {
    skips.iter().copied().chain([x]).collect()
}

/// The time and, where there is one, the vector, after the SiLU that every block begins with: `[b, e]`. `channels` is
/// the width of the sinusoid.
pub(crate) fn embed(g: &Graph, w: &Scope, channels: usize, timesteps: Var, vector: Option<Var>) -> Result<Var> {
    let mut time = embed_time(g, &w.sub("time_embed"), channels, timesteps)?;
    if let Some(vector) = vector {
        time = g.add(time, embed_vector(g, &w.sub("label_emb"), vector)?)?;
    }
    g.silu(time)
}

fn embed_time(g: &Graph, w: &Scope, channels: usize, timesteps: Var) -> Result<Var> {
    let t = g.timestep_embedding(timesteps, channels, MAX_PERIOD)?; // [b, c]
    let t = g.silu(g.linear(&w.linear("0")?, t)?)?;
    let t = g.linear(&w.linear("2")?, t)?; // [b, e]
    g.label(t, w.path());
    Ok(t)
}

/// SDXL's pooled text with the picture's sizes, `[b, v]`, as `[b, e]`.
fn embed_vector(g: &Graph, w: &Scope, vector: Var) -> Result<Var> {
    let y = g.silu(g.linear(&w.linear("0.0")?, vector)?)?;
    let y = g.linear(&w.linear("0.2")?, y)?;
    g.label(y, w.path());
    Ok(y)
}

/// The modules of a block in order, each known by its weights.
pub(crate) fn block(g: &Graph, w: &Scope, mut x: Var, cond: &Cond) -> Result<Var> {
    for i in 0..w.count("")? {
        let w = w.sub(&i.to_string());
        x = if w.contains("in_layers") {
            resnet(g, &w, x, cond.time, cond.circular)?
        } else if w.contains("transformer_blocks") {
            transformer(g, &w, cond.heads, x, cond.context)?
        } else if w.contains("op") {
            conv(g, &w.conv2d("op")?, x, 2, cond.circular)?
        } else if w.contains("conv") {
            conv(g, &w.conv2d("conv")?, g.upsample_nearest(x, 2)?, 1, cond.circular)?
        } else {
            conv(g, &w.conv2d("")?, x, 1, cond.circular)?
        };
        g.label(x, w.path());
    }
    Ok(x)
}

/// `x [b, c, h, w]` gives `[b, n, h, w]`. `time` has had its SiLU.
fn resnet(g: &Graph, w: &Scope, x: Var, time: Var, circular: [bool; 2]) -> Result<Var> {
    let y = g.silu(g.group_norm(&w.norm("in_layers.0")?, x, GROUPS, EPS)?)?;
    let y = conv(g, &w.conv2d("in_layers.2")?, y, 1, circular)?; // [b, n, h, w]

    let t = g.linear(&w.linear("emb_layers.1")?, time)?; // [b, n]
    let [b, n] = g.dims(t)?;
    let y = g.add(y, g.reshape(t, &[b, n, 1, 1])?)?;

    let y = g.silu(g.group_norm(&w.norm("out_layers.0")?, y, GROUPS, EPS)?)?;
    let y = conv(g, &w.conv2d("out_layers.3")?, y, 1, circular)?;
    let x = if w.contains("skip_connection") {
        g.conv2d(&w.conv2d("skip_connection")?, x, Conv2dOptions::default())?
    } else {
        x
    };
    g.add(x, y)
}

/// Transformer layers over the positions of `x [b, c, h, w]`. The projections around them are linear layers, stored
/// as matrices or as 1×1 convolutions.
pub(crate) fn transformer(g: &Graph, w: &Scope, heads: Heads, x: Var, context: Var) -> Result<Var> {
    let [_, _, height, width] = g.dims(x)?;
    let y = g.group_norm(&w.norm("norm")?, x, GROUPS, EPS_ATTENTION)?;
    let mut y = g.linear(&w.linear("proj_in")?, g.to_tokens(y)?)?; // [b, h w, c]
    for i in 0..w.count("transformer_blocks")? {
        y = transformer_layer(g, &w.at("transformer_blocks", i), heads, y, context)?;
    }
    let y = g.linear(&w.linear("proj_out")?, y)?;
    g.add(x, g.to_image(y, height, width)?)
}

fn transformer_layer(g: &Graph, w: &Scope, heads: Heads, x: Var, context: Var) -> Result<Var> {
    let y = g.layer_norm(&w.norm("norm1")?, x, EPS)?;
    let x = g.add(x, attend(g, &w.sub("attn1"), heads, y, y)?)?;
    let y = g.layer_norm(&w.norm("norm2")?, x, EPS)?;
    let x = g.add(x, attend(g, &w.sub("attn2"), heads, y, context)?)?;
    let y = g.layer_norm(&w.norm("norm3")?, x, EPS)?;
    let x = g.add(x, feed_forward(g, &w.sub("ff"), y)?)?;
    g.label(x, w.path());
    Ok(x)
}

fn attend(g: &Graph, w: &Scope, heads: Heads, x: Var, context: Var) -> Result<Var> {
    let q = g.linear(&w.linear_no_bias("to_q")?, x)?; // [b, h w, c]
    let k = g.linear(&w.linear_no_bias("to_k")?, context)?; // [b, t, c]
    let v = g.linear(&w.linear_no_bias("to_v")?, context)?;
    let heads = heads.count(g.shape(q).last());
    let (q, k, v) = (g.split_heads(q, heads)?, g.split_heads(k, heads)?, g.split_heads(v, heads)?);
    let y = g.merge_heads(g.attention(q, k, v, AttentionOptions::default())?)?;
    let y = g.linear(&w.linear("to_out.0")?, y)?;
    g.label(y, w.path());
    Ok(y)
}

/// GEGLU (Shazeer 2020): half of the first layer's output gates the other half.
fn feed_forward(g: &Graph, w: &Scope, x: Var) -> Result<Var> {
    let [y, gate] = g.chunk(g.linear(&w.linear("net.0.proj")?, x)?)?;
    let y = g.linear(&w.linear("net.2")?, g.mul(y, g.gelu(gate)?)?)?;
    g.label(y, w.path());
    Ok(y)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::component::Component;
    use crate::names::Part;
    use crate::testing::{Case, Fixture, check, check_circular, check_cuts};

    const HEADS: Heads = Heads::Count(8);

    /// A block's weights are put where a network has such a block, so that its names are translated as there.
    fn check_block(name: &str, place: &str, build: impl Fn(&Graph, &Scope, &[Var]) -> Result<Var>) {
        let fixture = format!("unet_block_{name}");
        let weights = Fixture::open(&fixture).weights(|n| format!("{place}.{n}")).shared();
        let source = match Component::split(&weights, Some(Part::Diffusion)).as_slice() {
            [part] if place.starts_with("down_blocks") => part.source(),
            _ => weights,
        };
        let prefix = if place.starts_with("down_blocks") { "input_blocks.1.0." } else { "x.0." };
        let build = |g: &Graph, w: &Scope, inputs: &[Var]| Ok(vec![("y", build(g, w, inputs)?)]);
        check(&Case { fixture: &fixture, source, prefix, build: &build });
    }

    #[test]
    fn residual_blocks_agree_with_diffusers() {
        // Inputs come in the order of their names: time, x.
        let build = |g: &Graph, w: &Scope, inputs: &[Var]| {
            resnet(g, &w.sub("input_blocks.1.0"), inputs[1], g.silu(inputs[0])?, [false; 2])
        };
        check_block("resnet", "down_blocks.0.resnets.0", build);
        check_block("resnet_same", "down_blocks.0.resnets.0", build);
    }

    #[test]
    fn transformers_agree_with_diffusers() {
        let build =
            |g: &Graph, w: &Scope, inputs: &[Var]| transformer(g, &w.sub("x.0"), HEADS, inputs[1], inputs[0]);
        check_block("transformer", "x.0", build);
    }

    #[test]
    fn resampling_agrees_with_diffusers() {
        let build = |g: &Graph, w: &Scope, inputs: &[Var]| {
            let cond = Cond { time: inputs[0], context: inputs[0], heads: HEADS, circular: [false; 2] };
            block(g, &w.sub("x"), inputs[0], &cond)
        };
        check_block("upsample", "x.0", build);
        let down = Fixture::open("unet_block_downsample").weights(|n| format!("x.0.{}", n.replace("conv", "op")));
        let build = |g: &Graph, w: &Scope, inputs: &[Var]| Ok(vec![("y", build(g, w, inputs)?)]);
        let case = Case { fixture: "unet_block_downsample", source: down.shared(), prefix: "", build: &build };
        check(&case);
    }

    /// Values of SDXL's sizes.
    const SINUSOID: usize = 256;

    fn whole(fixture: &str, heads: Heads, run: fn(&Case)) {
        whole_of(fixture, heads, [false; 2], run);
    }

    fn whole_of(fixture: &str, heads: Heads, circular: [bool; 2], run: fn(&Case)) {
        let weights = Fixture::open(fixture).weights(str::to_owned).shared();
        let [part] = Component::split(&weights, Some(Part::Diffusion)).try_into().ok().unwrap();
        let network = |g: &Graph, w: &Scope, inputs: &[Var]| {
            let cfg = Config::detect(w, heads)?;
            // Inputs come in the order of their names.
            let inputs = match *inputs {
                [context, x, timesteps] => Inputs { x, timesteps, context, vector: None, circular, control: false },
                [context, pooled, x, numbers, timesteps] => {
                    let [b, n] = g.dims(numbers)?;
                    let numbers = g.timestep_embedding(g.reshape(numbers, &[b * n])?, SINUSOID, MAX_PERIOD)?;
                    let vector = g.concat(&[pooled, g.reshape(numbers, &[b, n * SINUSOID])?], 1)?;
                    assert_eq!(cfg.vector, Some(g.shape(vector).last()));
                    Inputs { x, timesteps, context, vector: Some(vector), circular, control: false }
                }
                _ => panic!("{inputs:?}"),
            };
            Ok(vec![("sample", build(g, w, &cfg, inputs)?)])
        };
        run(&Case { fixture, source: part.source(), prefix: "", build: &network });
        assert_eq!(part.scope().source().names().len(), part.tensors());
    }

    const NARROW: Heads = Heads::Width(64);

    #[test]
    fn sd1_agrees_with_diffusers() {
        whole("unet_sd1", HEADS, check);
        whole("unet_sd1_batch", HEADS, check);
        whole("unet_sd1_odd", HEADS, check);
    }

    #[test]
    fn sd2_agrees_with_diffusers() {
        whole("unet_sd2", NARROW, check);
        whole("unet_sd2_inpaint", NARROW, check);
    }

    #[test]
    fn sdxl_agrees_with_diffusers() {
        for fixture in ["unet_sdxl", "unet_sdxl_batch", "unet_sdxl_inpaint", "unet_sdxl_refiner"] {
            whole(fixture, NARROW, check);
        }
    }

    #[test]
    fn pruned_sdxl_agrees_with_diffusers() {
        whole("unet_ssd1b", NARROW, check);
        whole("unet_vega", NARROW, check);
    }

    #[test]
    fn cuts_change_nothing() {
        whole("unet_sd1_odd", HEADS, check_cuts);
        whole("unet_sdxl_batch", NARROW, check_cuts);
    }

    #[test]
    fn predictions_repeat_without_a_seam() {
        whole_of("unet_sd1_odd", HEADS, [true; 2], |c| check_circular(c, "sample", [0, 8], |by| by));
        whole_of("unet_sd1", HEADS, [true; 2], |c| check_circular(c, "sample", [8, 8], |by| by));
    }

    #[test]
    fn sizes_are_read_off_the_weights() {
        let weights = Fixture::open("unet_sd1").weights(str::to_owned).shared();
        let [part] = Component::split(&weights, Some(Part::Diffusion)).try_into().ok().unwrap();
        let w = part.scope();
        let cfg = Config::detect(w, HEADS).unwrap();
        let want = Config {
            in_channels: 4,
            out_channels: 4,
            channels: 32,
            context: 64,
            vector: None,
            blocks: [12, 12],
            halvings: 3,
            heads: HEADS,
        };
        assert_eq!(cfg, want);
        let g = Graph::new();
        let input = |name, dims: &[usize]| g.input(name, dims, DType::F32).unwrap();
        let (t, c) = (input("t", &[1]), input("c", &[1, 77, 64]));
        let inputs = |x| Inputs { x, timesteps: t, context: c, vector: None, circular: [false; 2], control: false };
        let e = build(&g, w, &cfg, inputs(input("x", &[1, 4, 12, 16]))).unwrap_err().to_string();
        assert_eq!(e, "latent 12x16: both must be multiples of 8");
        build(&g, w, &cfg, inputs(input("y", &[1, 4, 8, 16]))).unwrap();
        assert_eq!(w.unused(), Vec::<String>::new());
    }
}
