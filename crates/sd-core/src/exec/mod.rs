//! Execution of programs on a device.
//!
//! A [`Runner`] belongs to one network: it holds the device, the weights' place on it and the lowered segments, keyed
//! by [`Program::signature`](crate::Program::signature), so that a program run again only gets new inputs.

mod cache;
mod executor;
mod options;
mod workspace;

pub use cache::SegmentSize;
pub use executor::Runner;
pub use options::{RunnerOptions, TypePolicy};

/// How many threads `asked` means: 0 stands for one per physical core.
fn threads(asked: usize) -> usize {
    if asked > 0 { asked } else { physical_cores() }
}

/// Cores with arithmetic units of their own, as far as the system says, at most as many as this process may use.
fn physical_cores() -> usize {
    let usable = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let mut cores = std::collections::BTreeSet::new();
    let mut socket = "";
    for line in info.lines() {
        if let Some((key, value)) = line.split_once(':') {
            match key.trim() {
                "physical id" => socket = value.trim(),
                "core id" => {
                    cores.insert((socket, value.trim()));
                }
                _ => {}
            }
        }
    }
    if cores.is_empty() { usable } else { cores.len().min(usable) }
}
