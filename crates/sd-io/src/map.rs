//! The only unsafe call of this crate.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;

use memmap2::Mmap;

/// Maps a whole file for reading.
///
/// A file that another program truncates while it is mapped raises SIGBUS when the lost pages are touched. The
/// reader compares lengths before it hands out a slice, which narrows that window and cannot close it; reading
/// without a map ([`crate::Access::Read`]) has no such window.
pub(crate) fn map(file: &File) -> io::Result<Mmap> {
    // SAFETY: the map is read-only, and its bytes are only ever viewed as `[u8]`, for which every value is valid.
    // That nobody changes the file meanwhile is the promise every program that maps model files relies on; the
    // bytes decide numbers in a picture and never lengths or indices, which come from a header read separately.
    unsafe { Mmap::map(file) }
}
