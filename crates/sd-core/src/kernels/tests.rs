//! Every instruction set that the machine has against sums in f64.

use super::blocks::is_own;
use super::quants::is_integers;
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
    let all = [CpuKernels::Avx512Bf16, CpuKernels::Avx512, CpuKernels::Avx2, CpuKernels::Portable];
    all.into_iter().filter(|k| k.is_available()).map(|k| k.isa().unwrap().unwrap()).collect()
}

/// What products take of `values`.
fn factors(isa: &Isa, values: &[f32]) -> Vec<f64> {
    let factor = |&v: &f32| match isa.narrow {
        Some(_) => half::bf16::from_f32(v).to_f64(),
        None => f64::from(v),
    };
    values.iter().map(factor).collect()
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
    // Only what the operation says it reads.
    #[cfg(target_os = "linux")]
    let guarded: Vec<_> = operands
        .iter()
        .zip(op.operands())
        .map(|(o, (dtype, [rows, row]))| guarded::Guarded::new(&o[..dtype.bytes(rows * row, row).unwrap()]))
        .collect();
    #[cfg(target_os = "linux")]
    let operands: Vec<usize> = guarded.iter().map(guarded::Guarded::address).collect();
    #[cfg(not(target_os = "linux"))]
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

/// Of blocks of codes of grids, the byte with the sign and the exponent of their f16 scale (ggml-common.h).
fn scale_byte(dtype: DType) -> Option<usize> {
    match dtype {
        // The scale's upper nibble ends the last of four numbers.
        DType::IQ1_M => Some(dtype.block_bytes() - 1),
        DType::IQ1_S | DType::IQ2_XXS | DType::IQ2_XS | DType::IQ2_S | DType::IQ3_XXS | DType::IQ3_S => Some(1),
        _ => None,
    }
}

/// A random matrix. Types that are not written are blocks of random codes after a factor.
fn stored(dtype: DType, r: &mut Random, [n, k]: [usize; 2]) -> Vec<u8> {
    if let Some(at) = scale_byte(dtype) {
        // Every code means something, and looking for the best ones takes long. The scale is between 2⁻⁷ and 2⁻³.
        let block = |_| {
            let mut block: Vec<u8> = (0..dtype.block_bytes()).map(|_| r.pick(0, 255) as u8).collect();
            block[at] = block[at] & 0x0f | 0x20;
            block
        };
        return (0..n * k / dtype.block()).flat_map(block).collect();
    }
    if dtype.block() == 1 || dtype.is_weight_type() {
        return from_f32(dtype, &r.values(n * k), k).unwrap();
    }
    let block = |_| {
        let mut block = (r.next() as f32 / 64.0).to_le_bytes().to_vec();
        // Half of the codes of FP8 are below two and none is NaN or infinity.
        block.extend((4..dtype.block_bytes()).map(|_| (r.pick(0, 1) * 128 + r.pick(0, 0x6f)) as u8));
        block
    };
    (0..n * k / dtype.block()).flat_map(block).collect()
}

/// A matrix `[n, k]` as it is stored.
struct Matrix {
    dtype: DType,
    n: usize,
    k: usize,
    bytes: Vec<u8>,
}

impl Matrix {
    fn random(r: &mut Random, dtype: DType, [n, k]: [usize; 2]) -> Matrix {
        Matrix { dtype, n, k, bytes: stored(dtype, r, [n, k]) }
    }

    /// Its first `n` rows.
    fn rows(&self, n: usize) -> Matrix {
        Matrix { n, bytes: self.bytes[..self.bytes.len() / self.n * n].to_vec(), ..*self }
    }
}

fn check_linear(isa: &'static Isa, r: &mut Random, [m, n, k]: [usize; 3], dtype: DType, bias: bool) {
    let w = Matrix::random(r, dtype, [n, k]);
    check_product(isa, r, m, &w, bias);
}

/// `m` random rows times a matrix, in both orders of sums.
fn check_product(isa: &'static Isa, r: &mut Random, m: usize, w: &Matrix, bias: bool) {
    let &Matrix { dtype, n, k, .. } = w;
    for sums in [Sums::Tiles, Sums::Lanes] {
        check_sums(r, &Linear { isa, m, n, k, dtype, bias, sums }, &w.bytes);
    }
}

fn check_sums(r: &mut Random, op: &Linear, stored: &[u8]) {
    let &Linear { isa, m, n, k, dtype, bias, sums } = op;
    let what = format!("{op:?}");
    let x = r.values(m * k);
    let b = r.values(n);
    let of = if sums == Sums::Lanes { isa.wide() } else { isa };
    let (fx, fw) = (factors(of, &x), factors(of, &to_f32(dtype, stored, n * k).unwrap()));
    let (xs, bs) = (bytes(&x), bytes(&b));
    let operands = if bias { vec![&xs[..], stored, &bs] } else { vec![&xs[..], stored] };
    let got = run(op, &operands, 1);
    check(&what, &got, |i| {
        let (row, column) = (i / n, i % n);
        let products = fx[row * k..][..k].iter().zip(&fw[column * k..][..k]);
        let terms = products.map(|(x, w)| x * w).collect();
        (if bias { f64::from(b[column]) } else { 0.0 }, terms)
    });
    for parts in 2..=4 {
        assert!(same_bits(&got, &run(op, &operands, parts)), "{what} by {parts} threads");
    }
    // A row alone is the same as among others.
    let row = r.pick(0, m - 1);
    let one = Linear { m: 1, ..*op };
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
        if matches!(dtype, DType::Q8_1 | DType::Q8K) {
            continue;
        }
        read += 1;
        // Quantising takes long: once for all, few rows, of more than one block of terms.
        let k = if dtype.block() == 1 { r.pick(257, 600) } else { (300 / dtype.block() + 1) * dtype.block() };
        let w = Matrix::random(&mut r, dtype, [12, k]);
        for isa in every_isa() {
            let (rows, columns) = (r.pick(1, 20), r.pick(1, 12));
            check_product(isa, &mut r, rows, &w.rows(columns), true);
        }
    }
    assert!(read >= 28, "{read} types");
}

#[test]
fn products_of_integers() {
    let mut r = Random(9);
    for dtype in DType::all().filter(|&d| is_integers(d)) {
        for (m, k) in [(1, 1), (r.pick(2, 20), r.pick(1, 3)), (33, 2)] {
            // Blocks of 32 leave the last 256 terms incomplete.
            let k = if dtype.block() == 256 { 256 * k } else { 256 * (k - 1) + 32 * r.pick(1, 8) };
            let (n, bias) = (r.pick(1, 13), r.next() < 0.5);
            let w = Matrix::random(&mut r, dtype, [n, k]);
            let mut x = r.values(m * k);
            // An outlier, values that leave nothing beside one, and some that are too small to count.
            x[0] = 1e3;
            x[k - 16..k].iter_mut().for_each(|v| *v *= 1e-31);
            check_integers(&mut r, &w, &x, bias);
        }
    }
}

/// The product with rows as integers: within what rounding them to those loses, and the same on every instruction set, for
/// every number of threads, and alone.
fn check_integers(r: &mut Random, w: &Matrix, x: &[f32], bias: bool) {
    let &Matrix { dtype, n, k, .. } = w;
    let m = x.len() / k;
    let b = r.values(n);
    let (xs, bs) = (bytes(x), bytes(&b));
    let operands = if bias { vec![&xs[..], &w.bytes, &bs] } else { vec![&xs[..], &w.bytes] };
    let values = to_f32(dtype, &w.bytes, n * k).unwrap();
    let op = |isa, m| Linear { isa, m, n, k, dtype, bias, sums: Sums::Integers };
    let all = every_isa();
    let got = run(&op(all[0], m), &operands, 1);
    for (i, &got) in got.iter().enumerate() {
        let (row, column) = (&x[i / n * k..][..k], &values[i % n * k..][..k]);
        let mut want = if bias { f64::from(b[i % n]) } else { 0.0 };
        let mut bound = want.abs() * HALF_ULP;
        for (x, w) in row.chunks(16).zip(column.chunks(16)) {
            let largest = |v: &[f32]| v.iter().fold(0.0, |a: f64, v| a.max(f64::from(v.abs())));
            // Half a step of each value, and what sums of products with integers and offsets lose.
            let step = if largest(x) < 1e-30 { 2e-30 } else { largest(x) / 32767.0 };
            let roundings = 8 + k.div_ceil(256) + 5;
            for (&x, &v) in x.iter().zip(w) {
                want += f64::from(x) * f64::from(v);
                bound += f64::from(v.abs()) * step * 0.501;
                bound += f64::from(x.abs()) * 4.0 * largest(w) * HALF_ULP * roundings as f64;
            }
        }
        assert!(
            (f64::from(got) - want).abs() <= bound,
            "{dtype} {m}x{n}x{k} {i}: {got}, want {want} within {bound}"
        );
    }
    for isa in all {
        for parts in 1..=4 {
            assert!(same_bits(&got, &run(&op(isa, m), &operands, parts)), "{isa:?} {dtype} by {parts} threads");
        }
        let row = r.pick(0, m - 1);
        let mut alone = operands.clone();
        alone[0] = &xs[row * k * 4..][..k * 4];
        assert!(same_bits(&got[row * n..][..n], &run(&op(isa, 1), &alone, 1)), "{isa:?} {dtype}: row {row} alone");
    }
}

#[test]
fn own_types_are_read_as_elsewhere() {
    let mut r = Random(8);
    for dtype in DType::all().filter(|&d| is_own(d)) {
        // Every code, by itself or in blocks of several factors.
        let codes: Vec<u8> = (0..=255).collect();
        let payload = if dtype.block() == 1 { 1 } else { dtype.block_bytes() - 4 };
        let mut from = Vec::new();
        for group in codes.chunks(payload) {
            if dtype.block() > 1 {
                from.extend((r.next() as f32).to_le_bytes());
            }
            from.extend(group);
        }
        let elements = from.len() / dtype.block_bytes() * dtype.block();
        let want = to_f32(dtype, &from, elements).unwrap();
        for isa in every_isa() {
            let mut got = vec![0.0f32; elements];
            // SAFETY: `every_isa` gives what the machine has; both slices are whole.
            assert!(unsafe { (isa.decode)(dtype, from.as_ptr(), elements, got.as_mut_ptr()) });
            let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
            assert!(want.iter().zip(&got).all(same), "{isa:?} {dtype}");
        }
    }
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
    let g = Geometry {
        batch,
        channels,
        image: [h, w],
        out: [oh, ow],
        n,
        kernel: [kh, kw],
        stride,
        padding: [padding; 2],
        dilation,
    };
    let x = r.values(batch * channels * h * w);
    let b = r.values(n);
    let k = channels * kh * kw;
    let stored = from_f32(dtype, &r.values(n * k), k).unwrap();
    let (fx, kernel) = (factors(isa, &x), factors(isa, &to_f32(dtype, &stored, n * k).unwrap()));
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
                        (Some(i), Some(j)) => fx[((image * channels + c) * h + i) * w + j],
                        _ => 0.0,
                    };
                    terms.push(value * kernel[((channel * channels + c) * kh + y) * kw + z]);
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

fn check_attention(isa: &'static Isa, r: &mut Random, a: Attention) {
    let Attention { batch, heads, queries, keys, width: d, value_width: e, scale, causal, mask, .. } = a;
    let rows = |t: usize| batch * t * heads;
    let (q, k, v) = (r.values(rows(queries) * d), r.values(rows(keys) * d), r.values(rows(keys) * e));
    let m = mask.map(|m| {
        let mut values = r.values(m.iter().product());
        // Some keys do not count, in some rows the first of them.
        values.iter_mut().for_each(|v| *v = if *v > 0.6 { f32::NEG_INFINITY } else { *v });
        values
    });
    let [qs, ks, vs] = [&q, &k, &v].map(|v| bytes(v));
    let ms = m.as_deref().map(bytes);
    let mut operands = vec![&qs[..], &ks, &vs];
    operands.extend(ms.as_deref());
    let got = run(&a, &operands, 1);
    let [q, k, v] = [&q, &k, &v].map(|v| factors(isa, v));
    for (row, got) in got.chunks(e).enumerate() {
        let (head, query, image) = (row % heads, row / heads % queries, row / heads / queries);
        let of = |t: &[f64], n: usize, at: usize, w: usize| {
            let first = ((image * n + at) * heads + head) * w;
            t[first..first + w].to_vec()
        };
        let asked = of(&q, queries, query, d);
        let scores: Vec<f64> = (0..keys)
            .map(|key| {
                let dot: f64 = asked.iter().zip(of(&k, keys, key, d)).map(|(a, b)| a * b).sum();
                let added = match (&m, mask) {
                    (Some(m), Some([b, h, tq, tk])) => {
                        m[((image % b * h + head % h) * tq + query % tq) * tk + key % tk]
                    }
                    _ => 0.0,
                };
                let hidden = causal && key > query;
                if hidden { f64::NEG_INFINITY } else { dot * f64::from(scale) + f64::from(added) }
            })
            .collect();
        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let mut want = vec![0.0; e];
        for (key, w) in weights.iter().enumerate() {
            want.iter_mut().zip(of(&v, keys, key, e)).for_each(|(t, v)| *t += w / sum * v);
        }
        // Values are at most 1, scores at most `scale d`, and their error is a relative one of their exponentials.
        // Weights are factors too.
        let half_ulp_of_weights = if isa.narrow.is_some() { 1.0 / 256.0 } else { 0.0 };
        let bound = HALF_ULP * (4.0 * f64::from(scale.abs()) * d as f64 + 64.0) + half_ulp_of_weights;
        for (j, (&got, want)) in got.iter().zip(want).enumerate() {
            // Where no key counts there is no number.
            let good = if want.is_nan() { got.is_nan() } else { (f64::from(got) - want).abs() <= bound };
            assert!(good, "{a:?}, row {row}, element {j}: got {got}, want {want}");
        }
    }
    for parts in 2..=4 {
        assert!(same_bits(&got, &run(&a, &operands, parts)), "{a:?} by {parts} threads");
    }
    // The last image alone is the same as among others.
    if mask.is_none() {
        let last = batch - 1;
        let one = Attention { batch: 1, isa, ..a };
        let from = [queries * d, keys * d, keys * e].map(|n| last * n * heads * 4);
        let alone = run(&one, &[&qs[from[0]..], &ks[from[1]..], &vs[from[2]..]], 1);
        assert!(same_bits(&got[last * queries * heads * e..], &alone), "{one:?}: the last image alone");
    }
}

#[test]
fn attention_of_every_kind() {
    let mut r = Random(4);
    for isa in every_isa() {
        for i in 0..24 {
            let (batch, heads, queries) = (r.pick(1, 2), r.pick(1, 3), r.pick(1, 70));
            let causal = i % 3 == 0;
            let keys = if causal { queries } else { r.pick(1, 90) };
            let (width, value_width) = (r.pick(1, 40), r.pick(1, 40));
            let scale = [0.5, 1.0, -0.25, 0.0][i % 4];
            let mask = (i % 2 == 1).then(|| [batch, heads, queries, keys].map(|n| [1, n][r.pick(0, 1)]));
            let a = Attention { isa, batch, heads, queries, keys, width, value_width, scale, causal, mask };
            check_attention(isa, &mut r, a);
        }
        // More keys than a block, wider heads than a block of terms, and more queries than a group.
        for (queries, keys, width, value_width, causal) in [
            (3, 1030, 40, 40, false),
            (300, 300, 16, 8, true),
            (33, 260, 520, 300, false),
            (70, 253, 64, 64, false),
            (290, 290, 512, 512, true),
        ] {
            let scale = 1.0 / (width as f32).sqrt();
            for mask in [None, Some([1, 1, queries, keys])] {
                let a =
                    Attention { isa, batch: 1, heads: 1, queries, keys, width, value_width, scale, causal, mask };
                check_attention(isa, &mut r, a);
            }
        }
    }
}

/// Values of what is not a product are tested by operation, in `tests/ops.rs`.
#[test]
fn parts_do_not_change_a_bit_of_the_rest() {
    let mut r = Random(5);
    for isa in every_isa() {
        use crate::graph::{Binary, RopeLayout, Unary};
        let code = [
            Code::Load,
            Code::With(Binary::Add),
            Code::Unary(Unary::Gelu),
            Code::Under(Binary::Sub),
            Code::Affine { mul: 0.5, add: 2.0 },
        ];
        let (rows, wide) = (r.pick(1, 9), r.pick(1, 2100));
        let strides = [[wide + 3, 1], [0, 1], [1, 0]];
        let strides: Vec<&[usize]> = strides.iter().map(|s| &s[..]).collect();
        let then = vec![Code::Unary(Unary::Silu)];
        let norm = |rows, channels, positions, all_channels, centred| {
            let (then, eps) = (then.clone(), 1e-5);
            Norm { isa, rows, channels, positions, all_channels, centred, eps, vectors: 2, then }
        };
        let each = Linear { isa, m: 9, n: 5, k: 21, dtype: DType::F32, bias: false, sums: Sums::Tiles };
        let around = [[2, 1], [0, 3]];
        let all: Vec<Box<dyn HostOp>> = vec![
            Box::new(Chain::new(isa, &[rows, wide], &code, &strides).unwrap()),
            Box::new(norm(8, 3, 1100, 12, true)),
            Box::new(norm(7, 77, 1, 77, false)),
            Box::new(Softmax { isa, rows, width: wide }),
            Box::new(Transpose::new(isa, &[2, 70, 40], &[2800, 1, 70]).unwrap()),
            Box::new(Transpose::new(isa, &[5, 3, 2, 7], &[1, 35, 105, 5]).unwrap()),
            Box::new(Scatter { axes: vec![(3, 2), (4, 6), (2, 24)] }),
            Box::new(Join { rows: 3, widths: vec![5, wide, 1] }),
            Box::new(Pad { planes: 3, image: [4, 5], around }),
            Box::new(Upsample { planes: 3, image: [4, 5], factor: 2 }),
            Box::new(Upsample { planes: 3, image: [4, 5], factor: 3 }),
            Box::new(Rope { sizes: [2, 3, 2, 6], rows: 3, layout: RopeLayout::Halves }),
            Box::new(Rope { sizes: [2, 3, 2, 6], rows: 6, layout: RopeLayout::Interleaved }),
            Box::new(Timesteps { count: 3, dim: 8, max_period: 100.0 }),
            Box::new(Products { each, which: vec![1, 0, 1, 1], factors: 2 }),
        ];
        for op in all {
            let operands: Vec<Vec<u8>> =
                op.operands().iter().map(|(_, [rows, row])| bytes(&r.values(rows * row))).collect();
            let operands: Vec<&[u8]> = operands.iter().map(Vec::as_slice).collect();
            let want = run(&*op, &operands, 1);
            assert!(want.iter().any(|&v| v != 0.0 && v != 1.25), "{:?}", op.operands());
            for parts in 2..=4 {
                assert!(same_bits(&want, &run(&*op, &operands, parts)), "{isa:?} {:?}", op.operands());
            }
        }
        let ids: Vec<u8> = [3i32, 0, 3, 8].iter().flat_map(|i| i.to_ne_bytes()).collect();
        for dtype in [DType::F32, DType::F16, DType::Q8_0] {
            let table = from_f32(dtype, &r.values(9 * 320), 320).unwrap();
            let op = Lookup { isa, dtype, rows: 9, width: 320, count: 4 };
            let want = to_f32(dtype, &table, 9 * 320).unwrap();
            for parts in 1..=4 {
                let got = run(&op, &[&table, &ids], parts);
                assert!([3, 0, 3, 8].iter().zip(got.chunks(320)).all(|(&i, row)| row == &want[i * 320..][..320]));
            }
        }
    }
}

#[test]
fn large_scores_do_not_overflow() {
    for isa in every_isa() {
        let a = Attention {
            isa,
            batch: 1,
            heads: 1,
            queries: 1,
            keys: 300,
            width: 1,
            value_width: 1,
            scale: 1.0,
            causal: false,
            mask: None,
        };
        // The largest score comes last: what was summed before must vanish.
        let k: Vec<f32> = (0..300).map(|i| i as f32 * 1e5 - 2e7).collect();
        let v: Vec<f32> = (0..300).map(|i| i as f32).collect();
        let want = factors(isa, &v)[299] as f32;
        // What weights lose as factors, they do not in their sum.
        let bound = if isa.narrow.is_some() { want / 256.0 } else { 0.0 };
        let got = run(&a, &[&bytes(&[1.0]), &bytes(&k), &bytes(&v)], 1);
        assert!((got[0] - want).abs() <= bound, "{isa:?}: {got:?}");
    }
}

#[test]
fn convolutions_by_way_of_tiles() {
    let mut r = Random(6);
    for isa in every_isa() {
        for (batch, channels, n, [h, w], padding) in [
            (2, 33, 35, [31, 30], 1),
            (1, 40, 32, [3, 303], 1),
            (1, 270, 37, [34, 32], 0),
            (1, 32, 33, [29, 33], 2),
        ] {
            let out = [h, w].map(|n| n + 2 * padding - 2);
            let (kernel, stride, dilation) = ([3, 3], 1, 1);
            let g = Geometry {
                batch,
                channels,
                image: [h, w],
                out,
                n,
                kernel,
                stride,
                padding: [padding; 2],
                dilation,
            };
            let (x, b, k) = (r.values(batch * channels * h * w), r.values(n), r.values(n * channels * 9));
            let stored = from_f32(DType::F16, &k, channels * 9).unwrap();
            let [xs, bs] = [&x, &b].map(|v| bytes(v));
            let transform = WinogradKernel { isa, n, channels, dtype: DType::F16 };
            let u = run(&transform, &[&stored], 1);
            assert!((2..=4).all(|parts| same_bits(&u, &run(&transform, &[&stored], parts))), "{isa:?}");
            let us = bytes(&u);
            let op = Winograd::new(isa, g, true).unwrap();
            let got = run(&op, &[&xs, &us, &bs], 1);
            for parts in 2..=4 {
                assert!(same_bits(&got, &run(&op, &[&xs, &us, &bs], parts)), "{isa:?} {g:?} by {parts} threads");
            }
            let last = batch - 1;
            let one = Winograd::new(isa, Geometry { batch: 1, ..g }, true).unwrap();
            let alone = run(&one, &[&xs[last * channels * h * w * 4..], &us, &bs], 1);
            assert!(same_bits(&got[last * n * out[0] * out[1]..], &alone), "{isa:?} {g:?}: the last image alone");
            // The direct kernel, which is checked against f64. Sums of tiles lose as much as 16 direct ones. As factors,
            // a tile's inputs, at most 4, and taps, at most 9 / 4, lose half an ulp each, and 9 products are one result.
            let direct = Conv2d::new(isa.wide(), g, DType::F16, true).unwrap();
            let want = run(&direct, &[&xs, &stored, &bs], 1);
            let factors = if isa.narrow.is_some() { 9.0 * 2.0 / 512.0 * 4.0 * 9.0 / 4.0 } else { 0.0 };
            let bound = 16.0 * HALF_ULP * (channels * 9) as f64 + factors * (channels as f64).sqrt();
            for (i, (&got, &want)) in got.iter().zip(&want).enumerate() {
                assert!((f64::from(got) - f64::from(want)).abs() <= bound, "{isa:?} {g:?} {i}: {got}, want {want}");
            }
        }
    }
}

#[test]
fn what_is_not_finite_stays() {
    for isa in every_isa() {
        for (bad, sums) in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY]
            .map(|bad| [Sums::Tiles, Sums::Lanes].map(|s| (bad, s)))
            .concat()
        {
            let (m, n, k) = (9, 40, 300);
            let mut x = vec![0.5f32; m * k];
            x[4 * k + 299] = bad;
            let w = bytes(&vec![1.0f32; n * k]);
            let got = run(&Linear { isa, m, n, k, dtype: DType::F32, bias: false, sums }, &[&bytes(&x), &w], 2);
            for (i, v) in got.iter().enumerate() {
                assert_eq!(v.is_finite(), i / n != 4, "{isa:?} {bad} {i}");
                assert!(i / n != 4 || v.is_nan() == bad.is_nan());
            }
        }
    }
}

#[test]
fn integers_of_what_is_not_finite_are_not() {
    let w = from_f32(DType::Q8_0, &vec![1.0; 5 * 320], 320).unwrap();
    for isa in every_isa() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = vec![0.5f32; 9 * 320];
            x[4 * 320 + 319] = bad;
            let op = Linear { isa, m: 9, n: 5, k: 320, dtype: DType::Q8_0, bias: false, sums: Sums::Integers };
            let got = run(&op, &[&bytes(&x), &w], 2);
            assert!(got.iter().enumerate().all(|(i, v)| v.is_nan() == (i / 5 == 4)), "{isa:?} {bad}: {got:?}");
        }
    }
}

#[test]
fn names_choose_kernels() {
    assert!(chosen("portable").unwrap().is_some_and(|isa| std::ptr::eq(isa, &portable::ISA)));
    assert!(chosen("GGML").unwrap().is_none());
    let e = chosen("sse").unwrap_err().to_string();
    assert!(e.contains("avx512bf16, avx512, avx2, portable, ggml"), "{e}");
    assert!(CpuKernels::Auto.is_available());
}
