//! The only unsafe calls of this crate.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;

use std::ops::Range;

use memmap2::Mmap;
use sd_core::Advice;

/// Maps a whole file for reading.
///
/// A file that another program truncates while it is mapped raises SIGBUS when the lost pages are touched. The
/// reader compares lengths before it hands out a slice, and what copies weights to a device reads them through the file
/// ([`sd_core::Mapped::read`]), where a lost page is an error. What remains is computing on the CPU with weights where
/// they are mapped; reading without a map ([`crate::Access::Read`]) closes that too.
pub(crate) fn map(file: &File) -> io::Result<Mmap> {
    // SAFETY: the map is read-only, and its bytes are only ever viewed as `[u8]`, for which every value is valid.
    // That nobody changes the file meanwhile is the promise every program that maps model files relies on; the
    // bytes decide numbers in a picture and never lengths or indices, which come from a header read separately.
    unsafe { Mmap::map(file) }
}

/// Tells the system what is going to happen to part of a map. It is advice: where it cannot be given nothing changes.
pub(crate) fn advise(map: &Mmap, range: Range<usize>, advice: Advice) {
    if range.end > map.len() || range.is_empty() {
        return;
    }
    #[cfg(unix)]
    let given = match advice {
        Advice::WillNeed => map.advise_range(memmap2::Advice::WillNeed, range.start, range.len()),
        Advice::Cold => {
            // SAFETY: pages of a read-only map of a file that are let go are read from the file again when they are
            // touched, so that its bytes stay what they are.
            unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, range.start, range.len()) }
        }
    };
    #[cfg(not(unix))]
    let given = io::Result::<()>::Ok(drop(advice));
    if let Err(e) = given {
        tracing::trace!("no advice about a map: {e}");
    }
}
