//! The accounts of every device: what is on it, for whom, and what may go.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::report::{DeviceMemory, MemoryReport, ModuleMemory};
use super::{Place, Space};
use crate::device::{Device, DeviceKind, available_ram};
use crate::error::{Error, Result};
use crate::tensor::Bytes;
use crate::trace::{Event, EventKind, Trace};

/// Choices for all runners of a [`Manager`].
#[derive(Clone, Debug)]
pub struct ManagerOptions {
    /// Whether programs that do not fit are run in segments. Without it they are errors.
    pub segmented: bool,
    /// Whether the weights of the next segment are loaded while one computes.
    pub prefetch: bool,
    /// Bytes of a device's free memory that are left to others. Does not apply to budgets, nor to the CPU.
    pub margin: usize,
    /// Bytes of main memory that are left to others when weights are to stay there ([`super::Home::Ram`]). Those for which
    /// there is no room are read from their file each time.
    pub ram_margin: u64,
    /// Who records what happens.
    pub trace: Option<Arc<Trace>>,
}

impl Default for ManagerOptions {
    fn default() -> ManagerOptions {
        ManagerOptions { segmented: true, prefetch: true, margin: 256 << 20, ram_margin: 512 << 20, trace: None }
    }
}

/// Knows what all runners that share it have on each device: weights, workspaces, and values that cross segments. It
/// keeps the sum below the device's budget, and below what the device reports free less a margin, by letting go what is
/// not in use.
///
/// Weights lie in chunks, one for each run of nodes between two cuts that reads weights nobody has loaded before. A
/// chunk that a running segment reads, or that is being loaded for the next one, stays. Of the others these go first:
/// 1. workspaces of runners that do not run, and the runner's own if it is larger than what it needs next;
/// 2. chunks of modules that were not used since the module that wants memory began its last run but one: they take no
///    part in the loop it is in, and would make it load more at every step; the least recently used first;
/// 3. chunks of the module itself, the last of the network first, so that a step finds what the one before it began
///    with;
/// 4. chunks of other modules, the least recently used first.
///
/// In 2 and 4, those of modules whose home is elsewhere go before others.
#[derive(Debug)]
pub struct Manager {
    options: ManagerOptions,
    state: Mutex<State>,
    /// Whether it was said that main memory is short.
    said_short: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    pools: Vec<Pool>,
    modules: BTreeMap<u64, Module>,
    chunks: BTreeMap<u64, Entry>,
    rooms: BTreeMap<RoomKey, Room>,
    /// Counts up with every use and gives numbers to modules and chunks.
    clock: u64,
    trace: Option<Arc<Trace>>,
}

/// A device with its accounts.
#[derive(Debug)]
struct Pool {
    device: Arc<Device>,
    budget: Option<usize>,
    /// What the device's free memory allowed when a run began.
    live: usize,
    used: usize,
}

#[derive(Debug)]
struct Module {
    name: Arc<str>,
    /// What reports call where its weights are between uses.
    home: String,
    /// The numbers of the devices where they are, if they are on devices.
    shelves: Vec<usize>,
    weights: usize,
    /// When its last run began, and the one before.
    runs: [u64; 2],
}

/// Weights that were loaded together.
#[derive(Debug)]
pub(crate) struct Chunk {
    /// Where each lies.
    pub(crate) places: Vec<Place>,
    /// Device memory.
    pub(crate) bytes: usize,
    /// Those that are used where a file is mapped.
    pub(crate) mapped: Vec<Bytes>,
    /// What traces call it.
    pub(crate) name: Arc<str>,
}

#[derive(Debug)]
struct Entry {
    chunk: Arc<Chunk>,
    module: u64,
    pool: usize,
    /// The run of nodes, counted from the network's beginning, that first reads it.
    unit: usize,
    pins: usize,
    used: u64,
}

/// A buffer that a runner reuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct RoomKey {
    module: u64,
    pool: usize,
    kind: RoomKind,
}

/// What a runner keeps buffers for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum RoomKind {
    /// Intermediate values of one segment.
    Workspace,
    /// Inputs and values that cross segments.
    Carried,
}

impl RoomKind {
    fn name(self) -> &'static str {
        match self {
            RoomKind::Workspace => "workspace",
            RoomKind::Carried => "crossing values",
        }
    }
}

#[derive(Debug)]
struct Room {
    space: Space,
    busy: bool,
}

/// Why memory could not be had.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// It would exceed this limit in bytes, of which others that cannot let go hold some.
    Limit { limit: usize, others: usize, budget: bool },
    /// The device did not give it.
    Failed(Error),
}

/// Who asks for memory, and what of theirs stays.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asker {
    pub(crate) module: u64,
    pub(crate) pool: usize,
    /// The module's workspace stays if it has at most so many bytes.
    pub(crate) workspace: usize,
    /// Whether only what takes no part in the module's loop goes for it.
    pub(crate) modest: bool,
}

/// Chunks that stay while this is alive.
#[derive(Debug)]
pub(crate) struct Pins {
    manager: Arc<Manager>,
    ids: Vec<u64>,
}

impl Drop for Pins {
    fn drop(&mut self) {
        let mut state = self.manager.lock();
        for id in &self.ids {
            if let Some(e) = state.chunks.get_mut(id) {
                e.pins = e.pins.saturating_sub(1);
            }
        }
    }
}

impl Manager {
    /// A manager without budgets.
    pub fn new(options: ManagerOptions) -> Arc<Manager> {
        let state = State { trace: options.trace.clone(), ..State::default() };
        Arc::new(Manager { options, state: Mutex::new(state), said_short: AtomicBool::new(false) })
    }

    /// Its choices.
    pub fn options(&self) -> &ManagerOptions {
        &self.options
    }

    /// Limits what all runners together have on `device`, in bytes; `None` leaves the limit to what the device reports
    /// free. What is there already goes when the next run wants memory.
    pub fn set_budget(&self, device: &Arc<Device>, bytes: Option<usize>) {
        let mut state = self.lock();
        let pool = state.pool(device);
        if let Some(p) = state.pools.get_mut(pool) {
            p.budget = bytes;
        }
    }

    /// The limit that [`Manager::set_budget`] gave.
    pub fn budget(&self, device: &Arc<Device>) -> Option<usize> {
        self.lock().pools.iter().find(|p| p.device.is_same(device)).and_then(|p| p.budget)
    }

    /// What is where now.
    pub fn memory(&self) -> MemoryReport {
        let state = self.lock();
        let rooms = |pool: usize, kind: RoomKind| {
            let of = |(k, r): (&RoomKey, &Room)| (k.pool == pool && k.kind == kind).then(|| r.space.size());
            state.rooms.iter().filter_map(of).sum()
        };
        let chunks = |keep: &dyn Fn(&Entry) -> bool| {
            state.chunks.values().filter(|e| keep(e)).map(|e| e.chunk.bytes).sum::<usize>()
        };
        let devices = state.pools.iter().enumerate().map(|(i, p)| DeviceMemory {
            device: p.device.name().to_owned(),
            budget: p.budget,
            weights: chunks(&|e| e.pool == i),
            workspaces: rooms(i, RoomKind::Workspace),
            crossing: rooms(i, RoomKind::Carried),
        });
        let modules = state.modules.iter().map(|(&id, m)| ModuleMemory {
            module: m.name.to_string(),
            home: m.home.clone(),
            weights: m.weights,
            resident: chunks(&|e| e.module == id),
        });
        MemoryReport { devices: devices.collect(), modules: modules.collect() }
    }

    /// Whether main memory can keep so many bytes more; says once if it cannot.
    pub(crate) fn ram_keeps(&self, bytes: usize) -> bool {
        let Some(free) = available_ram() else { return true };
        let keeps = free.saturating_sub(self.options.ram_margin) >= bytes as u64;
        if !keeps && !self.said_short.swap(true, Ordering::Relaxed) {
            tracing::warn!("main memory has {} MiB free: weights stay in their file", free >> 20);
        }
        keeps
    }

    /// Records what began at `started`, if anybody wants to know.
    pub(crate) fn note(
        &self,
        started: Option<Instant>,
        kind: EventKind,
        who: Asker,
        segment: &Arc<str>,
        bytes: usize,
    ) {
        if let Some(started) = started {
            self.lock().note(started, kind, (who.module, who.pool), segment, bytes);
        }
    }

    /// The time, if anybody wants to know.
    pub(crate) fn now(&self) -> Option<Instant> {
        self.options.trace.as_ref().map(|_| Instant::now())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Whoever panicked while it held the lock left sums that are at worst too large.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A number for a new module, whose weights are on the devices with the numbers `shelves` between uses, or elsewhere.
    pub(crate) fn register(&self, name: &str, home: String, shelves: Vec<usize>) -> u64 {
        let mut state = self.lock();
        let id = state.tick();
        state.modules.insert(id, Module { name: name.into(), home, shelves, weights: 0, runs: [id; 2] });
        id
    }

    /// Says how many bytes of weights a module reads in all.
    pub(crate) fn set_weights(&self, module: u64, bytes: usize) {
        if let Some(m) = self.lock().modules.get_mut(&module) {
            m.weights = bytes;
        }
    }

    /// Forgets a module with all it has.
    pub(crate) fn forget(&self, module: u64) {
        let mut state = self.lock();
        state.release(|_, e| e.module == module);
        state.release_rooms(|k| k.module == module);
        state.modules.remove(&module);
    }

    /// The number of a device.
    pub(crate) fn pool(&self, device: &Arc<Device>) -> usize {
        self.lock().pool(device)
    }

    /// Says that a run of `module` begins, and lets go weights whose file was cut where they are mapped.
    pub(crate) fn begin(&self, module: u64) {
        let mut state = self.lock();
        let lost = |e: &Entry| e.chunk.mapped.iter().any(|b| b.check().is_err());
        state.release(|_, e| e.module == module && e.pins == 0 && lost(e));
        let now = state.tick();
        if let Some(m) = state.modules.get_mut(&module) {
            m.runs = [now, m.runs[0]];
        }
    }

    /// Asks the device how much is free, and says how much `module` may have on it at most.
    pub(crate) fn capacity(&self, module: u64, pool: usize) -> usize {
        let device = match self.lock().pools.get(pool) {
            Some(p) => p.device.clone(),
            None => return 0,
        };
        // Outside the lock: a remote device takes its time.
        let free = match device.kind() {
            DeviceKind::Cpu => None,
            _ => Some(device.memory()).filter(|m| m.total > 0),
        };
        let mut state = self.lock();
        let fixed = state.fixed(|m| m != module, pool);
        let Some(p) = state.pools.get_mut(pool) else { return 0 };
        p.live = free.map_or(usize::MAX, |m| p.used.saturating_add(m.free).saturating_sub(self.options.margin));
        p.limit().saturating_sub(fixed)
    }

    /// Why a segment that needs more than [`Manager::capacity`] cannot run.
    pub(crate) fn refusal(&self, module: u64, pool: usize) -> Refusal {
        let state = self.lock();
        let others = state.fixed(|m| m != module, pool);
        let Some(p) = state.pools.get(pool) else { return Refusal::unknown() };
        Refusal::Limit { limit: p.limit(), others, budget: p.is_budgeted() }
    }

    /// Whether a device's memory is limited at all, as far as is known.
    pub(crate) fn is_limited(&self, pool: usize) -> bool {
        self.lock().pools.get(pool).is_some_and(|p| p.budget.is_some() || p.device.kind() != DeviceKind::Cpu)
    }

    /// Keeps those of `ids` that are still there: their chunks, in the order asked for, `None` for what is gone.
    pub(crate) fn pin(self: &Arc<Self>, ids: &[Option<u64>]) -> (Pins, Vec<Option<Arc<Chunk>>>) {
        let mut state = self.lock();
        let now = state.tick();
        let mut pinned = Vec::new();
        let mut found: BTreeMap<u64, Arc<Chunk>> = BTreeMap::new();
        let chunks = ids
            .iter()
            .map(|id| {
                let id = (*id)?;
                if let Some(chunk) = found.get(&id) {
                    return Some(chunk.clone());
                }
                let e = state.chunks.get_mut(&id)?;
                e.pins += 1;
                e.used = now;
                pinned.push(id);
                found.insert(id, e.chunk.clone());
                Some(e.chunk.clone())
            })
            .collect();
        drop(state);
        (Pins { manager: self.clone(), ids: pinned }, chunks)
    }

    /// Memory for weights: `bytes` are counted as used from now on, until [`Manager::cancel`] or until the chunk that
    /// [`Manager::add`] makes of them goes.
    pub(crate) fn reserve(&self, bytes: usize, who: Asker) -> Result<(), Refusal> {
        self.lock().reserve(bytes, who)
    }

    /// Lets go what exceeds the limit, which may have sunk.
    pub(crate) fn trim(&self, who: Asker) {
        let mut state = self.lock();
        while !state.fits(0, who.pool) && state.let_go(who) {}
    }

    /// Gives back what [`Manager::reserve`] gave.
    pub(crate) fn cancel(&self, bytes: usize, pool: usize) {
        self.lock().give_back(bytes, pool);
    }

    /// `size` bytes that [`Manager::reserve`] gave, from the device. When it has fewer than it said, more goes.
    pub(crate) fn allocate(&self, size: usize, who: Asker) -> Result<Space> {
        let device = match self.lock().pools.get(who.pool) {
            Some(p) => p.device.clone(),
            None => return Err(Error::internal("no such device")),
        };
        loop {
            match Space::alloc(&device, size) {
                Ok(space) => return Ok(space),
                Err(e) if device.kind() == DeviceKind::Cpu => return Err(e),
                Err(e) => {
                    if !self.lock().let_go(who) {
                        return Err(e);
                    }
                }
            }
        }
    }

    /// Registers weights of `who` that `unit` is the first to read, whose memory was reserved. They are pinned once.
    pub(crate) fn add(self: &Arc<Self>, chunk: Chunk, who: Asker, unit: usize) -> (u64, Pins) {
        let mut state = self.lock();
        let id = state.tick();
        let entry = Entry { chunk: Arc::new(chunk), module: who.module, pool: who.pool, unit, pins: 1, used: id };
        state.chunks.insert(id, entry);
        drop(state);
        (id, Pins { manager: self.clone(), ids: vec![id] })
    }

    /// Lets go these chunks of a module, but those in use; whether there were any.
    pub(crate) fn release(&self, module: u64, which: impl Fn(u64) -> bool) -> bool {
        self.lock().release(|id, e| e.module == module && e.pins == 0 && which(id))
    }

    /// Lets go a module's chunks on devices where its weights are not between uses.
    pub(crate) fn leave(&self, module: u64) {
        let mut state = self.lock();
        let shelves = state.modules.get(&module).map_or_else(Vec::new, |m| m.shelves.clone());
        state.release(|_, e| e.module == module && e.pins == 0 && !shelves.contains(&e.pool));
    }

    /// Whether so many bytes can be had without letting anything go.
    pub(crate) fn has_room(&self, bytes: usize, pool: usize) -> bool {
        self.lock().fits(bytes, pool)
    }

    /// A buffer of at least `size` bytes for `who`, which stays until [`Manager::rest`]; of `liked` bytes if nothing
    /// has to go for that. What an earlier one held is lost when it is too small; or too large, where memory is limited,
    /// for crossing values, which stay while segments ask for their share.
    pub(crate) fn room(&self, kind: RoomKind, size: usize, liked: usize, who: Asker) -> Result<Space, Refusal> {
        let key = RoomKey { module: who.module, pool: who.pool, kind };
        let mut state = self.lock();
        let exact = kind == RoomKind::Carried && !state.fits(usize::MAX / 2, who.pool);
        let suits = |r: &&mut Room| r.space.size() == size.max(1) || r.space.size() > size && !exact;
        if let Some(room) = state.rooms.get_mut(&key).filter(suits) {
            room.busy = true;
            return Ok(room.space.clone());
        }
        // The old one goes first: both may not fit. No buffer is empty.
        state.release_rooms(|k| *k == key);
        let size = size.max(1);
        let size = if liked > size && state.fits(liked, who.pool) { liked } else { size };
        state.reserve(size, who)?;
        drop(state);
        let started = self.now();
        match self.allocate(size, who) {
            Ok(space) => {
                self.lock().rooms.insert(key, Room { space: space.clone(), busy: true });
                if started.is_some() {
                    self.note(started, EventKind::Workspace, who, &kind.name().into(), size);
                }
                Ok(space)
            }
            Err(e) => {
                self.cancel(size, who.pool);
                Err(Refusal::Failed(e))
            }
        }
    }

    /// Says that what a runner's buffer holds is not needed any more.
    pub(crate) fn rest(&self, module: u64, kind: Option<RoomKind>) {
        let mut state = self.lock();
        let of = |k: &RoomKey| k.module == module && kind.is_none_or(|kind| k.kind == kind);
        state.rooms.iter_mut().filter(|(k, _)| of(k)).for_each(|(_, r)| r.busy = false);
    }

    /// Frees a runner's buffers.
    pub(crate) fn release_rooms(&self, module: u64) {
        self.lock().release_rooms(|k| k.module == module);
    }

    /// Bytes that a module has on all devices: weights, buffers.
    pub(crate) fn used_by(&self, module: u64) -> (usize, usize) {
        let state = self.lock();
        let weights = state.chunks.values().filter(|e| e.module == module).map(|e| e.chunk.bytes).sum();
        let rooms = state.rooms.iter().filter(|(k, _)| k.module == module).map(|(_, r)| r.space.size()).sum();
        (weights, rooms)
    }
}

impl Refusal {
    fn unknown() -> Refusal {
        Refusal::Failed(Error::internal("no such device"))
    }
}

impl Pool {
    /// Whether the limit is a budget, not what is free.
    fn is_budgeted(&self) -> bool {
        self.budget.is_some_and(|b| b <= self.live)
    }

    fn limit(&self) -> usize {
        self.budget.unwrap_or(usize::MAX).min(self.live)
    }
}

impl State {
    fn note(
        &self,
        started: Instant,
        kind: EventKind,
        (module, pool): (u64, usize),
        segment: &Arc<str>,
        bytes: usize,
    ) {
        let (Some(trace), Some(p)) = (&self.trace, self.pools.get(pool)) else { return };
        let module = self.modules.get(&module).map_or_else(|| "".into(), |m| m.name.clone());
        let (start, duration) = Default::default();
        let (segment, device, level) = (segment.clone(), p.device.name().into(), p.used);
        trace.note(started, Event { kind, module, segment, device, bytes, start, duration, level });
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    fn pool(&mut self, device: &Arc<Device>) -> usize {
        let known = self.pools.iter().position(|p| p.device.is_same(device));
        known.unwrap_or_else(|| {
            self.pools.push(Pool { device: device.clone(), budget: None, live: usize::MAX, used: 0 });
            self.pools.len() - 1
        })
    }

    fn fits(&self, bytes: usize, pool: usize) -> bool {
        self.pools.get(pool).is_some_and(|p| p.used.saturating_add(bytes) <= p.limit())
    }

    fn give_back(&mut self, bytes: usize, pool: usize) {
        if let Some(p) = self.pools.get_mut(pool) {
            p.used = p.used.saturating_sub(bytes);
        }
    }

    /// Bytes in use right now by modules for which `whose` holds.
    fn fixed(&self, whose: impl Fn(u64) -> bool, pool: usize) -> usize {
        let chunks = self.chunks.values().filter(|e| e.pool == pool && e.pins > 0 && whose(e.module));
        let rooms = self.rooms.iter().filter(|(k, r)| k.pool == pool && r.busy && whose(k.module));
        chunks.map(|e| e.chunk.bytes).sum::<usize>() + rooms.map(|(_, r)| r.space.size()).sum::<usize>()
    }

    fn reserve(&mut self, bytes: usize, who: Asker) -> Result<(), Refusal> {
        while !self.fits(bytes, who.pool) {
            if !self.let_go(who) {
                let others = self.fixed(|m| m != who.module, who.pool);
                let Some(p) = self.pools.get(who.pool) else { return Err(Refusal::unknown()) };
                return Err(Refusal::Limit { limit: p.limit(), others, budget: p.is_budgeted() });
            }
        }
        if let Some(p) = self.pools.get_mut(who.pool) {
            p.used = p.used.saturating_add(bytes);
        }
        Ok(())
    }

    /// Lets go the first thing that may; whether there was one.
    fn let_go(&mut self, who: Asker) -> bool {
        let idle = |(k, r): (&RoomKey, &Room)| {
            let keeps = k.module == who.module && k.kind == RoomKind::Workspace && r.space.size() <= who.workspace;
            k.pool == who.pool && !r.busy && !keeps
        };
        if let Some(key) = self.rooms.iter().find(|&(k, r)| idle((k, r))).map(|(k, _)| *k) {
            self.release_rooms(|k| *k == key);
            return true;
        }
        let free = |e: &&Entry| e.pool == who.pool && e.pins == 0 && e.chunk.bytes > 0;
        let candidates = || self.chunks.iter().filter(|(_, e)| free(e));
        let at_home = |e: &Entry| self.modules.get(&e.module).is_some_and(|m| m.shelves.contains(&e.pool));
        let others = |before: u64| {
            let of_others = candidates().filter(|(_, e)| e.module != who.module && e.used < before);
            of_others.min_by_key(|(_, e)| (at_home(e), e.used))
        };
        let own = || candidates().filter(|(_, e)| e.module == who.module).max_by_key(|(_, e)| (e.unit, e.used));
        let looped = self.modules.get(&who.module).map_or(0, |m| m.runs[1]);
        let victim = others(looped).or_else(|| if who.modest { None } else { own().or_else(|| others(u64::MAX)) });
        match victim.map(|(&id, _)| id) {
            Some(id) => {
                self.release(|i, _| i == id);
                true
            }
            None => false,
        }
    }

    /// Removes chunks. Their memory is free when this returns, unless somebody who did not pin them still holds it.
    /// Says whether there were any.
    fn release(&mut self, which: impl Fn(u64, &Entry) -> bool) -> bool {
        let ids: Vec<u64> = self.chunks.iter().filter(|&(&id, e)| which(id, e)).map(|(&id, _)| id).collect();
        for &id in &ids {
            if let Some(e) = self.chunks.remove(&id) {
                let started = self.trace.as_ref().map(|_| Instant::now());
                let (bytes, pool, module, name) = (e.chunk.bytes, e.pool, e.module, e.chunk.name.clone());
                drop(e);
                self.give_back(bytes, pool);
                if let Some(started) = started {
                    self.note(started, EventKind::Evict, (module, pool), &name, bytes);
                }
            }
        }
        !ids.is_empty()
    }

    fn release_rooms(&mut self, which: impl Fn(&RoomKey) -> bool) {
        let keys: Vec<RoomKey> = self.rooms.keys().filter(|k| which(k)).copied().collect();
        for key in keys {
            if let Some(room) = self.rooms.remove(&key) {
                let bytes = room.space.size();
                drop(room);
                self.give_back(bytes, key.pool);
            }
        }
    }
}
