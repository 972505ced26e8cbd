//! Main memory.

use std::path::Path;

use crate::error::{Error, Result};

/// Bytes of main memory that programs can have without others being swapped out; `None` where the system does not say.
/// A limit on the group of processes that this one belongs to counts as if the rest were in use.
pub fn available_ram() -> Option<u64> {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let system = available(&read("/proc/meminfo")?)?;
    let limited = read("/proc/self/cgroup").and_then(|text| {
        let group = text.lines().find_map(|line| line.strip_prefix("0::"))?;
        let folder = Path::new("/sys/fs/cgroup").join(group.trim_start_matches('/'));
        let text = |name: &str| std::fs::read_to_string(folder.join(name)).ok();
        left(&text("memory.max")?, &text("memory.current")?, &text("memory.stat").unwrap_or_default())
    });
    Some(limited.map_or(system, |limited| limited.min(system)))
}

/// Makes room for `more` bytes in `bytes`.
///
/// # Errors
/// The system has no main memory left.
pub(crate) fn make_room(bytes: &mut Vec<u8>, more: usize) -> Result<()> {
    #[cfg(test)]
    let more = if tests::is_refused() { usize::MAX } else { more };
    let no_memory = |_| {
        Error::device(format!("main memory could not provide {:.1} MiB", more as f64 / 1048576.0))
            .hint("keep the weights in the file (--params-backend disk)")
    };
    bytes.try_reserve_exact(more).map_err(no_memory)
}

/// `MemAvailable` of `/proc/meminfo`, which counts in KiB.
fn available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// What is left to a group of processes, by the files of those names. Pages of files are given up for others.
fn left(max: &str, current: &str, stat: &str) -> Option<u64> {
    let (max, current): (u64, u64) = (max.trim().parse().ok()?, current.trim().parse().ok()?);
    let pages = |name: &str| stat.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
    let of_files: u64 = ["active_file ", "inactive_file "].into_iter().filter_map(pages).sum();
    Some(max.saturating_sub(current.saturating_sub(of_files)))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Mutex;

    use super::*;

    /// How many requests are met before one is refused.
    pub(crate) static REFUSE: Mutex<Option<usize>> = Mutex::new(None);

    pub(super) fn is_refused() -> bool {
        let mut refuse = REFUSE.lock().unwrap();
        let refused = *refuse == Some(0);
        *refuse = refuse.and_then(|more| more.checked_sub(1));
        refused
    }

    #[test]
    fn what_a_group_has_left() {
        let stat = "anon 100\nfile 90\ninactive_file 30\nactive_file 50\nslab 7\n";
        assert_eq!(left("1000\n", "400\n", stat), Some(680));
        assert_eq!(left("1000\n", "400\n", ""), Some(600));
        assert_eq!(left("100\n", "400\n", ""), Some(0));
        assert_eq!(left("max\n", "400\n", stat), None);
    }

    #[test]
    fn what_the_system_says() {
        let text = "MemTotal:       24610692 kB\nMemFree:         1000000 kB\nMemAvailable:   20000000 kB\n";
        assert_eq!(available(text), Some(20_000_000 * 1024));
        for other in ["", "MemAvailable: x kB", "MemAvailable: 5", "MemAvailable: 99999999999999999999 kB"] {
            assert_eq!(available(other), None, "{other}");
        }
        if cfg!(target_os = "linux") {
            assert!(available_ram().is_some());
        }
    }
}
