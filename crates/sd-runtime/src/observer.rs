//! What a running request tells its caller.

use sd_core::Tensor;

use crate::request::GeneratedImage;

/// A part of the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Prompts become conditioning.
    TextEncode,
    /// Pictures that the request brings along become latents.
    Encode,
    /// The sampler's steps.
    Denoise,
    /// The latent becomes a picture.
    Decode,
    /// A network makes the picture larger; its steps are pieces.
    Upscale,
}

impl Stage {
    /// A word for messages.
    pub fn name(self) -> &'static str {
        match self {
            Stage::TextEncode => "text encoding",
            Stage::Encode => "encoding",
            Stage::Denoise => "denoising",
            Stage::Decode => "decoding",
            Stage::Upscale => "upscaling",
        }
    }
}

/// How far a request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// The part of the work.
    pub stage: Stage,
    /// Steps of this stage that are done, 0 when it begins.
    pub step: usize,
    /// Steps of this stage.
    pub total: usize,
    /// Which image of the batch, from 0.
    pub image: usize,
    /// Images in the batch.
    pub images: usize,
}

/// A latent right after a step, for previews and tests.
#[derive(Debug, Clone, Copy)]
pub struct StepLatent<'a> {
    /// Which image of the batch, from 0.
    pub image: usize,
    /// Steps done, from 1.
    pub step: usize,
    /// The latent after the step, `[1, c, h, w]`.
    pub latent: &'a Tensor,
    /// The network's estimate of the clean latent in this step, `[1, c, h, w]`.
    pub denoised: &'a Tensor,
}

/// A picture of a latent that is being denoised.
#[derive(Debug, Clone, Copy)]
pub struct PreviewPicture<'a> {
    /// Which image of the batch, from 0.
    pub image: usize,
    /// Steps done, from 1.
    pub step: usize,
    /// Pixels across; a projected preview has one for each latent position.
    pub width: u32,
    /// Pixels down.
    pub height: u32,
    /// Rows from the top, three bytes a pixel.
    pub rgb: &'a [u8],
}

/// Gets the news of one request. Every method may be left out.
pub trait Observer {
    /// A step begins or ends.
    fn progress(&mut self, _progress: Progress) {}

    /// Something the user should know that does not stop the request.
    fn warning(&mut self, _message: &str) {}

    /// A sampler step has ended.
    fn step(&mut self, _latent: StepLatent<'_>) {}

    /// A preview that the request wants is there.
    fn preview(&mut self, _picture: PreviewPicture<'_>) {}

    /// Of so many evaluations of the network for an image, that many were computed: with a step cache, when the steps are
    /// done. An evaluation is one for all conditions; most samplers take one for each step.
    fn computed(&mut self, _image: usize, _computed: usize, _evaluations: usize) {}

    /// An image is finished; `index` counts from 0.
    fn image(&mut self, _index: usize, _image: &GeneratedImage) {}
}

/// Listens to nothing.
impl Observer for () {}
