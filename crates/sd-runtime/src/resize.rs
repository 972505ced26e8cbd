//! Resizing of 8-bit pictures, byte for byte as Pillow before version 13 does it with its Lanczos filter: the columns of
//! every row first, then the rows, with coefficients of 22 bits and bytes between the two passes. (Later versions choose
//! which goes first.)

use sd_core::{Error, Result};

/// Lobes of the filter on each side.
const LOBES: f64 = 3.0;
/// Fraction bits of a coefficient: 32 less 8 for the pixel and 2 for overshoot.
const BITS: u32 = 22;

/// The bytes of a `from` picture (width and height, `channels` bytes a pixel) at size `to`.
///
/// # Errors
/// There are not as many bytes as `from` says, or a side of `to` is 0.
pub(crate) fn lanczos(pixels: &[u8], channels: usize, from: [usize; 2], to: [usize; 2]) -> Result<Vec<u8>> {
    let [w, h] = from;
    if w * h * channels != pixels.len() || pixels.is_empty() || to.contains(&0) {
        let (len, [tw, th]) = (pixels.len(), to);
        return Err(Error::internal(format!("resize {len} bytes of {w}x{h} by {channels} to {tw}x{th}")));
    }
    let mut out = pixels.to_vec();
    if to[0] != w {
        let taps = taps(w, to[0]);
        out = out.chunks_exact(w * channels).flat_map(|row| columns(row, channels, &taps)).collect();
    }
    if to[1] != h {
        let stride = to[0] * channels;
        out = taps_of_rows(&out, stride, &taps(h, to[1]));
    }
    Ok(out)
}

/// The bytes of the nearest pixel, by centres.
pub(crate) fn nearest(pixels: &[u8], channels: usize, [w, h]: [usize; 2], [tw, th]: [usize; 2]) -> Vec<u8> {
    let at = |i: usize, from: usize, to: usize| ((2 * i + 1) * from / (2 * to.max(1))).min(from.saturating_sub(1));
    let mut out = Vec::with_capacity(tw * th * channels);
    for y in 0..th {
        for x in 0..tw {
            let first = (at(y, h, th) * w + at(x, w, tw)) * channels;
            out.extend(pixels.get(first..first + channels).unwrap_or_default());
        }
    }
    out
}

/// What one output position reads: the first input and a coefficient for it and each after it.
struct Taps {
    first: usize,
    weights: Vec<i64>,
}

fn taps(from: usize, to: usize) -> Vec<Taps> {
    let scale = from as f64 / to as f64;
    // A picture that shrinks is filtered by the wider kernel.
    let stretch = scale.max(1.0);
    let support = LOBES * stretch;
    let one = |i: usize| {
        let centre = (i as f64 + 0.5) * scale;
        let first = (centre - support + 0.5).max(0.0) as usize;
        let end = ((centre + support + 0.5) as usize).min(from);
        let raw: Vec<f64> = (first..end).map(|x| kernel((x as f64 - centre + 0.5) / stretch)).collect();
        let sum: f64 = raw.iter().sum();
        let fixed = |w: &f64| (w / sum * f64::from(1u32 << BITS)).round() as i64;
        Taps { first, weights: raw.iter().map(fixed).collect() }
    };
    (0..to).map(one).collect()
}

fn kernel(x: f64) -> f64 {
    if x.abs() < LOBES { sinc(x) * sinc(x / LOBES) } else { 0.0 }
}

fn sinc(x: f64) -> f64 {
    let x = x * std::f64::consts::PI;
    if x == 0.0 { 1.0 } else { x.sin() / x }
}

fn columns(row: &[u8], channels: usize, taps: &[Taps]) -> Vec<u8> {
    let one = |t: &Taps, c: usize| {
        let inputs = row.iter().skip(t.first * channels + c).step_by(channels);
        byte(t.weights.iter().zip(inputs).map(|(w, p)| w * i64::from(*p)).sum())
    };
    taps.iter().flat_map(|t| (0..channels).map(move |c| one(t, c))).collect()
}

fn taps_of_rows(pixels: &[u8], stride: usize, taps: &[Taps]) -> Vec<u8> {
    let mut out = Vec::with_capacity(taps.len() * stride);
    let mut sums = vec![0i64; stride];
    for t in taps {
        sums.fill(0);
        for (w, row) in t.weights.iter().zip(pixels.chunks_exact(stride).skip(t.first)) {
            sums.iter_mut().zip(row).for_each(|(sum, p)| *sum += w * i64::from(*p));
        }
        out.extend(sums.iter().map(|sum| byte(*sum)));
    }
    out
}

fn byte(sum: i64) -> u8 {
    ((sum + (1 << (BITS - 1))) >> BITS).clamp(0, 255) as u8
}
