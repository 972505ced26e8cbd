//! What is where, as data.

/// What the runners of a manager have where.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryReport {
    /// Devices on which something is or was, in the order they were first used.
    pub devices: Vec<DeviceMemory>,
    /// Modules, in the order of their runners.
    pub modules: Vec<ModuleMemory>,
}

/// The memory of one device, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Its name.
    pub device: String,
    /// The most that runners may have there, if there is a limit.
    pub budget: Option<usize>,
    /// Weights. Those that are used where a file is mapped are not counted.
    pub weights: usize,
    /// Intermediate values of segments.
    pub workspaces: usize,
    /// Inputs of programs, and values that cross from segment to segment.
    pub crossing: usize,
}

/// The weights of one module, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModuleMemory {
    /// Its name, as its runner was told.
    pub module: String,
    /// Where its weights are between uses: a device's name, `ram` or `disk`.
    pub home: String,
    /// All weights that its programs have read so far.
    pub weights: usize,
    /// Those that are on devices now.
    pub resident: usize,
}

/// A number of bytes as messages show it.
pub(crate) fn shown(bytes: usize) -> String {
    let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
    match units.into_iter().find(|&(shift, _)| bytes >= 1 << shift) {
        Some((shift, unit)) => format!("{:.1} {unit}", bytes as f64 / (1u64 << shift) as f64),
        None => format!("{bytes} bytes"),
    }
}
