//! Options that make pictures larger.

use clap::Args as Group;
use sd_options::value::{fraction, whole};
use sd_runtime::{MAX_SIDE, MAX_UPSCALE_REPEATS, UPSCALE_TILE, VaeTiling};
use std::str::FromStr;

/// How finished pictures, or with -M upscale a given one, become larger.
#[derive(Debug, Group)]
#[command(next_help_heading = "Generation Options")]
pub(crate) struct Larger {
    /// How many times pictures go through --upscale-model
    #[arg(long, value_name = "int", default_value_t = 1, value_parser = whole(1, MAX_UPSCALE_REPEATS))]
    pub(crate) upscale_repeats: u32,
    /// Pixels along each side of the pieces that --upscale-model computes one by one
    #[arg(long, value_name = "int", default_value_t = UPSCALE_TILE, value_parser = whole(1, MAX_SIDE))]
    pub(crate) upscale_tile_size: u32,
    /// Run the autoencoder in pieces, which takes less memory of the device and changes nothing else
    #[arg(long)]
    vae_tiling: bool,
    /// Latent positions of a piece, as X or XxY; below 4 it is 32
    #[arg(long, value_name = "list", default_value = "0", value_parser = pair::<u32>)]
    vae_tile_size: [u32; 2],
    /// Its share of the latent up to 1, or the number of pieces, as X or XxY; 0 leaves it to --vae-tile-size
    #[arg(long, value_name = "list", default_value = "0", value_parser = pair::<f32>)]
    vae_relative_tile_size: [f32; 2],
    /// Accepted from 0 to 0.5 and without effect: pieces join exactly
    #[arg(long, value_name = "float", default_value_t = 0.5, value_parser = overlap)]
    vae_tile_overlap: f32,
}

impl Larger {
    /// How the autoencoder runs.
    pub(crate) fn vae_tiling(&self) -> Option<VaeTiling> {
        let tiling = VaeTiling { tile: self.vae_tile_size, relative: self.vae_relative_tile_size };
        self.vae_tiling.then_some(tiling)
    }
}

/// Two numbers with an x between, or one for both.
fn pair<T: FromStr + Copy>(text: &str) -> Result<[T; 2], String> {
    let (x, y) = text.split_once('x').unwrap_or((text, text));
    let number = |text: &str| text.trim().parse().map_err(|_| format!("{text:?} is no such number; want X or XxY"));
    Ok([number(x)?, number(y)?])
}

fn overlap(text: &str) -> Result<f32, String> {
    fraction::<f32>(text).ok().filter(|x| *x <= 0.5).ok_or_else(|| "want a number from 0 to 0.5".to_owned())
}
