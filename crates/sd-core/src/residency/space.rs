//! A run of device memory, whatever the device.

use std::sync::Arc;

use crate::device::{Cells, Device};
use crate::error::{Error, Result};
use crate::ffi::Buffer;

/// Memory on a device. Clones are the same memory, which is freed with the last of them.
#[derive(Clone)]
pub(crate) enum Space {
    /// ggml's.
    Ggml(Arc<Buffer>),
    /// That of a pretend device.
    Noop(Arc<Cells>),
}

/// Where something lies, from which byte on.
pub(crate) type Place = (Space, usize);

impl Space {
    /// `size` bytes on `device`.
    pub(crate) fn alloc(device: &Device, size: usize) -> Result<Space> {
        match device.noop_device() {
            Some(noop) => noop.alloc(size).map(|c| Space::Noop(Arc::new(c))),
            None => Buffer::alloc(device.ggml()?, size).map(|b| Space::Ggml(Arc::new(b))),
        }
    }

    /// Bytes.
    pub(crate) fn size(&self) -> usize {
        match self {
            Space::Ggml(b) => b.size(),
            Space::Noop(c) => c.size(),
        }
    }

    /// What tells it from all others.
    pub(crate) fn serial(&self) -> u64 {
        match self {
            Space::Ggml(b) => b.serial(),
            Space::Noop(c) => c.serial(),
        }
    }

    /// ggml's buffer.
    pub(crate) fn ggml(&self) -> Result<&Arc<Buffer>> {
        match self {
            Space::Ggml(b) => Ok(b),
            Space::Noop(_) => Err(Error::internal("a pretend device has no buffers")),
        }
    }

    /// The memory of a pretend device.
    pub(crate) fn noop(&self) -> Result<&Arc<Cells>> {
        match self {
            Space::Noop(c) => Ok(c),
            Space::Ggml(_) => Err(Error::internal("memory of a real device")),
        }
    }
}

impl std::fmt::Debug for Space {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", self.size())
    }
}
