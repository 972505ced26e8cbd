//! Which files make a model, and where it runs.

use crate::value::{OwnVae, named, vae_format, weight_type, whole};
use clap::{ArgAction, Args};
use sd_runtime::{
    DType, Device, Engine, EngineBuilder, Error, LoraMode, ModelFiles, Part, Precision, Prediction, Result,
    Upscaler, add_rpc_server,
};
use std::path::PathBuf;
use tracing::info;

/// The model that is used when none is named: its file name and its bytes.
const DEMO: (&str, &[u8]) = ("demo.safetensors", include_bytes!("../../../assets/demo.safetensors"));

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
    /// Device to compute on, by its name in sd-cli --list-devices
    #[arg(long, value_name = "string", action = ArgAction::Append)]
    backend: Vec<String>,
    /// RPC servers whose devices to use: host:port, several separated by commas
    #[arg(long, value_name = "string", action = ArgAction::Append)]
    rpc_servers: Vec<String>,
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
    /// Its file cannot be read or holds no upscaler, or `--backend` is malformed or names no device.
    pub fn upscaler(&self) -> Result<Option<Upscaler>> {
        let Some(path) = &self.upscale_model else { return Ok(None) };
        let device = device(&self.backend)?.unwrap_or_default();
        let upscaler = Upscaler::open(path, &device, self.threads());
        upscaler.map(Some).map_err(|e| e.context("--upscale-model"))
    }

    /// An engine of what these options name, the demo model if they name none. The folder of LoRAs is not among them.
    ///
    /// # Errors
    /// `--backend` is malformed or names no device.
    pub fn engine(&self) -> Result<EngineBuilder> {
        let files = self.files();
        let mut builder = Engine::builder();
        if files.model.is_none() && !files.parts.contains_key(&Part::Diffusion) {
            info!("no --model given: using the built-in demo model, which knows coloured shapes and nothing else");
            builder = builder.model_bytes(DEMO.0, DEMO.1);
        }
        builder = builder.files(files).lora_mode(self.lora_apply_mode).threads(self.threads());
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
        builder = builder.precision(self.precision);
        if let Some(device) = device(&self.backend)? {
            // Found out before the files are read.
            Device::find(&device).map_err(|e| e.context("--backend"))?;
            builder = builder.device(device);
        }
        Ok(builder)
    }
}

/// The one device that `--backend` names, if it names one. Values given in several places count as one list.
fn device(backend: &[String]) -> Result<Option<String>> {
    let mut device = None;
    let wrong = |item: &str, what: &str| Err(Error::request(format!("--backend {item}: {what}")));
    for item in backend.iter().flat_map(|list| list.split(',')).map(str::trim).filter(|item| !item.is_empty()) {
        let name = match item.split_once('=') {
            Some(("all" | "default" | "*", name)) => name.trim(),
            Some(_) => return wrong(item, "a device for one part of the model is not supported yet"),
            None => item,
        };
        if name.contains('&') {
            return wrong(item, "several devices at once are not supported yet");
        }
        device = Some(name.to_owned());
    }
    Ok(device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_backend_list_names_one_device() {
        let device = |items: &[&str]| device(&items.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>());
        for (items, want) in [
            (&[][..], None),
            (&["CPU"], Some("CPU")),
            (&["CPU, RPC0"], Some("RPC0")),
            (&["CPU", "*=RPC0"], Some("RPC0")),
            (&["CPU,auto"], Some("auto")),
            (&[" , "], None),
        ] {
            assert_eq!(device(items).unwrap().as_deref(), want, "{items:?}");
        }
        for wrong in ["vae=cpu", "a&b"] {
            let message = device(&[wrong]).unwrap_err().to_string();
            assert!(message.starts_with(&format!("--backend {wrong}")), "{message}");
        }
    }
}
