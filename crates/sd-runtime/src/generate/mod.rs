//! The path of one request: conditioning, pictures to latents, noise, the sampler's loop, the picture.

mod control;
mod denoise;
mod guide;
mod masked;
mod pass;
mod pictures;

use sd_core::{CancelToken, Error, Kind, Result, Tensor};
use sd_models::{Conditioning, Evaluation, Joined, Prompt, Shift};

use crate::cache::BlockCache;
use crate::guidance::Prediction;
use crate::hires::Hires;
use crate::input::InputImage;
use crate::observer::{Observer, PreviewPicture, Progress, Stage};
use crate::parameters::Parameters;
use crate::picture::Sizes;
use crate::preview::{Preview, PreviewMode};
use crate::request::{GeneratedImage, ImageRequest, VaeTiling};
use crate::resolve::Resolved;
use crate::schedule::{Ays, SigmaTable, linear_mu};
use crate::upscale::Upscaler;
use denoise::Conditions;
use masked::Frame;
use pass::Pass;

/// The networks of a model, as the loop sees them.
pub(crate) trait Networks {
    /// What the model is.
    fn facts(&self) -> &Facts;

    /// An error if the device cannot hold what this evaluation of the diffusion network needs, before anything is
    /// allocated. Tokens of the context are not known yet.
    fn fits(&mut self, evaluation: &Evaluation) -> Result<()>;

    /// An error if the device cannot hold what decoding a latent of the evaluation's size takes in that way, or encoding
    /// its references or, if `encodes`, a picture of that size.
    fn fits_coding(&mut self, evaluation: &Evaluation, encodes: bool, coding: Coding) -> Result<()>;

    /// What a prompt conditions the diffusion network on.
    fn condition(&mut self, prompt: &Prompt<'_>, cancel: &CancelToken) -> Result<Conditioning>;

    /// What ControlNet `net` reads off a picture `[1, 3, h, w]`, values from 0 to 1.
    fn hint(&mut self, net: usize, picture: &Tensor, cancel: &CancelToken) -> Result<Tensor>;

    /// The raw prediction of each branch. With `blocks`, the network is run in parts, of which the middle may be left out.
    fn predict(
        &mut self,
        call: &Call<'_>,
        blocks: Option<&mut BlockCache>,
        cancel: &CancelToken,
    ) -> Result<Vec<Tensor>>;

    /// The distribution of the latents of a picture `[1, 3, h, w]`, values from -1 to 1.
    fn encode(&mut self, picture: &Tensor, coding: Coding, cancel: &CancelToken) -> Result<Moments>;

    /// The picture `[1, 3, h, w]`, values from -1 to 1, of a latent.
    fn decode(&mut self, latent: &Tensor, coding: Coding, cancel: &CancelToken) -> Result<Tensor>;

    /// What a latent shows, by the given means.
    fn preview(
        &mut self,
        latent: &Tensor,
        mode: PreviewMode,
        circular: [bool; 2],
        cancel: &CancelToken,
    ) -> Result<InputImage>;

    /// The first weight with a NaN or an infinity in the part that runs in `stage`, for messages.
    fn broken_weight(&self, stage: Stage) -> Option<String>;
}

/// How an autoencoder runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Coding {
    /// The picture repeats down and across.
    pub(crate) circular: [bool; 2],
    /// Weights are f32.
    pub(crate) precise: bool,
    /// Rows and columns of latent positions that are computed at once; all without it.
    pub(crate) piece: Option<[usize; 2]>,
}

impl Coding {
    /// The same in smaller pieces of a latent `[h, w]`; `None` if they are as small as they may be.
    fn smaller(self, size: [usize; 2]) -> Option<Coding> {
        const LEAST: usize = 8;
        let piece = match self.piece {
            None => VaeTiling::default().piece(size),
            Some(piece) if piece.iter().all(|side| *side <= LEAST) => return None,
            Some(piece) => piece.map(|side| (side / 2).max(LEAST).min(side)),
        };
        Some(Coding { piece: Some(piece), ..self })
    }
}

/// What a model is, as far as a request depends on it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Facts {
    /// What users call the family.
    pub(crate) family: &'static str,
    /// Channels of a latent.
    pub(crate) channels: usize,
    /// Pixels to a latent position, along each axis.
    pub(crate) pixels: usize,
    /// Sides of a latent are multiples of this.
    pub(crate) multiple: usize,
    pub(crate) prediction: Prediction,
    pub(crate) levels: Levels,
    /// Whether the strength of distilled guidance is an input.
    pub(crate) guidance: bool,
    pub(crate) joined: Joined,
    /// Whether reference pictures are read.
    pub(crate) references: bool,
    /// How many blocks can be left out.
    pub(crate) blocks: usize,
    /// Whose levels the schedule `ays` takes.
    pub(crate) ays: Option<Ays>,
    /// What a latent is divided by where it is [`Joined::Picture`].
    pub(crate) picture_scale: f32,
}

/// The noise levels of a model.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Levels {
    Table(SigmaTable),
    /// A rectified flow, whose table depends on the request.
    Flow {
        shift: Shift,
        time_scale: f64,
    },
}

impl Levels {
    /// The table for a picture of that many tokens. `shift` replaces the model's own: the factor where it is constant,
    /// the exponent where it depends on the size.
    pub(crate) fn table(&self, tokens: usize, shift: Option<f32>) -> SigmaTable {
        match self {
            Levels::Table(table) => table.clone(),
            Levels::Flow { shift: own, time_scale } => {
                let given = shift.map(f64::from);
                match own {
                    Shift::Constant(own) => SigmaTable::flow(given.unwrap_or(*own), *time_scale),
                    Shift::Resolution { tokens: at, mu } => {
                        SigmaTable::flux(given.unwrap_or_else(|| linear_mu(tokens, *at, *mu)).exp(), *time_scale)
                    }
                }
            }
        }
    }
}

/// What one step asks the diffusion network.
pub(crate) struct Call<'a> {
    /// `[1, c, h, w]`.
    pub(crate) x: &'a Tensor,
    pub(crate) timestep: f64,
    /// Strength of distilled guidance; models that do not read it ignore it.
    pub(crate) guidance: f32,
    /// What is evaluated, but for batch, tokens, references, blocks and ControlNets, which branches and steps differ in.
    pub(crate) evaluation: &'a Evaluation,
    pub(crate) branches: &'a [Branch<'a>],
    /// ControlNets that all branches follow.
    pub(crate) controls: &'a [Active<'a>],
}

/// A ControlNet in a step.
#[derive(Clone, Copy)]
pub(crate) struct Active<'a> {
    pub(crate) net: usize,
    pub(crate) strength: f32,
    /// What [`Networks::hint`] gave.
    pub(crate) hint: &'a Tensor,
}

/// One of the predictions that guidance combines.
#[derive(Clone, Copy)]
pub(crate) struct Branch<'a> {
    pub(crate) conditioning: &'a Conditioning,
    /// `[1, k, h, w]`, if the network reads it.
    pub(crate) joined: Option<&'a Tensor>,
    /// `[1, c, h_i, w_i]`.
    pub(crate) references: &'a [Tensor],
    /// Blocks to leave out.
    pub(crate) skip: &'a [usize],
}

/// Mean and standard deviation of latents `[1, c, h, w]`, in the network's scale.
#[derive(Debug, Clone)]
pub(crate) struct Moments {
    pub(crate) mean: Tensor,
    pub(crate) deviation: Tensor,
}

/// Who hears about the request, and who may stop it.
pub(crate) struct Watch<'a> {
    pub(crate) observer: &'a mut dyn Observer,
    pub(crate) cancel: &'a CancelToken,
    pub(crate) preview: Option<Preview>,
}

/// Which image of how many.
#[derive(Clone, Copy)]
struct Place {
    image: usize,
    images: usize,
}

impl Place {
    fn report(self, watch: &mut Watch<'_>, stage: Stage, step: usize, total: usize) {
        let Place { image, images } = self;
        watch.observer.progress(Progress { stage, step, total, image, images });
    }
}

/// The largest evaluation of a request's first pass, and whether pictures are encoded. Computes nothing.
pub(crate) fn outline(request: &ImageRequest, resolved: &Resolved, facts: &Facts) -> Result<(Evaluation, bool)> {
    let p = &resolved.first;
    let size = Sizes::new(p, facts, 1);
    let guide = denoise::Run::new(p, facts, size.tokens())?.guide(p);
    let evaluation = evaluation(request, resolved, p, facts, &size, guide.most_branches());
    Ok((evaluation, encodes(request, p, facts)))
}

fn evaluation(
    request: &ImageRequest,
    resolved: &Resolved,
    p: &Parameters,
    facts: &Facts,
    size: &Sizes,
    branches: usize,
) -> Evaluation {
    let [_, _, h, w] = size.latent();
    Evaluation {
        batch: branches,
        size: [h, w],
        references: pictures::reference_sizes(request, p, facts),
        reference_plan: p.reference_index.into(),
        circular: p.circular(),
        control: !resolved.controls.is_empty(),
        ..Evaluation::default()
    }
}

fn encodes(request: &ImageRequest, p: &Parameters, facts: &Facts) -> bool {
    request.init_image.is_some() || p.hires.is_some() || facts.joined != Joined::None
}

/// Who draws: a model, and what may follow it.
pub(crate) struct Models<'a> {
    pub(crate) net: &'a mut dyn Networks,
    /// Takes over where the request says.
    pub(crate) refiner: Option<&'a mut dyn Networks>,
    /// Makes finished pictures larger.
    pub(crate) upscaler: Option<&'a mut Upscaler>,
    /// Makes the first of two passes larger; without it the one above does.
    pub(crate) hires: Option<&'a mut Upscaler>,
}

/// The images of a request, each computed alone and handed to `each`.
pub(crate) fn run(
    Models { net, refiner, mut upscaler, hires: mut larger_by }: Models<'_>,
    request: &ImageRequest,
    resolved: &Resolved,
    watch: &mut Watch<'_>,
    each: &mut dyn FnMut(GeneratedImage),
) -> Result<()> {
    resolved.warnings.iter().for_each(|w| watch.observer.warning(w));
    let framed = Frame::of(request, &resolved.first)?;
    let (frame, request) = match &framed {
        Some((frame, inside)) => (Some(frame), inside),
        None => (None, request),
    };
    let p = match frame {
        // The mask was blurred at the size of the picture.
        Some(_) => &Parameters { mask_blur: 0, ..resolved.first.clone() },
        None => &resolved.first,
    };
    let mut nets: Vec<&mut dyn Networks> = std::iter::once(net).chain(refiner).collect();
    let mut first = Pass::prepare(&mut nets, request, resolved, p, false, watch)?;
    let mut second = match &p.hires {
        Some(hires) => Some(larger(&mut nets, request, resolved, p, hires, watch)?),
        None => None,
    };
    let (images, cancel) = (resolved.batch_count as usize, watch.cancel);
    for image in 0..images {
        let parameters = Parameters { seed: p.seed + image as i64, ..resolved.first.clone() };
        let (seed, place) = (parameters.seed, Place { image, images });
        let mut latent = first.latent(&mut nets, seed, place, watch)?;
        let mut pass = &first;
        if let Some(second) = &mut second {
            let Some(net) = nets.first_mut() else { return Err(Error::internal("no model")) };
            let upscaler = larger_by.as_deref_mut().or(upscaler.as_deref_mut());
            second.start_from(&latent, &first, *net, upscaler, place, watch)?;
            latent = second.latent(&mut nets, seed, place, watch)?;
            pass = second;
        }
        let Some(net) = nets.first_mut() else { return Err(Error::internal("no model")) };
        let pixels = decode(*net, &latent, pass.coding, place, watch)?;
        let mut rgb = pass.size.crop_to_rgb(&pixels)?;
        pass.pictures.paste(&mut rgb);
        let mut image = InputImage { width: pass.parameters.width, height: pass.parameters.height, rgb };
        if let Some(frame) = frame {
            image = frame.filled(&image)?;
        }
        if let (Some(upscaler), Some(options)) = (&mut upscaler, request.upscale) {
            let report = &mut |step, total| place.report(watch, Stage::Upscale, step, total);
            image = upscaler.passes(&image, options, p.circular(), report, cancel)?;
        }
        let InputImage { width, height, rgb } = image;
        let image = GeneratedImage { width, height, rgb, parameters };
        watch.observer.image(place.image, &image);
        each(image);
    }
    Ok(())
}

/// The second pass.
fn larger(
    nets: &mut [&mut dyn Networks],
    request: &ImageRequest,
    resolved: &Resolved,
    p: &Parameters,
    hires: &Hires,
    watch: &mut Watch<'_>,
) -> Result<Pass> {
    let base = [p.width, p.height];
    let to = hires.size(base, 8);
    let second = hires.second(p, to);
    // What the first pass makes is stretched where the shape changes, so what is beside it must be.
    let image = request.init_image.as_ref().map(|image| image.stretched_from(base, to)).transpose()?;
    let mask = request.mask.as_ref().map(|mask| mask.stretched_from(base, to)).transpose()?;
    let request = ImageRequest { init_image: image, mask, ..request.clone() };
    Pass::prepare(nets, &request, resolved, &second, true, watch)
}

fn conditions(
    net: &mut dyn Networks,
    resolved: &Resolved,
    p: &Parameters,
    negative: bool,
    place: Place,
    watch: &mut Watch<'_>,
) -> Result<Conditions> {
    let stage = Stage::TextEncode;
    let total = 1 + usize::from(negative);
    let mut encode = |done: usize, field: &str, text: &str| {
        place.report(watch, stage, done, total);
        watch.cancel.check()?;
        let size = [p.width as usize, p.height as usize];
        let prompt = Prompt { text, negative: done > 0, clip_skip: p.clip_skip as usize, size };
        let states = net.condition(&prompt, watch.cancel).map_err(|e| e.context(stage.name()))?;
        if states.is_finite() { Ok(states) } else { Err(non_finite(net, stage, &format!("the {field}'s states"))) }
    };
    let cond = encode(0, "prompt", &resolved.prompt)?;
    let uncond = if negative { Some(encode(1, "negative prompt", &p.negative_prompt)?) } else { None };
    place.report(watch, stage, total, total);
    Ok(Conditions { cond, uncond })
}

/// Shows the observer a latent.
fn show(
    net: &mut dyn Networks,
    latent: &Tensor,
    mode: PreviewMode,
    circular: [bool; 2],
    place: Place,
    step: usize,
    watch: &mut Watch<'_>,
) -> Result<()> {
    let picture = net.preview(latent, mode, circular, watch.cancel).map_err(|e| e.context("preview"))?;
    let InputImage { width, height, rgb } = &picture;
    watch.observer.preview(PreviewPicture { image: place.image, step, width: *width, height: *height, rgb });
    Ok(())
}

/// How the autoencoder runs: in the pieces that the request asks for or at once, and in smaller pieces where the device
/// cannot hold that.
fn coding(
    net: &mut dyn Networks,
    evaluation: &Evaluation,
    encodes: bool,
    tiling: Option<VaeTiling>,
    watch: &mut Watch<'_>,
) -> Result<Coding> {
    let coding = fitting(net, evaluation, encodes, tiling)?;
    if coding.piece != tiling.map(|tiling| tiling.piece(evaluation.size)) {
        watch.observer.warning(&in_pieces("the device cannot hold the autoencoder's work", coding));
    }
    Ok(coding)
}

/// The first way that fits: as asked, then in smaller and smaller pieces.
pub(crate) fn fitting(
    net: &mut dyn Networks,
    evaluation: &Evaluation,
    encodes: bool,
    tiling: Option<VaeTiling>,
) -> Result<Coding> {
    let piece = tiling.map(|tiling| tiling.piece(evaluation.size));
    let mut coding = Coding { circular: evaluation.circular, piece, ..Coding::default() };
    while let Err(e) = net.fits_coding(evaluation, encodes, coding) {
        coding = match coding.smaller(evaluation.size) {
            Some(smaller) if e.is_request() || matches!(e.kind(), Kind::Device(_)) => smaller,
            _ => return Err(e),
        };
    }
    Ok(coding)
}

/// Rows and columns of a tensor `[1, c, h, w]`.
fn sides(x: &Tensor) -> [usize; 2] {
    x.shape().array().map_or([0; 2], |[_, _, h, w]| [h, w])
}

fn in_pieces(why: &str, coding: Coding) -> String {
    let [h, w] = coding.piece.unwrap_or_default();
    format!("{why}; it is done in pieces of {w}x{h} latent positions")
}

/// What `work` of the autoencoder gives; where it fails for want of memory, in smaller pieces of a latent `[h, w]`.
fn with_room<T>(
    net: &mut dyn Networks,
    coding: Coding,
    size: [usize; 2],
    watch: &mut Watch<'_>,
    mut work: impl FnMut(&mut dyn Networks, Coding, &CancelToken) -> Result<T>,
) -> Result<T> {
    let mut coding = coding;
    loop {
        let e = match work(net, coding, watch.cancel) {
            Err(e) if matches!(e.kind(), Kind::Device(_)) => e,
            result => return result,
        };
        coding = match coding.smaller(size) {
            Some(smaller) => smaller,
            None => return Err(e),
        };
        watch.observer.warning(&in_pieces(&format!("the autoencoder failed: {e}"), coding));
    }
}

fn decode(
    net: &mut dyn Networks,
    latent: &Tensor,
    coding: Coding,
    place: Place,
    watch: &mut Watch<'_>,
) -> Result<Tensor> {
    let stage = Stage::Decode;
    place.report(watch, stage, 0, 1);
    watch.cancel.check()?;
    let context = |e: Error| e.context(stage.name());
    let run = |net: &mut dyn Networks, coding, watch: &mut Watch<'_>| {
        let work = |net: &mut dyn Networks, coding, cancel: &CancelToken| net.decode(latent, coding, cancel);
        with_room(net, coding, sides(latent), watch, work).map_err(context)
    };
    let mut pixels = run(net, coding, watch)?;
    if !pixels.is_finite() {
        watch.observer.warning("decoding gave NaN or infinite values; decoding again with f32 weights");
        pixels = run(net, Coding { precise: true, ..coding }, watch)?;
        if !pixels.is_finite() {
            return Err(non_finite(net, stage, "the picture"));
        }
    }
    place.report(watch, stage, 1, 1);
    Ok(pixels)
}

/// The error that names the stage, and the damaged weight if that is the cause.
fn non_finite(net: &dyn Networks, stage: Stage, what: &str) -> Error {
    let message = format!("{}: NaN or infinite values in {what}", stage.name());
    match net.broken_weight(stage) {
        Some(weight) => Error::non_finite(format!("{message}, because there are such in {weight}")),
        None => Error::non_finite(message).hint("choose a weight type with a wider range, such as f32"),
    }
}

#[cfg(test)]
mod tests;
