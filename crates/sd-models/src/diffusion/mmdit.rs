//! Stable Diffusion 3 and 3.5, a transformer over picture and text tokens (Esser et al. 2024, section 4; `MMDiTX` of
//! Stability AI, `SD3Transformer2DModel` of diffusers). Golden values: `oracle/sd3.py`.
//! `b` pictures, `t` picture tokens, `n` text tokens, `c` channels, `h` heads of `d`; a token is a patch of 2×2 latent
//! values.
//!
//! Picture and text have weights of their own and attend to each other in every block. The last block needs of the text
//! its keys and values only.

use sd_core::{AttentionOptions, Conv2dOptions, DType, Error, Graph, Result, Scope, Var, scope::Norm, scope::Role};

use super::patches::{PATCH, unpack};
use super::{Evaluation, Facts, Given, Network, Stretch, may_skip};
use crate::family::Joined;

/// Of every norm.
const EPS: f32 = 1e-6;
/// The longest period of the time embedding.
const MAX_PERIOD: f32 = 10_000.0;
/// Channels of a head where no norm of queries shows them (`hidden_size = 64 * depth`, `num_heads = depth` in
/// `mmditx.py`).
const HEAD: usize = 64;
/// Pixels across for each value across of the latent, as SD 3's autoencoder has it.
const PIXELS: usize = 8;

/// Sizes, read off the weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Channels of the latent.
    pub latent: usize,
    /// `c`.
    pub hidden: usize,
    /// `h`.
    pub heads: usize,
    /// Channels of a text token.
    pub context: usize,
    /// Channels of the pooled text.
    pub pooled: usize,
    /// Width of the sinusoid of time.
    pub sinusoid: usize,
    /// Patches along each side of the square that the table of positions covers.
    pub side: usize,
    /// Whether queries and keys go through a norm.
    pub normed: bool,
    /// How many blocks there are.
    pub blocks: usize,
}

impl Config {
    /// The sizes of the network at `w`.
    ///
    /// # Errors
    /// A tensor that shows a size is missing or has another number of axes, the table of positions is no square, or
    /// channels are not whole heads.
    pub fn detect(w: &Scope) -> Result<Config> {
        let [hidden, latent, _, _] = w.sub("x_embedder.proj").dims("weight")?;
        let [_, sinusoid] = w.sub("t_embedder.mlp.0").dims("weight")?;
        let [_, pooled] = w.sub("y_embedder.mlp.0").dims("weight")?;
        let [_, context] = w.sub("context_embedder").dims("weight")?;
        // GGUF files may leave out the axis of 1 in front.
        let table = w.weight("pos_embed", Role::Vector)?.shape();
        let positions = table.elements() / table.last().max(1);
        let side = positions.isqrt();
        if table.last() != hidden || side * side != positions {
            return Err(Error::shape(format!(
                "pos_embed is {table}, want {hidden} channels for a square of positions"
            )));
        }
        let attention = w.sub("joint_blocks.0.x_block.attn");
        let normed = attention.contains("ln_q");
        let d = if normed { attention.sub("ln_q").dims("weight").map(|[d]| d)? } else { HEAD };
        if attention.has("ln_q.bias") {
            return Err(Error::unsupported("SD 3 with layer norms of queries and keys, want RMS norms"));
        }
        if d == 0 || !hidden.is_multiple_of(d) {
            return Err(Error::shape(format!("{hidden} channels are not whole heads of {d}")));
        }
        let blocks = w.count("joint_blocks")?;
        Ok(Config { latent, hidden, heads: hidden / d, context, pooled, sinusoid, side, normed, blocks })
    }
}

impl Network for Config {
    fn facts(&self) -> Facts {
        Facts {
            latent: self.latent,
            joined: Joined::None,
            context: self.context,
            vector: Some(self.pooled),
            guidance: false,
            references: false,
            blocks: self.blocks,
            multiple: PATCH,
            control: None,
        }
    }

    fn build(&self, g: &Graph, w: &Scope, given: &Given, e: &Evaluation) -> Result<Var> {
        build(g, w, self, &inputs(given, e)?, &e.skip)
    }

    fn build_stretch(&self, g: &Graph, w: &Scope, given: &Given, e: &Evaluation) -> Result<Vec<Var>> {
        build_stretch(g, w, self, &inputs(given, e)?, e)
    }
}

/// What [`build`] reads, of the inputs of an evaluation.
fn inputs(given: &Given, e: &Evaluation) -> Result<Inputs> {
    if e.circular != [false; 2] {
        return Err(Error::unsupported(
            "circular: the positions of SD 3 belong to places in a picture, which cannot repeat",
        ));
    }
    Ok(Inputs {
        x: given.x,
        context: given.context,
        timestep: given.timesteps,
        pooled: given.vector.ok_or_else(|| Error::internal("SD 3 without pooled text"))?,
    })
}

/// What is evaluated.
#[derive(Debug, Clone, Copy)]
pub struct Inputs {
    /// Latents `[b, z, h, w]` with even sides.
    pub x: Var,
    /// Text states `[b, n, context]`.
    pub context: Var,
    /// Noise levels `[b]`, 0 to 1000.
    pub timestep: Var,
    /// Pooled text `[b, pooled]`.
    pub pooled: Var,
}

/// The velocity `[b, z, h, w]`. Blocks in `skip` are left out.
///
/// # Errors
/// A skipped block does not exist, the latent has odd sides or is larger than the table of positions, or weights do not
/// fit.
pub fn build(g: &Graph, w: &Scope, cfg: &Config, inputs: &Inputs, skip: &[usize]) -> Result<Var> {
    may_skip(skip, cfg.blocks)?;
    let x = patches(g, w, cfg, inputs.x)?; // [b, t, c]
    let vec = embed(g, w, cfg, inputs)?; // [b, 1, c]
    g.keep(&[vec]);
    let context = g.linear(&w.linear("context_embedder")?, inputs.context)?; // [b, n, c]
    let (x, _) = run(g, w, cfg, vec, (x, context), (0..cfg.blocks).filter(|i| !skip.contains(i)))?;
    leave(g, w, cfg, inputs, x, vec)
}

/// The results of [`Evaluation::stretch`]; the prediction is that of [`build`].
fn build_stretch(g: &Graph, w: &Scope, cfg: &Config, inputs: &Inputs, e: &Evaluation) -> Result<Vec<Var>> {
    may_skip(&e.skip, cfg.blocks)?;
    let before = patches(g, w, cfg, inputs.x)?;
    let vec = embed(g, w, cfg, inputs)?;
    g.keep(&[vec]);
    let ([b, n, _], [_, t, _]) = (g.dims(inputs.context)?, g.dims(before)?);
    let state = match e.stretch {
        Stretch::All | Stretch::Front(_) => {
            g.keep(&[before]);
            (before, g.linear(&w.linear("context_embedder")?, inputs.context)?)
        }
        Stretch::Middle(_) | Stretch::Back(_) => {
            let x = g.input("hidden", &[b, n.saturating_add(t), cfg.hidden], DType::F32)?;
            (g.slice(x, 1, n, t)?, g.slice(x, 1, 0, n)?)
        }
    };
    let blocks = e.stretch.range(cfg.blocks).filter(|i| !e.skip.contains(i));
    let (x, context) = run(g, w, cfg, vec, state, blocks)?;
    match e.stretch {
        Stretch::Front(_) => Ok(vec![g.concat(&[context, x], 1)?, g.sub(x, before)?]),
        Stretch::Middle(_) => Ok(vec![g.concat(&[context, x], 1)?]),
        Stretch::All | Stretch::Back(_) => Ok(vec![leave(g, w, cfg, inputs, x, vec)?]),
    }
}

/// Runs blocks on picture `[b, t, c]` and text `[b, n, c]`. The last one leaves the text as it is, for nobody reads it.
fn run(
    g: &Graph,
    w: &Scope,
    cfg: &Config,
    vec: Var,
    (mut x, mut context): (Var, Var),
    blocks: impl Iterator<Item = usize>,
) -> Result<(Var, Var)> {
    for i in blocks {
        let w = w.at("joint_blocks", i);
        if i + 1 < cfg.blocks {
            (x, context) = joint_block(g, &w, cfg, x, context, vec)?;
            g.cut(&w, &[x, context]);
        } else {
            x = last_block(g, &w, cfg, x, context, vec)?;
            g.cut(&w, &[x, context]);
        }
    }
    Ok((x, context))
}

fn leave(g: &Graph, w: &Scope, cfg: &Config, inputs: &Inputs, x: Var, vec: Var) -> Result<Var> {
    let [_, _, height, width] = g.dims(inputs.x)?;
    let x = final_layer(g, &w.sub("final_layer"), cfg, x, vec)?; // [b, t, 4 z]
    unpack(g, x, height, width)
}

/// The latent's patches as tokens, each with the embedding of its place. The places are the middle of the table.
fn patches(g: &Graph, w: &Scope, cfg: &Config, x: Var) -> Result<Var> {
    let [_, _, h, wd] = g.dims(x)?;
    let [rows, columns] = [h / PATCH, wd / PATCH];
    if !h.is_multiple_of(PATCH) || !wd.is_multiple_of(PATCH) || rows.max(columns) > cfg.side {
        return Err(Error::request(format!(
            "width, height: {}x{} is not for this model, want multiples of {} of at most {} pixels, as far as it \
             knows positions",
            wd.saturating_mul(PIXELS),
            h.saturating_mul(PIXELS),
            PATCH * PIXELS,
            cfg.side.saturating_mul(PATCH * PIXELS)
        )));
    }
    let stride = Conv2dOptions { stride: PATCH, ..Conv2dOptions::default() };
    let x = g.to_tokens(g.conv2d(&w.conv2d("x_embedder.proj")?, x, stride)?)?;
    let table = g.weight(&w.weight("pos_embed", Role::Vector)?);
    let table = g.reshape(table, &[cfg.side, cfg.side, cfg.hidden])?;
    let table = g.slice(table, 0, (cfg.side - rows) / 2, rows)?;
    let table = g.slice(table, 1, (cfg.side - columns) / 2, columns)?;
    let x = g.add(x, g.reshape(table, &[1, rows * columns, cfg.hidden])?)?;
    g.label(x, "x_embedder");
    Ok(x)
}

/// The sum of the embedded time and pooled text, after the SiLU that every modulation begins with.
fn embed(g: &Graph, w: &Scope, cfg: &Config, inputs: &Inputs) -> Result<Var> {
    let time = g.timestep_embedding(inputs.timestep, cfg.sinusoid, MAX_PERIOD)?;
    let time = embedder(g, &w.sub("t_embedder"), time)?; // [b, c]
    let vec = g.add(time, embedder(g, &w.sub("y_embedder"), inputs.pooled)?)?;
    let [b, c] = g.dims(vec)?;
    g.silu(g.reshape(vec, &[b, 1, c])?)
}

fn embedder(g: &Graph, w: &Scope, x: Var) -> Result<Var> {
    let x = g.silu(g.linear(&w.linear("mlp.0")?, x)?)?;
    let x = g.linear(&w.linear("mlp.2")?, x)?;
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
fn modulate(g: &Graph, w: &Scope, x: Var, shift: Var, scale: Var) -> Result<Var> {
    let x = g.layer_norm(&Norm::plain(w.path()), x, EPS)?;
    g.add(g.scale_1p(x, scale)?, shift)
}

/// `x [b, t, c]` and `context [b, n, c]` attend to both.
fn joint_block(g: &Graph, w: &Scope, cfg: &Config, x: Var, context: Var, vec: Var) -> Result<(Var, Var)> {
    let w = [w.sub("x_block"), w.sub("context_block")];
    let ours = modulations(g, &w[0], vec)?;
    let theirs = modulations(g, &w[1], vec)?;

    let qkv = attended(g, &w[0].sub("attn"), cfg, x, &ours.attention)?;
    let context_qkv = attended(g, &w[1].sub("attn"), cfg, context, &theirs.attention)?;
    let [y, context_y] = attend(g, qkv, context_qkv)?;
    let x = after_attention(g, &w[0], cfg, x, y, &ours)?;
    let context = after_attention(g, &w[1], cfg, context, context_y, &theirs)?;
    Ok((x, context))
}

/// A joint block whose text nobody reads any more.
fn last_block(g: &Graph, w: &Scope, cfg: &Config, x: Var, context: Var, vec: Var) -> Result<Var> {
    let w = [w.sub("x_block"), w.sub("context_block")];
    let ours = modulations(g, &w[0], vec)?;
    let [shift, scale] = g.chunk(g.linear(&w[1].linear("adaLN_modulation.1")?, vec)?)?;

    let qkv = attended(g, &w[0].sub("attn"), cfg, x, &ours.attention)?;
    let context = modulate(g, &w[1].sub("norm1"), context, shift, scale)?;
    let context_qkv = heads(g, &w[1].sub("attn"), cfg, context)?;
    let [y, _] = attend(g, qkv, context_qkv)?;
    after_attention(g, &w[0], cfg, x, y, &ours)
}

/// What a stream's block does with its values in each of its parts.
struct Modulations {
    attention: Modulation,
    mlp: Modulation,
    /// Of the attention of the picture to itself alone, in some blocks of SD 3.5 medium.
    second: Option<Modulation>,
}

fn modulations(g: &Graph, w: &Scope, vec: Var) -> Result<Modulations> {
    let y = g.linear(&w.linear("adaLN_modulation.1")?, vec)?; // [b, 1, 6c], or 9c
    let (first, second) = if w.contains("attn2") {
        let [shift1, scale1, gate1, shift2, scale2, gate2, shift, scale, gate] = g.chunk(y)?;
        ([shift1, scale1, gate1, shift2, scale2, gate2], Some(Modulation { shift, scale, gate }))
    } else {
        (g.chunk(y)?, None)
    };
    let [shift1, scale1, gate1, shift2, scale2, gate2] = first;
    Ok(Modulations {
        attention: Modulation { shift: shift1, scale: scale1, gate: gate1 },
        mlp: Modulation { shift: shift2, scale: scale2, gate: gate2 },
        second,
    })
}

/// Queries, keys and values of `x` for the attention at `w`.
fn attended(g: &Graph, w: &Scope, cfg: &Config, x: Var, m: &Modulation) -> Result<[Var; 3]> {
    heads(g, w, cfg, modulate(g, &w.sub("norm"), x, m.shift, m.scale)?)
}

/// The rest of a stream's block: `y` is what its tokens found, `x` what they were.
fn after_attention(g: &Graph, w: &Scope, cfg: &Config, x: Var, y: Var, m: &Modulations) -> Result<Var> {
    let y = g.linear(&w.linear("attn.proj")?, y)?;
    let mut out = g.add(x, g.mul(y, m.attention.gate)?)?;
    if let Some(second) = &m.second {
        let [q, k, v] = attended(g, &w.sub("attn2"), cfg, x, second)?;
        let y = g.merge_heads(g.attention(q, k, v, AttentionOptions::default())?)?;
        let y = g.linear(&w.linear("attn2.proj")?, y)?;
        out = g.add(out, g.mul(y, second.gate)?)?;
    }
    let y = modulate(g, &w.sub("norm2"), out, m.mlp.shift, m.mlp.scale)?;
    let y = g.gelu_tanh(g.linear(&w.linear("mlp.fc1")?, y)?)?;
    let y = g.linear(&w.linear("mlp.fc2")?, y)?;
    let out = g.add(out, g.mul(y, m.mlp.gate)?)?;
    g.label(out, w.path());
    Ok(out)
}

/// `x [b, t, c]` as queries, keys and values `[b, t, h, d]`, the first two normed where the network has norms for them.
fn heads(g: &Graph, w: &Scope, cfg: &Config, x: Var) -> Result<[Var; 3]> {
    let [q, k, v] = g.chunk(g.linear(&w.linear("qkv")?, x)?)?;
    let [mut q, mut k, v] =
        [g.split_heads(q, cfg.heads)?, g.split_heads(k, cfg.heads)?, g.split_heads(v, cfg.heads)?];
    if cfg.normed {
        q = g.rms_norm(&w.norm_no_bias("ln_q", "weight")?, q, EPS)?;
        k = g.rms_norm(&w.norm_no_bias("ln_k", "weight")?, k, EPS)?;
    }
    Ok([q, k, v])
}

/// What tokens of the picture and of the text find in both, `[b, t, c]` and `[b, n, c]`.
fn attend(g: &Graph, x: [Var; 3], context: [Var; 3]) -> Result<[Var; 2]> {
    let ([_, t, _, _], [_, n, _, _]) = (g.dims(x[0])?, g.dims(context[0])?);
    let both = |i: usize| g.concat(&[context[i], x[i]], 1);
    let (q, k, v) = (both(0)?, both(1)?, both(2)?); // [b, n + t, h, d]
    let y = g.merge_heads(g.attention(q, k, v, AttentionOptions::default())?)?;
    Ok([g.slice(y, 1, n, t)?, g.slice(y, 1, 0, n)?])
}

/// The predicted patches `[b, t, 4 z]`, their values in the order channel, row, column.
fn final_layer(g: &Graph, w: &Scope, cfg: &Config, x: Var, vec: Var) -> Result<Var> {
    let [shift, scale] = g.chunk(g.linear(&w.linear("adaLN_modulation.1")?, vec)?)?;
    let x = modulate(g, &w.sub("norm_final"), x, shift, scale)?;
    let x = g.linear(&w.linear("linear")?, x)?; // row, column, channel
    let [b, t, _] = g.dims(x)?;
    let x = g.reshape(x, &[b, t, PATCH * PATCH, cfg.latent])?;
    let x = g.permute(x, &[0, 1, 3, 2])?;
    g.reshape(x, &[b, t, cfg.latent * PATCH * PATCH])
}

#[cfg(test)]
mod tests;
