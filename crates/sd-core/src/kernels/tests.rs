//! Every instruction set that the machine has against sums in f64.

use super::*;
use crate::convert::{from_f32, to_f32};
use crate::dtype::DType;
use crate::ffi::HostOp;

/// Half a unit in the last place of f32.
const HALF_ULP: f64 = 1.0 / (1u64 << 24) as f64;

struct Random(u64);

impl Random {
    fn next(&mut self) -> f64 {
        // Knuth's MMIX constants.
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }

    fn pick(&mut self, lo: usize, hi: usize) -> usize {
        lo + (self.next() * (hi - lo + 1) as f64) as usize
    }

    fn values(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| (2.0 * self.next() - 1.0) as f32).collect()
    }
}

fn every_isa() -> Vec<&'static Isa> {
    let all = [CpuKernels::Avx512, CpuKernels::Avx2, CpuKernels::Portable];
    all.into_iter().filter(|k| k.is_available()).map(|k| k.isa().unwrap().unwrap()).collect()
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_ne_bytes()).collect()
}

/// Elements around a result that must stay as they are.
const GUARD: usize = 64;

/// The result of `op` computed in `parts`, each by a thread of its own.
fn run(op: &dyn HostOp, operands: &[&[u8]], parts: usize) -> Vec<f32> {
    let mut out = vec![1.25f32; op.elements() + 2 * GUARD];
    let at = out.as_mut_ptr().wrapping_add(GUARD) as usize;
    let operands: Vec<usize> = operands.iter().map(|o| o.as_ptr() as usize).collect();
    std::thread::scope(|s| {
        for part in 0..parts {
            let operands = operands.clone();
            s.spawn(move || {
                let operands: Vec<*const u8> = operands.iter().map(|&o| o as *const u8).collect();
                // SAFETY: the callers give operands as long as the operation says.
                unsafe { op.compute(at as *mut f32, &operands, part, parts) }
            });
        }
    });
    let end = out.split_off(GUARD + op.elements());
    assert!(end.iter().chain(&out[..GUARD]).all(|&v| v == 1.25), "{:?} wrote outside its result", op.operands());
    out.split_off(GUARD)
}

/// Checks each element against the sum of `terms(i)` in f64, within what f32 sums in blocks of [`DEPTH`] can lose.
fn check(what: &str, got: &[f32], terms: impl Fn(usize) -> (f64, Vec<f64>)) {
    for (i, &got) in got.iter().enumerate() {
        let (bias, terms) = terms(i);
        let want = bias + terms.iter().sum::<f64>();
        let size = bias.abs() + terms.iter().map(|t| t.abs()).sum::<f64>();
        let roundings = terms.len().min(DEPTH) + terms.len().div_ceil(DEPTH) + 2;
        let bound = size * HALF_ULP * roundings as f64;
        assert!((f64::from(got) - want).abs() <= bound, "{what}, element {i}: got {got}, want {want}");
    }
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.iter().map(|v| v.to_bits()).eq(b.iter().map(|v| v.to_bits()))
}

fn check_linear(isa: &'static Isa, r: &mut Random, [m, n, k]: [usize; 3], dtype: DType, bias: bool) {
    let what = format!("{isa:?} {dtype} [{m}, {k}] [{n}, {k}]");
    let x = r.values(m * k);
    let b = r.values(n);
    let stored = from_f32(dtype, &r.values(n * k), k).unwrap();
    let w = to_f32(dtype, &stored, n * k).unwrap();
    let op = Linear { isa, m, n, k, dtype, bias };
    let (xs, bs) = (bytes(&x), bytes(&b));
    let operands = if bias { vec![&xs[..], &stored, &bs] } else { vec![&xs[..], &stored] };
    let got = run(&op, &operands, 1);
    check(&what, &got, |i| {
        let (row, column) = (i / n, i % n);
        let products = x[row * k..][..k].iter().zip(&w[column * k..][..k]);
        let terms = products.map(|(x, w)| f64::from(*x) * f64::from(*w)).collect();
        (if bias { f64::from(b[column]) } else { 0.0 }, terms)
    });
    for parts in 2..=4 {
        assert!(same_bits(&got, &run(&op, &operands, parts)), "{what} by {parts} threads");
    }
    // A row alone is the same as among others.
    let row = r.pick(0, m - 1);
    let one = Linear { isa, m: 1, n, k, dtype, bias };
    let mut alone = operands.clone();
    alone[0] = &xs[row * k * 4..][..k * 4];
    assert!(same_bits(&got[row * n..][..n], &run(&one, &alone, 1)), "{what}: row {row} alone");
}

#[test]
fn products_of_every_size() {
    let mut r = Random(1);
    for isa in every_isa() {
        for rows in 1..=isa.rows + 1 {
            check_linear(isa, &mut r, [rows, isa.columns + 1, 19], DType::F32, true);
        }
        for _ in 0..24 {
            let sizes = [r.pick(1, 200), r.pick(1, 200), r.pick(1, 200)];
            let (dtype, bias) = (DType::F32, r.next() < 0.5);
            check_linear(isa, &mut r, sizes, dtype, bias);
        }
        // More than a block of terms, than a chunk of rows, than a block of columns, and than is packed at once.
        for sizes in [[300, 5, 900], [3, 1100, 520], [5, 33, 257], [37, 70, 256], [1030, 3, 280], [1, 1, 1]] {
            check_linear(isa, &mut r, sizes, DType::F32, true);
        }
    }
}

#[test]
fn products_with_every_stored_type() {
    let mut r = Random(2);
    let mut read = 0;
    for dtype in DType::all().filter(|&d| can_read(d)) {
        let writable = !dtype.is_quantised() || crate::ffi::types::can_quantise(dtype);
        if !writable {
            continue;
        }
        read += 1;
        for isa in every_isa() {
            // Quantising takes long: few rows, of more than one block of terms.
            let k = if dtype.block() == 1 { r.pick(257, 600) } else { (300 / dtype.block() + 1) * dtype.block() };
            let sizes = [r.pick(1, 20), r.pick(1, 12), k];
            check_linear(isa, &mut r, sizes, dtype, true);
        }
    }
    assert!(read >= 20, "{read} types");
}

#[derive(Clone, Copy, Debug)]
struct Case {
    batch: usize,
    channels: usize,
    image: [usize; 2],
    n: usize,
    kernel: [usize; 2],
    stride: usize,
    padding: usize,
    dilation: usize,
}

fn check_conv(isa: &'static Isa, r: &mut Random, case: Case, dtype: DType) {
    let Case { batch, channels, image: [h, w], n, kernel: [kh, kw], stride, padding, dilation } = case;
    let out = |len: usize, k: usize| (len + 2 * padding - (k - 1) * dilation - 1) / stride + 1;
    let [oh, ow] = [out(h, kh), out(w, kw)];
    let g =
        Geometry { batch, channels, image: [h, w], out: [oh, ow], n, kernel: [kh, kw], stride, padding, dilation };
    let x = r.values(batch * channels * h * w);
    let b = r.values(n);
    let k = channels * kh * kw;
    let stored = from_f32(dtype, &r.values(n * k), k).unwrap();
    let kernel = to_f32(dtype, &stored, n * k).unwrap();
    let op = Conv2d::new(isa, g, dtype, true).unwrap();
    let (xs, bs) = (bytes(&x), bytes(&b));
    let operands = [&xs[..], &stored, &bs];
    let got = run(&op, &operands, 1);
    check(&format!("{isa:?} {dtype} {case:?}"), &got, |i| {
        let (column, row) = (i % ow, i / ow % oh);
        let (channel, image) = (i / ow / oh % n, i / ow / oh / n);
        let mut terms = Vec::with_capacity(k);
        for c in 0..channels {
            for y in 0..kh {
                for z in 0..kw {
                    let at = |i: usize, j: usize, len: usize| {
                        (i * stride + j * dilation).checked_sub(padding).filter(|&p| p < len)
                    };
                    let value = match (at(row, y, h), at(column, z, w)) {
                        (Some(i), Some(j)) => f64::from(x[((image * channels + c) * h + i) * w + j]),
                        _ => 0.0,
                    };
                    terms.push(value * f64::from(kernel[((channel * channels + c) * kh + y) * kw + z]));
                }
            }
        }
        (f64::from(b[channel]), terms)
    });
    for parts in 2..=4 {
        assert!(same_bits(&got, &run(&op, &operands, parts)), "{isa:?} {case:?} by {parts} threads");
    }
    // An image alone is the same as among others.
    let last = batch - 1;
    let one = Conv2d::new(isa, Geometry { batch: 1, ..g }, dtype, true).unwrap();
    let alone = run(&one, &[&xs[last * channels * h * w * 4..], &stored, &bs], 1);
    assert!(same_bits(&got[last * n * oh * ow..], &alone), "{isa:?} {case:?}: the last image alone");
}

#[test]
fn convolutions_of_every_kind() {
    let mut r = Random(3);
    for isa in every_isa() {
        for i in 0..30 {
            let (kernel, dilation) = ([r.pick(1, 5), r.pick(1, 5)], r.pick(1, 3));
            let padding = r.pick(0, 3);
            let span = |k: usize| (k - 1) * dilation + 1;
            let size = |k: usize, r: &mut Random| r.pick(1, 24).max(span(k).saturating_sub(2 * padding));
            let case = Case {
                batch: r.pick(1, 3),
                channels: r.pick(1, 20),
                image: [size(kernel[0], &mut r), size(kernel[1], &mut r)],
                n: r.pick(1, 20),
                kernel,
                stride: r.pick(1, 3),
                padding,
                dilation,
            };
            check_conv(isa, &mut r, case, [DType::F32, DType::F16, DType::BF16][i % 3]);
        }
        let case = Case {
            batch: 2,
            channels: 40,
            image: [9, 70],
            n: 17,
            kernel: [3, 3],
            stride: 1,
            padding: 1,
            dilation: 1,
        };
        check_conv(isa, &mut r, case, DType::F32);
        // A kernel with more elements than terms are summed at a time, and one that sees padding only.
        check_conv(isa, &mut r, Case { channels: 2, kernel: [9, 40], n: 3, ..case }, DType::F16);
        check_conv(isa, &mut r, Case { kernel: [1, 1], padding: 12, channels: 1, n: 1, ..case }, DType::F32);
    }
}

#[test]
fn what_is_not_finite_stays() {
    for isa in every_isa() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let (m, n, k) = (9, 40, 300);
            let mut x = vec![0.5f32; m * k];
            x[4 * k + 299] = bad;
            let w = bytes(&vec![1.0f32; n * k]);
            let got = run(&Linear { isa, m, n, k, dtype: DType::F32, bias: false }, &[&bytes(&x), &w], 2);
            for (i, v) in got.iter().enumerate() {
                assert_eq!(v.is_finite(), i / n != 4, "{isa:?} {bad} {i}");
                assert!(i / n != 4 || v.is_nan() == bad.is_nan());
            }
        }
    }
}

#[test]
fn names_choose_kernels() {
    assert!(chosen("portable").unwrap().is_some_and(|isa| std::ptr::eq(isa, &portable::ISA)));
    assert!(chosen("GGML").unwrap().is_none());
    let e = chosen("sse").unwrap_err().to_string();
    assert!(e.contains("avx512, avx2, portable, ggml"), "{e}");
    assert!(CpuKernels::Auto.is_available());
}
