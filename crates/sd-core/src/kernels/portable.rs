//! Any machine: a register is a few elements that the compiler does as it can.

use super::DEPTH;
use super::inner::isa;
use super::integers::{Bytes, Integers, PART, PARTS, lane, place};
use super::vector::{MAX_LANES, Vector};

const LANES: usize = 4;

#[derive(Clone, Copy)]
struct Lanes([f32; LANES]);

isa!(Lanes, Scalars, 512, [1, 2, 3, 4]);

/// Integers one by one, which the compiler multiplies as it can.
struct Scalars;

impl Integers for Scalars {
    type V = Lanes;
    type Bytes = Each;
    type Terms = [[i16; 2 * LANES]; PARTS / LANES];
    type Sums = [[i32; LANES]; PARTS / LANES];

    #[inline(always)]
    unsafe fn load(from: *const i16) -> Self::Terms {
        // SAFETY: as the caller promises.
        unsafe { from.cast::<Self::Terms>().read() }
    }

    #[inline(always)]
    unsafe fn zero() -> Self::Sums {
        [[0; LANES]; PARTS / LANES]
    }

    #[inline(always)]
    unsafe fn dot(sums: Self::Sums, x: Self::Terms, w: Self::Terms) -> Self::Sums {
        let mut sums = sums;
        for ((sum, x), w) in sums.iter_mut().zip(x).zip(w) {
            let product: [i32; 2 * LANES] = std::array::from_fn(|i| i32::from(x[i]).wrapping_mul(i32::from(w[i])));
            *sum = std::array::from_fn(|i| sum[i].wrapping_add(product[2 * i].wrapping_add(product[2 * i + 1])));
        }
        sums
    }

    #[inline(always)]
    unsafe fn floats(sums: Self::Sums, first: usize) -> Lanes {
        Lanes(sums[first / LANES].map(|sum| sum as f32))
    }

    #[inline(always)]
    unsafe fn spread(from: [Each; 4], to: &mut [i16; DEPTH]) {
        for (part, from) in from.iter().flat_map(|f| f.0.as_chunks::<PART>().0).enumerate() {
            for (i, &q) in from.iter().enumerate() {
                to[place(part, i)] = i16::from(q);
            }
        }
    }
}

/// 64 bytes one by one.
#[derive(Clone, Copy)]
struct Each([u8; 64]);

impl Each {
    #[inline(always)]
    fn map(self, f: impl Fn(usize, u8) -> u8) -> Each {
        Each(std::array::from_fn(|i| f(i / 16, self.0[i])))
    }

    /// What `f` makes of the words of each 16 bytes.
    #[inline(always)]
    fn words(self, f: impl Fn(usize, u32) -> u32) -> Each {
        let mut out = self;
        for (i, word) in out.0.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            *word = f(i / 4, u32::from_le_bytes(*word)).to_le_bytes();
        }
        out
    }
}

/// Values of pairs of parts to where lanes have them.
#[inline(always)]
fn put(values: &[f32; PARTS / 2], to: &mut [f32; PARTS]) {
    for part in 0..PARTS {
        to[lane(part)] = values[part / 2];
    }
}

impl Bytes for Each {
    #[inline(always)]
    unsafe fn two(a: *const u8, b: *const u8) -> Each {
        let mut out = [0; 64];
        // SAFETY: as the caller promises.
        unsafe {
            out[..32].copy_from_slice(&*a.cast::<[u8; 32]>());
            out[32..].copy_from_slice(&*b.cast::<[u8; 32]>());
        }
        Each(out)
    }

    #[inline(always)]
    unsafe fn twins(a: *const u8, b: *const u8) -> Each {
        let mut out = [0; 64];
        for (to, from) in out.as_chunks_mut::<16>().0.iter_mut().zip([a, a, b, b]) {
            // SAFETY: as the caller promises.
            *to = unsafe { *from.cast::<[u8; 16]>() };
        }
        Each(out)
    }

    #[inline(always)]
    unsafe fn bits(bits: u64) -> Each {
        Each(std::array::from_fn(|i| 0u8.wrapping_sub((bits >> i & 1) as u8)))
    }

    #[inline(always)]
    unsafe fn words(words: [u64; 8]) -> Each {
        let mut out = [0; 64];
        for (to, word) in out.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *to = word.to_le_bytes();
        }
        Each(out)
    }

    #[inline(always)]
    unsafe fn negated(self, bits: u64) -> Each {
        Each(std::array::from_fn(|i| if bits >> i & 1 == 1 { self.0[i].wrapping_neg() } else { self.0[i] }))
    }

    #[inline(always)]
    unsafe fn store(self, to: &mut [i8; 64]) {
        *to = self.0.map(|b| b as i8);
    }

    #[inline(always)]
    unsafe fn right<const A: i32, const B: i32, const C: i32, const D: i32>(self) -> Each {
        self.words(|i, w| w >> [A, B, C, D][i])
    }

    #[inline(always)]
    unsafe fn left<const A: i32, const B: i32, const C: i32, const D: i32>(self) -> Each {
        self.words(|i, w| w << [A, B, C, D][i])
    }

    #[inline(always)]
    unsafe fn and(self, mask: u8) -> Each {
        self.map(|_, b| b & mask)
    }

    #[inline(always)]
    unsafe fn has(self, bits: [u8; 4]) -> Each {
        self.map(|i, b| if b & bits[i] != 0 { 255 } else { 0 })
    }

    #[inline(always)]
    unsafe fn or(self, b: Each) -> Each {
        Each(std::array::from_fn(|i| self.0[i] | b.0[i]))
    }

    #[inline(always)]
    unsafe fn less(self, by: u8) -> Each {
        self.map(|_, b| b.wrapping_sub(by))
    }

    #[inline(always)]
    unsafe fn of(self, table: &[u8; 16]) -> Each {
        self.map(|_, b| table[usize::from(b & 15)])
    }

    #[inline(always)]
    unsafe fn half(from: *const u8) -> f32 {
        // SAFETY: as the caller promises.
        let bits = u32::from(u16::from_le_bytes(unsafe { from.cast::<[u8; 2]>().read() }));
        // The exponent's bias, which makes infinity and NaN finite.
        let magnitude = f32::from_bits((bits & 0x7fff) << 13) * f32::from_bits((254 - 15) << 23);
        let special = if bits & 0x7c00 == 0x7c00 { 0xff << 23 } else { 0 };
        f32::from_bits(magnitude.to_bits() | special | (bits & 0x8000) << 16)
    }

    #[inline(always)]
    unsafe fn halves(from: [*const u8; 8], to: &mut [f32; PARTS]) {
        // SAFETY: as the caller promises.
        let values = from.map(|at| unsafe { Each::half(at) });
        put(&values, to)
    }

    #[inline(always)]
    unsafe fn times(factors: &[f32; PARTS], by: u8, to: &mut [f32; PARTS]) {
        *to = factors.map(|f| f * f32::from(by));
    }

    #[inline(always)]
    unsafe fn pairs(codes: u64, by: f32, to: &mut [f32; PARTS]) {
        let values = codes.to_le_bytes().map(|c| f32::from(c as i8) * by);
        put(&values, to)
    }

    #[inline(always)]
    unsafe fn codes(codes: u128, by: f32, to: &mut [f32; PARTS]) {
        for (part, code) in codes.to_le_bytes().into_iter().enumerate() {
            to[lane(part)] = f32::from(code as i8) * by;
        }
    }
}

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
