//! A step of a model that is larger than main memory: what the program itself takes of it.

use anyhow::{Context, Result, ensure};
use sd_runtime::{CancelToken, Engine, ImageRequest, Observer};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// What a run may take beside pages of the file, which the system takes back when it likes.
const MOST: u64 = 3 << 30;

/// Draws one step with `checkpoint` on the processor, its weights in the file, and returns a line for it.
///
/// # Errors
/// It takes too much memory, or the picture cannot be drawn.
pub fn run(checkpoint: &Path) -> Result<Vec<String>> {
    let size = std::fs::metadata(checkpoint)?.len();
    let before = anonymous().context("this system does not say what a process takes")?;
    let (done, peak) = (AtomicBool::new(false), AtomicU64::new(before));
    let begun = Instant::now();
    let drawn = std::thread::scope(|s| {
        s.spawn(|| {
            while !done.load(Ordering::Acquire) {
                peak.fetch_max(anonymous().unwrap_or(u64::MAX), Ordering::AcqRel);
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        let drawn = draw(checkpoint);
        done.store(true, Ordering::Release);
        drawn
    });
    let seconds = begun.elapsed().as_secs_f64();
    let peak = peak.load(Ordering::Acquire);
    let pixels = drawn?;
    ensure!(peak < MOST, "{} MiB were taken beside the file", peak >> 20);
    ensure!(pixels == 3 * 64 * 64, "the picture has {pixels} bytes");
    let gb = size as f64 / 1e9;
    Ok(vec![format!("a step of a model of {gb:.1} GB from its file: {} MiB, {seconds:.0} s", peak >> 20)])
}

fn draw(checkpoint: &Path) -> sd_core::Result<usize> {
    let mut engine = Engine::builder().model(checkpoint).backend("cpu").params_backend("disk").build()?;
    let request = ImageRequest {
        prompt: "a lighthouse at dusk".into(),
        width: Some(64),
        height: Some(64),
        steps: Some(1),
        ..Default::default()
    };
    let images = engine.generate(&request, &mut Silent, &CancelToken::new())?;
    Ok(images.first().map_or(0, |image| image.rgb.len()))
}

struct Silent;

impl Observer for Silent {}

/// Bytes of memory of this process that are no file's.
fn anonymous() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}
