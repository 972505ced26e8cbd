//! The registry of families: what each of them is made of and how it is run. A new family is a row here, one in
//! `detect`, a model file, a table of names and an oracle script.

use std::str::FromStr;

use sd_core::{Error, Result, Scope, Tensor};

use crate::conditioning::{ClipRecipe, Pooled, States, T5Recipe, TextRecipe, Vector, Zeros};
use crate::diffusion::unet::{self, Heads};
use crate::diffusion::{Network, flux, mmdit};
use crate::names::Part;
use crate::text::clip::Activation;
use crate::text::tokenizer::ClipTokenizer;

/// Families that can be run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// Stable Diffusion 1.x.
    Sd1,
    /// Stable Diffusion 2.x.
    Sd2,
    /// Stable Diffusion XL with its pruned descendants.
    Sdxl,
    /// Its refiner, for the last part of the way.
    SdxlRefiner,
    /// FLUX.1 dev, and Kontext, which differs in its weights only.
    Flux,
    /// FLUX.1 schnell: no guidance, few steps.
    FluxSchnell,
    /// FLUX.1 Fill.
    FluxFill,
    /// FLUX.1 Depth and Canny.
    FluxControl,
    /// Stable Diffusion 3 medium.
    Sd3,
    /// Stable Diffusion 3.5 medium.
    Sd35Medium,
    /// Stable Diffusion 3.5 large, and its turbo, which differs in its weights only.
    Sd35Large,
}

/// What the files of a family do not say themselves.
#[derive(Debug)]
pub(crate) struct Recipe {
    pub(crate) name: &'static str,
    /// Reads the sizes of the network off its weights.
    pub(crate) network: fn(&Scope) -> Result<Box<dyn Network>>,
    /// The text encoders, in the order of their states and pooled states.
    pub(crate) encoders: &'static [TextRecipe],
    pub(crate) vector: Vector,
    /// Whether an empty negative prompt is all zeros instead of an encoded empty text.
    pub(crate) zero_negative: bool,
    /// Scale and shift of [`Latent`].
    pub(crate) latent: [f32; 2],
    /// Shift and time scale of [`Noise::Flow`]; `None` if the file or [`Noise::ScaledLinear`] has the levels.
    pub(crate) flow: Option<(Shift, f64)>,
    /// What a network predicts if no marker says so; `None` if only a try can tell.
    pub(crate) prediction: Option<Prediction>,
    pub(crate) defaults: Defaults,
    /// Width and height in pixels if the network predicts the velocity and the file names no size.
    pub(crate) size_of_v: [usize; 2],
}

/// OpenAI's text encoder as SD 1.x uses it.
const CLIP_L: ClipRecipe = ClipRecipe {
    part: Part::ClipL,
    activation: Activation::QuickGelu,
    filler: ClipTokenizer::END,
    states: States::Normed,
    pooled: Pooled::None,
    trained_layers: None,
    absent: None,
};

/// OpenCLIP's bigG as SDXL uses it.
const CLIP_G: ClipRecipe = ClipRecipe {
    part: Part::ClipG,
    activation: Activation::Gelu,
    filler: 0,
    states: States::Raw,
    pooled: Pooled::Projected,
    trained_layers: None,
    absent: None,
};

const SD1: Recipe = Recipe {
    name: "SD 1.x",
    network: |w| boxed(unet::Config::detect(w, Heads::Count(8))),
    encoders: &[TextRecipe::Clip(CLIP_L)],
    vector: Vector::None,
    zero_negative: false,
    latent: [0.18215, 0.0],
    flow: None,
    prediction: Some(Prediction::Epsilon),
    defaults: Defaults {
        size: [512, 512],
        steps: 20,
        cfg: 7.0,
        guidance: 3.5,
        sampler: "euler_a",
        schedule: "discrete",
        clip_skip: 1,
    },
    size_of_v: [512, 512],
};

const SD2: Recipe = Recipe {
    name: "SD 2.x",
    network: |w| boxed(unet::Config::detect(w, Heads::Width(64))),
    encoders: &[TextRecipe::Clip(ClipRecipe {
        activation: Activation::Gelu,
        filler: 0,
        trained_layers: Some(24),
        ..CLIP_L
    })],
    prediction: None,
    defaults: Defaults { clip_skip: 2, ..SD1.defaults },
    size_of_v: [768, 768],
    ..SD1
};

const SDXL: Recipe = Recipe {
    name: "SDXL",
    network: |w| boxed(unet::Config::detect(w, Heads::Width(64))),
    encoders: &[TextRecipe::Clip(ClipRecipe { states: States::Raw, ..CLIP_L }), TextRecipe::Clip(CLIP_G)],
    vector: Vector::PooledAndSizes,
    zero_negative: true,
    latent: [0.13025, 0.0],
    flow: None,
    prediction: Some(Prediction::Epsilon),
    defaults: Defaults { size: [1024, 1024], clip_skip: 2, ..SD1.defaults },
    size_of_v: [1024, 1024],
};

const SDXL_REFINER: Recipe = Recipe {
    name: "SDXL refiner",
    encoders: &[TextRecipe::Clip(CLIP_G)],
    vector: Vector::PooledAndScore,
    zero_negative: false,
    ..SDXL
};

/// Defaults are those of diffusers' pipelines and of the model cards.
const FLUX: Recipe = Recipe {
    name: "FLUX.1 dev",
    network: |w| boxed(flux::Config::detect(w)),
    encoders: &flux_encoders(512),
    vector: Vector::Pooled,
    zero_negative: false,
    latent: [0.3611, 0.1159],
    flow: Some((Shift::Resolution { tokens: [256.0, 4096.0], mu: [0.5, 1.15] }, 1.0)),
    prediction: Some(Prediction::Flow),
    defaults: Defaults {
        size: [1024, 1024],
        steps: 28,
        cfg: 1.0,
        guidance: 3.5,
        sampler: "euler",
        schedule: "flux",
        clip_skip: 1,
    },
    size_of_v: [1024, 1024],
};

const FLUX_SCHNELL: Recipe = Recipe {
    name: "FLUX.1 schnell",
    encoders: &flux_encoders(256),
    flow: Some((Shift::Constant(1.0), 1.0)),
    defaults: Defaults { steps: 4, schedule: "simple", ..FLUX.defaults },
    ..FLUX
};

const FLUX_FILL: Recipe =
    Recipe { name: "FLUX.1 Fill", defaults: Defaults { guidance: 30.0, ..FLUX.defaults }, ..FLUX };

const FLUX_CONTROL: Recipe =
    Recipe { name: "FLUX.1 Depth/Canny", defaults: Defaults { guidance: 10.0, ..FLUX.defaults }, ..FLUX };

/// What stands for the text encoders of SD 3 has the widths of the published ones. Defaults are those of diffusers'
/// pipeline; those of 3.5 are the model cards'.
const SD3: Recipe = Recipe {
    name: "SD 3",
    network: |w| boxed(mmdit::Config::detect(w)),
    encoders: &[
        TextRecipe::Clip(ClipRecipe {
            states: States::Raw,
            pooled: Pooled::Normed,
            absent: Some(Zeros { width: 768, pooled: 768 }),
            ..CLIP_L
        }),
        TextRecipe::Clip(ClipRecipe { absent: Some(Zeros { width: 1280, pooled: 1280 }), ..CLIP_G }),
        TextRecipe::T5(T5Recipe { tokens: 256, absent: Some(Zeros { width: 4096, pooled: 0 }) }),
    ],
    vector: Vector::Pooled,
    zero_negative: false,
    latent: [1.5305, 0.0609],
    flow: Some((Shift::Constant(3.0), 1000.0)),
    prediction: Some(Prediction::Flow),
    defaults: Defaults {
        size: [1024, 1024],
        steps: 28,
        cfg: 7.0,
        guidance: 3.5,
        sampler: "euler",
        schedule: "discrete",
        clip_skip: 2,
    },
    size_of_v: [1024, 1024],
};

const SD35_MEDIUM: Recipe =
    Recipe { name: "SD 3.5 medium", defaults: Defaults { steps: 40, cfg: 4.5, ..SD3.defaults }, ..SD3 };

const SD35_LARGE: Recipe = Recipe { name: "SD 3.5 large", defaults: Defaults { cfg: 3.5, ..SD3.defaults }, ..SD3 };

const fn flux_encoders(tokens: usize) -> [TextRecipe; 2] {
    let clip = ClipRecipe { states: States::None, pooled: Pooled::Normed, ..CLIP_L };
    [TextRecipe::Clip(clip), TextRecipe::T5(T5Recipe { tokens, absent: None })]
}

fn boxed(network: Result<impl Network + 'static>) -> Result<Box<dyn Network>> {
    network.map(|n| Box::new(n) as Box<dyn Network>)
}

impl Family {
    pub(crate) fn recipe(self) -> &'static Recipe {
        match self {
            Family::Sd1 => &SD1,
            Family::Sd2 => &SD2,
            Family::Sdxl => &SDXL,
            Family::SdxlRefiner => &SDXL_REFINER,
            Family::Flux => &FLUX,
            Family::FluxSchnell => &FLUX_SCHNELL,
            Family::FluxFill => &FLUX_FILL,
            Family::FluxControl => &FLUX_CONTROL,
            Family::Sd3 => &SD3,
            Family::Sd35Medium => &SD35_MEDIUM,
            Family::Sd35Large => &SD35_LARGE,
        }
    }

    /// The parts that it cannot do without.
    pub(crate) fn needed(self) -> Vec<Part> {
        let encoders = self.recipe().encoders.iter().filter(|e| e.absent().is_none()).map(TextRecipe::part);
        [Part::Diffusion].into_iter().chain(encoders).chain([Part::Autoencoder]).collect()
    }

    /// What users call it.
    pub fn name(self) -> &'static str {
        self.recipe().name
    }
}

/// What the diffusion network predicts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prediction {
    /// The noise.
    Epsilon,
    /// The velocity (Salimans & Ho 2022).
    V,
    /// The way from the picture to the noise, `n - x0`, where a latent of level `s` is `(1 - s) x0 + s n` (Liu et al. 2022).
    Flow,
}

/// The noise levels that a network was trained on.
#[derive(Debug, Clone, PartialEq)]
pub enum Noise {
    /// Stable Diffusion's table.
    ScaledLinear,
    /// That table, rescaled to end in noise alone (Lin et al. 2023, algorithm 1).
    ZeroTerminalSnr,
    /// A table of the file: 1000 cumulative products of `1 - beta`.
    AlphasCumprod(Vec<f32>),
    /// Every level between two, told to the network as a quarter of its logarithm (Karras et al. 2022).
    Continuous {
        /// The least.
        min: f64,
        /// The largest.
        max: f64,
    },
    /// Every level from 0 to 1, told to the network as it is times `time_scale`.
    Flow {
        /// How the levels of a run are moved towards noise.
        shift: Shift,
        /// 1000 for networks that want a timestep, 1 for those that multiply themselves.
        time_scale: f64,
    },
}

/// What moves evenly spaced levels `u` to `a u / (1 + (a - 1) u)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Shift {
    /// `a` itself.
    Constant(f64),
    /// `a` is `exp(m)`, where `m` is linear in the number of a picture's tokens of 2×2 latent values.
    Resolution {
        /// Two numbers of tokens.
        tokens: [f64; 2],
        /// `m` at each.
        mu: [f64; 2],
    },
}

/// What a network reads as further channels of the latent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Joined {
    /// Nothing.
    None,
    /// A mask, 1 where the picture is repainted, and the latent of the picture without that part.
    Inpaint,
    /// The latent of the picture to be edited, not scaled (Brooks et al. 2023).
    Picture,
    /// The scaled latent of the picture without what is repainted, and the mask of its pixels: 64 channels, the places
    /// in the 8×8 cell of a latent value row by row.
    Fill,
    /// The scaled latent of a picture of depths or edges.
    Control,
}

impl Joined {
    /// How many channels that is beside a latent of `latent` channels.
    pub fn channels(self, latent: usize) -> usize {
        match self {
            Joined::None => 0,
            Joined::Inpaint => latent.saturating_add(1),
            Joined::Picture | Joined::Control => latent,
            Joined::Fill => latent.saturating_add(64),
        }
    }
}

/// The latents that the diffusion network works on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Latent {
    /// Channels.
    pub channels: usize,
    /// Pixels per value in each axis.
    pub compression: usize,
    /// The network's values are `(autoencoder's - shift) * scale`.
    pub scale: f32,
    /// See `scale`.
    pub shift: f32,
}

impl Latent {
    /// The autoencoder's values as the network's, in place.
    pub fn to_network(&self, latent: &mut Tensor) {
        latent.values_mut().iter_mut().for_each(|x| *x = (*x - self.shift) * self.scale);
    }

    /// The network's values as the autoencoder's, in place.
    pub fn to_autoencoder(&self, latent: &mut Tensor) {
        latent.values_mut().iter_mut().for_each(|x| *x = *x / self.scale + self.shift);
    }
}

/// The latents that an autoencoder makes, where that is not the one of the family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VaeFormat {
    /// FLUX.1's.
    Flux,
    /// SD 3's.
    Sd3,
}

impl VaeFormat {
    /// Channels of the latents.
    pub(crate) fn channels(self) -> usize {
        match self {
            VaeFormat::Flux | VaeFormat::Sd3 => 16,
        }
    }

    /// Scale and shift of [`Latent`].
    pub(crate) fn latent(self) -> [f32; 2] {
        match self {
            VaeFormat::Flux => FLUX.latent,
            VaeFormat::Sd3 => SD3.latent,
        }
    }
}

impl FromStr for VaeFormat {
    type Err = Error;

    fn from_str(name: &str) -> Result<VaeFormat> {
        match name {
            "flux" => Ok(VaeFormat::Flux),
            "sd3" => Ok(VaeFormat::Sd3),
            "flux2" | "wan" => Err(Error::unsupported(format!("vae_format: {name} is not supported yet"))),
            _ => Err(Error::request("vae_format: want auto, flux, sd3, flux2 or wan")),
        }
    }
}

/// What a request is filled up with, by names that the runtime knows.
#[derive(Debug, Clone, PartialEq)]
pub struct Defaults {
    /// Width and height in pixels.
    pub size: [usize; 2],
    /// Denoising steps.
    pub steps: usize,
    /// Classifier-free guidance.
    pub cfg: f32,
    /// Distilled guidance, where [`Info::guidance`] says that it is an input.
    pub guidance: f32,
    /// Sampler.
    pub sampler: &'static str,
    /// Schedule.
    pub schedule: &'static str,
    /// 1 for the last layer of the text encoder.
    pub clip_skip: usize,
}

/// Facts about an open model.
#[derive(Debug, Clone, PartialEq)]
pub struct Info {
    /// Which family it is.
    pub family: Family,
    /// What a request leaves open.
    pub defaults: Defaults,
    /// Width and height in pixels are multiples of this.
    pub size_multiple: usize,
    /// The latents.
    pub latent: Latent,
    /// What the network predicts; `None` until [`crate::Model::try_prediction`] found out.
    pub prediction: Option<Prediction>,
    /// The noise levels.
    pub noise: Noise,
    /// Tokens of the shortest context.
    pub tokens: usize,
    /// Whether the strength of distilled guidance is an input.
    pub guidance: bool,
    /// What the network reads as further channels of the latent.
    pub joined: Joined,
    /// Whether it takes reference pictures.
    pub references: bool,
    /// How many blocks [`crate::Evaluation::skip`] can leave out, numbered in running order.
    pub blocks: usize,
    /// Whether it takes ControlNets.
    pub control: bool,
}
