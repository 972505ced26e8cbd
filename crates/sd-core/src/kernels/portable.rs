//! Any machine: a register is a few elements that the compiler does as it can.

use super::inner::isa;
use super::vector::{MAX_LANES, Vector};

const LANES: usize = 4;

#[derive(Clone, Copy)]
struct Lanes([f32; LANES]);

isa!(Lanes, 512, [1, 2, 3, 4]);

#[inline(always)]
fn zip(a: Lanes, b: Lanes, f: impl Fn(f32, f32) -> f32) -> Lanes {
    Lanes(std::array::from_fn(|i| f(a.0[i], b.0[i])))
}

/// `x * y + sum`: rounded once where that is one instruction, twice elsewhere.
#[inline(always)]
fn add_product(sum: f32, x: f32, y: f32) -> f32 {
    if cfg!(any(target_feature = "fma", target_arch = "aarch64")) { x.mul_add(y, sum) } else { x * y + sum }
}

impl Vector for Lanes {
    const LANES: usize = LANES;
    type Mask = [bool; LANES];
    type Block = [Lanes; LANES];

    #[inline(always)]
    unsafe fn mask(bits: u32) -> [bool; LANES] {
        std::array::from_fn(|i| bits >> i & 1 == 1)
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Lanes([x; LANES])
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: as the caller promises.
        Lanes(unsafe { from.cast::<[f32; LANES]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: as the caller promises.
        unsafe { to.cast::<[f32; LANES]>().write_unaligned(self.0) }
    }

    #[inline(always)]
    unsafe fn load_some(from: *const f32, mask: [bool; LANES]) -> Self {
        // SAFETY: as the caller promises for lanes of the mask.
        Lanes(std::array::from_fn(|i| if mask[i] { unsafe { *from.wrapping_add(i) } } else { 0.0 }))
    }

    #[inline(always)]
    unsafe fn load_over(self, from: *const f32, mask: [bool; LANES]) -> Self {
        // SAFETY: as the caller promises for lanes of the mask.
        Lanes(std::array::from_fn(|i| if mask[i] { unsafe { *from.wrapping_add(i) } } else { self.0[i] }))
    }

    #[inline(always)]
    unsafe fn store_some(self, to: *mut f32, mask: [bool; LANES]) {
        for (i, x) in self.0.into_iter().enumerate() {
            if mask[i] {
                // SAFETY: as the caller promises for lanes of the mask.
                unsafe { *to.wrapping_add(i) = x };
            }
        }
    }

    #[inline(always)]
    unsafe fn replaced(self, other: Self, mask: [bool; LANES]) -> Self {
        Lanes(std::array::from_fn(|i| if mask[i] { other.0[i] } else { self.0[i] }))
    }

    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        zip(self, b, |a, b| a + b)
    }

    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        zip(self, b, |a, b| a - b)
    }

    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        zip(self, b, |a, b| a * b)
    }

    #[inline(always)]
    unsafe fn div(self, b: Self) -> Self {
        zip(self, b, |a, b| a / b)
    }

    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        Lanes(std::array::from_fn(|i| add_product(c.0[i], self.0[i], b.0[i])))
    }

    #[inline(always)]
    unsafe fn max(self, b: Self) -> Self {
        zip(self, b, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    unsafe fn min(self, b: Self) -> Self {
        zip(self, b, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    unsafe fn round(self) -> Self {
        Lanes(self.0.map(f32::round_ties_even))
    }

    #[inline(always)]
    unsafe fn scaled(self, n: Self) -> Self {
        // In two steps, each of which is a normal number.
        let power = |n: i32| f32::from_bits(((n + 127) as u32) << 23);
        zip(self, n, |x, n| {
            let n = n as i32;
            x * power(n >> 1) * power(n - (n >> 1))
        })
    }

    #[inline(always)]
    unsafe fn less(self, b: Self) -> [bool; LANES] {
        std::array::from_fn(|i| self.0[i] < b.0[i])
    }

    #[inline(always)]
    unsafe fn unzip(self, b: Self) -> (Self, Self) {
        let at = |i: usize| if i < LANES { self.0[i] } else { b.0[i - LANES] };
        (Lanes(std::array::from_fn(|i| at(2 * i))), Lanes(std::array::from_fn(|i| at(2 * i + 1))))
    }

    #[inline(always)]
    unsafe fn zip(self, b: Self) -> (Self, Self) {
        let at = |i: usize| if i.is_multiple_of(2) { self.0[i / 2] } else { b.0[i / 2] };
        (Lanes(std::array::from_fn(at)), Lanes(std::array::from_fn(|i| at(LANES + i))))
    }

    #[inline(always)]
    unsafe fn load_halves(from: *const u8) -> Self {
        // SAFETY: as the caller promises.
        let bits = unsafe { from.cast::<[[u8; 2]; LANES]>().read_unaligned() };
        Lanes(bits.map(|b| half::f16::from_ne_bytes(b).to_f32()))
    }

    #[inline(always)]
    unsafe fn load_bytes(from: *const i8) -> Self {
        // SAFETY: as the caller promises.
        Lanes(unsafe { from.cast::<[i8; LANES]>().read_unaligned() }.map(f32::from))
    }

    #[inline(always)]
    unsafe fn load_turned(from: &[*const f32; MAX_LANES]) -> [Lanes; LANES] {
        // SAFETY: each pointer leads to as many elements as there are lanes.
        std::array::from_fn(|i| Lanes(std::array::from_fn(|r| unsafe { *from[r].wrapping_add(i) })))
    }

    #[inline(always)]
    unsafe fn load_turned_some(from: &[*const f32; MAX_LANES], there: [bool; LANES]) -> [Lanes; LANES] {
        std::array::from_fn(|i| {
            // SAFETY: masked lanes exist.
            Lanes(std::array::from_fn(|r| if there[i] { unsafe { *from[r].wrapping_add(i) } } else { 0.0 }))
        })
    }

    #[inline(always)]
    unsafe fn gather(from: *const f32, index: &[i32], _: u32, mask: [bool; LANES]) -> Self {
        Lanes(std::array::from_fn(|i| {
            // SAFETY: indices are valid where the mask is set.
            if mask[i] { unsafe { *from.wrapping_add(index[i] as usize) } } else { 0.0 }
        }))
    }
}
