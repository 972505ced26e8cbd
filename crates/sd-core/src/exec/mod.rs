//! Execution of programs on a device.
//!
//! A [`Runner`] belongs to one network: it holds the device, the weights' place on it and the lowered segments, keyed
//! by [`Program::signature`](crate::Program::signature), so that a program run again only gets new inputs.

mod cache;
mod choose;
mod executor;
mod options;
mod run;

pub use cache::SegmentSize;
pub use executor::Runner;
pub use options::{Precision, RunnerOptions, TypePolicy};

/// How many threads `asked` means: 0 stands for one per physical core. ggml's threads wait for each other spinning, so
/// with more of them than processors most of the time goes into waiting; results do not depend on the number.
pub(crate) fn threads(asked: usize) -> usize {
    if asked > 0 { asked.min(usable_processors()) } else { physical_cores() }
}

fn usable_processors() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Cores with arithmetic units of their own, as far as the system says, at most as many as this process may use.
fn physical_cores() -> usize {
    let usable = usable_processors();
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn never_more_threads_than_processors() {
        let usable = usable_processors();
        for (asked, want) in [(1, 1), (usable, usable), (usable + 1, usable), (usize::MAX, usable)] {
            assert_eq!(threads(asked), want, "{asked}");
        }
        assert!((1..=usable).contains(&threads(0)));
    }
}
