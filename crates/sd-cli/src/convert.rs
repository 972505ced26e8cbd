//! `-M convert`: writes a model in other types or another format.

use crate::args::Args;
use crate::console::Console;
use anyhow::{Context, Result, bail};
use sd_runtime::{CancelToken, Conversion, Importance, TypeRules};
use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::Instant;
use tracing::{debug, info, warn};

/// Extensions of pictures, which are no names of models.
const PICTURES: &[&str] = &["png", "jpg", "jpeg", "jpe", "webp"];

/// Converts what `args` name.
pub(crate) fn run(args: &Args, console: &Console, cancel: &CancelToken) -> Result<()> {
    let output = PathBuf::from(&args.cli.output);
    let extension = output.extension().map(|e| e.to_string_lossy().to_ascii_lowercase());
    if extension.is_none_or(|e| PICTURES.contains(&e.as_str())) {
        bail!("--output {}: want a .gguf or .safetensors file", output.display());
    }
    let files = args.model.files();
    if files.is_empty() {
        bail!(
            "nothing to convert: give a model with -m, or parts with --diffusion-model, --clip_l, --clip_g, --t5xxl or --vae"
        );
    }
    let conversion = Conversion {
        files,
        output,
        types: TypeRules::new(args.model.weight_type, &args.context.tensor_type_rules.join(","))?,
        rename: args.cli.convert_name,
        importance: importance(args)?,
        threads: args.model.threads(),
    };
    let terminal = std::io::stderr().is_terminal();
    let start = Instant::now();
    let mut shown = 0;
    let mut progress = |done: u64, total: u64| {
        let percent = done * 100 / total.max(1);
        if terminal && percent > shown {
            console.show(&format!("  converting {percent} %"), percent < 100);
        }
        shown = shown.max(percent);
    };
    let done = conversion.run(&mut progress, cancel).context("convert")?;
    let seconds = start.elapsed().as_secs_f64();
    for (dtype, (count, bytes)) in &done.written {
        debug!("{count} tensors of {dtype}, {:.1} MB", *bytes as f64 / 1e6);
    }
    if !conversion.importance.is_empty() {
        info!("{} tensors were quantised with regard to the importance of their columns", done.weighted);
        if done.weighted == 0 {
            warn!("--imat-in: has no weight that was quantised");
        }
    }
    for (why, count) in &done.kept {
        info!("{count} tensors kept their type: {why}");
    }
    let (count, bytes) = done.written.values().fold((0, 0), |(n, sum), (count, bytes)| (n + count, sum + bytes));
    info!(
        "wrote {}: {count} tensors, {:.1} MB from {:.1} MB in {seconds:.1} s, {:.0} MB/s read",
        conversion.output.display(),
        bytes as f64 / 1e6,
        done.read as f64 / 1e6,
        done.read as f64 / 1e6 / seconds
    );
    Ok(())
}

/// The importance matrices of `--imat-in` as one.
pub(crate) fn importance(args: &Args) -> Result<Importance> {
    let mut all = Importance::default();
    for path in &args.cli.imat_in {
        Importance::open(path).and_then(|one| all.merge(one)).context("--imat-in")?;
    }
    Ok(all)
}
