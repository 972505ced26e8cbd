//! Products of few rows with quantised weights: rows become 16-bit integers with a factor for each [`PART`], which products with
//! the integers of the weights sum exactly. Every instruction set gives the same result.

use super::pack::{AHEAD, ahead};
use super::quants;
use super::vector::{MAX_LANES, Vector};
use super::{DEPTH, GROUP};
use crate::dtype::DType;

/// Terms that share a factor.
pub(super) const PART: usize = 16;

/// Parts of a block of terms, which are the lanes of its sums.
pub(super) const PARTS: usize = DEPTH / PART;

/// The largest integer that a value becomes.
const LARGEST: f32 = 32767.0;

/// Below this, all values of a part count as zero: its factor and that factor's inverse would leave the range of f32.
const SMALLEST: f32 = 1e-30;

/// A block of terms as integers with a factor and an offset for each part. Terms of a matrix are `factor q - offset`; those of
/// rows are `factor q`, and instead of offsets there are the sums of the integers.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Terms {
    /// Pairs of terms that an instruction multiplies and adds, where [`place`] says.
    pub(super) q: [i16; DEPTH],
    /// In the order of [`lane`].
    pub(super) factors: [f32; PARTS],
    pub(super) offsets: [f32; PARTS],
}

impl Terms {
    pub(super) const ZERO: Terms = Terms { q: [0; DEPTH], factors: [0.0; PARTS], offsets: [0.0; PARTS] };
}

/// The place of a part among sums: of eight, even ones, then odd ones.
pub(super) const fn lane(part: usize) -> usize {
    part / 8 * 8 + part % 8 / 2 + part % 2 * 4
}

/// The place of a term of a part in [`Terms::q`]. Of four neighbours, which are a word of 32 bits in a matrix, the first and
/// third make a pair, and after those of all parts the second and fourth do.
pub(super) const fn place(part: usize, term: usize) -> usize {
    (term / 4 * 2 + term % 2) * 2 * PARTS + 2 * lane(part) + term % 4 / 2
}

/// Rows of `x` times [`GROUP`] rows of a matrix, lane by lane.
pub(super) struct IntegerDots {
    pub(super) rows: usize,
    /// `[rows][blocks]`.
    pub(super) x: *const Terms,
    /// Terms of a row.
    pub(super) k: usize,
    /// How the matrix is stored.
    pub(super) dtype: DType,
    /// Its first row.
    pub(super) w: *const u8,
    /// Rows of it that exist, at most [`GROUP`].
    pub(super) columns: usize,
    /// Bytes from one to the next.
    pub(super) stride: usize,
    /// Bytes of a block.
    pub(super) bytes: usize,
    /// The result, `[rows][GROUP][PARTS]`.
    pub(super) sums: *mut f32,
}

/// Registers of 32 16-bit integers, and of their products' 16 sums.
///
/// # Safety
/// As for [`Vector`].
pub(super) trait Integers {
    type V: Vector;
    type Bytes: Bytes;
    type Terms: Copy;
    type Sums: Copy;

    unsafe fn load(from: *const i16) -> Self::Terms;
    unsafe fn zero() -> Self::Sums;
    /// The products of neighbours, added to their sum.
    unsafe fn dot(sums: Self::Sums, x: Self::Terms, w: Self::Terms) -> Self::Sums;
    /// A register of sums from lane `first` on.
    unsafe fn floats(sums: Self::Sums, first: usize) -> Self::V;
    /// Integers from 0 to 255 of [`DEPTH`] terms one after another as [`Terms::q`].
    unsafe fn spread(from: [Self::Bytes; 4], to: &mut [i16; DEPTH]);
}

/// 64 bytes: four times 16.
///
/// # Safety
/// As for [`Vector`].
pub(super) trait Bytes: Copy {
    /// 32 of each.
    unsafe fn two(a: *const u8, b: *const u8) -> Self;
    /// 16 of each twice.
    unsafe fn twins(a: *const u8, b: *const u8) -> Self;
    /// 255 where a bit is set, else 0.
    unsafe fn bits(bits: u64) -> Self;
    unsafe fn words(words: [u64; 8]) -> Self;
    /// With the other sign where a bit is set.
    unsafe fn negated(self, bits: u64) -> Self;
    unsafe fn store(self, to: &mut [i8; 64]);
    /// Words of 32 bits shifted to the right, each 16 bytes by another number.
    unsafe fn right<const A: i32, const B: i32, const C: i32, const D: i32>(self) -> Self;
    /// Likewise to the left.
    unsafe fn left<const A: i32, const B: i32, const C: i32, const D: i32>(self) -> Self;
    unsafe fn and(self, mask: u8) -> Self;
    /// 255 where a bit is set that each 16 bytes have another of, else 0.
    unsafe fn has(self, bits: [u8; 4]) -> Self;
    unsafe fn or(self, b: Self) -> Self;
    unsafe fn less(self, by: u8) -> Self;
    /// Entries of a table.
    unsafe fn of(self, table: &[u8; 16]) -> Self;
    /// An f16.
    unsafe fn half(from: *const u8) -> f32;
    /// f16 of eight pairs of parts, as those of lanes.
    unsafe fn halves(from: [*const u8; 8], to: &mut [f32; PARTS]);
    /// Factors times an integer.
    unsafe fn times(factors: &[f32; PARTS], by: u8, to: &mut [f32; PARTS]);
    /// Codes of eight pairs of parts times a factor, as those of lanes.
    unsafe fn pairs(codes: u64, by: f32, to: &mut [f32; PARTS]);
    /// Codes of parts in their order times a factor, as those of lanes.
    unsafe fn codes(codes: u128, by: f32, to: &mut [f32; PARTS]);
}

/// # Safety
/// The machine has the instruction set of `I`; `d` describes valid memory.
#[inline(always)]
pub(super) unsafe fn dots<I: Integers>(d: &IntegerDots) {
    let mut w = [Terms::ZERO; GROUP];
    // SAFETY: as the caller promises.
    unsafe {
        std::slice::from_raw_parts_mut(d.sums, d.rows * GROUP * PARTS).fill(0.0);
        for block in 0..d.k.div_ceil(DEPTH) {
            let len = DEPTH.min(d.k - block * DEPTH);
            let start = block * d.bytes;
            // What follows the end of a row in its place is a row of the next group.
            let skip = if start + AHEAD < d.stride { AHEAD } else { AHEAD + (GROUP - 1) * d.stride };
            for (i, w) in w.iter_mut().enumerate().take(d.columns) {
                let stored = d.w.wrapping_add(i * d.stride + start);
                ahead(stored.wrapping_add(skip), d.bytes);
                quants::integers::<I>(d.dtype, stored, len, w);
            }
            add::<I>(d, block, &w);
        }
    }
}

/// Adds a block's products to the sums.
///
/// # Safety
/// As for [`dots`].
#[inline(always)]
unsafe fn add<I: Integers>(d: &IntegerDots, block: usize, w: &[Terms; GROUP]) {
    let lanes = I::V::LANES;
    let mut row = 0;
    // As many sums at a time as registers hold; each is the same whatever is beside it.
    // SAFETY: as the caller promises; the rows exist.
    unsafe {
        while lanes == MAX_LANES && row + 4 <= d.rows {
            tile::<I, 4, GROUP>(d, block, row, 0, w);
            row += 4;
        }
        while lanes >= MAX_LANES / 2 && row + 2 <= d.rows {
            tile::<I, 2, 2>(d, block, row, 0, w);
            tile::<I, 2, 2>(d, block, row, 2, w);
            row += 2;
        }
        while row < d.rows {
            if lanes >= MAX_LANES / 2 {
                tile::<I, 1, GROUP>(d, block, row, 0, w);
            } else {
                tile::<I, 1, 2>(d, block, row, 0, w);
                tile::<I, 1, 2>(d, block, row, 2, w);
            }
            row += 1;
        }
    }
}

/// [`add`] for `R` rows and `C` columns.
///
/// # Safety
/// As for [`dots`].
#[inline(always)]
unsafe fn tile<I: Integers, const R: usize, const C: usize>(
    d: &IntegerDots,
    block: usize,
    row: usize,
    column: usize,
    w: &[Terms; GROUP],
) {
    let blocks = d.k.div_ceil(DEPTH);
    // SAFETY: as the caller promises; sums are `[rows][GROUP][PARTS]`.
    unsafe {
        let x: [*const Terms; R] = std::array::from_fn(|r| d.x.wrapping_add((row + r) * blocks + block));
        let w: [*const Terms; C] = std::array::from_fn(|c| w.as_ptr().wrapping_add(column + c));
        let mut sums = [[I::zero(); C]; R];
        for i in (0..DEPTH).step_by(2 * PARTS) {
            let w: [I::Terms; C] = std::array::from_fn(|c| I::load((*w[c]).q.as_ptr().wrapping_add(i)));
            for (x, sums) in x.iter().zip(&mut sums) {
                let x = I::load((**x).q.as_ptr().wrapping_add(i));
                for (sum, w) in sums.iter_mut().zip(w) {
                    *sum = I::dot(*sum, x, w);
                }
            }
        }
        for (r, (x, sums)) in x.iter().zip(sums).enumerate() {
            for (c, (w, sum)) in w.iter().zip(sums).enumerate() {
                let to = d.sums.wrapping_add(((row + r) * GROUP + column + c) * PARTS);
                for lane in (0..PARTS).step_by(I::V::LANES) {
                    let (x, w, to) = (&**x, &**w, to.wrapping_add(lane));
                    let at = |a: &[f32; PARTS]| a.as_ptr().wrapping_add(lane);
                    // Products are rounded before they are added, on every instruction set.
                    let product = I::floats(sum, lane).mul(I::V::load(at(&w.factors)));
                    let offset = I::V::load(at(&x.offsets)).mul(I::V::load(at(&w.offsets)));
                    let product = product.sub(offset).mul(I::V::load(at(&x.factors)));
                    I::V::load(to).add(product).store(to);
                }
            }
        }
    }
}

/// `len` values, at most [`DEPTH`], as integers; what follows them becomes zero. A part with a value that is not finite has
/// NaN for its factor.
///
/// # Safety
/// `from` is valid for `len` reads.
#[inline(always)]
pub(super) unsafe fn quantise(from: *const f32, len: usize, to: &mut Terms) {
    for part in 0..PARTS {
        let mut values = [0.0f32; PART];
        let some = len.saturating_sub(part * PART).min(PART);
        if some > 0 {
            // SAFETY: as the caller promises.
            unsafe { std::ptr::copy_nonoverlapping(from.wrapping_add(part * PART), values.as_mut_ptr(), some) };
        }
        let most = values.iter().fold(0.0, |a: f32, b| if b.abs() > a { b.abs() } else { a });
        // Not a number if one of them is not finite, else zero.
        let poison: f32 = values.map(|v| v * 0.0).iter().sum();
        let (factor, inverse) = if most < SMALLEST { (0.0, 0.0) } else { (most / LARGEST, LARGEST / most) };
        // Added to a number whose unit is in the last place, a value is rounded to the nearest integer.
        let q = values.map(|v| ((v * inverse + UNITS).to_bits().wrapping_sub(UNITS.to_bits())) as i16);
        for (i, &q) in q.iter().enumerate() {
            to.q[place(part, i)] = q;
        }
        to.factors[lane(part)] = factor + poison;
        to.offsets[lane(part)] = q.iter().map(|&q| i32::from(q)).sum::<i32>() as f32;
    }
}

/// 1.5 · 2²³.
const UNITS: f32 = 12_582_912.0;
