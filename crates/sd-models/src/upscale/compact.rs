//! Real-ESRGAN's compact network (`SRVGGNetCompact`), which works at the picture's own size and spreads the result's
//! pixels at its end.
//! `c` channels, `s` the scale.

use sd_core::scope::Role;
use sd_core::{Conv2dOptions, Error, Graph, Result, Scope, Var};

use super::pixel_shuffle;

const COLOURS: usize = 3;
/// The largest scale of a published network is 4.
const MOST_SCALE: usize = 8;

/// Sizes, read off the weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Config {
    /// Layers between the first convolution and the last: activations and convolutions in turn.
    layers: usize,
    /// `s`.
    pub(super) scale: usize,
}

impl Config {
    pub(super) fn detect(w: &Scope) -> Result<Config> {
        let [_, read, _, _] = w.dims("body.0.weight")?;
        if read != COLOURS {
            return Err(Error::unsupported(format!("body.0.weight reads {read} channels, want {COLOURS}")));
        }
        let last = w.count("body")?.saturating_sub(1);
        let name = format!("body.{last}.weight");
        let [given, _, _, _] = w.dims(&name)?;
        let scale = (1..=MOST_SCALE).find(|s| COLOURS * s * s == given).ok_or_else(|| {
            Error::unsupported(format!("{name} gives {given} channels, want 3 times the square of a scale"))
        })?;
        Ok(Config { layers: last.saturating_sub(1), scale })
    }
}

pub(super) fn build(g: &Graph, w: &Scope, cfg: &Config, image: Var) -> Result<Var> {
    let conv = |i: usize, x: Var| g.conv2d(&w.at("body", i).conv2d("")?, x, Conv2dOptions::padded(1));
    let mut x = conv(0, image)?;
    for i in 1..=cfg.layers {
        if i % 2 == 1 {
            x = prelu(g, &w.at("body", i), x)?;
        } else {
            x = conv(i, x)?;
            g.cut(&w.at("body", i), &[x]);
        }
    }
    let x = pixel_shuffle(g, conv(cfg.layers + 1, x)?, cfg.scale)?;
    // The network adds to the picture, enlarged by repeating pixels.
    g.add(x, g.upsample_nearest(image, cfg.scale)?)
}

/// `x [1, c, h, w]` above 0, times a slope for each channel below.
fn prelu(g: &Graph, w: &Scope, x: Var) -> Result<Var> {
    let slope = g.weight(&w.weight("weight", Role::Vector)?);
    let c = g.shape(slope).elements();
    let slope = g.reshape(slope, &[1, c, 1, 1])?;
    let above = g.relu(x)?;
    g.add(above, g.mul(g.sub(x, above)?, slope)?)
}
