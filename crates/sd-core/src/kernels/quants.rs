//! Quantised blocks as `ggml-common.h` lays them out: integers of 8 bits with factors and offsets.

use super::DEPTH;
use super::grids;
use super::integers::{Bytes, Integers, PART, PARTS, Terms, lane};
use super::vector::Vector;
use crate::dtype::DType;

/// Whether the functions here read `dtype`.
pub(super) fn is_integers(dtype: DType) -> bool {
    use DType::{IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS, IQ4_NL, IQ4_XS};
    use DType::{MXFP4, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, TQ2_0};
    let plain = matches!(
        dtype,
        Q8_0 | Q4_0 | Q4_1 | Q5_0 | Q5_1 | IQ4_NL | MXFP4 | Q2K | Q3K | Q4K | Q5K | Q6K | IQ4_XS | TQ2_0
    );
    plain || matches!(dtype, IQ2_XXS | IQ2_XS | IQ2_S | IQ3_XXS | IQ3_S)
}

/// Reads `len` elements at `from`, at most [`DEPTH`], as integers from 0 to 255; the rest become zero. False for types that it
/// does not know.
///
/// # Safety
/// The machine has the instruction set of `I`; `from` is valid for `len` elements in whole blocks.
#[inline(always)]
pub(super) unsafe fn integers<I: Integers>(dtype: DType, from: *const u8, len: usize, to: &mut Terms) -> bool {
    // SAFETY: as the caller promises.
    unsafe {
        let scales = [&mut to.factors, &mut to.offsets];
        let Some((q, _)) = read::<I::Bytes>(dtype, from, len, scales) else { return false };
        I::spread(q, &mut to.q);
    }
    true
}

/// Converts `len` elements at `from`; false for types that it does not know.
///
/// # Safety
/// As for [`integers`]; `to` is valid for `len` writes.
#[inline(always)]
pub(super) unsafe fn floats<I: Integers>(dtype: DType, from: *const u8, len: usize, to: *mut f32) -> bool {
    // Looked up only if there is more than one step.
    let bytes = if len > DEPTH { DEPTH / dtype.block() * dtype.block_bytes() } else { 0 };
    for i in 0..len.div_ceil(DEPTH) {
        let some = DEPTH.min(len - i * DEPTH);
        let (from, to) = (from.wrapping_add(i * bytes), to.wrapping_add(i * DEPTH));
        // SAFETY: as the caller promises; blocks are whole parts, and parts whole registers.
        unsafe {
            let (mut factors, mut offsets) = ([0.0; PARTS], [0.0; PARTS]);
            let scales = [&mut factors, &mut offsets];
            let Some((integers, less)) = read::<I::Bytes>(dtype, from, some, scales) else { return false };
            let mut q = [[0; 64]; 4];
            for (to, integers) in q.iter_mut().zip(integers) {
                integers.less(less).store(to);
            }
            for part in 0..some / PART {
                let factor = I::V::splat(factors[lane(part)]);
                // Integers less than they are need no offset.
                let offset = I::V::splat(if less == 0 { offsets[lane(part)] } else { 0.0 });
                for i in (part * PART..(part + 1) * PART).step_by(I::V::LANES) {
                    let x = I::V::load_bytes(q.as_ptr().cast::<i8>().wrapping_add(i));
                    x.mul(factor).sub(offset).store(to.wrapping_add(i));
                }
            }
        }
    }
    true
}

/// Factors and offsets of lanes.
pub(super) type Scales<'a> = [&'a mut [f32; PARTS]; 2];

/// Integers from 0 to 255 of up to [`DEPTH`] elements `factor q - offset`, the rest of which are zero. Where not all types have
/// offsets, these are `factor less`, and `less` is the second result, otherwise zero.
///
/// # Safety
/// As for [`integers`].
#[inline(always)]
unsafe fn read<B: Bytes>(dtype: DType, from: *const u8, len: usize, scales: Scales) -> Option<([B; 4], u8)> {
    // SAFETY: as the caller promises.
    unsafe {
        Some(match dtype {
            DType::Q8_0 => (several::<Q8_0, B>(from, len, scales), Q8_0::LESS),
            DType::Q4_0 => (several::<Q4_0, B>(from, len, scales), Q4_0::LESS),
            DType::Q4_1 => (several::<Q4_1, B>(from, len, scales), Q4_1::LESS),
            DType::Q5_0 => (several::<Q5_0, B>(from, len, scales), Q5_0::LESS),
            DType::Q5_1 => (several::<Q5_1, B>(from, len, scales), Q5_1::LESS),
            DType::IQ4_NL => (several::<Iq4Nl, B>(from, len, scales), Iq4Nl::LESS),
            DType::MXFP4 => (several::<Mxfp4, B>(from, len, scales), Mxfp4::LESS),
            DType::Q2K => (q2_k(from, scales), 0),
            DType::Q3K => (q3_k(from, scales), 4),
            DType::Q4K => (q4_k(from, scales), 0),
            DType::Q5K => (q5_k(from, scales), 0),
            DType::Q6K => (q6_k(from, scales), 32),
            DType::IQ4_XS => (iq4_xs(from, scales), MIDDLE),
            DType::TQ2_0 => (tq2_0(from, scales), 1),
            _ => (grids::read(dtype, from, scales)?, MIDDLE),
        })
    }
}

/// Blocks of 32 elements.
///
/// # Safety
/// The machine has the instruction set of `B`; pointers lead to blocks.
trait Small {
    const BYTES: usize;
    /// What integers are more than they should be.
    const LESS: u8;
    /// Factors and offsets of the eight blocks from `at` on.
    unsafe fn scales<B: Bytes>(at: *const u8, to: Scales);
    /// The integers of two blocks.
    unsafe fn integers<B: Bytes>(a: *const u8, b: *const u8) -> B;
}

/// # Safety
/// As for [`integers`].
#[inline(always)]
unsafe fn several<S: Small, B: Bytes>(from: *const u8, len: usize, scales: Scales) -> [B; 4] {
    // Blocks of zeros are zeros, of every type.
    let mut padded = [0u8; DEPTH / 32 * 34];
    // SAFETY: as the caller promises; no block has more than 34 bytes.
    unsafe {
        let from = if len < DEPTH {
            std::ptr::copy_nonoverlapping(from, padded.as_mut_ptr(), len / 32 * S::BYTES);
            padded.as_ptr()
        } else {
            from
        };
        let at = |i: usize| from.wrapping_add(i * S::BYTES);
        S::scales::<B>(from, scales);
        [S::integers(at(0), at(1)), S::integers(at(2), at(3)), S::integers(at(4), at(5)), S::integers(at(6), at(7))]
    }
}

/// Where eight blocks of `bytes` have what the first has at `at`.
#[inline(always)]
fn each(at: *const u8, bytes: usize) -> [*const u8; 8] {
    std::array::from_fn(|i| at.wrapping_add(i * bytes))
}

/// An f16 factor and 8-bit integers.
struct Q8_0;

impl Small for Q8_0 {
    const BYTES: usize = 34;
    const LESS: u8 = MIDDLE;

    #[inline(always)]
    unsafe fn scales<B: Bytes>(at: *const u8, [factors, offsets]: Scales) {
        // SAFETY: as the caller promises.
        unsafe {
            B::halves(each(at, Self::BYTES), factors);
            B::times(factors, Self::LESS, offsets);
        }
    }

    #[inline(always)]
    unsafe fn integers<B: Bytes>(a: *const u8, b: *const u8) -> B {
        // SAFETY: as the caller promises.
        unsafe { B::two(a.add(2), b.add(2)).less(MIDDLE) }
    }
}

/// An f16 factor and 4-bit integers less 8.
struct Q4_0;

impl Small for Q4_0 {
    const BYTES: usize = 18;
    const LESS: u8 = 8;

    #[inline(always)]
    unsafe fn scales<B: Bytes>(at: *const u8, [factors, offsets]: Scales) {
        // SAFETY: as the caller promises.
        unsafe {
            B::halves(each(at, Self::BYTES), factors);
            B::times(factors, Self::LESS, offsets);
        }
    }

    #[inline(always)]
    unsafe fn integers<B: Bytes>(a: *const u8, b: *const u8) -> B {
        // SAFETY: as the caller promises.
        unsafe { nibbles(a.add(2), b.add(2)) }
    }
}

/// An f16 factor, an f16 that is added, and 4-bit integers.
struct Q4_1;

impl Small for Q4_1 {
    const BYTES: usize = 20;
    const LESS: u8 = 0;

    #[inline(always)]
    unsafe fn scales<B: Bytes>(at: *const u8, [factors, offsets]: Scales) {
        // SAFETY: as the caller promises.
        unsafe {
            B::halves(each(at, Self::BYTES), factors);
            B::halves(each(at.add(2), Self::BYTES), offsets);
        }
        offsets.iter_mut().for_each(|o| *o = -*o);
    }

    #[inline(always)]
    unsafe fn integers<B: Bytes>(a: *const u8, b: *const u8) -> B {
        // SAFETY: as the caller promises.
        unsafe { nibbles(a.add(4), b.add(4)) }
    }
}

/// An f16 factor, a fifth bit for each element, and 4-bit integers; less 16.
struct Q5_0;

impl Small for Q5_0 {
    const BYTES: usize = 22;
    const LESS: u8 = 16;

    #[inline(always)]
    unsafe fn scales<B: Bytes>(at: *const u8, [factors, offsets]: Scales) {
        // SAFETY: as the caller promises.
        unsafe {
            B::halves(each(at, Self::BYTES), factors);
            B::times(factors, Self::LESS, offsets);
        }
    }

    #[inline(always)]
    unsafe fn integers<B: Bytes>(a: *const u8, b: *const u8) -> B {
        // SAFETY: as the caller promises.
        unsafe { nibbles::<B>(a.add(6), b.add(6)).or(fifth(a.add(2), b.add(2))) }
    }
}

/// An f16 factor, an f16 that is added, a fifth bit for each element, and 4-bit integers.
struct Q5_1;

impl Small for Q5_1 {
    const BYTES: usize = 24;
    const LESS: u8 = 0;

    #[inline(always)]
    unsafe fn scales<B: Bytes>(at: *const u8, [factors, offsets]: Scales) {
        // SAFETY: as the caller promises.
        unsafe {
            B::halves(each(at, Self::BYTES), factors);
            B::halves(each(at.add(2), Self::BYTES), offsets);
        }
        offsets.iter_mut().for_each(|o| *o = -*o);
    }

    #[inline(always)]
    unsafe fn integers<B: Bytes>(a: *const u8, b: *const u8) -> B {
        // SAFETY: as the caller promises.
        unsafe { nibbles::<B>(a.add(8), b.add(8)).or(fifth(a.add(4), b.add(4))) }
    }
}

/// An f16 factor and codes of [`IQ4`].
struct Iq4Nl;

impl Small for Iq4Nl {
    const BYTES: usize = 18;
    const LESS: u8 = MIDDLE;

    #[inline(always)]
    unsafe fn scales<B: Bytes>(at: *const u8, [factors, offsets]: Scales) {
        // SAFETY: as the caller promises.
        unsafe {
            B::halves(each(at, Self::BYTES), factors);
            B::times(factors, Self::LESS, offsets);
        }
    }

    #[inline(always)]
    unsafe fn integers<B: Bytes>(a: *const u8, b: *const u8) -> B {
        // SAFETY: as the caller promises.
        unsafe { nibbles::<B>(a.add(2), b.add(2)).of(&IQ4) }
    }
}

/// The exponent of a factor and codes of [`E2M1`].
struct Mxfp4;

impl Small for Mxfp4 {
    const BYTES: usize = 17;
    const LESS: u8 = MIDDLE;

    #[inline(always)]
    unsafe fn scales<B: Bytes>(at: *const u8, [factors, offsets]: Scales) {
        for (i, at) in each(at, Self::BYTES).into_iter().enumerate() {
            // SAFETY: as the caller promises.
            let factor = half_power(unsafe { *at });
            (factors[lane(2 * i)], factors[lane(2 * i + 1)]) = (factor, factor);
        }
        // SAFETY: as the caller promises.
        unsafe { B::times(factors, Self::LESS, offsets) }
    }

    #[inline(always)]
    unsafe fn integers<B: Bytes>(a: *const u8, b: *const u8) -> B {
        // SAFETY: as the caller promises.
        unsafe { nibbles::<B>(a.add(1), b.add(1)).of(&E2M1) }
    }
}

/// `2^(e - 128)`.
#[inline(always)]
fn half_power(e: u8) -> f32 {
    f32::from_bits(if e < 2 { 0x0020_0000 << e } else { (u32::from(e) - 1) << 23 })
}

/// What integers with a sign are raised by.
pub(super) const MIDDLE: u8 = 128;

const fn raised(values: [i8; 16]) -> [u8; 16] {
    let mut out = [0; 16];
    let mut i = 0;
    while i < 16 {
        out[i] = values[i].cast_unsigned() ^ MIDDLE;
        i += 1;
    }
    out
}

/// Twice the values of 4-bit floats (E2M1).
const E2M1: [u8; 16] = raised([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]);

/// What the codes of iq4_nl and iq4_xs stand for.
const IQ4: [u8; 16] = raised([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]);

/// 4-bit integers of 16 bytes of each: the lower ones, then the upper ones.
///
/// # Safety
/// Both are valid for 16 bytes.
#[inline(always)]
unsafe fn nibbles<B: Bytes>(a: *const u8, b: *const u8) -> B {
    // SAFETY: as the caller promises.
    unsafe { B::twins(a, b).right::<0, 4, 0, 4>().and(15) }
}

/// 16 for each bit of four bytes of each that is set.
///
/// # Safety
/// Both are valid for four bytes.
#[inline(always)]
unsafe fn fifth<B: Bytes>(a: *const u8, b: *const u8) -> B {
    // SAFETY: as the caller promises.
    unsafe { B::bits(word(a) | word(b) << 32).and(16) }
}

/// # Safety
/// `from` is valid for four bytes.
#[inline(always)]
pub(super) unsafe fn word(from: *const u8) -> u64 {
    // SAFETY: as the caller promises.
    u64::from(u32::from_le_bytes(unsafe { from.cast::<[u8; 4]>().read() }))
}

/// # Safety
/// `from` is valid for 16 bytes.
#[inline(always)]
unsafe fn sixteen(from: *const u8) -> u128 {
    // SAFETY: as the caller promises.
    u128::from_le_bytes(unsafe { from.cast::<[u8; 16]>().read() })
}

/// Factors and offsets of sixteen parts, 4 bits each, 2-bit integers, and two f16 by which those are multiplied. Of each
/// half, element i of four runs of 32 shares byte i.
///
/// # Safety
/// As for [`integers`], of one block.
#[inline(always)]
unsafe fn q2_k<B: Bytes>(from: *const u8, [factors, offsets]: Scales) -> [B; 4] {
    const NIBBLES: u128 = u128::from_ne_bytes([15; 16]);
    // SAFETY: as the caller promises.
    unsafe {
        let codes = sixteen(from);
        B::codes(codes & NIBBLES, B::half(from.add(80)), factors);
        B::codes(codes >> 4 & NIBBLES, B::half(from.add(82)), offsets);
        let mut q = two_bits::<B>(from.add(16));
        for q in &mut q {
            *q = q.and(3);
        }
        q
    }
}

/// 2-bit integers as in [`q2_k`], less 1, and an f16.
///
/// # Safety
/// As for [`integers`], of one block.
#[inline(always)]
unsafe fn tq2_0<B: Bytes>(from: *const u8, [factors, offsets]: Scales) -> [B; 4] {
    // SAFETY: as the caller promises.
    unsafe {
        B::pairs(u64::from_ne_bytes([1; 8]), B::half(from.add(64)), factors);
        B::times(factors, 1, offsets);
        let mut q = two_bits::<B>(from);
        for q in &mut q {
            *q = q.and(3);
        }
        q
    }
}

/// Bytes whose lowest two bits are the integers that 64 bytes hold.
///
/// # Safety
/// `from` is valid for those.
#[inline(always)]
unsafe fn two_bits<B: Bytes>(from: *const u8) -> [B; 4] {
    // SAFETY: as the caller promises.
    unsafe {
        let (a, b) = (B::two(from, from), B::two(from.add(32), from.add(32)));
        [a.right::<0, 0, 2, 2>(), a.right::<4, 4, 6, 6>(), b.right::<0, 0, 2, 2>(), b.right::<4, 4, 6, 6>()]
    }
}

/// Upper bits, bit `i` of 32 bytes for 32 elements; lower two bits as in [`q2_k`]; sixteen factors less 32: 4 bits each in
/// eight bytes, their upper two in four more; and an f16 by which those are multiplied. Integers are less 4.
///
/// # Safety
/// As for [`integers`], of one block.
#[inline(always)]
unsafe fn q3_k<B: Bytes>(from: *const u8, [factors, offsets]: Scales) -> [B; 4] {
    const NIBBLES: u64 = u64::from_ne_bytes([0x0f; 8]);
    const TWO: u64 = u64::from_ne_bytes([0x30; 8]);
    // SAFETY: as the caller promises.
    unsafe {
        let low = word(from.add(96)) | word(from.add(100)) << 32;
        let upper = word(from.add(104));
        // Bits 0 and 1 of four bytes, then 2 and 3, and for the others 4 and 5, then 6 and 7, come to be bits 4 and 5.
        let first = low & NIBBLES | (upper << 4 | upper << 34) & TWO;
        let second = low >> 4 & NIBBLES | (upper | upper << 30) & TWO;
        let codes = less_32(u128::from(first) | u128::from(second) << 64);
        B::codes(codes, B::half(from.add(108)), factors);
        B::times(factors, 4, offsets);
        let high = B::two(from, from);
        let mut q = two_bits::<B>(from.add(32));
        for (i, q) in q.iter_mut().enumerate() {
            let (bit, next) = (1u8 << (2 * i), 2 << (2 * i));
            *q = q.and(3).or(high.has([bit, bit, next, next]).and(4));
        }
        q
    }
}

/// Two f16, by which factors and offsets of eight times 32 elements are multiplied, then those, 6 bits each in twelve bytes.
///
/// # Safety
/// `from` is valid for all that.
#[inline(always)]
unsafe fn factors_and_offsets<B: Bytes>(from: *const u8, [factors, offsets]: Scales) {
    const NIBBLES: u64 = 0x0f0f_0f0f;
    const SIX: u64 = 0x3f3f_3f3f;
    const TWO: u64 = 0x3030_3030;
    // SAFETY: as the caller promises.
    unsafe {
        let (a, b, c) = (word(from.add(4)), word(from.add(8)), word(from.add(12)));
        B::pairs(a & SIX | (c & NIBBLES | a >> 2 & TWO) << 32, B::half(from), factors);
        B::pairs(b & SIX | (c >> 4 & NIBBLES | b >> 2 & TWO) << 32, B::half(from.add(2)), offsets);
    }
}

/// [`factors_and_offsets`], then 4-bit integers: of each 32 bytes the lower ones, then the upper ones.
///
/// # Safety
/// As for [`integers`], of one block.
#[inline(always)]
unsafe fn q4_k<B: Bytes>(from: *const u8, scales: Scales) -> [B; 4] {
    // SAFETY: as the caller promises.
    unsafe {
        factors_and_offsets::<B>(from, scales);
        four_bits(from.add(16))
    }
}

/// Of each 32 bytes of 128 the lower 4 bits, then the upper ones.
///
/// # Safety
/// `from` is valid for those.
#[inline(always)]
unsafe fn four_bits<B: Bytes>(from: *const u8) -> [B; 4] {
    // SAFETY: as the caller promises.
    unsafe {
        let mut q = [B::two(from, from); 4];
        for (i, q) in q.iter_mut().enumerate() {
            let from = from.add(32 * i);
            *q = B::two(from, from).right::<0, 0, 4, 4>().and(15);
        }
        q
    }
}

/// As [`q4_k`], with a fifth bit for each element before the others: bit `i` of its byte for the `i`th 32 elements.
///
/// # Safety
/// As for [`integers`], of one block.
#[inline(always)]
unsafe fn q5_k<B: Bytes>(from: *const u8, scales: Scales) -> [B; 4] {
    // SAFETY: as the caller promises.
    unsafe {
        factors_and_offsets::<B>(from, scales);
        let high = B::two(from.add(16), from.add(16));
        let mut q = four_bits::<B>(from.add(48));
        for (i, q) in q.iter_mut().enumerate() {
            let (bit, next) = (1u8 << (2 * i), 2 << (2 * i));
            *q = q.or(high.has([bit, bit, next, next]).and(16));
        }
        q
    }
}

/// Lower 4 bits, upper 2, sixteen 8-bit factors and what they are multiplied by. Of each half, elements 0 to 63 have
/// their lower bits in the lower half of bytes; 32 elements share 32 bytes of upper bits with those 32, 64 and 96 on.
/// Integers are less 32.
///
/// # Safety
/// As for [`integers`], of one block.
#[inline(always)]
unsafe fn q6_k<B: Bytes>(from: *const u8, [factors, offsets]: Scales) -> [B; 4] {
    // SAFETY: as the caller promises.
    unsafe {
        B::codes(sixteen(from.add(192)), B::half(from.add(208)), factors);
        B::times(factors, 32, offsets);
        let mut q = [B::two(from, from); 4];
        for (side, q) in q.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            let low = B::two(from.add(64 * side), from.add(64 * side + 32));
            let high = B::two(from.add(128 + 32 * side), from.add(128 + 32 * side));
            // Two bits come to be the fifth and sixth.
            q[0] = low.and(15).or(high.left::<4, 4, 2, 2>().and(48));
            q[1] = low.right::<4, 4, 4, 4>().and(15).or(high.right::<0, 0, 2, 2>().and(48));
        }
        q
    }
}

/// An f16, eight factors less 32: their upper two bits in two bytes and lower four in four, and codes of [`IQ4`] as in blocks
/// of 32 elements.
///
/// # Safety
/// As for [`integers`], of one block.
#[inline(always)]
unsafe fn iq4_xs<B: Bytes>(from: *const u8, [factors, offsets]: Scales) -> [B; 4] {
    // SAFETY: as the caller promises.
    unsafe {
        let (upper, low) = (word(from) >> 16, word(from.add(4)));
        let mut codes = 0;
        for i in 0..8 {
            codes |= (low >> (4 * i) & 15 | (upper >> (2 * i) & 3) << 4) << (8 * i);
        }
        B::pairs(less_32(codes.into()) as u64, B::half(from), factors);
        B::times(factors, MIDDLE, offsets);
        let mut q = [B::two(from, from); 4];
        for (i, q) in q.iter_mut().enumerate() {
            *q = nibbles::<B>(from.add(8 + 32 * i), from.add(24 + 32 * i)).of(&IQ4);
        }
        q
    }
}

/// Bytes of 6 bits less 32, with their signs.
#[inline(always)]
fn less_32(codes: u128) -> u128 {
    // The sixth bit, inverted, is that of the sign and the two below it.
    const SIXTH: u128 = u128::from_ne_bytes([32; 16]);
    let sign = !codes & SIXTH;
    codes & !SIXTH | sign | sign << 1 | sign << 2
}
