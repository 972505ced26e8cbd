//! Arithmetic speed of matrix products, convolutions and attention on one thread: each of the kernels that the machine has, beside
//! ggml's own operations in the same run. Times are of the thread's processor, medians of several runs.
//!
//! `cargo bench -p sd-core`, or `cargo bench -p sd-core -- conv` for lines with that word.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::Arc;

use sd_core::convert::from_f32;
use sd_core::graph::{Graph, Var};
use sd_core::{
    AttentionOptions, Bytes, CancelToken, Conv2dOptions, CpuKernels, DType, Device, Error, Origin, Precision,
    Result, Runner, RunnerOptions, Scope, Shape, Tensor, TensorMeta, WeightSource, processor_seconds,
};

const KERNELS: [CpuKernels; 5] =
    [CpuKernels::Ggml, CpuKernels::Portable, CpuKernels::Avx2, CpuKernels::Avx512, CpuKernels::Avx512Bf16];
/// Types of weights that few rows are multiplied by.
const STORED: [DType; 14] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::Q8_0,
    DType::Q4_0,
    DType::Q5_1,
    DType::Q2K,
    DType::Q3K,
    DType::Q4K,
    DType::Q5K,
    DType::Q6K,
    DType::IQ4_NL,
    DType::IQ4_XS,
    DType::MXFP4,
];
const RUNS: usize = 3;

#[derive(Default)]
struct Weights(BTreeMap<String, (Vec<usize>, DType, Bytes)>);

impl Weights {
    fn one(dims: &[usize], dtype: DType) -> Result<Weights> {
        let row = dims.last().copied().unwrap_or(1);
        let bytes = from_f32(dtype, &values(dims.iter().product()), row)?;
        Ok(Weights([("a.weight".to_string(), (dims.to_vec(), dtype, bytes.into()))].into()))
    }
}

impl WeightSource for Weights {
    fn names(&self) -> Vec<&str> {
        self.0.keys().map(String::as_str).collect()
    }

    fn meta(&self, name: &str) -> Option<TensorMeta> {
        let (dims, dtype, _) = self.0.get(name)?;
        Some(TensorMeta { shape: Shape::new(dims).ok()?, dtype: *dtype })
    }

    fn bytes(&self, name: &str) -> Result<Bytes> {
        self.0.get(name).map(|t| t.2.clone()).ok_or_else(|| Error::missing(name, "memory"))
    }

    fn origin(&self, name: &str) -> Origin {
        Origin { name: name.into(), file: "memory".into() }
    }
}

fn values(n: usize) -> Vec<f32> {
    (0..n).map(|i| ((i as f32 * 12.9898).sin() * 437.58).fract()).collect()
}

/// Prints a line for the graph that `build` makes of an input and weight `a`.
fn measure(
    what: &str,
    flop: f64,
    dims: &[usize],
    weights: impl FnOnce() -> Result<Weights>,
    build: impl Fn(&Graph, &Scope, Var) -> Result<Var>,
) -> Result<()> {
    let word = std::env::args().skip(1).find(|a| !a.starts_with('-'));
    if word.is_some_and(|w| !what.contains(&w)) {
        return Ok(());
    }
    let source = Arc::new(weights()?);
    let g = Graph::new();
    let x = g.input("x", dims, DType::F32)?;
    let y = build(&g, &Scope::root(source.clone()), x)?;
    // One element of the result, so that copying it out takes no time.
    let one = g.slice(g.reshape(y, &[g.shape(y).elements()])?, 0, 0, 1)?;
    let program = g.finish(&[one])?;
    let x = Tensor::f32(dims, values(dims.iter().product()))?;
    let mut line = format!("{what:<42}");
    for kernels in KERNELS {
        if !kernels.is_available() {
            line += &format!("{:>10}", "-");
            continue;
        }
        let options = RunnerOptions { threads: 1, precision: Precision::Bf16, ..RunnerOptions::default() };
        let mut runner = Runner::new(Device::cpu()?, source.clone(), options)?;
        runner.set_kernels(kernels)?;
        let mut times = Vec::new();
        for _ in 0..=RUNS {
            let start = processor_seconds();
            runner.run(&program, &[("x", &x)], &CancelToken::new())?;
            times.push(processor_seconds() - start);
        }
        // The first run lowers and loads.
        times.remove(0);
        times.sort_by(f64::total_cmp);
        line += &format!("{:>10.1}", flop / times[RUNS / 2] / 1e9);
    }
    print(&line)
}

fn print(line: &str) -> Result<()> {
    writeln!(std::io::stdout(), "{line}").map_err(|e| Error::io("standard output", e))
}

fn linear(m: usize, n: usize, k: usize, dtype: DType) -> Result<()> {
    let flop = 2.0 * m as f64 * n as f64 * k as f64;
    let what = format!("linear {m} x {k} by {n}, {dtype}");
    measure(
        &what,
        flop,
        &[1, m, k],
        || Weights::one(&[n, k], dtype),
        |g, w, x| g.linear(&w.linear_no_bias("a")?, x),
    )
}

fn conv(channels: usize, n: usize, size: usize, kernel: usize, stride: usize, dtype: DType) -> Result<()> {
    let out = size / stride;
    let flop = 2.0 * (channels * kernel * kernel * n * out * out) as f64;
    let weights = || Weights::one(&[n, channels, kernel, kernel], dtype);
    let what = format!("conv {kernel}x{kernel}/{stride} {channels} to {n} at {size}², {dtype}");
    measure(&what, flop, &[1, channels, size, size], weights, |g, w, x| {
        g.conv2d(&w.conv2d_no_bias("a")?, x, Conv2dOptions { stride, padding: kernel / 2, dilation: 1 })
    })
}

/// Self-attention of `tokens`, or of `tokens` to `keys` others, whose queries, keys and values all come from one input.
fn attention(tokens: usize, keys: usize, heads: usize, width: usize) -> Result<()> {
    let flop = 4.0 * (tokens * keys * heads * width) as f64;
    let what = format!("attention {tokens} to {keys}, {heads} x {width}");
    measure(
        &what,
        flop,
        &[1, tokens, heads, width],
        || Ok(Weights::default()),
        |g, _, x| {
            let kv = g.slice(x, 1, 0, keys)?;
            g.attention(x, kv, kv, AttentionOptions::default())
        },
    )
}

fn main() -> Result<()> {
    let names = KERNELS.map(|k| format!("{:>10}", format!("{k:?}").to_lowercase()));
    print(&format!("{:<42}{}   GFLOP/s", "", names.concat()))?;
    for dtype in
        [DType::F32, DType::F16, DType::BF16, DType::Q8_0, DType::Q4_0, DType::Q5_1, DType::Q4K, DType::Q6K]
    {
        linear(1024, 1280, 1280, dtype)?;
    }
    for dtype in [DType::F32, DType::F16] {
        linear(4096, 320, 320, dtype)?;
        linear(77, 768, 768, dtype)?;
    }
    for dtype in STORED {
        for rows in [1, 4, 16, 77] {
            linear(rows, 4096, 4096, dtype)?;
        }
    }
    for dtype in [DType::F32, DType::F16] {
        conv(320, 320, 64, 3, 1, dtype)?;
        conv(1280, 1280, 16, 3, 1, dtype)?;
        conv(1280, 1280, 8, 3, 1, dtype)?;
        conv(320, 320, 64, 3, 2, dtype)?;
        conv(640, 640, 32, 1, 1, dtype)?;
        conv(128, 128, 256, 3, 1, dtype)?;
        conv(128, 3, 256, 3, 1, dtype)?;
    }
    attention(4096, 4096, 2, 40)?;
    attention(1024, 1024, 4, 64)?;
    attention(1024, 1024, 4, 80)?;
    attention(2048, 2048, 2, 128)?;
    attention(256, 256, 8, 160)?;
    attention(4096, 4096, 1, 512)?;
    attention(4096, 77, 8, 40)?;
    attention(77, 77, 12, 64)?;
    Ok(())
}
