//! A flag with which one thread asks a computation on another to stop.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A shared request to stop. Clones refer to the same request; once cancelled it stays so.
#[derive(Debug, Clone, Default)]
pub struct CancelToken(Arc<AtomicBool>);

impl CancelToken {
    /// A token nobody has cancelled.
    pub fn new() -> CancelToken {
        CancelToken::default()
    }

    /// Asks every holder of this token to stop.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether somebody asked to stop.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// An error if somebody asked to stop.
    ///
    /// # Errors
    /// [`crate::Error::cancelled`] after [`CancelToken::cancel`].
    pub fn check(&self) -> crate::Result<()> {
        if self.is_cancelled() { Err(crate::Error::cancelled()) } else { Ok(()) }
    }

    /// The flag itself, for callbacks from C.
    pub(crate) fn flag(&self) -> &Arc<AtomicBool> {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clones_share_the_request() {
        let a = CancelToken::new();
        let b = a.clone();
        assert!(b.check().is_ok());
        a.cancel();
        assert!(b.is_cancelled());
        assert!(b.check().unwrap_err().is_cancelled());
    }
}
