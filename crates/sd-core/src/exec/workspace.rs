//! Device memory that is kept between runs and grows when a run needs more.

use std::sync::Arc;

use crate::error::Result;
use crate::ffi::{Buffer, Dev};

/// One buffer, reused by whoever runs next.
#[derive(Default)]
pub(super) struct Arena {
    buffer: Option<Arc<Buffer>>,
}

impl Arena {
    /// A buffer of at least `size` bytes. What an earlier one held is lost when it has to grow.
    pub(super) fn get(&mut self, dev: Dev, size: usize) -> Result<Arc<Buffer>> {
        match &self.buffer {
            Some(b) if b.size() >= size => Ok(b.clone()),
            _ => {
                // The old one goes first: both may not fit.
                self.buffer = None;
                let b = Arc::new(Buffer::alloc(dev, size)?);
                self.buffer = Some(b.clone());
                Ok(b)
            }
        }
    }

    /// Bytes held.
    pub(super) fn size(&self) -> usize {
        self.buffer.as_ref().map_or(0, |b| b.size())
    }

    /// Frees the buffer.
    pub(super) fn clear(&mut self) {
        self.buffer = None;
    }
}
