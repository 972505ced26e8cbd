//! The weights of one network: which there are, and where each lies on the devices that compute.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use super::load::{Item, Load, Loaded, NotLoaded, Shelf, fetch};
use super::manager::{Asker, Chunk, Manager, Pins, Refusal};
use super::{Home, Place};
use crate::cancel::CancelToken;
use crate::convert::to_f32;
use crate::device::{Device, DeviceKind};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::ffi::Context;
use crate::lower::ne;
use crate::scope::Weight;
use crate::tensor::{Advice, Bytes, Tensor, WeightSource};
use crate::trace::EventKind;

/// A weight in one type, by its number in its store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct WeightId(pub(crate) usize);

/// The weights of one module.
pub(crate) struct Store {
    manager: Arc<Manager>,
    module: u64,
    /// Where weights are between uses; `None` for the devices that compute.
    home: Option<Home>,
    source: Arc<dyn WeightSource>,
    /// The devices that compute, and one that only has weights, if there is one.
    lanes: Vec<Lane>,
    /// The device among them that all weights come from.
    shelf: Option<usize>,
    entries: Vec<Entry>,
    index: HashMap<(String, DType), WeightId>,
    /// For sizes.
    ctx: Context,
}

/// A device.
struct Lane {
    device: Arc<Device>,
    pool: usize,
}

struct Entry {
    weight: Weight,
    dtype: DType,
    /// Bytes on a device.
    size: usize,
    /// For each lane the chunk it is in, if that still exists, and its number there.
    places: Vec<Option<(u64, usize)>>,
    ram: Option<Bytes>,
}

/// What a segment wants of the weights.
#[derive(Clone, Copy)]
pub(crate) struct Want<'a> {
    pub(crate) lane: usize,
    /// Each once, by the unit that first reads them.
    pub(crate) groups: &'a [(usize, Vec<WeightId>)],
    /// The module's workspace stays if it has at most so many bytes.
    pub(crate) workspace: usize,
    /// What traces call it.
    pub(crate) segment: &'a Arc<str>,
    pub(crate) cancel: &'a CancelToken,
}

/// Weights that stay on a device while this is alive.
pub(crate) struct Held {
    /// Where each lies.
    pub(crate) places: Vec<Place>,
    /// Chunks that are used where files are mapped.
    mapped: Vec<Arc<Chunk>>,
    /// Whether their pages go after use.
    passing: bool,
    _pins: Vec<Pins>,
}

impl Held {
    /// Says that they were used, and are not wanted again before everything else was.
    ///
    /// # Errors
    /// They were not in their file any more when they were used.
    pub(crate) fn used(&self) -> Result<()> {
        let mapped = || self.mapped.iter().flat_map(|c| &c.mapped);
        mapped().try_for_each(Bytes::check)?;
        if self.passing { mapped().try_for_each(|b| b.advise(Advice::Cold)) } else { Ok(()) }
    }
}

impl Store {
    pub(crate) fn new(
        manager: Arc<Manager>,
        name: &str,
        home: Option<Home>,
        devices: &[Arc<Device>],
        source: Arc<dyn WeightSource>,
    ) -> Store {
        let lane = |d: &Arc<Device>| Lane { device: d.clone(), pool: manager.pool(d) };
        let mut lanes: Vec<Lane> = devices.iter().map(lane).collect();
        // A device that computes alone has what it keeps.
        let home = home.filter(|h| !matches!(h, Home::Device(d) if devices.iter().all(|other| other.is_same(d))));
        let mut shelf = None;
        if let Some(Home::Device(d)) = &home {
            let known = devices.iter().position(|other| other.is_same(d));
            shelf = Some(known.unwrap_or(lanes.len()));
            lanes.extend(known.is_none().then(|| lane(d)));
        }
        let shelves = match (&home, shelf) {
            (None, _) => lanes.iter().map(|l| l.pool).collect(),
            (_, Some(shelf)) => lanes.get(shelf).map(|l| l.pool).into_iter().collect(),
            _ => Vec::new(),
        };
        let names = || devices.iter().map(|d| d.name()).collect::<Vec<_>>().join("&");
        let module = manager.register(name, home.as_ref().map_or_else(names, Home::name), shelves);
        let (entries, index, ctx) = (Vec::new(), HashMap::new(), Context::new());
        Store { manager, module, home, source, lanes, shelf, entries, index, ctx }
    }

    pub(crate) fn manager(&self) -> &Arc<Manager> {
        &self.manager
    }

    pub(crate) fn module(&self) -> u64 {
        self.module
    }

    /// What asks for memory on a lane's device, with a workspace of so many bytes.
    pub(crate) fn asker(&self, lane: usize, workspace: usize) -> Asker {
        let pool = self.lanes.get(lane).map_or(usize::MAX, |l| l.pool);
        Asker { module: self.module, pool, workspace, modest: false }
    }

    /// The number of a weight.
    pub(crate) fn intern(&mut self, weight: &Weight, dtype: DType) -> Result<WeightId> {
        let key = (weight.name().to_owned(), dtype);
        if let Some(&id) = self.index.get(&key) {
            if let Some(e) = self.entries.get_mut(id.0) {
                e.weight = weight.clone();
            }
            return Ok(id);
        }
        let leaf = self.ctx.held(dtype, ne(&weight.shape()))?;
        let mut size = 0;
        for lane in &self.lanes {
            let dev = lane.device.layout()?;
            size = size.max(self.ctx.alloc_size(leaf, dev)?.next_multiple_of(dev.alignment()));
        }
        let id = WeightId(self.entries.len());
        let places = self.lanes.iter().map(|_| None).collect();
        self.entries.push(Entry { weight: weight.clone(), dtype, size, places, ram: None });
        self.index.insert(key, id);
        self.manager.set_weights(self.module, self.entries.iter().map(|e| e.size).sum());
        Ok(id)
    }

    /// Bytes of device memory that a weight takes when it is loaded; none if it can be used in place.
    pub(crate) fn size(&self, id: WeightId, lane: usize) -> usize {
        let on_host = self.lanes.get(lane).is_some_and(|l| l.device.kind() == DeviceKind::Cpu);
        let in_place = |e: &Entry| e.dtype == e.weight.dtype() && !self.source.is_made(e.weight.name());
        self.entries.get(id.0).map_or(0, |e| if on_host && in_place(e) { 0 } else { e.size })
    }

    /// Bytes that a weight takes in its type in memory.
    pub(crate) fn stored(&self, id: WeightId) -> usize {
        let bytes = |e: &Entry| e.dtype.bytes(e.weight.shape().elements(), e.weight.shape().last());
        self.entries.get(id.0).and_then(bytes).unwrap_or(0)
    }

    /// The weight of a number.
    pub(crate) fn weight(&self, id: WeightId) -> Option<&Weight> {
        self.entries.get(id.0).map(|e| &e.weight)
    }

    /// Takes weights from `source` from now on; those stay for which `keep` holds.
    pub(crate) fn set_source(&mut self, source: Arc<dyn WeightSource>, keep: impl Fn(&str) -> bool) {
        self.source = source;
        let mut gone = HashSet::new();
        for e in self.entries.iter_mut().filter(|e| !keep(e.weight.name())) {
            gone.extend(e.places.iter_mut().filter_map(Option::take).map(|p| p.0));
            e.ram = None;
        }
        self.manager.release(self.module, |id| gone.contains(&id));
    }

    /// Bytes of device memory that weights take, those used in place not counted, and that buffers take.
    pub(crate) fn bytes(&self) -> (usize, usize) {
        self.manager.used_by(self.module)
    }

    /// Frees every weight that is not in use.
    pub(crate) fn clear(&mut self) {
        self.manager.release(self.module, |_| true);
        self.entries.iter_mut().for_each(|e| e.ram = None);
    }

    /// Frees what is on devices that are not its home.
    pub(crate) fn leave(&mut self) {
        self.manager.leave(self.module);
    }

    /// Loads what is wanted and not on the device as long as nothing has to go for it; whether that was all of it.
    pub(crate) fn fill(&mut self, want: Want<'_>) -> Result<bool> {
        for (load, bytes) in self.loads(want, EventKind::Load)?.1 {
            if !self.manager.has_room(bytes, load.who.pool) {
                return Ok(false);
            }
            match load.run() {
                Ok(loaded) => drop(self.accept(want.lane, loaded)),
                Err(NotLoaded::Refused(Refusal::Failed(e)) | NotLoaded::Failed(e)) => return Err(e),
                Err(NotLoaded::Refused(_)) => return Ok(false),
            }
        }
        Ok(true)
    }

    /// Makes the weights that are wanted resident. They are in the order of `order`. Stops between two weights when
    /// cancelled.
    pub(crate) fn ensure(&mut self, want: Want<'_>, order: &[WeightId]) -> Result<Held, NotLoaded> {
        let (pins, loads) = self.loads(want, EventKind::Load)?;
        let mut all = vec![pins];
        for (load, _) in loads {
            let loaded = load.run()?;
            all.push(self.accept(want.lane, loaded));
        }
        let (pins, chunks) = self.manager.pin(&self.chunks(want.lane, order));
        all.push(pins);
        let mut mapped: Vec<Arc<Chunk>> =
            chunks.iter().flatten().filter(|c| !c.mapped.is_empty()).cloned().collect();
        mapped.dedup_by(|a, b| Arc::ptr_eq(a, b));
        let passing = self.streams(want.lane);
        if passing {
            mapped.iter().flat_map(|c| &c.mapped).try_for_each(|b| b.advise(Advice::WillNeed))?;
        }
        let mut places = Vec::with_capacity(order.len());
        for (id, chunk) in order.iter().zip(chunks) {
            let place = chunk.and_then(|c| c.places.get(self.place(want.lane, *id)?.1).cloned());
            let lost = || Error::internal(format!("{} was not loaded", self.name(*id)));
            places.push(place.ok_or_else(lost)?);
        }
        Ok(Held { places, mapped, passing, _pins: all })
    }

    /// Frees chunks that hold more than is wanted, so that only that takes room when it is loaded again; whether there
    /// were any. Other programs, or other segments, wanted the rest of them.
    pub(crate) fn shed(&mut self, want: Want<'_>) -> bool {
        let wanted: HashSet<WeightId> = want.groups.iter().flat_map(|g| &g.1).copied().collect();
        let (mut used, mut more) = (HashSet::new(), HashSet::new());
        for (i, e) in self.entries.iter().enumerate() {
            if let Some(&Some((chunk, _))) = e.places.get(want.lane) {
                if wanted.contains(&WeightId(i)) {
                    used.insert(chunk)
                } else {
                    more.insert(chunk)
                };
            }
        }
        self.manager.release(self.module, |id| used.contains(&id) && more.contains(&id))
    }

    /// Whether pages of a mapped file come before a segment uses them in place and go after it.
    pub(crate) fn streams(&self, lane: usize) -> bool {
        let on_host = self.lanes.get(lane).is_some_and(|l| l.device.kind() == DeviceKind::Cpu);
        on_host && matches!(self.home, Some(Home::File))
    }

    /// Keeps what is wanted and on the device; what it takes to bring the rest, each with its bytes.
    pub(crate) fn loads(&self, want: Want<'_>, kind: EventKind) -> Result<(Pins, Vec<(Load, usize)>)> {
        let Some(at) = self.lanes.get(want.lane) else { return Err(Error::internal("no such device")) };
        let ids: Vec<WeightId> = want.groups.iter().flat_map(|g| &g.1).copied().collect();
        let (pins, chunks) = self.manager.pin(&self.chunks(want.lane, &ids));
        if kind == EventKind::Prefetch && self.streams(want.lane) {
            let mut ahead: Vec<&Arc<Chunk>> = chunks.iter().flatten().collect();
            ahead.dedup_by(|a, b| Arc::ptr_eq(a, b));
            ahead.iter().flat_map(|c| &c.mapped).try_for_each(|b| b.advise(Advice::WillNeed))?;
        }
        let mut there = chunks.iter().map(Option::is_some);
        let mut loads = Vec::new();
        for (unit, ids) in want.groups {
            let missing: Vec<WeightId> =
                ids.iter().zip(there.by_ref()).filter(|(_, there)| !there).map(|(id, _)| *id).collect();
            if missing.is_empty() {
                continue;
            }
            let item = |&id: &WeightId| {
                let e = self.entries.get(id.0)?;
                Some(Item { id, weight: e.weight.clone(), dtype: e.dtype, ready: e.ram.clone() })
            };
            let shelf = self.shelf.filter(|&s| s != want.lane).and_then(|s| {
                let lane = self.lanes.get(s)?;
                let (pins, chunks) = self.manager.pin(&self.chunks(s, &missing));
                let place = |(chunk, &id): (Option<Arc<Chunk>>, &WeightId)| {
                    chunk?.places.get(self.place(s, id)?.1).cloned()
                };
                let places = chunks.into_iter().zip(&missing).map(place).collect();
                let who = Asker { modest: true, ..self.asker(s, want.workspace) };
                Some(Shelf { device: lane.device.clone(), who, places, _pins: pins })
            });
            let bytes = missing.iter().map(|&id| self.size(id, want.lane)).sum();
            let load = Load {
                manager: self.manager.clone(),
                source: self.source.clone(),
                device: at.device.clone(),
                who: self.asker(want.lane, want.workspace),
                unit: *unit,
                items: missing.iter().filter_map(item).collect(),
                shelf,
                keeps: matches!(self.home, Some(Home::Ram)) && at.device.kind() != DeviceKind::Cpu,
                kind,
                segment: want.segment.clone(),
                cancel: want.cancel.clone(),
                asked: at.device.noop_device().map_or(Duration::ZERO, |noop| noop.elapsed()),
            };
            loads.push((load, bytes));
        }
        Ok((pins, loads))
    }

    fn chunks(&self, lane: usize, ids: &[WeightId]) -> Vec<Option<u64>> {
        ids.iter().map(|&id| self.place(lane, id).map(|p| p.0)).collect()
    }

    fn place(&self, lane: usize, id: WeightId) -> Option<(u64, usize)> {
        *self.entries.get(id.0)?.places.get(lane)?
    }

    fn name(&self, id: WeightId) -> &str {
        self.weight(id).map_or("a weight", Weight::name)
    }

    /// Notes where loaded weights are.
    pub(crate) fn accept(&mut self, lane: usize, mut loaded: Loaded) -> Pins {
        if let (Some(shelf), Some(shelved)) = (self.shelf, loaded.shelved.take()) {
            self.accept(shelf, *shelved);
        }
        if let Some(noop) = self.lanes.get(lane).and_then(|l| l.device.noop_device()) {
            noop.wait(loaded.there);
        }
        for (i, id) in loaded.ids.iter().enumerate() {
            if let Some(place) = self.entries.get_mut(id.0).and_then(|e| e.places.get_mut(lane)) {
                *place = Some((loaded.chunk, i));
            }
        }
        for (id, bytes) in loaded.kept {
            if let Some(e) = self.entries.get_mut(id.0) {
                e.ram = Some(bytes);
            }
        }
        loaded.pins
    }

    /// A weight as a host tensor.
    pub(crate) fn value(&self, weight: &Weight) -> Result<Tensor> {
        let bytes = fetch(&*self.source, weight)?.read()?;
        Tensor::f32(weight.shape().dims(), to_f32(weight.dtype(), &bytes, weight.shape().elements())?)
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.manager.forget(self.module);
    }
}
