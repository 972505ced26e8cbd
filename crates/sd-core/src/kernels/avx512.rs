//! AVX-512F: tiles of 14 rows by two registers, which leave two for the columns and one for a row.

use std::arch::x86_64::*;

use super::inner::isa;
use super::vector::{MAX_LANES, Vector};

isa!(__m512, 1024, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14], "avx512f");

pub(super) fn is_available() -> bool {
    is_x86_feature_detected!("avx512f")
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
