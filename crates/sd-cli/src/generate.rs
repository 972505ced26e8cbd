//! From parsed options to files.

use crate::args::Args;
use crate::console::{Bar, Console};
use crate::convert;
use crate::request::request;
use anyhow::{Context, Result, bail};
use sd_io::{Image, output_path};
use sd_runtime::{CancelToken, Engine, GeneratedImage, Importance, Observer, PreviewPicture, Progress};
use std::fs::File;
use std::path::{Path, PathBuf};
use tracing::{debug, info, warn};

/// Draws what `args` ask for and writes the files.
pub(crate) fn run(args: &Args, console: &Console, cancel: &CancelToken) -> Result<()> {
    let request = request(args)?;
    let output = Output::new(args);
    output.check()?;
    let importance = importance(args)?;
    let mut engine = open(args)?;
    let model = engine.info();
    info!("{} model {} on {}", model.family, model.name, model.device);
    for unused in &model.unused {
        debug!("not used: {unused}");
    }
    let mut watcher = Watcher { bar: Bar::new(console), output, cancel, saved: Ok(()), previews: 0 };
    let drawn = engine.generate_each(&request, &mut watcher, cancel);
    // A file that could not be written stopped the request; that is what the user needs to hear.
    watcher.saved?;
    drawn?;
    if let (Some((path, mut all)), Some(found)) = (importance, engine.importance()) {
        all.merge(found.clone()).context("--imat-out")?;
        all.save(path).context("--imat-out")?;
        info!("wrote {}: the importance of the columns of {} weights", path.display(), all.len());
    }
    Ok(())
}

/// The importance matrix to write and what it is added to.
fn importance(args: &Args) -> Result<Option<(&Path, Importance)>> {
    let Some(path) = args.cli.imat_out.as_deref() else { return Ok(None) };
    if path.exists() && !args.cli.imat_in.iter().any(|p| p == path) {
        warn!(
            "--imat-out: {} is there already and will be replaced; give it with --imat-in to add to it",
            path.display()
        );
    }
    Ok(Some((path, convert::importance(args)?)))
}

fn open(args: &Args) -> Result<Engine> {
    let mut builder = args.model.engine()?;
    if let Some(path) = args.hires.file()? {
        builder = builder.hires_upscaler(path);
    }
    let loras = &args.context.lora_model_dir;
    if !loras.as_os_str().is_empty() {
        builder = builder.lora_folder(loras).any_lora_path(true);
    }
    Ok(builder.collect_importance(args.cli.imat_out.is_some()).build()?)
}

/// Finds out whether files can be made in `folder`, by making one for a moment.
fn writable(folder: &Path) -> std::io::Result<()> {
    let probe = folder.join(format!(".sd-cli-{}", std::process::id()));
    File::options().write(true).create_new(true).open(&probe)?;
    std::fs::remove_file(&probe)
}

/// Where and how images are written.
pub(crate) struct Output {
    pattern: String,
    begin: u64,
    total: usize,
    quality: u8,
    /// Where previews are written.
    preview: String,
    metadata: bool,
}

impl Output {
    pub(crate) fn new(args: &Args) -> Output {
        Output {
            pattern: args.cli.output.clone(),
            begin: u64::try_from(args.cli.output_begin_idx).unwrap_or(0),
            total: args.generation.batch_count as usize,
            quality: args.cli.compression_quality,
            preview: args.preview.preview_path.clone(),
            metadata: !args.generation.disable_image_metadata,
        }
    }

    fn path(&self, index: usize) -> PathBuf {
        output_path(&self.pattern, self.begin, index, self.total)
    }

    /// Finds out before the work whether the images can have their names.
    pub(crate) fn check(&self) -> Result<()> {
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
        let picture = Image::new(image.width, image.height, image.rgb.clone())?;
        let path = self.write(index, &picture, &image.parameters.to_text())?;
        info!("wrote {} (seed {})", path.display(), image.parameters.seed);
        Ok(())
    }

    /// Writes a preview.
    fn preview(&self, index: usize, picture: PreviewPicture<'_>) -> Result<()> {
        let path = output_path(&self.preview, 0, index, 1);
        let picture = Image::new(picture.width, picture.height, picture.rgb.to_vec())?;
        picture.save(&path, self.quality, None).context("--preview-path")
    }

    /// Writes a picture, with the text unless the user wants none, and returns where.
    pub(crate) fn write(&self, index: usize, picture: &Image, text: &str) -> Result<PathBuf> {
        let path = self.path(index);
        picture.save(&path, self.quality, Some(text).filter(|_| self.metadata)).context("--output")?;
        Ok(path)
    }
}

/// Shows progress, and writes each image as soon as it is there.
struct Watcher<'a> {
    bar: Bar,
    output: Output,
    cancel: &'a CancelToken,
    saved: Result<()>,
    /// How many previews there were.
    previews: usize,
}

impl Observer for Watcher<'_> {
    fn progress(&mut self, progress: Progress) {
        self.bar.update(progress);
    }

    fn warning(&mut self, message: &str) {
        warn!("{message}");
    }

    fn preview(&mut self, picture: PreviewPicture<'_>) {
        if self.saved.is_ok() {
            self.saved = self.output.preview(self.previews, picture);
            self.previews += 1;
        }
        if self.saved.is_err() {
            self.cancel.cancel();
        }
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
