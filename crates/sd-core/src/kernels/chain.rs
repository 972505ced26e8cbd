//! Elementwise functions one after another, in pieces that stay in the cache.

use super::Isa;
use super::scratch::share;
use super::vector::Vector;
use crate::dtype::DType;
use crate::ffi::{HostOp, Operand};
use crate::graph::{Binary, Unary};

/// Elements that all steps of a chain are applied to before the next.
const PIECE: usize = 1024;

/// The most axes outside the innermost.
const OUTER: usize = 4;

/// One step: what becomes of the value so far, `x`, and an operand, `y`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Code {
    /// `y`.
    Load,
    /// `x f y`.
    With(Binary),
    /// `y f x`.
    Under(Binary),
    /// `x mul + add`, both rounded.
    Affine {
        mul: f32,
        add: f32,
    },
    /// `(x - mean) factor`.
    Centre {
        mean: f32,
        factor: f32,
    },
    Unary(Unary),
}

impl Code {
    /// Whether it reads an operand.
    pub(crate) fn reads(self) -> bool {
        matches!(self, Code::Load | Code::With(_) | Code::Under(_))
    }
}

/// Applies `code` to `len` elements at `to`.
///
/// # Safety
/// The machine has the instruction set of `V`; `to` is valid for `len` elements, and `by` for as many `step` apart if
/// the code reads them.
#[inline(always)]
pub(super) unsafe fn apply<V: Vector>(code: Code, len: usize, to: *mut f32, by: *const f32, step: usize) {
    macro_rules! each {
        (|$x:ident| $f:expr) => {
            // SAFETY: as the caller promises.
            unsafe { on_each::<V>(len, to, |$x: V| $f) }
        };
        (|$x:ident, $y:ident| $f:expr) => {
            // SAFETY: as the caller promises.
            unsafe { on_pairs::<V>(len, to, by, step, |$x: V, $y: V| $f) }
        };
    }
    // SAFETY, for all that follows: as the caller promises.
    match code {
        Code::Load => each!(|_x, y| y),
        Code::With(Binary::Add) | Code::Under(Binary::Add) => each!(|x, y| x.add(y)),
        Code::With(Binary::Mul) | Code::Under(Binary::Mul) => each!(|x, y| x.mul(y)),
        Code::With(Binary::Sub) => each!(|x, y| x.sub(y)),
        Code::Under(Binary::Sub) => each!(|x, y| y.sub(x)),
        Code::With(Binary::Div) => each!(|x, y| x.div(y)),
        Code::Under(Binary::Div) => each!(|x, y| y.div(x)),
        Code::Affine { mul, add } => each!(|x| x.mul(V::splat(mul)).add(V::splat(add))),
        Code::Centre { mean, factor } => each!(|x| x.sub(V::splat(mean)).mul(V::splat(factor))),
        Code::Unary(Unary::Silu) => each!(|x| x.sigmoid_times(x)),
        Code::Unary(Unary::Sigmoid) => each!(|x| x.sigmoid_times(V::splat(1.0))),
        Code::Unary(Unary::QuickGelu) => each!(|x| x.mul(V::splat(1.702)).sigmoid_times(x)),
        Code::Unary(Unary::Gelu) => each!(|x| x.gelu()),
        Code::Unary(Unary::GeluTanh) => each!(|x| {
            // (1 + tanh u) / 2 = σ(2u) with u = √(2/π) (x + 0.044715 x³).
            let two_u = 2.0 * (2.0 / std::f32::consts::PI).sqrt();
            let z = x.mul(x).mul_add(V::splat(0.044715 * two_u), V::splat(two_u));
            z.mul(x).sigmoid_times(x)
        }),
        Code::Unary(Unary::Tanh) => each!(|x| x.tanh()),
        Code::Unary(Unary::Relu) => each!(|x| V::splat(0.0).max(x)),
        Code::Unary(Unary::Exp) => each!(|x| x.exp()),
    }
}

/// # Safety
/// As for [`apply`].
#[inline(always)]
unsafe fn on_each<V: Vector>(len: usize, to: *mut f32, f: impl Fn(V) -> V) {
    let whole = len - len % V::LANES;
    // SAFETY: as the caller promises; masked lanes are below `len`.
    unsafe {
        for i in (0..whole).step_by(V::LANES) {
            let to = to.wrapping_add(i);
            f(V::load(to)).store(to);
        }
        if whole < len {
            let (to, mask) = (to.wrapping_add(whole), V::first(len - whole));
            f(V::load_some(to, mask)).store_some(to, mask);
        }
    }
}

/// # Safety
/// As for [`apply`].
#[inline(always)]
unsafe fn on_pairs<V: Vector>(len: usize, to: *mut f32, by: *const f32, step: usize, f: impl Fn(V, V) -> V) {
    // SAFETY: as the caller promises; masked lanes are below `len`.
    unsafe {
        if step == 0 {
            let y = V::splat(*by);
            return on_each(len, to, |x| f(x, y));
        }
        let whole = len - len % V::LANES;
        for i in (0..whole).step_by(V::LANES) {
            let to = to.wrapping_add(i);
            f(V::load(to), V::load(by.wrapping_add(i))).store(to);
        }
        if whole < len {
            let (to, mask) = (to.wrapping_add(whole), V::first(len - whole));
            f(V::load_some(to, mask), V::load_some(by.wrapping_add(whole), mask)).store_some(to, mask);
        }
    }
}

/// Steps applied to every element of a result, the first of which is [`Code::Load`].
#[derive(Debug)]
pub(crate) struct Chain {
    isa: &'static Isa,
    /// Sizes of the result, the last that of its rows.
    sizes: [usize; OUTER + 1],
    code: Vec<Code>,
    /// For each step that reads an operand, in order: elements from one position of each axis to the next.
    strides: Vec<[usize; OUTER + 1]>,
}

impl Chain {
    /// `strides` are per operand and axis of `dims`. `None` where an operand's rows are not runs of neighbours or one
    /// element, or more axes than are walked through remain after joining.
    pub(crate) fn new(isa: &'static Isa, dims: &[usize], code: &[Code], strides: &[&[usize]]) -> Option<Chain> {
        // Axes that all operands walk through as if they were one.
        let mut joined: Vec<(usize, Vec<usize>)> = Vec::new();
        for (axis, &size) in dims.iter().enumerate().filter(|d| *d.1 != 1) {
            let here: Vec<usize> = strides.iter().map(|s| s[axis]).collect();
            match joined.last_mut() {
                Some((n, outer)) if outer.iter().zip(&here).all(|(&o, &h)| o == h * size) => {
                    *n *= size;
                    *outer = here;
                }
                _ => joined.push((size, here)),
            }
        }
        if joined.len() > OUTER + 1 {
            return None;
        }
        let mut sizes = [1; OUTER + 1];
        let mut all = vec![[0; OUTER + 1]; strides.len()];
        let first = sizes.len() - joined.len();
        for (i, (n, each)) in joined.into_iter().enumerate() {
            sizes[first + i] = n;
            for (to, stride) in all.iter_mut().zip(each) {
                to[first + i] = stride;
            }
        }
        let sound = all.iter().all(|s| s[OUTER] <= 1);
        sound.then(|| Chain { isa, sizes, code: code.to_vec(), strides: all })
    }

    /// Elements of the last axis.
    fn row(&self) -> usize {
        self.sizes[OUTER]
    }
}

impl HostOp for Chain {
    fn operands(&self) -> Vec<Operand> {
        let reach = |s: &[usize; OUTER + 1]| {
            1 + s.iter().zip(self.sizes).map(|(stride, n)| stride * (n - 1)).sum::<usize>()
        };
        self.strides.iter().map(|s| (DType::F32, [1, reach(s)])).collect()
    }

    fn elements(&self) -> usize {
        self.sizes.iter().product()
    }

    fn work(&self) -> usize {
        // What is computed most is a little slower than memory.
        self.elements() * self.code.len() * 4
    }

    unsafe fn compute(&self, out: *mut f32, operands: &[*const u8], part: usize, parts: usize) {
        let row = self.row();
        let pieces = row.div_ceil(PIECE);
        let mut last_row = usize::MAX;
        let mut starts = [0usize; 16];
        for at in share(self.elements() / row * pieces, part, parts) {
            let (line, first) = (at / pieces, at % pieces * PIECE);
            if line != last_row {
                last_row = line;
                let (mut rest, mut place) = (line, [0; OUTER]);
                for axis in (0..OUTER).rev() {
                    place[axis] = rest % self.sizes[axis];
                    rest /= self.sizes[axis];
                }
                for (start, s) in starts.iter_mut().zip(&self.strides) {
                    *start = place.iter().zip(s).map(|(p, s)| p * s).sum();
                }
            }
            let len = PIECE.min(row - first);
            let to = out.wrapping_add(line * row + first);
            let mut read = operands.iter().zip(&starts).zip(&self.strides);
            for &code in &self.code {
                let (by, step) = match code.reads().then(|| read.next()).flatten() {
                    Some(((&by, &start), s)) => (by.cast::<f32>().wrapping_add(start + first * s[OUTER]), s[OUTER]),
                    None => (std::ptr::null(), 0),
                };
                if code == Code::Load && step == 1 && std::ptr::eq(by, to) {
                    continue;
                }
                // SAFETY: `operands` says how far operands reach, and the result has `elements`.
                unsafe { (self.isa.apply)(code, len, to, by, step) };
            }
        }
    }
}

/// The most operands of a chain: as many as starts are kept of.
pub(crate) const OPERANDS: usize = 12;
