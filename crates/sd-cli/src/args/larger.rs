//! Options that make pictures larger.

use clap::Args as Group;
use sd_options::value::whole;
use sd_runtime::{MAX_SIDE, MAX_UPSCALE_REPEATS, UPSCALE_TILE};

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
}
