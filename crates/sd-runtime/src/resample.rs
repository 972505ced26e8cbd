//! Latents at another size, as `torch.nn.functional.interpolate` resizes them, and blurred masks. Golden values:
//! `oracle/resample.py`.

use sd_core::{Error, Result, Tensor};

/// How values between positions are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Filter {
    Nearest,
    /// The nearest by centres of positions.
    NearestExact,
    Linear,
    /// Keys' cubic convolution.
    Cubic,
    /// Linear, over wider neighbourhoods where the result is smaller.
    LinearAntialiased,
    CubicAntialiased,
}

/// Keys' parameter: torch has one for each kind of cubic filter.
const CUBIC: f64 = -0.75;
const CUBIC_ANTIALIASED: f64 = -0.5;

/// What a position of the result reads: the first position and weights of it and those after it. Positions beyond the
/// end are the last.
struct Taps {
    first: isize,
    weights: Vec<f64>,
}

impl Filter {
    fn taps(self, from: usize, to: usize) -> Vec<Taps> {
        let scale = from as f64 / to as f64;
        let one = |first: f64| Taps { first: first as isize, weights: vec![1.0] };
        let tap = |i: usize| {
            let centre = (i as f64 + 0.5) * scale;
            match self {
                Filter::Nearest => one((i as f64 * scale).floor()),
                Filter::NearestExact => one(centre.floor()),
                Filter::Linear => {
                    let at = (centre - 0.5).max(0.0);
                    let t = at - at.floor();
                    Taps { first: at.floor() as isize, weights: vec![1.0 - t, t] }
                }
                Filter::Cubic => {
                    let at = centre - 0.5;
                    let t = at - at.floor();
                    let weights = [1.0 + t, t, 1.0 - t, 2.0 - t].map(|x| cubic(x, CUBIC)).to_vec();
                    Taps { first: at.floor() as isize - 1, weights }
                }
                Filter::LinearAntialiased => wide(centre, scale, from, 1.0, |x| (1.0 - x).max(0.0)),
                Filter::CubicAntialiased => wide(centre, scale, from, 2.0, |x| cubic(x, CUBIC_ANTIALIASED)),
            }
        };
        (0..to).map(tap).collect()
    }
}

/// Keys' kernel at a distance.
fn cubic(x: f64, a: f64) -> f64 {
    match x {
        x if x < 1.0 => ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0,
        x if x < 2.0 => ((a * x - 5.0 * a) * x + 8.0 * a) * x - 4.0 * a,
        _ => 0.0,
    }
}

/// Weights over as many positions as one of the result covers.
fn wide(centre: f64, scale: f64, from: usize, support: f64, kernel: impl Fn(f64) -> f64) -> Taps {
    let stretch = scale.max(1.0);
    let support = support * stretch;
    let first = (centre - support + 0.5).max(0.0) as usize;
    let end = ((centre + support + 0.5) as usize).min(from);
    let raw: Vec<f64> = (first..end).map(|x| kernel(((x as f64 - centre + 0.5) / stretch).abs())).collect();
    let sum: f64 = raw.iter().sum();
    Taps { first: first as isize, weights: raw.iter().map(|w| w / sum).collect() }
}

/// `x [1, c, h, w]` with `size` rows and columns.
pub(crate) fn resized(x: &Tensor, size: [usize; 2], filter: Filter) -> Result<Tensor> {
    let [_, c, h, w] = x.shape().array().ok_or_else(|| Error::internal(format!("a latent is {}", x.shape())))?;
    let (down, across) = (filter.taps(h, size[0]), filter.taps(w, size[1]));
    let inside = |at: isize, side: usize| at.clamp(0, side as isize - 1) as usize;
    let mut out = Vec::with_capacity(c * size[0] * size[1]);
    for plane in x.values().chunks_exact((h * w).max(1)) {
        let rows: Vec<Vec<f64>> = plane
            .chunks_exact(w)
            .map(|row| {
                let value = |t: &Taps| {
                    let at = |i: usize| row.get(inside(t.first + i as isize, w)).map_or(0.0, |v| f64::from(*v));
                    t.weights.iter().enumerate().map(|(i, k)| k * at(i)).sum()
                };
                across.iter().map(value).collect()
            })
            .collect();
        for t in &down {
            for x in 0..size[1] {
                let at = |i: usize| {
                    rows.get(inside(t.first + i as isize, h)).and_then(|row| row.get(x)).copied().unwrap_or(0.0)
                };
                out.push(t.weights.iter().enumerate().map(|(i, k)| k * at(i)).sum::<f64>() as f32);
            }
        }
    }
    Tensor::f32(&[1, c, size[0], size[1]], out)
}

/// A mask of bytes blurred by a Gaussian of deviation `sigma`, cut off at two and a half of them, as A1111's web UI has
/// OpenCV do it. Beyond its edges it is mirrored.
pub(crate) fn blurred(mask: &[u8], [w, h]: [usize; 2], sigma: u32) -> Vec<u8> {
    if sigma == 0 || mask.len() != w * h || mask.is_empty() {
        return mask.to_vec();
    }
    let deviation = f64::from(sigma);
    let radius = (2.5 * deviation + 0.5) as usize;
    let raw: Vec<f64> = (0..=2 * radius)
        .map(|i| (-(i as f64 - radius as f64).powi(2) / (2.0 * deviation * deviation)).exp())
        .collect();
    let sum: f64 = raw.iter().sum();
    let kernel: Vec<f32> = raw.iter().map(|k| (k / sum) as f32).collect();
    // The position that a tap reads for `at`, mirrored into `side` positions.
    let mirrored = |at: usize, tap: usize, side: usize| {
        let period = (2 * side as isize - 2).max(1);
        let at = ((at + tap) as isize - radius as isize).rem_euclid(period);
        (if at < side as isize { at } else { period - at }) as usize
    };
    let mut rows = Vec::with_capacity(w * h);
    for row in mask.chunks_exact(w) {
        let value = |at: usize| row.get(mirrored(at, 0, w)).map_or(0.0, |v| f32::from(*v));
        let wide: Vec<f32> = (0..w + 2 * radius).map(value).collect();
        let mut out = vec![0.0f32; w];
        for (window, k) in wide.windows(w).zip(&kernel) {
            out.iter_mut().zip(window).for_each(|(sum, v)| *sum += k * v);
        }
        rows.extend(out);
    }
    let mut out = Vec::with_capacity(w * h);
    for y in 0..h {
        let mut sums = vec![0.0f32; w];
        for (tap, k) in kernel.iter().enumerate() {
            let row = rows.chunks_exact(w).nth(mirrored(y, tap, h)).unwrap_or_default();
            sums.iter_mut().zip(row).for_each(|(sum, v)| *sum += k * v);
        }
        out.extend(sums.iter().map(|v| v.round_ties_even().clamp(0.0, 255.0) as u8));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Fixture;

    #[test]
    fn latents_are_resized_as_torch_does() {
        let fixture = Fixture::open("resample.safetensors");
        let latent = Tensor::f32(&[1, 4, 6, 9], fixture.f32s("input.latent")).unwrap();
        for (name, filter) in [
            ("latent", Filter::Linear),
            ("latent_nearest", Filter::Nearest),
            ("latent_nearest_exact", Filter::NearestExact),
            ("latent_antialiased", Filter::LinearAntialiased),
            ("latent_bicubic", Filter::Cubic),
            ("latent_bicubic_antialiased", Filter::CubicAntialiased),
        ] {
            for size in fixture.metadata("config")["sizes"].as_array().unwrap() {
                let [h, w] = [0, 1].map(|i| size[i].as_u64().unwrap() as usize);
                let want = fixture.f32s(&format!("output.{name}.{h}x{w}"));
                let got = resized(&latent, [h, w], filter).unwrap();
                let off = got.values().iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(got.values().len() == want.len() && off < 1e-5, "{name} {h}x{w}: {off}");
            }
        }
    }

    #[test]
    fn masks_are_blurred_as_opencv_does() {
        let fixture = Fixture::open("mask_blur.safetensors");
        let mask = fixture.u8s("input.mask");
        for sigma in [1, 4, 9] {
            let want = fixture.f32s(&format!("output.blur.{sigma}"));
            let got = blurred(mask, [31, 20], sigma);
            let far = got.iter().zip(&want).map(|(a, b)| (f32::from(*a) - b).abs()).fold(0.0, f32::max);
            assert!(got.len() == want.len() && far <= 0.501, "{sigma}: {far}");
        }
        assert_eq!(blurred(mask, [31, 20], 0), mask);
    }
}
