//! The command line. `docs/server.md` describes it for users.

use clap::{ArgAction, Parser};
use sd_options::value::{Shown, log_level, named, shown};
use sd_options::{CacheArgs, ModelOptions};
use sd_runtime::{Engine, ImageRequest, MAX_SIDE, Preview, Result, RngKind, SamplerKind, SchedulerKind};
use std::net::IpAddr;
use std::path::PathBuf;
use tracing::level_filters::LevelFilter;

/// Draws pictures for HTTP clients.
#[derive(Debug, Parser)]
#[command(
    name = "sd-rs",
    bin_name = "sd-server",
    version = concat!("version ", env!("CARGO_PKG_VERSION")),
    disable_version_flag = true,
    args_override_self = true,
    allow_negative_numbers = true,
    max_term_width = 120
)]
pub(crate) struct Args {
    /// Address to listen on
    #[arg(short, long, value_name = "string", default_value = "127.0.0.1")]
    pub(crate) listen_ip: IpAddr,
    /// Port to listen on; 0 lets the system choose one
    #[arg(long, value_name = "int", default_value_t = 1234)]
    pub(crate) listen_port: u16,
    /// Page to serve at / instead of the built-in one; read anew for every request
    #[arg(long, value_name = "path")]
    pub(crate) serve_html_path: Option<PathBuf>,
    /// How much to log on stderr: debug, verbose, info, warn or error
    #[arg(long, value_name = "string", default_value = "info", value_parser = log_level)]
    log_level: LevelFilter,
    /// The same as --log-level verbose
    #[arg(short, long)]
    verbose: bool,
    /// Colour the log
    #[arg(long)]
    pub(crate) color: bool,
    /// Print the version
    #[arg(long, action = ArgAction::Version)]
    version: Option<bool>,
    #[command(flatten)]
    model: ModelOptions,
    /// Folder of LoRAs, which requests and <lora:name:strength> in prompts name; without it there are none
    #[arg(long, value_name = "path", help_heading = "Context Options")]
    pub(crate) lora_model_dir: Option<PathBuf>,
    /// Folder of ControlNets, which requests name; without it there are those of --control-net
    #[arg(long, value_name = "path", help_heading = "Context Options")]
    pub(crate) control_net_dir: Option<PathBuf>,
    #[command(flatten)]
    defaults: Defaults,
    #[command(flatten)]
    cache: CacheArgs,
}

/// What requests start from.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Default Generation Options")]
struct Defaults {
    /// Pixels across; default: the model's own
    #[arg(short = 'W', long, value_name = "int", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_SIDE)))]
    width: Option<u32>,
    /// Pixels down; default: the model's own
    #[arg(short = 'H', long, value_name = "int", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_SIDE)))]
    height: Option<u32>,
    /// Sampler steps; default: the model's own
    #[arg(long, value_name = "int", value_parser = clap::value_parser!(u32).range(1..=i64::from(crate::limits::STEPS)))]
    steps: Option<u32>,
    /// How strongly to follow the prompt; default: the model's own
    #[arg(long, value_name = "float")]
    cfg_scale: Option<f32>,
    /// Sampler; default: the model's own
    #[arg(long, value_name = "string", value_parser = named::<SamplerKind>)]
    sampling_method: Option<SamplerKind>,
    /// Noise schedule; default: the model's own
    #[arg(long, value_name = "string", value_parser = named::<SchedulerKind>)]
    scheduler: Option<SchedulerKind>,
    /// Layers of the text encoder to leave out, counting from 1 for none; 0 or less means the model's own
    #[arg(long, value_name = "int", default_value_t = -1)]
    clip_skip: i32,
    /// What shows running requests: none, proj (a rough picture that costs nothing), tae (by --taesd) or vae
    #[arg(long, value_name = "string", default_value = "proj", value_parser = shown)]
    preview: Shown,
    /// Generator of the noise: cuda (as web UIs on a GPU draw it) or cpu (as ComfyUI draws it)
    #[arg(long, value_name = "string", default_value = "cuda", value_parser = named::<RngKind>)]
    rng: RngKind,
}

impl Args {
    /// The least important events that are logged.
    pub(crate) fn level(&self) -> LevelFilter {
        if self.verbose { LevelFilter::DEBUG.max(self.log_level) } else { self.log_level }
    }

    /// What a request asks for where it is silent.
    ///
    /// # Errors
    /// Options that belong together are not.
    pub(crate) fn defaults(&self) -> Result<ImageRequest> {
        let d = &self.defaults;
        Ok(ImageRequest {
            cache: self.cache.step_cache()?,
            width: d.width.map(crate::limits::whole_blocks),
            height: d.height.map(crate::limits::whole_blocks),
            steps: d.steps,
            cfg_scale: d.cfg_scale,
            sampler: d.sampling_method,
            scheduler: d.scheduler,
            clip_skip: Some(d.clip_skip),
            rng: Some(d.rng),
            preview: d.preview.0.map(|mode| Preview { mode, interval: 1, noisy: false }),
            seed: Some(-1),
            ..ImageRequest::default()
        })
    }

    /// Opens the model.
    pub(crate) fn open(&self) -> Result<Engine> {
        self.model.add_servers()?;
        let mut builder = self.model.engine();
        if let Some(path) = &self.lora_model_dir {
            builder = builder.lora_folder(path);
        }
        if let Some(path) = &self.control_net_dir {
            builder = builder.control_net_folder(path);
        }
        builder.build()
    }
}
