//! Flux.1, a transformer over picture and text tokens (`Flux` of Black Forest Labs, `FluxTransformer2DModel` of
//! diffusers). Golden values: `oracle/flux.py`.
//! `b` pictures, `t` picture tokens, `n` text tokens, `c` channels, `h` heads of `d`; a token is a patch of 2×2 latent
//! values.
//!
//! Double blocks hold picture and text apart and let them attend to each other; single blocks treat them as one.

use sd_core::{AttentionOptions, DType, Error, Graph, Result, RopeLayout, Scope, Tensor, Var, scope::Norm};

use super::patches::{PATCH, pack, positions, unpack};
use super::{Evaluation, Facts, Given, Network, Stretch, may_skip, rope};
use crate::family::Joined;

/// Of every norm.
const EPS: f32 = 1e-6;
/// The longest period of the time embedding.
const MAX_PERIOD: f32 = 10_000.0;
/// Timesteps and guidance are multiplied by this before they are embedded (`time_factor` in `layers.py`).
const TIME_FACTOR: f32 = 1000.0;
/// The base of the rotary frequencies (`theta` in `util.py`).
const THETA: f64 = 10_000.0;

/// Sizes, read off the weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Channels of a token: 64 of the latent, and what is joined to it in Fill (384) and control (128) networks.
    pub in_channels: usize,
    /// Channels of a predicted token.
    pub out_channels: usize,
    /// `c`.
    pub hidden: usize,
    /// `h`.
    pub heads: usize,
    /// Channels between the two layers of a perceptron.
    pub mlp: usize,
    /// Channels of a text token.
    pub context: usize,
    /// Channels of the pooled text.
    pub pooled: usize,
    /// Width of the sinusoids of time and guidance.
    pub sinusoid: usize,
    /// Whether the strength of guidance is an input.
    pub guidance: bool,
    /// How many double and how many single blocks there are.
    pub blocks: [usize; 2],
    /// Channels of a head that turn with the index of the picture, its row and its column.
    pub axes: [usize; 3],
}

impl Config {
    /// The sizes of the network at `w`.
    ///
    /// # Errors
    /// A tensor that shows a size is missing or has another number of axes, or heads have a width for which no rotary
    /// axes are known.
    pub fn detect(w: &Scope) -> Result<Config> {
        let [hidden, in_channels] = w.sub("img_in").dims("weight")?;
        let [_, context] = w.sub("txt_in").dims("weight")?;
        let [_, sinusoid] = w.sub("time_in.in_layer").dims("weight")?;
        let [_, pooled] = w.sub("vector_in.in_layer").dims("weight")?;
        let [mlp, _] = w.sub("double_blocks.0.img_mlp.0").dims("weight")?;
        let [d] = w.sub("double_blocks.0.img_attn.norm.query_norm").dims("scale")?;
        let [out_channels, _] = w.sub("final_layer.linear").dims("weight")?;
        // `axes_dim` in `util.py`.
        let axes = match d {
            128 => [16, 56, 56],
            _ => return Err(Error::unsupported(format!("Flux with heads of {d} channels, want 128"))),
        };
        if !hidden.is_multiple_of(d) {
            return Err(Error::shape(format!("{hidden} channels are not whole heads of {d}")));
        }
        let cfg = Config {
            in_channels,
            out_channels,
            hidden,
            heads: hidden / d,
            mlp,
            context,
            pooled,
            sinusoid,
            guidance: w.contains("guidance_in"),
            blocks: [w.count("double_blocks")?, w.count("single_blocks")?],
            axes,
        };
        cfg.joined().map(|_| cfg)
    }

    /// Channels of the latent.
    fn latent(&self) -> usize {
        self.out_channels / (PATCH * PATCH)
    }

    /// What is joined to the latent, of which as much is predicted as there is.
    fn joined(&self) -> Result<Joined> {
        let (n, latent) = (self.in_channels, self.latent());
        let reads = |joined: Joined| joined.channels(latent).saturating_add(latent).saturating_mul(PATCH * PATCH);
        let kinds = [Joined::None, Joined::Fill, Joined::Control];
        kinds.into_iter().find(|&joined| n == reads(joined)).ok_or_else(|| {
            let known = kinds.map(reads).map(|n| n.to_string()).join(", ");
            Error::unsupported(format!("Flux that reads tokens of {n} channels, want one of {known}"))
        })
    }

    /// Cosines and sines `[n + t, d / 2]` for [`Inputs::rope`], of the positions of all tokens. `periods` are the height
    /// and width in tokens where the picture should repeat, for tiles without seams.
    ///
    /// # Errors
    /// None for a configuration that was detected.
    pub fn rope(&self, positions: &[[i32; 3]], periods: [Option<usize>; 2]) -> Result<[Tensor; 2]> {
        rope::tables(self.axes, THETA, positions, [None, periods[0], periods[1]])
    }
}

/// The names of [`Config::rope`] as inputs.
const ROPE: [&str; 2] = ["rope.cos", "rope.sin"];

impl Network for Config {
    fn facts(&self) -> Facts {
        let joined = self.joined().unwrap_or(Joined::None);
        Facts {
            latent: self.latent(),
            joined,
            context: self.context,
            vector: Some(self.pooled),
            guidance: self.guidance,
            references: joined == Joined::None,
            blocks: self.blocks.iter().sum(),
            multiple: PATCH,
            control: None,
        }
    }

    fn build(&self, g: &Graph, w: &Scope, given: &Given, e: &Evaluation) -> Result<Var> {
        let y = build(g, w, self, &self.inputs(g, given, e)?, &e.skip)?;
        unpack(g, y, e.size[0], e.size[1])
    }

    fn build_stretch(&self, g: &Graph, w: &Scope, given: &Given, e: &Evaluation) -> Result<Vec<Var>> {
        let inputs = self.inputs(g, given, e)?;
        let mut out = build_stretch(g, w, self, &inputs, e)?;
        if let (Stretch::Back(_), Some(y)) = (e.stretch, out.first_mut()) {
            *y = unpack(g, *y, e.size[0], e.size[1])?;
        }
        Ok(out)
    }

    fn tables(&self, e: &Evaluation) -> Result<Vec<(&'static str, Tensor)>> {
        let positions = positions(e.tokens, e.size, &e.references, e.reference_plan);
        let period = |axis: usize| e.circular[axis].then(|| e.size[axis].div_ceil(PATCH));
        let tables = self.rope(&positions, [period(0), period(1)])?;
        Ok(ROPE.into_iter().zip(tables).collect())
    }
}

impl Config {
    /// What [`build`] reads, of the inputs of an evaluation.
    fn inputs(&self, g: &Graph, given: &Given, e: &Evaluation) -> Result<Inputs> {
        let x = g.concat(&[given.x].into_iter().chain(given.joined).collect::<Vec<_>>(), 1)?;
        let mut img = vec![pack(g, x)?];
        let [_, predicted, _] = g.dims(img[0])?;
        for reference in &given.references {
            img.push(pack(g, *reference)?);
        }
        let img = g.concat(&img, 1)?;
        let [_, t, _] = g.dims(img)?;
        let table = [e.tokens.saturating_add(t), self.axes.iter().sum::<usize>() / 2];
        Ok(Inputs {
            img,
            txt: given.context,
            timestep: given.timesteps,
            pooled: given.vector.ok_or_else(|| Error::internal("Flux without pooled text"))?,
            guidance: given.guidance,
            rope: [g.input(ROPE[0], &table, DType::F32)?, g.input(ROPE[1], &table, DType::F32)?],
            predicted,
        })
    }
}

/// What is evaluated.
#[derive(Debug, Clone, Copy)]
pub struct Inputs {
    /// [Packed](pack) latents with what is joined to them, `[b, t, in_channels]`. Tokens of references come last.
    pub img: Var,
    /// Text states `[b, n, context]`.
    pub txt: Var,
    /// Noise levels `[b]`, 0 to 1.
    pub timestep: Var,
    /// Pooled text `[b, pooled]`.
    pub pooled: Var,
    /// Strengths of guidance `[b]`, if the network has that input.
    pub guidance: Option<Var>,
    /// Cosines and sines of the positions of all tokens, text first, `[n + t, d / 2]`.
    pub rope: [Var; 2],
    /// How many tokens, from the first of `img`, are predicted.
    pub predicted: usize,
}

/// The velocity `[b, predicted, out_channels]`. Blocks in `skip` are left out; double blocks are counted first.
///
/// # Errors
/// A skipped block does not exist, guidance is given or missing where it should not be, or weights do not fit.
pub fn build(g: &Graph, w: &Scope, cfg: &Config, inputs: &Inputs, skip: &[usize]) -> Result<Var> {
    let blocks = cfg.blocks[0].saturating_add(cfg.blocks[1]);
    may_skip(skip, blocks)?;
    let cond = condition(g, w, cfg, inputs)?;
    let state = enter(g, w, inputs)?;
    let state = run(g, w, cfg, &cond, state, (0..blocks).filter(|i| !skip.contains(i)))?;
    leave(g, w, inputs, state, &cond)
}

/// The results of [`Evaluation::stretch`]; the prediction is that of [`build`].
fn build_stretch(g: &Graph, w: &Scope, cfg: &Config, inputs: &Inputs, e: &Evaluation) -> Result<Vec<Var>> {
    let blocks = cfg.blocks[0].saturating_add(cfg.blocks[1]);
    may_skip(&e.skip, blocks)?;
    let cond = condition(g, w, cfg, inputs)?;
    let entered = enter(g, w, inputs)?;
    let ([b, n, _], [_, t, _]) = (g.dims(inputs.txt)?, g.dims(inputs.img)?);
    let range = e.stretch.range(blocks);
    let state = match e.stretch {
        Stretch::All | Stretch::Front(_) => entered,
        Stretch::Middle(_) | Stretch::Back(_) => {
            let x = g.input("hidden", &[b, n.saturating_add(t), cfg.hidden], DType::F32)?;
            let apart = range.start < cfg.blocks[0];
            if apart { State::Apart([g.slice(x, 1, n, t)?, g.slice(x, 1, 0, n)?]) } else { State::Joined(x) }
        }
    };
    if let (Stretch::Front(_), State::Apart([img, _])) = (e.stretch, entered) {
        g.keep(&[img]);
    }
    let state = run(g, w, cfg, &cond, state, range.filter(|i| !e.skip.contains(i)))?;
    match (e.stretch, entered) {
        (Stretch::Front(_), State::Apart([before, _])) => {
            let x = state.joined(g)?;
            Ok(vec![x, g.sub(g.slice(x, 1, n, t)?, before)?])
        }
        (Stretch::Middle(_), _) => Ok(vec![state.joined(g)?]),
        _ => Ok(vec![leave(g, w, inputs, state, &cond)?]),
    }
}

/// What goes from block to block: picture `[b, t, c]` and text `[b, n, c]` as double blocks hold them, or text and picture
/// `[b, n + t, c]`.
#[derive(Clone, Copy)]
enum State {
    Apart([Var; 2]),
    Joined(Var),
}

impl State {
    fn joined(self, g: &Graph) -> Result<Var> {
        match self {
            State::Apart([img, txt]) => g.concat(&[txt, img], 1),
            State::Joined(x) => Ok(x),
        }
    }
}

fn condition(g: &Graph, w: &Scope, cfg: &Config, inputs: &Inputs) -> Result<Cond> {
    let vec = embed(g, w, cfg, inputs)?; // [b, 1, c]
    g.keep(&[vec, inputs.rope[0], inputs.rope[1]]);
    Ok(Cond { vec, rope: inputs.rope })
}

fn enter(g: &Graph, w: &Scope, inputs: &Inputs) -> Result<State> {
    let img = g.linear(&w.linear("img_in")?, inputs.img)?;
    let txt = g.linear(&w.linear("txt_in")?, inputs.txt)?;
    Ok(State::Apart([img, txt]))
}

/// Runs blocks, of which the double ones are counted first.
fn run(
    g: &Graph,
    w: &Scope,
    cfg: &Config,
    cond: &Cond,
    mut state: State,
    blocks: impl Iterator<Item = usize>,
) -> Result<State> {
    for i in blocks {
        state = match (i.checked_sub(cfg.blocks[0]), state) {
            (None, State::Apart([img, txt])) => {
                let w = w.at("double_blocks", i);
                let (img, txt) = double_block(g, &w, cfg, img, txt, cond)?;
                g.cut(&w, &[img, txt]);
                State::Apart([img, txt])
            }
            (i, state) => {
                let w = w.at("single_blocks", i.unwrap_or(0));
                let x = single_block(g, &w, cfg, state.joined(g)?, cond)?;
                g.cut(&w, &[x]);
                State::Joined(x)
            }
        };
    }
    Ok(state)
}

fn leave(g: &Graph, w: &Scope, inputs: &Inputs, state: State, cond: &Cond) -> Result<Var> {
    let [_, n, _] = g.dims(inputs.txt)?;
    let x = g.slice(state.joined(g)?, 1, n, inputs.predicted)?;
    final_layer(g, &w.sub("final_layer"), x, cond.vec)
}

/// Values every block reads. They stay live across all cuts.
struct Cond {
    /// Time, guidance and pooled text after their SiLU, `[b, 1, c]`.
    vec: Var,
    rope: [Var; 2],
}

/// The sum of the embedded time, guidance and pooled text, after the SiLU that every modulation begins with.
fn embed(g: &Graph, w: &Scope, cfg: &Config, inputs: &Inputs) -> Result<Var> {
    let sinusoid = |x| g.timestep_embedding(g.scale(x, TIME_FACTOR)?, cfg.sinusoid, MAX_PERIOD);
    let mut vec = embedder(g, &w.sub("time_in"), sinusoid(inputs.timestep)?)?; // [b, c]
    match inputs.guidance {
        Some(strength) if cfg.guidance => {
            vec = g.add(vec, embedder(g, &w.sub("guidance_in"), sinusoid(strength)?)?)?;
        }
        None if !cfg.guidance => {}
        given => {
            let (has, is) = if given.is_some() { ("no", "is") } else { ("an", "is not") };
            return Err(Error::internal(format!("the network has {has} input for guidance, which {is} given")));
        }
    }
    vec = g.add(vec, embedder(g, &w.sub("vector_in"), inputs.pooled)?)?;
    let [b, c] = g.dims(vec)?;
    g.silu(g.reshape(vec, &[b, 1, c])?)
}

fn embedder(g: &Graph, w: &Scope, x: Var) -> Result<Var> {
    let x = g.silu(g.linear(&w.linear("in_layer")?, x)?)?;
    let x = g.linear(&w.linear("out_layer")?, x)?;
    g.label(x, w.path());
    Ok(x)
}

/// `[b, 1, c]` each.
struct Modulation {
    shift: Var,
    scale: Var,
    gate: Var,
}

/// Norm, scale and shift.
fn modulate(g: &Graph, w: &Scope, x: Var, m: &Modulation) -> Result<Var> {
    let x = g.layer_norm(&Norm::plain(w.path()), x, EPS)?;
    g.add(g.scale_1p(x, m.scale)?, m.shift)
}

/// `img [b, t, c]` and `txt [b, n, c]`, each with weights of its own, attend to both.
fn double_block(g: &Graph, w: &Scope, cfg: &Config, img: Var, txt: Var, cond: &Cond) -> Result<(Var, Var)> {
    let [img_mod1, img_mod2] = modulations(g, &w.sub("img_mod"), cond.vec)?;
    let [txt_mod1, txt_mod2] = modulations(g, &w.sub("txt_mod"), cond.vec)?;

    let y = modulate(g, &w.sub("img_norm1"), img, &img_mod1)?;
    let y = g.linear(&w.linear("img_attn.qkv")?, y)?; // [b, t, 3c]
    let [img_q, img_k, img_v] = heads(g, &w.sub("img_attn.norm"), cfg, y)?;
    let y = modulate(g, &w.sub("txt_norm1"), txt, &txt_mod1)?;
    let y = g.linear(&w.linear("txt_attn.qkv")?, y)?; // [b, n, 3c]
    let [txt_q, txt_k, txt_v] = heads(g, &w.sub("txt_attn.norm"), cfg, y)?;

    let q = g.concat(&[txt_q, img_q], 1)?; // [b, n + t, h, d]
    let k = g.concat(&[txt_k, img_k], 1)?;
    let v = g.concat(&[txt_v, img_v], 1)?;
    let y = attend(g, q, k, v, cond)?; // [b, n + t, c]
    let ([_, t, _], [_, n, _]) = (g.dims(img)?, g.dims(txt)?);
    let (txt_y, img_y) = (g.slice(y, 1, 0, n)?, g.slice(y, 1, n, t)?);

    let y = g.linear(&w.linear("img_attn.proj")?, img_y)?;
    let img = g.add(img, g.mul(y, img_mod1.gate)?)?;
    let y = perceptron(g, &w.sub("img_mlp"), modulate(g, &w.sub("img_norm2"), img, &img_mod2)?)?;
    let img = g.add(img, g.mul(y, img_mod2.gate)?)?;
    g.label(img, &format!("{}.img", w.path()));

    let y = g.linear(&w.linear("txt_attn.proj")?, txt_y)?;
    let txt = g.add(txt, g.mul(y, txt_mod1.gate)?)?;
    let y = perceptron(g, &w.sub("txt_mlp"), modulate(g, &w.sub("txt_norm2"), txt, &txt_mod2)?)?;
    let txt = g.add(txt, g.mul(y, txt_mod2.gate)?)?;
    g.label(txt, &format!("{}.txt", w.path()));
    Ok((img, txt))
}

/// Those of the attention and of the perceptron.
fn modulations(g: &Graph, w: &Scope, vec: Var) -> Result<[Modulation; 2]> {
    let [shift1, scale1, gate1, shift2, scale2, gate2] = g.chunk(g.linear(&w.linear("lin")?, vec)?)?;
    Ok([
        Modulation { shift: shift1, scale: scale1, gate: gate1 },
        Modulation { shift: shift2, scale: scale2, gate: gate2 },
    ])
}

fn perceptron(g: &Graph, w: &Scope, x: Var) -> Result<Var> {
    let x = g.gelu_tanh(g.linear(&w.linear("0")?, x)?)?;
    g.linear(&w.linear("2")?, x)
}

/// Attention and perceptron side by side on `x [b, n + t, c]`: one layer goes into both, one comes out of both.
fn single_block(g: &Graph, w: &Scope, cfg: &Config, x: Var, cond: &Cond) -> Result<Var> {
    let [shift, scale, gate] = g.chunk(g.linear(&w.linear("modulation.lin")?, cond.vec)?)?;
    let y = modulate(g, &w.sub("pre_norm"), x, &Modulation { shift, scale, gate })?;
    let y = g.linear(&w.linear("linear1")?, y)?; // [b, n + t, 3c + mlp]
    let width = cfg.hidden.saturating_mul(3);
    let (qkv, mlp) = (g.slice(y, 2, 0, width)?, g.slice(y, 2, width, cfg.mlp)?);

    let [q, k, v] = heads(g, &w.sub("norm"), cfg, qkv)?;
    let y = attend(g, q, k, v, cond)?;
    let y = g.concat(&[y, g.gelu_tanh(mlp)?], 2)?; // [b, n + t, c + mlp]
    let y = g.linear(&w.linear("linear2")?, y)?;
    let x = g.add(x, g.mul(y, gate)?)?;
    g.label(x, w.path());
    Ok(x)
}

/// `[b, t, 3c]` as queries, keys and values `[b, t, h, d]`, the first two normed.
fn heads(g: &Graph, w: &Scope, cfg: &Config, qkv: Var) -> Result<[Var; 3]> {
    let [q, k, v] = g.chunk(qkv)?;
    let q = g.rms_norm(&w.norm_no_bias("query_norm", "scale")?, g.split_heads(q, cfg.heads)?, EPS)?;
    let k = g.rms_norm(&w.norm_no_bias("key_norm", "scale")?, g.split_heads(k, cfg.heads)?, EPS)?;
    Ok([q, k, g.split_heads(v, cfg.heads)?])
}

fn attend(g: &Graph, q: Var, k: Var, v: Var, cond: &Cond) -> Result<Var> {
    let [cos, sin] = cond.rope;
    let q = g.rope(q, cos, sin, RopeLayout::Interleaved)?;
    let k = g.rope(k, cos, sin, RopeLayout::Interleaved)?;
    g.merge_heads(g.attention(q, k, v, AttentionOptions::default())?)
}

fn final_layer(g: &Graph, w: &Scope, x: Var, vec: Var) -> Result<Var> {
    let [shift, scale] = g.chunk(g.linear(&w.linear("adaLN_modulation.1")?, vec)?)?;
    let x = g.layer_norm(&Norm::plain(w.sub("norm_final").path()), x, EPS)?;
    let x = g.add(g.scale_1p(x, scale)?, shift)?;
    let x = g.linear(&w.linear("linear")?, x)?;
    g.label(x, w.path());
    Ok(x)
}

#[cfg(test)]
mod tests;
