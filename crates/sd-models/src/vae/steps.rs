//! An autoencoder cut where it normalises, so that pictures go through it piece by piece and come out as if they had
//! gone through as a whole: a step looks one pixel far, and mean and variance of all pieces together are given to it.
//!
//! Between two steps there are a picture `x` and, within a residual block, what its first half made of it, `y`. Levels
//! of the latent's own size are not cut.

use sd_core::{Conv2dOptions, Graph, Program, Result, Scope, Var};

use super::kl::{self, Config};
use crate::diffusion::{conv, pad};

/// Runs of channels that are normalised together.
pub const GROUPS: usize = kl::GROUPS;
/// Added to the variance.
pub const EPS: f32 = kl::EPS;

/// Which of the two values between steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Value {
    /// `x`.
    Picture,
    /// `y`.
    Branch,
}

/// A step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    path: String,
    kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A convolution of `x`.
    Conv,
    /// `x` twice as large, then a convolution.
    Double,
    /// A convolution of `x` in steps of two.
    Halve,
    /// The first half of a residual block, which makes `y` of `x`.
    First,
    /// The second half, which adds what it makes of `y` to `x`.
    Second,
    /// The last normalisation and convolution.
    Last,
}

/// The size of a piece, and how it lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Rows and columns of `x` and `y`.
    pub size: [usize; 2],
    /// Whether nothing follows below and to the right.
    pub last: [bool; 2],
}

impl Step {
    fn new(path: impl Into<String>, kind: Kind) -> Step {
        Step { path: path.into(), kind }
    }

    /// Values of the result for how many of `x`, along each axis.
    pub fn scale(&self) -> [usize; 2] {
        match self.kind {
            Kind::Double => [2, 1],
            Kind::Halve => [1, 2],
            _ => [1, 1],
        }
    }

    /// How many rows a piece needs above and below itself, and columns on either side, where there are such. They are
    /// part of the result, and wrong.
    pub fn margins(&self) -> [usize; 2] {
        if self.kind == Kind::Halve { [0, 1] } else { [1, 1] }
    }

    /// Which value is normalised, if one is.
    pub fn normalises(&self) -> Option<Value> {
        match self.kind {
            Kind::First | Kind::Last => Some(Value::Picture),
            Kind::Second => Some(Value::Branch),
            Kind::Conv | Kind::Double | Kind::Halve => None,
        }
    }

    /// Whether `y` is read.
    pub fn reads_branch(&self) -> bool {
        self.kind == Kind::Second
    }

    /// Which value the result is.
    pub fn makes(&self) -> Value {
        if self.kind == Kind::First { Value::Branch } else { Value::Picture }
    }

    /// The program on a piece of `x [1, c, h, w]` and, if it is read, `y [1, k, h, w]`. A step that normalises also reads
    /// `factor` and `offset`, both `[1, n, 1, 1]`: the reciprocal of each channel's deviation, and its mean times that
    /// with a minus.
    pub(crate) fn program(&self, w: &Scope, piece: Piece, [x_channels, y_channels]: [usize; 2]) -> Result<Program> {
        let g = Graph::new();
        let input = |name, c| g.input(name, &[1, c, piece.size[0], piece.size[1]], sd_core::DType::F32);
        let x = input("x", x_channels)?;
        let w = w.sub(&self.path);
        let plain = |name: &str, x: Var| conv(&g, &w.conv2d(name)?, x, 1, [false; 2]);
        let y = match self.kind {
            Kind::Conv => plain("", x)?,
            Kind::Double => conv(&g, &w.conv2d("")?.wide(), g.upsample_nearest(x, 2)?, 1, [false; 2])?,
            Kind::Halve => {
                let side = |last: bool| [0, usize::from(last)];
                let x = pad(&g, x, side(piece.last[0]), side(piece.last[1]), [false; 2])?;
                let options = Conv2dOptions { stride: 2, ..Conv2dOptions::default() };
                g.conv2d(&w.conv2d("")?.wide(), x, options)?
            }
            Kind::First => plain("conv1", normalised(&g, &w, "norm1", x)?)?,
            Kind::Second => {
                let y = plain("conv2", normalised(&g, &w, "norm2", input("y", y_channels)?)?)?;
                g.add(kl::shortcut(&g, &w, x)?, y)?
            }
            Kind::Last => plain("conv_out", normalised(&g, &w, "norm_out", x)?)?,
        };
        g.finish(&[y])
    }
}

/// `x` normalised by given means and deviations, weighed, and activated.
fn normalised(g: &Graph, w: &Scope, name: &str, x: Var) -> Result<Var> {
    let [_, c, _, _] = g.dims(x)?;
    let given = |name| g.input(name, &[1, c, 1, 1], sd_core::DType::F32);
    let x = g.add(g.mul(x, given("factor")?)?, given("offset")?)?;
    let norm = w.norm(name)?;
    let mut y = x;
    if let Some(weight) = norm.weight() {
        y = g.mul(y, g.reshape(g.weight(weight), &[1, c, 1, 1])?)?;
    }
    if let Some(bias) = norm.bias() {
        y = g.add(y, g.reshape(g.weight(bias), &[1, c, 1, 1])?)?;
    }
    g.silu(y)
}

/// The steps of decoding, which follow [`decode_start`].
pub(crate) fn decoding(w: &Scope, cfg: &Config) -> Vec<Step> {
    let mut steps = Vec::new();
    for level in (0..cfg.levels).rev() {
        let path = format!("decoder.up.{level}");
        if level + 1 != cfg.levels {
            blocks(&mut steps, w, &path);
        }
        if w.contains(&format!("{path}.upsample")) {
            steps.push(Step::new(format!("{path}.upsample.conv"), Kind::Double));
        }
    }
    steps.push(Step::new("decoder", Kind::Last));
    steps
}

/// What comes before: `latent [1, z, h, w]` to `x`.
pub(crate) fn decode_start(g: &Graph, w: &Scope, cfg: &Config, latent: Var, circular: [bool; 2]) -> Result<Var> {
    let x = kl::decode_middle(g, w, latent, circular)?;
    match cfg.levels.checked_sub(1) {
        Some(level) => kl::blocks(g, &w.sub("decoder").at("up", level), x, circular),
        None => Ok(x),
    }
}

/// The steps of encoding, which are followed by [`encode_end`].
pub(crate) fn encoding(w: &Scope) -> Result<Vec<Step>> {
    let mut steps = vec![Step::new("encoder.conv_in", Kind::Conv)];
    for level in 0..w.count("encoder.down")?.saturating_sub(1) {
        let path = format!("encoder.down.{level}");
        blocks(&mut steps, w, &path);
        if w.contains(&format!("{path}.downsample")) {
            steps.push(Step::new(format!("{path}.downsample.conv"), Kind::Halve));
        }
    }
    Ok(steps)
}

/// What comes after: `x` to `[1, 2 z, h, w]`, mean and logarithm of the variance.
pub(crate) fn encode_end(g: &Graph, w: &Scope, x: Var, circular: [bool; 2]) -> Result<Var> {
    let down = w.count("encoder.down")?.saturating_sub(1);
    let x = kl::blocks(g, &w.sub("encoder").at("down", down), x, circular)?;
    kl::encode_end(g, w, x, circular)
}

fn blocks(steps: &mut Vec<Step>, w: &Scope, path: &str) {
    for block in 0..w.count(&format!("{path}.block")).unwrap_or(0) {
        let path = format!("{path}.block.{block}");
        steps.push(Step::new(path.clone(), Kind::First));
        steps.push(Step::new(path, Kind::Second));
    }
}
