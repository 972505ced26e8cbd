//! The parts of models on devices.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use sd_core::device::available_ram;
use sd_core::residency::autofit::{Component, Demand};
use sd_core::scope::{Role, Scope};
use sd_core::{Device, Error, Home, Manager, Result, RunnerOptions, TypePolicy};
use sd_models::{Component as ModelPart, Model, Part};

use super::networks::Options;
use crate::placement::{Machine, Module, Place, Plan, Wishes, place};
use crate::upscale::Upscaler;

/// Where the parts of an engine's models are, and who keeps the accounts of all devices.
#[derive(Clone)]
pub(super) struct Placed {
    plan: Arc<Plan>,
    /// Bytes of the diffusion network's weights.
    network: u64,
    manager: Arc<Manager>,
}

impl Placed {
    /// Places for all parts of `models`, and for an upscaler if there is one; says in the log what was decided.
    pub(super) fn new(
        wishes: &Wishes,
        machine: &Machine,
        models: &[&Model],
        upscaler: bool,
        options: &Options,
    ) -> Result<Placed> {
        let parts = models.iter().flat_map(|model| model.components());
        let mut modules: Vec<Module> = parts.map(|part| module(part.part())).collect();
        modules.extend(upscaler.then_some(Module::Upscaler));
        // ControlNets and tiny autoencoders may come later.
        modules.extend([Module::ControlNet, Module::Vae].iter().filter(|_| !models.is_empty()));
        modules.sort_unstable();
        modules.dedup();
        let demands = demands(models, &options.types())?;
        let network = demands.iter().find(|d| d.component == Component::Diffusion).map_or(0, |d| d.size);
        let plan = place(wishes, machine, &modules, &demands)?;
        plan.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
        for line in &plan.table {
            if plan.fitted {
                tracing::info!("auto-fit: {line}");
            } else {
                tracing::debug!("{line}");
            }
        }
        let manager = Manager::new(options.memory.clone());
        for (device, bytes) in &plan.budgets {
            let budget = usize::try_from(*bytes).unwrap_or(usize::MAX);
            tracing::info!("{}: at most {} MiB are used", device.name(), budget >> 20);
            manager.set_budget(device, Some(budget));
        }
        Ok(Placed { plan: Arc::new(plan), network, manager })
    }

    /// The place of a part.
    pub(super) fn of(&self, part: Part) -> Result<&Place> {
        let place = self.plan.places.get(&module(part));
        place.ok_or_else(|| Error::internal(format!("the {} has no place", part.name())))
    }

    /// The device of a module that is no part of a model, and how its runner runs there.
    pub(super) fn runner(&self, module: Module, options: &Options) -> Result<(Arc<Device>, RunnerOptions)> {
        let place = self.plan.places.get(&module);
        let place = place.ok_or_else(|| Error::internal(format!("the {} has no place", module.name())))?;
        let options = RunnerOptions {
            threads: options.threads,
            precision: options.precision,
            module: module.name().to_owned(),
            home: place.home.clone(),
            manager: Some(self.manager.clone()),
            ..RunnerOptions::default()
        };
        Ok((place.main()?.clone(), options))
    }

    /// Opens the upscaler in its place.
    pub(super) fn upscaler(&self, path: &Path, options: &Options) -> Result<Upscaler> {
        let (device, options) = self.runner(Module::Upscaler, options)?;
        Upscaler::open_on(path, device, options)
    }

    /// Devices of remote workers that were lost.
    pub(super) fn lost(&self) -> Vec<Arc<Device>> {
        let mut all: Vec<Arc<Device>> = Vec::new();
        for place in self.plan.places.values() {
            all.extend(place.devices.iter().cloned());
            if let Some(Home::Device(device)) = &place.home {
                all.push(device.clone());
            }
        }
        all.retain(|device| device.check().is_err());
        all
    }

    /// Whether main memory that is free now is too little for the diffusion network and what it needs to compute.
    pub(super) fn lacks_ram_for_network(&self) -> bool {
        let need = self.network.saturating_add(Component::Diffusion.reserve());
        available_ram().is_some_and(|free| free < need)
    }

    pub(super) fn manager(&self) -> &Arc<Manager> {
        &self.manager
    }
}

/// The module that a part is placed with.
fn module(part: Part) -> Module {
    match part {
        Part::Diffusion => Module::Diffusion,
        Part::ClipL | Part::ClipG | Part::T5 => Module::Te,
        Part::Autoencoder => Module::Vae,
    }
}

/// How large the parts are that places are found for. An autoencoder that two models share counts once.
fn demands(models: &[&Model], types: &TypePolicy) -> Result<Vec<Demand>> {
    let mut out: Vec<Demand> = Vec::new();
    for (at, model) in models.iter().enumerate() {
        for part in model.components() {
            let component = match module(part.part()) {
                Module::Diffusion => Component::Diffusion,
                Module::Te => Component::Te,
                Module::Vae if at == 0 => Component::Vae,
                _ => continue,
            };
            let (size, largest) = size(part, types)?;
            match out.iter_mut().find(|d| d.component == component) {
                Some(demand) => {
                    demand.size += size;
                    demand.largest = demand.largest.max(largest);
                }
                None => out.push(Demand { component, size, largest }),
            }
        }
    }
    Ok(out)
}

/// Bytes of all tensors of a part that networks read, in the types they have in memory, and of the largest. Each counts
/// 64 bytes more, which ggml takes to describe it.
pub(super) fn size(part: &ModelPart, types: &TypePolicy) -> Result<(u64, u64)> {
    const DESCRIPTION: u64 = 64;
    let unread: HashSet<String> = part.scope().unused().into_iter().collect();
    let source = part.source();
    // A scope of its own, so that what is looked at here does not count as read.
    let scope = Scope::root(source.clone());
    let (mut sum, mut largest) = (0u64, 0u64);
    for name in source.names().into_iter().filter(|name| !unread.contains(*name)) {
        let Some(meta) = source.meta(name) else { continue };
        let role = match meta.shape.rank() {
            0 | 1 => Role::Vector,
            2 => Role::Matrix,
            _ => Role::Kernel,
        };
        let weight = scope.weight(name, role)?;
        let bytes =
            types.memory_type(&weight, false).bytes(meta.shape.elements(), meta.shape.last()).unwrap_or(0) as u64;
        sum += bytes + DESCRIPTION;
        largest = largest.max(bytes);
    }
    Ok((sum, largest))
}
