//! Blocks of codes of grids, iq2 and iq3, as `ggml-common.h` lays them out: a code stands for eight or four bytes, whose signs
//! are apart.

use std::sync::OnceLock;

use super::DEPTH;
use super::integers::Bytes;
use super::quants::{MIDDLE, Scales, word};
use crate::dtype::DType;
use crate::ffi::types;

/// # Safety
/// The machine has the instruction set of `B`; `from` is valid for a block of `dtype`.
#[inline(always)]
pub(super) unsafe fn read<B: Bytes>(dtype: DType, from: *const u8, scales: Scales) -> Option<[B; 4]> {
    let grids = grids()?;
    // SAFETY: as the caller promises.
    unsafe {
        match dtype {
            DType::IQ2_XXS => Some(iq2_xxs(grids, from, scales)),
            DType::IQ2_XS => Some(iq2_xs(grids, from, scales)),
            DType::IQ2_S => Some(iq2_s(grids, from, scales)),
            DType::IQ3_XXS => Some(iq3_xxs(grids, from, scales)),
            DType::IQ3_S => Some(iq3_s(grids, from, scales)),
            _ => None,
        }
    }
}

/// What codes stand for.
struct Grids {
    iq2_xxs: Vec<u64>,
    iq2_xs: Vec<u64>,
    iq2_s: Vec<u64>,
    iq3_xxs: Vec<u64>,
    iq3_s: Vec<u64>,
}

/// Of every code, as ggml reads blocks of factor one without signs.
fn grids() -> Option<&'static Grids> {
    static GRIDS: OnceLock<Option<Grids>> = OnceLock::new();
    let all = || {
        Some(Grids {
            iq2_xxs: grid(DType::IQ2_XXS, 8, 256, 8.0, |b, i, code| b[2 + i / 4 * 8 + i % 4] = code as u8)?,
            iq2_xs: grid(DType::IQ2_XS, 8, 512, 8.0, |b, i, code| {
                b[2 + 2 * i..4 + 2 * i].copy_from_slice(&(code as u16).to_le_bytes());
            })?,
            iq2_s: grid(DType::IQ2_S, 8, 1024, 8.0, |b, i, code| {
                b[2 + i] = code as u8;
                b[66 + i / 4] |= ((code >> 8) << (i % 4 * 2)) as u8;
            })?,
            iq3_xxs: grid(DType::IQ3_XXS, 4, 256, 4.0, |b, i, code| b[2 + i] = code as u8)?,
            iq3_s: grid(DType::IQ3_S, 4, 512, 1.0, |b, i, code| {
                b[2 + i] = code as u8;
                b[66 + i / 8] |= ((code >> 8) << (i % 8)) as u8;
            })?,
        })
    };
    GRIDS.get_or_init(all).as_ref()
}

/// For each of `count` codes, `width` integers, which are values times `unit`. `put` writes code `i` of a block.
fn grid(
    dtype: DType,
    width: usize,
    count: usize,
    unit: f32,
    put: impl Fn(&mut [u8], usize, usize),
) -> Option<Vec<u64>> {
    let each = DEPTH / width;
    let mut all = Vec::with_capacity(count);
    for first in (0..count).step_by(each) {
        let mut block = vec![0; dtype.block_bytes()];
        block[..2].copy_from_slice(&half::f16::ONE.to_le_bytes());
        (0..each).for_each(|i| put(&mut block, i, first + i));
        let mut values = [0.0; DEPTH];
        types::dequantise(dtype, &block, &mut values).ok()?;
        for run in values.chunks(width) {
            all.push(run.iter().rev().fold(0, |all, v| all << 8 | (v * unit) as u64));
        }
    }
    Some(all)
}

/// Eight signs of seven bits: with the last one, an even number is set.
#[inline(always)]
fn eight_signs(bits: u64) -> u64 {
    let seven = bits & 127;
    seven | u64::from(seven.count_ones() % 2) << 7
}

/// Integers with signs, of four runs of eight each.
///
/// # Safety
/// The machine has the instruction set of `B`.
#[inline(always)]
unsafe fn signed<B: Bytes>(codes: &[u64; DEPTH / 8], signs: &[u64; 4]) -> [B; 4] {
    // SAFETY: as the caller promises.
    unsafe {
        let mut q = [B::bits(0); 4];
        for ((q, codes), &signs) in q.iter_mut().zip(codes.as_chunks::<8>().0).zip(signs) {
            *q = B::words(*codes).negated(signs).less(MIDDLE);
        }
        q
    }
}

/// Bytes of 32 bits as every other one of 64.
#[inline(always)]
fn apart(x: u64) -> u64 {
    let x = (x | x << 16) & 0x0000_ffff_0000_ffff;
    (x | x << 8) & 0x00ff_00ff_00ff_00ff
}

/// Integers of four bits of four bytes, one after another.
#[inline(always)]
fn nibbles(x: u64) -> u64 {
    apart(x & 0x0f0f_0f0f) | apart(x >> 4 & 0x0f0f_0f0f) << 8
}

/// Twice each of some small integers, and one more.
const fn odd(codes: u128) -> u128 {
    codes << 1 | u128::from_ne_bytes([1; 16])
}

/// An f16; of each 32 elements four codes, four times seven signs and a factor of four bits.
///
/// # Safety
/// As for [`read`].
#[inline(always)]
unsafe fn iq2_xxs<B: Bytes>(grids: &Grids, from: *const u8, [factors, offsets]: Scales) -> [B; 4] {
    let (mut all, mut signs, mut codes) = ([0; 32], [0; 4], 0);
    // SAFETY: as the caller promises.
    unsafe {
        for i in 0..8 {
            let (low, high) = (word(from.add(2 + 8 * i)), word(from.add(6 + 8 * i)));
            for l in 0..4 {
                all[4 * i + l] = grids.iq2_xxs[(low >> (8 * l) & 255) as usize];
                signs[i / 2] |= eight_signs(high >> (7 * l)) << (i % 2 * 32 + 8 * l);
            }
            codes |= (high >> 28) << (8 * i);
        }
        B::pairs(odd(codes.into()) as u64, B::half(from) * 0.125, factors);
        B::times(factors, MIDDLE, offsets);
        signed(&all, &signs)
    }
}

/// An f16; for every eight elements nine bits of code and seven of signs; factors of four bits for every 16.
///
/// # Safety
/// As for [`read`].
#[inline(always)]
unsafe fn iq2_xs<B: Bytes>(grids: &Grids, from: *const u8, [factors, offsets]: Scales) -> [B; 4] {
    let (mut all, mut signs) = ([0; 32], [0; 4]);
    // SAFETY: as the caller promises.
    unsafe {
        for i in 0..16 {
            let two = word(from.add(2 + 4 * i));
            for (l, code) in [two & 0xffff, two >> 16].into_iter().enumerate() {
                all[2 * i + l] = grids.iq2_xs[(code & 511) as usize];
                signs[i / 4] |= eight_signs(code >> 9) << (i % 4 * 16 + 8 * l);
            }
        }
        let codes = u128::from(nibbles(word(from.add(66)))) | u128::from(nibbles(word(from.add(70)))) << 64;
        B::codes(odd(codes), B::half(from) * 0.125, factors);
        B::times(factors, MIDDLE, offsets);
        signed(&all, &signs)
    }
}

/// An f16; for every eight elements eight bits of code, then eight signs, then two more bits of code; factors as in
/// [`iq2_xs`].
///
/// # Safety
/// As for [`read`].
#[inline(always)]
unsafe fn iq2_s<B: Bytes>(grids: &Grids, from: *const u8, [factors, offsets]: Scales) -> [B; 4] {
    let (mut all, mut signs) = ([0; 32], [0; 4]);
    // SAFETY: as the caller promises.
    unsafe {
        for i in 0..8 {
            let (low, high) = (word(from.add(2 + 4 * i)), u64::from(*from.add(66 + i)));
            for l in 0..4 {
                let code = (low >> (8 * l) & 255) | (high >> (2 * l) & 3) << 8;
                all[4 * i + l] = grids.iq2_s[code as usize];
            }
            signs[i / 2] |= word(from.add(34 + 4 * i)) << (i % 2 * 32);
        }
        let codes = u128::from(nibbles(word(from.add(74)))) | u128::from(nibbles(word(from.add(78)))) << 64;
        B::codes(odd(codes), B::half(from) * 0.125, factors);
        B::times(factors, MIDDLE, offsets);
        signed(&all, &signs)
    }
}

/// An f16; a code for every four elements; of each 32 four times seven signs and a factor of four bits.
///
/// # Safety
/// As for [`read`].
#[inline(always)]
unsafe fn iq3_xxs<B: Bytes>(grids: &Grids, from: *const u8, [factors, offsets]: Scales) -> [B; 4] {
    let (mut all, mut signs, mut codes) = ([0; 32], [0; 4], 0);
    // SAFETY: as the caller promises.
    unsafe {
        for i in 0..8 {
            let (first, second) = (word(from.add(2 + 8 * i)), word(from.add(6 + 8 * i)));
            let eight = first | second << 32;
            let high = word(from.add(66 + 4 * i));
            for l in 0..4 {
                let at = |shift: usize| grids.iq3_xxs[(eight >> shift & 255) as usize];
                all[4 * i + l] = at(16 * l) | at(16 * l + 8) << 32;
                signs[i / 2] |= eight_signs(high >> (7 * l)) << (i % 2 * 32 + 8 * l);
            }
            codes |= (high >> 28) << (8 * i);
        }
        B::pairs(odd(codes.into()) as u64, B::half(from) * 0.25, factors);
        B::times(factors, MIDDLE, offsets);
        signed(&all, &signs)
    }
}

/// An f16; for every four elements eight bits of code, then one more, then signs; factors of four bits for every 32.
///
/// # Safety
/// As for [`read`].
#[inline(always)]
unsafe fn iq3_s<B: Bytes>(grids: &Grids, from: *const u8, [factors, offsets]: Scales) -> [B; 4] {
    let (mut all, mut signs) = ([0; 32], [0; 4]);
    // SAFETY: as the caller promises.
    unsafe {
        for i in 0..8 {
            let (first, second) = (word(from.add(2 + 8 * i)), word(from.add(6 + 8 * i)));
            let (eight, high) = (first | second << 32, u64::from(*from.add(66 + i)));
            for l in 0..4 {
                let at = |j: usize| grids.iq3_s[(eight >> (8 * j) & 255 | (high >> j & 1) << 8) as usize];
                all[4 * i + l] = at(2 * l) | at(2 * l + 1) << 32;
            }
            signs[i / 2] |= word(from.add(74 + 4 * i)) << (i % 2 * 32);
        }
        B::pairs(odd(nibbles(word(from.add(106))).into()) as u64, B::half(from), factors);
        B::times(factors, MIDDLE, offsets);
        signed(&all, &signs)
    }
}
