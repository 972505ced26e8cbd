//! ControlNets (Zhang et al. 2023; `ControlNetModel` of diffusers), which look at a picture of edges, depths or poses and
//! add to what a UNet's blocks hand on. Golden values: `oracle/controlnet.py`.
//! `b` images, `[h, w]` latent size, `c` channels of the first level, `f` pixels to a latent position.
//!
//! ```text
//! let control = ControlNet::open(&file, &model)?;
//! let hint = control.hint_program(h, w)?;        // "hint" [1, 3, f h, f w], values from 0 to 1 -> [1, c, h, w]
//! let p = control.program(&evaluation)?;         // what the UNet reads, and "hint" [1, c, h, w] -> control.0, …
//! let e = Evaluation { control: true, ..evaluation };
//! let p = model.diffusion_program(&e)?;          // reads control.0, …, times a strength, or the sum of several
//! ```

pub mod files;

use std::sync::Arc;

use sd_core::graph::Op;
use sd_core::{Conv2dOptions, DType, Error, Graph, Program, Result, Scope, Var, WeightSource};
use sd_io::Checkpoint;

use crate::diffusion::unet::{Cond, Heads, block, embed};
use crate::diffusion::{Evaluation, Facts, conv};
use crate::model::Model;
use crate::names::{Spelling, controlnet};
use crate::scaled::{self, ScaledAs};
use crate::view::View;

/// Names of what is no ControlNet of a UNet alone, with what it is.
const OTHERS: &[(&str, &str)] = &[
    ("lora_controlnet", "a Control-LoRA"),
    ("task_embedding", "a ControlNet of several kinds of pictures (union)"),
    ("control_add_embedding.", "a ControlNet of several kinds of pictures (union)"),
    ("controlnet_x_embedder.", "a ControlNet of a diffusion transformer"),
    ("controlnet_blocks.", "a ControlNet of a diffusion transformer"),
    ("controlnet_mode_embedder.", "a ControlNet of a diffusion transformer"),
    ("difference", "the difference of a ControlNet from a model"),
    ("adapter.body.", "a T2I-Adapter"),
    ("body.0.", "a T2I-Adapter"),
];

/// A ControlNet that fits a model.
pub struct ControlNet {
    scope: Scope,
    config: Config,
    facts: Facts,
    /// Pixels to a latent position.
    pixels: usize,
}

/// Sizes, read off the weights.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Config {
    /// Channels of the latent.
    latent: usize,
    /// `c`, and the width of the sinusoid.
    channels: usize,
    /// Channels of a context token, if any block reads it.
    context: Option<usize>,
    vector: Option<usize>,
    /// Entries of `input_blocks`.
    blocks: usize,
    /// Convolutions of the hint.
    convolutions: usize,
}

impl Config {
    fn detect(w: &Scope) -> Result<Config> {
        let [channels, latent, _, _] = w.sub("input_blocks.0.0").dims("weight")?;
        let blocks = w.count("input_blocks")?;
        let attention = |i| w.at("input_blocks", i).sub("1.transformer_blocks.0.attn2");
        let context = (0..blocks).map(attention).chain([w.sub("middle_block.1.transformer_blocks.0.attn2")]);
        let context = match context.into_iter().find(|w| w.contains("to_k")) {
            Some(w) => Some(w.dims("to_k.weight").map(|[_, k]| k)?),
            None => None,
        };
        let vector = match w.contains("label_emb") {
            true => Some(w.sub("label_emb.0.0").dims("weight").map(|[_, k]| k)?),
            false => None,
        };
        let convolutions = (0..).take_while(|i| w.contains(&format!("input_hint_block.{}", 2 * i))).count();
        Ok(Config { latent, channels, context, vector, blocks, convolutions })
    }

    /// How often the hint is halved: the convolutions between the first and the last come in pairs, the second of which
    /// goes in steps of 2.
    fn halvings(&self) -> usize {
        self.convolutions.saturating_sub(2) / 2
    }
}

impl ControlNet {
    /// The ControlNet in `file`, which may hold other parts beside it, for `model`. Reads headers only.
    ///
    /// # Errors
    /// The model takes none, the file holds none or one of another kind, a tensor is missing or misshapen, or the
    /// ControlNet is for another family; the message says what was found.
    pub fn open(file: &Arc<Checkpoint>, model: &Model) -> Result<ControlNet> {
        let path = file.path().display().to_string();
        let source: Arc<dyn WeightSource> = file.clone();
        ControlNet::fit(&source, model).map_err(|e| e.context(path))
    }

    fn fit(file: &Arc<dyn WeightSource>, model: &Model) -> Result<ControlNet> {
        let facts = model.network();
        let family = model.info().family.name();
        let Some(heads) = facts.control else {
            return Err(Error::request(format!("control_net: {family} takes no ControlNets"))
                .hint("those of SD 1.x, SD 2.x and SDXL do"));
        };
        let scope = read(file)?;
        let config = Config::detect(&scope)?;
        let control = ControlNet { scope, config, facts, pixels: model.info().latent.compression };
        control.matches(family)?;
        // Residuals are compared at the smallest size that both networks can do.
        let e = Evaluation { control: true, ..model.smallest() };
        control.hint_program(e.size[0], e.size[1])?;
        let gives = control.build(&e, heads)?;
        let network = model.diffusion_program(&e)?;
        let wants: Vec<_> = network
            .nodes()
            .iter()
            .filter_map(|n| match &n.op {
                Op::Input(name) => Some((name.strip_prefix("control.")?.parse::<usize>().ok()?, n.shape)),
                _ => None,
            })
            .collect();
        if gives.outputs().len() != wants.len() {
            let message =
                format!("the ControlNet is for {} blocks, {family} has {}", gives.outputs().len(), wants.len());
            return Err(other_family(message));
        }
        for (i, wants) in wants {
            let gives = gives.outputs().get(i).map(|v| gives.node(*v).shape);
            if let Some(gives) = gives.filter(|gives| *gives != wants) {
                let message = format!(
                    "what the ControlNet adds to block {i} is {gives}, that block of {family} hands on {wants}"
                );
                return Err(other_family(message));
            }
        }
        Ok(control)
    }

    /// Whether it reads what the model gives it.
    fn matches(&self, family: &str) -> Result<()> {
        let (own, facts) = (&self.config, &self.facts);
        let channels = |n: Option<usize>| n.map_or("none".to_owned(), |n| format!("{n} channels"));
        let pairs = [
            ("latents", Some(own.latent), Some(facts.latent)),
            ("states of the prompt", own.context.or(Some(facts.context)), Some(facts.context)),
            ("the vector beside the prompt's states", own.vector, facts.vector),
        ];
        for (what, reads, given) in pairs {
            if reads != given {
                let (reads, given) = (channels(reads), channels(given));
                return Err(other_family(format!("{what}: the ControlNet reads {reads}, {family} has {given}")));
            }
        }
        let (halvings, pixels) = (own.halvings(), self.pixels);
        if own.convolutions < 2 || 1usize.checked_shl(halvings as u32) != Some(pixels) {
            let message =
                format!("the hint is halved {halvings} times, want as often as pixels become latents of {pixels}");
            return Err(Error::unsupported(message));
        }
        Ok(())
    }

    /// Its weights, to run its programs with.
    pub fn source(&self) -> Arc<dyn WeightSource> {
        self.scope.source().clone()
    }

    /// The picture as the network reads it: `hint [1, 3, f h, f w]`, values from 0 to 1, to `[1, c, h, w]`. It follows
    /// from the picture alone.
    ///
    /// # Errors
    /// A weight is missing or misshapen.
    pub fn hint_program(&self, h: usize, w: usize) -> Result<Program> {
        let g = Graph::new();
        let side = |n: usize| n.saturating_mul(self.pixels);
        let hint = g.input("hint", &[1, 3, side(h), side(w)], DType::F32)?;
        let y = embed_hint(&g, &self.scope.sub("input_hint_block"), self.config.convolutions, hint)?;
        g.finish(&[y])
    }

    /// What is added to the input blocks of the UNet, and last to its middle, in the shapes that these have: for
    /// `x [b, z, h, w]`, `timesteps [b]`, `context [b, t, k]`, `vector [b, v]` where the UNet reads one, and
    /// `hint [1, c, h, w]`. What else the evaluation asks for is not read.
    ///
    /// # Errors
    /// `h` or `w` cannot be halved as often as the network does it, or a weight is missing or misshapen.
    pub fn program(&self, e: &Evaluation) -> Result<Program> {
        let heads = self.facts.control.ok_or_else(|| Error::internal("a ControlNet without a UNet"))?;
        self.build(e, heads)
    }

    fn build(&self, e: &Evaluation, heads: Heads) -> Result<Program> {
        let g = Graph::new();
        let (facts, b, [h, w]) = (&self.facts, e.batch, e.size);
        let input = |name: &str, dims: &[usize]| g.input(name, dims, DType::F32);
        let inputs = Inputs {
            x: input("x", &[b, facts.latent, h, w])?,
            timesteps: input("timesteps", &[b])?,
            context: input("context", &[b, e.tokens, facts.context])?,
            vector: facts.vector.map(|v| input("vector", &[b, v])).transpose()?,
            hint: input("hint", &[1, self.config.channels, h, w])?,
            circular: e.circular,
        };
        g.finish(&build(&g, &self.scope, &self.config, heads, inputs)?)
    }
}

fn other_family(message: String) -> Error {
    Error::shape(message).hint("the ControlNet is for another family of models")
}

/// The tensors of a ControlNet under their original names.
fn read(file: &Arc<dyn WeightSource>) -> Result<Scope> {
    let names = file.names();
    if let Some((_, what)) = OTHERS.iter().find(|(key, _)| names.iter().any(|n| n.starts_with(key))) {
        return Err(Error::unsupported(format!("is {what}; not supported yet")));
    }
    let marked = |prefix: &str| {
        let marks = controlnet::MARKS
            .iter()
            .any(|mark| names.iter().any(|n| n.strip_prefix(prefix).is_some_and(|n| n.starts_with(mark))));
        marks.then_some(())
    };
    let prefix = controlnet::PREFIXES.iter().find(|prefix| marked(prefix).is_some());
    let Some(prefix) = prefix else {
        let [original, diffusers] = controlnet::MARKS;
        let message = format!("holds no ControlNet: no name begins with {original} or {diffusers}");
        return Err(Error::unsupported(message));
    };
    scaled::check(file)?;
    let names: Vec<&str> = names.into_iter().filter(|n| n.starts_with(prefix)).collect();
    let bare: Vec<&str> = names.iter().filter_map(|n| n.strip_prefix(prefix)).collect();
    let spelling = Spelling::new(prefix, controlnet::rows(&bare));
    Ok(Scope::root(Arc::new(View::new(file.clone(), scaled::read(file, ScaledAs::Blocks), spelling, &names))))
}

/// What a ControlNet reads.
#[derive(Debug, Clone, Copy)]
struct Inputs {
    /// `[b, z, h, w]`.
    x: Var,
    /// `[b]`.
    timesteps: Var,
    /// `[b, t, k]`.
    context: Var,
    /// `[b, v]`.
    vector: Option<Var>,
    /// `[1, c, h, w]`, or one for each image.
    hint: Var,
    circular: [bool; 2],
}

/// What is added to each input block of the UNet, and last to its middle.
fn build(g: &Graph, w: &Scope, cfg: &Config, heads: Heads, inputs: Inputs) -> Result<Vec<Var>> {
    let Inputs { mut x, timesteps, context, vector, hint, circular } = inputs;
    let time = embed(g, w, cfg.channels, timesteps, vector)?;
    let cond = Cond { time, context, heads, circular };
    g.keep(&[time]);
    let mut out = Vec::new();
    for i in 0..cfg.blocks {
        x = block(g, &w.at("input_blocks", i), x, &cond)?;
        if i == 0 {
            x = g.add(x, hint)?;
        }
        out.push(pointwise(g, &w.at("zero_convs", i).sub("0"), x)?);
        g.cut(&w.at("input_blocks", i), &[&out[..], &[x]].concat());
    }
    x = block(g, &w.sub("middle_block"), x, &cond)?;
    out.push(pointwise(g, &w.sub("middle_block_out.0"), x)?);
    Ok(out)
}

fn pointwise(g: &Graph, w: &Scope, x: Var) -> Result<Var> {
    g.conv2d(&w.conv2d("")?, x, Conv2dOptions::default())
}

/// `hint [b, 3, f h, f w]` gives `[b, c, h, w]`.
fn embed_hint(g: &Graph, w: &Scope, convolutions: usize, mut x: Var) -> Result<Var> {
    for i in 0..convolutions {
        let last = i + 1 == convolutions;
        let stride = if i > 0 && !last && i % 2 == 0 { 2 } else { 1 };
        x = conv(g, &w.conv2d(&(2 * i).to_string())?, x, stride, [false; 2])?;
        if !last {
            x = g.silu(x)?;
        }
    }
    g.label(x, w.path());
    Ok(x)
}

#[cfg(test)]
mod tests;
