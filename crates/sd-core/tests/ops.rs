//! Every operation, on every device, against its definition in f64.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::sync::Arc;

use common::{Checkpoint, Random, devices, distance, reference};
use sd_core::device::DeviceKind;
use sd_core::graph::{Graph, Var};
use sd_core::scope::Role;
use sd_core::{
    AttentionOptions, CancelToken, Conv2dOptions, CpuKernels, DType, Device, RopeLayout, Runner, RunnerOptions,
    Scope, Tensor, scope,
};

/// The largest error over the largest magnitude, by the type that weights are stored as. With f32 weights all is
/// f32, summed in any order. With 16 bits the other factor is rounded to the same type, with quantised ones to 8 bits in blocks: half a
/// unit in the last place of each factor, times two for the worst of many elements.
const TOLERANCE: &[(DType, f64)] = &[
    (DType::F32, 2e-6),
    (DType::F16, 2e-3),
    (DType::BF16, 1.6e-2),
    (DType::F8E4M3, 2e-3),
    (DType::F64, 2e-6),
    (DType::Q8_0, 1.6e-2),
    (DType::Q4_0, 1.6e-2),
    (DType::Q4_1, 1.6e-2),
    (DType::Q5_0, 1.6e-2),
    (DType::Q5_1, 1.6e-2),
    (DType::Q2K, 1.6e-2),
    (DType::Q3K, 1.6e-2),
    (DType::Q4K, 1.6e-2),
    (DType::Q5K, 1.6e-2),
    (DType::Q6K, 1.6e-2),
    (DType::IQ4_NL, 1.6e-2),
    (DType::IQ4_XS, 1.6e-2),
    (DType::MXFP4, 1.6e-2),
    (DType::NVFP4, 1.6e-2),
    (DType::TQ2_0, 1.6e-2),
];

const KERNELS: [CpuKernels; 6] = [
    CpuKernels::Auto,
    CpuKernels::Avx512Bf16,
    CpuKernels::Avx512,
    CpuKernels::Avx2,
    CpuKernels::Portable,
    CpuKernels::Ggml,
];

/// Runs the graph that `build` makes on every device, and compares its outputs with the reference.
fn check(
    what: &str,
    dtype: DType,
    weights: Checkpoint,
    inputs: &[(&str, Tensor)],
    build: impl Fn(&Graph, &Scope) -> Vec<Var>,
) {
    let tolerance = |dtype: DType| TOLERANCE.iter().find(|t| t.0 == dtype).unwrap().1;
    let source = Arc::new(weights);
    let scope = Scope::root(source.clone());
    let g = Graph::new();
    let outputs = build(&g, &scope);
    let program = g.finish(&outputs).unwrap();
    let inputs: Vec<(&str, &Tensor)> = inputs.iter().map(|(n, t)| (*n, t)).collect();
    let want = reference::evaluate(&program, &*source, &inputs);
    for (device, &kernels) in devices().iter().flat_map(|d| KERNELS.iter().map(move |k| (d, k))) {
        if !kernels.is_available() || (device.kind() != DeviceKind::Cpu && kernels != CpuKernels::Auto) {
            continue;
        }
        let mut runner = Runner::new(device.clone(), source.clone(), options()).unwrap();
        runner.set_kernels(kernels).unwrap();
        let got = runner.run(&program, &inputs, &CancelToken::new()).unwrap();
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            assert_eq!(got.dims(), want.dims, "{what} on {device} with {kernels:?}");
            let d = distance(got.values(), &want.data);
            // Where products are of bf16 by default, weights of 16 bits and less are.
            let narrow = matches!(kernels, CpuKernels::Auto | CpuKernels::Avx512Bf16);
            let bf16 =
                if narrow && tolerance(dtype) > tolerance(DType::F32) { tolerance(DType::BF16) } else { 0.0 };
            let tolerance = tolerance(dtype).max(bf16);
            assert!(
                d <= tolerance,
                "{what}, output {i} on {device} with {kernels:?}: {d:.2e} over {tolerance:.2e}"
            );
        }
    }
}

/// One thread: tests run side by side, and ggml's threads wait for each other actively.
fn options() -> RunnerOptions {
    RunnerOptions { threads: 1, ..RunnerOptions::default() }
}

/// As [`check`], for an operation of one f32 input.
fn check_x(what: &str, dims: &[usize], seed: u64, build: impl Fn(&Graph, Var) -> Var) {
    let x = Random::new(seed).tensor(dims);
    check(&format!("{what} of {dims:?}"), DType::F32, Checkpoint::default(), &[("x", x)], |g, _| {
        let x = g.input("x", dims, DType::F32).unwrap();
        vec![build(g, x)]
    });
}

#[test]
fn linear_in_every_type() {
    let mut r = Random::new(1);
    for &(dtype, _) in TOLERANCE {
        for lead in [vec![], vec![7], vec![2, 3], vec![2, 2, 3, 5]] {
            let (k, n) = match dtype.block() {
                1 => (r.pick(1..=70), r.pick(1..=40)),
                b => (b * r.pick(1..=3), r.pick(1..=40)),
            };
            let w = Checkpoint::default().random(&mut r, "a.weight", &[n, k], dtype).random(
                &mut r,
                "a.bias",
                &[n],
                DType::F32,
            );
            let mut dims = lead.clone();
            dims.push(k);
            let x = r.tensor(&dims);
            check(&format!("linear {dtype} [{n}, {k}] of {dims:?}"), dtype, w, &[("x", x)], |g, w| {
                let x = g.input("x", &dims, DType::F32).unwrap();
                let l = w.linear("a").unwrap();
                vec![g.linear(&l, x).unwrap(), g.linear(&l.wide(), x).unwrap()]
            });
        }
    }
}

#[test]
fn wide_layers_hold_what_f16_does_not() {
    let mut r = Random::new(2);
    let w = Checkpoint::default().random(&mut r, "a.weight", &[5, 8], DType::F16).random(
        &mut r,
        "c.weight",
        &[5, 3, 3, 3],
        DType::F16,
    );
    let x = Tensor::f32(&[2, 8], r.values(16).iter().map(|v| v * 1e6).collect()).unwrap();
    let y = Tensor::f32(&[1, 3, 4, 4], r.values(48).iter().map(|v| v * 1e6).collect()).unwrap();
    check("wide", DType::F32, w, &[("x", x), ("y", y)], |g, w| {
        let x = g.input("x", &[2, 8], DType::F32).unwrap();
        let y = g.input("y", &[1, 3, 4, 4], DType::F32).unwrap();
        let (l, c) = (w.linear_no_bias("a").unwrap().wide(), w.conv2d_no_bias("c").unwrap().wide());
        vec![g.linear(&l, x).unwrap(), g.conv2d(&c, y, Conv2dOptions::padded(1)).unwrap()]
    });
}

#[test]
fn convolutions() {
    let mut r = Random::new(3);
    for dtype in [DType::F32, DType::F16] {
        for [b, c, n, h, w, kh, kw, stride, padding, dilation] in [
            [1, 3, 5, 7, 9, 3, 3, 1, 1, 1],
            [2, 4, 3, 8, 5, 3, 3, 2, 1, 1],
            [1, 2, 6, 5, 6, 1, 1, 1, 0, 1],
            [3, 5, 4, 11, 10, 3, 2, 2, 0, 2],
            [1, 1, 1, 4, 4, 4, 4, 1, 0, 1],
            [2, 3, 2, 3, 3, 5, 5, 1, 2, 1],
            [1, 2, 2, 1, 1, 1, 1, 1, 3, 1],
        ] {
            let weights = Checkpoint::default().random(&mut r, "a.weight", &[n, c, kh, kw], dtype).random(
                &mut r,
                "a.bias",
                &[n],
                DType::F32,
            );
            let dims = [b, c, h, w];
            let x = r.tensor(&dims);
            let what = format!("conv {dtype} [{n}, {c}, {kh}, {kw}] of {dims:?} {stride} {padding} {dilation}");
            check(&what, dtype, weights, &[("x", x)], |g, w| {
                let x = g.input("x", &dims, DType::F32).unwrap();
                let options = Conv2dOptions { stride, padding, dilation };
                vec![g.conv2d(&w.conv2d("a").unwrap(), x, options).unwrap()]
            });
        }
    }
}

#[test]
fn embeddings() {
    let mut r = Random::new(4);
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::Q8_0] {
        let weights = Checkpoint::default().random(&mut r, "t", &[9, 64], dtype);
        let ids = Tensor::i32(&[2, 3], vec![0, 8, 3, 3, 1, 7]).unwrap();
        check(&format!("embedding {dtype}"), DType::F32, weights, &[("ids", ids)], |g, w| {
            let ids = g.input("ids", &[2, 3], DType::I32).unwrap();
            vec![g.embedding(&w.weight("t", Role::Table).unwrap(), ids).unwrap()]
        });
    }
}

#[test]
fn elementwise_functions() {
    let dims = [3, 17, 5];
    check_x("silu", &dims, 1, |g, x| g.silu(x).unwrap());
    check_x("gelu", &dims, 2, |g, x| g.gelu(x).unwrap());
    check_x("gelu_tanh", &dims, 3, |g, x| g.gelu_tanh(x).unwrap());
    check_x("quick_gelu", &dims, 4, |g, x| g.quick_gelu(x).unwrap());
    check_x("sigmoid", &dims, 5, |g, x| g.sigmoid(x).unwrap());
    check_x("tanh", &dims, 6, |g, x| g.tanh(x).unwrap());
    check_x("relu", &dims, 7, |g, x| g.relu(x).unwrap());
    check_x("exp", &dims, 8, |g, x| g.exp(x).unwrap());
    check_x("affine", &dims, 9, |g, x| g.affine(x, -1.5, 0.25).unwrap());
    check_x("softmax", &dims, 10, |g, x| g.softmax(x).unwrap());
    check_x("silu", &[2, 3, 2, 3, 5], 11, |g, x| g.silu(x).unwrap());
    // Large magnitudes must saturate, not turn into NaN.
    check_x("gelu_tanh of large values", &dims, 12, |g, x| {
        let x = g.scale(x, 1e4).unwrap();
        g.gelu_tanh(x).unwrap()
    });
    check_x("quick_gelu of large values", &dims, 13, |g, x| {
        let x = g.scale(x, 1e4).unwrap();
        g.quick_gelu(x).unwrap()
    });
}

#[test]
fn broadcasting() {
    let mut r = Random::new(5);
    let pairs: &[(&[usize], &[usize])] = &[
        (&[2, 3, 4], &[2, 3, 4]),
        (&[2, 3, 4], &[4]),
        (&[4], &[2, 3, 4]),
        (&[2, 3, 4], &[3, 1]),
        (&[2, 1, 4], &[1, 3, 1]),
        (&[2, 3, 4, 5], &[1, 3, 1, 1]),
        (&[2, 3, 4, 5], &[2, 1, 4, 1]),
        (&[2, 1, 4, 1], &[1, 3, 1, 5]),
        (&[2, 3, 2, 3, 2], &[2, 1, 2, 1, 2]),
        (&[2, 3, 2, 3, 2], &[3, 2, 1, 2]),
        (&[1, 3, 1, 3, 1], &[2, 1, 2, 1, 2]),
        (&[1], &[1, 1]),
        (&[], &[3]),
    ];
    for (a, b) in pairs {
        let inputs = [("a", r.tensor(a)), ("b", r.tensor(b))];
        check(&format!("broadcast {a:?} {b:?}"), DType::F32, Checkpoint::default(), &inputs, |g, _| {
            let a = g.input("a", a, DType::F32).unwrap();
            let b = g.input("b", b, DType::F32).unwrap();
            let positive = g.exp(b).unwrap();
            vec![
                g.add(a, b).unwrap(),
                g.sub(a, b).unwrap(),
                g.mul(a, b).unwrap(),
                g.div(a, positive).unwrap(),
                g.scale_1p(a, b).unwrap(),
            ]
        });
    }
}

#[test]
fn norms() {
    let mut r = Random::new(6);
    for dims in [vec![5], vec![3, 7], vec![2, 3, 4, 33], vec![2, 2, 2, 3, 8]] {
        let c = *dims.last().unwrap();
        let w = Checkpoint::default()
            .random(&mut r, "a.weight", &[c], DType::F16)
            .random(&mut r, "a.bias", &[c], DType::BF16)
            .random(&mut r, "b.weight", &[c], DType::F32);
        let x = r.tensor(&dims);
        check(&format!("norms of {dims:?}"), DType::F32, w, &[("x", x)], |g, w| {
            let x = g.input("x", &dims, DType::F32).unwrap();
            let (a, b) = (w.norm("a").unwrap(), w.norm_no_bias("b", "weight").unwrap());
            let plain = scope::Norm::plain("c");
            vec![
                g.layer_norm(&a, x, 1e-5).unwrap(),
                g.rms_norm(&b, x, 1e-6).unwrap(),
                g.layer_norm(&plain, x, 1e-5).unwrap(),
                g.rms_norm(&plain, x, 0.5).unwrap(),
            ]
        });
    }
    for [b, c, h, wd, groups] in [[1, 6, 3, 5, 3], [2, 8, 4, 4, 8], [3, 4, 1, 7, 1]] {
        let w = Checkpoint::default().random(&mut r, "a.weight", &[c], DType::F32).random(
            &mut r,
            "a.bias",
            &[c],
            DType::F32,
        );
        let dims = [b, c, h, wd];
        let x = r.tensor(&dims);
        check(&format!("group norm of {dims:?}"), DType::F32, w, &[("x", x)], |g, w| {
            let x = g.input("x", &dims, DType::F32).unwrap();
            vec![g.group_norm(&w.norm("a").unwrap(), x, groups, 1e-5).unwrap()]
        });
    }
}

#[test]
fn products() {
    let mut r = Random::new(7);
    let pairs: &[(&[usize], &[usize])] = &[
        (&[5, 7], &[3, 7]),
        (&[2, 5, 7], &[2, 3, 7]),
        (&[2, 5, 7], &[1, 3, 7]),
        (&[2, 3, 5, 7], &[2, 1, 3, 7]),
        (&[2, 3, 5, 7], &[1, 3, 3, 7]),
        (&[2, 2, 3, 5, 7], &[2, 1, 3, 4, 7]),
        (&[2, 2, 3, 1, 7], &[2, 2, 3, 4, 7]),
    ];
    for (a, b) in pairs {
        let inputs = [("a", r.tensor(a)), ("b", r.tensor(b))];
        check(&format!("product {a:?} {b:?}"), DType::F32, Checkpoint::default(), &inputs, |g, _| {
            let a = g.input("a", a, DType::F32).unwrap();
            let b = g.input("b", b, DType::F32).unwrap();
            vec![g.matmul_t(a, b).unwrap()]
        });
    }
}

#[test]
fn attention_with_masks() {
    let mut r = Random::new(8);
    for [b, tq, tk, h, d, dv] in
        [[1, 5, 5, 1, 8, 8], [2, 7, 3, 2, 5, 9], [2, 6, 6, 3, 16, 4], [2, 131, 77, 2, 40, 23]]
    {
        let (q, k, v) = ([b, tq, h, d], [b, tk, h, d], [b, tk, h, dv]);
        let masks: &[&[usize]] = &[&[], &[tq, tk], &[b, 1, 1, tk], &[h, tq, 1], &[1, h, tq, tk], &[b, h, tq, tk]];
        for mask in masks {
            let inputs = [("q", r.tensor(&q)), ("k", r.tensor(&k)), ("v", r.tensor(&v)), ("m", r.tensor(mask))];
            check(
                &format!("attention of {q:?} {k:?} {mask:?}"),
                DType::F32,
                Checkpoint::default(),
                &inputs,
                |g, _| {
                    let x = |n: &str, d: &[usize]| g.input(n, d, DType::F32).unwrap();
                    let (q, k, v) = (x("q", &q), x("k", &k), x("v", &v));
                    let mask = (!mask.is_empty()).then(|| x("m", mask));
                    let mut out =
                        vec![g.attention(q, k, v, AttentionOptions { mask, ..Default::default() }).unwrap()];
                    if tq == tk {
                        for scale in [Some(0.3), Some(-0.5), None] {
                            let options = AttentionOptions { mask, causal: true, scale };
                            out.push(g.attention(q, k, v, options).unwrap());
                        }
                    }
                    out
                },
            );
        }
    }
}

#[test]
fn rotary_positions() {
    let mut r = Random::new(9);
    for [b, t, h, d] in [[1, 5, 1, 2], [2, 7, 3, 10], [3, 1, 2, 6], [2, 9, 2, 128]] {
        for table in [vec![t, d / 2], vec![b, t, d / 2]] {
            let dims = [b, t, h, d];
            let angles = r.values(table.iter().product());
            let of = |f: fn(f32) -> f32| Tensor::f32(&table, angles.iter().map(|v| f(3.0 * v)).collect()).unwrap();
            let inputs = [("x", r.tensor(&dims)), ("cos", of(f32::cos)), ("sin", of(f32::sin))];
            check(&format!("rope of {dims:?} by {table:?}"), DType::F32, Checkpoint::default(), &inputs, |g, _| {
                let x = g.input("x", &dims, DType::F32).unwrap();
                let [cos, sin] = ["cos", "sin"].map(|n| g.input(n, &table, DType::F32).unwrap());
                vec![
                    g.rope(x, cos, sin, RopeLayout::Interleaved).unwrap(),
                    g.rope(x, cos, sin, RopeLayout::Halves).unwrap(),
                ]
            });
        }
    }
}

#[test]
fn moves() {
    let shapes: &[&[usize]] = &[&[7], &[3, 5], &[2, 3, 4], &[2, 3, 4, 5], &[2, 3, 2, 4, 3], &[1, 3, 1, 4, 1]];
    for (seed, dims) in shapes.iter().enumerate() {
        let rank = dims.len();
        // All orders of the axes.
        let mut orders = vec![vec![]];
        for _ in 0..rank {
            orders = orders
                .into_iter()
                .flat_map(|o: Vec<usize>| {
                    (0..rank).filter(|a| !o.contains(a)).map(|a| [o.clone(), vec![a]].concat()).collect::<Vec<_>>()
                })
                .collect();
        }
        let x = Random::new(seed as u64).tensor(dims);
        check(&format!("moves of {dims:?}"), DType::F32, Checkpoint::default(), &[("x", x)], |g, _| {
            let x = g.input("x", dims, DType::F32).unwrap();
            let mut out: Vec<Var> = orders.iter().map(|o| g.permute(x, o).unwrap()).collect();
            let flat = g.reshape(x, &[dims.iter().product()]).unwrap();
            out.push(flat);
            for axis in 0..rank {
                let n = dims[axis];
                out.push(g.slice(x, axis, n / 2, n - n / 2).unwrap());
                out.push(g.slice(x, axis, 0, 1).unwrap());
                let part = g.slice(x, axis, n - 1, 1).unwrap();
                out.push(g.concat(&[x, part], axis).unwrap());
                out.push(g.concat(&[part, x, part, x], axis).unwrap());
            }
            if rank >= 2 {
                out.push(g.pad2d(x, [1, 2], [0, 3]).unwrap());
            }
            if rank == 4 {
                out.push(g.upsample_nearest(x, 2).unwrap());
                out.push(g.upsample_nearest(x, 3).unwrap());
            }
            // A value that is an output and also overwritten in place later.
            let once = g.scale(x, 2.0).unwrap();
            out.extend([once, g.silu(once).unwrap(), x]);
            out
        });
    }
}

#[test]
fn timesteps() {
    // Angles reach 1000 and are f32, so cosines are known to 1000 * 2^-24.
    let t = Tensor::f32(&[4], vec![0.0, 1.0, 501.5, 999.0]).unwrap();
    let program = {
        let g = Graph::new();
        let x = g.input("t", &[4], DType::F32).unwrap();
        g.finish(&[g.timestep_embedding(x, 34, 10000.0).unwrap(), g.timestep_embedding(x, 2, 500.5).unwrap()])
            .unwrap()
    };
    let source = Arc::new(Checkpoint::default());
    let want = reference::evaluate(&program, &*source, &[("t", &t)]);
    let ggml = |kernels| (Device::cpu().unwrap(), kernels);
    let ours = devices().into_iter().map(|d| (d, CpuKernels::Auto));
    for (device, kernels) in ours.chain([ggml(CpuKernels::Ggml), ggml(CpuKernels::Portable)]) {
        let mut runner = Runner::new(device, source.clone(), options()).unwrap();
        runner.set_kernels(kernels).unwrap();
        let got = runner.run(&program, &[("t", &t)], &CancelToken::new()).unwrap();
        for (got, want) in got.iter().zip(&want) {
            assert!(distance(got.values(), &want.data) < 1.2e-4);
        }
    }
}
