//! Every operation as its definition says, in f64, one element at a time.

use std::collections::HashMap;

use sd_core::convert::to_f32;
use sd_core::graph::{Binary, Norm, Op, Program, RopeLayout, Unary, Var};
use sd_core::{Data, Tensor, WeightSource};

/// Row-major values.
#[derive(Clone)]
pub(crate) struct Values {
    pub(crate) dims: Vec<usize>,
    pub(crate) data: Vec<f64>,
}

impl Values {
    fn new(dims: &[usize], f: impl FnMut(&[usize]) -> f64) -> Values {
        let mut f = f;
        let mut at = vec![0; dims.len()];
        let n: usize = dims.iter().product();
        let mut data = Vec::with_capacity(n);
        for _ in 0..n {
            data.push(f(&at));
            for i in (0..dims.len()).rev() {
                at[i] += 1;
                if at[i] < dims[i] {
                    break;
                }
                at[i] = 0;
            }
        }
        Values { dims: dims.to_vec(), data }
    }

    /// The element at `at`, whose leading axes may be more than there are here, and repeat where they are 1 here.
    fn get(&self, at: &[usize]) -> f64 {
        let skip = at.len() - self.dims.len();
        let mut i = 0;
        for (&d, &a) in self.dims.iter().zip(&at[skip..]) {
            i = i * d + if d == 1 { 0 } else { a };
        }
        self.data[i]
    }
}

/// The values of all outputs of `program`.
pub(crate) fn evaluate(program: &Program, source: &dyn WeightSource, inputs: &[(&str, &Tensor)]) -> Vec<Values> {
    let mut all: HashMap<Var, Values> = HashMap::new();
    for (v, node) in program.iter() {
        let dims = node.shape.dims();
        let x: Vec<&Values> = node.inputs.iter().map(|i| &all[i]).collect();
        let y = match &node.op {
            Op::Input(name) => from_tensor(inputs.iter().find(|(n, _)| *n == &**name).unwrap().1),
            Op::Constant(t) => from_tensor(t),
            Op::Weight(w) => {
                let data = to_f32(w.dtype(), &source.bytes(w.name()).unwrap(), w.shape().elements()).unwrap();
                Values { dims: dims.to_vec(), data: data.into_iter().map(f64::from).collect() }
            }
            op => compute(op, &x, dims),
        };
        assert_eq!(y.dims, dims, "{}", program.describe(v));
        all.insert(v, y);
    }
    program.outputs().iter().map(|o| all[o].clone()).collect()
}

fn from_tensor(t: &Tensor) -> Values {
    let data = match t.data() {
        Data::F32(v) => v.iter().map(|&x| f64::from(x)).collect(),
        Data::I32(v) => v.iter().map(|&x| f64::from(x)).collect(),
    };
    Values { dims: t.dims().to_vec(), data }
}

/// Error function by its Taylor series where that converges fast, and by the continued fraction of its complement
/// elsewhere (Abramowitz and Stegun 7.1.5, 7.1.14).
fn erf(x: f64) -> f64 {
    let a = x.abs();
    let y = if a < 2.5 {
        let (mut term, mut sum) = (a, a);
        for n in 1..80 {
            term *= -a * a / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        sum * 2.0 / std::f64::consts::PI.sqrt()
    } else {
        let mut f = 0.0;
        for n in (1..60).rev() {
            f = f64::from(n) / 2.0 / (a + f);
        }
        1.0 - (-a * a).exp() / std::f64::consts::PI.sqrt() / (a + f)
    };
    y * x.signum()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn unary(f: Unary, x: f64) -> f64 {
    match f {
        Unary::Silu => x * sigmoid(x),
        Unary::Gelu => x * 0.5 * (1.0 + erf(x / 2f64.sqrt())),
        Unary::GeluTanh => {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
        }
        Unary::QuickGelu => x * sigmoid(1.702 * x),
        Unary::Sigmoid => sigmoid(x),
        Unary::Tanh => x.tanh(),
        Unary::Relu => x.max(0.0),
        Unary::Exp => x.exp(),
    }
}

fn softmax(row: &[f64]) -> Vec<f64> {
    let top = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let e: Vec<f64> = row.iter().map(|v| (v - top).exp()).collect();
    let sum: f64 = e.iter().sum();
    e.into_iter().map(|v| v / sum).collect()
}

fn compute(op: &Op, x: &[&Values], dims: &[usize]) -> Values {
    let a = x[0];
    match op {
        Op::Linear { .. } => {
            let k = *a.dims.last().unwrap();
            Values::new(dims, |at| {
                let (lead, n) = (&at[..at.len() - 1], at[at.len() - 1]);
                let row: usize = lead.iter().zip(&dims[..lead.len()]).fold(0, |r, (&i, &d)| r * d + i);
                let dot: f64 = (0..k).map(|j| a.data[row * k + j] * x[1].data[n * k + j]).sum();
                dot + x.get(2).map_or(0.0, |b| b.data[n])
            })
        }
        Op::Conv2d { stride, padding, dilation, .. } => {
            let [_, c, kh, kw] = x[1].dims[..] else { panic!() };
            let (h, w) = (a.dims[2], a.dims[3]);
            Values::new(dims, |at| {
                let mut sum = x.get(2).map_or(0.0, |b| b.data[at[1]]);
                for ci in 0..c {
                    let (plane, kernel) = ((at[0] * c + ci) * h * w, (at[1] * c + ci) * kh * kw);
                    for i in 0..kh {
                        for j in 0..kw {
                            let (r, s) = (at[2] * stride + i * dilation, at[3] * stride + j * dilation);
                            if r >= *padding && r - padding < h && s >= *padding && s - padding < w {
                                let pixel = a.data[plane + (r - padding) * w + s - padding];
                                sum += pixel * x[1].data[kernel + i * kw + j];
                            }
                        }
                    }
                }
                sum
            })
        }
        Op::Embedding => {
            let c = a.dims[1];
            Values::new(dims, |at| a.data[x[1].get(&at[..at.len() - 1]) as usize * c + at[at.len() - 1]])
        }
        Op::Binary(f) => Values::new(dims, |at| {
            let (p, q) = (a.get(at), x[1].get(at));
            match f {
                Binary::Add => p + q,
                Binary::Sub => p - q,
                Binary::Mul => p * q,
                Binary::Div => p / q,
            }
        }),
        Op::Affine { mul, add } => Values::new(dims, |at| a.get(at) * f64::from(*mul) + f64::from(*add)),
        Op::Unary(f) => Values::new(dims, |at| unary(*f, a.get(at))),
        Op::Norm { kind, eps } => norm(x, dims, *kind, f64::from(*eps)),
        Op::Softmax => {
            let data = a.data.chunks(*dims.last().unwrap()).flat_map(softmax).collect();
            Values { dims: dims.to_vec(), data }
        }
        Op::MatMulT => {
            let k = *a.dims.last().unwrap();
            let r = dims.len();
            Values::new(dims, |at| {
                (0..k)
                    .map(|j| {
                        let (mut p, mut q) = (at.to_vec(), at.to_vec());
                        (p[r - 2], p[r - 1]) = (at[r - 2], j);
                        (q[r - 2], q[r - 1]) = (at[r - 1], j);
                        a.get(&p) * x[1].get(&q)
                    })
                    .sum()
            })
        }
        Op::Attention { scale, causal } => {
            let (d, tk) = (a.dims[3], x[1].dims[1]);
            let mut rows: HashMap<(usize, usize, usize), Vec<f64>> = HashMap::new();
            Values::new(dims, |at| {
                let (b, i, h) = (at[0], at[1], at[2]);
                let row = rows.entry((b, i, h)).or_insert_with(|| {
                    let scores: Vec<f64> = (0..tk)
                        .map(|j| {
                            let dot: f64 = (0..d).map(|e| a.get(&[b, i, h, e]) * x[1].get(&[b, j, h, e])).sum();
                            let mask = x.get(3).map_or(0.0, |m| m.get(&[b, h, i, j]));
                            if *causal && j > i { f64::NEG_INFINITY } else { dot * f64::from(*scale) + mask }
                        })
                        .collect();
                    softmax(&scores)
                });
                row.iter().enumerate().map(|(j, p)| p * x[2].get(&[b, j, h, at[3]])).sum()
            })
        }
        Op::Rope { layout } => {
            let half = dims[3] / 2;
            Values::new(dims, |at| {
                let (pair, second) = match layout {
                    RopeLayout::Interleaved => (at[3] / 2, at[3] % 2 == 1),
                    RopeLayout::Halves => (at[3] % half, at[3] >= half),
                };
                let element = |of: usize| {
                    let i = match layout {
                        RopeLayout::Interleaved => 2 * pair + of,
                        RopeLayout::Halves => pair + of * half,
                    };
                    a.get(&[at[0], at[1], at[2], i])
                };
                let (cos, sin) = (x[1].get(&[at[0], at[1], pair]), x[2].get(&[at[0], at[1], pair]));
                if second { element(0) * sin + element(1) * cos } else { element(0) * cos - element(1) * sin }
            })
        }
        Op::Reshape => Values { dims: dims.to_vec(), data: a.data.clone() },
        Op::Permute { axes } => Values::new(dims, |at| {
            let mut from = vec![0; at.len()];
            at.iter().enumerate().for_each(|(i, &p)| from[usize::from(axes[i])] = p);
            a.get(&from)
        }),
        Op::Concat { axis } => Values::new(dims, |at| {
            let mut at = at.to_vec();
            for p in x {
                if at[*axis] < p.dims[*axis] {
                    return p.get(&at);
                }
                at[*axis] -= p.dims[*axis];
            }
            panic!("outside")
        }),
        Op::Slice { axis, start } => Values::new(dims, |at| {
            let mut at = at.to_vec();
            at[*axis] += start;
            a.get(&at)
        }),
        Op::Pad2d { rows, columns } => Values::new(dims, |at| {
            let r = at.len();
            let (i, j) = (at[r - 2].wrapping_sub(rows[0]), at[r - 1].wrapping_sub(columns[0]));
            if i >= a.dims[r - 2] || j >= a.dims[r - 1] {
                return 0.0;
            }
            let mut at = at.to_vec();
            (at[r - 2], at[r - 1]) = (i, j);
            a.get(&at)
        }),
        Op::UpsampleNearest { factor } => {
            Values::new(dims, |at| a.get(&[at[0], at[1], at[2] / factor, at[3] / factor]))
        }
        Op::TimestepEmbedding { dim, max_period } => Values::new(dims, |at| {
            let half = dim / 2;
            let f = f64::from(*max_period).powf(-((at[1] % half) as f64) / half as f64);
            let angle = a.data[at[0]] * f;
            if at[1] < half { angle.cos() } else { angle.sin() }
        }),
        other => panic!("no reference for {}", other.name()),
    }
}

fn norm(x: &[&Values], dims: &[usize], kind: Norm, eps: f64) -> Values {
    let a = x[0];
    let (run, channel_size) = match kind {
        Norm::Layer | Norm::Rms => (*dims.last().unwrap(), 1),
        Norm::Group { groups } => {
            let positions: usize = dims[2..].iter().product();
            (dims[1] / groups * positions, positions)
        }
    };
    let channels = if channel_size == 1 && !matches!(kind, Norm::Group { .. }) { run } else { dims[1] };
    let mut data = Vec::with_capacity(a.data.len());
    for row in a.data.chunks(run) {
        let n = run as f64;
        let mean = if kind == Norm::Rms { 0.0 } else { row.iter().sum::<f64>() / n };
        let variance = row.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
        data.extend(row.iter().map(|v| (v - mean) / (variance + eps).sqrt()));
    }
    for (i, v) in data.iter_mut().enumerate() {
        let c = i / channel_size % channels;
        *v = *v * x.get(1).map_or(1.0, |w| w.data[c]) + x.get(2).map_or(0.0, |b| b.data[c]);
    }
    Values { dims: dims.to_vec(), data }
}
