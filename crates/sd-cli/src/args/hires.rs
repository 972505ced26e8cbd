//! Options of the second, larger pass.

use clap::{ArgAction, Args as Group};
use sd_options::value::{List, fraction, whole};
use sd_runtime::{Hires, HiresUpscaler, MAX_SIDE, MAX_STEPS, UPSCALE_TILE};
use std::path::{Path, PathBuf};

/// The extensions of files in `--hires-upscalers-dir`, in the order they are tried.
const EXTENSIONS: &[&str] = &["gguf", "safetensors", "pt", "pth"];

/// A second, larger pass.
#[derive(Debug, Group)]
#[command(next_help_heading = "Generation Options")]
pub(crate) struct HiresOptions {
    /// Draw a second time, larger, from what the first time gave
    #[arg(long)]
    hires: bool,
    /// How the first picture becomes larger: Latent, "Latent (bicubic)" and kin, Lanczos, Nearest, Model for
    /// --upscale-model, a file of --hires-upscalers-dir without its extension, or None for no second pass
    #[arg(long, value_name = "string", default_value = "Latent")]
    hires_upscaler: String,
    /// Folder of upscalers that --hires-upscaler names
    #[arg(long, value_name = "path")]
    hires_upscalers_dir: Option<PathBuf>,
    /// How many times larger, where no size is given
    #[arg(long, value_name = "float", default_value_t = 2.0)]
    hires_scale: f32,
    /// Width of the second picture; 0 takes its height where that is given, else --hires-scale
    #[arg(long, value_name = "int", default_value_t = 0, value_parser = whole(0, MAX_SIDE))]
    hires_width: u32,
    /// Its height, likewise
    #[arg(long, value_name = "int", default_value_t = 0, value_parser = whole(0, MAX_SIDE))]
    hires_height: u32,
    /// Steps of the second time; 0 means as many as the first time
    #[arg(long, value_name = "int", default_value_t = 0, value_parser = whole(0, MAX_STEPS))]
    hires_steps: u32,
    /// How much is painted anew the second time, above 0 and at most 1
    #[arg(long, value_name = "float", default_value_t = 0.7, value_parser = fraction::<f32>)]
    hires_denoising_strength: f32,
    /// Noise levels of the second time, falling
    #[arg(long, value_name = "list", action = ArgAction::Append)]
    hires_sigmas: Vec<List<f64>>,
    /// Pixels along each side of the pieces of an upscaler
    #[arg(long, value_name = "int", default_value_t = UPSCALE_TILE, value_parser = whole(1, MAX_SIDE))]
    hires_upscale_tile_size: u32,
}

impl HiresOptions {
    /// The second pass, if one is asked for.
    pub(crate) fn hires(&self) -> Option<Hires> {
        let sigmas: Vec<f64> = self.hires_sigmas.iter().flat_map(|list| &list.0).copied().collect();
        (self.hires && self.hires_upscaler != "None").then(|| Hires {
            // What is no name of these is a file's.
            upscaler: self.hires_upscaler.parse().unwrap_or(HiresUpscaler::Model),
            scale: self.hires_scale,
            width: self.hires_width,
            height: self.hires_height,
            steps: self.hires_steps,
            strength: self.hires_denoising_strength,
            sigmas: Some(sigmas).filter(|sigmas| !sigmas.is_empty()),
            tile: self.hires_upscale_tile_size,
        })
    }

    /// The file of the upscaler that is named, if one is.
    ///
    /// # Errors
    /// There is none of that name.
    pub(crate) fn file(&self) -> anyhow::Result<Option<PathBuf>> {
        let name = &self.hires_upscaler;
        if !self.hires || name == "None" || name.parse::<HiresUpscaler>().is_ok() {
            return Ok(None);
        }
        let known = || HiresUpscaler::names().collect::<Vec<_>>().join(", ");
        let Some(folder) = &self.hires_upscalers_dir else {
            anyhow::bail!(
                "--hires-upscaler: no {name:?} (one of None, {}, or give --hires-upscalers-dir)",
                known()
            );
        };
        let plain = Path::new(name).file_name().is_some_and(|file| file.to_str() == Some(name));
        let files = EXTENSIONS.iter().map(|extension| folder.join(format!("{name}.{extension}")));
        match files.filter(|_| plain).find(|file| file.is_file()) {
            Some(file) => Ok(Some(file)),
            None => anyhow::bail!(
                "--hires-upscaler: no {name:?} in {} (want a name without folder and extension)",
                folder.display()
            ),
        }
    }
}
