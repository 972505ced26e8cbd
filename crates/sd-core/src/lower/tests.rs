//! Programs in bands of rows against the same programs without.

use std::collections::HashSet;

use super::bands::Sizes;
use super::host::{Host, Narrow, lower_in_bands};
use crate::cancel::CancelToken;
use crate::convert::from_f32;
use crate::dtype::DType;
use crate::ffi::{Buffer, Dev};
use crate::graph::{Conv2dOptions, Graph, Op, Program, Var};
use crate::kernels::{CpuKernels, Isa, Memory, Pool, run};
use crate::plan::{Cuts, segments};
use crate::scope::tests::Shapes;

const WHOLE: Sizes = Sizes { large: usize::MAX, band: 0 };
/// As few rows as there can be.
const NARROW: Sizes = Sizes { large: 0, band: 0 };

fn lowered(program: &Program, isa: &'static Isa, sizes: Sizes) -> Host {
    let segment = segments(program, &Cuts::None).unwrap().remove(0);
    let weights: HashSet<Var> =
        program.iter().filter(|(_, n)| matches!(n.op, Op::Weight(_))).map(|n| n.0).collect();
    let kernels = |v: Var| if program.node(v).shape.rank() == 4 { DType::F16 } else { DType::F32 };
    let narrow = Narrow { weights, values: true };
    lower_in_bands(program, &segment, isa, &narrow, sizes, |v| Ok(kernels(v))).unwrap().unwrap()
}

/// The outputs, from memory that holds NaN where nothing was written.
fn computed(program: &Program, host: &Host, threads: usize) -> Vec<Vec<u32>> {
    let dev = Dev::cpu().unwrap();
    let filled = |bytes: &[u8]| {
        let buffer = Buffer::alloc(dev, bytes.len().max(64)).unwrap();
        buffer.write(0, bytes).unwrap();
        buffer
    };
    let nan = |bytes: usize| filled(&vec![0xff; bytes]);
    let mut buffers = vec![nan(host.workspace)];
    let mut state = 1u64;
    for &v in &host.vars {
        let node = program.node(v);
        let n = node.shape.elements();
        let mut values = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        buffers.push(match &node.op {
            Op::Weight(w) if w.shape().rank() == 4 => {
                let values: Vec<f32> = (0..n).map(|_| values()).collect();
                filled(&from_f32(DType::F16, &values, n).unwrap())
            }
            op if op.is_leaf() => filled(&(0..n).flat_map(|_| values().to_ne_bytes()).collect::<Vec<u8>>()),
            _ => nan(4 * n),
        });
    }
    let memories: Vec<Memory> = buffers.iter().map(|b| Memory::new(b, 0)).collect();
    run(&host.steps, &memories, &Pool::new(threads).unwrap(), &CancelToken::new()).unwrap();
    let read = |&v: &Var| {
        let at = 1 + host.vars.iter().position(|&w| w == v).unwrap();
        let mut out = vec![0.0f32; program.node(v).shape.elements()];
        buffers[at].read(0, &mut out).unwrap();
        out.iter().map(|x| x.to_bits()).collect()
    };
    program.outputs().iter().map(read).collect()
}

/// Compares whole and in bands of several heights, on every instruction set, with 1 to 4 threads, and returns the
/// steps and the workspace of both: whole and in bands.
fn check(program: &Program) -> [(usize, usize); 2] {
    let mut found = [(0, 0); 2];
    for kernels in [CpuKernels::Avx512Bf16, CpuKernels::Avx512, CpuKernels::Avx2, CpuKernels::Portable] {
        if !kernels.is_available() {
            continue;
        }
        let isa = kernels.isa().unwrap().unwrap();
        let whole = lowered(program, isa, WHOLE);
        let want = computed(program, &whole, 1);
        assert!(want.iter().flatten().all(|&b| f32::from_bits(b).is_finite()));
        let narrow = lowered(program, isa, NARROW);
        for threads in 1..=4 {
            assert!(computed(program, &narrow, threads) == want, "{isa:?}, {threads} threads");
        }
        for band in [1 << 15, 1 << 17] {
            let host = lowered(program, isa, Sizes { large: 0, band });
            assert!(computed(program, &host, 2) == want, "{isa:?}, bands of {band} bytes");
        }
        found = [&whole, &narrow].map(|h| (h.steps.len(), h.workspace));
    }
    found
}

/// A block of an autoencoder from `c` to `n` channels, on an image that a convolution makes.
fn resnet(batch: usize, [c, n]: [usize; 2], [h, w]: [usize; 2], cut: bool) -> Program {
    let s = Shapes::scope(&[
        ("in.weight", &[c, 3, 3, 3]),
        ("in.bias", &[c]),
        ("norm1.weight", &[c]),
        ("norm1.bias", &[c]),
        ("conv1.weight", &[n, c, 3, 3]),
        ("conv1.bias", &[n]),
        ("norm2.weight", &[n]),
        ("norm2.bias", &[n]),
        ("conv2.weight", &[n, n, 3, 3]),
        ("conv2.bias", &[n]),
        ("skip.weight", &[n, c, 1, 1]),
        ("skip.bias", &[n]),
    ]);
    let g = Graph::new();
    let conv = |name: &str, x: Var| {
        let w = s.conv2d(name).unwrap();
        g.conv2d(&w, x, Conv2dOptions::padded(w.dims()[2] / 2)).unwrap()
    };
    let norm = |name: &str, x: Var| g.silu(g.group_norm(&s.norm(name).unwrap(), x, 4, 1e-5).unwrap()).unwrap();
    let x = g.input("x", &[batch, 3, h, w], DType::F32).unwrap();
    let x = conv("in", x);
    let normed = norm("norm1", x);
    if cut {
        g.cut(&s.sub("norm1"), &[x, normed]);
    }
    let y = conv("conv1", normed);
    let y = conv("conv2", norm("norm2", y));
    let x = if c == n { x } else { conv("skip", x) };
    let out = g.add(x, y).unwrap();
    g.finish(&[out]).unwrap()
}

#[test]
fn norms_and_what_is_beside_them_are_computed_in_bands() {
    for (batch, channels, image) in [
        (1, [16, 8], [13, 17]),
        (2, [8, 8], [9, 5]),
        (2, [8, 12], [7, 11]),
        (1, [64, 32], [35, 31]),
        (1, [32, 32], [30, 32]),
    ] {
        let [whole, bands] = check(&resnet(batch, channels, image, false));
        assert!(bands.0 > whole.0, "{channels:?}: {whole:?} {bands:?}");
    }
    // Values are the same where a cut keeps the norm apart.
    check(&resnet(1, [16, 8], [13, 17], true));
}

#[test]
fn bands_need_little_beside_what_is_read() {
    // Planes whose size is a multiple of what places are aligned to.
    let [c, n, h, w] = [64, 32, 96, 32];
    let [whole, bands] = check(&resnet(1, [c, n], [h, w], false));
    let image = c * h * w * 4;
    // Without bands: what is read, the shortcut, and the first convolution's result.
    assert!(whole.1 >= 2 * image, "{whole:?}");
    // Bands of 2 rows: an operand with 4 rows, and two results of both convolutions, and the larger kernel, transformed.
    let kernel = 16 * c * n * 4;
    assert!(bands.1 <= image + 4 * c * w * 4 + 4 * 2 * n * w * 4 + kernel + 4096, "{bands:?}");
}

#[test]
fn repeated_values_are_computed_in_bands() {
    for (factor, batch, [c, n], [h, w], kernel, dilation) in [
        (2, 1, [5, 3], [7, 9], 3, 1),
        (2, 2, [32, 33], [16, 17], 3, 1),
        (3, 1, [4, 6], [5, 3], 5, 1),
        (2, 1, [3, 4], [9, 8], 3, 2),
        (4, 1, [4, 4], [3, 5], 1, 1),
    ] {
        let s = Shapes::scope(&[("conv.weight", &[n, c, kernel, kernel]), ("conv.bias", &[n])]);
        let g = Graph::new();
        let x = g.input("x", &[batch, c, h, w], DType::F32).unwrap();
        // Something to read beside the input.
        let x = g.silu(x).unwrap();
        let x = g.upsample_nearest(x, factor).unwrap();
        let options = Conv2dOptions { stride: 1, padding: kernel / 2 * dilation, dilation };
        let y = g.silu(g.conv2d(&s.conv2d("conv").unwrap(), x, options).unwrap()).unwrap();
        let [whole, bands] = check(&g.finish(&[y]).unwrap());
        assert!(bands.0 > whole.0, "{whole:?} {bands:?}");
    }
}

#[test]
fn convolutions_take_the_place_of_what_they_read() {
    for (c, n, [h, w], kernel, later) in [
        (6, 6, [11, 16], 3, false),
        (7, 4, [12, 7], 5, false),
        (6, 6, [11, 16], 3, true),
        (5, 9, [10, 6], 1, false),
    ] {
        let s = Shapes::scope(&[
            ("a.weight", &[c, 3, 3, 3]),
            ("b.weight", &[n, c, kernel, kernel]),
            ("c.weight", &[2, n, 3, 3]),
        ]);
        let g = Graph::new();
        let conv = |name: &str, x: Var| {
            let w = s.conv2d_no_bias(name).unwrap();
            g.conv2d(&w, x, Conv2dOptions::padded(w.dims()[2] / 2)).unwrap()
        };
        let x = g.input("x", &[1, 3, h, w], DType::F32).unwrap();
        let x = conv("a", x);
        let y = conv("c", conv("b", x));
        // Somebody else may read what the convolution reads, after it.
        let outputs = if later { vec![y, g.silu(x).unwrap()] } else { vec![y] };
        check(&g.finish(&outputs).unwrap());
    }
}
