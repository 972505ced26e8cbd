//! Opens a checkpoint and says how long that took and what it cost: `cargo run -p sd-io --example open FILE`.

use std::io::Write;
use std::time::Instant;

use sd_core::WeightSource;
use sd_io::Checkpoint;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args_os().nth(1).ok_or("give a checkpoint")?;
    let start = Instant::now();
    let checkpoint = Checkpoint::open(path)?;
    let took = start.elapsed();
    let mut out = std::io::stdout().lock();
    writeln!(out, "{} tensors in {:.1} ms", checkpoint.names().len(), took.as_secs_f64() * 1e3)?;
    // Linux alone tells the peak of the memory a process had.
    if let Ok(status) = std::fs::read_to_string("/proc/self/status") {
        for line in status.lines().filter(|l| l.starts_with("VmHWM")) {
            writeln!(out, "{line}")?;
        }
    }
    Ok(())
}
