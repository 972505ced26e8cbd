//! Bringing weights to a device: reading, converting, copying. Loads are values, so that any thread can do them.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use super::manager::{Asker, Chunk, Manager, Pins, Refusal};
use super::{Place, Space, WeightId};
use crate::cancel::CancelToken;
use crate::convert::{from_f32, to_f32};
use crate::device::{Device, DeviceKind, ram::make_room};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::ffi::{Buffer, Context, Id, PIECE};
use crate::lower::ne;
use crate::scope::Weight;
use crate::tensor::{Advice, Bytes, WeightSource};
use crate::trace::EventKind;

/// A weight that is to be loaded.
#[derive(Clone)]
pub(crate) struct Item {
    pub(crate) id: WeightId,
    pub(crate) weight: Weight,
    /// The type it gets in memory.
    pub(crate) dtype: DType,
    /// Its bytes in that type, if main memory has them.
    pub(crate) ready: Option<Bytes>,
}

/// Weights to be loaded together.
pub(crate) struct Load {
    pub(crate) manager: Arc<Manager>,
    pub(crate) source: Arc<dyn WeightSource>,
    pub(crate) device: Arc<Device>,
    pub(crate) who: Asker,
    /// The run of nodes that first reads them.
    pub(crate) unit: usize,
    pub(crate) items: Vec<Item>,
    /// The device that they come from.
    pub(crate) shelf: Option<Shelf>,
    /// Whether their bytes are wanted for main memory.
    pub(crate) keeps: bool,
    /// Load, or prefetch.
    pub(crate) kind: EventKind,
    /// The segment that wants them.
    pub(crate) segment: Arc<str>,
    pub(crate) cancel: CancelToken,
    /// When it was asked for, on the clock of a pretend device.
    pub(crate) asked: Duration,
}

/// A device that weights come from.
pub(crate) struct Shelf {
    pub(crate) device: Arc<Device>,
    pub(crate) who: Asker,
    /// Where each is there, if it is.
    pub(crate) places: Vec<Option<Place>>,
    /// What keeps them there.
    pub(crate) _pins: Pins,
}

/// Weights that were loaded.
pub(crate) struct Loaded {
    pub(crate) chunk: u64,
    pub(crate) pins: Pins,
    /// Them, as they lie in the chunk.
    pub(crate) ids: Vec<WeightId>,
    /// What main memory is to keep.
    pub(crate) kept: Vec<(WeightId, Bytes)>,
    /// Those that were put on the shelf first.
    pub(crate) shelved: Option<Box<Loaded>>,
    /// When they are there, on the clock of a pretend device.
    pub(crate) there: Duration,
}

/// Why weights were not loaded.
pub(crate) enum NotLoaded {
    Refused(Refusal),
    Failed(Error),
}

impl From<Error> for NotLoaded {
    fn from(e: Error) -> NotLoaded {
        NotLoaded::Failed(e)
    }
}

/// A buffer that is to be made: numbers of items, their tensors, and where they begin.
struct Planned {
    size: usize,
    items: Vec<(usize, Id, usize)>,
}

/// Memory that was reserved and not used yet.
struct Reserved<'a> {
    load: &'a Load,
    bytes: usize,
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.load.manager.cancel(self.bytes, self.load.who.pool);
        }
    }
}

impl Load {
    /// Loads the weights, in their order. Stops between two of them when cancelled.
    pub(crate) fn run(&self) -> Result<Loaded, NotLoaded> {
        let (shelved, sources) = self.shelve()?;
        match self.bring(&sources) {
            Ok(loaded) => Ok(Loaded { shelved: shelved.map(Box::new), ..loaded }),
            Err(e) => {
                // Nobody would know of what is there.
                if let Some(Loaded { chunk, pins, .. }) = shelved {
                    drop((sources, pins));
                    self.manager.release(self.who.module, |id| id == chunk);
                }
                Err(e)
            }
        }
    }

    /// Loads the weights, from `sources` where they are on another device.
    fn bring(&self, sources: &[Option<Place>]) -> Result<Loaded, NotLoaded> {
        let started = self.manager.now();
        let mut places: Vec<Option<Place>> = self.items.iter().map(|_| None).collect();
        let mut kept = Vec::new();
        // What is owned by nobody but the chunk counts, wherever it is.
        let mut lent = 0;
        let mut mapped = Vec::new();
        if self.device.kind() == DeviceKind::Cpu {
            for (item, place) in self.items.iter().zip(&mut places) {
                self.cancel.check()?;
                if item.dtype == item.weight.dtype() {
                    let bytes = fetch(&*self.source, &item.weight)?;
                    if in_place(item.dtype, &bytes) {
                        lent += if bytes.is_shared() { 0 } else { bytes.len() };
                        if bytes.is_mapped() {
                            bytes.advise(Advice::WillNeed)?;
                            mapped.push(bytes.clone());
                        }
                        let buffer = Buffer::lend(bytes)?;
                        buffer.mark_weights();
                        *place = Some((Space::Ggml(Arc::new(buffer)), 0));
                    }
                }
            }
        }
        let left: Vec<usize> = (0..places.len()).filter(|&i| places.get(i).is_some_and(Option::is_none)).collect();
        let bytes = lent + self.upload(&left, sources, &mut places, &mut kept, lent)?;
        let places = places.into_iter().flatten().collect::<Vec<_>>();
        if places.len() != self.items.len() {
            return Err(Error::internal("a weight was not loaded").into());
        }
        let chunk = Chunk { places, bytes, mapped, name: self.segment.clone() };
        let (chunk, pins) = self.manager.add(chunk, self.who, self.unit);
        self.manager.note(started, self.kind, self.who, &self.segment, bytes);
        let there = self.device.noop_device().map_or(Duration::ZERO, |noop| noop.copy(self.asked, bytes));
        Ok(Loaded { chunk, pins, ids: self.items.iter().map(|i| i.id).collect(), kept, shelved: None, there })
    }

    /// Puts what is missing on the shelf, if there is room; where each weight is there.
    fn shelve(&self) -> Result<(Option<Loaded>, Vec<Option<Place>>), NotLoaded> {
        let Some(shelf) = &self.shelf else { return Ok((None, Vec::new())) };
        let mut sources = shelf.places.clone();
        let missing = self.items.iter().zip(&sources).filter(|(_, place)| place.is_none());
        let items: Vec<Item> = missing.map(|(item, _)| item.clone()).collect();
        if items.is_empty() {
            return Ok((None, sources));
        }
        let load = Load {
            manager: self.manager.clone(),
            source: self.source.clone(),
            device: shelf.device.clone(),
            who: shelf.who,
            unit: self.unit,
            items,
            shelf: None,
            keeps: false,
            kind: self.kind,
            segment: self.segment.clone(),
            cancel: self.cancel.clone(),
            asked: shelf.device.noop_device().map_or(Duration::ZERO, |noop| noop.elapsed()),
        };
        let loaded = match load.run() {
            Ok(loaded) => loaded,
            // What has no room there is read from its file every time.
            Err(NotLoaded::Refused(refusal)) => {
                tracing::debug!("{} has no room for weights: {refusal:?}", shelf.device);
                return Ok((None, sources));
            }
            Err(failed) => return Err(failed),
        };
        let (_pins, chunks) = self.manager.pin(&[Some(loaded.chunk)]);
        let mut places = chunks.into_iter().flatten().flat_map(|c| c.places.clone());
        sources.iter_mut().filter(|s| s.is_none()).for_each(|s| *s = places.next());
        Ok((Some(loaded), sources))
    }

    /// Uploads the items with these numbers into as few buffers as the device's limit on their size allows; the bytes
    /// they take. They are read one after the other, as sources that compute them give each memory of its own; from
    /// `sources` where they are on another device. `more` bytes are reserved too.
    fn upload(
        &self,
        numbers: &[usize],
        sources: &[Option<Place>],
        places: &mut [Option<Place>],
        kept: &mut Vec<(WeightId, Bytes)>,
        more: usize,
    ) -> Result<usize, NotLoaded> {
        let dev = self.device.layout()?;
        let (align, limit) = (dev.alignment(), dev.max_buffer());
        let mut ctx = Context::new();
        let mut buffers: Vec<Planned> = Vec::new();
        for &i in numbers {
            let Some(item) = self.items.get(i) else { continue };
            let id = ctx.held(item.dtype, ne(&item.weight.shape()))?;
            let size = ctx.alloc_size(id, dev)?.next_multiple_of(align);
            match buffers.last_mut().filter(|b| b.size + size <= limit) {
                Some(b) => {
                    b.items.push((i, id, b.size));
                    b.size += size;
                }
                None => buffers.push(Planned { size, items: vec![(i, id, 0)] }),
            }
        }
        let total = buffers.iter().map(|b| b.size).sum::<usize>();
        if total + more > 0 {
            self.manager.reserve(total + more, self.who).map_err(NotLoaded::Refused)?;
        }
        let mut reserved = Reserved { load: self, bytes: total + more };
        let keeps = self.keeps && self.manager.ram_keeps(total);
        for Planned { size, items } in buffers {
            let space =
                self.manager.allocate(size, self.who).map_err(|e| NotLoaded::Refused(Refusal::Failed(e)))?;
            if let Space::Ggml(buffer) = &space {
                buffer.mark_weights();
            }
            for (i, id, offset) in items {
                self.cancel.check()?;
                let (Some(item), Some(place)) = (self.items.get(i), places.get_mut(i)) else { continue };
                let from = sources.get(i).and_then(Option::as_ref);
                let keeps = match (&space, from) {
                    (Space::Ggml(buffer), Some((from, at))) => {
                        ctx.place(id, buffer, offset, dev)?;
                        self.copy(item, (from.ggml()?, *at), |at, bytes| ctx.write_part(id, buffer, at, bytes))?;
                        None
                    }
                    (Space::Ggml(buffer), None) => {
                        ctx.place(id, buffer, offset, dev)?;
                        self.read(item, keeps, |at, bytes| ctx.write_part(id, buffer, at, bytes))?
                    }
                    (Space::Noop(cells), Some((from, at))) => {
                        cells.write(offset, ctx.alloc_size(id, dev)?, from.noop()?.read(*at)?)?;
                        None
                    }
                    (Space::Noop(cells), None) => {
                        let mut all = DefaultHasher::new();
                        (item.weight.name(), item.dtype).hash(&mut all);
                        let keeps = self.read(item, keeps, |_, bytes| {
                            all.write(bytes);
                            Ok(())
                        })?;
                        cells.write(offset, ctx.alloc_size(id, dev)?, all.finish())?;
                        keeps
                    }
                };
                kept.extend(keeps.map(|bytes| (item.id, bytes)));
                *place = Some((space.clone(), offset));
            }
        }
        // The device may have been lost meanwhile.
        self.device.check()?;
        reserved.bytes = 0;
        Ok(total)
    }

    /// Gives `to` a weight that is at an offset of another device's memory, piece by piece, each with its place.
    fn copy(
        &self,
        item: &Item,
        (from, offset): (&Buffer, usize),
        mut to: impl FnMut(usize, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let dev = self.shelf.as_ref().ok_or_else(|| Error::internal("no shelf"))?.device.layout()?;
        let mut ctx = Context::new();
        let id = ctx.held(item.dtype, ne(&item.weight.shape()))?;
        ctx.place(id, from, offset, dev)?;
        let whole = ctx.bytes(id)?;
        let mut piece = Vec::new();
        make_room(&mut piece, whole.min(PIECE))?;
        for at in (0..whole).step_by(PIECE) {
            self.cancel.check()?;
            piece.resize(PIECE.min(whole - at), 0);
            ctx.read_part(id, from, at, &mut piece)?;
            to(at, &piece)?;
        }
        Ok(())
    }

    /// Gives `to` a weight in the type it gets in memory, piece by piece, each with its place; all of it if main memory
    /// `keeps` it.
    fn read(
        &self,
        item: &Item,
        keeps: bool,
        mut to: impl FnMut(usize, &[u8]) -> Result<()>,
    ) -> Result<Option<Bytes>> {
        if let Some(bytes) = &item.ready {
            return to(0, bytes).map(|()| None);
        }
        let stored = fetch(&*self.source, &item.weight)?;
        let (from, row) = (item.weight.dtype(), item.weight.shape().last());
        let mut all = Vec::new();
        let mut at = 0;
        for (range, elements) in pieces(item, stored.len()) {
            self.cancel.check()?;
            let piece = stored.slice(range).ok_or_else(|| Error::internal("a piece of a weight"))?.read()?;
            let made = if from == item.dtype {
                piece
            } else {
                let values = to_f32(from, &piece, elements).and_then(|values| from_f32(item.dtype, &values, row));
                Bytes::from(values.map_err(|e| e.context(item.weight.origin().name.clone()))?)
            };
            to(at, &made)?;
            at += made.len();
            if keeps {
                if all.is_empty() {
                    let rows = item.weight.shape();
                    let whole = item.dtype.bytes(rows.elements(), row).unwrap_or(made.len());
                    make_room(&mut all, whole).map_err(|e| e.context(item.weight.name()))?;
                }
                all.extend_from_slice(&made);
            }
        }
        Ok(keeps.then(|| Bytes::from(all)))
    }
}

/// The parts in which a weight of so many bytes is read, with the elements in each: whole rows where it is converted.
fn pieces(item: &Item, len: usize) -> Vec<(std::ops::Range<usize>, usize)> {
    let (shape, from) = (item.weight.shape(), item.weight.dtype());
    let row = shape.last();
    let step = match (from.bytes(row, row), item.dtype.bytes(row, row)) {
        _ if from == item.dtype => PIECE,
        (Some(stored), Some(made)) => stored * (PIECE / made.max(1)).max(1),
        // Blocks span rows.
        _ => len,
    };
    let elements = |bytes: usize| bytes / from.block_bytes() * from.block();
    let parts = (0..len).step_by(step.max(1)).map(|at| at..len.min(at + step));
    parts.map(|r| (r.clone(), elements(r.len()))).collect()
}

/// The stored bytes of a weight.
pub(super) fn fetch(source: &dyn WeightSource, weight: &Weight) -> Result<Bytes> {
    let bytes = source.bytes(weight.name())?;
    let shape = weight.shape();
    // Blocks may span rows, as where a converter quantised a kernel as if it were flat.
    let want = weight.dtype().bytes(shape.elements(), shape.elements());
    if want != Some(bytes.len()) {
        let o = weight.origin();
        return Err(Error::bad_file(
            &o.file,
            format!("{} has {} bytes, {shape} {} takes {want:?}", o.name, bytes.len(), weight.dtype()),
        ));
    }
    Ok(bytes)
}

/// Whether bytes can be computed with where they are.
fn in_place(dtype: DType, bytes: &Bytes) -> bool {
    // Scales of blocks are 16 or 32 bits wide; an element is as wide as its block.
    let align = if dtype.is_quantised() { 4 } else { dtype.block_bytes() };
    !bytes.is_empty() && (bytes.as_ptr() as usize).is_multiple_of(align)
}
