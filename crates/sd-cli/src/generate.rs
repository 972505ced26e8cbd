//! From parsed options to files.

use crate::args::Args;
use crate::console::{Bar, Console};
use crate::convert;
use crate::request::requests;
use anyhow::{Context, Result, bail};
use sd_io::{Image, output_path};
use sd_runtime::{
    CancelToken, Engine, GeneratedImage, ImageRequest, Importance, Observer, PreviewPicture, Progress, Trace,
};
use serde_json::json;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;
use tracing::{debug, info, warn};

/// Draws what `args` ask for and writes the files.
pub(crate) fn run(args: &Args, console: &Console, cancel: &CancelToken) -> Result<()> {
    let requests = requests(args)?;
    let output = Output::new(args, requests.len())?;
    if !args.cli.dry_run {
        output.check()?;
    }
    let importance = importance(args)?;
    let trace = args.cli.trace.as_deref().map(Traced::new).transpose()?;
    let mut engine = open(args, trace.as_ref())?;
    let model = engine.info();
    info!("{} model {} on {}", model.family, model.name, model.device);
    for unused in &model.unused {
        debug!("not used: {unused}");
    }
    if args.cli.dry_run {
        return dry_run(&mut engine, &requests);
    }
    let drawn = draw(&mut engine, args, &requests, output, console, cancel);
    trace.map_or(Ok(()), |trace| trace.write())?;
    drawn?;
    if let (Some((path, mut all)), Some(found)) = (importance, engine.importance()) {
        all.merge(found.clone()).context("--imat-out")?;
        all.save(path).context("--imat-out")?;
        info!("wrote {}: the importance of the columns of {} weights", path.display(), all.len());
    }
    Ok(())
}

fn draw(
    engine: &mut Engine,
    args: &Args,
    requests: &[ImageRequest],
    output: Output,
    console: &Console,
    cancel: &CancelToken,
) -> Result<()> {
    let each = args.generation.batch_count as usize;
    let mut watcher = Watcher {
        bar: Bar::new(console),
        output,
        first: 0,
        begun: Instant::now(),
        cancel,
        saved: Ok(()),
        previews: 0,
    };
    for (number, request) in requests.iter().enumerate() {
        watcher.first = number * each;
        let drawn = engine.generate_each(request, &mut watcher, cancel);
        // A file that could not be written stopped the request; that is what the user needs to hear.
        std::mem::replace(&mut watcher.saved, Ok(()))?;
        drawn?;
    }
    for module in engine.memory().modules {
        let mb = |bytes: usize| bytes as f64 / 1e6;
        debug!("{}: weights {:.1} MB, home {}", module.module, mb(module.weights), module.home);
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

/// Prints what each part would take for the first of `requests`, which differ in their texts only.
fn dry_run(engine: &mut Engine, requests: &[ImageRequest]) -> Result<()> {
    let mut text = String::from("part\tcomputes on\tweights in\tweights MB\tworkspace MB\tpieces\n");
    let parts = requests.first().map(|request| engine.outline(request)).transpose()?;
    for p in parts.into_iter().flatten() {
        let mb = |bytes: f64| format!("{:.1}", bytes / 1e6);
        let (weights, workspace) = (mb(p.weights as f64), mb(p.workspace as f64));
        // Writing to a string does not fail.
        let _ = writeln!(text, "{}\t{}\t{}\t{weights}\t{workspace}\t{}", p.part, p.device, p.home, p.segments);
    }
    std::io::stdout().lock().write_all(text.as_bytes()).context("--dry-run")
}

/// A record of the work, and the file it goes to.
struct Traced(Arc<Trace>, File, PathBuf);

impl Traced {
    /// Finds out before the work whether the file can be written.
    fn new(path: &Path) -> Result<Traced> {
        let file = File::create(path).with_context(|| format!("--trace {}", path.display()))?;
        Ok(Traced(Trace::new(), file, path.to_owned()))
    }

    fn write(self) -> Result<()> {
        let Traced(trace, file, path) = self;
        let mut to = BufWriter::new(file);
        let written = trace.write(&mut to).and_then(|()| to.flush());
        written.with_context(|| format!("--trace {}", path.display()))
    }
}

fn open(args: &Args, trace: Option<&Traced>) -> Result<Engine> {
    let mut builder = args.model.engine();
    if let Some(Traced(trace, ..)) = trace {
        builder = builder.trace(trace.clone());
    }
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
    /// Whether each picture is told on stdout.
    json: bool,
}

impl Output {
    /// Names for pictures of that many prompts.
    pub(crate) fn new(args: &Args, prompts: usize) -> Result<Output> {
        let total = prompts.checked_mul(args.generation.batch_count as usize);
        Ok(Output {
            pattern: args.cli.output.clone(),
            begin: u64::try_from(args.cli.output_begin_idx).unwrap_or(0),
            total: total.context("--batch-count: too many pictures")?,
            quality: args.cli.compression_quality,
            preview: args.preview.preview_path.clone(),
            metadata: !args.generation.disable_image_metadata,
            json: args.cli.json,
        })
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

    fn save(&self, index: usize, image: &GeneratedImage, seconds: f64) -> Result<()> {
        let picture = Image::new(image.width, image.height, image.rgb.clone())?;
        let path = self.write(index, &picture, &image.parameters.to_text())?;
        info!("wrote {} (seed {})", path.display(), image.parameters.seed);
        if self.json {
            let line = json!({
                "file": path.to_string_lossy(),
                "seed": image.parameters.seed,
                "width": image.width,
                "height": image.height,
                "seconds": (seconds * 1e3).round() / 1e3,
                "parameters": image.parameters,
            });
            writeln!(std::io::stdout().lock(), "{line}").context("--json")?;
        }
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
    /// The number of the request's first picture.
    first: usize,
    /// When the picture that is drawn now was begun.
    begun: Instant,
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
            let seconds = self.begun.elapsed().as_secs_f64();
            self.saved = self.output.save(self.first + index, image, seconds);
            self.begun = Instant::now();
        }
        if self.saved.is_err() {
            self.cancel.cancel();
        }
    }
}
