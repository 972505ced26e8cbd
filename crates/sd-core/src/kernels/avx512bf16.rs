//! AVX-512F with products of bf16: the loops of `avx512.rs`, in which every word of a factor is two terms. Products are
//! exact and sums are f32.

use std::arch::x86_64::*;

use super::integers::{self, IntegerDots, Integers};
use super::vector::{Vector, Words};
use super::{DEPTH, Isa, Narrow, attention, avx512, inner, winograd};

pub(super) static ISA: Isa = Isa {
    narrow: Some(Narrow { wide: &avx512::ISA, row, halves, pair }),
    rows: 12,
    tile: |rows, t| {
        macro_rules! tiles {
            ($($row:literal),*) => {
                // SAFETY: the caller has made sure of the instruction set, and `t` has that many rows.
                unsafe {
                    match rows {
                        $($row => tile::<$row>(t),)*
                        _ => {}
                    }
                }
            };
        }
        tiles!(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)
    },
    integer_dots,
    soften,
    strips,
    kernel_in,
    ..avx512::TABLE
};

pub(super) fn is_available() -> bool {
    avx512::is_available() && is_x86_feature_detected!("avx512bf16") && is_x86_feature_detected!("avx512vnni")
}

/// Integers of 16 bits, whose products are added by the instruction that multiplies.
struct Fused;

impl Integers for Fused {
    type V = __m512;
    type Bytes = __m512i;
    type Terms = __m512i;
    type Sums = __m512i;

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn load(from: *const i16) -> __m512i {
        // SAFETY: as the caller promises.
        unsafe { avx512::Words::load(from) }
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn zero() -> __m512i {
        _mm512_setzero_si512()
    }

    #[target_feature(enable = "avx512f,avx512vnni")]
    #[inline]
    unsafe fn dot(sums: __m512i, x: __m512i, w: __m512i) -> __m512i {
        _mm512_dpwssd_epi32(sums, x, w)
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn floats(sums: __m512i, _: usize) -> __m512 {
        _mm512_cvtepi32_ps(sums)
    }

    #[target_feature(enable = "avx512f,avx512bw")]
    #[inline]
    unsafe fn spread(from: [__m512i; 4], to: &mut [i16; DEPTH]) {
        // SAFETY: as the caller promises.
        unsafe { avx512::Words::spread(from, to) }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn integer_dots(d: &IntegerDots) {
    // SAFETY: as the caller promises.
    unsafe { integers::dots::<Fused>(d) }
}

/// Two bf16 in every lane.
struct Pairs;

impl Words for Pairs {
    type V = __m512;
    const GRAIN: usize = 2;

    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    #[inline]
    unsafe fn dot(a: __m512, b: __m512, sum: __m512) -> __m512 {
        // SAFETY: both are 512 bits of which all patterns are valid.
        let [a, b] = [a, b].map(|x| unsafe { std::mem::transmute::<__m512, __m512bh>(x) });
        _mm512_dpbf16_ps(sum, a, b)
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    #[inline]
    unsafe fn exp2(x: __m512) -> __m512 {
        // SAFETY: as the caller promises.
        unsafe {
            let x = __m512::splat(-151.0).max(x);
            let n = x.round();
            let f = x.sub(n);
            let mut y = __m512::splat(EXP2[0]);
            for &c in &EXP2[1..] {
                y = y.mul_add(f, __m512::splat(c));
            }
            y.scaled(n)
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    #[inline]
    unsafe fn pair(first: __m512, second: __m512) -> __m512 {
        // Sixteen of each, to be put in turn.
        let order: [u16; 32] = std::array::from_fn(|i| (i / 2 + 16 * (i % 2)) as u16);
        // SAFETY: the order is 32 numbers.
        let order = unsafe { _mm512_loadu_si512(order.as_ptr().cast()) };
        _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, narrowed(first, second)))
    }
}

/// Coefficients of 2^f for |f| ≤ 1/2, found as those of `vector::EXP2` (1e-4; a bf16 loses 2e-3).
#[allow(clippy::excessive_precision)]
const EXP2: [f32; 4] = [0.055_007_655, 0.242_211_149, 0.693_283_085, 1.0];

/// The lanes of `first` as bf16, then those of `second`.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
#[inline]
fn narrowed(first: __m512, second: __m512) -> __m512i {
    // SAFETY: both are 512 bits of which all patterns are valid.
    unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(second, first)) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn tile<const R: usize>(t: &super::Tile) {
    // SAFETY: as the caller promises.
    unsafe { inner::tile::<Pairs, R>(t) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn soften(s: &attention::Scores) {
    // SAFETY: as the caller promises.
    unsafe { attention::soften::<Pairs>(s) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn strips(from: *const f32, step: usize, sizes: [usize; 3], to: *mut f32) {
    // SAFETY: as the caller promises.
    unsafe { attention::strips::<Pairs>(from, step, sizes, to) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn kernel_in(taps: *const f32, sizes: [usize; 2], to: *mut f32, step: usize) {
    // SAFETY: as the caller promises.
    unsafe { winograd::kernel_in::<Pairs>(taps, sizes, to, step) }
}

/// Terms of two registers.
const TERMS: usize = 32;

/// `to` may be `from`.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn row(from: *const f32, len: usize, to: *mut f32) {
    let whole = len - len % TERMS;
    // SAFETY: masked lanes are below `len`; what is overwritten was read before.
    unsafe {
        for i in (0..whole).step_by(TERMS) {
            let from = from.wrapping_add(i);
            let (a, b) = (_mm512_loadu_ps(from), _mm512_loadu_ps(from.wrapping_add(16)));
            _mm512_storeu_si512(to.wrapping_add(i / 2).cast(), narrowed(a, b));
        }
        let rest = len - whole;
        if rest > 0 {
            let from = from.wrapping_add(whole);
            let a = __m512::load_some(from, __m512::first(rest));
            let b = __m512::load_some(from.wrapping_add(16), __m512::first(rest.saturating_sub(16)));
            let x = _mm512_castsi512_ps(narrowed(a, b));
            x.store_some(to.wrapping_add(whole / 2), __m512::first(rest.div_ceil(2)));
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn halves(from: *const u8, len: usize, to: *mut f32) {
    let whole = len - len % TERMS;
    // SAFETY: as the caller promises; what remains is copied to where all of it can be read.
    unsafe {
        for i in (0..whole).step_by(TERMS) {
            let from = from.wrapping_add(2 * i);
            let (a, b) = (__m512::load_halves(from), __m512::load_halves(from.wrapping_add(32)));
            _mm512_storeu_si512(to.wrapping_add(i / 2).cast(), narrowed(a, b));
        }
        let rest = len - whole;
        if rest > 0 {
            let mut last = [0u8; 2 * TERMS];
            std::ptr::copy_nonoverlapping(from.wrapping_add(2 * whole), last.as_mut_ptr(), 2 * rest);
            let from = last.as_ptr();
            let (a, b) = (__m512::load_halves(from), __m512::load_halves(from.wrapping_add(32)));
            let x = _mm512_castsi512_ps(narrowed(a, b));
            x.store_some(to.wrapping_add(whole / 2), __m512::first(rest.div_ceil(2)));
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn pair([first, second]: [Option<*const f32>; 2], to: *mut f32) {
    let load = |from: Option<*const f32>, v: usize| match from {
        // SAFETY: the rows are as wide as a tile.
        Some(p) => unsafe { _mm512_loadu_ps(p.wrapping_add(16 * v)) },
        None => _mm512_setzero_ps(),
    };
    for v in 0..inner::WIDE {
        // SAFETY: as above.
        unsafe { Pairs::pair(load(first, v), load(second, v)).store(to.wrapping_add(16 * v)) };
    }
}
