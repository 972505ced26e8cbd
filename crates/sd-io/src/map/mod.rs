//! Maps of files: the only unsafe calls of this crate.

#![allow(unsafe_code)]

#[cfg(unix)]
mod lost;

use std::fs::File;
use std::io;
use std::ops::Range;

use memmap2::Mmap;
use sd_core::Advice;

/// A whole file, mapped for reading.
///
/// Whoever looks at bytes of a map that its file has no more, as another program cut it, or the disk failed, gets zeros
/// from there to the end of the map, and [`Map::is_lost`] holds from then on. So what is looked at in place, as the CPU's
/// kernels do, is asked about afterwards; everything else reads through the file ([`sd_core::Mapped::read`]), where a
/// lost page is an error.
pub(crate) struct Map {
    /// Goes before the memory it watches.
    #[cfg(unix)]
    watched: lost::Watched,
    map: Mmap,
}

impl Map {
    /// Maps all of `file`.
    pub(crate) fn new(file: &File) -> io::Result<Map> {
        // SAFETY: the map is read-only, and its bytes are only ever viewed as `[u8]`, for which every value is valid.
        // That nobody changes the file meanwhile is the promise every program that maps model files relies on; the
        // bytes decide numbers in a picture and never lengths or indices, which come from a header read separately.
        let map = unsafe { Mmap::map(file) }?;
        Ok(Map {
            #[cfg(unix)]
            watched: lost::watch(&map)?,
            map,
        })
    }

    /// Its bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Whether somebody looked at bytes that the file does not have. Other systems than Unix cut no file that is mapped.
    pub(crate) fn is_lost(&self) -> bool {
        #[cfg(unix)]
        let lost = self.watched.is_lost();
        #[cfg(not(unix))]
        let lost = false;
        lost
    }

    /// Tells the system what is going to happen to part of it. It is advice: where it cannot be given nothing changes.
    pub(crate) fn advise(&self, range: Range<usize>, advice: Advice) {
        let map = &self.map;
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
}
