//! AVX2 with FMA: tiles of 6 rows by two registers.

use std::arch::x86_64::*;

use super::inner::isa;
use super::vector::{MAX_LANES, Vector};

isa!(__m256, 512, [1, 2, 3, 4, 5, 6], "avx2,fma,f16c");

pub(super) fn is_available() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

/// Rows become columns.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn turn(r: [__m256; 8]) -> [__m256; 8] {
    let mut pairs = r;
    for i in 0..4 {
        pairs[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        pairs[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    // quads[4 i + j]: half g holds column 4 g + j of rows 4 i to 4 i + 3.
    let mut quads = r;
    for i in 0..2 {
        for j in 0..2 {
            let x = _mm256_castps_pd(pairs[4 * i + j]);
            let y = _mm256_castps_pd(pairs[4 * i + j + 2]);
            quads[4 * i + 2 * j] = _mm256_castpd_ps(_mm256_unpacklo_pd(x, y));
            quads[4 * i + 2 * j + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(x, y));
        }
    }
    let mut out = r;
    for j in 0..4 {
        out[j] = _mm256_permute2f128_ps::<0x20>(quads[j], quads[4 + j]);
        out[4 + j] = _mm256_permute2f128_ps::<0x31>(quads[j], quads[4 + j]);
    }
    out
}

impl Vector for __m256 {
    const LANES: usize = 8;
    type Mask = __m256i;
    type Block = [__m256; 8];

    #[target_feature(enable = "avx2,fma")]
    #[inline]
    unsafe fn mask(bits: u32) -> __m256i {
        let each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
        _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(bits as i32), each), each)
    }

    #[target_feature(enable = "avx2,fma")]
    #[inline]
    unsafe fn splat(x: f32) -> Self {
        _mm256_set1_ps(x)
    }

    #[target_feature(enable = "avx2,fma")]
    #[inline]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: as the caller promises.
        unsafe { _mm256_loadu_ps(from) }
    }

    #[target_feature(enable = "avx2,fma")]
    #[inline]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: as the caller promises.
        unsafe { _mm256_storeu_ps(to, self) }
    }

    #[target_feature(enable = "avx2,fma")]
    #[inline]
    unsafe fn load_some(from: *const f32, mask: __m256i) -> Self {
        // SAFETY: as the caller promises.
        unsafe { _mm256_maskload_ps(from, mask) }
    }

    #[target_feature(enable = "avx2,fma")]
    #[inline]
    unsafe fn load_over(self, from: *const f32, mask: __m256i) -> Self {
        // SAFETY: as the caller promises.
        unsafe { _mm256_or_ps(self, _mm256_maskload_ps(from, mask)) }
    }

    #[target_feature(enable = "avx2,fma")]
    #[inline]
    unsafe fn store_some(self, to: *mut f32, mask: __m256i) {
        // SAFETY: as the caller promises.
        unsafe { _mm256_maskstore_ps(to, mask, self) }
    }

    #[target_feature(enable = "avx2,fma")]
    #[inline]
    unsafe fn replaced(self, other: Self, mask: __m256i) -> Self {
        _mm256_blendv_ps(self, other, _mm256_castsi256_ps(mask))
    }

    #[target_feature(enable = "avx2,fma")]
    #[inline]
    unsafe fn add(self, b: Self) -> Self {
        _mm256_add_ps(self, b)
    }

    #[target_feature(enable = "avx2,fma")]
    #[inline]
    unsafe fn sub(self, b: Self) -> Self {
        _mm256_sub_ps(self, b)
    }

    #[target_feature(enable = "avx2,fma")]
    #[inline]
    unsafe fn mul(self, b: Self) -> Self {
        _mm256_mul_ps(self, b)
    }

    #[target_feature(enable = "avx2,fma")]
    #[inline]
    unsafe fn div(self, b: Self) -> Self {
        _mm256_div_ps(self, b)
    }

    #[target_feature(enable = "avx2,fma")]
    #[inline]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        _mm256_fmadd_ps(self, b, c)
    }

    #[target_feature(enable = "avx2,fma")]
    #[inline]
    unsafe fn max(self, b: Self) -> Self {
        _mm256_max_ps(self, b)
    }

    #[target_feature(enable = "avx2,fma")]
    #[inline]
    unsafe fn min(self, b: Self) -> Self {
        _mm256_min_ps(self, b)
    }

    #[target_feature(enable = "avx2,fma")]
    #[inline]
    unsafe fn round(self) -> Self {
        _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self)
    }

    #[target_feature(enable = "avx2,fma")]
    #[inline]
    unsafe fn scaled(self, n: Self) -> Self {
        // In two steps, each of which is a normal number.
        let power = |n| _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(n, _mm256_set1_epi32(127))));
        let n = _mm256_cvtps_epi32(n);
        let half = _mm256_srai_epi32::<1>(n);
        let x = _mm256_mul_ps(self, power(half));
        _mm256_mul_ps(x, power(_mm256_sub_epi32(n, half)))
    }

    #[target_feature(enable = "avx2,fma")]
    #[inline]
    unsafe fn less(self, b: Self) -> __m256i {
        _mm256_castps_si256(_mm256_cmp_ps::<_CMP_LT_OQ>(self, b))
    }

    #[target_feature(enable = "avx2,fma")]
    #[inline]
    unsafe fn unzip(self, b: Self) -> (Self, Self) {
        // Quarters of both in turn come into order.
        let order = |x| _mm256_castpd_ps(_mm256_permute4x64_pd::<0xd8>(_mm256_castps_pd(x)));
        (order(_mm256_shuffle_ps::<0x88>(self, b)), order(_mm256_shuffle_ps::<0xdd>(self, b)))
    }

    #[target_feature(enable = "avx2,fma")]
    #[inline]
    unsafe fn zip(self, b: Self) -> (Self, Self) {
        let (low, high) = (_mm256_unpacklo_ps(self, b), _mm256_unpackhi_ps(self, b));
        (_mm256_permute2f128_ps::<0x20>(low, high), _mm256_permute2f128_ps::<0x31>(low, high))
    }

    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    unsafe fn load_halves(from: *const u8) -> Self {
        // SAFETY: as the caller promises.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }

    #[target_feature(enable = "avx2,fma")]
    #[inline]
    unsafe fn load_bytes(from: *const i8) -> Self {
        // SAFETY: as the caller promises.
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast()))) }
    }

    #[target_feature(enable = "avx2,fma")]
    #[inline]
    unsafe fn load_turned(from: &[*const f32; MAX_LANES]) -> [__m256; 8] {
        let mut out = [_mm256_setzero_ps(); 8];
        for c in 0..2 {
            let mut rows = [_mm256_setzero_ps(); 4];
            for (i, row) in rows.iter_mut().enumerate() {
                // SAFETY: each pointer leads to 8 elements.
                let at = |j: usize| unsafe { _mm_loadu_ps(from[i + 4 * j].wrapping_add(4 * c)) };
                // Insertions from memory need no shuffle.
                *row = _mm256_insertf128_ps::<1>(_mm256_castps128_ps256(at(0)), at(1));
            }
            let pair = |a, b| (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
            let (a, b) = pair(rows[0], rows[1]);
            let (c0, d) = pair(rows[2], rows[3]);
            let [a, b, c0, d] = [a, b, c0, d].map(|v| _mm256_castps_pd(v));
            out[4 * c] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, c0));
            out[4 * c + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, c0));
            out[4 * c + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(b, d));
            out[4 * c + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(b, d));
        }
        out
    }

    #[target_feature(enable = "avx2,fma")]
    #[inline]
    unsafe fn load_turned_some(from: &[*const f32; MAX_LANES], there: __m256i) -> [__m256; 8] {
        let mut rows = [_mm256_setzero_ps(); 8];
        for (row, &p) in rows.iter_mut().zip(from) {
            // SAFETY: masked lanes exist.
            *row = unsafe { _mm256_maskload_ps(p, there) };
        }
        turn(rows)
    }

    #[target_feature(enable = "avx2,fma")]
    #[inline]
    unsafe fn gather(from: *const f32, index: &[i32], _: u32, _: __m256i) -> Self {
        let mut x = [0.0; 8];
        for (x, &i) in x.iter_mut().zip(index) {
            if i >= 0 {
                // SAFETY: indices that are not negative are valid.
                *x = unsafe { *from.wrapping_add(i as usize) };
            }
        }
        // SAFETY: there are 8 elements.
        unsafe { _mm256_loadu_ps(x.as_ptr()) }
    }
}
