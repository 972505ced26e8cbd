//! The stored types that checkpoints use most, as f32: blocks as `ggml-common.h` lays them out. A block becomes 8-bit integers
//! in plain loops, which compilers turn into the registers of the instruction set that they are compiled for; then those
//! become f32.

use half::f16;

use super::vector::Vector;
use crate::dtype::DType;

/// Converts `len` elements at `from`; false for types that are not among these.
///
/// # Safety
/// The machine has the instruction set of `V`; `from` is valid for `len` elements in whole blocks, `to` for `len` writes.
#[inline(always)]
pub(super) unsafe fn decode<V: Vector>(dtype: DType, from: *const u8, len: usize, to: *mut f32) -> bool {
    // SAFETY: as the caller promises.
    unsafe {
        match dtype {
            DType::BF16 => upper_halves(from, len, to),
            DType::Q8_0 => q8_0::<V>(from, len, to),
            DType::Q4_0 => integers::<V, 18, 32, 1>(from, len, to, q4_0),
            DType::Q4_1 => integers::<V, 20, 32, 1>(from, len, to, q4_1),
            DType::Q5_0 => integers::<V, 22, 32, 1>(from, len, to, q5_0),
            DType::Q5_1 => integers::<V, 24, 32, 1>(from, len, to, q5_1),
            DType::IQ4_NL => integers::<V, 18, 32, 1>(from, len, to, iq4_nl),
            DType::Q2K => integers::<V, 84, 256, 16>(from, len, to, q2_k),
            DType::Q3K => integers::<V, 110, 256, 16>(from, len, to, q3_k),
            DType::Q4K => integers::<V, 144, 256, 8>(from, len, to, q4_k),
            DType::Q5K => integers::<V, 176, 256, 8>(from, len, to, q5_k),
            DType::Q6K => integers::<V, 210, 256, 16>(from, len, to, q6_k),
            DType::F8E4M3 => bytes(from, len, to, f8_e4m3),
            DType::F8E5M2 => bytes(from, len, to, f8_e5m2),
            DType::F8E4M3S => each(from, len, to, |b, to| scaled(b, to, f8_e4m3)),
            DType::F8E5M2S => each(from, len, to, |b, to| scaled(b, to, f8_e5m2)),
            DType::I8S => each(from, len, to, |b, to| scaled(b, to, |b| f32::from(b as i8))),
            DType::F4S => each(from, len, to, f4_scaled),
            _ => return false,
        }
    }
    true
}

/// The types that only [`decode`] reads.
pub(super) fn is_own(dtype: DType) -> bool {
    use DType::{F4S, F8E4M3, F8E4M3S, F8E5M2, F8E5M2S, I8S};
    matches!(dtype, F8E4M3 | F8E5M2 | F8E4M3S | F8E5M2S | I8S | F4S)
}

/// # Safety
/// As for [`decode`].
#[inline(always)]
unsafe fn bytes(from: *const u8, len: usize, to: *mut f32, element: impl Fn(u8) -> f32) {
    // SAFETY: as the caller promises.
    let (from, to) = unsafe { (std::slice::from_raw_parts(from, len), std::slice::from_raw_parts_mut(to, len)) };
    for (to, b) in to.iter_mut().zip(from) {
        *to = element(*b);
    }
}

/// An f32 factor and 64 elements of a byte each.
#[inline(always)]
fn scaled(block: &[u8; 68], to: &mut [f32; 64], element: impl Fn(u8) -> f32) {
    let factor = f32::from_le_bytes([block[0], block[1], block[2], block[3]]);
    for (to, b) in to.iter_mut().zip(&block[4..]) {
        *to = element(*b) * factor;
    }
}

/// An f32 factor and 16 4-bit floats, of a byte the upper one first.
#[inline(always)]
fn f4_scaled(block: &[u8; 12], to: &mut [f32; 16]) {
    let factor = f32::from_le_bytes([block[0], block[1], block[2], block[3]]);
    for (to, b) in to.as_chunks_mut::<2>().0.iter_mut().zip(&block[4..]) {
        *to = [e2m1(b >> 4) * factor, e2m1(b & 15) * factor];
    }
}

/// Sign, two bits of exponent with bias 1, one of mantissa.
#[inline(always)]
fn e2m1(code: u8) -> f32 {
    let code = u32::from(code);
    let small = (code & 1) as f32 * 0.5;
    let magnitude = if code & 6 == 0 { small } else { f32::from_bits(((code & 7) + (126 << 1)) << 22) };
    f32::from_bits(magnitude.to_bits() | (code & 8) << 28)
}

/// As `convert.rs` reads it, without branches.
#[inline(always)]
fn f8_e4m3(b: u8) -> f32 {
    let code = u32::from(b & 0x7f);
    let small = code as f32 * (1.0 / 512.0);
    let large = f32::from_bits((code + (120 << 3)) << 20);
    let magnitude = if code < 8 { small } else { large };
    let magnitude = if code == 0x7f { f32::NAN } else { magnitude };
    f32::from_bits(magnitude.to_bits() | u32::from(b & 0x80) << 24)
}

/// Likewise.
#[inline(always)]
fn f8_e5m2(b: u8) -> f32 {
    let code = u32::from(b & 0x7f);
    let small = code as f32 * (1.0 / 65536.0);
    let bias = if code < 0x7c { 112 << 2 } else { 224 << 2 };
    let large = f32::from_bits((code + bias) << 21);
    let magnitude = if code < 4 { small } else { large };
    f32::from_bits(magnitude.to_bits() | u32::from(b & 0x80) << 24)
}

/// # Safety
/// As for [`decode`].
#[inline(always)]
unsafe fn each<const BYTES: usize, const LEN: usize>(
    from: *const u8,
    len: usize,
    to: *mut f32,
    block: impl Fn(&[u8; BYTES], &mut [f32; LEN]),
) {
    for i in 0..len / LEN {
        // SAFETY: as the caller promises; bytes have any address, and results are written by their own type.
        unsafe {
            block(
                &*from.wrapping_add(i * BYTES).cast::<[u8; BYTES]>(),
                &mut *to.wrapping_add(i * LEN).cast::<[f32; LEN]>(),
            );
        }
    }
}

/// Blocks of `BYTES`, of which `block` makes `LEN` 8-bit integers `q` and the factor and offset of each of `GROUPS`:
/// elements are `factor q - offset`.
///
/// # Safety
/// As for [`decode`].
#[inline(always)]
unsafe fn integers<V: Vector, const BYTES: usize, const LEN: usize, const GROUPS: usize>(
    from: *const u8,
    len: usize,
    to: *mut f32,
    block: impl Fn(&[u8; BYTES], &mut [u8; LEN], &mut [[f32; 2]; GROUPS]),
) {
    let (mut q, mut scales) = ([0; LEN], [[0.0; 2]; GROUPS]);
    for i in 0..len / LEN {
        // SAFETY: as the caller promises; a group is whole registers on every instruction set.
        unsafe {
            block(&*from.wrapping_add(i * BYTES).cast::<[u8; BYTES]>(), &mut q, &mut scales);
            for (group, &[factor, offset]) in scales.iter().enumerate() {
                let (factor, offset) = (V::splat(factor), V::splat(offset));
                for j in (group * (LEN / GROUPS)..(group + 1) * (LEN / GROUPS)).step_by(V::LANES) {
                    let x = V::load_bytes(q.as_ptr().wrapping_add(j).cast());
                    x.mul(factor).sub(offset).store(to.wrapping_add(i * LEN + j));
                }
            }
        }
    }
}

/// bf16, which is the upper half of an f32.
///
/// # Safety
/// As for [`decode`].
#[inline(always)]
unsafe fn upper_halves(from: *const u8, len: usize, to: *mut f32) {
    // SAFETY: as the caller promises; bytes have any address.
    let (from, to) = unsafe {
        (std::slice::from_raw_parts(from.cast::<[u8; 2]>(), len), std::slice::from_raw_parts_mut(to, len))
    };
    for (to, &from) in to.iter_mut().zip(from) {
        *to = f32::from_bits(u32::from(u16::from_ne_bytes(from)) << 16);
    }
}

fn half(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// An f16 factor and 8-bit integers.
///
/// # Safety
/// As for [`decode`].
#[inline(always)]
unsafe fn q8_0<V: Vector>(from: *const u8, len: usize, to: *mut f32) {
    const LEN: usize = 32;
    for i in (0..len).step_by(LEN) {
        let block = from.wrapping_add(i / LEN * (2 + LEN));
        // SAFETY: as the caller promises.
        unsafe {
            let factor = f16::from_ne_bytes(block.cast::<[u8; 2]>().read()).to_f32();
            for j in (0..LEN).step_by(V::LANES) {
                let x = V::load_bytes(block.wrapping_add(2 + j).cast());
                x.mul(V::splat(factor)).store(to.wrapping_add(i + j));
            }
        }
    }
}

/// 4-bit integers of 16 bytes: the lower bits, then the upper ones.
#[inline(always)]
fn nibbles(from: &[u8], q: &mut [u8; 32]) {
    let (low, high) = q.split_at_mut(16);
    for ((low, high), from) in low.iter_mut().zip(high).zip(&from[..16]) {
        *low = from & 15;
        *high = from >> 4;
    }
}

/// A fifth bit for each, which are those of four bytes.
#[inline(always)]
fn fifth_bits(from: &[u8], q: &mut [u8; 32]) {
    const ONES: u64 = 0x0101_0101_0101_0101;
    for (q, &bits) in q.chunks_exact_mut(8).zip(&from[..4]) {
        // Bit i in byte i, moved to where the fifth one is.
        let spread = (u64::from(bits) * ONES) & 0x8040_2010_0804_0201;
        let fifth = (((spread + 0x7f * ONES) >> 7) & ONES) << 4;
        q.iter_mut().zip(fifth.to_le_bytes()).for_each(|(q, bit)| *q |= bit);
    }
}

/// An f16 factor and 4-bit integers less 8.
#[inline(always)]
fn q4_0(block: &[u8; 18], q: &mut [u8; 32], scales: &mut [[f32; 2]; 1]) {
    nibbles(&block[2..], q);
    q.iter_mut().for_each(|q| *q = q.wrapping_sub(8));
    *scales = [[half(block, 0), 0.0]];
}

/// An f16 factor, an f16 that is added, and 4-bit integers.
#[inline(always)]
fn q4_1(block: &[u8; 20], q: &mut [u8; 32], scales: &mut [[f32; 2]; 1]) {
    nibbles(&block[4..], q);
    *scales = [[half(block, 0), -half(block, 2)]];
}

/// As [`q4_0`], with fifth bits between, less 16.
#[inline(always)]
fn q5_0(block: &[u8; 22], q: &mut [u8; 32], scales: &mut [[f32; 2]; 1]) {
    nibbles(&block[6..], q);
    fifth_bits(&block[2..], q);
    q.iter_mut().for_each(|q| *q = q.wrapping_sub(16));
    *scales = [[half(block, 0), 0.0]];
}

/// As [`q4_1`], with fifth bits between.
#[inline(always)]
fn q5_1(block: &[u8; 24], q: &mut [u8; 32], scales: &mut [[f32; 2]; 1]) {
    nibbles(&block[8..], q);
    fifth_bits(&block[4..], q);
    *scales = [[half(block, 0), -half(block, 2)]];
}

/// As [`q4_0`], with integers that stand for others.
#[inline(always)]
fn iq4_nl(block: &[u8; 18], q: &mut [u8; 32], scales: &mut [[f32; 2]; 1]) {
    const VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
    nibbles(&block[2..], q);
    q.iter_mut().for_each(|q| *q = VALUES[usize::from(*q & 15)] as u8);
    *scales = [[half(block, 0), 0.0]];
}

/// 32 integers of two bits of `from`, from `shift` on.
#[inline(always)]
fn two_bits(from: &[u8], shift: usize, q: &mut [u8]) {
    for (q, from) in q.iter_mut().zip(&from[..32]) {
        *q = (from >> shift) & 3;
    }
}

/// Factors and offsets of sixteen parts, 4 bits each, 2-bit integers, and two f16 by which those are multiplied. Of each
/// half, element i of four runs of 32 shares byte i.
#[inline(always)]
fn q2_k(block: &[u8; 84], q: &mut [u8; 256], scales: &mut [[f32; 2]; 16]) {
    let (d, least) = (half(block, 80), half(block, 82));
    for (to, s) in scales.iter_mut().zip(&block[..16]) {
        *to = [d * f32::from(s & 15), least * f32::from(s >> 4)];
    }
    for (part, q) in q.chunks_exact_mut(32).enumerate() {
        two_bits(&block[16 + part / 4 * 32..], part % 4 * 2, q);
    }
}

/// Upper bits, bit `part` of 32 bytes; lower two bits as in [`q2_k`]; sixteen factors less 32: 4 bits each in eight bytes,
/// their upper two in four more; and an f16 by which those are multiplied. Integers are less 4.
#[inline(always)]
fn q3_k(block: &[u8; 110], q: &mut [u8; 256], scales: &mut [[f32; 2]; 16]) {
    let (d, packed) = (half(block, 108), &block[96..108]);
    for (i, to) in scales.iter_mut().enumerate() {
        let low = if i < 8 { packed[i] & 15 } else { packed[i - 8] >> 4 };
        let factor = low | (((packed[8 + i % 4] >> (i / 4 * 2)) & 3) << 4);
        *to = [d * f32::from(factor.wrapping_sub(32) as i8), 0.0];
    }
    for (part, q) in q.chunks_exact_mut(32).enumerate() {
        two_bits(&block[32 + part / 4 * 32..], part % 4 * 2, q);
        for (q, high) in q.iter_mut().zip(&block[..32]) {
            *q = (*q | (((high >> part) & 1) << 2)).wrapping_sub(4);
        }
    }
}

/// Factors and offsets of eight parts, 6 bits each, of twelve bytes, times `d` and `least`.
#[inline(always)]
fn factors_and_offsets(packed: &[u8], [d, least]: [f32; 2], scales: &mut [[f32; 2]; 8]) {
    for (i, to) in scales.iter_mut().enumerate() {
        let [factor, offset] = match i {
            0..4 => [packed[i] & 63, packed[i + 4] & 63],
            _ => {
                [(packed[i + 4] & 15) | ((packed[i - 4] >> 6) << 4), (packed[i + 4] >> 4) | ((packed[i] >> 6) << 4)]
            }
        };
        *to = [d * f32::from(factor), least * f32::from(offset)];
    }
}

/// 4-bit integers of two parts in turn, those of the second in the upper bits.
#[inline(always)]
fn parts(from: &[u8], q: &mut [u8; 256]) {
    for (q, from) in q.chunks_exact_mut(64).zip(from.chunks_exact(32)) {
        let (low, high) = q.split_at_mut(32);
        for ((low, high), from) in low.iter_mut().zip(high).zip(from) {
            *low = from & 15;
            *high = from >> 4;
        }
    }
}

/// Two f16, by which factors and offsets of eight parts are multiplied, then those, then 4-bit integers.
#[inline(always)]
fn q4_k(block: &[u8; 144], q: &mut [u8; 256], scales: &mut [[f32; 2]; 8]) {
    factors_and_offsets(&block[4..16], [half(block, 0), half(block, 2)], scales);
    parts(&block[16..144], q);
}

/// As [`q4_k`], with a fifth bit for each element before the others: bit `part` of its byte.
#[inline(always)]
fn q5_k(block: &[u8; 176], q: &mut [u8; 256], scales: &mut [[f32; 2]; 8]) {
    factors_and_offsets(&block[4..16], [half(block, 0), half(block, 2)], scales);
    parts(&block[48..176], q);
    for (part, q) in q.chunks_exact_mut(32).enumerate() {
        for (q, high) in q.iter_mut().zip(&block[16..48]) {
            *q |= ((high >> part) & 1) << 4;
        }
    }
}

/// Lower 4 bits, upper 2, sixteen 8-bit factors and what they are multiplied by. Of each half, elements 0 to 63 have
/// their lower bits in the lower half of bytes; 32 elements share 32 bytes of upper bits with those 32, 64 and 96 on.
/// Integers are less 32.
#[inline(always)]
fn q6_k(block: &[u8; 210], q: &mut [u8; 256], scales: &mut [[f32; 2]; 16]) {
    let d = half(block, 208);
    for (to, &s) in scales.iter_mut().zip(&block[192..208]) {
        *to = [d * f32::from(s as i8), 0.0];
    }
    for (part, q) in q.chunks_exact_mut(32).enumerate() {
        let (side, quarter) = (part / 4, part % 4);
        let low = &block[side * 64 + quarter % 2 * 32..][..32];
        let high = &block[128 + side * 32..][..32];
        for ((q, l), h) in q.iter_mut().zip(low).zip(high) {
            *q = (((l >> (quarter / 2 * 4)) & 15) | (((h >> (quarter * 2)) & 3) << 4)).wrapping_sub(32);
        }
    }
}
