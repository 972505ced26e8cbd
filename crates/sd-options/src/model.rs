//! Which files make a model, and where it runs.

use crate::value::{OwnVae, named, switch, vae_format, weight_type, whole};
use clap::{ArgAction, Args};
use sd_runtime::{
    DType, Device, Engine, EngineBuilder, LoraMode, ModelFiles, Part, Precision, Prediction, Result, Shorthands,
    Upscaler, add_rpc_server,
};
use std::path::PathBuf;
use std::sync::Arc;
use tracing::{debug, info};

/// The model that is used when none is named: its file name and its bytes.
const DEMO: (&str, &[u8]) = ("demo.safetensors", include_bytes!("../../../assets/demo.safetensors"));

/// Heading of the options that say where modules compute and where weights are.
const PLACEMENT: &str = "Devices and Memory";

/// What is loaded, and where it runs.
#[derive(Debug, Args)]
#[command(next_help_heading = "Context Options")]
pub struct ModelOptions {
    /// Checkpoint: a safetensors or GGUF file, or a diffusers folder; without it the demo model is used
    #[arg(short, long, value_name = "path")]
    pub model: Option<PathBuf>,
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
    /// Tiny autoencoder (TAESD) that decodes and encodes in place of the model's, quickly and roughly
    #[arg(long, alias = "tae", value_name = "path")]
    taesd: Option<PathBuf>,
    /// Use --taesd for previews alone
    #[arg(long)]
    taesd_preview_only: bool,
    /// ESRGAN or Real-ESRGAN network that makes pictures larger
    #[arg(long, value_name = "path")]
    pub upscale_model: Option<PathBuf>,
    /// Checkpoint that does the last steps, such as SDXL's refiner
    #[arg(long, value_name = "path")]
    refiner: Option<PathBuf>,
    /// ControlNet, which follows --control-image; may be given several times
    #[arg(long, value_name = "path", action = ArgAction::Append)]
    pub control_net: Vec<PathBuf>,
    /// Where LoRAs change weights: auto, immediately (when they are loaded) or at_runtime (beside them in every run)
    #[arg(long, value_name = "string", default_value = "auto", value_parser = named::<LoraMode>)]
    lora_apply_mode: LoraMode,
    /// Draw without LoRAs that change nothing of the model, such as those of another family, instead of failing
    #[arg(long)]
    allow_unused_loras: bool,
    /// Folder of textual inversion embeddings, whose file names are words in prompts
    #[arg(long, value_name = "path")]
    embd_dir: Option<PathBuf>,
    /// What the network predicts, such as eps or v; default: what the checkpoint says, or a try
    #[arg(long, value_name = "string", value_parser = named::<Prediction>)]
    prediction: Option<Prediction>,
    /// Type of the weights in memory, such as f32, f16 or q8_0; default: as stored
    #[arg(long = "type", value_name = "string", value_parser = weight_type)]
    pub weight_type: Option<DType>,
    /// Factors of products on processors that multiply bf16: auto (bf16 for weights of 16 bits or less), f32 or bf16
    #[arg(long, value_name = "string", default_value = "auto", value_parser = named::<Precision>)]
    precision: Precision,
    /// Folder to keep weights in that --type quantises, so that the next run need not convert them again
    #[arg(long, value_name = "path")]
    cache_dir: Option<PathBuf>,
    /// CPU threads; 0 or less means one for each physical core
    #[arg(short, long, value_name = "int", default_value_t = -1, value_parser = whole(i32::MIN, i32::MAX))]
    threads: i32,
    /// Devices that compute: a name of --list-devices, module=device for one module, device&device to divide it
    #[arg(long, value_name = "string", action = ArgAction::Append, help_heading = PLACEMENT)]
    backend: Vec<String>,
    /// Where weights are between uses: a device, cpu for main memory, disk, or module=place
    #[arg(long, value_name = "string", action = ArgAction::Append, help_heading = PLACEMENT)]
    params_backend: Vec<String>,
    /// How several devices share a module: layer or row, or module=mode
    #[arg(long, value_name = "string", action = ArgAction::Append, help_heading = PLACEMENT)]
    split_mode: Vec<String>,
    /// GiB that may be used of each device, or device=GiB; negative leaves so much free; 0 sets no limit
    #[arg(long, value_name = "string", default_value = "0", help_heading = PLACEMENT)]
    max_vram: String,
    /// Whether to find places where neither --backend nor --params-backend is given: on or off
    #[arg(long, value_name = "string", default_value = "on", value_parser = switch, action = ArgAction::Set,
        help_heading = PLACEMENT)]
    auto_fit: bool,
    /// Load all weights at the start instead of when they are needed
    #[arg(long, help_heading = PLACEMENT)]
    eager_load: bool,
    /// Do not load the next weights while those before compute
    #[arg(long, help_heading = PLACEMENT)]
    disable_prefetch: bool,
    /// Never compute a network in pieces that fit
    #[arg(long, help_heading = PLACEMENT)]
    disable_segmented_compute: bool,
    /// The same as --params-backend cpu
    #[arg(long, help_heading = PLACEMENT)]
    offload_to_cpu: bool,
    /// The same as --backend te=cpu
    #[arg(long, help_heading = PLACEMENT)]
    clip_on_cpu: bool,
    /// The same as --backend vae=cpu
    #[arg(long, help_heading = PLACEMENT)]
    vae_on_cpu: bool,
    /// The same as --backend controlnet=cpu
    #[arg(long, help_heading = PLACEMENT)]
    control_net_cpu: bool,
    /// RPC servers whose devices to use: host:port, several separated by commas
    #[arg(long, value_name = "string", action = ArgAction::Append, help_heading = PLACEMENT)]
    rpc_servers: Vec<String>,
    #[command(flatten)]
    always: Always,
}

/// Options of stable-diffusion.cpp that choose what this program always does.
#[derive(Debug, Args)]
struct Always {
    #[arg(long, hide = true)]
    mmap: bool,
    #[arg(long, hide = true)]
    fa: bool,
    #[arg(long, hide = true)]
    diffusion_fa: bool,
    #[arg(long, hide = true)]
    diffusion_conv_direct: bool,
    #[arg(long, hide = true)]
    vae_conv_direct: bool,
    #[arg(long, hide = true)]
    force_sdxl_vae_conv_scale: bool,
}

impl Always {
    fn log(&self) {
        let direct = "convolutions never hold an unrolled picture";
        let attention = "attention never holds a matrix of all scores";
        for (given, option, why) in [
            (self.mmap, "--mmap", "files are always mapped"),
            (self.fa, "--fa", attention),
            (self.diffusion_fa, "--diffusion-fa", attention),
            (self.diffusion_conv_direct, "--diffusion-conv-direct", direct),
            (self.vae_conv_direct, "--vae-conv-direct", direct),
            (self.force_sdxl_vae_conv_scale, "--force-sdxl-vae-conv-scale", "autoencoders compute in f32"),
        ] {
            if given {
                debug!("{option} changes nothing: {why}");
            }
        }
    }
}

impl ModelOptions {
    /// The files that are named.
    pub fn files(&self) -> ModelFiles {
        let parts = [
            (Part::Diffusion, &self.diffusion_model),
            (Part::ClipL, &self.clip_l),
            (Part::ClipG, &self.clip_g),
            (Part::T5, &self.t5xxl),
            (Part::Autoencoder, &self.vae),
        ];
        let parts = parts.into_iter().filter_map(|(part, path)| Some((part, path.clone()?))).collect();
        ModelFiles { model: self.model.clone(), parts }
    }

    /// CPU threads; 0 for one per physical core.
    pub fn threads(&self) -> usize {
        usize::try_from(self.threads).unwrap_or(0)
    }

    /// Registers the devices of the RPC servers that are named.
    ///
    /// # Errors
    /// One cannot be reached or is no RPC server.
    pub fn add_servers(&self) -> Result<()> {
        let servers = self.rpc_servers.iter().flat_map(|list| list.split(','));
        for server in servers.map(str::trim).filter(|server| !server.is_empty()) {
            add_rpc_server(server).map_err(|e| e.context("--rpc-servers"))?;
        }
        Ok(())
    }

    /// The upscaler alone, if one is named.
    ///
    /// # Errors
    /// Its file cannot be read or holds no upscaler, or an option of placement is malformed or names no device.
    pub fn upscaler(&self) -> Result<Option<Upscaler>> {
        let Some(path) = &self.upscale_model else { return Ok(None) };
        self.place(Engine::builder()).upscaler(path).open_upscaler().map(Some)
    }

    /// An engine of what these options name, the demo model if they name none. The folder of LoRAs is not among them.
    pub fn engine(&self) -> EngineBuilder {
        let files = self.files();
        let mut builder = Engine::builder();
        if files.model.is_none() && !files.parts.contains_key(&Part::Diffusion) {
            info!("no --model given: using the built-in demo model, which knows coloured shapes and nothing else");
            builder = builder.model_bytes(DEMO.0, DEMO.1);
        }
        builder = builder.files(files).lora_mode(self.lora_apply_mode).allow_unused_loras(self.allow_unused_loras);
        if let Some(format) = self.vae_format.0 {
            builder = builder.vae_format(format);
        }
        if let Some(path) = &self.refiner {
            builder = builder.refiner(path);
        }
        if let Some(path) = &self.taesd {
            builder = builder.taesd(path).taesd_preview_only(self.taesd_preview_only);
        }
        if let Some(path) = &self.upscale_model {
            builder = builder.upscaler(path);
        }
        for path in &self.control_net {
            builder = builder.control_net(path);
        }
        if let Some(path) = &self.embd_dir {
            builder = builder.embedding_folder(path);
        }
        if let Some(path) = &self.cache_dir {
            builder = builder.cache_folder(path);
        }
        if let Some(prediction) = self.prediction {
            builder = builder.prediction(prediction);
        }
        if let Some(dtype) = self.weight_type {
            builder = builder.weight_type(dtype);
        }
        self.place(builder)
    }

    /// `builder` with what is said about devices and memory.
    fn place(&self, builder: EngineBuilder) -> EngineBuilder {
        self.always.log();
        let shorthands = Shorthands {
            offload_to_cpu: self.offload_to_cpu,
            clip_on_cpu: self.clip_on_cpu,
            vae_on_cpu: self.vae_on_cpu,
            control_net_cpu: self.control_net_cpu,
        };
        let [backend, params] = shorthands.before(&self.backend.join(","), &self.params_backend.join(","));
        builder
            .threads(self.threads())
            .precision(self.precision)
            .backend(backend)
            .params_backend(params)
            .split_mode(self.split_mode.join(","))
            .max_vram(self.max_vram.clone())
            .auto_fit(self.auto_fit)
            .eager_load(self.eager_load)
            .prefetch(!self.disable_prefetch)
            .segmented(!self.disable_segmented_compute)
    }
}

/// A line for each device of this process: name, description, and memory where the device says what it has.
pub fn list_devices() -> String {
    const MIB: usize = 1 << 20;
    let line = |device: Arc<Device>| {
        let memory = device.memory();
        let memory = match memory.total {
            0 => String::new(),
            total => format!("\t{} of {} MiB free", memory.free / MIB, total / MIB),
        };
        format!("{}\t{}{memory}\n", device.name(), device.description())
    };
    Device::all().into_iter().map(line).collect()
}
