//! From a prompt to what a diffusion network is conditioned on.

use sd_core::{DType, Error, Graph, Program, Result, Tensor};

use crate::component::Component;
use crate::names::Part;
use crate::text::clip::{self, Activation, Wanted};
use crate::text::prompt::{self, Piece};
use crate::text::tokenizer::{self, ClipTokenizer};
use crate::text::windows::{self, CONTEXT, WINDOW, Window};

/// The most windows of tokens a prompt can have; attention over them grows with the picture.
const MAX_WINDOWS: usize = 64;
/// Values that stand for each number of [`Vector::PooledAndSizes`] (`addition_time_embed_dim`), and how many there are.
const SINUSOID: usize = 256;
const SIZES: usize = 6;
const MAX_PERIOD: f64 = 10_000.0;

/// How a family uses a CLIP text encoder.
#[derive(Debug)]
pub(crate) struct ClipRecipe {
    pub(crate) part: Part,
    pub(crate) activation: Activation,
    /// The token after the end of a prompt.
    pub(crate) filler: u32,
    /// Whether the states go through the final norm.
    pub(crate) normed: bool,
    /// Whether the projected state of the first window's end is a part of the vector.
    pub(crate) pooled: bool,
    /// How many layers it was trained with, if files leave the last one out: diffusers' SD 2.x does.
    pub(crate) trained_layers: Option<usize>,
}

/// What a network is told beside the context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Vector {
    /// Nothing.
    None,
    /// The pooled text, then sinusoids of the picture's height and width, the top and left of its crop, and again
    /// height and width (Podell et al. 2023, section 2.2).
    PooledAndSizes,
}

/// What is to be encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prompt<'a> {
    /// With A1111 weights and `BREAK`.
    pub text: &'a str,
    /// Whether it says what the picture should not show.
    pub negative: bool,
    /// 1 for the text encoders' last layers, 2 for those before, and so on.
    pub clip_skip: usize,
    /// Width and height of the picture in pixels.
    pub size: [usize; 2],
}

/// What a diffusion network is conditioned on.
#[derive(Debug, Clone, PartialEq)]
pub struct Conditioning {
    /// `[1, tokens, c]`.
    pub context: Tensor,
    /// `[1, v]`, if the network reads one.
    pub vector: Option<Tensor>,
}

impl Conditioning {
    /// Whether no value is NaN or infinite.
    pub fn is_finite(&self) -> bool {
        self.context.is_finite() && self.vector.as_ref().is_none_or(Tensor::is_finite)
    }
}

/// Runs a program of a part on inputs by name.
pub type Run<'a> = dyn FnMut(Part, &Program, &[(&str, &Tensor)]) -> Result<Vec<Tensor>> + 'a;

/// A CLIP text encoder with its sizes.
#[derive(Debug)]
pub(crate) struct Encoder {
    recipe: &'static ClipRecipe,
    cfg: clip::Config,
    /// Channels of the pooled state; 0 without one.
    pooled: usize,
}

impl Encoder {
    /// The encoder in `component`.
    pub(crate) fn detect(recipe: &'static ClipRecipe, component: &Component) -> Result<Encoder> {
        let w = component.scope();
        let mut cfg = clip::Config::detect(w, recipe.activation)?;
        let ids = ClipTokenizer::END as usize + 1;
        if cfg.vocabulary < ids {
            return Err(Error::shape(format!("the text encoder knows {} tokens, CLIP has {ids}", cfg.vocabulary)));
        }
        if cfg.positions < CONTEXT {
            return Err(Error::shape(format!("the text encoder has {} positions, want {CONTEXT}", cfg.positions)));
        }
        cfg.cut = usize::from(recipe.trained_layers.is_some_and(|n| cfg.layers + 1 == n));
        let pooled = match recipe.pooled {
            true => w.dims("text_projection.weight").map(|[n, _]| n)?,
            false => 0,
        };
        Ok(Encoder { recipe, cfg, pooled })
    }

    /// Where it is.
    pub(crate) fn part(&self) -> Part {
        self.recipe.part
    }

    /// Channels of its states.
    pub(crate) fn width(&self) -> usize {
        self.cfg.width
    }

    /// `ids [b, 77]` i32 to states `[b, 77, c]`, and to projected ones if they are used.
    pub(crate) fn program(&self, component: &Component, batch: usize, clip_skip: usize) -> Result<Program> {
        let g = Graph::new();
        let ids = g.input("ids", &[batch, CONTEXT], DType::I32)?;
        let wanted = Wanted { clip_skip, normed: self.recipe.normed, projected: self.recipe.pooled };
        let states = clip::build(&g, component.scope(), &self.cfg, ids, wanted)?;
        g.finish(&[Some(states.tokens), states.projected].into_iter().flatten().collect::<Vec<_>>())
    }

    /// Builds the graph that a family runs, and one of all that the encoder has, so that what is left out by choice does
    /// not count as unknown.
    pub(crate) fn dry_run(&self, component: &Component, clip_skip: usize) -> Result<()> {
        self.program(component, 1, clip_skip)?;
        let (g, w) = (Graph::new(), component.scope());
        let ids = g.input("ids", &[1, CONTEXT], DType::I32)?;
        let normed = w.contains("text_model.final_layer_norm");
        let projected = normed && w.contains("text_projection");
        clip::build(&g, w, &self.cfg, ids, Wanted { clip_skip: self.cfg.cut + 1, normed, projected }).map(|_| ())
    }

    /// The weighted states `[t, c]` of all windows one after the other, row by row, and the pooled state.
    pub(crate) fn encode(
        &self,
        component: &Component,
        pieces: &[Piece],
        clip_skip: usize,
        run: &mut Run<'_>,
    ) -> Result<[Vec<f32>; 2]> {
        let windows = windows::windows(tokenizer::clip()?, pieces, self.recipe.filler);
        if windows.len() > MAX_WINDOWS {
            let most = MAX_WINDOWS * WINDOW;
            return Err(Error::request(format!("prompt: more than {most} tokens, in windows of {WINDOW}")));
        }
        let program = self.program(component, windows.len(), clip_skip).map_err(|e| e.context("clip_skip"))?;
        let ids = windows.iter().flat_map(|w| w.ids.iter().copied()).collect();
        let ids = Tensor::i32(&[windows.len(), CONTEXT], ids)?;
        let mut outputs = run(self.part(), &program, &[("ids", &ids)])?.into_iter();
        let states = outputs.next().ok_or_else(|| Error::internal("a text encoder without states"))?;
        let states = weighted(&states, &windows)?;
        let pooled = outputs.next().zip(windows.first()).and_then(|(projected, window)| {
            projected.values().chunks(self.pooled.max(1)).nth(window.end).map(<[f32]>::to_vec)
        });
        Ok([states, pooled.unwrap_or_default()])
    }
}

/// The states `[n, 77, c]` of `n` windows, each weighted on its own.
fn weighted(states: &Tensor, windows: &[Window]) -> Result<Vec<f32>> {
    let [_, t, c] = states
        .shape()
        .array()
        .filter(|[n, t, _]| (*n, *t) == (windows.len(), CONTEXT))
        .ok_or_else(|| Error::internal(format!("states {} for {} windows", states.shape(), windows.len())))?;
    let mut values = Vec::with_capacity(states.shape().elements());
    for (window, part) in windows.iter().zip(states.values().chunks(t * c)) {
        let mut part = Tensor::f32(&[t, c], part.to_vec())?;
        windows::weigh(&mut part, &window.weights)?;
        values.append(&mut part.into_values());
    }
    Ok(values)
}

/// Runs the encoders, whose components stand beside them.
pub(crate) fn encode(
    encoders: &[(&Encoder, &Component)],
    vector: Vector,
    zero_negative: bool,
    prompt: &Prompt<'_>,
    run: &mut Run<'_>,
) -> Result<Conditioning> {
    let width: usize = encoders.iter().map(|(e, _)| e.width()).sum();
    let zeros = zero_negative && prompt.negative && prompt.text.is_empty();
    let (mut states, mut pooled) = (Vec::new(), Vec::new());
    let pieces = prompt::parse(prompt.text);
    for (encoder, component) in encoders {
        if zeros {
            states.push((vec![0.0; CONTEXT * encoder.width()], encoder.width()));
            pooled.resize(pooled.len() + encoder.pooled, 0.0);
        } else {
            let [s, mut p] = encoder.encode(component, &pieces, prompt.clip_skip, run)?;
            states.push((s, encoder.width()));
            pooled.append(&mut p);
        }
    }
    // Windows hold the same words for every encoder, so there are as many rows of each.
    let rows = states.first().map_or(0, |(s, c)| s.len() / (*c).max(1));
    let mut context = Vec::with_capacity(rows * width);
    for row in 0..rows {
        context.extend(states.iter().flat_map(|(s, c)| s.iter().skip(row * c).take(*c)));
    }
    let context = Tensor::f32(&[1, rows, width], context)?;
    let vector = match vector {
        Vector::None => None,
        Vector::PooledAndSizes => {
            let [w, h] = prompt.size;
            pooled.extend([h, w, 0, 0, h, w].into_iter().flat_map(|n| sinusoid(n as f64)));
            Some(Tensor::f32(&[1, pooled.len()], pooled)?)
        }
    };
    Ok(Conditioning { context, vector })
}

/// How wide the context and the vector are that encoders give.
pub(crate) fn widths(encoders: &[Encoder], vector: Vector) -> (usize, Option<usize>) {
    let pooled = encoders.iter().map(|e| e.pooled).sum::<usize>();
    let vector = match vector {
        Vector::None => None,
        Vector::PooledAndSizes => Some(pooled + SIZES * SINUSOID),
    };
    (encoders.iter().map(Encoder::width).sum(), vector)
}

/// Cosines, then sines, of falling frequencies (`Timesteps` of diffusers).
fn sinusoid(number: f64) -> impl Iterator<Item = f32> {
    let half = SINUSOID / 2;
    let angle = move |i: usize| number * (-MAX_PERIOD.ln() * i as f64 / half as f64).exp();
    (0..half).map(move |i| angle(i).cos() as f32).chain((0..half).map(move |i| angle(i).sin() as f32))
}
