//! From parsed options to files.

use crate::args::Args;
use crate::console::{Bar, Console};
use crate::request::request;
use anyhow::{Context, Result, bail};
use sd_io::{Image, output_path};
use sd_runtime::{CancelToken, Device, Engine, GeneratedImage, Observer, Progress};
use std::fs::File;
use std::path::{Path, PathBuf};
use tracing::{debug, info, warn};

/// The model that is used when none is named: its file name and its bytes.
const DEMO: (&str, &[u8]) = ("demo.safetensors", include_bytes!("../../../assets/demo.safetensors"));

/// Draws what `args` ask for and writes the files.
pub(crate) fn run(args: &Args, console: &Console, cancel: &CancelToken) -> Result<()> {
    let request = request(args)?;
    let output = Output::new(args);
    output.check()?;
    let mut engine = open(args)?;
    let model = engine.info();
    info!("{} model {} on {}", model.family, model.name, model.device);
    for unused in &model.unused {
        debug!("not used: {unused}");
    }
    let mut watcher = Watcher { bar: Bar::new(console), output, cancel, saved: Ok(()) };
    let drawn = engine.generate_each(&request, &mut watcher, cancel);
    // A file that could not be written stopped the request; that is what the user needs to hear.
    watcher.saved?;
    drawn?;
    Ok(())
}

fn open(args: &Args) -> Result<Engine> {
    let context = &args.context;
    let mut builder = Engine::builder();
    match (&context.model, &context.diffusion_model) {
        (Some(path), _) => builder = builder.model(path),
        (None, Some(_)) => {}
        (None, None) => {
            info!("no --model given: using the built-in demo model, which knows coloured shapes and nothing else");
            builder = builder.model_bytes(DEMO.0, DEMO.1);
        }
    }
    if let Some(path) = &context.diffusion_model {
        builder = builder.diffusion_model(path);
    }
    if let Some(path) = &context.clip_l {
        builder = builder.clip_l(path);
    }
    if let Some(path) = &context.clip_g {
        builder = builder.clip_g(path);
    }
    if let Some(prediction) = context.prediction {
        builder = builder.prediction(prediction);
    }
    if let Some(path) = &context.t5xxl {
        builder = builder.t5xxl(path);
    }
    if let Some(path) = &context.vae {
        builder = builder.vae(path);
    }
    if let Some(format) = context.vae_format.0 {
        builder = builder.vae_format(format);
    }
    if let Some(path) = &context.refiner {
        builder = builder.refiner(path);
    }
    if !context.lora_model_dir.as_os_str().is_empty() {
        builder = builder.lora_folder(&context.lora_model_dir).any_lora_path(true);
    }
    if let Some(path) = &context.embd_dir {
        builder = builder.embedding_folder(path);
    }
    if let Some(path) = &context.cache_dir {
        builder = builder.cache_folder(path);
    }
    builder = builder.lora_mode(context.lora_apply_mode);
    if let Some(dtype) = context.weight_type {
        builder = builder.weight_type(dtype);
    }
    if let Some(device) = device(&context.backend)? {
        // Found out before the files are read.
        Device::find(&device).context("--backend")?;
        builder = builder.device(device);
    }
    Ok(builder.threads(usize::try_from(context.threads).unwrap_or(0)).build()?)
}

/// The one device that `--backend` names, if it names one. Values given in several places count as one list.
fn device(backend: &[String]) -> Result<Option<String>> {
    let mut device = None;
    for item in backend.iter().flat_map(|list| list.split(',')).map(str::trim).filter(|item| !item.is_empty()) {
        let name = match item.split_once('=') {
            Some(("all" | "default" | "*", name)) => name.trim(),
            Some(_) => bail!("--backend {item}: a device for one part of the model is not supported yet"),
            None => item,
        };
        if name.contains('&') {
            bail!("--backend {item}: several devices at once are not supported yet");
        }
        device = Some(name.to_owned());
    }
    Ok(device)
}

/// Finds out whether files can be made in `folder`, by making one for a moment.
fn writable(folder: &Path) -> std::io::Result<()> {
    let probe = folder.join(format!(".sd-cli-{}", std::process::id()));
    File::options().write(true).create_new(true).open(&probe)?;
    std::fs::remove_file(&probe)
}

/// Where and how images are written.
struct Output {
    pattern: String,
    begin: u64,
    total: usize,
    quality: u8,
    metadata: bool,
}

impl Output {
    fn new(args: &Args) -> Output {
        Output {
            pattern: args.cli.output.clone(),
            begin: u64::try_from(args.cli.output_begin_idx).unwrap_or(0),
            total: args.generation.batch_count as usize,
            quality: args.cli.compression_quality,
            metadata: !args.generation.disable_image_metadata,
        }
    }

    fn path(&self, index: usize) -> PathBuf {
        output_path(&self.pattern, self.begin, index, self.total)
    }

    /// Finds out before the work whether the images can have their names.
    fn check(&self) -> Result<()> {
        for index in 0..self.total {
            let path = self.path(index);
            if path.is_dir() {
                bail!("--output: {} is a folder", path.display());
            }
            // Of `folder/` nothing but the extension is left for a name.
            if path.extension().is_none() {
                bail!(
                    "--output: {} names no file, want one such as {}",
                    self.pattern,
                    path.with_file_name("a.png").display()
                );
            }
            // What comes before a bare name is empty.
            let before = path.ancestors().skip(1).find(|p| p.as_os_str().is_empty() || p.exists());
            let folder = before.filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
            if !folder.is_dir() {
                bail!("--output: {} is not a folder", folder.display());
            }
            // Pictures share a folder mostly, and a device is written in place.
            if index == 0 && !path.exists() {
                writable(folder).with_context(|| format!("--output: cannot write in {}", folder.display()))?;
            }
        }
        Ok(())
    }

    fn save(&self, index: usize, image: &GeneratedImage) -> Result<()> {
        let path = self.path(index);
        let text = self.metadata.then(|| image.parameters.to_text());
        let picture = Image::new(image.width, image.height, image.rgb.clone())?;
        picture.save(&path, self.quality, text.as_deref()).context("--output")?;
        info!("wrote {} (seed {})", path.display(), image.parameters.seed);
        Ok(())
    }
}

/// Shows progress, and writes each image as soon as it is there.
struct Watcher<'a> {
    bar: Bar,
    output: Output,
    cancel: &'a CancelToken,
    saved: Result<()>,
}

impl Observer for Watcher<'_> {
    fn progress(&mut self, progress: Progress) {
        self.bar.update(progress);
    }

    fn warning(&mut self, message: &str) {
        warn!("{message}");
    }

    fn image(&mut self, index: usize, image: &GeneratedImage) {
        if self.saved.is_ok() {
            self.saved = self.output.save(index, image);
        }
        if self.saved.is_err() {
            self.cancel.cancel();
        }
    }
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
