//! What inner loops are written in: a register of f32, which each instruction set provides.

/// The most lanes of a register on any instruction set.
pub(super) const MAX_LANES: usize = 16;

/// A register of f32.
///
/// # Safety
/// Callers of every function make sure that the machine has the instruction set, and that pointers are valid for
/// what is read or written: [`Vector::LANES`] elements, or those of a mask.
pub(super) trait Vector: Copy {
    /// Elements of a register.
    const LANES: usize;
    /// Some of the lanes.
    type Mask: Copy;
    /// As many registers as a register has lanes.
    type Block: AsRef<[Self]>;

    /// The lanes whose bit is set.
    unsafe fn mask(bits: u32) -> Self::Mask;
    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn store(self, to: *mut f32);
    /// Zero in lanes outside the mask.
    unsafe fn load_some(from: *const f32, mask: Self::Mask) -> Self;
    /// `self` in lanes outside the mask, which must be zero in those inside.
    unsafe fn load_over(self, from: *const f32, mask: Self::Mask) -> Self;
    unsafe fn store_some(self, to: *mut f32, mask: Self::Mask);
    /// `other` in lanes of the mask.
    unsafe fn replaced(self, other: Self, mask: Self::Mask) -> Self;
    unsafe fn add(self, b: Self) -> Self;
    unsafe fn sub(self, b: Self) -> Self;
    unsafe fn mul(self, b: Self) -> Self;
    unsafe fn div(self, b: Self) -> Self;
    /// `self * b + c`, rounded once where the machine can.
    unsafe fn mul_add(self, b: Self, c: Self) -> Self;
    /// The larger; `b` where one of them is no number.
    unsafe fn max(self, b: Self) -> Self;
    /// The smaller; `b` where one of them is no number.
    unsafe fn min(self, b: Self) -> Self;
    /// The nearest whole number.
    unsafe fn round(self) -> Self;
    /// `self * 2^n` for whole `n` between -151 and 129.
    unsafe fn scaled(self, n: Self) -> Self;
    /// The lanes in which `self` is less than `b`.
    unsafe fn less(self, b: Self) -> Self::Mask;
    /// The elements with even, and those with odd numbers, of `self` followed by `b`.
    unsafe fn unzip(self, b: Self) -> (Self, Self);
    /// Elements of `self` and `b` in turn: the first half and the second.
    unsafe fn zip(self, b: Self) -> (Self, Self);
    /// From f16.
    unsafe fn load_halves(from: *const u8) -> Self;
    /// From 8-bit integers.
    unsafe fn load_bytes(from: *const i8) -> Self;
    /// Rows become columns: row `i` of the result holds element `i` of what each pointer leads to.
    unsafe fn load_turned(from: &[*const f32; MAX_LANES]) -> Self::Block;
    /// As [`Vector::load_turned`], of which only elements of the mask exist.
    unsafe fn load_turned_some(from: &[*const f32; MAX_LANES], there: Self::Mask) -> Self::Block;
    /// Element `index[lane]` of `from` for each lane of `mask`, whose bits are `bits`; zero elsewhere.
    unsafe fn gather(from: *const f32, index: &[i32], bits: u32, mask: Self::Mask) -> Self;

    /// The first `n` lanes.
    #[inline(always)]
    unsafe fn first(n: usize) -> Self::Mask {
        // SAFETY: as the caller promises.
        unsafe { Self::mask(((1u64 << n.min(Self::LANES)) - 1) as u32) }
    }

    /// `2^self`, within an ulp; 0 and infinity beyond what f32 holds.
    #[inline(always)]
    unsafe fn exp2(self) -> Self {
        // SAFETY: as the caller promises.
        unsafe {
            let x = Self::splat(-151.0).max(Self::splat(129.0).min(self));
            let n = x.round();
            let f = x.sub(n);
            let mut y = Self::splat(EXP2[0]);
            for &c in &EXP2[1..] {
                y = y.mul_add(f, Self::splat(c));
            }
            y.scaled(n)
        }
    }

    /// `e^self`, within an ulp or two; 0 and infinity beyond what f32 holds.
    #[inline(always)]
    unsafe fn exp(self) -> Self {
        // SAFETY: as the caller promises.
        unsafe {
            let x = Self::splat(-105.0).max(Self::splat(89.0).min(self));
            let n = x.mul(Self::splat(LOG2_E)).round();
            // What log2(e) loses as f32 is added separately.
            let f = x.mul_add(Self::splat(LOG2_E), Self::splat(0.0).sub(n));
            let f = x.mul_add(Self::splat(LOG2_E_REST), f);
            let mut y = Self::splat(EXP2[0]);
            for &c in &EXP2[1..] {
                y = y.mul_add(f, Self::splat(c));
            }
            y.scaled(n)
        }
    }

    /// `1 / (1 + e^-self)` times `x`.
    #[inline(always)]
    unsafe fn sigmoid_times(self, x: Self) -> Self {
        // SAFETY: as the caller promises.
        unsafe { x.div(Self::splat(1.0).add(Self::splat(0.0).sub(self).exp())) }
    }

    /// Hyperbolic tangent.
    #[inline(always)]
    unsafe fn tanh(self) -> Self {
        // SAFETY: as the caller promises.
        unsafe {
            let size = self.max(Self::splat(0.0).sub(self));
            let z = self.mul(self);
            let mut y = Self::splat(TANH[0]);
            for &c in &TANH[1..] {
                y = y.mul_add(z, Self::splat(c));
            }
            let near = y.mul(z).mul_add(self, self);
            let e = self.add(self).exp();
            let far = Self::splat(1.0).sub(Self::splat(2.0).div(e.add(Self::splat(1.0))));
            far.replaced(near, size.less(Self::splat(0.625)))
        }
    }

    /// `self Φ(self)` with the normal distribution Φ.
    #[inline(always)]
    unsafe fn gelu(self) -> Self {
        // SAFETY: as the caller promises.
        unsafe {
            let one = Self::splat(1.0);
            let size = self.max(Self::splat(0.0).sub(self));
            let z = size.mul(Self::splat(std::f32::consts::FRAC_1_SQRT_2));
            let t = one.div(z.mul_add(Self::splat(ERFC_STEP), one));
            let mut y = Self::splat(ERFC[0]);
            for &c in &ERFC[1..] {
                y = y.mul_add(t, Self::splat(c));
            }
            let half_square = self.mul(self).mul(Self::splat(-0.5));
            let tail = y.mul(t).mul(half_square.exp()).mul(Self::splat(0.5));
            let below = self.less(Self::splat(0.0));
            self.mul(one.sub(tail).replaced(tail, below))
        }
    }

    /// The sum of the lanes, the first first.
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        let mut lanes = [0.0f32; MAX_LANES];
        // SAFETY: there is room for a register.
        unsafe { self.store(lanes.as_mut_ptr()) };
        lanes[..Self::LANES].iter().sum()
    }
}

/// What lies in the 32 bits that the loops of products take for a term.
///
/// # Safety
/// As for [`Vector`].
pub(super) trait Words {
    type V: Vector;
    /// Terms of a word: 1 or 2.
    const GRAIN: usize;
    /// `sum` plus the products of the terms of `a` and `b`.
    unsafe fn dot(a: Self::V, b: Self::V, sum: Self::V) -> Self::V;
    /// `2^x` for what is at most about 0, as exact as a term.
    unsafe fn exp2(x: Self::V) -> Self::V;
    /// Words of two terms: those of the first, and after them those of the second.
    unsafe fn pair(first: Self::V, second: Self::V) -> Self::V;
}

/// Terms in f32.
pub(super) struct Single<V>(std::marker::PhantomData<V>);

impl<V: Vector> Words for Single<V> {
    type V = V;
    const GRAIN: usize = 1;

    #[inline(always)]
    unsafe fn dot(a: V, b: V, sum: V) -> V {
        // SAFETY: as the caller promises.
        unsafe { a.mul_add(b, sum) }
    }

    #[inline(always)]
    unsafe fn exp2(x: V) -> V {
        // SAFETY: as the caller promises.
        unsafe { x.exp2() }
    }

    #[inline(always)]
    unsafe fn pair(first: V, _: V) -> V {
        first
    }
}

use std::f32::consts::LOG2_E;

/// `log2(e)` less what f32 holds of it.
const LOG2_E_REST: f32 = (std::f64::consts::LOG2_E - LOG2_E as f64) as f32;

/// Coefficients of `(tanh x - x) / x³` in powers of `x²` for |x| ≤ 0.66, highest first, found as those of [`EXP2`] (8e-9).
#[allow(clippy::excessive_precision)]
const TANH: [f32; 5] = [-0.005_439_458, 0.020_397_983, -0.053_665_057, 0.133_305_43, -0.333_332_48];

/// Coefficients of `erfc(z) e^(z²)` in powers 8 to 1 of `1 / (1 + ERFC_STEP z)`, found as those of [`EXP2`] (4e-7).
#[allow(clippy::excessive_precision)]
const ERFC: [f32; 8] = [
    0.052_885_585,
    -0.299_162_000,
    0.507_020_950,
    -0.195_945_427,
    0.304_833_710,
    0.174_919_784,
    0.230_010_122,
    0.225_436_881,
];
const ERFC_STEP: f32 = 0.4;

/// Coefficients of 2^f for |f| ≤ 1/2, highest first: least squares of the relative error, reweighted until it is even
/// (2e-9) with the constant term held at 1.
#[allow(clippy::excessive_precision)]
const EXP2: [f32; 7] =
    [0.000_153_533_62, 0.001_339_887_5, 0.009_618_436_9, 0.055_503_323_7, 0.240_226_477, 0.693_147_182, 1.0];
