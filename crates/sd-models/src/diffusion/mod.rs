//! The networks that predict noise.

pub mod flux;
pub mod mmdit;
pub mod patches;
mod rope;
mod tile;
pub mod unet;

use std::fmt::Debug;
use std::ops::Range;

use sd_core::{DType, Error, Graph, Result, Scope, Tensor, Var};

use self::patches::ReferencePlan;
use crate::family::Joined;

pub(crate) use tile::{conv, pad};

/// What one evaluation of the diffusion network is built for. Equal values give equal programs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Evaluation {
    /// Latents at once.
    pub batch: usize,
    /// Height and width of the latent.
    pub size: [usize; 2],
    /// Tokens of the context.
    pub tokens: usize,
    /// Latent heights and widths of reference pictures.
    pub references: Vec<[usize; 2]>,
    /// Where several references are placed.
    pub reference_plan: ReferencePlan,
    /// Blocks that are left out, of those that [`crate::Info::blocks`] counts.
    pub skip: Vec<usize>,
    /// Whether the picture repeats down and across.
    pub circular: [bool; 2],
    /// Whether `control.0`, …, the [residuals of ControlNets](crate::adapter::controlnet), are inputs.
    pub control: bool,
    /// Which of the blocks that [`crate::Info::blocks`] counts are run.
    pub stretch: Stretch,
}

/// A part of a network of `blocks` blocks. Between parts goes one value, `hidden [b, n + t, c]`: the states of the text's
/// tokens, then those of the picture's. Run one after the other, parts give what the whole does, bit for bit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Stretch {
    /// The whole network.
    #[default]
    All,
    /// What comes before the blocks, and so many of them. Gives the hidden states, and how far those of the picture are
    /// from what entered the first block, `[b, t, c]`.
    Front(usize),
    /// The blocks from the first of these up to the second, from the input `hidden` to the hidden states after them.
    Middle([usize; 2]),
    /// The blocks from this one on and what comes after them, from the input `hidden` to the prediction.
    Back(usize),
}

impl Stretch {
    /// The blocks of it, of so many.
    fn range(self, blocks: usize) -> Range<usize> {
        match self {
            Stretch::All => 0..blocks,
            Stretch::Front(end) => 0..end,
            Stretch::Middle([start, end]) => start..end,
            Stretch::Back(start) => start..blocks,
        }
    }
}

/// What a network is, read off its weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Facts {
    /// Channels of the latent that it denoises.
    pub(crate) latent: usize,
    /// What is joined to the latent.
    pub(crate) joined: Joined,
    /// Channels of a context token.
    pub(crate) context: usize,
    /// Channels of the vector beside the context, if it reads one.
    pub(crate) vector: Option<usize>,
    /// Whether the strength of distilled guidance is an input.
    pub(crate) guidance: bool,
    /// Whether it takes reference pictures.
    pub(crate) references: bool,
    /// How many blocks can be left out.
    pub(crate) blocks: usize,
    /// Sides of a latent are multiples of this.
    pub(crate) multiple: usize,
    /// How a ControlNet splits its channels into heads, if the network takes the residuals of one.
    pub(crate) control: Option<unet::Heads>,
}

/// The inputs of an evaluation in its graph.
#[derive(Debug, Clone)]
pub(crate) struct Given {
    /// `[b, c, h, w]`.
    pub(crate) x: Var,
    /// `[b]`.
    pub(crate) timesteps: Var,
    /// `[b, t, k]`.
    pub(crate) context: Var,
    /// `[b, v]`, if the network reads one.
    pub(crate) vector: Option<Var>,
    /// `[b]`, if the network reads it.
    pub(crate) guidance: Option<Var>,
    /// `[b, k, h, w]`, if something is joined to the latent.
    pub(crate) joined: Option<Var>,
    /// `[b, c, h, w]` each, in sizes of their own.
    pub(crate) references: Vec<Var>,
}

impl Given {
    /// Declares the inputs that a network of these facts reads.
    pub(crate) fn declare(g: &Graph, facts: &Facts, e: &Evaluation) -> Result<Given> {
        let input = |name: &str, dims: &[usize]| g.input(name, dims, DType::F32);
        let (b, c, [h, w]) = (e.batch, facts.latent, e.size);
        let reference = |(i, [h, w]): (usize, &[usize; 2])| input(&format!("reference.{i}"), &[b, c, *h, *w]);
        Ok(Given {
            x: input("x", &[b, c, h, w])?,
            timesteps: input("timesteps", &[b])?,
            context: input("context", &[b, e.tokens, facts.context])?,
            vector: facts.vector.map(|v| input("vector", &[b, v])).transpose()?,
            guidance: facts.guidance.then(|| input("guidance", &[b])).transpose()?,
            joined: match facts.joined.channels(c) {
                0 => None,
                k => Some(input("joined", &[b, k, h, w])?),
            },
            references: e.references.iter().enumerate().map(reference).collect::<Result<_>>()?,
        })
    }
}

/// An error if a block to be left out is none of `blocks`.
fn may_skip(skip: &[usize], blocks: usize) -> Result<()> {
    let last = blocks.saturating_sub(1);
    let beyond = skip.iter().find(|&&i| i >= blocks);
    beyond.map_or(Ok(()), |i| Err(Error::request(format!("block {i} cannot be skipped, the last one is {last}"))))
}

/// A diffusion network with its sizes.
pub(crate) trait Network: Debug + Send + Sync {
    /// What it is.
    fn facts(&self) -> Facts;

    /// The prediction `[b, c, h, w]`. Tables are inputs that the network declares by the names of [`Network::tables`].
    fn build(&self, g: &Graph, w: &Scope, given: &Given, e: &Evaluation) -> Result<Var>;

    /// The results of a [`Stretch`] that is not [`Stretch::All`].
    fn build_stretch(&self, _g: &Graph, _w: &Scope, _given: &Given, _e: &Evaluation) -> Result<Vec<Var>> {
        Err(Error::request("only the blocks of diffusion transformers are run in parts"))
    }

    /// Inputs that follow from the evaluation alone, by name.
    fn tables(&self, _e: &Evaluation) -> Result<Vec<(&'static str, Tensor)>> {
        Ok(Vec::new())
    }
}
