//! A run of the sampler over one size: the only one of a picture, or the first of two.

use sd_core::{Error, Result, Tensor};
use sd_models::Evaluation;

use super::control::Control;
use super::denoise::{Conditions, Model, Run, denoise};
use super::pictures::{self, Pictures, Reading};
use super::{Coding, Networks, Place, Watch, coding, conditions, control, decode, encodes, evaluation, show};
use crate::hires::HiresUpscaler;
use crate::input::{InputImage, to_values};
use crate::observer::Stage;
use crate::parameters::Parameters;
use crate::picture::Sizes;
use crate::request::ImageRequest;
use crate::resample::resized;
use crate::resize::nearest;
use crate::resolve::Resolved;
use crate::upscale::{UpscaleOptions, Upscaler};

/// What is prepared once for all images of a request.
pub(super) struct Pass {
    pub(super) parameters: Parameters,
    pub(super) size: Sizes,
    pub(super) coding: Coding,
    pub(super) pictures: Pictures,
    run: Run,
    /// Whether it is the second of two.
    second: bool,
    /// Whether the request's picture has fewer pixels than the result, along either axis.
    small_original: bool,
    /// Of each network.
    states: Vec<State>,
}

/// What a network is steered by, and what it evaluates.
struct State {
    conditions: Conditions,
    evaluation: Evaluation,
    controls: Vec<Control>,
}

impl Pass {
    /// `nets` are the model's network and its refiner. A `second` pass runs all of the levels that it is given.
    pub(super) fn prepare(
        nets: &mut [&mut dyn Networks],
        request: &ImageRequest,
        resolved: &Resolved,
        p: &Parameters,
        second: bool,
        watch: &mut Watch<'_>,
    ) -> Result<Pass> {
        let place = Place { image: 0, images: resolved.batch_count as usize };
        let multiple = nets.iter().map(|net| net.facts().multiple).max().unwrap_or(1);
        let Some(net) = nets.first_mut() else { return Err(Error::internal("no model")) };
        let size = Sizes::new(p, net.facts(), multiple);
        size.check_circular(p.circular())?;
        if let Some(message) = size.message() {
            watch.observer.warning(&message);
        }
        let all = Parameters { strength: p.strength.filter(|_| !second || p.sigmas.is_none()), ..p.clone() };
        let run = Run::new(&all, net.facts(), size.tokens())?;
        let guide = run.guide(p);
        let evaluation = evaluation(request, resolved, p, net.facts(), &size, guide.most_branches());
        net.fits(&evaluation)?;
        let encodes = encodes(request, p, net.facts());
        let coding = coding(*net, &evaluation, encodes, request.vae_tiling, watch)?;
        let negative = guide.reads_negative();
        let first = conditions(*net, resolved, p, negative, place, watch)?;
        let reading = Reading { request, parameters: p, size: &size, coding, second };
        let pictures = Pictures::encode(*net, &reading, place, watch)?;
        let controls = control::encode(*net, request, resolved, p, &size, watch)?;
        let evaluation = Evaluation { control: false, ..evaluation };
        let mut states = vec![State { conditions: first, evaluation: evaluation.clone(), controls }];
        for net in nets.iter_mut().skip(1) {
            let evaluation = Evaluation { references: Vec::new(), ..evaluation.clone() };
            net.fits(&evaluation)?;
            let conditions = conditions(*net, resolved, p, negative, place, watch)?;
            // ControlNets belong to the network that begins.
            states.push(State { conditions, evaluation, controls: Vec::new() });
        }
        let small_original = request.init_image.as_ref().is_some_and(|i| i.width < p.width || i.height < p.height);
        Ok(Pass { parameters: p.clone(), size, coding, pictures, run, second, small_original, states })
    }

    /// The latent of the image with this seed.
    pub(super) fn latent(
        &mut self,
        nets: &mut [&mut dyn Networks],
        seed: i64,
        place: Place,
        watch: &mut Watch<'_>,
    ) -> Result<Tensor> {
        let parameters = Parameters { seed, ..self.parameters.clone() };
        let states = std::mem::take(&mut self.states).into_iter();
        let mut models: Vec<Model<'_>> = nets
            .iter_mut()
            .zip(states)
            .map(|(net, State { conditions, evaluation, controls })| Model {
                net: &mut **net,
                conditions,
                evaluation,
                controls,
            })
            .collect();
        let latent = denoise(&mut models, &parameters, &self.size, &self.run, &self.pictures, place, watch);
        let state = |Model { conditions, evaluation, controls, .. }| State { conditions, evaluation, controls };
        self.states = models.into_iter().map(state).collect();
        let latent = latent?;
        if let (Some(preview), Some(net)) =
            (watch.preview.filter(|p| p.interval == 0 && !self.second), nets.first_mut())
        {
            show(*net, &latent, preview.mode, self.coding.circular, place, self.run.steps(), watch)?;
        }
        Ok(latent)
    }

    /// Lets the next image start from what a first pass gave, made larger. Where a mask leaves the request's picture
    /// as it was, and that is smaller than the result, the result has what the upscaler makes of it.
    pub(super) fn start_from(
        &mut self,
        latent: &Tensor,
        first: &Pass,
        net: &mut dyn Networks,
        upscaler: Option<&mut Upscaler>,
        place: Place,
        watch: &mut Watch<'_>,
    ) -> Result<()> {
        let hires = self.parameters.hires.as_ref().ok_or_else(|| Error::internal("no second pass"))?;
        let [_, _, h, w] = self.size.latent();
        if let Some(filter) = hires.upscaler.of_latent() {
            self.pictures.clean = Some(pictures::exact(resized(latent, [h, w], filter)?)?);
            return Ok(());
        }
        let p = &self.parameters;
        let pixels = decode(net, latent, first.coding, place, watch)?;
        let mut rgb = first.size.crop_to_rgb(&pixels)?;
        first.pictures.paste(&mut rgb);
        let mut image = InputImage { width: first.parameters.width, height: first.parameters.height, rgb };
        if hires.upscaler == HiresUpscaler::Model {
            let upscaler = upscaler.ok_or_else(|| Error::internal("no upscaler"))?;
            let options = UpscaleOptions { repeats: 1, tile: hires.tile };
            let cancel = watch.cancel;
            let report = &mut |step, total| place.report(watch, Stage::Upscale, step, total);
            image = upscaler.passes(&image, options, p.circular(), report, cancel)?;
        }
        let to = [p.width as usize, p.height as usize];
        let rgb = match hires.upscaler {
            HiresUpscaler::Nearest => nearest(&image.rgb, 3, [image.width as usize, image.height as usize], to),
            _ => image.stretched(to)?,
        };
        if self.small_original {
            self.pictures.put_back(&rgb);
        }
        let values = to_values(&self.size.embed(&rgb, 3), self.size.computed())?;
        self.pictures.clean = Some(pictures::encode(net, &values, self.coding, place, watch)?);
        Ok(())
    }
}
