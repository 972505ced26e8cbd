//! A checkpoint of real size: what opening and converting it takes, and what of it is left in eight bits.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use sd_core::WeightSource;
use sd_core::convert::{from_f32, to_f32};
use sd_io::Checkpoint;
use sd_models::{Files, Model};
use sd_runtime::{CancelToken, Conversion, DType, Engine, ImageRequest, Importance, ModelFiles, TypeRules};

/// Bytes that opening a checkpoint may take.
const OPENING: u64 = 30 << 20;
/// Bytes that converting one may take.
const CONVERTING: u64 = 600 << 20;
/// The least signal to noise in dB of a picture drawn with q8_0 weights: values are within 1/254 of the largest of their
/// block, about 45 dB, and a step of guidance multiplies what is left of that by the scale.
const SIGNAL: f64 = 30.0;

/// Opens the checkpoint, converts it to q8_0 beside itself and draws with both; a line for each. Speeds are told, not
/// demanded.
///
/// # Errors
/// Memory beyond the bounds above, or pictures that differ by more.
pub fn run(checkpoint: &Path) -> Result<Vec<String>> {
    if !cfg!(target_os = "linux") {
        return Ok(vec![
            "opening and converting: skipped, this system does not say what a process takes".to_owned(),
        ]);
    }
    let mut lines = Vec::new();
    let peak = Peak::start()?;
    let begun = Instant::now();
    let file = Arc::new(Checkpoint::open(checkpoint)?);
    let model = Model::open(&Files { model: Some(file.clone()), ..Files::default() })?;
    let (seconds, taken) = (begun.elapsed().as_secs_f64(), peak.taken()?);
    ensure!(taken < OPENING, "opening took {} MiB", taken >> 20);
    lines.push(format!(
        "opening {} tensors: {seconds:.3} s, {:.1} MiB",
        file.names().len(),
        taken as f64 / f64::from(1 << 20)
    ));
    drop(model);

    let output = checkpoint.with_extension("q8_0.gguf");
    let copied = copy(checkpoint, &output)?;
    let arithmetic = arithmetic(&file)?;
    let peak = Peak::start()?;
    let begun = Instant::now();
    let files = ModelFiles { model: Some(checkpoint.to_owned()), ..ModelFiles::default() };
    let types = TypeRules::new(Some(DType::Q8_0), "")?;
    let (importance, threads) = (Importance::default(), 0);
    let conversion = Conversion { files, output: output.clone(), types, rename: false, importance, threads };
    let report = conversion.run(&mut |_, _| {}, &CancelToken::new())?;
    let (seconds, taken) = (begun.elapsed().as_secs_f64(), peak.taken()?);
    ensure!(taken < CONVERTING, "converting took {} MiB", taken >> 20);
    lines.push(format!(
        "converting to q8_0: {seconds:.1} s, {:.0} MB/s, {} MiB; copying the file {copied:.1} s, the arithmetic alone \
         {arithmetic:.1} s",
        report.read as f64 / 1e6 / seconds,
        taken >> 20
    ));

    let (whole, eight) = (draw(checkpoint)?, draw(&output)?);
    fs::remove_file(&output)?;
    let square = |(a, b): (&u8, &u8)| f64::from(a.abs_diff(*b)).powi(2);
    let error = whole.iter().zip(&eight).map(square).sum::<f64>() / whole.len().max(1) as f64;
    let signal = 10.0 * (255.0 * 255.0 / error).log10();
    ensure!(whole.len() == eight.len() && signal >= SIGNAL, "q8_0 draws {signal:.1} dB of the picture");
    lines.push(format!("a picture with q8_0 weights: {signal:.1} dB"));
    Ok(lines)
}

/// The most memory that this process took since a moment.
struct Peak {
    before: u64,
}

impl Peak {
    fn start() -> Result<Peak> {
        // The system then forgets what was the most before.
        fs::write("/proc/self/clear_refs", "5").context("reset the peak of memory")?;
        Ok(Peak { before: Peak::most()? })
    }

    fn taken(&self) -> Result<u64> {
        Ok(Peak::most()?.saturating_sub(self.before))
    }

    fn most() -> Result<u64> {
        let status = fs::read_to_string("/proc/self/status")?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|text| text.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
        kib.map(|kib| kib << 10).context("the status has no VmHWM")
    }
}

/// Seconds that a plain copy takes.
fn copy(from: &Path, to: &Path) -> Result<f64> {
    let begun = Instant::now();
    let (mut from, mut to) = (File::open(from)?, File::create(to)?);
    let mut buffer = vec![0; 1 << 20];
    loop {
        let read = from.read(&mut buffer)?;
        let Some(part) = buffer.get(..read).filter(|part| !part.is_empty()) else { break };
        to.write_all(part)?;
    }
    Ok(begun.elapsed().as_secs_f64())
}

/// Seconds that the conversion of all matrices takes, from one of them that is in memory.
fn arithmetic(file: &Checkpoint) -> Result<f64> {
    let mut sizes: Vec<(usize, &str)> = Vec::new();
    for name in file.names() {
        sizes.extend(file.meta(name).filter(|m| m.shape.rank() == 2).map(|m| (m.shape.elements(), name)));
    }
    let (elements, name) = *sizes.iter().max().context("no matrix")?;
    let meta = file.meta(name).context("the matrix")?;
    let bytes = file.bytes(name)?.to_vec();
    let begun = Instant::now();
    from_f32(DType::Q8_0, &to_f32(meta.dtype, &bytes, elements)?, meta.shape.last())?;
    let all: usize = sizes.iter().map(|s| s.0).sum();
    Ok(begun.elapsed().as_secs_f64() * all as f64 / elements as f64)
}

fn draw(checkpoint: &Path) -> Result<Vec<u8>> {
    let mut engine = Engine::builder().model(checkpoint).device("cpu").build()?;
    let (side, steps) = (Some(64), Some(1));
    let request = ImageRequest {
        prompt: "a lighthouse".into(),
        width: side,
        height: side,
        steps,
        seed: Some(3),
        ..Default::default()
    };
    let images = engine.generate(&request, &mut (), &CancelToken::new())?;
    Ok(images.into_iter().next().map(|image| image.rgb).unwrap_or_default())
}
