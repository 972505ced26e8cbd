//! RRDBNet, the residual-in-residual dense network of ESRGAN (Wang et al. 2018) and Real-ESRGAN (Wang et al. 2021).
//! `c` channels; a picture of `[h, w]`, or its cells of `r` by `r` pixels, which networks for scales 1 and 2 read.

use sd_core::{Conv2dOptions, Error, Graph, Result, Scope, Var, scope::Conv2d};

use super::pixel_unshuffle;

/// What each residual is multiplied by, and the slope of activations below 0, which are both the papers'.
const RESIDUAL: f32 = 0.2;
const SLOPE: f32 = 0.2;
/// Convolutions of a dense block, and dense blocks of a residual one.
const DENSE: usize = 5;
const BLOCKS: usize = 3;
const COLOURS: usize = 3;

/// Sizes, read off the weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Config {
    /// Side of the cells that the first layer reads, `r`.
    pub(super) shuffle: usize,
    blocks: usize,
    /// Layers that double the size.
    upsamplers: usize,
}

impl Config {
    pub(super) fn detect(w: &Scope) -> Result<Config> {
        let [_, read, _, _] = w.dims("conv_first.weight")?;
        let shuffle = [1, 2, 4].into_iter().find(|r| COLOURS * r * r == read).ok_or_else(|| {
            Error::unsupported(format!("conv_first.weight reads {read} channels, want 3, 12 or 48"))
        })?;
        let upsamplers = (1..).take_while(|i| w.has(&format!("conv_up{i}.weight"))).count();
        let cfg = Config { shuffle, blocks: w.count("body")?, upsamplers };
        if 1usize.checked_shl(upsamplers as u32).is_none_or(|size| size < shuffle || size > 64) {
            return Err(Error::unsupported(format!("cells of {shuffle} pixels and {upsamplers} doublings")));
        }
        Ok(cfg)
    }

    /// Pixels of the result for one of the picture, along each axis.
    pub(super) fn scale(&self) -> usize {
        (1 << self.upsamplers) / self.shuffle
    }
}

pub(super) fn build(g: &Graph, w: &Scope, cfg: &Config, image: Var) -> Result<Var> {
    let first = conv(g, &w.conv2d("conv_first")?, pixel_unshuffle(g, image, cfg.shuffle)?)?; // [1, c, h / r, w / r]
    g.keep(&[first]);
    let mut x = first;
    for i in 0..cfg.blocks {
        let w = w.at("body", i);
        x = block(g, &w, x)?;
        g.cut(&w, &[x]);
    }
    let mut x = g.add(first, conv(g, &w.conv2d("conv_body")?, x)?)?;
    for i in 1..=cfg.upsamplers {
        let name = format!("conv_up{i}");
        x = leaky(g, conv(g, &w.conv2d(&name)?, g.upsample_nearest(x, 2)?)?)?;
        g.cut(&w.sub(&name), &[x]);
    }
    let x = leaky(g, conv(g, &w.conv2d("conv_hr")?, x)?)?;
    conv(g, &w.conv2d("conv_last")?, x)
}

fn block(g: &Graph, w: &Scope, x: Var) -> Result<Var> {
    let mut y = x;
    for k in 1..=BLOCKS {
        y = dense(g, &w.sub(&format!("rdb{k}")), y)?;
    }
    g.add(x, g.scale(y, RESIDUAL)?)
}

/// Each convolution reads the input and what all before it gave.
fn dense(g: &Graph, w: &Scope, x: Var) -> Result<Var> {
    let mut read = vec![x];
    for i in 1..DENSE {
        let y = conv(g, &w.conv2d(&format!("conv{i}"))?, g.concat(&read, 1)?)?;
        read.push(leaky(g, y)?);
    }
    let y = conv(g, &w.conv2d(&format!("conv{DENSE}"))?, g.concat(&read, 1)?)?;
    g.add(x, g.scale(y, RESIDUAL)?)
}

fn conv(g: &Graph, w: &Conv2d, x: Var) -> Result<Var> {
    g.conv2d(w, x, Conv2dOptions::padded(1))
}

/// `x` above 0, `SLOPE x` below.
fn leaky(g: &Graph, x: Var) -> Result<Var> {
    g.add(g.scale(x, SLOPE)?, g.scale(g.relu(x)?, 1.0 - SLOPE)?)
}
