//! The devices of this process, by name.

use std::fmt;
use std::sync::Arc;

use super::noop::{Noop, NoopOptions};
use crate::error::{Error, Result};
use crate::ffi::{Dev, DevKind, Held, held_on, reset_peak, rpc};

/// What a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceKind {
    /// The processor, on host memory.
    Cpu,
    /// A graphics processor with its own memory, or a remote device.
    Gpu,
    /// A graphics processor on host memory.
    IntegratedGpu,
    /// Anything else ggml drives.
    Other,
    /// A pretend one: it has a size and a clock, for plans and tests, and computes nothing.
    Noop,
}

impl DeviceKind {
    /// A word for listings.
    pub fn name(self) -> &'static str {
        match self {
            DeviceKind::Cpu => "cpu",
            DeviceKind::Gpu => "gpu",
            DeviceKind::IntegratedGpu => "integrated gpu",
            DeviceKind::Other => "other",
            DeviceKind::Noop => "noop",
        }
    }
}

/// Memory of a device, in bytes; zero where the device does not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Not used by anybody now.
    pub free: usize,
    /// All there is.
    pub total: usize,
}

/// A place that holds weights and computes.
#[derive(Debug)]
pub struct Device {
    name: String,
    description: String,
    driver: String,
    kind: DeviceKind,
    what: What,
}

#[derive(Debug)]
enum What {
    Ggml(Dev),
    Noop(Arc<Noop>),
}

impl Device {
    fn of(dev: Dev) -> Arc<Device> {
        let kind = match dev.kind() {
            DevKind::Cpu => DeviceKind::Cpu,
            DevKind::Gpu => DeviceKind::Gpu,
            DevKind::IntegratedGpu => DeviceKind::IntegratedGpu,
            DevKind::Other => DeviceKind::Other,
        };
        Arc::new(Device {
            name: dev.name(),
            description: dev.description(),
            driver: dev.driver(),
            kind,
            what: What::Ggml(dev),
        })
    }

    /// Every device of this process, in ggml's order: drivers, then remote devices as they were added.
    pub fn all() -> Vec<Arc<Device>> {
        Dev::all().into_iter().map(Device::of).collect()
    }

    /// The processor.
    ///
    /// # Errors
    /// ggml was built without it.
    pub fn cpu() -> Result<Arc<Device>> {
        Dev::cpu().map(Device::of)
    }

    /// A pretend device with `memory` bytes.
    pub fn noop(memory: usize) -> Arc<Device> {
        Noop::new(NoopOptions { memory, ..NoopOptions::default() }).device()
    }

    /// A pretend device of that name, driver and kind with so much free memory: for plans on machines that are not there.
    pub fn pretend(name: &str, driver: &str, kind: DeviceKind, memory: usize) -> Arc<Device> {
        Device::pretended(name, driver, kind, Noop::new(NoopOptions { memory, ..NoopOptions::default() }))
    }

    pub(super) fn pretended(name: &str, driver: &str, kind: DeviceKind, noop: Arc<Noop>) -> Arc<Device> {
        let (name, driver, description) = (name.into(), driver.into(), "computes nothing".into());
        Arc::new(Device { name, description, driver, kind, what: What::Noop(noop) })
    }

    /// The device a user's spelling names, whatever its case: nothing, `auto` or `default` for the first GPU, else the
    /// first integrated GPU, else the processor; `gpu` for the first GPU, else the first integrated one; a driver's
    /// name for its first device; a device's name; the beginning of one.
    ///
    /// # Errors
    /// No device has this name; the message lists those there are.
    pub fn find(name: &str) -> Result<Arc<Device>> {
        Device::find_in(&Device::all(), name)
    }

    /// The same among `all`.
    ///
    /// # Errors
    /// None of them has this name; the message lists them.
    pub fn find_in(all: &[Arc<Device>], name: &str) -> Result<Arc<Device>> {
        if all.is_empty() {
            return Err(Error::device("no device: no library of ggml beside the program is for this machine"));
        }
        pick(all, name).cloned().ok_or_else(|| {
            let names: Vec<&str> = all.iter().map(|d| d.name()).collect();
            Error::request(format!("there is no device {name:?}")).hint(format!("devices: {}", names.join(", ")))
        })
    }

    /// Such as `CPU`, `CUDA0`, `RPC0`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The hardware's name; for a remote device, where it is.
    pub fn description(&self) -> &str {
        &self.description
    }

    /// The driver, such as `CUDA`.
    pub fn driver(&self) -> &str {
        &self.driver
    }

    /// What it is.
    pub fn kind(&self) -> DeviceKind {
        self.kind
    }

    /// Memory as the device reports it now.
    pub fn memory(&self) -> Memory {
        match &self.what {
            What::Ggml(dev) => {
                let (free, total) = dev.memory();
                Memory { free, total }
            }
            What::Noop(noop) => noop.memory(),
        }
    }

    /// Whether two values stand for one device.
    pub fn is_same(&self, other: &Device) -> bool {
        match (&self.what, &other.what) {
            (What::Ggml(a), What::Ggml(b)) => a == b,
            (What::Noop(a), What::Noop(b)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }

    /// Bytes that this process has on the device now, and the most it had since [`Device::reset_peak`]. Memory of
    /// others, and what drivers take for themselves, is not in it.
    pub fn held(&self) -> (usize, usize) {
        let Held { now, peak, .. } = match &self.what {
            What::Ggml(dev) => held_on(*dev),
            What::Noop(noop) => noop.held(),
        };
        (now, peak)
    }

    /// Lets the peak of [`Device::held`] start from what is held now.
    pub fn reset_peak(&self) {
        match &self.what {
            What::Ggml(dev) => reset_peak(*dev),
            What::Noop(noop) => noop.reset_peak(),
        }
    }

    /// An error if it belongs to a remote worker that was lost.
    ///
    /// # Errors
    /// It does; the message says why.
    pub fn check(&self) -> Result<()> {
        match &self.what {
            What::Ggml(dev) => dev.check(),
            What::Noop(_) => Ok(()),
        }
    }

    /// ggml's device.
    pub(crate) fn ggml(&self) -> Result<Dev> {
        match &self.what {
            What::Ggml(dev) => Ok(*dev),
            What::Noop(_) => Err(Error::device("the noop device computes nothing")),
        }
    }

    /// The device of ggml's whose sizes and alignments hold for it.
    pub(crate) fn layout(&self) -> Result<Dev> {
        match &self.what {
            What::Ggml(dev) => Ok(*dev),
            What::Noop(_) => Dev::cpu(),
        }
    }

    /// It, if it is a pretend one.
    pub(crate) fn noop_device(&self) -> Option<&Arc<Noop>> {
        match &self.what {
            What::Ggml(_) => None,
            What::Noop(noop) => Some(noop),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

fn pick<'a>(all: &'a [Arc<Device>], name: &str) -> Option<&'a Arc<Device>> {
    let first = |kind| all.iter().find(|d| d.kind == kind);
    let gpu = || first(DeviceKind::Gpu).or_else(|| first(DeviceKind::IntegratedGpu));
    let name = name.trim().to_ascii_lowercase();
    match name.as_str() {
        "" | "auto" | "default" => gpu().or_else(|| first(DeviceKind::Cpu)).or_else(|| all.first()),
        "gpu" => gpu(),
        n => all
            .iter()
            .find(|d| d.driver.eq_ignore_ascii_case(n))
            .or_else(|| all.iter().find(|d| d.name.eq_ignore_ascii_case(n)))
            .or_else(|| all.iter().find(|d| d.name.to_ascii_lowercase().starts_with(n))),
    }
}

/// Registers the devices that ggml's RPC server at `endpoint`, `host:port`, offers, and returns them. They stay for
/// the life of the process. Traffic is neither authenticated nor encrypted. For a worker that was lost and is there again,
/// the devices work again once everything that was on them is dropped.
///
/// # Errors
/// The endpoint is malformed, cannot be reached, is no RPC server, or speaks another version of the protocol.
pub fn add_rpc_server(endpoint: &str) -> Result<Vec<Arc<Device>>> {
    Ok(rpc::add_server(endpoint)?.into_iter().map(Device::of).collect())
}

/// Serves `devices` to one client after another at `endpoint`, `host:port`, the processor with that many threads, 0 for
/// one per physical core. Returns only on failure. ggml prints progress to standard output.
///
/// # Errors
/// The endpoint is malformed or taken, or there are no devices.
pub fn serve_rpc(endpoint: &str, threads: usize, devices: &[Arc<Device>]) -> Result<()> {
    let devices = devices.iter().map(|d| d.ggml()).collect::<Result<Vec<_>>>()?;
    rpc::serve(endpoint, crate::exec::threads(threads), &devices)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(name: &str, driver: &str, kind: DeviceKind) -> Arc<Device> {
        Device::pretend(name, driver, kind, 1)
    }

    #[test]
    fn names_and_aliases() {
        let all = [
            device("Vulkan0", "Vulkan", DeviceKind::IntegratedGpu),
            device("CUDA0", "CUDA", DeviceKind::Gpu),
            device("CUDA1", "CUDA", DeviceKind::Gpu),
            device("CPU", "CPU", DeviceKind::Cpu),
        ];
        let found = |list: &[Arc<Device>], n: &str| pick(list, n).map(|d| d.name.clone());
        for (name, want) in [
            ("", "CUDA0"),
            (" Auto ", "CUDA0"),
            ("default", "CUDA0"),
            ("gpu", "CUDA0"),
            ("cuda", "CUDA0"),
            ("vulkan", "Vulkan0"),
            ("cuda1", "CUDA1"),
            ("vul", "Vulkan0"),
            ("cpu", "CPU"),
            ("c", "CUDA0"),
        ] {
            assert_eq!(found(&all, name).as_deref(), Some(want), "{name}");
        }
        assert_eq!(found(&all, "metal"), None);
        assert_eq!(found(&all[3..], "auto").as_deref(), Some("CPU"));
        assert_eq!(found(&all[3..], "gpu"), None);
        assert_eq!(found(&all[..1], "gpu").as_deref(), Some("Vulkan0"));
    }

    #[test]
    fn this_machine_has_a_cpu_and_noop_has_the_memory_it_was_given() {
        assert_eq!(Device::find("CPU").unwrap().kind(), DeviceKind::Cpu);
        assert!(Device::cpu().unwrap().memory().total > 0);
        let e = Device::find("heron7").unwrap_err();
        assert!(e.is_request() && e.to_string().contains("CPU"), "{e}");
        let noop = Device::noop(5 << 30);
        assert_eq!((noop.memory().free, noop.kind()), (5 << 30, DeviceKind::Noop));
        assert!(noop.ggml().is_err());
    }
}
