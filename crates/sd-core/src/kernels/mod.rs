//! Matrix products, convolutions and attention on the CPU: one blocked driver over inner loops for each instruction set.
//!
//! Weights of any stored type are converted to f32 tile by tile while they are packed; products and sums are f32. Work
//! is divided by output elements only, and each element is summed over `k` in one order: blocks of [`DEPTH`] one after
//! another, each from its first term to its last; or, where every image has few rows, lane by lane of a register. So a
//! result depends neither on the number of threads nor on what else is computed with it, but it does depend on the
//! instruction set.

mod attention;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512bf16;
mod bands;
mod blocks;
mod ceiling;
mod chain;
mod conv2d;
mod gemm;
mod grids;
#[cfg(all(test, target_os = "linux"))]
mod guarded;
mod inner;
mod integers;
mod linear;
mod moves;
mod norm;
mod observe;
mod pack;
mod portable;
mod quants;
mod scratch;
mod steps;
#[cfg(test)]
mod tests;
mod vector;
mod winograd;

use std::sync::OnceLock;

pub(crate) use attention::Attention;
pub(crate) use bands::{Put, Rows};
pub use ceiling::{Factors, multiply_add};
pub(crate) use chain::{Chain, Code, OPERANDS};
pub(crate) use conv2d::{Conv, Conv2d, Geometry};
pub(crate) use linear::{Linear, Products, Sums};
pub(crate) use moves::{Join, Lookup, Pad, Rope, Scatter, Timesteps, Transpose, Upsample};
pub(crate) use norm::{Moments, Norm, Softmax};
pub use observe::{Computed, observe, processor_seconds};
pub(crate) use pack::can_read;
pub(crate) use steps::{Memory, Place, Pool, Step, run};
pub(crate) use winograd::{Winograd, WinogradKernel};

use crate::dtype::DType;
use crate::error::{Error, Result};

/// Terms that are summed in registers before they are added to the result: whole blocks of every stored type.
const DEPTH: usize = 256;

/// The most columns of a tile on any instruction set.
const MAX_COLUMNS: usize = 32;

/// What computes matrix products and convolutions on the CPU.
///
/// The environment variable `SD_CPU`, one of `avx512bf16`, `avx512`, `avx2`, `portable` and `ggml`, chooses for `Auto`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CpuKernels {
    /// What `SD_CPU` says, else AVX-512 or AVX2, else ggml, which has kernels for other machines.
    #[default]
    Auto,
    /// AVX-512F with bf16 products, where [`Precision`](crate::Precision) allows them.
    Avx512Bf16,
    /// AVX-512F.
    Avx512,
    /// AVX2, FMA and F16C.
    Avx2,
    /// Any machine; slower than ggml's where that has kernels of its own.
    Portable,
    /// ggml's own operations.
    Ggml,
}

impl CpuKernels {
    /// The names that `SD_CPU` takes.
    const NAMES: [(&str, CpuKernels); 5] = [
        ("avx512bf16", CpuKernels::Avx512Bf16),
        ("avx512", CpuKernels::Avx512),
        ("avx2", CpuKernels::Avx2),
        ("portable", CpuKernels::Portable),
        ("ggml", CpuKernels::Ggml),
    ];

    /// Whether this machine can run them.
    pub fn is_available(self) -> bool {
        matches!(self, CpuKernels::Auto | CpuKernels::Ggml) || self.find().is_some()
    }

    /// The inner loops; `None` for ggml's operations.
    pub(crate) fn isa(self) -> Result<Option<&'static Isa>> {
        match self {
            CpuKernels::Ggml => Ok(None),
            CpuKernels::Auto => Ok(automatic()),
            _ => match self.find() {
                Some(isa) => Ok(Some(isa)),
                None => Err(Error::unsupported(format!("this processor cannot run {self:?} kernels"))),
            },
        }
    }

    fn find(self) -> Option<&'static Isa> {
        match self {
            CpuKernels::Portable => Some(&portable::ISA),
            #[cfg(target_arch = "x86_64")]
            CpuKernels::Avx512Bf16 => avx512bf16::is_available().then_some(&avx512bf16::ISA),
            #[cfg(target_arch = "x86_64")]
            CpuKernels::Avx512 => avx512::is_available().then_some(&avx512::ISA),
            #[cfg(target_arch = "x86_64")]
            CpuKernels::Avx2 => avx2::is_available().then_some(&avx2::ISA),
            _ => None,
        }
    }
}

/// The choice for the process: `SD_CPU` is read once.
fn automatic() -> Option<&'static Isa> {
    static CHOICE: OnceLock<Option<&'static Isa>> = OnceLock::new();
    *CHOICE.get_or_init(|| {
        if let Ok(name) = std::env::var("SD_CPU")
            && !name.is_empty()
        {
            match chosen(&name) {
                Ok(isa) => return isa,
                Err(e) => tracing::warn!("SD_CPU={name} is ignored: {e}"),
            }
        }
        [CpuKernels::Avx512Bf16, CpuKernels::Avx512, CpuKernels::Avx2].into_iter().find_map(CpuKernels::find)
    })
}

/// The inner loops that a value of `SD_CPU` names.
fn chosen(name: &str) -> Result<Option<&'static Isa>> {
    match CpuKernels::NAMES.iter().find(|n| n.0.eq_ignore_ascii_case(name)) {
        Some((_, kernels)) => kernels.isa(),
        None => {
            let names: Vec<&str> = CpuKernels::NAMES.iter().map(|n| n.0).collect();
            Err(Error::request(format!("want one of {}", names.join(", "))))
        }
    }
}

/// The inner loops of one instruction set. Callers of the functions make sure that the machine has it, which
/// [`CpuKernels::find`] does, and that pointers are valid for what each function says.
pub(crate) struct Isa {
    /// What products of two 16-bit terms at a time need; `None` where the factors of products are f32.
    narrow: Option<Narrow>,
    /// The most rows of a tile.
    rows: usize,
    /// Columns of a tile, whose elements are neighbours in memory.
    columns: usize,
    /// Columns that are packed at a time, at most.
    block: usize,
    /// Computes a tile of at most `rows` rows.
    tile: unsafe fn(rows: usize, tile: &Tile),
    /// Adds products of a few rows to their sums.
    dots: unsafe fn(t: &Dots),
    /// `to[i * step + r] = from[r][i]` for `i < len`.
    transpose: unsafe fn(from: &[*const f32], len: usize, to: *mut f32, step: usize),
    /// `to[i * step + lane] = from[i * plane + index[lane]]` for `i < count`; 0 where the index is negative. There
    /// are as many indices as columns of a tile.
    gather: unsafe fn(index: &[i32], from: *const f32, plane: usize, count: usize, to: *mut f32, step: usize),
    /// f16 to f32.
    halves: unsafe fn(from: *const u8, len: usize, to: *mut f32),
    /// Whole blocks to f32; false for types that it does not know.
    decode: unsafe fn(dtype: DType, from: *const u8, len: usize, to: *mut f32) -> bool,
    /// Values of a row as integers, at most [`DEPTH`].
    quantise: unsafe fn(from: *const f32, len: usize, to: &mut integers::Terms),
    /// Products of rows as integers.
    integer_dots: unsafe fn(d: &integers::IntegerDots),
    /// Scores become weights.
    soften: unsafe fn(scores: &attention::Scores),
    /// `out[r][j] /= by[j]` for as many columns as a tile has.
    divide: unsafe fn(out: *mut f32, rows: usize, by: *const f32),
    /// Of `[rows, width, height]`: `to` holds strips `[rows][height]` of the rows, which are `step` apart. Rows are words
    /// of terms in the result.
    strips: unsafe fn(from: *const f32, step: usize, sizes: [usize; 3], to: *mut f32),
    /// One step of a [`Chain`] on `len` elements at `to`, with those at `by`, which are `step` (0 or 1) apart.
    apply: unsafe fn(code: Code, len: usize, to: *mut f32, by: *const f32, step: usize),
    /// Sums of what `len` elements are more than `less`, and of its square.
    deviation: unsafe fn(from: *const f32, len: usize, less: f32) -> [f64; 2],
    /// Taps `[channels][9][rows]` become what [`Winograd`] multiplies: `[rows, channels]`, and steps of points.
    kernel_in: unsafe fn(taps: *const f32, sizes: [usize; 2], to: *mut f32, step: usize),
    /// Tiles of inputs become what [`Winograd`] multiplies: from where to where, with both steps, how many.
    tiles_in: unsafe fn(lines: [*mut f32; 2], steps: [usize; 2], count: usize),
    /// Its products become results.
    tiles_out: unsafe fn(lines: [*const f32; 2], steps: [usize; 2], bias: f32),
    /// Softmax of `len` elements; `to` may be `from`.
    softmax: unsafe fn(from: *const f32, len: usize, to: *mut f32),
}

/// Makes words of two neighbouring terms as bf16, the first in the lower half; a term that lacks its second has 0.
struct Narrow {
    /// The table with the same sizes whose products are of f32.
    wide: &'static Isa,
    /// `len` f32.
    row: unsafe fn(from: *const f32, len: usize, to: *mut f32),
    /// `len` f16.
    halves: unsafe fn(from: *const u8, len: usize, to: *mut f32),
    /// Of rows as wide as a tile, the second of which may not exist, words of an element of each. Where `to` is one of
    /// them it may be overwritten.
    pair: unsafe fn(rows: [Option<*const f32>; 2], to: *mut f32),
}

impl Isa {
    /// The same instruction set with factors of products in f32.
    pub(crate) fn wide(&'static self) -> &'static Isa {
        self.narrow.as_ref().map_or(self, |n| n.wide)
    }

    /// Words of 32 bits that `terms` take, which follow each other from an even one on.
    fn words(&self, terms: usize) -> usize {
        if self.narrow.is_some() { terms.div_ceil(2) } else { terms }
    }

    /// Rows of strips that `n` rows are divided into, as even as can be.
    fn height(&self, n: usize) -> usize {
        n.div_ceil(n.div_ceil(self.rows))
    }
}

impl std::fmt::Debug for Isa {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}x{}{}", self.rows, self.columns, if self.narrow.is_some() { " bf16" } else { "" })
    }
}

/// One tile of a result: `c[r][j] = base[r][j] + Σ_i a[i][r] b[i][j]`. Factors are words of 32 bits: an f32, or two bf16
/// whose products are both added.
struct Tile {
    /// Words of terms, at most [`DEPTH`].
    depth: usize,
    /// `[depth][rows]`.
    a: *const f32,
    /// `[depth][columns]`.
    b: *const f32,
    /// The first element.
    c: *mut f32,
    /// Elements from one row to the next.
    stride: usize,
    /// Columns that exist.
    columns: usize,
    base: Base,
}

/// Rows of `x` times [`GROUP`] rows of `w`, both f32: `sums[r][j][i % lanes] += x[r][i] w[j][i]`, where lanes are those
/// of a register.
struct Dots {
    /// Terms, at most [`DEPTH`].
    len: usize,
    rows: usize,
    x: *const f32,
    /// Elements from one row of `x` to the next.
    step: usize,
    w: [*const f32; GROUP],
    /// `[rows][GROUP][lanes]`.
    sums: *mut f32,
}

/// Rows of a matrix that are multiplied side by side with few rows.
const GROUP: usize = 4;

/// What the terms of a tile are added to.
#[derive(Clone, Copy)]
enum Base {
    /// What is there.
    Sum,
    Zero,
    /// A value for each row.
    Rows(*const f32),
    /// A value for each column that exists.
    Columns(*const f32),
}
