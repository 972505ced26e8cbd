//! Where each module computes and where its weights are: what users choose, and what is chosen for them.

mod module;
mod spec;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;

use sd_core::device::{DeviceKind, available_ram};
use sd_core::residency::autofit::{self, Component, Demand, Fit, Gpu, Limit, Target};
use sd_core::{Device, Error, Home, Result};

pub(crate) use module::Module;
pub use spec::Shorthands;
use spec::{Limits, Spec, SplitMode, Store};

/// The options of placement as users write them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Written {
    pub(crate) backend: String,
    pub(crate) params_backend: String,
    pub(crate) split_mode: String,
    pub(crate) max_vram: String,
    /// Whether places are found where nothing is written.
    pub(crate) auto_fit: bool,
}

/// The options of placement, read.
#[derive(Clone, Debug, Default)]
pub(crate) struct Wishes {
    backend: Spec<Vec<String>>,
    params: Spec<Store>,
    split: Spec<SplitMode>,
    limits: Limits,
    auto_fit: bool,
}

/// What there is to choose from.
#[derive(Clone, Debug)]
pub(crate) struct Machine {
    pub(crate) devices: Vec<Arc<Device>>,
    /// Bytes of main memory that can be had.
    pub(crate) ram: Option<u64>,
    /// The Vulkan device that stands for the default one, by its number.
    pub(crate) vulkan: Option<String>,
}

/// Where one module is.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    /// What computes. Of several the next one takes the layers for which those before have no room.
    pub(crate) devices: Vec<Arc<Device>>,
    /// Where its weights are between uses; `None` for where they are computed with.
    pub(crate) home: Option<Home>,
}

/// Where everything is.
#[derive(Clone, Debug, Default)]
pub(crate) struct Plan {
    pub(crate) places: BTreeMap<Module, Place>,
    /// The most that devices may hold, in bytes, where there is a limit.
    pub(crate) budgets: Vec<(Arc<Device>, u64)>,
    /// Whether places were found, not written.
    pub(crate) fitted: bool,
    /// What was decided, a line each.
    pub(crate) table: Vec<String>,
    pub(crate) warnings: Vec<String>,
}

impl Default for Written {
    fn default() -> Written {
        let [backend, params_backend, split_mode, max_vram] = [const { String::new() }; 4];
        Written { backend, params_backend, split_mode, max_vram, auto_fit: true }
    }
}

impl Written {
    /// Reads the options.
    ///
    /// # Errors
    /// One is malformed or names a module that does not exist; the message has the option and the item.
    pub(crate) fn read(&self) -> Result<Wishes> {
        Ok(Wishes {
            backend: spec::backend(&self.backend)?,
            params: spec::params_backend(&self.params_backend)?,
            split: spec::split_mode(&self.split_mode)?,
            limits: spec::max_vram(&self.max_vram)?,
            auto_fit: self.auto_fit,
        })
    }
}

impl Wishes {
    /// Whether a place is written for anything.
    fn names_places(&self) -> bool {
        let Wishes { backend, params, .. } = self;
        backend.default.is_some()
            || params.default.is_some()
            || !backend.modules.is_empty()
            || !params.modules.is_empty()
    }

    /// An error if a device that is written does not exist. Files need not be open for that.
    ///
    /// # Errors
    /// As said; the message names the option and the devices there are.
    pub(crate) fn check(&self, machine: &Machine) -> Result<()> {
        let find =
            |option: &str, name: &str| machine.find(name).map(drop).map_err(|e| e.context(option.to_owned()));
        let lists = self.backend.default.iter().chain(self.backend.modules.values());
        lists.flatten().try_for_each(|name| find("--backend", name))?;
        for store in self.params.default.iter().chain(self.params.modules.values()) {
            if let Store::Device(name) = store {
                find("--params-backend", name)?;
            }
        }
        self.limits.devices.iter().try_for_each(|(name, _)| find("--max-vram", name))
    }
}

impl Machine {
    /// The devices of this process and the memory of this machine. `SD_VK_DEVICE` is read from the environment.
    pub(crate) fn here() -> Machine {
        let vulkan = std::env::var("SD_VK_DEVICE").ok().filter(|number| !number.trim().is_empty());
        Machine { devices: Device::all(), ram: available_ram(), vulkan }
    }

    fn find(&self, name: &str) -> Result<Arc<Device>> {
        let default = ["", "auto", "default"].contains(&name.trim().to_ascii_lowercase().as_str());
        match self.vulkan_device() {
            Some(Ok(device)) if default => Ok(device),
            _ => Device::find_in(&self.devices, name),
        }
    }

    /// The device that `SD_VK_DEVICE` names, or what is wrong with it; `None` if it is not set.
    fn vulkan_device(&self) -> Option<std::result::Result<Arc<Device>, String>> {
        let number = self.vulkan.as_deref()?.trim();
        let name = format!("Vulkan{number}");
        let found = self.devices.iter().find(|d| d.name().eq_ignore_ascii_case(&name)).cloned();
        Some(found.ok_or_else(|| format!("SD_VK_DEVICE={number}: there is no device {name}; it has no effect")))
    }

    fn cpu(&self) -> Result<Arc<Device>> {
        let cpu = self.devices.iter().find(|d| d.kind() == DeviceKind::Cpu);
        cpu.cloned().ok_or_else(|| Error::device("there is no CPU device"))
    }
}

/// Finds a place for each of `modules`. `demands` are the sizes of those that places may be chosen for.
///
/// # Errors
/// A device that is written does not exist.
pub(crate) fn place(wishes: &Wishes, machine: &Machine, modules: &[Module], demands: &[Demand]) -> Result<Plan> {
    wishes.check(machine)?;
    let mut plan = Plan::default();
    if let Some(Err(warning)) = machine.vulkan_device() {
        plan.warnings.push(warning);
    }
    budgets(wishes, machine, &mut plan);
    let chosen = if wishes.auto_fit && !wishes.names_places() {
        fitted(wishes, machine, demands, &mut plan)?
    } else {
        BTreeMap::new()
    };
    for &module in modules {
        let place = match chosen.get(&module) {
            Some(place) => place.clone(),
            None => written(wishes, machine, module, &mut plan.warnings)?,
        };
        plan.places.insert(module, place);
    }
    plan.table.extend(plan.places.iter().map(|(module, place)| place.describe(*module)));
    Ok(plan)
}

impl Place {
    /// The device that computes first.
    pub(crate) fn main(&self) -> Result<&Arc<Device>> {
        self.devices.first().ok_or_else(|| Error::internal("a module without a device"))
    }

    /// The devices that run parts of it, but the first.
    pub(crate) fn others(&self) -> &[Arc<Device>] {
        self.devices.get(1..).unwrap_or_default()
    }

    fn describe(&self, module: Module) -> String {
        let names: Vec<&str> = self.devices.iter().map(|d| d.name()).collect();
        let how = if names.len() < 2 { "" } else { " by layers" };
        let weights = match &self.home {
            None => "there".to_owned(),
            Some(Home::Device(d)) => format!("on {}", d.name()),
            Some(Home::Ram) => "in main memory".to_owned(),
            Some(Home::File) => "on disk".to_owned(),
        };
        format!("{}: computes on {}{how}, weights are {weights}", module.name(), names.join(" and "))
    }
}

/// The limits that are written, of every device.
fn budgets(wishes: &Wishes, machine: &Machine, plan: &mut Plan) {
    for device in &machine.devices {
        let cpu = device.kind() == DeviceKind::Cpu;
        let limit = limit_of(wishes, machine, device);
        let free = device.memory().free as u64;
        match limit {
            Limit::None => {}
            Limit::Most(most) => plan.budgets.push((device.clone(), most)),
            Limit::Leave(_) if cpu || limit.budget(free) == 0 => plan.warnings.push(format!(
                "--max-vram: {} has no memory left of which so much could be left free; it gets no limit",
                device.name()
            )),
            Limit::Leave(_) => plan.budgets.push((device.clone(), limit.budget(free))),
        }
    }
}

/// What is written of `device`. The default is for devices with memory of their own.
fn limit_of(wishes: &Wishes, machine: &Machine, device: &Device) -> Limit {
    let named = wishes
        .limits
        .devices
        .iter()
        .rev()
        .find(|(name, _)| machine.find(name).is_ok_and(|found| found.name() == device.name()));
    match named {
        Some((_, limit)) => *limit,
        None if device.kind() == DeviceKind::Cpu => Limit::None,
        None => wishes.limits.default,
    }
}

/// The place of a module as it is written.
fn written(wishes: &Wishes, machine: &Machine, module: Module, warnings: &mut Vec<String>) -> Result<Place> {
    let mut devices: Vec<Arc<Device>> = Vec::new();
    match wishes.backend.get(module) {
        None => devices.push(machine.find("")?),
        Some(names) => {
            for name in names {
                let device = machine.find(name)?;
                if !devices.iter().any(|d| d.name() == device.name()) {
                    devices.push(device);
                }
            }
        }
    }
    if devices.len() > 1 {
        let reason = if !matches!(module, Module::Diffusion | Module::Te) {
            Some("only the diffusion network and text encoders can be divided".to_owned())
        } else if devices.iter().any(|d| d.kind() == DeviceKind::Cpu) {
            Some("the processor cannot be one of several; --params-backend keeps weights in main memory".to_owned())
        } else {
            None
        };
        if let (Some(reason), Some(first)) = (reason, devices.first()) {
            warnings.push(format!("--backend {}: {reason}; it computes on {}", module.name(), first.name()));
            devices.truncate(1);
        }
    }
    if devices.len() > 1 && wishes.split.get(module) == Some(&SplitMode::Row) {
        let module = module.name();
        warnings
            .push(format!("--split-mode {module}=row: no device here divides matrices by rows; they share layers"));
    }
    let main = devices.first().ok_or_else(|| Error::internal("a module without a device"))?;
    let home = match wishes.params.get(module) {
        None => None,
        Some(Store::Disk) => Some(Home::File),
        Some(Store::Device(name)) => {
            let device = machine.find(name)?;
            match device.kind() {
                _ if devices.len() < 2 && device.name() == main.name() => None,
                DeviceKind::Cpu => Some(Home::Ram),
                _ => Some(Home::Device(device)),
            }
        }
    };
    Ok(Place { devices, home })
}

/// Places that are found for the modules in `demands`; none where the default device is as good.
fn fitted(
    wishes: &Wishes,
    machine: &Machine,
    demands: &[Demand],
    plan: &mut Plan,
) -> Result<BTreeMap<Module, Place>> {
    let is_gpu = |d: &&Arc<Device>| d.kind() == DeviceKind::Gpu;
    let devices: Vec<Arc<Device>> = machine.devices.iter().filter(is_gpu).cloned().collect();
    if devices.is_empty() {
        return Ok(BTreeMap::new());
    }
    plan.fitted = true;
    let gpu = |d: &Arc<Device>| {
        let memory = d.memory();
        // A device that does not say what it has is not limited by it.
        let free = if memory.total == 0 { u64::MAX } else { memory.free as u64 };
        Gpu { name: d.name().to_owned(), free, limit: limit_of(wishes, machine, d) }
    };
    let gpus: Vec<Gpu> = devices.iter().map(gpu).collect();
    if machine.ram.is_none() {
        plan.warnings
            .push("the system does not say how much main memory is free; no weights are kept there".into());
    }
    let fit = autofit::fit(&gpus, machine.ram, demands);
    tabulate(&gpus, machine.ram, &fit, &mut plan.table);
    for ((device, gpu), budget) in devices.iter().zip(&gpus).zip(&fit.budgets) {
        plan.budgets.retain(|(other, _)| other.name() != device.name());
        if *budget > 0 && gpu.free < u64::MAX {
            plan.budgets.push((device.clone(), *budget));
        }
    }
    let Some(main) = fit.main.and_then(|i| devices.get(i)) else {
        plan.warnings.push("no GPU has memory that may be used; the CPU computes".to_owned());
        let cpu = machine.cpu()?;
        let place = Place { devices: vec![cpu], home: None };
        return Ok(demands.iter().map(|d| (module_of(d.component), place.clone())).collect());
    };
    let place = |part: &autofit::Fitted| {
        let home = match part.target {
            Target::Main => None,
            Target::Ram => Some(Home::Ram),
            Target::Gpu(i) => devices.get(i).cloned().map(Home::Device),
            Target::Disk => Some(Home::File),
        };
        let place = Place { devices: vec![main.clone()], home };
        (module_of(part.demand.component), place)
    };
    Ok(fit.parts.iter().map(place).collect())
}

fn module_of(component: Component) -> Module {
    match component {
        Component::Diffusion => Module::Diffusion,
        Component::Te => Module::Te,
        Component::Vae => Module::Vae,
    }
}

/// What a fit was made from.
fn tabulate(gpus: &[Gpu], ram: Option<u64>, fit: &Fit, table: &mut Vec<String>) {
    const MIB: u64 = 1 << 20;
    for (gpu, budget) in gpus.iter().zip(&fit.budgets) {
        let free = if gpu.free == u64::MAX { "unknown".to_owned() } else { format!("{} MiB", gpu.free / MIB) };
        let budget = if *budget > u64::MAX / 2 { "no limit".to_owned() } else { format!("{} MiB", budget / MIB) };
        table.push(format!("{}: free {free}, to use {budget}", gpu.name));
    }
    if let (Some(free), Some(budget)) = (ram, fit.ram) {
        table.push(format!("main memory: free {} MiB, to use {} MiB", free / MIB, budget / MIB));
    }
    for part in &fit.parts {
        table.push(format!(
            "{}: weights {} MiB, reserve {} MiB, headroom {} MiB",
            module_of(part.demand.component).name(),
            part.demand.size / MIB,
            part.demand.component.reserve() / MIB,
            part.headroom / MIB
        ));
    }
}
