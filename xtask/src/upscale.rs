//! A published upscaler on a part of a photo, against what the reference makes of it (`oracle/upscale.py`).

use anyhow::{Context, Result, ensure};
use sd_core::{CancelToken, WeightSource};
use sd_io::Checkpoint;
use sd_runtime::{InputImage, UpscaleOptions, Upscaler};
use std::path::Path;

/// Compares the whole with the reference, and pieces with the whole.
pub(crate) fn photo(weights: &Path) -> Result<String> {
    let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/../oracle/fixtures/upscale_photo.safetensors");
    let fixture = Checkpoint::open(fixture)?;
    let (picture, want) = (image(&fixture, "input.rgb")?, image(&fixture, "output.rgb")?);
    let mut upscaler = Upscaler::open(weights, "cpu", 0)?;
    let mut run = |tile| {
        let options = UpscaleOptions { tile, ..UpscaleOptions::default() };
        upscaler.upscale(&picture, options, [false; 2], &mut (), &CancelToken::new())
    };
    let (whole, pieces) = (run(128)?, run(48)?);
    // The network looks further than a piece goes, so single pixels differ more.
    let (off, apart) = (most(&whole, &want)?, apart(&pieces, &want)?);
    ensure!(off <= 1, "the whole is {off} levels from the reference");
    ensure!(apart < 2.0, "pieces are {apart:.2} levels from the reference");
    let brightness = (mean(&pieces) - mean(&want)).abs().max((mean(&whole) - mean(&want)).abs());
    ensure!(brightness < 1.0, "the mean is {brightness} levels from the reference");
    let seam = seam(&pieces, &want);
    ensure!(seam < 1.0, "rows and columns of pieces' edges are {seam:.2} levels from the reference");
    Ok(format!(
        "{off} of 255 from the reference at most, in pieces {apart:.2}; the mean {brightness:.2}, a seam {seam:.2}"
    ))
}

fn image(file: &Checkpoint, name: &str) -> Result<InputImage> {
    let meta = file.meta(name).with_context(|| format!("no {name}"))?;
    let [height, width, 3] = *meta.shape.dims() else { anyhow::bail!("{name} is {}", meta.shape) };
    let rgb = file.bytes(name)?.as_ref().to_vec();
    Ok(InputImage { width: u32::try_from(width)?, height: u32::try_from(height)?, rgb })
}

fn most(a: &InputImage, b: &InputImage) -> Result<u8> {
    ensure!((a.width, a.height) == (b.width, b.height), "{a:?}, want {b:?}");
    Ok(a.rgb.iter().zip(&b.rgb).map(|(a, b)| a.abs_diff(*b)).max().unwrap_or(0))
}

/// The mean difference.
fn apart(a: &InputImage, b: &InputImage) -> Result<f64> {
    ensure!((a.width, a.height) == (b.width, b.height), "{a:?}, want {b:?}");
    let sum: f64 = a.rgb.iter().zip(&b.rgb).map(|(a, b)| f64::from(a.abs_diff(*b))).sum();
    Ok(sum / a.rgb.len() as f64)
}

fn mean(image: &InputImage) -> f64 {
    image.rgb.iter().map(|b| f64::from(*b)).sum::<f64>() / image.rgb.len() as f64
}

/// The largest mean difference along a row or a column of what differs from one to the next: a seam differs along all
/// of it in one direction.
fn seam(got: &InputImage, want: &InputImage) -> f64 {
    let (w, h) = (got.width as usize, got.height as usize);
    let off = |x: usize, y: usize| -> f64 {
        let at = (y * w + x) * 3;
        let sum = |image: &InputImage| -> f64 {
            image.rgb.iter().skip(at).take(3).map(|b| f64::from(*b)).sum::<f64>() / 3.0
        };
        sum(got) - sum(want)
    };
    let across = (1..w).map(|x| (0..h).map(|y| off(x, y) - off(x - 1, y)).sum::<f64>().abs() / h as f64);
    let down = (1..h).map(|y| (0..w).map(|x| off(x, y) - off(x, y - 1)).sum::<f64>().abs() / w as f64);
    across.chain(down).fold(0.0, f64::max)
}
