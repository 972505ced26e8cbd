//! The stored types that checkpoints use most, as f32: blocks as `ggml-common.h` lays them out. Plain loops, which compilers
//! turn into the registers of the instruction set that they are compiled for.

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
            DType::Q8_0 => q8_0::<V>(from, len, to),
            DType::Q4_0 => each(from, len, to, q4_0),
            DType::Q4K => each(from, len, to, q4_k),
            DType::Q5K => each(from, len, to, q5_k),
            DType::Q6K => each(from, len, to, q6_k),
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

/// An f16 factor and 4-bit integers less 8, of which those of the second half are in the upper bits.
#[inline(always)]
fn q4_0(block: &[u8; 18], to: &mut [f32; 32]) {
    let factor = half(block, 0);
    for i in 0..16 {
        let q = block[2 + i];
        to[i] = factor * (i32::from(q & 15) - 8) as f32;
        to[16 + i] = factor * (i32::from(q >> 4) - 8) as f32;
    }
}

/// Factor and offset of part `i` of eight, 6 bits each, of twelve bytes.
#[inline(always)]
fn factor_and_offset(packed: &[u8], i: usize) -> [f32; 2] {
    let [factor, offset] = match i {
        0..4 => [packed[i] & 63, packed[i + 4] & 63],
        _ => [(packed[i + 4] & 15) | ((packed[i - 4] >> 6) << 4), (packed[i + 4] >> 4) | ((packed[i] >> 6) << 4)],
    };
    [f32::from(factor), f32::from(offset)]
}

/// Two f16, by which factors and offsets of eight parts are multiplied, then those, then 4-bit integers: of two parts in
/// turn, those of the second in the upper bits.
#[inline(always)]
fn q4_k(block: &[u8; 144], to: &mut [f32; 256]) {
    let (d, least) = (half(block, 0), half(block, 2));
    for part in 0..8 {
        let [factor, offset] = factor_and_offset(&block[4..16], part);
        let (factor, offset) = (d * factor, least * offset);
        let (from, shift) = (&block[16 + part / 2 * 32..][..32], part % 2 * 4);
        for (to, q) in to[part * 32..][..32].iter_mut().zip(from) {
            *to = factor * f32::from((q >> shift) & 15) - offset;
        }
    }
}

/// As [`q4_k`], with a fifth bit for each element before the others: bit `part` of its byte.
#[inline(always)]
fn q5_k(block: &[u8; 176], to: &mut [f32; 256]) {
    let (d, least) = (half(block, 0), half(block, 2));
    for part in 0..8 {
        let [factor, offset] = factor_and_offset(&block[4..16], part);
        let (factor, offset) = (d * factor, least * offset);
        let (from, shift) = (&block[48 + part / 2 * 32..][..32], part % 2 * 4);
        for ((to, q), high) in to[part * 32..][..32].iter_mut().zip(from).zip(&block[16..48]) {
            let q = ((q >> shift) & 15) | (((high >> part) & 1) << 4);
            *to = factor * f32::from(q) - offset;
        }
    }
}

/// Lower 4 bits, upper 2, sixteen 8-bit factors and what they are multiplied by. Of each half, elements 0 to 63 have
/// their lower bits in the lower half of bytes; 32 elements share 32 bytes of upper bits with those 32, 64 and 96 on.
#[inline(always)]
fn q6_k(block: &[u8; 210], to: &mut [f32; 256]) {
    let d = half(block, 208);
    for part in 0..8 {
        let (side, quarter) = (part / 4, part % 4);
        let low = &block[side * 64 + quarter % 2 * 32..][..32];
        let high = &block[128 + side * 32..][..32];
        let (low_shift, high_shift) = (quarter / 2 * 4, quarter * 2);
        for i in 0..2 {
            let factor = d * f32::from(block[192 + part * 2 + i] as i8);
            let (low, high) = (&low[16 * i..][..16], &high[16 * i..][..16]);
            for ((to, l), h) in to[part * 32 + 16 * i..][..16].iter_mut().zip(low).zip(high) {
                let q = ((l >> low_shift) & 15) | (((h >> high_shift) & 3) << 4);
                *to = factor * (i32::from(q) - 32) as f32;
            }
        }
    }
}
