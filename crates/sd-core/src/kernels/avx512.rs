//! Inner loops for AVX-512F: tiles of 14 rows by two registers, which leave two for the columns and one for a row.

use std::arch::x86_64::*;

use super::{Base, Isa, Tile};

const ROWS: usize = 14;
/// Elements of a register.
const LANES: usize = 16;
const COLUMNS: usize = 2 * LANES;

pub(super) static ISA: Isa = Isa { rows: ROWS, columns: COLUMNS, block: 1024, tile, transpose, gather, halves };

pub(super) fn is_available() -> bool {
    is_x86_feature_detected!("avx512f")
}

/// The first `n` lanes of a register.
fn lanes(n: usize) -> __mmask16 {
    if n >= LANES { !0 } else { (1 << n) - 1 }
}

/// # Safety
/// The machine has AVX-512F; `t` describes valid memory and has at most `ROWS` rows.
unsafe fn tile(rows: usize, t: &Tile) {
    // SAFETY: as the caller promises.
    unsafe {
        match rows {
            1 => tile_of::<1>(t),
            2 => tile_of::<2>(t),
            3 => tile_of::<3>(t),
            4 => tile_of::<4>(t),
            5 => tile_of::<5>(t),
            6 => tile_of::<6>(t),
            7 => tile_of::<7>(t),
            8 => tile_of::<8>(t),
            9 => tile_of::<9>(t),
            10 => tile_of::<10>(t),
            11 => tile_of::<11>(t),
            12 => tile_of::<12>(t),
            13 => tile_of::<13>(t),
            _ => tile_of::<14>(t),
        }
    }
}

/// # Safety
/// The machine has AVX-512F; `t` describes valid memory and has `R` rows.
#[target_feature(enable = "avx512f")]
unsafe fn tile_of<const R: usize>(t: &Tile) {
    let mut sums = [[_mm512_setzero_ps(); 2]; R];
    let (mut a, mut b) = (t.a, t.b);
    for _ in 0..t.depth {
        // SAFETY: the panels hold `depth` rows of `R` and `COLUMNS` elements.
        unsafe {
            let b0 = _mm512_loadu_ps(b);
            let b1 = _mm512_loadu_ps(b.wrapping_add(LANES));
            for (r, sums) in sums.iter_mut().enumerate() {
                let x = _mm512_set1_ps(*a.wrapping_add(r));
                sums[0] = _mm512_fmadd_ps(x, b0, sums[0]);
                sums[1] = _mm512_fmadd_ps(x, b1, sums[1]);
            }
        }
        a = a.wrapping_add(R);
        b = b.wrapping_add(COLUMNS);
    }
    let masks = [lanes(t.columns), lanes(t.columns.saturating_sub(LANES))];
    for (r, sums) in sums.iter().enumerate() {
        for (v, (&sum, mask)) in sums.iter().zip(masks).enumerate() {
            let c = t.c.wrapping_add(r * t.stride + v * LANES);
            // SAFETY: masked lanes lie in the tile and its bases; others are not touched.
            unsafe {
                let base = match t.base {
                    Base::Sum => _mm512_maskz_loadu_ps(mask, c),
                    Base::Zero => _mm512_setzero_ps(),
                    Base::Rows(p) => _mm512_set1_ps(*p.add(r)),
                    Base::Columns(p) => _mm512_maskz_loadu_ps(mask, p.wrapping_add(v * LANES)),
                };
                _mm512_mask_storeu_ps(c, mask, _mm512_add_ps(base, sum));
            }
        }
    }
}

/// Rows become columns.
#[target_feature(enable = "avx512f")]
#[inline]
fn turn(r: [__m512; LANES]) -> [__m512; LANES] {
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

/// # Safety
/// The machine has AVX-512F; each of `from` is valid for `len` reads, `to` for `from.len() * len` writes.
#[target_feature(enable = "avx512f")]
unsafe fn transpose(from: &[*const f32], len: usize, to: *mut f32) {
    let width = from.len();
    for (group, rows) in from.chunks(LANES).enumerate() {
        let keep = lanes(rows.len());
        let at = |i: usize| to.wrapping_add(i * width + group * LANES);
        // Rows that are missing are not stored: the first stands for them.
        let mut starts = [from[group * LANES]; LANES];
        starts[..rows.len()].copy_from_slice(rows);
        for i in (0..len).step_by(LANES) {
            let there = lanes(len - i);
            let mut block = [_mm512_setzero_ps(); LANES];
            for (v, p) in block.iter_mut().zip(starts) {
                // SAFETY: masked lanes are below `len`.
                *v = unsafe { _mm512_maskz_loadu_ps(there, p.wrapping_add(i)) };
            }
            let turned = turn(block);
            if len - i >= LANES {
                for (j, v) in turned.iter().enumerate() {
                    // SAFETY: masked lanes are rows that exist.
                    unsafe { _mm512_mask_storeu_ps(at(i + j), keep, *v) };
                }
            } else {
                for (j, v) in turned.iter().enumerate().take(len - i) {
                    // SAFETY: as above.
                    unsafe { _mm512_mask_storeu_ps(at(i + j), keep, *v) };
                }
            }
        }
    }
}

/// Runs of neighbours that one register is put together from before single elements are cheaper.
const RUNS: usize = 6;

/// # Safety
/// The machine has AVX-512F. Every index that is not negative is valid in every plane, and `to` for `COLUMNS` writes at
/// every step.
#[target_feature(enable = "avx512f")]
unsafe fn gather(index: &[i32], from: *const f32, plane: usize, count: usize, to: *mut f32, step: usize) {
    for (v, index) in index.chunks_exact(LANES).enumerate() {
        let to = to.wrapping_add(v * LANES);
        // Lanes whose index exceeds their position by the same amount are loaded at once.
        let mut runs = [(0 as __mmask16, 0isize); RUNS];
        let (mut used, mut any) = (0, 0 as __mmask16);
        for (lane, &at) in index.iter().enumerate() {
            if at < 0 {
                continue;
            }
            any |= 1 << lane;
            let offset = at as isize - lane as isize;
            match runs.iter_mut().take(used.min(RUNS)).find(|r| r.1 == offset) {
                Some(run) => run.0 |= 1 << lane,
                None => {
                    if let Some(run) = runs.get_mut(used) {
                        *run = (1 << lane, offset);
                    }
                    used += 1;
                }
            }
        }
        let mut plane_at = from;
        let mut at = to;
        if used <= 1 {
            let (mask, offset) = runs[0];
            for _ in 0..count {
                // SAFETY: masked lanes are valid indices.
                unsafe {
                    let x = _mm512_maskz_loadu_ps(mask, plane_at.wrapping_offset(offset));
                    _mm512_storeu_ps(at, x);
                }
                plane_at = plane_at.wrapping_add(plane);
                at = at.wrapping_add(step);
            }
        } else if used <= RUNS {
            for _ in 0..count {
                let mut x = _mm512_setzero_ps();
                for &(mask, offset) in runs.iter().take(used) {
                    // SAFETY: masked lanes are valid indices.
                    x = unsafe { _mm512_mask_loadu_ps(x, mask, plane_at.wrapping_offset(offset)) };
                }
                // SAFETY: as the caller promises.
                unsafe { _mm512_storeu_ps(at, x) };
                plane_at = plane_at.wrapping_add(plane);
                at = at.wrapping_add(step);
            }
        } else {
            // SAFETY: a chunk has `LANES` indices.
            let offsets = unsafe { _mm512_loadu_si512(index.as_ptr().cast()) };
            for _ in 0..count {
                // SAFETY: masked lanes are valid indices.
                unsafe {
                    let x = _mm512_mask_i32gather_ps::<4>(_mm512_setzero_ps(), any, offsets, plane_at);
                    _mm512_storeu_ps(at, x);
                }
                plane_at = plane_at.wrapping_add(plane);
                at = at.wrapping_add(step);
            }
        }
    }
}

/// # Safety
/// The machine has AVX-512F; `from` is valid for `2 len` reads, `to` for `len` writes.
#[target_feature(enable = "avx512f")]
unsafe fn halves(from: *const u8, len: usize, to: *mut f32) {
    let whole = len - len % LANES;
    for i in (0..whole).step_by(LANES) {
        // SAFETY: as the caller promises.
        unsafe {
            let x = _mm256_loadu_si256(from.wrapping_add(2 * i).cast());
            _mm512_storeu_ps(to.wrapping_add(i), _mm512_cvtph_ps(x));
        }
    }
    if whole < len {
        let mut last = [0u8; 2 * LANES];
        // SAFETY: fewer than `LANES` elements remain, all of them valid.
        unsafe {
            std::ptr::copy_nonoverlapping(from.wrapping_add(2 * whole), last.as_mut_ptr(), 2 * (len - whole));
            let x = _mm256_loadu_si256(last.as_ptr().cast());
            _mm512_mask_storeu_ps(to.wrapping_add(whole), lanes(len - whole), _mm512_cvtph_ps(x));
        }
    }
}
