//! Inner loops for any machine.

use super::{Base, Isa, Tile};

const ROWS: usize = 4;
const COLUMNS: usize = 8;

pub(super) static ISA: Isa = Isa { rows: ROWS, columns: COLUMNS, block: 512, tile, transpose, gather, halves };

/// `x * y + sum`: rounded once where that is one instruction, twice elsewhere.
#[inline(always)]
fn add_product(sum: f32, x: f32, y: f32) -> f32 {
    if cfg!(any(target_feature = "fma", target_arch = "aarch64")) { x.mul_add(y, sum) } else { x * y + sum }
}

/// # Safety
/// `t` describes valid memory and has at most `ROWS` rows.
unsafe fn tile(rows: usize, t: &Tile) {
    // SAFETY: as the caller promises.
    unsafe {
        match rows {
            1 => tile_of::<1>(t),
            2 => tile_of::<2>(t),
            3 => tile_of::<3>(t),
            _ => tile_of::<4>(t),
        }
    }
}

/// # Safety
/// `t` describes valid memory and has `R` rows.
unsafe fn tile_of<const R: usize>(t: &Tile) {
    let mut sums = [[0.0f32; COLUMNS]; R];
    // SAFETY: the panels hold `depth` rows of `R` and `COLUMNS` elements, initialised by packing.
    let (a, b) = unsafe {
        (std::slice::from_raw_parts(t.a, t.depth * R), std::slice::from_raw_parts(t.b, t.depth * COLUMNS))
    };
    for (a, b) in a.chunks_exact(R).zip(b.chunks_exact(COLUMNS)) {
        for (sums, &a) in sums.iter_mut().zip(a) {
            for (sum, &b) in sums.iter_mut().zip(b) {
                *sum = add_product(*sum, a, b);
            }
        }
    }
    for (r, sums) in sums.iter().enumerate() {
        for (j, sum) in sums.iter().enumerate().take(t.columns) {
            // SAFETY: the tile's elements are valid, as are the bases of existing rows and columns.
            unsafe {
                let c = t.c.add(r * t.stride + j);
                let base = match t.base {
                    Base::Sum => *c,
                    Base::Zero => 0.0,
                    Base::Rows(p) => *p.add(r),
                    Base::Columns(p) => *p.add(j),
                };
                *c = base + sum;
            }
        }
    }
}

/// # Safety
/// Each of `from` is valid for `len` reads, `to` for `from.len() * len` writes.
unsafe fn transpose(from: &[*const f32], len: usize, to: *mut f32) {
    for (r, p) in from.iter().enumerate() {
        for i in 0..len {
            // SAFETY: as the caller promises.
            unsafe { *to.add(i * from.len() + r) = *p.add(i) };
        }
    }
}

/// # Safety
/// Every index that is not negative is valid in every plane, and `to` for `COLUMNS` writes at every step.
unsafe fn gather(index: &[i32], from: *const f32, plane: usize, count: usize, to: *mut f32, step: usize) {
    for i in 0..count {
        for (lane, &at) in index.iter().enumerate() {
            // SAFETY: as the caller promises.
            unsafe {
                *to.add(i * step + lane) = if at < 0 { 0.0 } else { *from.add(i * plane + at as usize) };
            }
        }
    }
}

/// # Safety
/// `from` is valid for `2 len` reads, `to` for `len` writes.
unsafe fn halves(from: *const u8, len: usize, to: *mut f32) {
    for i in 0..len {
        // SAFETY: as the caller promises.
        unsafe {
            let bits = from.add(2 * i).cast::<[u8; 2]>().read();
            *to.add(i) = half::f16::from_ne_bytes(bits).to_f32();
        }
    }
}
