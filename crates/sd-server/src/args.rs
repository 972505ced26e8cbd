//! The command line. `docs/server.md` describes it for users.

use anyhow::{Context, Result};
use clap::{ArgAction, Parser};
use sd_runtime::{
    DType, Device, Engine, ImageRequest, LoraMode, MAX_SIDE, Prediction, RngKind, SamplerKind, SchedulerKind,
    VaeFormat, add_rpc_server,
};
use std::net::IpAddr;
use std::path::PathBuf;
use tracing::info;
use tracing::level_filters::LevelFilter;

/// The model that is used when none is named: its file name and its bytes.
const DEMO: (&str, &[u8]) = ("demo.safetensors", include_bytes!("../../../assets/demo.safetensors"));

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
    model: Model,
    #[command(flatten)]
    defaults: Defaults,
}

/// What is loaded, and where it runs.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Context Options")]
struct Model {
    /// Checkpoint: a safetensors or GGUF file, or a diffusers folder; without it the demo model is used
    #[arg(short, long, value_name = "path")]
    model: Option<PathBuf>,
    /// Diffusion network in a file of its own
    #[arg(long, value_name = "path")]
    diffusion_model: Option<PathBuf>,
    /// CLIP-L text encoder that replaces the checkpoint's
    #[arg(long = "clip_l", value_name = "path")]
    clip_l: Option<PathBuf>,
    /// Second text encoder, OpenCLIP bigG, that replaces the checkpoint's
    #[arg(long = "clip_g", value_name = "path")]
    clip_g: Option<PathBuf>,
    /// T5-XXL text encoder that replaces the checkpoint's
    #[arg(long, value_name = "path")]
    t5xxl: Option<PathBuf>,
    /// Autoencoder that replaces the checkpoint's
    #[arg(long, value_name = "path")]
    vae: Option<PathBuf>,
    /// Whose latents the autoencoder makes: auto (the family's), flux or sd3
    #[arg(long, value_name = "string", default_value = "auto", value_parser = vae_format)]
    vae_format: OwnVae,
    /// Checkpoint that does the last steps, such as SDXL's refiner
    #[arg(long, value_name = "path")]
    refiner: Option<PathBuf>,
    /// Folder of LoRAs, which requests and <lora:name:strength> in prompts name; without it there are none
    #[arg(long, value_name = "path")]
    lora_model_dir: Option<PathBuf>,
    /// Where LoRAs change weights: auto, immediately (when they are loaded) or at_runtime (beside them in every run)
    #[arg(long, value_name = "string", default_value = "auto")]
    lora_apply_mode: LoraMode,
    /// Folder of textual inversion embeddings, whose file names are words in prompts
    #[arg(long, value_name = "path")]
    embd_dir: Option<PathBuf>,
    /// Folder to keep weights in that --type quantises, so that the next start need not convert them again
    #[arg(long, value_name = "path")]
    cache_dir: Option<PathBuf>,
    /// What the network predicts, such as eps or v; default: what the checkpoint says, or a try
    #[arg(long, value_name = "string")]
    prediction: Option<Prediction>,
    /// Type of the weights in memory, such as f32, f16 or q8_0; default: as stored
    #[arg(long = "type", value_name = "string", value_parser = weight_type)]
    weight_type: Option<DType>,
    /// CPU threads; 0 or less means one for each physical core
    #[arg(short, long, value_name = "int", default_value_t = -1)]
    threads: i32,
    /// Device to compute on, by its name in sd-cli --list-devices
    #[arg(long, value_name = "string")]
    backend: Option<String>,
    /// RPC servers whose devices to use: host:port, several separated by commas
    #[arg(long, value_name = "string", value_delimiter = ',')]
    rpc_servers: Vec<String>,
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
    #[arg(long, value_name = "string")]
    sampling_method: Option<SamplerKind>,
    /// Noise schedule; default: the model's own
    #[arg(long, value_name = "string")]
    scheduler: Option<SchedulerKind>,
    /// Layers of the text encoder to leave out, counting from 1 for none; 0 or less means the model's own
    #[arg(long, value_name = "int", default_value_t = -1)]
    clip_skip: i32,
    /// Generator of the noise: cuda (as web UIs on a GPU draw it) or cpu (as ComfyUI draws it)
    #[arg(long, value_name = "string", default_value = "cuda")]
    rng: RngKind,
}

impl Args {
    /// The least important events that are logged.
    pub(crate) fn level(&self) -> LevelFilter {
        if self.verbose { LevelFilter::DEBUG.max(self.log_level) } else { self.log_level }
    }

    /// What a request asks for where it is silent.
    pub(crate) fn defaults(&self) -> ImageRequest {
        let d = &self.defaults;
        ImageRequest {
            width: d.width.map(crate::limits::whole_blocks),
            height: d.height.map(crate::limits::whole_blocks),
            steps: d.steps,
            cfg_scale: d.cfg_scale,
            sampler: d.sampling_method,
            scheduler: d.scheduler,
            clip_skip: Some(d.clip_skip),
            rng: Some(d.rng),
            seed: Some(-1),
            ..ImageRequest::default()
        }
    }

    /// The folder of LoRAs.
    pub(crate) fn loras(&self) -> Option<PathBuf> {
        self.model.lora_model_dir.clone()
    }

    /// Opens the model.
    pub(crate) fn open(&self) -> Result<Engine> {
        let Model { model, diffusion_model, clip_l, clip_g, t5xxl, vae, refiner, .. } = &self.model;
        for server in self.model.rpc_servers.iter().map(|s| s.trim()).filter(|s| !s.is_empty()) {
            add_rpc_server(server).context("--rpc-servers")?;
        }
        let mut builder = Engine::builder();
        match (model, diffusion_model) {
            (Some(path), _) => builder = builder.model(path),
            (None, Some(_)) => {}
            (None, None) => {
                info!(
                    "no --model given: using the built-in demo model, which knows coloured shapes and nothing else"
                );
                builder = builder.model_bytes(DEMO.0, DEMO.1);
            }
        }
        if let Some(path) = diffusion_model {
            builder = builder.diffusion_model(path);
        }
        if let Some(path) = clip_l {
            builder = builder.clip_l(path);
        }
        if let Some(path) = clip_g {
            builder = builder.clip_g(path);
        }
        if let Some(path) = t5xxl {
            builder = builder.t5xxl(path);
        }
        if let Some(path) = vae {
            builder = builder.vae(path);
        }
        if let Some(format) = self.model.vae_format.0 {
            builder = builder.vae_format(format);
        }
        if let Some(path) = refiner {
            builder = builder.refiner(path);
        }
        if let Some(path) = &self.model.lora_model_dir {
            builder = builder.lora_folder(path);
        }
        if let Some(path) = &self.model.embd_dir {
            builder = builder.embedding_folder(path);
        }
        if let Some(path) = &self.model.cache_dir {
            builder = builder.cache_folder(path);
        }
        builder = builder.lora_mode(self.model.lora_apply_mode);
        if let Some(prediction) = self.model.prediction {
            builder = builder.prediction(prediction);
        }
        if let Some(dtype) = self.model.weight_type {
            builder = builder.weight_type(dtype);
        }
        if let Some(device) = &self.model.backend {
            Device::find(device).context("--backend")?;
            builder = builder.device(device);
        }
        Ok(builder.threads(usize::try_from(self.model.threads).unwrap_or(0)).build()?)
    }
}

/// Level names, most verbose first, as `sd-cli` has them.
fn log_level(text: &str) -> Result<LevelFilter, String> {
    match text {
        "debug" => Ok(LevelFilter::TRACE),
        "verbose" => Ok(LevelFilter::DEBUG),
        "info" => Ok(LevelFilter::INFO),
        "warn" => Ok(LevelFilter::WARN),
        "error" => Ok(LevelFilter::ERROR),
        _ => Err("want debug, verbose, info, warn or error".to_owned()),
    }
}

/// The latents of an autoencoder, if they are not those of the model's family.
#[derive(Debug, Clone, Copy)]
struct OwnVae(Option<VaeFormat>);

fn vae_format(text: &str) -> Result<OwnVae, String> {
    if text == "auto" {
        return Ok(OwnVae(None));
    }
    let format = text.parse().map_err(|e: sd_runtime::Error| {
        let message = e.to_string();
        // clap names the option itself.
        message.strip_prefix("vae_format: ").unwrap_or(&message).to_owned()
    })?;
    Ok(OwnVae(Some(format)))
}

fn weight_type(text: &str) -> Result<DType, String> {
    DType::parse(text).filter(|d| d.is_weight_type()).ok_or_else(|| {
        let names: Vec<&str> = DType::all().filter(|d| d.is_weight_type()).map(DType::name).collect();
        format!("want one of {}", names.join(", "))
    })
}
