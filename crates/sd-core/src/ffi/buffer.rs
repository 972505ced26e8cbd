//! Memory of a device, and host memory lent to the CPU device.

use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use ggml_sys as sys;

use super::device::Dev;
use crate::error::{Error, Result};
use crate::tensor::Bytes;

/// A run of memory on one device, freed on drop.
pub(crate) struct Buffer {
    raw: NonNull<sys::ggml_backend_buffer>,
    dev: Dev,
    /// Distinguishes buffers even when ggml reuses an address.
    serial: u64,
    /// Address of the first byte a tensor may take, as the device counts.
    start: usize,
    size: usize,
    alignment: usize,
    /// The lent host memory, which must not be written.
    lent: Option<Bytes>,
}

// SAFETY: a backend buffer has no thread affinity; concurrent transfers to one buffer touch disjoint tensors or are
// ordered by the callers' exclusive access to the `Context` whose tensors lie in it.
unsafe impl Send for Buffer {}
// SAFETY: as above; `&Buffer` gives no way to write except through a `Context`.
unsafe impl Sync for Buffer {}

/// The alignment ggml demands of lent memory's first byte.
const HOST_ALIGNMENT: usize = 32;

/// A number that no other buffer has.
pub(crate) fn next_serial() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Bytes that this process has allocated on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) now: usize,
    /// The most since it was last reset.
    pub(crate) peak: usize,
    /// How many allocations succeed before one is refused.
    #[cfg(test)]
    pub(crate) refuse: Option<usize>,
}

fn held() -> MutexGuard<'static, HashMap<Dev, Held>> {
    static HELD: OnceLock<Mutex<HashMap<Dev, Held>>> = OnceLock::new();
    HELD.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

/// What buffers on `dev` take.
pub(crate) fn held_on(dev: Dev) -> Held {
    held().get(&dev).copied().unwrap_or_default()
}

/// Lets the peak of `dev` start from what is held now.
pub(crate) fn reset_peak(dev: Dev) {
    if let Some(h) = held().get_mut(&dev) {
        h.peak = h.now;
    }
}

fn refused(dev: Dev, size: usize) -> Error {
    Error::device(format!("{} could not provide {:.1} MiB", dev.name(), size as f64 / 1048576.0))
}

impl Buffer {
    /// `size` bytes on `dev`.
    pub(crate) fn alloc(dev: Dev, size: usize) -> Result<Buffer> {
        let kind = dev.buffer_type()?;
        let size = size.max(1);
        #[cfg(test)]
        if tests::is_refused(dev) {
            return Err(refused(dev, size));
        }
        // SAFETY: buffer types live as long as the process.
        let (raw, alignment) = unsafe {
            (
                sys::ggml_backend_buft_alloc_buffer(kind.as_ptr(), size),
                sys::ggml_backend_buft_get_alignment(kind.as_ptr()),
            )
        };
        dev.check()?;
        let raw = NonNull::new(raw).ok_or_else(|| refused(dev, size))?;
        // SAFETY: the buffer was just allocated and is owned here.
        let start = unsafe { sys::ggml_backend_buffer_get_base(raw.as_ptr()) } as usize;
        let mut held = held();
        let h = held.entry(dev).or_default();
        h.now += size;
        h.peak = h.peak.max(h.now);
        drop(held);
        Ok(Buffer { raw, dev, serial: next_serial(), start, size, alignment: alignment.max(1), lent: None })
    }

    /// Host memory as a read-only buffer of the CPU device.
    pub(crate) fn lend(bytes: Bytes) -> Result<Buffer> {
        let dev = Dev::cpu()?;
        let address = bytes.as_ptr() as usize;
        let base = address - address % HOST_ALIGNMENT;
        let size = address - base + bytes.len();
        // SAFETY: the base is aligned as ggml demands. The up to 31 bytes before `address` are never touched: a tensor
        // can be placed at `start` or later only, and nothing clears or writes a lent buffer. The memory stays alive
        // and unchanged as long as `lent`.
        let raw = unsafe { sys::ggml_backend_cpu_buffer_from_ptr(base as *mut _, size) };
        let raw = NonNull::new(raw).ok_or_else(|| Error::device("cannot use mapped memory in place"))?;
        Ok(Buffer {
            raw,
            dev,
            serial: next_serial(),
            start: address,
            size: bytes.len(),
            alignment: 1,
            lent: Some(bytes),
        })
    }

    /// The device whose memory it is.
    pub(super) fn dev(&self) -> Dev {
        self.dev
    }

    /// What tells this buffer from every other of the process.
    pub(crate) fn serial(&self) -> u64 {
        self.serial
    }

    /// Bytes that tensors may take.
    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// What offsets of tensors must be multiples of.
    pub(crate) fn alignment(&self) -> usize {
        self.alignment
    }

    /// Address and size if it is memory of this machine.
    pub(crate) fn host(&self) -> Option<(usize, usize)> {
        // SAFETY: the buffer is alive.
        let host = unsafe { sys::ggml_backend_buffer_is_host(self.raw.as_ptr()) };
        host.then_some((self.start, self.size))
    }

    /// Copies elements, or bytes, to `offset`.
    ///
    /// # Errors
    /// It is not memory of this machine, may not be written, or ends before.
    pub(crate) fn write<T: Copy>(&self, offset: usize, from: &[T]) -> Result<()> {
        let at = self.place(offset, size_of_val(from))?;
        if self.is_read_only() {
            return Err(Error::internal("lent memory is not written"));
        }
        // SAFETY: the range lies inside, and callers have the memory for themselves while they write.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr().cast::<u8>(), at as *mut u8, size_of_val(from)) };
        Ok(())
    }

    /// Copies elements from `offset` on.
    ///
    /// # Errors
    /// It is not memory of this machine, or ends before.
    pub(crate) fn read(&self, offset: usize, to: &mut [f32]) -> Result<()> {
        let at = self.place(offset, size_of_val(to))?;
        // SAFETY: the range lies inside, and nobody writes to it while callers read.
        unsafe {
            std::ptr::copy_nonoverlapping(at as *const u8, to.as_mut_ptr().cast::<u8>(), size_of_val(to));
        }
        Ok(())
    }

    fn place(&self, offset: usize, bytes: usize) -> Result<usize> {
        let inside = |&(_, size): &(usize, usize)| offset.checked_add(bytes).is_some_and(|end| end <= size);
        let found = self.host().filter(inside);
        found.map(|(start, _)| start + offset).ok_or_else(|| Error::internal("a copy reaches outside its buffer"))
    }

    /// Whether tensors in it may not be written.
    pub(crate) fn is_read_only(&self) -> bool {
        self.lent.is_some()
    }

    /// Says that it holds weights: devices then keep the padding behind quantised rows clear once and for all.
    pub(crate) fn mark_weights(&self) {
        // SAFETY: the buffer is alive.
        unsafe {
            sys::ggml_backend_buffer_set_usage(self.raw.as_ptr(), sys::GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        }
    }

    pub(super) fn raw(&self) -> *mut sys::ggml_backend_buffer {
        self.raw.as_ptr()
    }

    pub(super) fn start(&self) -> usize {
        self.start
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: the buffer is owned here; no `Context` uses it without holding an `Arc` of it.
        unsafe { sys::ggml_backend_buffer_free(self.raw.as_ptr()) }
        if !self.is_read_only()
            && let Some(h) = held().get_mut(&self.dev)
        {
            h.now = h.now.saturating_sub(self.size);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Lets one allocation on `dev` be refused, after `more` that are not. Whether the one before it was.
    pub(crate) fn refuse(dev: Dev, more: Option<usize>) -> bool {
        let mut held = held();
        let h = held.entry(dev).or_default();
        std::mem::replace(&mut h.refuse, more).is_none()
    }

    pub(super) fn is_refused(dev: Dev) -> bool {
        let mut held = held();
        let Some(h) = held.get_mut(&dev) else { return false };
        let refused = h.refuse == Some(0);
        h.refuse = h.refuse.and_then(|more| more.checked_sub(1));
        refused
    }
}
