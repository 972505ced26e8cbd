//! Inner loops for AVX2 with FMA: tiles of 6 rows by two registers.

use std::arch::x86_64::*;

use super::{Base, Isa, Tile};

const ROWS: usize = 6;
/// Elements of a register.
const LANES: usize = 8;
const COLUMNS: usize = 2 * LANES;

pub(super) static ISA: Isa = Isa { rows: ROWS, columns: COLUMNS, block: 512, tile, transpose, gather, halves };

pub(super) fn is_available() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

/// The lanes whose bit is set.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn mask(bits: u32) -> __m256i {
    let each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(bits as i32), each), each)
}

/// The first `n` lanes.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn lanes(n: usize) -> __m256i {
    mask((1 << n.min(LANES)) - 1)
}

/// # Safety
/// The machine has AVX2 and FMA; `t` describes valid memory and has at most `ROWS` rows.
unsafe fn tile(rows: usize, t: &Tile) {
    // SAFETY: as the caller promises.
    unsafe {
        match rows {
            1 => tile_of::<1>(t),
            2 => tile_of::<2>(t),
            3 => tile_of::<3>(t),
            4 => tile_of::<4>(t),
            5 => tile_of::<5>(t),
            _ => tile_of::<6>(t),
        }
    }
}

/// # Safety
/// The machine has AVX2 and FMA; `t` describes valid memory and has `R` rows.
#[target_feature(enable = "avx2,fma")]
unsafe fn tile_of<const R: usize>(t: &Tile) {
    let mut sums = [[_mm256_setzero_ps(); 2]; R];
    let (mut a, mut b) = (t.a, t.b);
    for _ in 0..t.depth {
        // SAFETY: the panels hold `depth` rows of `R` and `COLUMNS` elements.
        unsafe {
            let b0 = _mm256_loadu_ps(b);
            let b1 = _mm256_loadu_ps(b.wrapping_add(LANES));
            for (r, sums) in sums.iter_mut().enumerate() {
                let x = _mm256_set1_ps(*a.wrapping_add(r));
                sums[0] = _mm256_fmadd_ps(x, b0, sums[0]);
                sums[1] = _mm256_fmadd_ps(x, b1, sums[1]);
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
                    Base::Sum => _mm256_maskload_ps(c, mask),
                    Base::Zero => _mm256_setzero_ps(),
                    Base::Rows(p) => _mm256_set1_ps(*p.add(r)),
                    Base::Columns(p) => _mm256_maskload_ps(p.wrapping_add(v * LANES), mask),
                };
                _mm256_maskstore_ps(c, mask, _mm256_add_ps(base, sum));
            }
        }
    }
}

/// Rows become columns.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn turn(r: [__m256; LANES]) -> [__m256; LANES] {
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

/// # Safety
/// The machine has AVX2 and FMA; each of `from` is valid for `len` reads, `to` for `from.len() * len` writes.
#[target_feature(enable = "avx2,fma")]
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
            let mut block = [_mm256_setzero_ps(); LANES];
            for (v, p) in block.iter_mut().zip(starts) {
                // SAFETY: masked lanes are below `len`.
                *v = unsafe { _mm256_maskload_ps(p.wrapping_add(i), there) };
            }
            let turned = turn(block);
            if len - i >= LANES {
                for (j, v) in turned.iter().enumerate() {
                    // SAFETY: masked lanes are rows that exist.
                    unsafe { _mm256_maskstore_ps(at(i + j), keep, *v) };
                }
            } else {
                for (j, v) in turned.iter().enumerate().take(len - i) {
                    // SAFETY: as above.
                    unsafe { _mm256_maskstore_ps(at(i + j), keep, *v) };
                }
            }
        }
    }
}

/// Runs of neighbours that one register is put together from before single elements are cheaper.
const RUNS: usize = 4;

/// # Safety
/// The machine has AVX2 and FMA. Every index that is not negative is valid in every plane, and `to` for `COLUMNS` writes
/// at every step.
#[target_feature(enable = "avx2,fma")]
unsafe fn gather(index: &[i32], from: *const f32, plane: usize, count: usize, to: *mut f32, step: usize) {
    for (v, index) in index.chunks_exact(LANES).enumerate() {
        let to = to.wrapping_add(v * LANES);
        // Lanes whose index exceeds their position by the same amount are loaded at once.
        let mut bits = [(0u32, 0isize); RUNS];
        let mut used = 0;
        for (lane, &at) in index.iter().enumerate() {
            if at < 0 {
                continue;
            }
            let offset = at as isize - lane as isize;
            match bits.iter_mut().take(used.min(RUNS)).find(|r| r.1 == offset) {
                Some(run) => run.0 |= 1 << lane,
                None => {
                    if let Some(run) = bits.get_mut(used) {
                        *run = (1 << lane, offset);
                    }
                    used += 1;
                }
            }
        }
        let (mut plane_at, mut at) = (from, to);
        if used <= RUNS {
            let runs = bits.map(|(bits, offset)| (mask(bits), offset));
            for _ in 0..count {
                let mut x = _mm256_setzero_ps();
                for &(mask, offset) in runs.iter().take(used) {
                    // SAFETY: masked lanes are valid indices.
                    let part = unsafe { _mm256_maskload_ps(plane_at.wrapping_offset(offset), mask) };
                    x = _mm256_or_ps(x, part);
                }
                // SAFETY: as the caller promises.
                unsafe { _mm256_storeu_ps(at, x) };
                plane_at = plane_at.wrapping_add(plane);
                at = at.wrapping_add(step);
            }
        } else {
            for _ in 0..count {
                for (lane, &i) in index.iter().enumerate() {
                    // SAFETY: as the caller promises.
                    unsafe {
                        let x = if i < 0 { 0.0 } else { *plane_at.wrapping_add(i as usize) };
                        *at.wrapping_add(lane) = x;
                    }
                }
                plane_at = plane_at.wrapping_add(plane);
                at = at.wrapping_add(step);
            }
        }
    }
}

/// # Safety
/// The machine has F16C; `from` is valid for `2 len` reads, `to` for `len` writes.
#[target_feature(enable = "avx2,f16c")]
unsafe fn halves(from: *const u8, len: usize, to: *mut f32) {
    let whole = len - len % LANES;
    for i in (0..whole).step_by(LANES) {
        // SAFETY: as the caller promises.
        unsafe {
            let x = _mm_loadu_si128(from.wrapping_add(2 * i).cast());
            _mm256_storeu_ps(to.wrapping_add(i), _mm256_cvtph_ps(x));
        }
    }
    let mut last = [0u8; 2 * LANES];
    let mut values = [0.0f32; LANES];
    // SAFETY: fewer than `LANES` elements remain, all of them valid.
    unsafe {
        std::ptr::copy_nonoverlapping(from.wrapping_add(2 * whole), last.as_mut_ptr(), 2 * (len - whole));
        _mm256_storeu_ps(values.as_mut_ptr(), _mm256_cvtph_ps(_mm_loadu_si128(last.as_ptr().cast())));
        std::ptr::copy_nonoverlapping(values.as_ptr(), to.wrapping_add(whole), len - whole);
    }
}
