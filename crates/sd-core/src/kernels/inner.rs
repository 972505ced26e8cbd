//! The inner loops of products, the same for every instruction set.

use super::vector::{MAX_LANES, Vector, Words};
use super::{Base, Dots, GROUP, Tile};

/// Registers of a tile's row.
pub(super) const WIDE: usize = 2;

/// # Safety
/// The machine has the instruction set of `W`; `t` describes valid memory and has `R` rows.
#[inline(always)]
pub(super) unsafe fn tile<W: Words, const R: usize>(t: &Tile) {
    // SAFETY: the panels hold `depth` rows of `R` and `WIDE` registers' elements.
    unsafe {
        let mut sums = [[W::V::splat(0.0); WIDE]; R];
        let (mut a, mut b) = (t.a, t.b);
        for _ in 0..t.depth {
            let b0 = W::V::load(b);
            let b1 = W::V::load(b.wrapping_add(W::V::LANES));
            for (r, sums) in sums.iter_mut().enumerate() {
                let x = W::V::splat(*a.wrapping_add(r));
                sums[0] = W::dot(x, b0, sums[0]);
                sums[1] = W::dot(x, b1, sums[1]);
            }
            a = a.wrapping_add(R);
            b = b.wrapping_add(WIDE * W::V::LANES);
        }
        finish(t.c, t.stride, t.columns, t.base, &sums);
    }
}

/// # Safety
/// The machine has the instruction set of `V`; `t` describes valid memory.
#[inline(always)]
pub(super) unsafe fn dots<V: Vector>(t: &Dots) {
    let mut row = 0;
    // As many rows at a time as registers hold sums of; each sum is the same whatever is beside it.
    // SAFETY: as the caller promises; the rows exist.
    unsafe {
        while V::LANES == MAX_LANES && row + 4 <= t.rows {
            dots_of::<V, 4>(t, row);
            row += 4;
        }
        while row + 2 <= t.rows {
            dots_of::<V, 2>(t, row);
            row += 2;
        }
        if row < t.rows {
            dots_of::<V, 1>(t, row);
        }
    }
}

/// [`dots`] of `R` rows from `row` on.
///
/// # Safety
/// As for [`dots`].
#[inline(always)]
unsafe fn dots_of<V: Vector, const R: usize>(t: &Dots, row: usize) {
    let at = t.sums.wrapping_add(row * GROUP * V::LANES);
    let x = t.x.wrapping_add(row * t.step);
    let whole = t.len - t.len % V::LANES;
    // SAFETY: as the caller promises; masked lanes are below `len`.
    unsafe {
        let mut sums = [[V::splat(0.0); GROUP]; R];
        for (r, sums) in sums.iter_mut().enumerate() {
            for (j, sum) in sums.iter_mut().enumerate() {
                *sum = V::load(at.wrapping_add((r * GROUP + j) * V::LANES));
            }
        }
        for i in (0..whole).step_by(V::LANES) {
            let mut w = [V::splat(0.0); GROUP];
            for (w, from) in w.iter_mut().zip(t.w) {
                *w = V::load(from.wrapping_add(i));
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let x = V::load(x.wrapping_add(r * t.step + i));
                for (sum, w) in sums.iter_mut().zip(w) {
                    *sum = x.mul_add(w, *sum);
                }
            }
        }
        if whole < t.len {
            let rest = V::first(t.len - whole);
            for (r, sums) in sums.iter_mut().enumerate() {
                let x = V::load_some(x.wrapping_add(r * t.step + whole), rest);
                for (sum, from) in sums.iter_mut().zip(t.w) {
                    *sum = x.mul_add(V::load_some(from.wrapping_add(whole), rest), *sum);
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            for (j, sum) in sums.iter().enumerate() {
                sum.store(at.wrapping_add((r * GROUP + j) * V::LANES));
            }
        }
    }
}

/// Adds the bases to `sums` and stores them.
///
/// # Safety
/// As for [`tile`].
#[inline(always)]
unsafe fn finish<V: Vector, const R: usize>(
    c: *mut f32,
    stride: usize,
    columns: usize,
    base: Base,
    sums: &[[V; WIDE]; R],
) {
    // SAFETY: masked lanes lie in the tile and its bases; others are not touched.
    unsafe {
        if columns == WIDE * V::LANES {
            for (r, sums) in sums.iter().enumerate() {
                for (v, &sum) in sums.iter().enumerate() {
                    let c = c.wrapping_add(r * stride + v * V::LANES);
                    let start = match base {
                        Base::Sum => V::load(c),
                        Base::Zero => V::splat(0.0),
                        Base::Rows(p) => V::splat(*p.add(r)),
                        Base::Columns(p) => V::load(p.wrapping_add(v * V::LANES)),
                    };
                    start.add(sum).store(c);
                }
            }
            return;
        }
        let masks = [V::first(columns), V::first(columns.saturating_sub(V::LANES))];
        for (r, sums) in sums.iter().enumerate() {
            for (v, (&sum, mask)) in sums.iter().zip(masks).enumerate() {
                let c = c.wrapping_add(r * stride + v * V::LANES);
                let start = match base {
                    Base::Sum => V::load_some(c, mask),
                    Base::Zero => V::splat(0.0),
                    Base::Rows(p) => V::splat(*p.add(r)),
                    Base::Columns(p) => V::load_some(p.wrapping_add(v * V::LANES), mask),
                };
                start.add(sum).store_some(c, mask);
            }
        }
    }
}

/// # Safety
/// The machine has the instruction set of `V`; each of `from` is valid for `len` reads, `to` for `from.len()` writes at
/// each of `len` steps.
#[inline(always)]
pub(super) unsafe fn transpose<V: Vector>(from: &[*const f32], len: usize, to: *mut f32, step: usize) {
    for (group, rows) in from.chunks(V::LANES).enumerate() {
        // Rows that are missing are not stored: the first stands for them.
        let mut at = [rows[0]; MAX_LANES];
        at[..rows.len()].copy_from_slice(rows);
        let mut to = to.wrapping_add(group * V::LANES);
        // SAFETY: masked lanes are below `len` when they are read, and rows that exist when they are written.
        unsafe {
            let keep = V::first(rows.len());
            let whole = len - len % V::LANES;
            for _ in (0..whole).step_by(V::LANES) {
                let block = V::load_turned(&at);
                if rows.len() == V::LANES {
                    for v in block.as_ref() {
                        v.store(to);
                        to = to.wrapping_add(step);
                    }
                } else {
                    for v in block.as_ref() {
                        v.store_some(to, keep);
                        to = to.wrapping_add(step);
                    }
                }
                at = at.map(|p| p.wrapping_add(V::LANES));
            }
            if whole < len {
                let block = V::load_turned_some(&at, V::first(len - whole));
                for v in block.as_ref().iter().take(len - whole) {
                    v.store_some(to, keep);
                    to = to.wrapping_add(step);
                }
            }
        }
    }
}

/// Runs of neighbours that one register is put together from before single elements are cheaper.
const RUNS: usize = 4;

/// # Safety
/// The machine has the instruction set of `V`. Every index that is not negative is valid in every plane, and `to` for
/// as many writes as there are indices at every step.
#[inline(always)]
pub(super) unsafe fn gather<V: Vector>(
    index: &[i32],
    from: *const f32,
    plane: usize,
    count: usize,
    to: *mut f32,
    step: usize,
) {
    for (v, index) in index.chunks_exact(V::LANES).enumerate() {
        let to = to.wrapping_add(v * V::LANES);
        // Lanes whose index exceeds their position by the same amount are loaded at once.
        let mut bits = [(0u32, 0isize); RUNS];
        let mut any = 0u32;
        let mut used = 0;
        for (lane, &at) in index.iter().enumerate() {
            if at < 0 {
                continue;
            }
            any |= 1 << lane;
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
        let (mut from, mut to) = (from, to);
        // SAFETY: masked lanes are valid indices.
        unsafe {
            let runs = bits.map(|(bits, offset)| (V::mask(bits), offset));
            if used <= 1 {
                let (mask, offset) = runs[0];
                for _ in 0..count {
                    V::load_some(from.wrapping_offset(offset), mask).store(to);
                    (from, to) = (from.wrapping_add(plane), to.wrapping_add(step));
                }
            } else if used <= RUNS {
                for _ in 0..count {
                    let mut x = V::splat(0.0);
                    for &(mask, offset) in runs.iter().take(used) {
                        x = x.load_over(from.wrapping_offset(offset), mask);
                    }
                    x.store(to);
                    (from, to) = (from.wrapping_add(plane), to.wrapping_add(step));
                }
            } else {
                let mask = V::mask(any);
                for _ in 0..count {
                    V::gather(from, index, any, mask).store(to);
                    (from, to) = (from.wrapping_add(plane), to.wrapping_add(step));
                }
            }
        }
    }
}

/// # Safety
/// The machine has the instruction set of `V`; `from` is valid for `2 len` reads, `to` for `len` writes.
#[inline(always)]
pub(super) unsafe fn halves<V: Vector>(from: *const u8, len: usize, to: *mut f32) {
    let whole = len - len % V::LANES;
    // SAFETY: as the caller promises; fewer than a register's elements remain in the end, all of them valid.
    unsafe {
        for i in (0..whole).step_by(V::LANES) {
            V::load_halves(from.wrapping_add(2 * i)).store(to.wrapping_add(i));
        }
        if whole < len {
            let mut last = [0u8; 2 * MAX_LANES];
            std::ptr::copy_nonoverlapping(from.wrapping_add(2 * whole), last.as_mut_ptr(), 2 * (len - whole));
            V::load_halves(last.as_ptr()).store_some(to.wrapping_add(whole), V::first(len - whole));
        }
    }
}

/// The table of inner loops for one instruction set: registers `$vector`, compiled with `$feature`, tiles of
/// at most as many rows as are listed.
macro_rules! isa {
    ($vector:ty, $integers:ty, $block:literal, [$($row:literal),*] $(, $feature:literal)?) => {
        pub(super) static ISA: $crate::kernels::Isa = TABLE;

        pub(super) const TABLE: $crate::kernels::Isa = $crate::kernels::Isa {
            narrow: None,
            rows: [$($row),*].len(),
            columns: $crate::kernels::inner::WIDE * <$vector as $crate::kernels::vector::Vector>::LANES,
            block: $block,
            tile: |rows, t| {
                // SAFETY: the caller has made sure of the instruction set, and `t` has that many rows.
                unsafe {
                    match rows {
                        $($row => tile::<$row>(t),)*
                        _ => {}
                    }
                }
            },
            dots,
            transpose,
            gather,
            halves,
            decode,
            quantise,
            integer_dots,
            soften,
            divide,
            strips,
            apply,
            deviation,
            softmax,
            kernel_in,
            tiles_in,
            tiles_out,
        };

        $(#[target_feature(enable = $feature)])?
        unsafe fn tile<const R: usize>(t: &$crate::kernels::Tile) {
            // SAFETY: as the caller promises.
            unsafe { $crate::kernels::inner::tile::<$crate::kernels::vector::Single<$vector>, R>(t) }
        }

        $(#[target_feature(enable = $feature)])?
        unsafe fn dots(t: &$crate::kernels::Dots) {
            // SAFETY: as the caller promises.
            unsafe { $crate::kernels::inner::dots::<$vector>(t) }
        }

        $(#[target_feature(enable = $feature)])?
        unsafe fn transpose(from: &[*const f32], len: usize, to: *mut f32, step: usize) {
            // SAFETY: as the caller promises.
            unsafe { $crate::kernels::inner::transpose::<$vector>(from, len, to, step) }
        }

        $(#[target_feature(enable = $feature)])?
        unsafe fn gather(index: &[i32], from: *const f32, plane: usize, count: usize, to: *mut f32, step: usize) {
            // SAFETY: as the caller promises.
            unsafe { $crate::kernels::inner::gather::<$vector>(index, from, plane, count, to, step) }
        }

        $(#[target_feature(enable = $feature)])?
        unsafe fn halves(from: *const u8, len: usize, to: *mut f32) {
            // SAFETY: as the caller promises.
            unsafe { $crate::kernels::inner::halves::<$vector>(from, len, to) }
        }

        $(#[target_feature(enable = $feature)])?
        unsafe fn decode(dtype: $crate::dtype::DType, from: *const u8, len: usize, to: *mut f32) -> bool {
            // SAFETY: as the caller promises.
            unsafe { $crate::kernels::blocks::decode::<$integers>(dtype, from, len, to) }
        }

        $(#[target_feature(enable = $feature)])?
        unsafe fn quantise(from: *const f32, len: usize, to: &mut $crate::kernels::integers::Terms) {
            // SAFETY: as the caller promises.
            unsafe { $crate::kernels::integers::quantise(from, len, to) }
        }

        $(#[target_feature(enable = $feature)])?
        unsafe fn integer_dots(d: &$crate::kernels::integers::IntegerDots) {
            // SAFETY: as the caller promises.
            unsafe { $crate::kernels::integers::dots::<$integers>(d) }
        }

        $(#[target_feature(enable = $feature)])?
        unsafe fn soften(s: &$crate::kernels::attention::Scores) {
            // SAFETY: as the caller promises.
            unsafe { $crate::kernels::attention::soften::<$crate::kernels::vector::Single<$vector>>(s) }
        }

        $(#[target_feature(enable = $feature)])?
        unsafe fn divide(out: *mut f32, rows: usize, by: *const f32) {
            // SAFETY: as the caller promises.
            unsafe { $crate::kernels::attention::divide::<$vector>(out, rows, by) }
        }

        $(#[target_feature(enable = $feature)])?
        unsafe fn strips(from: *const f32, step: usize, sizes: [usize; 3], to: *mut f32) {
            // SAFETY: as the caller promises.
            unsafe { $crate::kernels::attention::strips::<$crate::kernels::vector::Single<$vector>>(from, step, sizes, to) }
        }

        $(#[target_feature(enable = $feature)])?
        unsafe fn apply(code: $crate::kernels::Code, len: usize, to: *mut f32, by: *const f32, step: usize) {
            // SAFETY: as the caller promises.
            unsafe { $crate::kernels::chain::apply::<$vector>(code, len, to, by, step) }
        }

        $(#[target_feature(enable = $feature)])?
        unsafe fn deviation(from: *const f32, len: usize, less: f32) -> [f64; 2] {
            // SAFETY: as the caller promises.
            unsafe { $crate::kernels::norm::deviation::<$vector>(from, len, less) }
        }

        $(#[target_feature(enable = $feature)])?
        unsafe fn softmax(from: *const f32, len: usize, to: *mut f32) {
            // SAFETY: as the caller promises.
            unsafe { $crate::kernels::norm::softmax::<$vector>(from, len, to) }
        }

        $(#[target_feature(enable = $feature)])?
        unsafe fn kernel_in(taps: *const f32, sizes: [usize; 2], to: *mut f32, step: usize) {
            // SAFETY: as the caller promises.
            unsafe {
                $crate::kernels::winograd::kernel_in::<$crate::kernels::vector::Single<$vector>>(taps, sizes, to, step)
            }
        }

        $(#[target_feature(enable = $feature)])?
        unsafe fn tiles_in(lines: [*mut f32; 2], steps: [usize; 2], count: usize) {
            // SAFETY: as the caller promises.
            unsafe { $crate::kernels::winograd::tiles_in::<$vector>(lines, steps, count) }
        }

        $(#[target_feature(enable = $feature)])?
        unsafe fn tiles_out(lines: [*const f32; 2], steps: [usize; 2], bias: f32) {
            // SAFETY: as the caller promises.
            unsafe { $crate::kernels::winograd::tiles_out::<$vector>(lines, steps, bias) }
        }
    };
}
pub(super) use isa;
