//! Matrices of any stored type, converted and reordered tile by tile, as words of terms (see [`super::Tile`]).

use std::ops::Range;

use super::blocks::is_own;
use super::integers::{IntegerDots, Terms};
use super::{DEPTH, GROUP, Isa, MAX_COLUMNS};
use crate::dtype::DType;
use crate::ffi::types::{self, Decoder};

/// Elements from one converted row to the next: not a power of two, so that rows do not compete for the same part of
/// the cache.
const ROW: usize = DEPTH + 16;

/// Elements that conversion needs room for.
pub(super) const ROOM: usize = MAX_COLUMNS * ROW;

/// Bytes from what is read to what is asked for, where every byte is read once.
pub(super) const AHEAD: usize = 1536;

/// What stands for rows that a panel has room for and the matrix lacks.
static ZEROS: [f32; DEPTH] = [0.0; DEPTH];

/// Whether kernels can read a matrix stored as `dtype`.
pub(crate) fn can_read(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
        || is_own(dtype)
        || (dtype.is_quantised() && decoder(dtype).is_some())
}

fn decoder(dtype: DType) -> Option<Decoder> {
    types::decoder(dtype)
}

/// Asks for memory that is read soon; it need not exist.
pub(super) fn ahead(from: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    for at in (0..bytes).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch of any address has no effect that a program sees.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(at).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (from, bytes);
}

/// Rows of `len` f32, at most [`MAX_COLUMNS`] of them, as a panel `[words of terms][width]`.
///
/// # Safety
/// The machine has `isa`; the rows exist, `to` is valid for as many writes, and `room` for [`ROOM`].
pub(super) unsafe fn pack(isa: &Isa, rows: &[*const f32], len: usize, width: usize, to: *mut f32, room: *mut f32) {
    let Some(narrow) = &isa.narrow else {
        // SAFETY: as the caller promises.
        return unsafe { (isa.transpose)(rows, len, to, width) };
    };
    for first in (0..len).step_by(DEPTH) {
        let some = DEPTH.min(len - first);
        let mut from = [ZEROS.as_ptr(); MAX_COLUMNS];
        // SAFETY: as the caller promises; `room` has room for a row of `DEPTH` for each of them.
        unsafe {
            for (i, (p, row)) in from.iter_mut().zip(rows).enumerate() {
                let words = room.wrapping_add(i * ROW);
                (narrow.row)(row.wrapping_add(first), some, words);
                *p = words;
            }
            let to = to.wrapping_add(isa.words(first) * width);
            (isa.transpose)(&from[..rows.len().min(MAX_COLUMNS)], isa.words(some), to, width);
        }
    }
}

/// Rows of stored elements, one after another.
#[derive(Clone, Copy)]
pub(super) struct Matrix {
    dtype: DType,
    data: *const u8,
    /// Bytes of a row.
    row: usize,
    /// Elements and bytes of a block.
    block: [usize; 2],
    decode: Option<Decoder>,
}

impl Matrix {
    /// Rows of `k` elements at `data`.
    pub(super) fn new(dtype: DType, data: *const u8, k: usize) -> Matrix {
        let block = [dtype.block(), dtype.block_bytes()];
        Matrix { dtype, data, row: k / block[0] * block[1], block, decode: decoder(dtype) }
    }

    /// A panel `[words of terms][width]` of `rows`, then zeros.
    ///
    /// # Safety
    /// As for [`Matrix::rows`]; `width` is at most [`MAX_COLUMNS`] and `to` is valid for as many writes.
    pub(super) unsafe fn pack(
        &self,
        isa: &Isa,
        rows: Range<usize>,
        width: usize,
        terms: Range<usize>,
        to: *mut f32,
        room: *mut f32,
    ) {
        let len = isa.words(terms.len());
        // SAFETY: as the caller promises; each row is valid for `len` reads: stored, converted or zeros.
        unsafe {
            let from = self.rows(isa, rows, terms, room);
            (isa.transpose)(&from[..width.min(MAX_COLUMNS)], len, to, width);
        }
    }

    /// Where `terms` of each of `rows` are as words, converted into `room` unless they are stored so; then zeros.
    ///
    /// # Safety
    /// The machine has `isa`. The rows exist, at most [`MAX_COLUMNS`] of them, with `terms`, which start at a multiple
    /// of [`DEPTH`] and are at most as many. `room` is valid for [`ROOM`] writes.
    pub(super) unsafe fn rows(
        &self,
        isa: &Isa,
        rows: Range<usize>,
        terms: Range<usize>,
        room: *mut f32,
    ) -> [*const f32; MAX_COLUMNS] {
        let len = terms.len();
        let start = self.row_bytes(terms.start);
        let as_stored = match isa.narrow {
            Some(_) => self.dtype == DType::BF16 && len.is_multiple_of(2),
            None => self.dtype == DType::F32,
        };
        let mut from = [ZEROS.as_ptr(); MAX_COLUMNS];
        for (i, (p, row)) in from.iter_mut().zip(rows).enumerate() {
            let stored = self.data.wrapping_add(row * self.row + start);
            // Rows are read in short pieces far apart, which processors do not foresee.
            ahead(stored.wrapping_add(self.row_bytes(len)), self.row_bytes(len));
            *p = if as_stored {
                stored.cast()
            } else {
                let values = room.wrapping_add(i * ROW);
                // SAFETY: the row has `len` elements from `start`, in whole blocks; `values` has room for `DEPTH`.
                unsafe { self.read_words(isa, stored, len, values) };
                values
            };
        }
        from
    }

    /// Where `terms` of each of `rows` are as f32, converted into `room` unless they are stored so; then zeros. Callers
    /// go through each row from first to last, then through the next [`GROUP`] rows.
    ///
    /// # Safety
    /// As for [`Matrix::rows`], of at most [`GROUP`] rows, with an `isa` whose factors are f32.
    pub(super) unsafe fn group(
        &self,
        isa: &Isa,
        rows: Range<usize>,
        terms: Range<usize>,
        room: *mut f32,
    ) -> [*const f32; GROUP] {
        let (start, bytes) = (self.row_bytes(terms.start), self.row_bytes(terms.len()));
        let mut from = [ZEROS.as_ptr(); GROUP];
        for (i, (p, row)) in from.iter_mut().zip(rows).enumerate() {
            let stored = self.data.wrapping_add(row * self.row + start);
            self.ahead(stored, start, bytes);
            *p = if self.dtype == DType::F32 {
                stored.cast()
            } else {
                let values = room.wrapping_add(i * ROW);
                // SAFETY: the row has the terms, in whole blocks; `values` has room for `DEPTH`.
                unsafe { self.read(isa, stored, terms.len(), values) };
                values
            };
        }
        from
    }

    /// Products of rows of `x` with the rows of this matrix from `first` on, which has `count` of them.
    ///
    /// # Safety
    /// As for [`IntegerDots`], of a type that is stored as integers.
    pub(super) unsafe fn integer_dots(
        &self,
        isa: &Isa,
        [first, count]: [usize; 2],
        [rows, k]: [usize; 2],
        x: *const Terms,
        sums: *mut f32,
    ) {
        let d = IntegerDots {
            rows,
            x,
            k,
            dtype: self.dtype,
            w: self.data.wrapping_add(first * self.row),
            columns: GROUP.min(count - first),
            stride: self.row,
            bytes: self.row_bytes(DEPTH),
            sums,
        };
        // SAFETY: as the caller promises.
        unsafe { (isa.integer_dots)(&d) }
    }

    /// Asks for what is read a little later than `bytes` at `stored`, which begin at `start` of a row in a group.
    fn ahead(&self, stored: *const u8, start: usize, bytes: usize) {
        // What follows the end of this row in its place is a row of the next group.
        let skip = if start + AHEAD < self.row { 0 } else { (GROUP - 1) * self.row };
        ahead(stored.wrapping_add(AHEAD + skip), bytes);
    }

    /// `terms` of `row` as f32.
    ///
    /// # Safety
    /// The machine has `isa`; the row has the terms, in whole blocks, and `to` is valid for as many writes.
    pub(super) unsafe fn read_row(&self, isa: &Isa, row: usize, terms: Range<usize>, to: *mut f32) {
        let from = self.data.wrapping_add(row * self.row + self.row_bytes(terms.start));
        // SAFETY: as the caller promises.
        unsafe {
            match self.dtype {
                DType::F32 => std::ptr::copy_nonoverlapping(from, to.cast::<u8>(), 4 * terms.len()),
                _ => self.read(isa, from, terms.len(), to),
            }
        }
    }

    /// As [`Matrix::read`], as words; `to` is valid for [`DEPTH`] writes.
    ///
    /// # Safety
    /// As for [`Matrix::read`].
    unsafe fn read_words(&self, isa: &Isa, from: *const u8, len: usize, to: *mut f32) {
        // SAFETY: as the caller promises.
        unsafe {
            match (&isa.narrow, self.dtype) {
                (None, _) => self.read(isa, from, len, to),
                (Some(n), DType::F32) => (n.row)(from.cast(), len, to),
                (Some(n), DType::F16) => (n.halves)(from, len, to),
                (Some(_), DType::BF16) => {
                    std::ptr::copy_nonoverlapping(from, to.cast::<u8>(), 2 * len);
                    std::ptr::write_bytes(to.cast::<u8>().wrapping_add(2 * len), 0, 2 * (len % 2));
                }
                (Some(n), _) => {
                    self.read(isa, from, len, to);
                    (n.row)(to, len, to);
                }
            }
        }
    }

    /// Bytes of `len` elements of a row.
    fn row_bytes(&self, len: usize) -> usize {
        len / self.block[0] * self.block[1]
    }

    /// # Safety
    /// `from` is valid for `len` stored elements in whole blocks, `to` for as many writes.
    unsafe fn read(&self, isa: &Isa, from: *const u8, len: usize, to: *mut f32) {
        // SAFETY: as the caller promises; decoders read whole blocks.
        unsafe {
            match (self.dtype, self.decode) {
                (DType::F16, _) => (isa.halves)(from, len, to),
                _ if (isa.decode)(self.dtype, from, len, to) => {}
                (_, Some(decode)) => decode(from.cast(), to, len as i64),
                // `can_read` was asked before.
                (_, None) => std::slice::from_raw_parts_mut(to, len).fill(f32::NAN),
            }
        }
    }
}
