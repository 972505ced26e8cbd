//! AVX2 with FMA: tiles of 6 rows by two registers.

use std::arch::x86_64::*;

use super::DEPTH;
use super::inner::isa;
use super::integers::{Bytes, Integers, PARTS};
use super::vector::{MAX_LANES, Vector};

isa!(__m256, Pairs, 512, [1, 2, 3, 4, 5, 6], "avx2,fma,f16c");

pub(super) fn is_available() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

/// Two registers stand for one.
struct Pairs;

impl Integers for Pairs {
    type V = __m256;
    type Bytes = [__m256i; 2];
    type Terms = [__m256i; 2];
    type Sums = [__m256i; 2];

    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn load(from: *const i16) -> [__m256i; 2] {
        // SAFETY: as the caller promises.
        unsafe { [_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.wrapping_add(16).cast())] }
    }

    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn zero() -> [__m256i; 2] {
        [_mm256_setzero_si256(); 2]
    }

    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn dot(sums: [__m256i; 2], x: [__m256i; 2], w: [__m256i; 2]) -> [__m256i; 2] {
        [
            _mm256_add_epi32(sums[0], _mm256_madd_epi16(x[0], w[0])),
            _mm256_add_epi32(sums[1], _mm256_madd_epi16(x[1], w[1])),
        ]
    }

    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn floats(sums: [__m256i; 2], first: usize) -> __m256 {
        _mm256_cvtepi32_ps(if first == 0 { sums[0] } else { sums[1] })
    }

    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn spread(from: [[__m256i; 2]; 4], to: &mut [i16; DEPTH]) {
        let bytes = _mm256_set1_epi16(255);
        for (set, from) in from.as_chunks::<2>().0.iter().enumerate() {
            // Registers of an even and an odd part, whose words come to lie side by side.
            let [[a, b], [c, d]] = *from;
            let low = [_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b)];
            let high = [_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d)];
            for word in 0..4 {
                let (low, high) = (low[word / 2], high[word / 2]);
                let all = match word % 2 {
                    0 => _mm256_unpacklo_epi64(low, high),
                    _ => _mm256_unpackhi_epi64(low, high),
                };
                let to = to.as_mut_ptr().wrapping_add(64 * word + 16 * set);
                // SAFETY: there is room for what is stored.
                unsafe {
                    _mm256_storeu_si256(to.cast(), _mm256_and_si256(all, bytes));
                    _mm256_storeu_si256(to.wrapping_add(32).cast(), _mm256_srli_epi16::<8>(all));
                }
            }
        }
    }
}

impl Bytes for [__m256i; 2] {
    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn two(a: *const u8, b: *const u8) -> [__m256i; 2] {
        // SAFETY: as the caller promises.
        unsafe { [_mm256_loadu_si256(a.cast()), _mm256_loadu_si256(b.cast())] }
    }

    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn twins(a: *const u8, b: *const u8) -> [__m256i; 2] {
        // SAFETY: as the caller promises.
        [a, b].map(|p| _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(p.cast()) }))
    }

    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn bits(bits: u64) -> [__m256i; 2] {
        // Each byte of bits eight times, of which one bit counts.
        let order = _mm256_setr_epi64x(0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303);
        let one = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
        [bits as i32, (bits >> 32) as i32].map(|bits| {
            let spread = _mm256_shuffle_epi8(_mm256_set1_epi32(bits), order);
            _mm256_cmpeq_epi8(_mm256_and_si256(spread, one), one)
        })
    }

    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn words(words: [u64; 8]) -> [__m256i; 2] {
        let [a, b, c, d, e, f, g, h] = words.map(u64::cast_signed);
        [_mm256_setr_epi64x(a, b, c, d), _mm256_setr_epi64x(e, f, g, h)]
    }

    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn negated(self, bits: u64) -> [__m256i; 2] {
        // SAFETY: the machine has AVX2.
        let [a, b] = unsafe { <[__m256i; 2]>::bits(bits) };
        let negated = |x, bits| _mm256_sub_epi8(_mm256_xor_si256(x, bits), bits);
        [negated(self[0], a), negated(self[1], b)]
    }

    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn store(self, to: &mut [i8; 64]) {
        let to = to.as_mut_ptr();
        // SAFETY: there is room for both.
        unsafe {
            _mm256_storeu_si256(to.cast(), self[0]);
            _mm256_storeu_si256(to.wrapping_add(32).cast(), self[1]);
        }
    }

    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn right<const A: i32, const B: i32, const C: i32, const D: i32>(self) -> [__m256i; 2] {
        let [a, b] = [[A, B], [C, D]].map(|[a, b]| _mm256_setr_epi32(a, a, a, a, b, b, b, b));
        [_mm256_srlv_epi32(self[0], a), _mm256_srlv_epi32(self[1], b)]
    }

    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn left<const A: i32, const B: i32, const C: i32, const D: i32>(self) -> [__m256i; 2] {
        let [a, b] = [[A, B], [C, D]].map(|[a, b]| _mm256_setr_epi32(a, a, a, a, b, b, b, b));
        [_mm256_sllv_epi32(self[0], a), _mm256_sllv_epi32(self[1], b)]
    }

    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn and(self, mask: u8) -> [__m256i; 2] {
        self.map(|x| _mm256_and_si256(x, _mm256_set1_epi8(mask as i8)))
    }

    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn has(self, bits: [u8; 4]) -> [__m256i; 2] {
        let [a, b, c, d] = bits.map(|b| _mm_set1_epi8(b as i8));
        let none = [_mm256_set_m128i(b, a), _mm256_set_m128i(d, c)];
        let none = [_mm256_and_si256(self[0], none[0]), _mm256_and_si256(self[1], none[1])]
            .map(|x| _mm256_cmpeq_epi8(x, _mm256_setzero_si256()));
        none.map(|x| _mm256_xor_si256(x, _mm256_set1_epi8(-1)))
    }

    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn or(self, b: [__m256i; 2]) -> [__m256i; 2] {
        [_mm256_or_si256(self[0], b[0]), _mm256_or_si256(self[1], b[1])]
    }

    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn less(self, by: u8) -> [__m256i; 2] {
        self.map(|x| _mm256_sub_epi8(x, _mm256_set1_epi8(by as i8)))
    }

    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn of(self, table: &[u8; 16]) -> [__m256i; 2] {
        // SAFETY: there are 16 entries.
        let table = _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(table.as_ptr().cast()) });
        self.map(|x| _mm256_shuffle_epi8(table, x))
    }

    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    unsafe fn half(from: *const u8) -> f32 {
        // SAFETY: as the caller promises.
        let bits = u16::from_le_bytes(unsafe { from.cast::<[u8; 2]>().read() });
        _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits))))
    }

    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    unsafe fn halves(from: [*const u8; 8], to: &mut [f32; PARTS]) {
        // SAFETY: as the caller promises; there is room for both halves.
        unsafe {
            let at = |i: usize| i16::from_le_bytes(from[i].cast::<[u8; 2]>().read());
            let bits = _mm_setr_epi16(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7));
            _mm256_storeu_ps(to.as_mut_ptr(), _mm256_cvtph_ps(_mm_unpacklo_epi64(bits, bits)));
            _mm256_storeu_ps(to.as_mut_ptr().wrapping_add(8), _mm256_cvtph_ps(_mm_unpackhi_epi64(bits, bits)));
        }
    }

    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn times(factors: &[f32; PARTS], by: u8, to: &mut [f32; PARTS]) {
        for (to, factors) in to.as_chunks_mut::<8>().0.iter_mut().zip(factors.as_chunks::<8>().0) {
            // SAFETY: both have a register.
            unsafe {
                let some = _mm256_mul_ps(_mm256_loadu_ps(factors.as_ptr()), _mm256_set1_ps(f32::from(by)));
                _mm256_storeu_ps(to.as_mut_ptr(), some);
            }
        }
    }

    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn pairs(codes: u64, by: f32, to: &mut [f32; PARTS]) {
        let codes = _mm_cvtsi64_si128(codes as i64);
        let order = _mm_setr_epi8(0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7);
        scaled(_mm_shuffle_epi8(codes, order), by, to)
    }

    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn codes(codes: u128, by: f32, to: &mut [f32; PARTS]) {
        let codes = _mm_set_epi64x((codes >> 64) as i64, codes as i64);
        let order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
        scaled(_mm_shuffle_epi8(codes, order), by, to)
    }
}

/// Codes times a factor.
#[target_feature(enable = "avx2")]
#[inline]
fn scaled(codes: __m128i, by: f32, to: &mut [f32; PARTS]) {
    for (to, codes) in to.as_chunks_mut::<8>().0.iter_mut().zip([codes, _mm_unpackhi_epi64(codes, codes)]) {
        let some = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)), _mm256_set1_ps(by));
        // SAFETY: there is room for a register.
        unsafe { _mm256_storeu_ps(to.as_mut_ptr(), some) };
    }
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
