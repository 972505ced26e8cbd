//! Larger pictures by a network such as Real-ESRGAN, piece by piece.

use std::path::Path;
use std::sync::Arc;

use sd_core::exec::Runner;
use sd_core::{CancelToken, Device, Error, Precision, Result, RunnerOptions, Tensor};
use sd_io::Checkpoint;
use sd_models::Upscaler as Network;
use serde::{Deserialize, Serialize};

use crate::input::{InputImage, MOST_PIXELS};
use crate::observer::{Observer, Progress, Stage};
use crate::tiling::{Pieces, Scale, cut, pieced};

/// Pixels along each side of a piece where nothing else is asked for.
pub const UPSCALE_TILE: u32 = 128;
/// The most times that a picture goes through an upscaler.
pub const MAX_UPSCALE_REPEATS: u32 = 8;
/// The share of a piece that its neighbour computes too.
const SHARED: usize = 4;
/// The shortest side of a piece; below it a network sees too little.
const LEAST_TILE: usize = 16;
/// Pixels of the other side that a picture which repeats is surrounded with.
const AROUND: usize = 16;

/// How a picture is made larger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct UpscaleOptions {
    /// How many times it goes through the network.
    pub repeats: u32,
    /// Pixels along each side of a piece, of which a quarter is shared with the next.
    pub tile: u32,
}

impl Default for UpscaleOptions {
    fn default() -> UpscaleOptions {
        UpscaleOptions { repeats: 1, tile: UPSCALE_TILE }
    }
}

/// An upscaler on a device. Weights are read when they are needed.
pub struct Upscaler {
    name: String,
    network: Network,
    runner: Runner,
}

impl Upscaler {
    /// Opens the file of an ESRGAN or Real-ESRGAN network. `device` is named as for
    /// [`EngineBuilder::device`](crate::EngineBuilder::device), `threads` counts as for
    /// [`EngineBuilder::threads`](crate::EngineBuilder::threads).
    ///
    /// # Errors
    /// The file cannot be read or holds no upscaler, or the device does not exist.
    pub fn open(path: &Path, device: &str, threads: usize) -> Result<Upscaler> {
        Upscaler::open_on(path, Device::find(device)?, RunnerOptions { threads, ..RunnerOptions::default() })
    }

    /// [`Upscaler::open`] with all choices.
    pub(crate) fn open_on(path: &Path, device: Arc<Device>, mut options: RunnerOptions) -> Result<Upscaler> {
        // No step follows that would take out what products of bf16 add: several levels of a pixel.
        if options.precision == Precision::Auto {
            options.precision = Precision::F32;
        }
        let network = Network::open(&Arc::new(Checkpoint::open(path)?))?;
        let runner = Runner::new(device, network.source(), options)?;
        let name = path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
        Ok(Upscaler { name, network, runner })
    }

    /// The file's name without its extension.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How many times as many pixels a picture has along each axis after one pass.
    pub fn scale(&self) -> u32 {
        u32::try_from(self.network.scale()).unwrap_or(u32::MAX)
    }

    /// The size of a picture of `size` after all passes.
    ///
    /// # Errors
    /// There are more than [`MAX_UPSCALE_REPEATS`] passes, or the result would have more pixels than a picture can have.
    pub fn check(&self, size: [u32; 2], repeats: u32) -> Result<[u32; 2]> {
        if repeats > MAX_UPSCALE_REPEATS {
            let message = format!("upscale_repeats: want at most {MAX_UPSCALE_REPEATS}, got {repeats}");
            return Err(Error::request(message));
        }
        let times = self.scale().saturating_pow(repeats);
        let [w, h] = size.map(|side| side.saturating_mul(times));
        if u64::from(w) * u64::from(h) > MOST_PIXELS {
            let message = format!("upscale_repeats: {w}x{h} has more than {MOST_PIXELS} pixels");
            return Err(Error::request(message).hint("repeat less often, or begin with a smaller picture"));
        }
        Ok([w, h])
    }

    /// The larger picture of one that repeats down and across as `circular` says. `observer` hears of every piece; `cancel` stops within one operation of the network.
    ///
    /// # Errors
    /// As for [`Upscaler::check`], the picture is not as large as it says, a value became NaN or infinite, a device
    /// failure, or cancellation.
    pub fn upscale(
        &mut self,
        image: &InputImage,
        options: UpscaleOptions,
        circular: [bool; 2],
        observer: &mut dyn Observer,
        cancel: &CancelToken,
    ) -> Result<InputImage> {
        let mut report = |step, total| {
            observer.progress(Progress { stage: Stage::Upscale, step, total, image: 0, images: 1 });
        };
        self.passes(image, options, circular, &mut report, cancel)
    }

    /// As [`Upscaler::upscale`], but for whom it tells how many pieces of how many are done.
    pub(crate) fn passes(
        &mut self,
        image: &InputImage,
        options: UpscaleOptions,
        circular: [bool; 2],
        report: &mut dyn FnMut(usize, usize),
        cancel: &CancelToken,
    ) -> Result<InputImage> {
        image.check("image")?;
        self.check([image.width, image.height], options.repeats)?;
        let mut image = image.clone();
        for _ in 0..options.repeats {
            let once = self.once(&image, options.tile, circular, report, cancel);
            image = once.map_err(|e| e.context(Stage::Upscale.name()))?;
        }
        Ok(image)
    }

    fn once(
        &mut self,
        image: &InputImage,
        tile: u32,
        circular: [bool; 2],
        report: &mut dyn FnMut(usize, usize),
        cancel: &CancelToken,
    ) -> Result<InputImage> {
        let (w, h) = (image.width as usize, image.height as usize);
        let x = Tensor::f32(&[1, 3, h, w], planes(&image.rgb))?;
        let multiple = self.network.multiple();
        let [top, left] = circular.map(|c| if c { AROUND } else { 0 });
        // Sides that repeat are surrounded; then all grow to what the network reads.
        let grown = surround(&x, [top, left], multiple)?;
        let [_, _, gh, gw] = grown.shape().array().ok_or_else(|| Error::internal("a picture of another rank"))?;
        let tile = (tile as usize).max(LEAST_TILE).next_multiple_of(multiple);
        let pieces = |total: usize| Pieces::new(total, tile, tile / SHARED, multiple, false);
        let (rows, columns) = (pieces(gh), pieces(gw));
        let total = rows.count() * columns.count();
        report(0, total);
        let program = self.network.program(rows.len(), columns.len())?;
        let scale = self.network.scale();
        let runner = &mut self.runner;
        let mut compute = |number: usize, piece: &Tensor| {
            cancel.check()?;
            let mut out = runner.run(&program, &[("image", piece)], cancel)?;
            report(number + 1, total);
            out.pop().ok_or_else(|| Error::internal("a program without a result"))
        };
        let y = pieced(&grown, [&rows, &columns], Scale { values: scale, per: 1 }, &mut compute)?;
        if !y.is_finite() {
            let message = format!("NaN or infinite values in the picture of {}", self.name);
            return Err(Error::non_finite(message));
        }
        let y = cut(&y, [top * scale, left * scale], [h * scale, w * scale])?;
        let (width, height) = (image.width * self.scale(), image.height * self.scale());
        Ok(InputImage { width, height, rgb: bytes(&y) })
    }

    /// Frees the memory that weights and workspaces take.
    pub fn release(&mut self) {
        self.runner.release_weights();
        self.runner.release_workspace();
    }
}

impl std::fmt::Debug for Upscaler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Upscaler").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Bytes `[h, w, 3]` as planes of values from 0 to 1.
fn planes(rgb: &[u8]) -> Vec<f32> {
    (0..3).flat_map(|c| rgb.iter().skip(c).step_by(3).map(|b| f32::from(*b) / 255.0)).collect()
}

/// Planes of values from 0 to 1 as bytes, rounded to the nearest.
fn bytes(x: &Tensor) -> Vec<u8> {
    let pixels = x.values().len() / 3;
    let planes: Vec<&[f32]> = x.values().chunks_exact(pixels.max(1)).collect();
    let byte = |v: f32| (v.clamp(0.0, 1.0) * 255.0).round_ties_even() as u8;
    let mut out = Vec::with_capacity(pixels * 3);
    for i in 0..pixels {
        out.extend(planes.iter().map(|plane| byte(plane.get(i).copied().unwrap_or(0.0))));
    }
    out
}

/// `x [1, 3, h, w]` with `top` rows and `left` columns of the other side all around, and then mirrored below and on the
/// right until both sides are multiples of `multiple`, as spandrel does it.
fn surround(x: &Tensor, [top, left]: [usize; 2], multiple: usize) -> Result<Tensor> {
    let [_, c, h, w] = x.shape().array().ok_or_else(|| Error::internal("a picture of another rank"))?;
    let (gh, gw) = ((h + 2 * top).next_multiple_of(multiple), (w + 2 * left).next_multiple_of(multiple));
    if [gh, gw] == [h, w] {
        return Ok(x.clone());
    }
    let source = |at: usize, before: usize, side: usize| {
        let around = side + 2 * before;
        // The position after the last is the one before it.
        let at = if at < around { at } else { (2 * around).saturating_sub(at + 2).min(around - 1) };
        (at + side * before.div_ceil(side.max(1)) - before) % side.max(1)
    };
    let columns: Vec<usize> = (0..gw).map(|at| source(at, left, w)).collect();
    let mut out = Vec::with_capacity(c * gh * gw);
    for plane in x.values().chunks_exact(h * w) {
        for y in 0..gh {
            let row = plane.get(source(y, top, h) * w..).unwrap_or_default();
            out.extend(columns.iter().map(|x| row.get(*x).copied().unwrap_or(0.0)));
        }
    }
    Tensor::f32(&[1, c, gh, gw], out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sides_are_mirrored_or_go_around() {
        let x = Tensor::f32(&[1, 1, 2, 3], vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).unwrap();
        let mirrored = surround(&x, [0, 0], 4).unwrap();
        assert_eq!(mirrored.dims(), [1, 1, 4, 4]);
        let rows = [[1.0, 2.0, 3.0, 2.0], [4.0, 5.0, 6.0, 5.0], [1.0, 2.0, 3.0, 2.0], [1.0, 2.0, 3.0, 2.0]];
        assert_eq!(mirrored.values(), rows.concat());
        let around = surround(&x, [0, 4], 1).unwrap();
        assert_eq!(around.dims(), [1, 1, 2, 11]);
        assert_eq!(around.values()[..11], [3.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 1.0]);
    }

    #[test]
    fn bytes_round_to_the_nearest() {
        let x = Tensor::f32(&[1, 3, 1, 2], vec![-1.0, 0.5, 1.0, 7.0, 0.2, 1.0 / 255.0]).unwrap();
        assert_eq!(bytes(&x), [0, 255, 51, 128, 255, 1]);
        assert_eq!(planes(&[0, 255, 51, 255, 0, 51]), [0.0, 1.0, 1.0, 0.0, 0.2, 0.2]);
    }
}
