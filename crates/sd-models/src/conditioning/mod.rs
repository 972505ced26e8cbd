//! From a prompt to what a diffusion network is conditioned on.

mod absent;
mod clip;
mod t5;

use sd_core::{Error, Program, Result, Tensor};

use crate::adapter::embedding::Embeddings;
use crate::component::Component;
use crate::names::Part;
use crate::text::prompt::{self, Piece};
use crate::text::windows;

pub(crate) use absent::Zeros;
pub(crate) use clip::{ClipRecipe, Pooled, States};
pub(crate) use t5::T5Recipe;

/// The most tokens a prompt can have; attention over them grows with the picture.
const MAX_TOKENS: usize = 4800;
/// Values that stand for each number beside the pooled text (`addition_time_embed_dim`).
const SINUSOID: usize = 256;
const MAX_PERIOD: f64 = 10_000.0;
/// What SDXL's refiner is told of the looks of what it makes and of what it should not make (`aesthetic_score` and
/// `negative_aesthetic_score` of diffusers' pipeline).
const SCORES: [f64; 2] = [6.0, 2.5];

/// How a family uses a text encoder.
///
/// The states of CLIP encoders stand side by side, channel by channel; those of others come after them, token by token,
/// and the narrower rows are filled up with zeros.
#[derive(Debug)]
pub(crate) enum TextRecipe {
    Clip(ClipRecipe),
    T5(T5Recipe),
}

impl TextRecipe {
    /// Where its weights are.
    pub(crate) fn part(&self) -> Part {
        match self {
            TextRecipe::Clip(recipe) => recipe.part,
            TextRecipe::T5(_) => Part::T5,
        }
    }

    /// The encoder in `component`, with its sizes.
    pub(crate) fn detect(&'static self, component: &Component) -> Result<Box<dyn TextEncoder>> {
        let w = component.scope().clone();
        Ok(match self {
            TextRecipe::Clip(recipe) => Box::new(clip::Encoder::detect(recipe, w)?),
            TextRecipe::T5(recipe) => Box::new(t5::Encoder::detect(recipe, w)?),
        })
    }

    /// What stands for the encoder where no file has it; `None` if the family cannot do without.
    pub(crate) fn absent(&self) -> Option<Box<dyn TextEncoder>> {
        let (zeros, tokens, beside) = match self {
            TextRecipe::Clip(recipe) => (recipe.absent?, windows::CONTEXT, true),
            TextRecipe::T5(recipe) => (recipe.absent?, recipe.tokens, false),
        };
        Some(Box::new(absent::Encoder { part: self.part(), zeros, tokens, beside }))
    }
}

/// A text encoder with its weights and sizes.
pub(crate) trait TextEncoder: Send + Sync {
    /// Where its weights are.
    fn part(&self) -> Part;

    /// Channels of the states that it adds to the context; 0 if it adds none.
    fn width(&self) -> usize;

    /// Tokens of its shortest context.
    fn tokens(&self) -> usize;

    /// Channels of its pooled state; 0 without one.
    fn pooled(&self) -> usize;

    /// Whether its states stand beside those of the encoder before, not after them.
    fn beside(&self) -> bool;

    /// `"ids" [b, tokens]` i32 to the states `[b, tokens, c]`, if it adds any, and to those that are pooled.
    fn program(&self, batch: usize, clip_skip: usize) -> Result<Program>;

    /// Builds the graph that the family runs, and one of all that the encoder has, so that what is left out by choice does
    /// not count as unknown.
    fn dry_run(&self, clip_skip: usize) -> Result<()> {
        self.program(1, clip_skip).map(|_| ())
    }

    /// The weighted states of a prompt, row by row, and its pooled state.
    fn encode(&self, pieces: &[Piece], clip_skip: usize, run: &mut Run<'_>) -> Result<Encoded>;
}

/// What a text encoder makes of a prompt.
#[derive(Debug, Clone, Default)]
pub(crate) struct Encoded {
    /// `[tokens, width]`.
    pub(crate) states: Vec<f32>,
    /// `[pooled]`.
    pub(crate) pooled: Vec<f32>,
}

impl Encoded {
    /// Zeros for the shortest context.
    fn zeros(encoder: &dyn TextEncoder) -> Encoded {
        let states = vec![0.0; encoder.tokens() * encoder.width()];
        Encoded { states, pooled: vec![0.0; encoder.pooled()] }
    }
}

/// What a network is told beside the context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Vector {
    /// Nothing.
    None,
    /// The pooled states of all encoders.
    Pooled,
    /// The pooled text, then sinusoids of the picture's height and width, the top and left of its crop, and again
    /// height and width (Podell et al. 2023, section 2.2).
    PooledAndSizes,
    /// The pooled text, then sinusoids of the picture's height and width, the top and left of its crop, and a score of
    /// its looks.
    PooledAndScore,
}

impl Vector {
    /// The numbers beside the pooled text.
    fn numbers(self, prompt: &Prompt<'_>) -> Vec<f64> {
        let [w, h] = prompt.size.map(|n| n as f64);
        let [score, negative] = SCORES;
        match self {
            Vector::None | Vector::Pooled => Vec::new(),
            Vector::PooledAndSizes => vec![h, w, 0.0, 0.0, h, w],
            Vector::PooledAndScore => vec![h, w, 0.0, 0.0, if prompt.negative { negative } else { score }],
        }
    }
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

/// Runs the encoders.
pub(crate) fn encode(
    encoders: &[Box<dyn TextEncoder>],
    vector: Vector,
    zero_negative: bool,
    prompt: &Prompt<'_>,
    embeddings: &Embeddings,
    run: &mut Run<'_>,
) -> Result<Conditioning> {
    let zeros = zero_negative && prompt.negative && prompt.text.is_empty();
    let pieces = embeddings.apply(prompt::parse(prompt.text));
    let (mut states, mut pooled) = (Vec::new(), Vec::new());
    for encoder in encoders {
        let encoded = if zeros {
            Encoded::zeros(encoder.as_ref())
        } else {
            encoder.encode(&pieces, prompt.clip_skip, run)?
        };
        states.push((encoder.as_ref(), encoded.states));
        pooled.extend(encoded.pooled);
    }
    let context = context(&states)?;
    let vector = if vector == Vector::None {
        None
    } else {
        pooled.extend(vector.numbers(prompt).into_iter().flat_map(sinusoid));
        Some(Tensor::f32(&[1, pooled.len()], pooled)?)
    };
    Ok(Conditioning { context, vector })
}

/// Encoders whose states stand side by side, in order.
fn bands<T>(encoders: Vec<T>, encoder: impl Fn(&T) -> &dyn TextEncoder) -> Vec<Vec<T>> {
    let mut bands: Vec<Vec<T>> = Vec::new();
    for e in encoders.into_iter().filter(|e| encoder(e).width() > 0) {
        match bands.last_mut() {
            Some(band) if encoder(&e).beside() => band.push(e),
            _ => bands.push(vec![e]),
        }
    }
    bands
}

/// The context `[1, tokens, c]` of the states of all encoders.
fn context(states: &[(&dyn TextEncoder, Vec<f32>)]) -> Result<Tensor> {
    let bands = bands(states.iter().collect(), |s| s.0);
    let width_of = |band: &[&(&dyn TextEncoder, Vec<f32>)]| band.iter().map(|(e, _)| e.width()).sum::<usize>();
    let width = bands.iter().map(|b| width_of(b)).max().unwrap_or(0);
    let mut values = Vec::new();
    for band in &bands {
        // Windows hold the same words for every encoder of a band; one that is absent has those of a short prompt.
        let rows = band.iter().map(|(e, s)| s.len() / e.width().max(1)).max().unwrap_or(0);
        for row in 0..rows {
            for (e, s) in band {
                values.extend(s.iter().skip(row * e.width()).chain(std::iter::repeat(&0.0)).take(e.width()));
            }
            values.resize(values.len() + width - width_of(band), 0.0);
        }
    }
    Tensor::f32(&[1, values.len() / width.max(1), width], values)
}

/// How wide the context and the vector are that encoders give, and how many tokens the shortest context has.
pub(crate) fn sizes(encoders: &[Box<dyn TextEncoder>], vector: Vector) -> Sizes {
    let bands = bands(encoders.iter().collect(), |e| e.as_ref());
    let width = |band: &Vec<&Box<dyn TextEncoder>>| band.iter().map(|e| e.width()).sum::<usize>();
    let nothing = Prompt { text: "", negative: false, clip_skip: 1, size: [0; 2] };
    let pooled: usize = encoders.iter().map(|e| e.pooled()).sum();
    Sizes {
        context: bands.iter().map(width).max().unwrap_or(0),
        vector: (vector != Vector::None).then(|| pooled + vector.numbers(&nothing).len() * SINUSOID),
        tokens: bands.iter().filter_map(|b| b.first()).map(|e| e.tokens()).sum(),
    }
}

/// See [`sizes`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub(crate) context: usize,
    pub(crate) vector: Option<usize>,
    pub(crate) tokens: usize,
}

/// The states `[n, t, c]` of `n` windows, each weighted on its own.
fn weighted(states: &Tensor, weights: &[&[f32]]) -> Result<Vec<f32>> {
    let [_, t, c] = states
        .shape()
        .array()
        .filter(|[n, t, _]| *n == weights.len() && weights.iter().all(|w| w.len() == *t))
        .ok_or_else(|| Error::internal(format!("states {} for {} windows", states.shape(), weights.len())))?;
    let mut values = Vec::with_capacity(states.shape().elements());
    for (weights, part) in weights.iter().zip(states.values().chunks(t * c)) {
        let mut part = Tensor::f32(&[t, c], part.to_vec())?;
        windows::weigh(&mut part, weights)?;
        values.append(&mut part.into_values());
    }
    Ok(values)
}

/// An error if a prompt has too many windows of `tokens` tokens.
fn limit(windows: usize, tokens: usize) -> Result<()> {
    if windows <= MAX_TOKENS.div_ceil(tokens) {
        return Ok(());
    }
    Err(Error::request(format!("prompt: more than {MAX_TOKENS} tokens, in windows of {tokens}")))
}

/// Cosines, then sines, of falling frequencies (`Timesteps` of diffusers).
fn sinusoid(number: f64) -> impl Iterator<Item = f32> {
    let half = SINUSOID / 2;
    let angle = move |i: usize| number * (-MAX_PERIOD.ln() * i as f64 / half as f64).exp();
    (0..half).map(move |i| angle(i).cos() as f32).chain((0..half).map(move |i| angle(i).sin() as f32))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoder(width: usize, tokens: usize, beside: bool) -> Box<dyn TextEncoder> {
        let part = if beside { Part::ClipL } else { Part::T5 };
        Box::new(absent::Encoder { part, zeros: Zeros { width, pooled: 2 }, tokens, beside })
    }

    /// Two CLIPs side by side, then T5, as SD 3 has them.
    #[test]
    fn rows_stand_side_by_side_or_one_after_the_other() {
        let all = [encoder(1, 2, true), encoder(2, 2, true), encoder(4, 3, false)];
        let states = [vec![1.0, 2.0], vec![3.0, 4.0, 5.0, 6.0], (10..22).map(|v| v as f32).collect()];
        let states: Vec<_> = all.iter().map(AsRef::as_ref).zip(states).collect();
        let got = context(&states).unwrap();
        assert_eq!(got.dims(), [1, 5, 4]);
        let clips = [1.0, 3.0, 4.0, 0.0, 2.0, 5.0, 6.0, 0.0];
        assert_eq!(got.values()[..8], clips);
        assert_eq!(got.values()[8..], (10..22).map(|v| v as f32).collect::<Vec<_>>());
        assert_eq!(sizes(&all, Vector::Pooled), Sizes { context: 4, vector: Some(6), tokens: 5 });
        assert_eq!(sizes(&all, Vector::None).vector, None);
    }

    #[test]
    fn absent_encoders_are_zeros() {
        let all = [encoder(1, 2, true), encoder(4, 3, false)];
        let prompt = Prompt { text: "cat", negative: false, clip_skip: 1, size: [8, 8] };
        let got = encode(&all, Vector::Pooled, false, &prompt, &Embeddings::default(), &mut |_, _, _| {
            panic!("nothing runs")
        })
        .unwrap();
        assert_eq!((got.context.dims(), got.vector.unwrap().dims()), (&[1, 5, 4][..], &[1, 4][..]));
        assert!(got.context.values().iter().all(|v| *v == 0.0));
        // An encoder that is there may have more rows than one that is not.
        let states = [(all[0].as_ref(), vec![1.0, 2.0, 3.0]), (all[0].as_ref(), vec![0.0, 0.0])];
        assert_eq!(context(&states).unwrap().values(), [1.0, 0.0, 2.0, 0.0, 3.0, 0.0]);
    }
}
