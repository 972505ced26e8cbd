//! Pictures that a request brings along, as they are fitted to the picture it asks for.

use sd_core::{Error, Result, Tensor};
use serde::{Deserialize, Serialize};

use crate::request::{MAX_PIXELS, MAX_SIDE};
use crate::resize::lanczos;

/// The most pixels of a picture that is brought along, or resized: photos are larger than what can be asked for.
pub(crate) const MOST_PIXELS: u64 = 16 * MAX_PIXELS;

/// A picture that a request brings along.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputImage {
    /// Pixels across.
    pub width: u32,
    /// Pixels down.
    pub height: u32,
    /// Rows from the top, three bytes a pixel.
    pub rgb: Vec<u8>,
}

/// Which part of a picture is painted anew.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputMask {
    /// Pixels across.
    pub width: u32,
    /// Pixels down.
    pub height: u32,
    /// Rows from the top, a byte a pixel: 128 and above is painted anew, 0 stays as it is, and what lies between is mixed
    /// at the end.
    pub values: Vec<u8>,
}

impl std::fmt::Debug for InputImage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}x{} picture", self.width, self.height)
    }
}

impl std::fmt::Debug for InputMask {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}x{} mask", self.width, self.height)
    }
}

impl InputImage {
    /// An error that names `field` unless sides and bytes are right.
    pub(crate) fn check(&self, field: &str) -> Result<()> {
        check(field, [self.width, self.height], 3, self.rgb.len())
    }

    fn size(&self) -> [usize; 2] {
        [self.width as usize, self.height as usize]
    }

    /// Resized to cover `width` by `height`, of which the middle is kept.
    ///
    /// # Errors
    /// Its bytes are not those of its size, a side is 0, or it is too narrow for that.
    pub fn fitted(&self, width: u32, height: u32) -> Result<InputImage> {
        self.check("image")?;
        Ok(InputImage { width, height, rgb: self.covering([width as usize, height as usize])? })
    }

    /// Resized to `[width, height]`, whatever its own aspect.
    pub(crate) fn stretched(&self, size: [usize; 2]) -> Result<Vec<u8>> {
        lanczos(&self.rgb, 3, self.size(), size)
    }

    /// The part of it that a result of `base` covers, stretched to the shape of `to`; as it is where that is the shape of
    /// `base`.
    pub(crate) fn stretched_from(&self, base: [u32; 2], to: [u32; 2]) -> Result<InputImage> {
        let Some(cover) = cover_of(base, to) else { return Ok(self.clone()) };
        let rgb = lanczos(&self.covering(cover)?, 3, cover, to.map(|side| side as usize))?;
        Ok(InputImage { width: to[0], height: to[1], rgb })
    }

    /// Resized to cover `[width, height]`, of which the middle is kept.
    pub(crate) fn covering(&self, size: [usize; 2]) -> Result<Vec<u8>> {
        cover(&self.rgb, 3, self.size(), size)
    }
}

impl InputMask {
    /// The luma of a picture (ITU-R BT.601, as Pillow's mode L has it), or the opposite if `invert`.
    pub fn luma(image: &InputImage, invert: bool) -> InputMask {
        let luma = |rgb: &[u8]| match *rgb {
            [r, g, b] => {
                ((19_595 * u32::from(r) + 38_470 * u32::from(g) + 7_471 * u32::from(b) + 0x8000) >> 16) as u8
            }
            _ => 0,
        };
        let value = |rgb: &[u8]| if invert { 255 - luma(rgb) } else { luma(rgb) };
        InputMask {
            width: image.width,
            height: image.height,
            values: image.rgb.chunks_exact(3).map(value).collect(),
        }
    }

    /// An error that names `field` unless sides and bytes are right.
    pub(crate) fn check(&self, field: &str) -> Result<()> {
        check(field, [self.width, self.height], 1, self.values.len())
    }

    /// As [`InputImage::covering`].
    pub(crate) fn covering(&self, size: [usize; 2]) -> Result<Vec<u8>> {
        cover(&self.values, 1, [self.width as usize, self.height as usize], size)
    }

    /// Resized to `[width, height]`, whatever its own aspect.
    pub(crate) fn stretched(&self, size: [usize; 2]) -> Result<Vec<u8>> {
        lanczos(&self.values, 1, [self.width as usize, self.height as usize], size)
    }

    /// As [`InputImage::stretched_from`].
    pub(crate) fn stretched_from(&self, base: [u32; 2], to: [u32; 2]) -> Result<InputMask> {
        let Some(cover) = cover_of(base, to) else { return Ok(self.clone()) };
        let values = lanczos(&self.covering(cover)?, 1, cover, to.map(|side| side as usize))?;
        Ok(InputMask { width: to[0], height: to[1], values })
    }
}

/// A multiple of `base` that is no smaller than `to`; `None` if both have one shape.
fn cover_of(base: [u32; 2], to: [u32; 2]) -> Option<[usize; 2]> {
    let [[bw, bh], [w, h]] = [base, to].map(|size| size.map(|side| side as usize));
    let times = w.div_ceil(bw.max(1)).max(h.div_ceil(bh.max(1)));
    (bw * h != bh * w).then_some([bw * times, bh * times])
}

fn check(field: &str, [width, height]: [u32; 2], channels: usize, len: usize) -> Result<()> {
    let pixels = u64::from(width) * u64::from(height);
    if width == 0 || height == 0 || width > 4 * MAX_SIDE || height > 4 * MAX_SIDE || pixels > MOST_PIXELS {
        return Err(Error::request(format!(
            "{field}: want sides from 1 to {} and at most {MOST_PIXELS} pixels, got {width}x{height}",
            4 * MAX_SIDE
        )));
    }
    if pixels * channels as u64 != len as u64 {
        let want = pixels * channels as u64;
        return Err(Error::request(format!("{field}: {width}x{height} takes {want} bytes, got {len}")));
    }
    Ok(())
}

fn cover(pixels: &[u8], channels: usize, from: [usize; 2], size: [usize; 2]) -> Result<Vec<u8>> {
    let ([w, h], [width, height]) = (from, size);
    let across = width * h > w * height;
    let (rw, rh) = if across { (width, h * width / w.max(1)) } else { (w * height / h.max(1), height) };
    // All of a strip, resized, may be any number of times what is kept of it.
    if rw as u64 * rh as u64 > MOST_PIXELS {
        let message = format!("a picture of {w}x{h} is too narrow to cover {width}x{height}");
        return Err(Error::request(message).hint("cut it to the shape of the result"));
    }
    let all = lanczos(pixels, channels, from, [rw.max(width), rh.max(height)])?;
    let (left, top) = ((rw / 2).saturating_sub(width / 2), (rh / 2).saturating_sub(height / 2));
    let rows = all.chunks_exact(rw.max(width) * channels).skip(top).take(height);
    Ok(rows.flat_map(|row| row.iter().skip(left * channels).take(width * channels)).copied().collect())
}

/// Bytes `[height, width, 3]` as values from -1 to 1, `[1, 3, height, width]`.
pub(crate) fn to_values(rgb: &[u8], [width, height]: [usize; 2]) -> Result<Tensor> {
    let plane = |c: usize| rgb.iter().skip(c).step_by(3).map(|b| (f64::from(*b) / 127.5 - 1.0) as f32);
    Tensor::f32(&[1, 3, height, width], (0..3).flat_map(plane).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Fixture;

    /// Values of Pillow's `convert("L")`.
    #[test]
    fn a_mask_is_luma() {
        let rgb = vec![255, 255, 255, 255, 0, 0, 0, 255, 0, 0, 0, 255, 10, 20, 30];
        assert_eq!(InputMask::luma(&InputImage { width: 5, height: 1, rgb }, false).values, [255, 76, 150, 29, 18]);
    }

    /// Bytes and masks equal diffusers' for every size.
    #[test]
    fn pictures_are_fitted_as_the_reference_does() {
        let fixture = Fixture::open("pictures.safetensors");
        let config = fixture.metadata("config");
        for (name, size) in config["sources"].as_object().unwrap() {
            let side = |i: usize| u32::try_from(size[i].as_u64().unwrap()).unwrap();
            let (width, height) = (side(0), side(1));
            let image = InputImage { width, height, rgb: fixture.u8s(&format!("input.{name}.rgb")).to_vec() };
            let mask = InputMask { width, height, values: fixture.u8s(&format!("input.{name}.grey")).to_vec() };
            assert!(image.check("a").is_ok() && mask.check("a").is_ok());
            for size in config["sizes"].as_array().unwrap() {
                let size = [size[0].as_u64().unwrap() as usize, size[1].as_u64().unwrap() as usize];
                let want = |kind: &str| fixture.u8s(&format!("output.{name}.{}x{}.{kind}", size[0], size[1]));
                assert!(image.covering(size).unwrap() == want("crop"), "{name} {size:?} crop");
                assert!(image.stretched(size).unwrap() == want("stretch"), "{name} {size:?} stretch");
                let got: Vec<u8> = mask.covering(size).unwrap().into_iter().map(|v| u8::from(v >= 128)).collect();
                assert!(got == want("mask"), "{name} {size:?} mask");
            }
        }
    }

    #[test]
    fn wrong_pictures_are_named() {
        let e = InputImage { width: 2, height: 2, rgb: vec![0; 11] }.check("init_image").unwrap_err();
        assert_eq!(e.to_string(), "init_image: 2x2 takes 12 bytes, got 11");
        let e = InputMask { width: 0, height: 2, values: vec![] }.check("mask").unwrap_err();
        assert!(e.is_request() && e.to_string().starts_with("mask: want sides"), "{e}");
        assert!(InputMask { width: u32::MAX, height: u32::MAX, values: vec![] }.check("mask").is_err());
    }

    #[test]
    fn a_strip_is_not_resized_to_a_thousand_times_the_result() {
        let strip = InputImage { width: 65_536, height: 1, rgb: vec![0; 3 * 65_536] };
        assert!(strip.check("init_image").is_ok() && strip.covering([16, 16]).is_ok());
        for size in [[512, 512], [2896, 2896]] {
            let e = strip.covering(size).unwrap_err();
            assert!(e.is_request() && e.to_string().starts_with("a picture of 65536x1 is too narrow"), "{e}");
        }
    }

    #[test]
    fn values_run_from_minus_one_to_one() {
        let t = to_values(&[0, 255, 51, 255, 0, 204], [2, 1]).unwrap();
        assert_eq!(t.dims(), [1, 3, 1, 2]);
        assert_eq!(t.values(), [-1.0, 1.0, 1.0, -1.0, -0.6, 0.6]);
    }
}
