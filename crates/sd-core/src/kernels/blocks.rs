//! The types that are stored, as f32: 8- and 16-bit floats and scaled ones here, in plain loops, which compilers turn into the
//! registers of the instruction set that they are compiled for, and [`quants`].

use super::integers::Integers;
use super::quants;
use crate::dtype::DType;

/// Converts `len` elements at `from`; false for types that are not among these.
///
/// # Safety
/// The machine has the instruction set of `I`; `from` is valid for `len` elements in whole blocks, `to` for `len` writes.
#[inline(always)]
pub(super) unsafe fn decode<I: Integers>(dtype: DType, from: *const u8, len: usize, to: *mut f32) -> bool {
    // SAFETY: as the caller promises.
    unsafe {
        match dtype {
            DType::BF16 => upper_halves(from, len, to),
            DType::F8E4M3 => bytes(from, len, to, f8_e4m3),
            DType::F8E5M2 => bytes(from, len, to, f8_e5m2),
            DType::F8E4M3S => each(from, len, to, |b, to| scaled(b, to, f8_e4m3)),
            DType::F8E5M2S => each(from, len, to, |b, to| scaled(b, to, f8_e5m2)),
            DType::I8S => each(from, len, to, |b, to| scaled(b, to, |b| f32::from(b as i8))),
            DType::F4S => each(from, len, to, f4_scaled),
            _ => return quants::floats::<I>(dtype, from, len, to),
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
