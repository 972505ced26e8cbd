//! One change of one weight, and its values.
//!
//! Weights are seen as matrices `[n, k]`: `k` holds everything after the first axis, so a kernel `[n, c, kh, kw]` has
//! `k = c kh kw`. `s` is `kh kw`, 1 for matrices.

use rayon::prelude::*;

use crate::convert::to_f32;
use crate::error::{Error, Result};
use crate::shape::Shape;
use crate::tensor::WeightSource;

/// A change `Δ` of a weight `W`, given by the names of tensors.
#[derive(Debug, Clone, PartialEq)]
pub struct Change {
    /// How `Δ` is made.
    pub kind: Kind,
    /// What `Δ` is multiplied by before the strength, as alpha / rank.
    pub scale: f32,
    /// Which rows of the weight change.
    pub rows: Rows,
    /// The lengths that `W + Δ` has afterwards.
    pub magnitude: Option<Magnitude>,
}

/// How a change is made.
#[derive(Debug, Clone, PartialEq)]
pub enum Kind {
    /// `up down` with `down [r, k]` and `up [n, r]` (LoRA; Hu et al. 2021). With `mid [r, r, kh, kw]`, `down` is
    /// `[r, c]` and `Δ[p, q, y, x] = Σ up[p, i] mid[i, j, y, x] down[j, q]`.
    LowRank {
        /// Applied first.
        down: String,
        /// Between the two.
        mid: Option<String>,
        /// Applied last.
        up: String,
    },
    /// The elementwise product of two (LoHa; Hyeon-Woo et al. 2021, proposition 1).
    Hadamard(Factor, Factor),
    /// The Kronecker product of `[a, b]` and `[n / a, k / b]` (LoKr; Yeh et al. 2023, section 3).
    Kronecker(Factor, Factor),
    /// The tensor itself.
    Difference(String),
    /// What is missing from `W` to the tensor.
    Replacement(String),
}

/// A matrix in a file, or a product that makes it.
#[derive(Debug, Clone, PartialEq)]
pub enum Factor {
    /// `[n, ..]`.
    Whole(String),
    /// `a [n, r]` times `b [r, k]`. With `core [r, r, kh, kw]`, `a` is `[r, n]`, `b` is `[r, c]`, and the product
    /// `Σ core[i, j, y, x] a[i, p] b[j, q]`.
    Product {
        /// Left.
        a: String,
        /// Right.
        b: String,
        /// Between the two.
        core: Option<String>,
    },
}

/// The lengths of rows or columns (DoRA; Liu et al. 2024, equation 5): each is divided by its norm in `W + Δ` and
/// multiplied by the tensor's value.
#[derive(Debug, Clone, PartialEq)]
pub struct Magnitude {
    /// One value per row, or per input channel.
    pub name: String,
    /// Whether it is one per input channel.
    pub per_input: bool,
}

/// Which rows of the weight those of a change are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rows {
    /// The same.
    All,
    /// Those from this one on.
    From(usize),
    /// Of the change, only those from this one on; as many as the weight has.
    Of(usize),
    /// The halves change places.
    Swapped,
}

impl Rows {
    /// The row of a weight of `n` rows that row `i` of a change of `m` rows changes.
    fn target(self, i: usize, m: usize) -> Option<usize> {
        match self {
            Rows::All => Some(i),
            Rows::From(start) => i.checked_add(start),
            Rows::Of(start) => i.checked_sub(start),
            Rows::Swapped => Some((i + m / 2) % m.max(1)),
        }
    }

    fn fit(self, m: usize, n: usize) -> bool {
        match self {
            Rows::All => m == n,
            Rows::From(start) => start.checked_add(m).is_some_and(|end| end <= n),
            Rows::Of(start) => start.checked_add(n).is_some_and(|end| end <= m),
            Rows::Swapped => m == n && m.is_multiple_of(2),
        }
    }
}

/// Values of a matrix.
pub(super) struct Matrix {
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) values: Vec<f32>,
}

impl Change {
    /// Rows and columns of the change, before its rows are placed. `spatial` is `s` of the weight.
    ///
    /// # Errors
    /// A tensor is missing, or the tensors do not fit together.
    pub fn dims(&self, source: &dyn WeightSource, spatial: usize) -> Result<[usize; 2]> {
        match &self.kind {
            Kind::LowRank { down, mid, up } => {
                let ([r, k], [n, ru]) = (dims(source, down)?, dims(source, up)?);
                match mid {
                    None if r == ru => Ok([n, k]),
                    Some(mid) => match shape(source, mid)?.array::<4>() {
                        Some([i, j, kh, kw]) if (i, j) == (ru, r) => Ok([n, times(&[k, kh, kw], down)?]),
                        _ => Err(apart(source, &[down, mid, up])),
                    },
                    None => Err(apart(source, &[down, up])),
                }
            }
            Kind::Hadamard(a, b) => {
                let (left, right) = (a.dims(source)?, b.dims(source)?);
                if left == right { Ok(left) } else { Err(apart(source, &[a.name(), b.name()])) }
            }
            Kind::Kronecker(a, b) => {
                let ([a0, a1], [b0, b1]) = (a.dims(source)?, b.dims(source)?);
                if !b1.is_multiple_of(spatial.max(1)) {
                    return Err(apart(source, &[a.name(), b.name()]));
                }
                Ok([times(&[a0, b0], a.name())?, times(&[a1, b1], a.name())?])
            }
            Kind::Difference(name) | Kind::Replacement(name) => dims(source, name),
        }
    }

    /// Checks that the change fits a weight.
    ///
    /// # Errors
    /// It does not, or its tensors are missing or do not fit together; the message has all shapes.
    pub fn check(&self, source: &dyn WeightSource, weight: &Shape) -> Result<()> {
        let [n, k, s] = split(weight);
        let [m, columns] = self.dims(source, s)?;
        if !self.rows.fit(m, n) || columns != k {
            let wanted = format!("the change is [{m}, {columns}], the weight {weight}");
            return Err(Error::shape(format!("{}: {wanted}", self.kind.name())));
        }
        if let Some(magnitude) = &self.magnitude {
            let want = if magnitude.per_input { k / s } else { m };
            let has = shape(source, &magnitude.name)?;
            if has.elements() != want {
                return Err(Error::shape(format!("{} is {has}, want {want} values", magnitude.name)));
            }
        }
        Ok(())
    }

    /// `Δ` at strength 1, `[n, k]` like the weight. `base` reads the weight's values.
    pub(super) fn values(
        &self,
        source: &dyn WeightSource,
        weight: &Shape,
        base: &dyn Fn() -> Result<Vec<f32>>,
    ) -> Result<Vec<f32>> {
        self.check(source, weight)?;
        let [n, k, s] = split(weight);
        let mut delta = self.kind.values(source, s)?;
        if self.scale != 1.0 {
            delta.values.iter_mut().for_each(|v| *v *= self.scale);
        }
        let m = delta.rows;
        if self.magnitude.is_some() || matches!(self.kind, Kind::Replacement(_)) {
            let base = base()?;
            let mut before = vec![0.0; delta.values.len()];
            for (i, row) in before.chunks_exact_mut(k.max(1)).enumerate() {
                let at = self.rows.target(i, m).and_then(|t| base.get(t * k..(t + 1) * k));
                if let Some(from) = at {
                    row.copy_from_slice(from);
                }
            }
            if let Kind::Replacement(_) = self.kind {
                delta.values.iter_mut().zip(&before).for_each(|(d, b)| *d -= b);
            }
            if let Some(magnitude) = &self.magnitude {
                let lengths = read(source, &magnitude.name)?;
                rescale(&mut delta.values, &before, &lengths, magnitude.per_input, [k, s]);
            }
        }
        if self.rows == Rows::All {
            return Ok(delta.values);
        }
        Ok(self.rows.place(&delta, n))
    }
}

/// Turns `Δ` into what is missing from `W` to `m (W + Δ) / ‖W + Δ‖`.
fn rescale(delta: &mut [f32], before: &[f32], lengths: &[f32], per_input: bool, [k, s]: [usize; 2]) {
    let (k, s) = (k.max(1), s.max(1));
    let after: Vec<f32> = before.iter().zip(delta.iter()).map(|(w, d)| w + d).collect();
    let line = |i: usize| if per_input { i % k / s } else { i / k };
    let mut squares = vec![0.0f64; lengths.len()];
    for (i, v) in after.iter().enumerate() {
        if let Some(sum) = squares.get_mut(line(i)) {
            *sum += f64::from(*v) * f64::from(*v);
        }
    }
    // A row of zeros has no direction to give a length to.
    let factor = |(m, q): (&f32, &f64)| if *q > 0.0 { (f64::from(*m) / q.sqrt()) as f32 } else { 0.0 };
    let factors: Vec<f32> = lengths.iter().zip(&squares).map(factor).collect();
    for (i, ((d, w), v)) in delta.iter_mut().zip(before).zip(&after).enumerate() {
        *d = factors.get(line(i)).copied().unwrap_or(1.0) * v - w;
    }
}

impl Rows {
    /// The rows of `matrix` where they belong among `n` rows of zeros.
    pub(super) fn place(self, matrix: &Matrix, n: usize) -> Vec<f32> {
        let k = matrix.columns;
        let mut out = vec![0.0; n * k];
        for (i, row) in matrix.values.chunks_exact(k.max(1)).enumerate() {
            if let Some(to) = self.target(i, matrix.rows).and_then(|t| out.get_mut(t * k..(t + 1) * k)) {
                to.copy_from_slice(row);
            }
        }
        out
    }
}

impl Kind {
    /// The first tensor, for messages.
    pub(super) fn name(&self) -> &str {
        match self {
            Kind::LowRank { down, .. } => down,
            Kind::Hadamard(a, _) | Kind::Kronecker(a, _) => a.name(),
            Kind::Difference(name) | Kind::Replacement(name) => name,
        }
    }

    fn values(&self, source: &dyn WeightSource, spatial: usize) -> Result<Matrix> {
        match self {
            Kind::LowRank { down, mid: None, up } => Ok(product(&matrix(source, up)?, &matrix(source, down)?)),
            Kind::LowRank { down, mid: Some(mid), up } => {
                Ok(tucker(&matrix(source, up)?, &matrix(source, mid)?, &matrix(source, down)?))
            }
            Kind::Hadamard(a, b) => {
                let (mut a, b) = (a.values(source)?, b.values(source)?);
                a.values.iter_mut().zip(&b.values).for_each(|(x, y)| *x *= y);
                Ok(a)
            }
            Kind::Kronecker(a, b) => Ok(kronecker(&a.values(source)?, &b.values(source)?, spatial)),
            Kind::Difference(name) | Kind::Replacement(name) => matrix(source, name),
        }
    }
}

impl Factor {
    /// The first tensor, for messages.
    fn name(&self) -> &str {
        match self {
            Factor::Whole(name) | Factor::Product { a: name, .. } => name,
        }
    }

    /// Rows and columns.
    pub(super) fn dims(&self, source: &dyn WeightSource) -> Result<[usize; 2]> {
        match self {
            Factor::Whole(name) => dims(source, name),
            Factor::Product { a, b, core: None } => {
                let ([n, r], [rb, k]) = (dims(source, a)?, dims(source, b)?);
                if r == rb { Ok([n, k]) } else { Err(apart(source, &[a, b])) }
            }
            Factor::Product { a, b, core: Some(core) } => {
                let ([r, n], [rb, c]) = (dims(source, a)?, dims(source, b)?);
                match shape(source, core)?.array::<4>() {
                    Some([i, j, kh, kw]) if (i, j) == (r, rb) => Ok([n, times(&[c, kh, kw], core)?]),
                    _ => Err(apart(source, &[a, core, b])),
                }
            }
        }
    }

    /// Its values.
    pub(super) fn values(&self, source: &dyn WeightSource) -> Result<Matrix> {
        match self {
            Factor::Whole(name) => matrix(source, name),
            Factor::Product { a, b, core: None } => Ok(product(&matrix(source, a)?, &matrix(source, b)?)),
            Factor::Product { a, b, core: Some(core) } => {
                let a = transposed(&matrix(source, a)?);
                Ok(tucker(&a, &matrix(source, core)?, &matrix(source, b)?))
            }
        }
    }
}

/// `[n, r]` times `[r, k]`.
fn product(a: &Matrix, b: &Matrix) -> Matrix {
    let (r, k) = (a.columns.max(1), b.columns.max(1));
    let mut values = vec![0.0f32; a.rows * b.columns];
    values.par_chunks_mut(k).zip(a.values.par_chunks(r)).for_each(|(out, row)| {
        for (factor, from) in row.iter().zip(b.values.chunks_exact(k)) {
            out.iter_mut().zip(from).for_each(|(o, v)| *o += factor * v);
        }
    });
    Matrix { rows: a.rows, columns: b.columns, values }
}

fn transposed(m: &Matrix) -> Matrix {
    let mut values = Vec::with_capacity(m.values.len());
    for column in 0..m.columns {
        values.extend(m.values.iter().skip(column).step_by(m.columns.max(1)));
    }
    Matrix { rows: m.columns, columns: m.rows, values }
}

/// `Σ up[p, i] core[i, j, s] down[j, q]` as `[p, (q, s)]`.
fn tucker(up: &Matrix, core: &Matrix, down: &Matrix) -> Matrix {
    let (j, c) = (down.rows.max(1), down.columns);
    let s = core.columns / j;
    // up core, [p, (j, s)]; then each row's [j, s] turned into [(q, s)].
    let left = product(up, core);
    let mut values = vec![0.0f32; up.rows * c * s];
    values.par_chunks_mut((c * s).max(1)).zip(left.values.par_chunks((j * s).max(1))).for_each(|(out, row)| {
        for (from, weights) in row.chunks_exact(s.max(1)).zip(down.values.chunks_exact(c.max(1))) {
            for (to, w) in out.chunks_exact_mut(s.max(1)).zip(weights) {
                to.iter_mut().zip(from).for_each(|(o, v)| *o += w * v);
            }
        }
    });
    Matrix { rows: up.rows, columns: c * s, values }
}

/// `[a, b] ⊗ [c, (d, s)]` as `[(a, c), (b, d, s)]`.
fn kronecker(left: &Matrix, right: &Matrix, spatial: usize) -> Matrix {
    debug_assert!(right.columns.is_multiple_of(spatial.max(1)));
    let mut values = Vec::with_capacity(left.values.len() * right.values.len());
    for row in left.values.chunks_exact(left.columns.max(1)) {
        for from in right.values.chunks_exact(right.columns.max(1)) {
            for factor in row {
                values.extend(from.iter().map(|v| factor * v));
            }
        }
    }
    Matrix { rows: left.rows * right.rows, columns: left.columns * right.columns, values }
}

/// `n`, `k` and `s` of a weight.
pub(super) fn split(weight: &Shape) -> [usize; 3] {
    let n = weight.dim(0);
    [n, weight.elements() / n.max(1), weight.dims().iter().skip(2).product()]
}

fn shape(source: &dyn WeightSource, name: &str) -> Result<Shape> {
    let missing = || {
        let origin = source.origin(name);
        Error::missing(origin.name, origin.file)
    };
    source.meta(name).map(|m| m.shape).ok_or_else(missing)
}

/// The first axis, and all others together.
pub(super) fn dims(source: &dyn WeightSource, name: &str) -> Result<[usize; 2]> {
    let shape = shape(source, name)?;
    let n = shape.dim(0);
    if shape.elements() == 0 {
        return Err(Error::shape(format!("{name} is empty: {shape} ({})", source.origin(name).file)));
    }
    Ok([n, shape.elements() / n])
}

fn times(sizes: &[usize], name: &str) -> Result<usize> {
    let product = sizes.iter().try_fold(1usize, |a, b| a.checked_mul(*b));
    product.ok_or_else(|| Error::shape(format!("{name}: the change has too many elements")))
}

/// The error of tensors that do not fit together.
fn apart(source: &dyn WeightSource, names: &[&str]) -> Error {
    let list = names.iter().map(|n| match source.meta(n) {
        Some(m) => format!("{n} {}", m.shape),
        None => (*n).to_owned(),
    });
    let file = names.first().map(|n| source.origin(n).file).unwrap_or_default();
    Error::shape(format!("{} do not fit together ({file})", list.collect::<Vec<_>>().join(" and ")))
}

/// A tensor's elements.
pub(super) fn read(source: &dyn WeightSource, name: &str) -> Result<Vec<f32>> {
    let shape = shape(source, name)?;
    let meta = source.meta(name).ok_or_else(|| Error::internal(format!("{name} is gone")))?;
    to_f32(meta.dtype, &source.bytes(name)?.read()?, shape.elements()).map_err(|e| e.context(name.to_owned()))
}

/// A tensor as a matrix.
pub(super) fn matrix(source: &dyn WeightSource, name: &str) -> Result<Matrix> {
    let [rows, columns] = dims(source, name)?;
    Ok(Matrix { rows, columns, values: read(source, name)? })
}
