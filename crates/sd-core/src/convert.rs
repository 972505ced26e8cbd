//! Element types to f32 and back, on the host.

use half::{bf16, f16};
use rayon::prelude::*;

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::ffi::types;

/// Elements that one task converts: whole blocks of every type.
const TASK: usize = 1 << 16;

/// The elements stored in `bytes` as f32. Any bit pattern is accepted; some types then give NaN or infinity.
///
/// # Errors
/// `bytes` is not exactly `elements` elements of `dtype`, or the type cannot be converted.
pub fn to_f32(dtype: DType, bytes: &[u8], elements: usize) -> Result<Vec<f32>> {
    if dtype.bytes(elements, elements) != Some(bytes.len()) {
        return Err(Error::shape(format!("{} bytes are not {elements} elements of {dtype}", bytes.len())));
    }
    let mut out = vec![0.0f32; elements];
    let task_bytes = TASK / dtype.block() * dtype.block_bytes();
    bytes
        .par_chunks(task_bytes)
        .zip(out.par_chunks_mut(TASK))
        .try_for_each(|(src, dst)| decode(dtype, src, dst))?;
    Ok(out)
}

fn decode(dtype: DType, src: &[u8], dst: &mut [f32]) -> Result<()> {
    fn each<const N: usize>(src: &[u8], dst: &mut [f32], f: impl Fn([u8; N]) -> f32) {
        let (elements, _) = src.as_chunks::<N>();
        for (d, s) in dst.iter_mut().zip(elements) {
            *d = f(*s);
        }
    }
    match dtype {
        DType::F32 => each(src, dst, f32::from_le_bytes),
        DType::F16 => each(src, dst, |b| f16::from_le_bytes(b).to_f32()),
        DType::BF16 => each(src, dst, |b| bf16::from_le_bytes(b).to_f32()),
        DType::F64 => each(src, dst, |b| f64::from_le_bytes(b) as f32),
        DType::F8E4M3 => each(src, dst, |[b]| f8_e4m3(b)),
        DType::F8E5M2 => each(src, dst, |[b]| f8_e5m2(b)),
        DType::F8E4M3S => scaled(dtype, src, dst, |[b], [v]| *v = f8_e4m3(b)),
        DType::F8E5M2S => scaled(dtype, src, dst, |[b], [v]| *v = f8_e5m2(b)),
        DType::I8S => scaled(dtype, src, dst, |b, [v]| *v = f32::from(i8::from_le_bytes(b))),
        DType::F4S => scaled(dtype, src, dst, |[b], v| *v = [e2m1(b >> 4), e2m1(b & 15)]),
        DType::U8 => each(src, dst, |[b]| f32::from(b)),
        DType::I8 => each(src, dst, |b| f32::from(i8::from_le_bytes(b))),
        DType::I16 => each(src, dst, |b| f32::from(i16::from_le_bytes(b))),
        DType::I32 => each(src, dst, |b| i32::from_le_bytes(b) as f32),
        DType::I64 => each(src, dst, |b| i64::from_le_bytes(b) as f32),
        DType::Bool => each(src, dst, |[b]| if b == 0 { 0.0 } else { 1.0 }),
        _ => return types::dequantise(dtype, src, dst),
    }
    Ok(())
}

/// Elements of blocks that begin with an f32 factor; `element` reads those of a byte.
fn scaled<const N: usize>(dtype: DType, src: &[u8], dst: &mut [f32], element: impl Fn([u8; 1], &mut [f32; N])) {
    for (block, values) in src.chunks_exact(dtype.block_bytes()).zip(dst.chunks_exact_mut(dtype.block())) {
        let Some((factor, bytes)) = block.split_first_chunk() else { continue };
        let factor = f32::from_le_bytes(*factor);
        for (b, v) in bytes.iter().zip(values.as_chunks_mut().0) {
            element([*b], v);
            v.iter_mut().for_each(|v| *v *= factor);
        }
    }
}

/// A 4-bit float: sign, two bits of exponent with bias 1, one of mantissa (OCP Microscaling Formats 1.0, section 5.3.3).
fn e2m1(code: u8) -> f32 {
    const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let magnitude = MAGNITUDES.get(usize::from(code & 7)).copied().unwrap_or(0.0);
    if code & 8 == 0 { magnitude } else { -magnitude }
}

/// Sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinity, NaN when all bits but the sign are set
/// (`float8_e4m3fn`; Micikevicius et al. 2022, table 1).
fn f8_e4m3(b: u8) -> f32 {
    let mantissa = f32::from(b & 7);
    let magnitude = match (b >> 3) & 15 {
        15 if b & 7 == 7 => f32::NAN,
        0 => mantissa * 2f32.powi(-9),
        e => (1.0 + mantissa / 8.0) * 2f32.powi(i32::from(e) - 7),
    };
    if b & 0x80 == 0 { magnitude } else { -magnitude }
}

/// The upper half of an f16 (`float8_e5m2`; same source).
fn f8_e5m2(b: u8) -> f32 {
    f16::from_bits(u16::from(b) << 8).to_f32()
}

/// The nearest code of an 8-bit float, ties to the even code; `decode` rises over codes `0..=top`.
fn f8_code(v: f32, top: u8, decode: fn(u8) -> f32) -> Option<u8> {
    let sign = if v.is_sign_negative() { 0x80 } else { 0 };
    let m = v.abs();
    let (mut lo, mut hi) = (0u8, top);
    while hi - lo > 1 {
        let mid = lo + (hi - lo) / 2;
        if decode(mid) <= m { lo = mid } else { hi = mid }
    }
    let (below, above) = (decode(lo), decode(hi));
    if m > above + (above - below) / 2.0 {
        return None;
    }
    let code = match (m - below).total_cmp(&(above - m)) {
        std::cmp::Ordering::Less => lo,
        std::cmp::Ordering::Greater => hi,
        std::cmp::Ordering::Equal => lo + (lo & 1),
    };
    Some(sign | code)
}

/// `values`, in rows of `row`, stored as `dtype`: floats round to nearest, ties to even; quantised types give all
/// columns the same importance.
///
/// # Errors
/// A row is not whole blocks, the type is an integer type or one that is not written, or a finite value does not fit
/// the type. Quantised types refuse NaN and infinities.
pub fn from_f32(dtype: DType, values: &[f32], row: usize) -> Result<Vec<u8>> {
    store(dtype, values, row, None)
}

/// [`from_f32`] with the importance of each of the `row` columns, to a common factor. Types that are not quantised do
/// not depend on it.
///
/// # Errors
/// As for [`from_f32`]; there is not one importance for each column, or one is negative or not finite.
pub fn from_f32_weighted(dtype: DType, values: &[f32], row: usize, importance: &[f32]) -> Result<Vec<u8>> {
    if importance.len() != row {
        return Err(Error::shape(format!("an importance for {} columns, rows have {row}", importance.len())));
    }
    if let Some(v) = importance.iter().find(|v| !v.is_finite() || **v < 0.0) {
        return Err(Error::non_finite(format!("the importance {v} of a column")));
    }
    let mean = importance.iter().map(|v| f64::from(*v)).sum::<f64>() / row.max(1) as f64;
    // Columns that are never used count a little, so that no block is without any weight.
    let even = |v: &f32| if mean > 0.0 { (f64::from(*v) / mean).max(1e-6) as f32 } else { 1.0 };
    store(dtype, values, row, Some(&importance.iter().map(even).collect::<Vec<_>>()))
}

/// Whether a type has so few bits that it is only to be written with the importance of columns.
pub fn needs_importance(dtype: DType) -> bool {
    types::needs_importance(dtype)
}

fn store(dtype: DType, values: &[f32], row: usize, importance: Option<&[f32]>) -> Result<Vec<u8>> {
    let whole = row > 0 && values.len().is_multiple_of(row);
    let Some(size) = dtype.bytes(values.len(), row).filter(|_| whole || values.is_empty()) else {
        return Err(Error::shape(format!(
            "{} values in rows of {row} are not whole blocks of {dtype}",
            values.len()
        )));
    };
    if values.is_empty() {
        return Ok(Vec::new());
    }
    if dtype.is_quantised() {
        return quantise(dtype, values, row, importance, size);
    }
    fn each<const N: usize>(
        values: &[f32],
        size: usize,
        f: impl Fn(f32) -> Option<[u8; N]> + Sync,
    ) -> Option<Vec<u8>> {
        let mut out = vec![0u8; size];
        let done = values.par_chunks(TASK).zip(out.par_chunks_mut(TASK * N)).try_for_each(|(src, dst)| {
            let (elements, _) = dst.as_chunks_mut::<N>();
            for (d, &v) in elements.iter_mut().zip(src) {
                *d = f(v)?;
            }
            Some(())
        });
        done.map(|()| out)
    }
    let out = match dtype {
        DType::F32 => each(values, size, |v| Some(v.to_le_bytes())),
        DType::F64 => each(values, size, |v| Some(f64::from(v).to_le_bytes())),
        DType::BF16 => each(values, size, |v| {
            let b = bf16::from_f32(v);
            (b.is_finite() || !v.is_finite()).then(|| b.to_le_bytes())
        }),
        DType::F16 => each(values, size, |v| {
            let h = f16::from_f32(v);
            (h.is_finite() || !v.is_finite()).then(|| h.to_le_bytes())
        }),
        DType::F8E4M3 => {
            each(values, size, |v| if v.is_nan() { Some([0x7f]) } else { f8_code(v, 0x7e, f8_e4m3).map(|b| [b]) })
        }
        DType::F8E5M2 => each(values, size, |v| match v {
            _ if v.is_nan() => Some([0x7f]),
            _ if v.is_infinite() => Some([if v > 0.0 { 0x7c } else { 0xfc }]),
            _ => f8_code(v, 0x7b, f8_e5m2).map(|b| [b]),
        }),
        _ => return Err(Error::unsupported(format!("values are not written as {dtype}"))),
    };
    out.ok_or_else(|| Error::non_finite(format!("a value is outside the range of {dtype}")))
}

/// Threads that conversions use instead of one per processor.
pub struct Workers(rayon::ThreadPool);

impl Workers {
    /// So many threads; 0 means one per processor.
    ///
    /// # Errors
    /// The system gives no threads.
    pub fn new(threads: usize) -> Result<Workers> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        Ok(Workers(pool.map_err(|e| Error::device(format!("no {threads} threads: {e}")))?))
    }

    /// What `f` returns, with the conversions in it done by these threads.
    pub fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        self.0.install(f)
    }
}

/// Beyond this, block scales (f16 in most types) and the squares that the search for them sums overflow.
const LARGEST: f32 = 65504.0;
/// Below this, every type rounds to zero, and the search for scales would divide by underflowed squares.
const SMALLEST: f32 = 1e-15;

fn quantise(dtype: DType, values: &[f32], row: usize, importance: Option<&[f32]>, size: usize) -> Result<Vec<u8>> {
    if !types::can_quantise(dtype) {
        return Err(Error::unsupported(format!("values are not written as {dtype}, which only holds activations")));
    }
    if let Some(v) = values.iter().find(|v| !v.is_finite() || v.abs() > LARGEST) {
        return Err(Error::non_finite(format!("{v} cannot be stored as {dtype}")));
    }
    let flushed: Vec<f32>;
    let values = if values.iter().any(|&v| v != 0.0 && v.abs() < SMALLEST) {
        flushed = values.iter().map(|&v| if v.abs() < SMALLEST { 0.0 } else { v }).collect();
        &flushed
    } else {
        values
    };
    let mut out = vec![0u8; size];
    let rows = TASK.div_ceil(row);
    let row_bytes = row / dtype.block() * dtype.block_bytes();
    values
        .par_chunks(rows * row)
        .zip(out.par_chunks_mut(rows * row_bytes))
        .try_for_each(|(src, dst)| types::quantise(dtype, src, row, importance, dst))?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Standard normal values from a fixed linear congruential generator (Box and Muller 1958).
    fn normal(n: usize) -> Vec<f32> {
        let mut state = 7u64;
        let mut uniform = move || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((state >> 11) as f64 + 0.5) / (1u64 << 53) as f64
        };
        (0..n)
            .map(|_| ((-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos()) as f32)
            .collect()
    }

    #[test]
    fn f8_codes_follow_the_formula() {
        for b in 0..=255u8 {
            let sign = if b >> 7 == 1 { -1.0f64 } else { 1.0 };
            let (e, m) = (i32::from(b >> 3 & 15), f64::from(b & 7));
            let want = match (e, b & 7) {
                (15, 7) => f64::NAN,
                (0, _) => sign * m / 8.0 * 2f64.powi(-6),
                _ => sign * (1.0 + m / 8.0) * 2f64.powi(e - 7),
            };
            let got = to_f32(DType::F8E4M3, &[b], 1).unwrap()[0];
            assert!(f64::from(got) == want || (got.is_nan() && want.is_nan()), "e4m3 {b:#x}: {got} {want}");

            let (e, m) = (i32::from(b >> 2 & 31), f64::from(b & 3));
            let want = match (e, b & 3) {
                (31, 0) => sign * f64::INFINITY,
                (31, _) => f64::NAN,
                (0, _) => sign * m / 4.0 * 2f64.powi(-14),
                _ => sign * (1.0 + m / 4.0) * 2f64.powi(e - 15),
            };
            let got = to_f32(DType::F8E5M2, &[b], 1).unwrap()[0];
            assert!(f64::from(got) == want || (got.is_nan() && want.is_nan()), "e5m2 {b:#x}: {got} {want}");
        }
    }

    #[test]
    fn f8_codes_survive_a_round_trip_and_ties_go_to_even() {
        for dtype in [DType::F8E4M3, DType::F8E5M2] {
            for b in 0..=255u8 {
                let v = to_f32(dtype, &[b], 1).unwrap();
                if !v[0].is_nan() {
                    assert_eq!(from_f32(dtype, &v, 1).unwrap(), [b], "{dtype} {b:#x}");
                }
            }
        }
        // Between 16 (0x58) and 18 (0x59), and between 18 and 20 (0x5a).
        assert_eq!(from_f32(DType::F8E4M3, &[17.0, 19.0, 448.0, -464.0], 4).unwrap(), [0x58, 0x5a, 0x7e, 0xfe]);
        assert!(from_f32(DType::F8E4M3, &[465.0], 1).is_err());
        assert!(from_f32(DType::F8E4M3, &[f32::INFINITY], 1).is_err());
        assert_eq!(from_f32(DType::F8E5M2, &[f32::NEG_INFINITY], 1).unwrap(), [0xfc]);
    }

    #[test]
    fn plain_types() {
        let bytes: Vec<u8> = [-3i64, 1 << 40].iter().flat_map(|v| v.to_le_bytes()).collect();
        assert_eq!(to_f32(DType::I64, &bytes, 2).unwrap(), [-3.0, 1099511627776.0]);
        assert_eq!(to_f32(DType::I8, &[0xff], 1).unwrap(), [-1.0]);
        assert_eq!(to_f32(DType::U8, &[0xff], 1).unwrap(), [255.0]);
        assert_eq!(to_f32(DType::Bool, &[2, 0], 2).unwrap(), [1.0, 0.0]);
        assert_eq!(to_f32(DType::F64, &0.5f64.to_le_bytes(), 1).unwrap(), [0.5]);
        assert_eq!(to_f32(DType::F16, &[0x00, 0x3c, 0x01, 0x00], 2).unwrap(), [1.0, 2f32.powi(-24)]);
        assert_eq!(to_f32(DType::BF16, &[0x80, 0xbf], 1).unwrap(), [-1.0]);
        assert!(from_f32(DType::F16, &[70000.0], 1).is_err());
        assert!(from_f32(DType::I32, &[1.0], 1).is_err());
    }

    #[test]
    fn columns_that_matter_are_kept_closer() {
        let values = normal(64 * 256);
        // Every fourth column counts a hundred times as much.
        let importance: Vec<f32> = (0..256).map(|i| if i % 4 == 0 { 5000.0 } else { 50.0 }).collect();
        for dtype in [DType::Q4_0, DType::Q4K, DType::Q2K, DType::IQ4_NL, DType::IQ3_S, DType::IQ2_XS] {
            let loss = |bytes: Vec<u8>| -> f64 {
                let back = to_f32(dtype, &bytes, values.len()).unwrap();
                let of = |(i, (a, b)): (usize, (&f32, &f32))| f64::from(importance[i % 256] * (a - b).powi(2));
                values.iter().zip(&back).enumerate().map(of).sum()
            };
            let even = loss(from_f32(dtype, &values, 256).unwrap());
            let weighted = loss(from_f32_weighted(dtype, &values, 256, &importance).unwrap());
            assert!(weighted < 0.95 * even, "{dtype}: {weighted} of {even}");
        }
        let plain = from_f32(DType::Q8_0, &values, 256).unwrap();
        assert_eq!(from_f32_weighted(DType::Q8_0, &values, 256, &importance).unwrap(), plain);
        for bad in [&importance[..255], &[-1.0; 256], &[f32::NAN; 256]] {
            assert!(from_f32_weighted(DType::Q4_0, &values, 256, bad).is_err());
        }
        assert!(from_f32_weighted(DType::IQ2_XXS, &values, 256, &[0.0; 256]).is_ok());
        assert!(needs_importance(DType::IQ2_XXS) && !needs_importance(DType::Q4K) && !needs_importance(DType::F32));
    }

    #[test]
    fn wrong_lengths_are_errors() {
        for dtype in DType::all() {
            let n = 2 * dtype.block();
            let size = dtype.bytes(n, n).unwrap();
            for len in [0, size - 1, size + 1] {
                assert!(to_f32(dtype, &vec![0; len], n).is_err(), "{dtype} {len}");
            }
            assert!(to_f32(dtype, &[], usize::MAX).is_err());
            assert!(from_f32(dtype, &[0.0; 3], 2).is_err());
        }
    }

    #[test]
    fn any_bits_can_be_read() {
        let mut state = 99u32;
        let noise: Vec<u8> = (0..200_000)
            .map(|_| {
                state = state.wrapping_mul(1664525).wrapping_add(1013904223);
                (state >> 24) as u8
            })
            .collect();
        for dtype in DType::all() {
            // These hold activations only; ggml reads them nowhere.
            if matches!(dtype, DType::Q8_1 | DType::Q8K) {
                continue;
            }
            let n = noise.len() / dtype.block_bytes() * dtype.block();
            let bytes = dtype.bytes(n, n).unwrap();
            // Unaligned on purpose.
            let got = to_f32(dtype, &noise[noise.len() - bytes..], n).unwrap();
            assert_eq!(got.len(), n);
            let all_set = to_f32(dtype, &vec![0xff; bytes], n).unwrap();
            assert_eq!(all_set.len(), n);
        }
    }

    /// ggml searches tens of seconds for the neighbours in these types' grids before it writes the first block.
    const SLOW: &[DType] = &[DType::IQ1_S, DType::IQ1_M, DType::IQ2_S];

    /// Root mean square error over root mean square of standard normal values, at most. A uniform quantiser of `b`
    /// bits over ±4σ has 8 / 2^b / √12, which is the bound for the nominal bits of each type.
    #[test]
    fn quantisation_loses_no_more_than_its_bits() {
        let uniform = |bits: f64| 8.0 / 2f64.powf(bits) / 12f64.sqrt();
        let table = [
            (DType::F16, uniform(11.0)),
            (DType::BF16, uniform(8.0)),
            (DType::Q8_0, uniform(8.0)),
            (DType::Q6K, uniform(6.0)),
            (DType::Q5_0, uniform(5.0)),
            (DType::Q5_1, uniform(5.0)),
            (DType::Q5K, uniform(5.0)),
            (DType::Q4_0, uniform(4.0)),
            (DType::Q4_1, uniform(4.0)),
            (DType::Q4K, uniform(4.0)),
            (DType::IQ4_NL, uniform(4.0)),
            (DType::IQ4_XS, uniform(4.0)),
            (DType::MXFP4, uniform(4.0)),
            (DType::NVFP4, uniform(4.0)),
            (DType::Q3K, uniform(3.0)),
            (DType::IQ3_S, uniform(3.0)),
            (DType::IQ3_XXS, uniform(3.0)),
            (DType::Q2K, uniform(2.6)),
            (DType::IQ2_XS, uniform(2.6)),
            (DType::IQ2_XXS, uniform(2.6)),
            // Below two bits the sign and a scale remain: better than zeros, whose error is 1.
            (DType::TQ1_0, 0.999),
            (DType::TQ2_0, 0.999),
            (DType::Q1_0, 0.75),
        ];
        let values = normal(4 * 768);
        let power: f64 = values.iter().map(|&v| f64::from(v).powi(2)).sum();
        for (dtype, bound) in table {
            let bytes = from_f32(dtype, &values, 768).unwrap();
            let back = to_f32(dtype, &bytes, values.len()).unwrap();
            let error: f64 = values.iter().zip(&back).map(|(&a, &b)| f64::from(a - b).powi(2)).sum();
            let relative = (error / power).sqrt();
            assert!(relative < bound, "{dtype}: {relative:.4} over {bound:.4}");
            assert!(relative > 0.0, "{dtype} cannot be exact");
        }
        let written = DType::all().filter(|d| types::can_quantise(*d) && !SLOW.contains(d));
        assert_eq!(table.len() - 2, written.count(), "every quantised type has a bound");
    }

    #[test]
    fn quantising_extremes_is_an_error_or_finite() {
        let mut tiny = normal(512);
        tiny.iter_mut().for_each(|v| *v *= 1e-38);
        let mut mixed = normal(512);
        mixed[3] = 65000.0;
        mixed[100] = 1e-40;
        for dtype in DType::all().filter(|d| types::can_quantise(*d) && !SLOW.contains(d)) {
            for values in [&tiny, &mixed, &vec![0.0; 512], &vec![1.0; 512]] {
                let bytes = from_f32(dtype, values, 256).unwrap();
                let back = to_f32(dtype, &bytes, 512).unwrap();
                assert!(back.iter().all(|v| v.is_finite()), "{dtype} of {:?}", &values[..4]);
            }
            for bad in [f32::NAN, f32::INFINITY, 1e30] {
                let mut values = vec![0.5; 256];
                values[17] = bad;
                assert!(from_f32(dtype, &values, 256).is_err(), "{dtype} {bad}");
            }
        }
        assert!(from_f32(DType::Q8_1, &[0.0; 32], 32).is_err());
    }

    #[test]
    fn parts_give_what_the_whole_gives() {
        let values = normal(3 * TASK);
        let whole = from_f32(DType::Q4K, &values, 256).unwrap();
        let half = from_f32(DType::Q4K, &values[..256 * 300], 256).unwrap();
        assert_eq!(whole[..half.len()], half);
        let back = to_f32(DType::Q4K, &whole, values.len()).unwrap();
        let bytes = whole.len() / values.len().div_ceil(256) * 2;
        assert_eq!(back[..512], to_f32(DType::Q4K, &whole[..bytes], 512).unwrap());
    }
}
