//! A run of device memory, whatever the device.

use std::sync::Arc;

use crate::device::Device;
use crate::error::Result;
use crate::ffi::Buffer;

/// Memory on a device. Clones are the same memory, which is freed with the last of them.
#[derive(Clone)]
pub(crate) enum Space {
    /// ggml's.
    Ggml(Arc<Buffer>),
}

impl Space {
    /// `size` bytes on `device`.
    pub(crate) fn alloc(device: &Device, size: usize) -> Result<Space> {
        Buffer::alloc(device.ggml()?, size).map(|b| Space::Ggml(Arc::new(b)))
    }

    /// Bytes.
    pub(crate) fn size(&self) -> usize {
        match self {
            Space::Ggml(b) => b.size(),
        }
    }

    /// What tells it from all others.
    pub(crate) fn serial(&self) -> u64 {
        match self {
            Space::Ggml(b) => b.serial(),
        }
    }

    /// ggml's buffer.
    pub(crate) fn ggml(&self) -> Result<&Arc<Buffer>> {
        match self {
            Space::Ggml(b) => Ok(b),
        }
    }
}

impl std::fmt::Debug for Space {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", self.size())
    }
}
