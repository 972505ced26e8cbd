//! Memory for tests that ends where reading ends the process.

use std::ffi::{c_int, c_void};

unsafe extern "C" {
    fn mmap(at: *mut c_void, len: usize, protection: c_int, flags: c_int, file: c_int, offset: i64) -> *mut c_void;
    fn mprotect(at: *mut c_void, len: usize, protection: c_int) -> c_int;
    fn munmap(at: *mut c_void, len: usize) -> c_int;
}

const READ_WRITE: c_int = 3;
const NONE: c_int = 0;
/// `MAP_PRIVATE | MAP_ANONYMOUS` on Linux.
const FRESH: c_int = 0x22;
/// At least the size of a page, on every machine.
const PAGE: usize = 1 << 16;

/// A copy of bytes directly before a page that cannot be read.
pub(super) struct Guarded {
    map: *mut c_void,
    len: usize,
    first: *const u8,
}

impl Guarded {
    pub(super) fn new(bytes: &[u8]) -> Guarded {
        let len = bytes.len().next_multiple_of(PAGE);
        // SAFETY: a fresh map of `len` bytes and a page, whose last `bytes.len()` before the page are written.
        unsafe {
            let map = mmap(std::ptr::null_mut(), len + PAGE, READ_WRITE, FRESH, -1, 0);
            assert_ne!(map as isize, -1);
            assert_eq!(mprotect(map.wrapping_byte_add(len), PAGE, NONE), 0);
            let first = map.cast::<u8>().wrapping_add(len - bytes.len());
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), first, bytes.len());
            Guarded { map, len: len + PAGE, first }
        }
    }

    pub(super) fn address(&self) -> usize {
        self.first as usize
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: the map is this one's.
        unsafe { munmap(self.map, self.len) };
    }
}
