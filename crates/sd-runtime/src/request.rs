//! What a caller asks for, and what comes back.

use std::fmt;

use sd_models::ReferencePlan;
use serde::{Deserialize, Serialize};

use crate::cache::StepCache;
use crate::hires::Hires;
use crate::input::{InputImage, InputMask};
use crate::names::named;
use crate::parameters::Parameters;
use crate::preview::Preview;
use crate::rng::RngKind;
use crate::sampler::SamplerKind;
use crate::schedule::SchedulerKind;
use crate::upscale::UpscaleOptions;

/// The longest prompt in bytes. Reading one takes time by the square of its open brackets.
pub const MAX_PROMPT: usize = 1 << 16;
/// The longest side a picture can have, in pixels.
pub const MAX_SIDE: u32 = 16_384;
/// The most pixels a picture can have; 3840x2160 is below it.
pub const MAX_PIXELS: u64 = 1 << 23;
/// The most steps a request can ask for.
pub const MAX_STEPS: u32 = 10_000;
/// The most images of one request.
pub const MAX_BATCH: u32 = 1_024;
/// The most reference pictures of one request.
pub const MAX_REFERENCES: usize = 16;
/// The most ControlNets of one request.
pub const MAX_CONTROLS: usize = 8;

/// Latent positions along each side of an autoencoder's piece where nothing is said, and the fewest there can be.
const DEFAULT_TILE: u32 = 32;
const LEAST_TILE: u32 = 4;

/// What to draw. What is `None` takes the model's default.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ImageRequest {
    /// What the picture should show, with A1111 weights and `BREAK`.
    pub prompt: String,
    /// What it should not show.
    pub negative_prompt: String,
    /// Pixels across, a multiple of 8.
    pub width: Option<u32>,
    /// Pixels down, a multiple of 8.
    pub height: Option<u32>,
    /// Sampler steps.
    pub steps: Option<u32>,
    /// Classifier-free guidance scale; 1 turns guidance and the negative prompt off.
    pub cfg_scale: Option<f32>,
    /// How to step.
    pub sampler: Option<SamplerKind>,
    /// Which noise levels to visit.
    pub scheduler: Option<SchedulerKind>,
    /// Noise scale of ancestral samplers.
    pub eta: Option<f32>,
    /// Seed of the first image; image `i` has `seed + i`. Negative draws one. Default 42.
    pub seed: Option<i64>,
    /// Number of images. Default 1.
    pub batch_count: Option<u32>,
    /// 1 uses the text encoder's last layer, 2 the one before, and so on; 0 or less is the model's default.
    pub clip_skip: Option<i32>,
    /// Generator of the initial noise.
    pub rng: Option<RngKind>,
    /// Generator of the sampler's noise. Without it, or when it is the same kind, the stream of the initial noise
    /// goes on.
    pub sampler_rng: Option<RngKind>,
    /// Strength of distilled guidance, for networks that read it, such as Flux.1 dev.
    pub guidance: Option<f32>,
    /// Guidance towards the picture that is edited; 1 leaves it to the text. With references, and for pix2pix models.
    pub image_cfg_scale: Option<f32>,
    /// How far noise levels of a flow are moved towards noise: the factor `s` in `s u / (1 + (s - 1) u)`, or for models
    /// whose shift depends on the size its logarithm.
    pub flow_shift: Option<f32>,
    /// Noise levels that replace the schedule's, falling. There are one fewer steps.
    pub sigmas: Option<Vec<f64>>,
    /// Asks the network at timestep `t` for that of `t * shift / 1000`, from 1 to 1000, which NitroFusion's models want.
    pub timestep_shift: Option<u32>,
    /// Fine tuning of sampler, schedule and guidance: a list `key=value,…` of what [`crate::SampleOptions`] has.
    pub extra_sample_args: String,
    /// The picture to start from, or to edit. If width and height are open, they are its own.
    pub init_image: Option<InputImage>,
    /// How much of `init_image` is painted anew: 0 keeps it, 1 leaves little of it. The last
    /// `min(floor(strength * steps), steps - 1) + 1` steps run. Default 0.75; networks that read the picture beside the
    /// latent start from noise alone.
    pub strength: Option<f32>,
    /// Which part of `init_image` is painted anew.
    pub mask: Option<InputMask>,
    /// The deviation in pixels by which the mask is blurred, so that what is new fades into what stays. Default 0.
    pub mask_blur: u32,
    /// Whether only the surroundings of the mask are drawn, at the size of the request, and put back into `init_image`,
    /// whose size the result has.
    pub only_masked: bool,
    /// How many pixels of `init_image` around the mask that takes along. Default 32.
    pub mask_padding: Option<u32>,
    /// Pictures of the latent while it is denoised, which the observer gets.
    pub preview: Option<Preview>,
    /// A second, larger pass.
    pub hires: Option<Hires>,
    /// Pictures that the network looks at, for models such as Flux.1 Kontext.
    pub ref_images: Vec<InputImage>,
    /// How several references are placed.
    pub ref_index: ReferenceIndex,
    /// Whether references are resized to the number of pixels of the result. Default true.
    pub ref_resize: Option<bool>,
    /// The most pixels a reference is resized to. Default 1024 * 1024.
    pub ref_max_pixels: Option<u32>,
    /// Edges or depths for models that read them, such as Flux.1 Canny and Depth.
    pub control_image: Option<InputImage>,
    /// Whether `control_image` is reduced to its edges first.
    pub canny: bool,
    /// Pictures that ControlNets follow.
    pub controls: Vec<ControlChoice>,
    /// Guidance away from what the network predicts without some of its blocks.
    pub slg: Option<SkipLayers>,
    /// Whether the picture's left and right edges meet without a seam.
    pub circular_x: bool,
    /// Whether its top and bottom edges do.
    pub circular_y: bool,
    /// The share of the noise's timesteps after which the refiner takes over, if the engine has one. Default 0.8; 1
    /// leaves it out.
    pub refiner_switch: Option<f32>,
    /// Runs the autoencoder in pieces, which takes less memory of the device. The result is the same.
    pub vae_tiling: Option<VaeTiling>,
    /// Makes the pictures larger with the engine's upscaler.
    pub upscale: Option<UpscaleOptions>,
    /// Leaves steps out by what earlier ones gave. By default every step is computed.
    pub cache: Option<StepCache>,
    /// Adapters beside those that the prompt's `<lora:name:strength>` name.
    pub loras: Vec<LoraChoice>,
}

/// How large the pieces are that an autoencoder computes one by one. Both fields are of width and height.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct VaeTiling {
    /// Latent positions of a piece; below 4 it is 32.
    pub tile: [u32; 2],
    /// In place of `tile` where it is not 0: up to 1 the share of the latent, above the number of pieces.
    pub relative: [f32; 2],
}

impl VaeTiling {
    /// Rows and columns of a piece of a latent `[h, w]`.
    pub(crate) fn piece(self, size: [usize; 2]) -> [usize; 2] {
        let side = |side: usize, tile: u32, relative: f32| {
            let tile = match relative {
                r if r > 1.0 => (side as f64 / f64::from(r)).ceil() as usize,
                r if r > 0.0 => (side as f64 * f64::from(r)).round() as usize,
                _ if tile < LEAST_TILE => DEFAULT_TILE as usize,
                _ => tile as usize,
            };
            tile.max(LEAST_TILE as usize).min(side)
        };
        let ([h, w], [tw, th], [rw, rh]) = (size, self.tile, self.relative);
        [side(h, th, rh), side(w, tw, rw)]
    }
}

/// A picture of edges, depths or poses, and the ControlNet that follows it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ControlChoice {
    /// One of the engine's ControlNets by the name of its file without the extension, or a file below the folder of
    /// ControlNets, with or without it; `None` for that of the engine's at the same place as this choice.
    #[serde(default)]
    pub net: Option<String>,
    /// Fitted to the size of the result: it covers it, and the middle is kept.
    pub image: InputImage,
    /// What the network adds is multiplied by this; any number. Default 0.9.
    #[serde(default = "control_strength")]
    pub strength: f32,
    /// The share of the steps after which it is followed. Default 0.
    #[serde(default)]
    pub start: f64,
    /// The share of the steps before whose end it is followed. Default 1.
    #[serde(default = "control_end")]
    pub end: f64,
    /// Whether the picture is reduced to its edges first.
    #[serde(default)]
    pub canny: bool,
}

impl ControlChoice {
    /// The picture for the ControlNet at the same place, with the defaults.
    pub fn new(image: InputImage) -> ControlChoice {
        let (strength, end) = (control_strength(), control_end());
        ControlChoice { net: None, image, strength, start: 0.0, end, canny: false }
    }
}

fn control_strength() -> f32 {
    0.9
}

fn control_end() -> f64 {
    1.0
}

/// An adapter file and how strongly it is applied.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LoraChoice {
    /// A file below the folder of LoRAs, with or without its extension.
    pub name: String,
    /// What its changes are multiplied by; any number. Default 1.
    pub strength: f32,
    /// Whether it is for the network of high noise levels only.
    pub high_noise: bool,
}

impl Default for LoraChoice {
    fn default() -> LoraChoice {
        LoraChoice { name: String::new(), strength: 1.0, high_noise: false }
    }
}

/// As a tag in a prompt.
impl fmt::Display for LoraChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let high_noise = if self.high_noise { "|high_noise|" } else { "" };
        write!(f, "<lora:{high_noise}{}:{}>", self.name, self.strength)
    }
}

/// Skip-layer guidance: `scale * (prediction - prediction without layers)` is added in a part of the steps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SkipLayers {
    /// How much is added; 0 turns it off.
    pub scale: f32,
    /// Blocks to leave out, counted from 0.
    pub layers: Vec<usize>,
    /// The share of the steps after which it begins.
    pub start: f64,
    /// The share of the steps before which it ends.
    pub end: f64,
}

impl Default for SkipLayers {
    fn default() -> SkipLayers {
        SkipLayers { scale: 0.0, layers: vec![7, 8, 9], start: 0.01, end: 0.2 }
    }
}

/// Where the tokens of several reference pictures lie for the network.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum ReferenceIndex {
    /// Side by side in one plane.
    #[default]
    Fixed,
    /// In planes of their own, numbered 1, 2, 3.
    Increase,
    /// In planes of their own, numbered -1, -2, -3.
    Decrease,
}

named!(
    ReferenceIndex,
    "ref_index",
    [
        ("fixed", ReferenceIndex::Fixed),
        ("increase", ReferenceIndex::Increase),
        ("decrease", ReferenceIndex::Decrease),
    ]
);

impl From<ReferenceIndex> for ReferencePlan {
    fn from(index: ReferenceIndex) -> ReferencePlan {
        match index {
            ReferenceIndex::Fixed => ReferencePlan::Fixed,
            ReferenceIndex::Increase => ReferencePlan::Increase,
            ReferenceIndex::Decrease => ReferencePlan::Decrease,
        }
    }
}

/// What a model suggests where a request is silent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Defaults {
    /// Pixels across.
    pub width: u32,
    /// Pixels down.
    pub height: u32,
    /// Sampler steps.
    pub steps: u32,
    /// Guidance scale.
    pub cfg_scale: f32,
    /// Strength of distilled guidance; `None` where the network does not read it.
    pub guidance: Option<f32>,
    /// How to step.
    pub sampler: SamplerKind,
    /// Which noise levels to visit.
    pub scheduler: SchedulerKind,
    /// Text encoder layer, counted from the last as 1.
    pub clip_skip: u32,
}

/// A finished picture.
#[derive(Debug, Clone, PartialEq)]
pub struct GeneratedImage {
    /// Pixels across, those of `parameters` times what upscaling makes of them.
    pub width: u32,
    /// Pixels down.
    pub height: u32,
    /// Rows from the top, three bytes a pixel.
    pub rgb: Vec<u8>,
    /// Everything that made this picture, defaults filled in.
    pub parameters: Parameters,
}
