//! Prompts through T5's encoder.

use sd_core::{DType, Error, Graph, Program, Result, Scope, Tensor};

use super::{Encoded, Run, TextEncoder, Zeros, limit, weighted};
use crate::names::Part;
use crate::text::prompt::Piece;
use crate::text::t5;
use crate::text::tokenizer::{self, Unigram};

/// How a family uses T5's encoder. Padding is read like words, as the families do that have no mask.
#[derive(Debug)]
pub(crate) struct T5Recipe {
    /// Tokens of a window, its end and padding among them. Longer prompts take several.
    pub(crate) tokens: usize,
    /// What stands for it where no file has it, if the family can do without.
    pub(crate) absent: Option<Zeros>,
}

pub(super) struct Encoder {
    recipe: &'static T5Recipe,
    w: Scope,
    cfg: t5::Config,
}

impl Encoder {
    pub(super) fn detect(recipe: &'static T5Recipe, w: Scope) -> Result<Encoder> {
        let cfg = t5::Config::detect(&w)?;
        let ids = tokenizer::t5()?.size();
        if cfg.vocabulary < ids {
            return Err(Error::shape(format!("the T5 encoder knows {} tokens, T5 has {ids}", cfg.vocabulary)));
        }
        Ok(Encoder { recipe, w, cfg })
    }

    /// Ids and weights of the windows of a prompt, [`T5Recipe::tokens`] each.
    fn windows(&self, pieces: &[Piece]) -> Result<Vec<(Vec<i32>, Vec<f32>)>> {
        let tokenizer = tokenizer::t5()?;
        let mut tokens: Vec<(u32, f32)> = Vec::new();
        for (i, piece) in pieces.iter().enumerate() {
            // CLIP has windows that a prompt can end early; here they would be mostly padding.
            let Piece::Text(text, weight) = piece else { continue };
            // A space before the next piece is the mark that its first word starts with.
            let text = if i + 1 < pieces.len() { text.trim_end() } else { text };
            tokens.extend(tokenizer.encode(text).into_iter().map(|id| (id, *weight as f32)));
        }
        let window = |tokens: &[(u32, f32)]| {
            let mut tokens = tokens.to_vec();
            tokens.push((Unigram::END, 1.0));
            tokens.resize(self.recipe.tokens, (Unigram::PAD, 1.0));
            tokens.into_iter().map(|(id, weight)| (id as i32, weight)).unzip()
        };
        let most = self.recipe.tokens.saturating_sub(1).max(1);
        Ok(if tokens.is_empty() { vec![window(&[])] } else { tokens.chunks(most).map(window).collect() })
    }
}

impl TextEncoder for Encoder {
    fn part(&self) -> Part {
        Part::T5
    }

    fn width(&self) -> usize {
        self.cfg.width
    }

    fn tokens(&self) -> usize {
        self.recipe.tokens
    }

    fn pooled(&self) -> usize {
        0
    }

    fn beside(&self) -> bool {
        false
    }

    fn program(&self, batch: usize, _clip_skip: usize) -> Result<Program> {
        let g = Graph::new();
        let ids = g.input("ids", &[batch, self.recipe.tokens], DType::I32)?;
        g.finish(&[t5::build(&g, &self.w, &self.cfg, ids, None)?])
    }

    fn encode(&self, pieces: &[Piece], clip_skip: usize, run: &mut Run<'_>) -> Result<Encoded> {
        let windows = self.windows(pieces)?;
        limit(windows.len(), self.recipe.tokens)?;
        let program = self.program(windows.len(), clip_skip)?;
        let ids = windows.iter().flat_map(|w| w.0.iter().copied()).collect();
        let ids = Tensor::i32(&[windows.len(), self.recipe.tokens], ids)?;
        let states = run(Part::T5, &program, &[("ids", &ids)])?.into_iter().next();
        let states = states.ok_or_else(|| Error::internal("a text encoder without states"))?;
        let states = weighted(&states, &windows.iter().map(|w| w.1.as_slice()).collect::<Vec<_>>())?;
        Ok(Encoded { states, pooled: Vec::new() })
    }
}
