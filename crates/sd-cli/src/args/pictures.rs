//! Options about pictures that go in, and about how they and the prompt are followed.

use clap::{ArgAction, Args as Group};
use sd_options::value::{List, fraction, not_negative, number, whole};
use std::path::PathBuf;

/// Pictures to start from, to look at and to follow.
#[derive(Debug, Group)]
#[command(next_help_heading = "Generation Options")]
pub(crate) struct Pictures {
    /// Picture to start from or to edit; without -W and -H the result has its size
    #[arg(short = 'i', long, value_name = "path")]
    pub(crate) init_img: Option<PathBuf>,
    /// How much of --init-img is painted anew, from 0 to 1; default: 0.75, or 1 for models that read the picture
    #[arg(long, value_name = "float", value_parser = fraction::<f32>)]
    pub(crate) strength: Option<f32>,
    /// Picture whose white parts are painted anew in --init-img
    #[arg(long, value_name = "path")]
    pub(crate) mask: Option<PathBuf>,
    /// Blur the mask by this deviation in pixels, so that what is new fades into what stays
    #[arg(long, value_name = "int", default_value_t = 0, value_parser = whole(0u32, 64))]
    pub(crate) mask_blur: u32,
    /// Draw the surroundings of the mask alone, at the size of -W and -H, and put them back into the picture
    #[arg(long)]
    pub(crate) inpaint_only_masked: bool,
    /// Pixels around the mask that --inpaint-only-masked takes along
    #[arg(long, value_name = "int", default_value_t = 32, value_parser = whole(0u32, 16_384))]
    pub(crate) inpaint_padding: u32,
    /// Picture to look at, for models such as Flux.1 Kontext; may be given several times
    #[arg(short, long, value_name = "path", action = ArgAction::Append)]
    pub(crate) ref_image: Vec<PathBuf>,
    /// How references are read, as key=value,...: ref_index_mode, resize_before_vae, vae_input_max_pixels
    #[arg(long, value_name = "string", action = ArgAction::Append)]
    pub(crate) ref_image_args: Vec<String>,
    /// The same as --ref-image-args ref_index_mode=increase
    #[arg(long)]
    pub(crate) increase_ref_index: bool,
    /// The same as --ref-image-args resize_before_vae=off
    #[arg(long)]
    pub(crate) disable_auto_resize_ref_image: bool,
    /// Edges, depths or poses for --control-net, one for each or one for all, or for models that read them, such as Flux.1
    /// Canny and Depth
    #[arg(long, value_name = "path", action = ArgAction::Append)]
    pub(crate) control_image: Vec<PathBuf>,
    /// How strongly to follow --control-net; one for each or one for all; default: 0.9
    #[arg(long, value_name = "float", action = ArgAction::Append, value_parser = number)]
    pub(crate) control_strength: Vec<f32>,
    /// Share of the steps after which --control-net is followed; one for each or one for all; default: 0
    #[arg(long, value_name = "float", action = ArgAction::Append, value_parser = fraction::<f64>)]
    pub(crate) control_start: Vec<f64>,
    /// Share of the steps before whose end --control-net is followed; one for each or one for all; default: 1
    #[arg(long, value_name = "float", action = ArgAction::Append, value_parser = fraction::<f64>)]
    pub(crate) control_end: Vec<f64>,
    /// Reduce --control-image to its edges first
    #[arg(long)]
    pub(crate) canny: bool,
    /// How strongly to follow the picture that is edited; default: 1.5 for pix2pix models, else 1
    #[arg(long, value_name = "float", value_parser = not_negative)]
    pub(crate) img_cfg_scale: Option<f32>,
    /// Make the picture tileable across and down
    #[arg(long)]
    pub(crate) circular: bool,
    /// Make the picture tileable across
    #[arg(long)]
    pub(crate) circularx: bool,
    /// Make the picture tileable down
    #[arg(long)]
    pub(crate) circulary: bool,
}

/// How the steps are made and guided.
#[derive(Debug, Group)]
#[command(next_help_heading = "Generation Options")]
pub(crate) struct Steps {
    /// Strength of distilled guidance, for models that read it; default: the model's own, 3.5 for Flux.1 dev
    #[arg(long, value_name = "float", value_parser = not_negative)]
    pub(crate) guidance: Option<f32>,
    /// How much is added of what some blocks contribute; 0 turns it off
    #[arg(long, value_name = "float", default_value_t = 0.0, value_parser = number)]
    pub(crate) slg_scale: f32,
    /// Blocks that --slg-scale leaves out
    #[arg(long, value_name = "list", default_value = "[7,8,9]")]
    pub(crate) skip_layers: List<usize>,
    /// Share of the steps after which --slg-scale begins
    #[arg(long, value_name = "float", default_value_t = 0.01, value_parser = fraction::<f64>)]
    pub(crate) skip_layer_start: f64,
    /// Share of the steps before which --slg-scale ends
    #[arg(long, value_name = "float", default_value_t = 0.2, value_parser = fraction::<f64>)]
    pub(crate) skip_layer_end: f64,
    /// How far a flow's noise levels are moved towards noise; default: the model's own
    #[arg(long, value_name = "float", value_parser = number)]
    pub(crate) flow_shift: Option<f32>,
    /// Timestep that the network takes for the last, for NitroFusion's models; 0 turns it off
    #[arg(long, value_name = "int", default_value_t = 0, value_parser = whole(0u32, 1000))]
    pub(crate) timestep_shift: u32,
    /// Noise levels that replace the schedule's, falling: 14.6,7.2,3.1,0
    #[arg(long, value_name = "list", action = ArgAction::Append)]
    pub(crate) sigmas: Vec<List<f64>>,
    /// Share of the noise's timesteps after which --refiner takes over; 1 leaves it out; default: 0.8
    #[arg(long, value_name = "float", value_parser = fraction::<f32>)]
    pub(crate) refiner_switch: Option<f32>,
    /// Fine tuning of sampler, schedule and guidance, as key=value,...
    #[arg(long, value_name = "string", action = ArgAction::Append)]
    pub(crate) extra_sample_args: Vec<String>,
}
