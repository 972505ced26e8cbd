//! What the tests of this folder share: random tensors, a checkpoint in memory, devices, and the operations written
//! out naively in f64.
#![allow(dead_code, clippy::unwrap_used, clippy::panic, clippy::expect_used)]

pub(crate) mod reference;

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use sd_core::graph::{Graph, Program, Var};
use sd_core::{
    AttentionOptions, Bytes, Conv2dOptions, DType, Device, Error, Origin, Result, Scope, Shape, Tensor, TensorMeta,
    WeightSource, convert::from_f32,
};

/// A linear congruential generator (Knuth's MMIX constants).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        let mut r = Random(seed.wrapping_mul(0x9e3779b97f4a7c15) ^ 0xa5a5a5a5);
        r.uniform();
        r
    }

    pub(crate) fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// A whole number in `range`.
    pub(crate) fn pick(&mut self, range: std::ops::RangeInclusive<usize>) -> usize {
        let (lo, hi) = (*range.start(), *range.end());
        lo + (self.uniform() * (hi - lo + 1) as f64) as usize
    }

    pub(crate) fn values(&mut self, n: usize) -> Vec<f32> {
        (0..n)
            .map(|_| ((-2.0 * self.uniform().ln()).sqrt() * (std::f64::consts::TAU * self.uniform()).cos()) as f32)
            .collect()
    }

    pub(crate) fn tensor(&mut self, dims: &[usize]) -> Tensor {
        let n = dims.iter().product();
        Tensor::f32(dims, self.values(n)).unwrap()
    }
}

/// A checkpoint in memory.
#[derive(Default)]
pub(crate) struct Checkpoint {
    tensors: BTreeMap<String, (Vec<usize>, DType, Bytes)>,
}

impl Checkpoint {
    /// Adds random values stored as `dtype`, scaled to keep products near one.
    pub(crate) fn random(mut self, r: &mut Random, name: &str, dims: &[usize], dtype: DType) -> Self {
        let fan_in: usize = dims.iter().skip(1).product::<usize>().max(1);
        let mut values = r.values(dims.iter().product());
        if dims.len() > 1 {
            values.iter_mut().for_each(|v| *v /= (fan_in as f32).sqrt());
        }
        let row = dims.last().copied().unwrap_or(1);
        let bytes = from_f32(dtype, &values, row).unwrap();
        self.tensors.insert(name.into(), (dims.to_vec(), dtype, bytes.into()));
        self
    }

    pub(crate) fn stored(mut self, name: &str, dims: &[usize], dtype: DType, bytes: Bytes) -> Self {
        self.tensors.insert(name.into(), (dims.to_vec(), dtype, bytes));
        self
    }

    pub(crate) fn scope(self) -> Scope {
        Scope::root(Arc::new(self))
    }
}

impl WeightSource for Checkpoint {
    fn names(&self) -> Vec<&str> {
        self.tensors.keys().map(String::as_str).collect()
    }

    fn meta(&self, name: &str) -> Option<TensorMeta> {
        let (dims, dtype, _) = self.tensors.get(name)?;
        Some(TensorMeta { shape: Shape::new(dims).unwrap(), dtype: *dtype })
    }

    fn bytes(&self, name: &str) -> Result<Bytes> {
        self.tensors.get(name).map(|t| t.2.clone()).ok_or_else(|| Error::missing(name, "memory"))
    }

    fn origin(&self, name: &str) -> Origin {
        Origin { name: name.into(), file: "memory".into() }
    }
}

/// The processor, and a server of it on loopback, which ggml treats as a GPU.
pub(crate) fn devices() -> Vec<Arc<Device>> {
    vec![Device::cpu().unwrap(), rpc()]
}

/// The remote device that tests of one file share, served by a thread of this process.
pub(crate) fn rpc() -> Arc<Device> {
    static DEVICE: OnceLock<Arc<Device>> = OnceLock::new();
    DEVICE.get_or_init(new_rpc).clone()
}

/// A remote device that nobody else uses.
pub(crate) fn new_rpc() -> Arc<Device> {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let endpoint = format!("127.0.0.1:{port}");
    let at = endpoint.clone();
    std::thread::spawn(move || sd_core::device::serve_rpc(&at, 1, &[Device::cpu().unwrap()]));
    for _ in 0..200 {
        if std::net::TcpStream::connect(&endpoint).is_ok() {
            return sd_core::device::add_rpc_server(&endpoint).unwrap().remove(0);
        }
        std::thread::sleep(std::time::Duration::from_millis(25));
    }
    panic!("the server on {endpoint} did not start");
}

/// A small network with the parts that diffusion networks have: convolutions with skips, attention, and modulation by
/// a value that every block reads. Twelve blocks, cut after each.
pub(crate) struct Net {
    pub(crate) source: Arc<Checkpoint>,
    blocks: usize,
}

pub(crate) const NET_BLOCKS: usize = 12;

impl Net {
    pub(crate) fn new(r: &mut Random, dtype: DType) -> Net {
        Net::of(r, dtype, NET_BLOCKS)
    }

    /// The same with so many blocks.
    pub(crate) fn of(r: &mut Random, dtype: DType, blocks: usize) -> Net {
        let mut c = Checkpoint::default()
            .random(r, "in.weight", &[32, 3, 3, 3], DType::F32)
            .random(r, "in.bias", &[32], DType::F32)
            .random(r, "out.weight", &[3, 32, 3, 3], DType::F32)
            .random(r, "time.weight", &[32, 32], dtype);
        for i in 0..blocks {
            for (name, dims) in [("norm.weight", &[32][..]), ("norm.bias", &[32])] {
                c = c.random(r, &format!("blocks.{i}.{name}"), dims, DType::F32);
            }
            for name in ["q", "k", "v", "o", "mod"] {
                c = c.random(r, &format!("blocks.{i}.{name}.weight"), &[32, 32], dtype);
            }
            c = c.random(r, &format!("blocks.{i}.conv.weight"), &[32, 32, 3, 3], DType::F16);
        }
        Net { source: Arc::new(c), blocks }
    }

    pub(crate) fn program(&self, h: usize) -> Program {
        self.try_program(h).unwrap()
    }

    fn try_program(&self, h: usize) -> Result<Program> {
        let w = Scope::root(self.source.clone());
        let g = Graph::new();
        let x = g.input("x", &[2, 3, h, 6], DType::F32)?;
        let t = g.input("t", &[2], DType::F32)?;
        let t = g.linear(&w.linear_no_bias("time")?, g.timestep_embedding(t, 32, 10000.0)?)?;
        g.keep(&[t]);
        let mut x = g.conv2d(&w.conv2d("in")?, x, Conv2dOptions::padded(1))?;
        let mut skips: Vec<Var> = vec![x];
        g.cut(&w.sub("in"), &[x]);
        for i in 0..self.blocks {
            let w = w.at("blocks", i);
            let shift = g.reshape(g.linear(&w.linear_no_bias("mod")?, g.silu(t)?)?, &[2, 32, 1, 1])?;
            let y = g.group_norm(&w.norm("norm")?, x, 8, 1e-5)?;
            let y = g.conv2d(&w.conv2d_no_bias("conv")?, g.silu(g.add(y, shift)?)?, Conv2dOptions::padded(1))?;
            let tokens = g.to_tokens(y)?;
            let heads = |n: &str| g.split_heads(g.linear(&w.linear_no_bias(n)?, tokens)?, 4);
            let a = g.attention(heads("q")?, heads("k")?, heads("v")?, AttentionOptions::default())?;
            let a = g.linear(&w.linear_no_bias("o")?, g.merge_heads(a)?)?;
            x = g.add(x, g.to_image(a, h, 6)?)?;
            if i % 2 == 1 {
                x = g.add(x, skips.pop().unwrap_or(x))?;
            } else {
                skips.push(x);
            }
            let live: Vec<Var> = skips.iter().copied().chain([x]).collect();
            g.cut(&w, &live);
        }
        let y = g.conv2d(&w.conv2d_no_bias("out")?, x, Conv2dOptions::padded(1))?;
        g.finish(&[y, t, x])
    }
}

/// The largest difference over the largest wanted magnitude.
pub(crate) fn distance(got: &[f32], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let scale = want.iter().fold(1e-6f64, |m, v| m.max(v.abs()));
    let differences =
        got.iter().zip(want).map(|(&g, &w)| if f64::from(g) == w { 0.0 } else { (f64::from(g) - w).abs() });
    differences.fold(0.0, |m, d| if d.is_nan() { f64::INFINITY } else { m.max(d) }) / scale
}
