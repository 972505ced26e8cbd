//! Prompts through CLIP text encoders.

use sd_core::{DType, Error, Graph, Program, Result, Scope, Tensor};

use super::{Encoded, Run, TextEncoder, Zeros, limit, weighted};
use crate::names::Part;
use crate::text::clip::{self, Activation, Wanted};
use crate::text::prompt::Piece;
use crate::text::tokenizer::{self, ClipTokenizer};
use crate::text::windows::{self, CONTEXT, WINDOW};

pub(crate) use crate::text::clip::Pooled;

/// Which states of an encoder become context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum States {
    /// None.
    None,
    /// Those of the layer that clip skip says.
    Raw,
    /// The same after the final norm.
    Normed,
}

/// How a family uses a CLIP text encoder.
#[derive(Debug)]
pub(crate) struct ClipRecipe {
    pub(crate) part: Part,
    pub(crate) activation: Activation,
    /// The token after the end of a prompt.
    pub(crate) filler: u32,
    pub(crate) states: States,
    /// Which state of the first window's end is a part of the vector.
    pub(crate) pooled: Pooled,
    /// How many layers it was trained with, if files leave the last one out: diffusers' SD 2.x does.
    pub(crate) trained_layers: Option<usize>,
    /// What stands for it where no file has it, if the family can do without.
    pub(crate) absent: Option<Zeros>,
}

pub(super) struct Encoder {
    recipe: &'static ClipRecipe,
    w: Scope,
    cfg: clip::Config,
    /// Channels of the pooled state; 0 without one.
    pooled: usize,
}

impl Encoder {
    pub(super) fn detect(recipe: &'static ClipRecipe, w: Scope) -> Result<Encoder> {
        let mut cfg = clip::Config::detect(&w, recipe.activation)?;
        let ids = ClipTokenizer::END as usize + 1;
        if cfg.vocabulary < ids {
            return Err(Error::shape(format!("the text encoder knows {} tokens, CLIP has {ids}", cfg.vocabulary)));
        }
        if cfg.positions < CONTEXT {
            return Err(Error::shape(format!("the text encoder has {} positions, want {CONTEXT}", cfg.positions)));
        }
        cfg.cut = usize::from(recipe.trained_layers.is_some_and(|n| cfg.layers + 1 == n));
        let pooled = match recipe.pooled {
            Pooled::None => 0,
            Pooled::Normed => cfg.width,
            Pooled::Projected => w.dims("text_projection.weight").map(|[n, _]| n)?,
        };
        Ok(Encoder { recipe, w, cfg, pooled })
    }
}

impl TextEncoder for Encoder {
    fn part(&self) -> Part {
        self.recipe.part
    }

    fn width(&self) -> usize {
        if self.recipe.states == States::None { 0 } else { self.cfg.width }
    }

    fn tokens(&self) -> usize {
        CONTEXT
    }

    fn pooled(&self) -> usize {
        self.pooled
    }

    fn beside(&self) -> bool {
        true
    }

    fn program(&self, batch: usize, clip_skip: usize) -> Result<Program> {
        let g = Graph::new();
        let ids = g.input("ids", &[batch, CONTEXT], DType::I32)?;
        let normed = self.recipe.states == States::Normed;
        // Without states in the context there is nothing that could skip a layer.
        let clip_skip = if self.recipe.states == States::None { self.cfg.cut + 1 } else { clip_skip };
        let wanted = Wanted { clip_skip, normed, pooled: self.recipe.pooled };
        let states = clip::build(&g, &self.w, &self.cfg, ids, wanted)?;
        let tokens = (self.recipe.states != States::None).then_some(states.tokens);
        g.finish(&[tokens, states.pooled].into_iter().flatten().collect::<Vec<_>>())
    }

    fn dry_run(&self, clip_skip: usize) -> Result<()> {
        self.program(1, clip_skip)?;
        let (g, w) = (Graph::new(), &self.w);
        let ids = g.input("ids", &[1, CONTEXT], DType::I32)?;
        let normed = w.contains("text_model.final_layer_norm");
        let pooled = if normed && w.contains("text_projection") { Pooled::Projected } else { Pooled::None };
        clip::build(&g, w, &self.cfg, ids, Wanted { clip_skip: self.cfg.cut + 1, normed, pooled }).map(|_| ())
    }

    fn encode(&self, pieces: &[Piece], clip_skip: usize, run: &mut Run<'_>) -> Result<Encoded> {
        let mut windows = windows::windows(tokenizer::clip()?, pieces, self.recipe.filler);
        limit(windows.len(), WINDOW)?;
        if self.recipe.states == States::None {
            windows.truncate(1);
        }
        let program = self.program(windows.len(), clip_skip).map_err(|e| e.context("clip_skip"))?;
        // What comes after the vocabulary's own vectors comes after the table's.
        let more = self.cfg.vocabulary.saturating_sub(ClipTokenizer::END as usize + 1) as i32;
        let id = |id: &i32| if *id > ClipTokenizer::END as i32 { id.saturating_add(more) } else { *id };
        let ids = windows.iter().flat_map(|w| w.ids.iter().map(id)).collect();
        let ids = Tensor::i32(&[windows.len(), CONTEXT], ids)?;
        let mut outputs = run(self.part(), &program, &[("ids", &ids)])?.into_iter();
        let states = match self.recipe.states {
            States::None => Vec::new(),
            States::Raw | States::Normed => {
                let states = outputs.next().ok_or_else(|| Error::internal("a text encoder without states"))?;
                weighted(&states, &windows.iter().map(|w| w.weights.as_slice()).collect::<Vec<_>>())?
            }
        };
        let pooled = outputs.next().zip(windows.first()).and_then(|(pooled, window)| {
            pooled.values().chunks(self.pooled.max(1)).nth(window.end).map(<[f32]>::to_vec)
        });
        Ok(Encoded { states, pooled: pooled.unwrap_or_default() })
    }
}
