//! The weights of one network on one device: in place where they are mapped and fit, else converted and uploaded.

use std::collections::HashMap;
use std::sync::Arc;

use crate::cancel::CancelToken;
use crate::convert::{from_f32, to_f32};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::ffi::{Buffer, Context, Dev};
use crate::lower::ne;
use crate::scope::Weight;
use crate::tensor::{Bytes, Tensor, WeightSource};

/// A weight in device memory.
#[derive(Clone)]
pub(crate) struct Resident {
    /// The memory it lies in, with others.
    pub(crate) buffer: Arc<Buffer>,
    /// Where it begins.
    pub(crate) offset: usize,
}

/// Weights that are on a device now.
pub(crate) struct Store {
    device: Arc<Device>,
    source: Arc<dyn WeightSource>,
    resident: HashMap<(String, DType), Resident>,
}

/// A weight about to be uploaded.
struct Upload<'a> {
    weight: &'a Weight,
    dtype: DType,
}

impl Store {
    pub(crate) fn new(device: Arc<Device>, source: Arc<dyn WeightSource>) -> Store {
        Store { device, source, resident: HashMap::new() }
    }

    pub(crate) fn set_source(&mut self, source: Arc<dyn WeightSource>, keep: impl Fn(&str) -> bool) {
        self.source = source;
        self.resident.retain(|(name, _), _| keep(name));
    }

    /// Bytes of device memory that weights take, those used in place not counted.
    pub(crate) fn bytes(&self) -> usize {
        let mut buffers: Vec<&Arc<Buffer>> = self.resident.values().map(|r| &r.buffer).collect();
        buffers.sort_unstable_by_key(|b| b.serial());
        buffers.dedup_by_key(|b| b.serial());
        buffers.iter().filter(|b| !b.is_read_only()).map(|b| b.size()).sum()
    }

    /// Frees every weight that is not in use.
    pub(crate) fn clear(&mut self) {
        self.resident.clear();
    }

    /// Makes `wanted`, each in the type given, resident; in their order. Stops between two weights if `cancel` was
    /// cancelled.
    pub(crate) fn ensure(&mut self, wanted: &[(&Weight, DType)], cancel: &CancelToken) -> Result<Vec<Resident>> {
        let dev = self.device.ggml()?;
        let on_host = self.device.kind() == crate::device::DeviceKind::Cpu;
        let mut uploads: Vec<Upload> = Vec::new();
        for &(weight, dtype) in wanted {
            let key = (weight.name().to_string(), dtype);
            if self.resident.contains_key(&key)
                || uploads.iter().any(|u| u.weight.name() == key.0 && u.dtype == dtype)
            {
                continue;
            }
            cancel.check()?;
            if on_host && dtype == weight.dtype() {
                let bytes = self.fetch(weight)?;
                if in_place(dtype, &bytes) {
                    let buffer = Buffer::lend(bytes)?;
                    buffer.mark_weights();
                    self.resident.insert(key, Resident { buffer: Arc::new(buffer), offset: 0 });
                    continue;
                }
            }
            uploads.push(Upload { weight, dtype });
        }
        self.upload(dev, &uploads, cancel)?;
        wanted
            .iter()
            .map(|(w, dtype)| {
                let r = self.resident.get(&(w.name().to_string(), *dtype));
                r.cloned().ok_or_else(|| Error::internal(format!("{} was not loaded", w.name())))
            })
            .collect()
    }

    /// A weight as a host tensor.
    pub(crate) fn value(&self, weight: &Weight) -> Result<Tensor> {
        let bytes = self.fetch(weight)?;
        Tensor::f32(weight.shape().dims(), to_f32(weight.dtype(), &bytes, weight.shape().elements())?)
    }

    fn fetch(&self, weight: &Weight) -> Result<Bytes> {
        let bytes = self.source.bytes(weight.name())?;
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

    /// Uploads into as few buffers as the device's limit on their size allows. Weights are read one after the other, as
    /// sources that compute them give each memory of its own.
    fn upload(&mut self, dev: Dev, uploads: &[Upload], cancel: &CancelToken) -> Result<()> {
        let mut ctx = Context::new();
        let (align, limit) = (dev.alignment(), dev.max_buffer());
        let mut start = 0;
        while start < uploads.len() {
            let mut places = Vec::new();
            let mut size = 0usize;
            for u in &uploads[start..] {
                let id = ctx.leaf(u.dtype, ne(&u.weight.shape()))?;
                let end = size + ctx.alloc_size(id, dev)?.next_multiple_of(align);
                if end > limit && !places.is_empty() {
                    break;
                }
                places.push((id, size));
                size = end;
            }
            let buffer = Arc::new(Buffer::alloc(dev, size)?);
            buffer.mark_weights();
            let batch = &uploads[start..start + places.len()];
            for (u, &(id, offset)) in batch.iter().zip(&places) {
                cancel.check()?;
                ctx.place(id, &buffer, offset, dev)?;
                let stored = self.fetch(u.weight)?;
                let named = |e: Error| e.context(u.weight.origin().name.clone());
                match converted(u.weight, u.dtype, &stored).map_err(named)? {
                    Some(bytes) => ctx.write(id, &buffer, &bytes)?,
                    None => ctx.write(id, &buffer, &stored)?,
                }
            }
            for (u, &(_, offset)) in batch.iter().zip(&places) {
                let r = Resident { buffer: buffer.clone(), offset };
                self.resident.insert((u.weight.name().to_string(), u.dtype), r);
            }
            start += places.len();
        }
        Ok(())
    }
}

/// Whether bytes can be computed with where they are.
fn in_place(dtype: DType, bytes: &Bytes) -> bool {
    // Scales of blocks are 16 or 32 bits wide; an element is as wide as its block.
    let align = if dtype.is_quantised() { 4 } else { dtype.block_bytes() };
    !bytes.is_empty() && (bytes.as_ptr() as usize).is_multiple_of(align)
}

/// The bytes of a weight in another type; `None` if it is stored in that type.
fn converted(weight: &Weight, dtype: DType, bytes: &[u8]) -> Result<Option<Vec<u8>>> {
    if weight.dtype() == dtype {
        return Ok(None);
    }
    let shape = weight.shape();
    let values = to_f32(weight.dtype(), bytes, shape.elements())?;
    from_f32(dtype, &values, shape.last()).map(Some)
}
