//! `-M upscale`: makes a picture larger, without a diffusion model.

use crate::args::Args;
use crate::console::{Bar, Console};
use crate::generate::Output;
use crate::request::upscale;
use anyhow::{Context, Result, bail};
use sd_io::{Image, read_parameters};
use sd_runtime::{CancelToken, InputImage, Observer, Progress};
use tracing::info;

/// Makes the picture of `--init-img` larger.
pub(crate) fn run(args: &Args, console: &Console, cancel: &CancelToken) -> Result<()> {
    let Some(input) = &args.pictures.init_img else { bail!("-M upscale: give the picture with --init-img") };
    let output = Output::new(args, 1)?;
    output.check()?;
    let file = std::fs::read(input).with_context(|| format!("--init-img {}", input.display()))?;
    let image = Image::decode(&file).with_context(|| format!("--init-img {}", input.display()))?;
    let (mut colours, mut alpha) = parts(&image);
    if let (Some(width), Some(height)) = (args.generation.width, args.generation.height) {
        let fit = |image: &InputImage| image.fitted(width, height).context("--width, --height");
        (colours, alpha) = (fit(&colours)?, alpha.as_ref().map(fit).transpose()?);
    }
    let mut upscaler = args.model.upscaler()?.context("-M upscale: give the network with --upscale-model")?;
    let (options, scale) = (upscale(args), upscaler.scale());
    info!("upscaler {}, {scale} times", upscaler.name());
    let pictures = &args.pictures;
    let circular = [pictures.circular || pictures.circulary, pictures.circular || pictures.circularx];
    let mut watcher = Watcher(Bar::new(console));
    let mut once = |image: &InputImage| upscaler.upscale(image, options, circular, &mut watcher, cancel);
    let larger = once(&colours)?;
    let alpha = alpha.as_ref().map(&mut once).transpose()?;
    let mut picture = Image::new(larger.width, larger.height, larger.rgb)?;
    if let Some(alpha) = alpha {
        picture = picture.with_alpha(alpha.rgb.into_iter().step_by(3).collect())?;
    }
    let path = output.write(0, &picture, &text(&file, upscaler.name(), scale.saturating_pow(options.repeats)))?;
    info!("wrote {}", path.display());
    Ok(())
}

/// The colours, and how opaque each pixel is as a grey picture, which the network makes larger in the same way.
fn parts(image: &Image) -> (InputImage, Option<InputImage>) {
    let (width, height) = (image.width(), image.height());
    let grey = |alpha: &[u8]| alpha.iter().flat_map(|a| [*a; 3]).collect();
    let alpha = image.alpha().map(|alpha| InputImage { width, height, rgb: grey(alpha) });
    (InputImage { width, height, rgb: image.rgb().to_vec() }, alpha)
}

/// What the file says of how it was made, and what became of it here, as A1111's web UI writes it.
fn text(file: &[u8], name: &str, by: u32) -> String {
    let own = format!("Postprocess upscale by: {by}, Postprocess upscaler: {name}");
    match read_parameters(file).filter(|text| !text.is_empty()) {
        Some(text) => format!("{text}, {own}"),
        None => own,
    }
}

struct Watcher(Bar);

impl Observer for Watcher {
    fn progress(&mut self, progress: Progress) {
        self.0.update(progress);
    }
}
