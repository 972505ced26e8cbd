//! What the pictures of a request become before the loop: a latent to start from, channels beside the latent,
//! references, and what is put back afterwards.

use sd_core::{CancelToken, Error, Result, Tensor};
use sd_models::Joined;

use super::masked::mix;
use super::{Coding, Facts, Moments, Networks, Place, Watch, non_finite, sides, with_room};
use crate::canny::edges;
use crate::input::{InputImage, to_values};
use crate::observer::Stage;
use crate::parameters::Parameters;
use crate::picture::Sizes;
use crate::request::ImageRequest;
use crate::resample::blurred;

/// Sides of reference pictures are multiples of this many pixels: a latent value is 8 wide, a token 2 values.
const REFERENCE_STEP: u32 = 16;

/// What is read of a request's pictures, and how.
pub(super) struct Reading<'a> {
    pub(super) request: &'a ImageRequest,
    pub(super) parameters: &'a Parameters,
    pub(super) size: &'a Sizes,
    pub(super) coding: Coding,
    /// Whether it is for a second pass, which starts from what the first one gives.
    pub(super) second: bool,
}

/// The pictures of a request, encoded.
pub(super) struct Pictures {
    /// The picture to start from, or to keep a part of.
    pub(super) clean: Option<Moments>,
    /// 1 where a position of the latent is painted anew, 0 where it is put back after each step, `[h * w]`.
    pub(super) mask: Option<Vec<f32>>,
    /// What is joined to the latent, `[1, k, h, w]`.
    pub(super) joined: Option<Tensor>,
    /// The same for a prediction without pictures.
    pub(super) blank: Option<Tensor>,
    /// `[1, c, h_i, w_i]`.
    pub(super) references: Vec<Tensor>,
    /// The picture's bytes at the size of the result, and how much of each pixel is painted anew.
    original: Option<(Vec<u8>, Vec<u8>)>,
}

impl Moments {
    /// A latent of this distribution, from standard normal values.
    pub(super) fn draw(&self, normal: &[f32]) -> Vec<f32> {
        let parts = self.mean.values().iter().zip(self.deviation.values());
        parts.zip(normal).map(|((m, d), n)| m + d * n).collect()
    }
}

impl Pictures {
    pub(super) fn encode(
        net: &mut dyn Networks,
        reading: &Reading<'_>,
        place: Place,
        watch: &mut Watch<'_>,
    ) -> Result<Pictures> {
        let &Reading { request, parameters: p, size, coding, second } = reading;
        let facts = net.facts().clone();
        let at = [p.width as usize, p.height as usize];
        let image = request.init_image.as_ref().map(|i| i.covering(at)).transpose()?;
        let mask = request.mask.as_ref().map(|m| m.covering(at)).transpose()?;
        // Unless it is blurred, a pixel is new or it is not.
        let blur = p.mask_blur;
        let mask =
            mask.map(|m| if blur > 0 || p.mask_padding.is_some() { blurred(&m, at, blur) } else { hard(&m) });
        let reads_mask = matches!(facts.joined, Joined::Inpaint | Joined::Fill);
        // A network that reads the mask knows what stays.
        let blends = mask.is_some() && !reads_mask;
        let joins = facts.joined != Joined::None;
        let starts = image.is_some() && !second && (p.strength.is_some() || blends);
        let total = usize::from(starts) + usize::from(joins) + request.ref_images.len();
        let mut encoder = Encoder { net, coding, place, watch, done: 0, total };

        let values = image.as_ref().map(|i| to_values(&size.embed(i, 3), size.computed())).transpose()?;
        let clean = match values.as_ref().filter(|_| starts) {
            Some(values) => Some(encoder.encode(values, "init_image")?),
            None => None,
        };
        let anew: Option<Vec<bool>> =
            mask.as_ref().map(|m| size.embed(m, 1).into_iter().map(|v| v >= 128).collect());
        let joined = match facts.joined {
            Joined::None => None,
            Joined::Inpaint | Joined::Fill => {
                let [w, h] = size.computed();
                // Without a mask all of the picture is painted anew.
                let anew = anew.clone().unwrap_or_else(|| vec![true; w * h]);
                let mut values = values.clone().map_or_else(|| Tensor::zeros(&[1, 3, h, w]), Ok)?;
                for plane in values.values_mut().chunks_exact_mut(w * h) {
                    plane.iter_mut().zip(&anew).filter(|(_, anew)| **anew).for_each(|(v, _)| *v = 0.0);
                }
                let masked = encoder.encode(&values, "init_image")?.mean;
                Some(if facts.joined == Joined::Fill {
                    beside(&[&masked, &size.fold(&anew)?])?
                } else {
                    let [.., lh, lw] = size.latent();
                    beside(&[&Tensor::f32(&[1, 1, lh, lw], size.pool(&anew))?, &masked])?
                })
            }
            Joined::Picture => {
                let values = values.as_ref().ok_or_else(|| Error::internal("no picture to edit"))?;
                let mut latent = encoder.encode(values, "init_image")?.mean;
                latent.values_mut().iter_mut().for_each(|v| *v /= facts.picture_scale);
                Some(latent)
            }
            Joined::Control => {
                let image = request.control_image.as_ref().ok_or_else(|| Error::internal("no control image"))?;
                let mut rgb = image.covering(at)?;
                if request.canny {
                    rgb = edges(&rgb, at[0]);
                }
                let values = to_values(&size.embed(&rgb, 3), size.computed())?;
                Some(encoder.encode(&values, "control_image")?.mean)
            }
        };
        let blank = match (&joined, facts.joined) {
            (Some(joined), Joined::Picture) => Some(Tensor::zeros(joined.dims())?),
            _ => joined.clone(),
        };
        let mut references = Vec::new();
        for image in &request.ref_images {
            let [w, h] = reference_pixels(image, p);
            let to = [w as usize, h as usize];
            let fitted = if p.ref_resize { image.stretched(to)? } else { image.covering(to)? };
            references.push(encoder.encode(&to_values(&fitted, to)?, "ref_images")?.mean);
        }
        encoder.report();
        Ok(Pictures {
            clean,
            mask: anew.as_ref().filter(|_| blends).map(|anew| size.pool(anew)),
            joined,
            blank,
            references,
            original: image.zip(mask),
        })
    }

    /// Puts back `rgb`, a picture of the size of the result, in place of the original.
    pub(super) fn put_back(&mut self, rgb: &[u8]) {
        if let Some((original, _)) = &mut self.original {
            original.clear();
            original.extend_from_slice(rgb);
        }
    }

    /// Puts the original's pixels back where nothing is painted anew.
    pub(super) fn paste(&self, rgb: &mut [u8]) {
        let Some((original, anew)) = &self.original else { return };
        for ((to, from), anew) in rgb.chunks_exact_mut(3).zip(original.chunks_exact(3)).zip(anew) {
            mix(to, from, 255 - anew);
        }
    }
}

/// The sizes of the references' latents.
pub(super) fn reference_sizes(request: &ImageRequest, p: &Parameters, facts: &Facts) -> Vec<[usize; 2]> {
    let latent = |side: u32| side as usize / facts.pixels.max(1);
    let one = |image: &InputImage| {
        let [w, h] = reference_pixels(image, p);
        [latent(h), latent(w)]
    };
    request.ref_images.iter().map(one).collect()
}

/// Width and height that a reference is read at: with resizing, its own aspect at the number of pixels of the result,
/// at most [`Parameters::ref_max_pixels`]; without, its own size less what is no whole token.
fn reference_pixels(image: &InputImage, p: &Parameters) -> [u32; 2] {
    let step = REFERENCE_STEP;
    if !p.ref_resize {
        return [image.width, image.height].map(|side| (side / step * step).max(step));
    }
    let pixels = (u64::from(p.width) * u64::from(p.height)).min(u64::from(p.ref_max_pixels)) as f64;
    let aspect = f64::from(image.width) / f64::from(image.height.max(1));
    let whole = |side: f64| ((side / f64::from(step)).round() as u32).max(1) * step;
    [whole((pixels * aspect).sqrt()), whole((pixels / aspect).sqrt())]
}

/// 255 where a mask is at least half, 0 elsewhere.
fn hard(mask: &[u8]) -> Vec<u8> {
    mask.iter().map(|v| if *v >= 128 { 255 } else { 0 }).collect()
}

/// A latent as it is.
pub(super) fn exact(mean: Tensor) -> Result<Moments> {
    let deviation = Tensor::zeros(mean.dims())?;
    Ok(Moments { mean, deviation })
}

/// A picture that the request did not bring along, encoded.
pub(super) fn encode(
    net: &mut dyn Networks,
    values: &Tensor,
    coding: Coding,
    place: Place,
    watch: &mut Watch<'_>,
) -> Result<Moments> {
    let mut encoder = Encoder { net, coding, place, watch, done: 0, total: 1 };
    let moments = encoder.encode(values, "the first pass's picture")?;
    encoder.report();
    Ok(moments)
}

/// Encodes pictures and reports how many are done.
struct Encoder<'a, 'w> {
    net: &'a mut dyn Networks,
    coding: Coding,
    place: Place,
    watch: &'a mut Watch<'w>,
    done: usize,
    total: usize,
}

impl Encoder<'_, '_> {
    fn report(&mut self) {
        if self.total > 0 {
            self.place.report(self.watch, Stage::Encode, self.done, self.total);
        }
    }

    fn encode(&mut self, picture: &Tensor, field: &str) -> Result<Moments> {
        self.report();
        self.watch.cancel.check()?;
        let stage = Stage::Encode;
        let context = |e: Error| e.context(format!("{} {field}", stage.name()));
        let finite = |m: &Moments| m.mean.is_finite() && m.deviation.is_finite();
        let size = sides(picture).map(|side| side / self.net.facts().pixels.max(1));
        let mut run = |coding: Coding, watch: &mut Watch<'_>| {
            let work = |net: &mut dyn Networks, coding, cancel: &CancelToken| net.encode(picture, coding, cancel);
            with_room(self.net, coding, size, watch, work).map_err(context)
        };
        let mut moments = run(self.coding, self.watch)?;
        if !finite(&moments) {
            self.watch.observer.warning("encoding gave NaN or infinite values; encoding again with f32 weights");
            moments = run(Coding { precise: true, ..self.coding }, self.watch)?;
            if !finite(&moments) {
                return Err(non_finite(self.net, stage, &format!("the latent of {field}")));
            }
        }
        self.done += 1;
        Ok(moments)
    }
}

/// Tensors `[1, k, h, w]` with their channels one after the other.
fn beside(parts: &[&Tensor]) -> Result<Tensor> {
    let [_, _, h, w] =
        parts.first().and_then(|p| p.shape().array::<4>()).ok_or_else(|| Error::internal("nothing to join"))?;
    let values: Vec<f32> = parts.iter().flat_map(|p| p.values()).copied().collect();
    Tensor::f32(&[1, values.len() / (h * w).max(1), h, w], values)
}
