//! AVX-512F: tiles of 14 rows by two registers, which leave two for the columns and one for a row.

use std::arch::x86_64::*;

use super::DEPTH;
use super::inner::isa;
use super::integers::{Bytes, Integers, PARTS};
use super::vector::{MAX_LANES, Vector};

isa!(__m512, Words, 1024, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14], "avx512f,avx512bw");

pub(super) fn is_available() -> bool {
    is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw")
}

/// Integers of 16 bits, whose products are added in an instruction of its own.
pub(super) struct Words;

impl Integers for Words {
    type V = __m512;
    type Bytes = __m512i;
    type Terms = __m512i;
    type Sums = __m512i;

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn load(from: *const i16) -> __m512i {
        // SAFETY: as the caller promises.
        unsafe { _mm512_loadu_si512(from.cast()) }
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn zero() -> __m512i {
        _mm512_setzero_si512()
    }

    #[target_feature(enable = "avx512f,avx512bw")]
    #[inline]
    unsafe fn dot(sums: __m512i, x: __m512i, w: __m512i) -> __m512i {
        _mm512_add_epi32(sums, _mm512_madd_epi16(x, w))
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn floats(sums: __m512i, _: usize) -> __m512 {
        _mm512_cvtepi32_ps(sums)
    }

    #[target_feature(enable = "avx512f,avx512bw")]
    #[inline]
    unsafe fn spread(from: [__m512i; 4], to: &mut [i16; DEPTH]) {
        // Words 0 and 1, and 2 and 3, of the eight parts of two registers: of even ones, then of odd ones.
        let first = _mm512_setr_epi32(0, 8, 16, 24, 4, 12, 20, 28, 1, 9, 17, 25, 5, 13, 21, 29);
        let second = _mm512_add_epi32(first, _mm512_set1_epi32(2));
        let bytes = _mm512_set1_epi16(255);
        for (half, order) in [first, second].into_iter().enumerate() {
            let low = _mm512_permutex2var_epi32(from[0], order, from[1]);
            let high = _mm512_permutex2var_epi32(from[2], order, from[3]);
            let even = _mm512_shuffle_i64x2::<0x44>(low, high);
            let odd = _mm512_shuffle_i64x2::<0xee>(low, high);
            for (i, all) in [even, odd].into_iter().enumerate() {
                let to = to.as_mut_ptr().wrapping_add(64 * (2 * half + i));
                // SAFETY: there is room for what is stored.
                unsafe {
                    _mm512_storeu_si512(to.cast(), _mm512_and_si512(all, bytes));
                    _mm512_storeu_si512(to.wrapping_add(32).cast(), _mm512_srli_epi16::<8>(all));
                }
            }
        }
    }
}

impl Bytes for __m512i {
    #[target_feature(enable = "avx512f,avx512bw")]
    #[inline]
    unsafe fn two(a: *const u8, b: *const u8) -> __m512i {
        // SAFETY: as the caller promises.
        let [a, b] = [a, b].map(|p| unsafe { _mm256_loadu_si256(p.cast()) });
        _mm512_inserti64x4::<1>(_mm512_castsi256_si512(a), b)
    }

    #[target_feature(enable = "avx512f,avx512bw")]
    #[inline]
    unsafe fn twins(a: *const u8, b: *const u8) -> __m512i {
        // SAFETY: as the caller promises.
        let [a, b] = [a, b].map(|p| unsafe { _mm_loadu_si128(p.cast()) });
        _mm512_mask_broadcast_i32x4(_mm512_broadcast_i32x4(a), 0xff00, b)
    }

    #[target_feature(enable = "avx512f,avx512bw")]
    #[inline]
    unsafe fn bits(bits: u64) -> __m512i {
        _mm512_movm_epi8(bits)
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn words(words: [u64; 8]) -> __m512i {
        let [a, b, c, d, e, f, g, h] = words.map(u64::cast_signed);
        _mm512_setr_epi64(a, b, c, d, e, f, g, h)
    }

    #[target_feature(enable = "avx512f,avx512bw")]
    #[inline]
    unsafe fn negated(self, bits: u64) -> __m512i {
        _mm512_mask_sub_epi8(self, bits, _mm512_setzero_si512(), self)
    }

    #[target_feature(enable = "avx512f,avx512bw")]
    #[inline]
    unsafe fn store(self, to: &mut [i8; 64]) {
        // SAFETY: there is room for all.
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), self) }
    }

    #[target_feature(enable = "avx512f,avx512bw")]
    #[inline]
    unsafe fn right<const A: i32, const B: i32, const C: i32, const D: i32>(self) -> __m512i {
        _mm512_srlv_epi32(self, _mm512_setr_epi32(A, A, A, A, B, B, B, B, C, C, C, C, D, D, D, D))
    }

    #[target_feature(enable = "avx512f,avx512bw")]
    #[inline]
    unsafe fn left<const A: i32, const B: i32, const C: i32, const D: i32>(self) -> __m512i {
        _mm512_sllv_epi32(self, _mm512_setr_epi32(A, A, A, A, B, B, B, B, C, C, C, C, D, D, D, D))
    }

    #[target_feature(enable = "avx512f,avx512bw")]
    #[inline]
    unsafe fn and(self, mask: u8) -> __m512i {
        _mm512_and_si512(self, _mm512_set1_epi8(mask as i8))
    }

    #[target_feature(enable = "avx512f,avx512bw")]
    #[inline]
    unsafe fn has(self, bits: [u8; 4]) -> __m512i {
        let [a, b, c, d] = bits.map(|b| i32::from_ne_bytes([b; 4]));
        let bits = _mm512_setr_epi32(a, a, a, a, b, b, b, b, c, c, c, c, d, d, d, d);
        _mm512_movm_epi8(_mm512_test_epi8_mask(self, bits))
    }

    #[target_feature(enable = "avx512f,avx512bw")]
    #[inline]
    unsafe fn or(self, b: __m512i) -> __m512i {
        _mm512_or_si512(self, b)
    }

    #[target_feature(enable = "avx512f,avx512bw")]
    #[inline]
    unsafe fn less(self, by: u8) -> __m512i {
        _mm512_sub_epi8(self, _mm512_set1_epi8(by as i8))
    }

    #[target_feature(enable = "avx512f,avx512bw")]
    #[inline]
    unsafe fn of(self, table: &[u8; 16]) -> __m512i {
        // SAFETY: there are 16 entries.
        let table = _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(table.as_ptr().cast()) });
        _mm512_shuffle_epi8(table, self)
    }

    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    unsafe fn half(from: *const u8) -> f32 {
        // SAFETY: as the caller promises.
        let bits = u16::from_le_bytes(unsafe { from.cast::<[u8; 2]>().read() });
        _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits))))
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn halves(from: [*const u8; 8], to: &mut [f32; PARTS]) {
        // SAFETY: as the caller promises; there is room for all.
        unsafe {
            let at = |i: usize| i16::from_le_bytes(from[i].cast::<[u8; 2]>().read());
            let bits = _mm_setr_epi16(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7));
            let bits = _mm256_permute4x64_epi64::<0x50>(_mm256_castsi128_si256(bits));
            _mm512_storeu_ps(to.as_mut_ptr(), _mm512_cvtph_ps(bits));
        }
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn times(factors: &[f32; PARTS], by: u8, to: &mut [f32; PARTS]) {
        // SAFETY: both have a register.
        unsafe {
            let all = _mm512_mul_ps(_mm512_loadu_ps(factors.as_ptr()), _mm512_set1_ps(f32::from(by)));
            _mm512_storeu_ps(to.as_mut_ptr(), all);
        }
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn pairs(codes: u64, by: f32, to: &mut [f32; PARTS]) {
        let order = _mm_setr_epi8(0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7);
        let codes = _mm512_cvtepi8_epi32(_mm_shuffle_epi8(_mm_cvtsi64_si128(codes as i64), order));
        // SAFETY: there is room for all.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), _mm512_mul_ps(_mm512_cvtepi32_ps(codes), _mm512_set1_ps(by))) };
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn codes(codes: u128, by: f32, to: &mut [f32; PARTS]) {
        let codes = _mm_set_epi64x((codes >> 64) as i64, codes as i64);
        let codes = _mm_shuffle_epi8(codes, _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
        let codes = _mm512_cvtepi8_epi32(codes);
        // SAFETY: there is room for all.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), _mm512_mul_ps(_mm512_cvtepi32_ps(codes), _mm512_set1_ps(by))) };
    }
}

/// Rows become columns.
#[target_feature(enable = "avx512f")]
#[inline]
fn turn(r: [__m512; 16]) -> [__m512; 16] {
    let mut pairs = r;
    for i in 0..8 {
        pairs[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        pairs[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    // quads[4 i + j]: lane group g holds column 4 g + j of rows 4 i to 4 i + 3.
    let mut quads = r;
    for i in 0..4 {
        for j in 0..2 {
            let x = _mm512_castps_pd(pairs[4 * i + j]);
            let y = _mm512_castps_pd(pairs[4 * i + j + 2]);
            quads[4 * i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y));
            quads[4 * i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
        }
    }
    let mut out = r;
    for j in 0..4 {
        let even = _mm512_shuffle_f32x4::<0x88>(quads[j], quads[4 + j]);
        let odd = _mm512_shuffle_f32x4::<0xdd>(quads[j], quads[4 + j]);
        let even2 = _mm512_shuffle_f32x4::<0x88>(quads[8 + j], quads[12 + j]);
        let odd2 = _mm512_shuffle_f32x4::<0xdd>(quads[8 + j], quads[12 + j]);
        out[j] = _mm512_shuffle_f32x4::<0x88>(even, even2);
        out[4 + j] = _mm512_shuffle_f32x4::<0x88>(odd, odd2);
        out[8 + j] = _mm512_shuffle_f32x4::<0xdd>(even, even2);
        out[12 + j] = _mm512_shuffle_f32x4::<0xdd>(odd, odd2);
    }
    out
}

impl Vector for __m512 {
    const LANES: usize = 16;
    type Mask = __mmask16;
    type Block = [__m512; 16];

    #[inline(always)]
    unsafe fn mask(bits: u32) -> __mmask16 {
        bits as __mmask16
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn splat(x: f32) -> Self {
        _mm512_set1_ps(x)
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: as the caller promises.
        unsafe { _mm512_loadu_ps(from) }
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: as the caller promises.
        unsafe { _mm512_storeu_ps(to, self) }
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn load_some(from: *const f32, mask: __mmask16) -> Self {
        // SAFETY: as the caller promises.
        unsafe { _mm512_maskz_loadu_ps(mask, from) }
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn load_over(self, from: *const f32, mask: __mmask16) -> Self {
        // SAFETY: as the caller promises.
        unsafe { _mm512_mask_loadu_ps(self, mask, from) }
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn store_some(self, to: *mut f32, mask: __mmask16) {
        // SAFETY: as the caller promises.
        unsafe { _mm512_mask_storeu_ps(to, mask, self) }
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn replaced(self, other: Self, mask: __mmask16) -> Self {
        _mm512_mask_blend_ps(mask, self, other)
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn add(self, b: Self) -> Self {
        _mm512_add_ps(self, b)
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn sub(self, b: Self) -> Self {
        _mm512_sub_ps(self, b)
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn mul(self, b: Self) -> Self {
        _mm512_mul_ps(self, b)
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn div(self, b: Self) -> Self {
        _mm512_div_ps(self, b)
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        _mm512_fmadd_ps(self, b, c)
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn max(self, b: Self) -> Self {
        _mm512_max_ps(self, b)
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn min(self, b: Self) -> Self {
        _mm512_min_ps(self, b)
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn round(self) -> Self {
        _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self)
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn scaled(self, n: Self) -> Self {
        _mm512_scalef_ps(self, n)
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn less(self, b: Self) -> __mmask16 {
        _mm512_cmp_ps_mask::<_CMP_LT_OQ>(self, b)
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn unzip(self, b: Self) -> (Self, Self) {
        let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        let odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
        (_mm512_permutex2var_ps(self, even, b), _mm512_permutex2var_ps(self, odd, b))
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn zip(self, b: Self) -> (Self, Self) {
        let first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        let second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
        (_mm512_permutex2var_ps(self, first, b), _mm512_permutex2var_ps(self, second, b))
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn load_halves(from: *const u8) -> Self {
        // SAFETY: as the caller promises.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn load_bytes(from: *const i8) -> Self {
        // SAFETY: as the caller promises.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))) }
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn load_turned(from: &[*const f32; MAX_LANES]) -> [__m512; 16] {
        let mut out = [_mm512_setzero_ps(); 16];
        for c in 0..4 {
            let mut rows = [_mm512_setzero_ps(); 4];
            for (i, row) in rows.iter_mut().enumerate() {
                // SAFETY: each pointer leads to 16 elements.
                let at = |j: usize| unsafe { _mm_loadu_ps(from[i + 4 * j].wrapping_add(4 * c)) };
                // Insertions from memory need no shuffle.
                let x = _mm512_castps128_ps512(at(0));
                let x = _mm512_insertf32x4::<1>(x, at(1));
                let x = _mm512_insertf32x4::<2>(x, at(2));
                *row = _mm512_insertf32x4::<3>(x, at(3));
            }
            let pair = |a, b| (_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            let (a, b) = pair(rows[0], rows[1]);
            let (c0, d) = pair(rows[2], rows[3]);
            let [a, b, c0, d] = [a, b, c0, d].map(|v| _mm512_castps_pd(v));
            out[4 * c] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c0));
            out[4 * c + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c0));
            out[4 * c + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
            out[4 * c + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
        }
        out
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn load_turned_some(from: &[*const f32; MAX_LANES], there: __mmask16) -> [__m512; 16] {
        // SAFETY: masked lanes exist.
        turn(from.map(|p| unsafe { _mm512_maskz_loadu_ps(there, p) }))
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn gather(from: *const f32, index: &[i32], _: u32, mask: __mmask16) -> Self {
        // SAFETY: there are 16 indices, valid where the mask is set.
        unsafe {
            let offsets = _mm512_loadu_si512(index.as_ptr().cast());
            _mm512_mask_i32gather_ps::<4>(_mm512_setzero_ps(), mask, offsets, from)
        }
    }
}
