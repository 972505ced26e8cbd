//! Only the surroundings of a mask are drawn, at the size of the request, and put back into the picture, as A1111's web
//! UI does it.

use sd_core::{Error, Result};

use crate::input::{InputImage, InputMask};
use crate::parameters::Parameters;
use crate::request::ImageRequest;
use crate::resample::blurred;

/// A picture, and the part of it that is drawn.
pub(super) struct Frame {
    image: InputImage,
    /// How much of each pixel is new, at the size of the picture.
    mask: Vec<u8>,
    /// Left, top, width, height.
    region: [usize; 4],
}

impl Frame {
    /// The frame of a request that draws only what is masked, and the request for its inside.
    pub(super) fn of(request: &ImageRequest, p: &Parameters) -> Result<Option<(Frame, ImageRequest)>> {
        let (Some(padding), Some(image), Some(mask)) = (p.mask_padding, &request.init_image, &request.mask) else {
            return Ok(None);
        };
        let [w, h] = [image.width as usize, image.height as usize];
        let mask = blurred(&mask.stretched([w, h])?, [w, h], p.mask_blur);
        let drawn = bounds(&mask, w).ok_or_else(|| {
            Error::request("mask: nothing of it is white, so there is nothing to draw")
                .hint("leave out only_masked")
        })?;
        let region = grown(drawn, padding as usize, [w, h], [p.width as usize, p.height as usize]);
        let [left, top, width, height] = region;
        let part = |values: &[u8], channels: usize| -> Vec<u8> {
            let rows = values.chunks_exact(w * channels).skip(top).take(height);
            rows.flat_map(|row| row.iter().skip(left * channels).take(width * channels)).copied().collect()
        };
        let to = [p.width as usize, p.height as usize];
        let inside = InputImage { width: width as u32, height: height as u32, rgb: part(&image.rgb, 3) };
        let cover = InputMask { width: width as u32, height: height as u32, values: part(&mask, 1) };
        let (rgb, values) = (inside.stretched(to)?, cover.stretched(to)?);
        let mut controls = request.controls.clone();
        for control in &mut controls {
            let part = InputImage { rgb: part(&control.image.covering([w, h])?, 3), ..inside.clone() };
            control.image = InputImage { width: p.width, height: p.height, rgb: part.stretched(to)? };
        }
        let request = ImageRequest {
            controls,
            init_image: Some(InputImage { width: p.width, height: p.height, rgb }),
            mask: Some(InputMask { width: p.width, height: p.height, values }),
            ..request.clone()
        };
        Ok(Some((Frame { image: image.clone(), mask, region }, request)))
    }

    /// The picture with its part replaced by `drawn`.
    pub(super) fn filled(&self, drawn: &InputImage) -> Result<InputImage> {
        let [left, top, width, height] = self.region;
        let drawn = drawn.stretched([width, height])?;
        let mut image = self.image.clone();
        let w = image.width as usize;
        for (y, row) in drawn.chunks_exact((width * 3).max(1)).enumerate() {
            for (x, new) in row.chunks_exact(3).enumerate() {
                let at = (top + y) * w + left + x;
                let share = self.mask.get(at).copied().unwrap_or(0);
                if let Some(old) = image.rgb.get_mut(at * 3..at * 3 + 3) {
                    mix(old, new, share);
                }
            }
        }
        Ok(image)
    }
}

/// `old` with `share` of 255 of `new`; a share of 0 leaves its bytes.
pub(super) fn mix(old: &mut [u8], new: &[u8], share: u8) {
    for (old, new) in old.iter_mut().zip(new) {
        let sum = u32::from(*new) * u32::from(share) + u32::from(*old) * u32::from(255 - share);
        *old = ((sum + 127) / 255) as u8;
    }
}

/// Left, top, right and bottom of what is not 0, the latter two beyond it.
fn bounds(mask: &[u8], w: usize) -> Option<[usize; 4]> {
    let set = mask.iter().enumerate().filter(|(_, v)| **v > 0).map(|(i, _)| (i % w.max(1), i / w.max(1)));
    set.fold(None, |bounds, (x, y)| {
        let [left, top, right, bottom] = bounds.unwrap_or([x, y, x + 1, y + 1]);
        Some([left.min(x), top.min(y), right.max(x + 1), bottom.max(y + 1)])
    })
}

/// Left, top, width and height of the bounds with `padding` around, made as wide for its height as `size` is where the
/// picture has room.
fn grown([l, t, r, b]: [usize; 4], padding: usize, [w, h]: [usize; 2], [tw, th]: [usize; 2]) -> [usize; 4] {
    let (l, t) = (l.saturating_sub(padding), t.saturating_sub(padding));
    let (r, b) = ((r + padding).min(w), (b + padding).min(h));
    let widen = |start: usize, end: usize, want: usize, most: usize| {
        let len = want.clamp(end - start, most.max(end - start));
        let before = (len - (end - start)) / 2;
        let start = start.saturating_sub(before).min(most.saturating_sub(len));
        [start, len]
    };
    let (width, height) = (r - l, b - t);
    if width * th < height * tw {
        let [l, width] = widen(l, r, (height * tw).div_ceil(th.max(1)), w);
        [l, t, width, height]
    } else {
        let [t, height] = widen(t, b, (width * th).div_ceil(tw.max(1)), h);
        [l, t, width, height]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_region_has_the_shape_of_the_result_where_there_is_room() {
        assert_eq!(bounds(&[0, 0, 0, 0, 9, 0, 0, 0, 1], 3), Some([1, 1, 3, 3]));
        assert_eq!(bounds(&[0; 9], 3), None);
        assert_eq!(grown([40, 40, 50, 60], 10, [100, 100], [64, 64]), [25, 30, 40, 40]);
        assert_eq!(grown([0, 0, 10, 40], 5, [100, 100], [128, 64]), [0, 0, 90, 45]);
        assert_eq!(grown([0, 0, 10, 100], 5, [40, 100], [64, 64]), [0, 0, 40, 100]);
        assert_eq!(grown([90, 10, 100, 20], 0, [100, 100], [64, 128]), [90, 5, 10, 20]);
    }

    #[test]
    fn shares() {
        let mut old = [10, 200, 7];
        mix(&mut old, &[250, 0, 9], 0);
        assert_eq!(old, [10, 200, 7]);
        mix(&mut old, &[250, 0, 9], 255);
        assert_eq!(old, [250, 0, 9]);
        mix(&mut old, &[0, 255, 9], 51);
        assert_eq!(old, [200, 51, 9]);
    }
}
