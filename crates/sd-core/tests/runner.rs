//! What a runner promises besides values: cuts and threads change nothing, programs are lowered once, failures leave
//! it usable, and it stops when asked.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{Checkpoint, Random, devices, distance, reference};
use sd_core::convert::from_f32;
use sd_core::graph::{Graph, Program, Var};
use sd_core::scope::Role;
use sd_core::{
    AttentionOptions, Bytes, CancelToken, Conv2dOptions, Cuts, DType, Device, Result, Runner, RunnerOptions, Scope,
    Tensor, TypePolicy, WeightSource,
};

const BLOCKS: usize = 4;

/// A small network with the parts that diffusion networks have: convolutions with skips, attention, and modulation by
/// a value that every block reads.
fn network(r: &mut Random, dtype: DType) -> Arc<Checkpoint> {
    let mut c = Checkpoint::default()
        .random(r, "in.weight", &[32, 3, 3, 3], DType::F32)
        .random(r, "in.bias", &[32], DType::F32)
        .random(r, "out.weight", &[3, 32, 3, 3], DType::F32)
        .random(r, "time.weight", &[32, 32], dtype);
    for i in 0..BLOCKS {
        for (name, dims) in [("norm.weight", &[32][..]), ("norm.bias", &[32])] {
            c = c.random(r, &format!("blocks.{i}.{name}"), dims, DType::F32);
        }
        for name in ["q", "k", "v", "o", "mod"] {
            c = c.random(r, &format!("blocks.{i}.{name}.weight"), &[32, 32], dtype);
        }
        c = c.random(r, &format!("blocks.{i}.conv.weight"), &[32, 32, 3, 3], DType::F16);
    }
    Arc::new(c)
}

fn build(source: &Arc<Checkpoint>, h: usize) -> Program {
    try_build(source, h).unwrap()
}

fn try_build(source: &Arc<Checkpoint>, h: usize) -> Result<Program> {
    let w = Scope::root(source.clone());
    let g = Graph::new();
    let x = g.input("x", &[2, 3, h, 6], DType::F32)?;
    let t = g.input("t", &[2], DType::F32)?;
    let t = g.linear(&w.linear_no_bias("time")?, g.timestep_embedding(t, 32, 10000.0)?)?;
    g.keep(&[t]);
    let mut x = g.conv2d(&w.conv2d("in")?, x, Conv2dOptions::padded(1))?;
    let mut skips: Vec<Var> = vec![x];
    g.cut(&w.sub("in"), &[x]);
    for i in 0..BLOCKS {
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

fn inputs(r: &mut Random, h: usize) -> (Tensor, Tensor) {
    (r.tensor(&[2, 3, h, 6]), Tensor::f32(&[2], vec![3.0, 700.0]).unwrap())
}

fn run(runner: &mut Runner, program: &Program, x: &(Tensor, Tensor)) -> Result<Vec<Tensor>> {
    runner.run(program, &[("x", &x.0), ("t", &x.1)], &CancelToken::new())
}

/// One thread: tests run side by side, and ggml's threads wait for each other actively.
fn options(cuts: Cuts) -> RunnerOptions {
    RunnerOptions { cuts, threads: 1, ..RunnerOptions::default() }
}

#[test]
fn cuts_do_not_change_a_bit() {
    let mut r = Random::new(1);
    for dtype in [DType::F32, DType::F16, DType::Q8_0] {
        let source = network(&mut r, dtype);
        let program = build(&source, 11);
        let x = inputs(&mut r, 11);
        assert_eq!(program.cuts().len(), BLOCKS + 1);
        for device in devices() {
            let mut whole = Runner::new(device.clone(), source.clone(), options(Cuts::None)).unwrap();
            let want = run(&mut whole, &program, &x).unwrap();
            assert_eq!(whole.lowered(), 1);
            let mut choices = vec![Cuts::All];
            choices.extend(
                (0..1 << (BLOCKS + 1))
                    .step_by(3)
                    .map(|bits: usize| Cuts::At((0..=BLOCKS).filter(|i| bits >> i & 1 == 1).collect())),
            );
            for cuts in choices {
                let mut parts = Runner::new(device.clone(), source.clone(), options(cuts.clone())).unwrap();
                let got = run(&mut parts, &program, &x).unwrap();
                assert!(got == want, "{dtype} {cuts:?} on {device}");
            }
        }
    }
}

/// ggml multiplies with K-quants, kernels with all other types, and they round differently.
#[test]
fn cuts_beside_a_matrix_in_k_quants_do_not_change_a_bit() {
    let mut r = Random::new(3);
    let source = Checkpoint::default().random(&mut r, "a.0.weight", &[256, 256], DType::F32);
    let source = Arc::new(source.random(&mut r, "a.1.weight", &[256, 256], DType::Q4K));
    let w = Scope::root(source.clone());
    let g = Graph::new();
    let mut y = g.input("x", &[7, 256], DType::F32).unwrap();
    for i in 0..2 {
        let at = w.at("a", i);
        y = g.gelu(g.linear(&at.linear_no_bias("").unwrap(), y).unwrap()).unwrap();
        g.cut(&at, &[y]);
    }
    let program = g.finish(&[y]).unwrap();
    let x = r.tensor(&[7, 256]);
    let run = |cuts: Cuts| {
        let mut runner = Runner::new(Device::cpu().unwrap(), source.clone(), options(cuts)).unwrap();
        runner.run(&program, &[("x", &x)], &CancelToken::new()).unwrap()
    };
    assert!(run(Cuts::All) == run(Cuts::None));
}

#[test]
fn the_network_computes_what_it_should() {
    let mut r = Random::new(2);
    let source = network(&mut r, DType::F32);
    let program = build(&source, 7);
    let x = inputs(&mut r, 7);
    let want = reference::evaluate(&program, &*source, &[("x", &x.0), ("t", &x.1)]);
    for device in devices() {
        let mut runner = Runner::new(device, source.clone(), options(Cuts::All)).unwrap();
        for (got, want) in run(&mut runner, &program, &x).unwrap().iter().zip(&want) {
            // Kernels are stored as f16, so images are rounded to f16 in every block.
            assert!(distance(got.values(), &want.data) < 5e-3);
        }
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    let mut r = Random::new(3);
    for dtype in [DType::F32, DType::BF16, DType::Q4_0] {
        let source = network(&mut r, dtype);
        // 78 tokens: more than one tile of queries.
        let program = build(&source, 13);
        let x = inputs(&mut r, 13);
        let with = |threads| {
            let options = RunnerOptions { threads, ..RunnerOptions::default() };
            let mut runner = Runner::new(Device::cpu().unwrap(), source.clone(), options).unwrap();
            run(&mut runner, &program, &x).unwrap()
        };
        let one = with(1);
        assert!([2, 3, 0].into_iter().all(|n| with(n) == one), "{dtype}");
    }
}

#[test]
fn programs_are_lowered_once_and_only_inputs_change() {
    let mut r = Random::new(4);
    let source = network(&mut r, DType::F32);
    for device in devices() {
        let mut runner = Runner::new(device, source.clone(), options(Cuts::All)).unwrap();
        let (a, b) = (inputs(&mut r, 5), inputs(&mut r, 5));
        let first = run(&mut runner, &build(&source, 5), &a).unwrap();
        let other = run(&mut runner, &build(&source, 5), &b).unwrap();
        assert_ne!(first[0], other[0]);
        assert_eq!(run(&mut runner, &build(&source, 5), &a).unwrap(), first);
        assert_eq!(runner.lowered(), BLOCKS + 2);
        // A larger image, whose workspace replaces the smaller one, and back.
        run(&mut runner, &build(&source, 11), &inputs(&mut r, 11)).unwrap();
        assert_eq!(run(&mut runner, &build(&source, 5), &a).unwrap(), first);
        assert_eq!(runner.lowered(), 2 * (BLOCKS + 2));
        // What was freed comes back.
        runner.release_weights();
        runner.release_workspace();
        assert_eq!(runner.memory(), (0, 0));
        assert_eq!(run(&mut runner, &build(&source, 5), &a).unwrap(), first);
        runner.set_cuts(Cuts::None);
        assert_eq!(run(&mut runner, &build(&source, 5), &a).unwrap(), first);
        assert_eq!(runner.lowered(), 2 * (BLOCKS + 2) + 1);
    }
}

#[test]
fn segments_need_less_than_the_whole() {
    let mut r = Random::new(5);
    let source = network(&mut r, DType::F32);
    let program = build(&source, 32);
    let mut runner = Runner::new(Device::cpu().unwrap(), source, options(Cuts::None)).unwrap();
    let whole = runner.measure(&program).unwrap();
    runner.set_cuts(Cuts::All);
    let parts = runner.measure(&program).unwrap();
    assert_eq!((whole.len(), parts.len()), (1, BLOCKS + 2));
    assert_eq!(parts[1].label, "blocks.0");
    assert!(parts.iter().all(|p| p.workspace <= whole[0].workspace));
    // Every block reads five matrices [32, 32] and two vectors of 32 as f32, and a kernel [32, 32, 3, 3] as f16.
    assert_eq!(parts[1].weights, 5 * 32 * 32 * 4 + 2 * 32 * 4 + 32 * 32 * 9 * 2);
}

#[test]
fn wrong_inputs_are_errors_and_the_runner_goes_on() {
    let mut r = Random::new(6);
    let source = Arc::new(Checkpoint::default().random(&mut r, "t", &[4, 3], DType::F32));
    let g = Graph::new();
    let w = Scope::root(source.clone());
    let ids = g.input("ids", &[2], DType::I32).unwrap();
    let y = g.embedding(&w.weight("t", Role::Table).unwrap(), ids).unwrap();
    let program = g.finish(&[y]).unwrap();
    for device in devices() {
        let mut runner = Runner::new(device, source.clone(), options(Cuts::None)).unwrap();
        let mut try_ids = |name: &str, t: Tensor| {
            runner
                .run(&program, &[(name, &t)], &CancelToken::new())
                .map(|v| v[0].values().len())
                .map_err(|e| e.to_string())
        };
        for bad in [[0, 4], [-1, 0], [i32::MAX, 0]] {
            let e = try_ids("ids", Tensor::i32(&[2], bad.to_vec()).unwrap()).unwrap_err();
            assert!(e.contains("outside") && e.contains("t [4, 3]"), "{e}");
        }
        assert!(try_ids("ids", Tensor::i32(&[3], vec![0; 3]).unwrap()).unwrap_err().contains("should be [2] i32"));
        assert!(try_ids("ids", Tensor::zeros(&[2]).unwrap()).unwrap_err().contains("got [2] f32"));
        assert!(try_ids("other", Tensor::i32(&[2], vec![0; 2]).unwrap()).unwrap_err().contains("ids is not given"));
        assert_eq!(try_ids("ids", Tensor::i32(&[2], vec![3, 0]).unwrap()), Ok(6));
    }
}

/// A source of which a tensor of `blocks.1` is broken as long as it says so.
struct Failing(Arc<Checkpoint>, std::sync::atomic::AtomicBool);

impl WeightSource for Failing {
    fn names(&self) -> Vec<&str> {
        self.0.names()
    }
    fn meta(&self, name: &str) -> Option<sd_core::TensorMeta> {
        self.0.meta(name)
    }
    fn bytes(&self, name: &str) -> Result<Bytes> {
        if name.starts_with("blocks.1.o") && self.1.load(std::sync::atomic::Ordering::SeqCst) {
            return Ok(Bytes::from(vec![0; 3]));
        }
        self.0.bytes(name)
    }
    fn origin(&self, name: &str) -> sd_core::Origin {
        self.0.origin(name)
    }
}

#[test]
fn a_failure_names_segment_and_phase_and_leaves_the_runner_usable() {
    let mut r = Random::new(7);
    let source = network(&mut r, DType::F32);
    let program = build(&source, 5);
    let x = inputs(&mut r, 5);
    for device in devices() {
        let failing = Arc::new(Failing(source.clone(), true.into()));
        let mut runner = Runner::new(device.clone(), failing.clone(), options(Cuts::All)).unwrap();
        let e = run(&mut runner, &program, &x).unwrap_err().to_string();
        assert!(e.contains("segment blocks.1: loading weights"), "{e}");
        assert!(e.contains("blocks.1.o.weight has 3 bytes"), "{e}");
        failing.1.store(false, std::sync::atomic::Ordering::SeqCst);
        let mut other = Runner::new(device, source.clone(), options(Cuts::All)).unwrap();
        assert_eq!(run(&mut runner, &program, &x).unwrap(), run(&mut other, &program, &x).unwrap());
    }
}

#[test]
fn what_does_not_fit_is_an_error() {
    // 2^40 elements.
    let g = Graph::new();
    let x = g.input("x", &[1 << 20, 1], DType::F32).unwrap();
    let y = g.input("y", &[1, 1 << 20], DType::F32).unwrap();
    let program = g.finish(&[g.add(x, y).unwrap()]).unwrap();
    let source = Arc::new(Checkpoint::default());
    let mut runner = Runner::new(Device::cpu().unwrap(), source, options(Cuts::None)).unwrap();
    let (x, y) = (Tensor::zeros(&[1 << 20, 1]).unwrap(), Tensor::zeros(&[1, 1 << 20]).unwrap());
    let e = runner.run(&program, &[("x", &x), ("y", &y)], &CancelToken::new()).unwrap_err();
    assert!(e.to_string().contains("could not provide"), "{e}");
}

#[test]
fn sizes_beyond_every_machine_are_errors() {
    let mut r = Random::new(12);
    let source = Arc::new(Checkpoint::default().random(&mut r, "c.weight", &[1, 1, 1 << 10, 1], DType::F32));
    let w = Scope::root(source.clone());
    let mut runner = Runner::new(Device::cpu().unwrap(), source.clone(), options(Cuts::None)).unwrap();
    // 2^62 elements of 4 bytes are 0 modulo 2^64.
    let g = Graph::new();
    let x = g.input("x", &[1 << 31, 1], DType::F32).unwrap();
    let y = g.input("y", &[1, 1 << 31], DType::F32).unwrap();
    let sum = g.finish(&[g.add(x, y).unwrap()]).unwrap();
    assert!(runner.measure(&sum).unwrap_err().to_string().contains("more than any device holds"));
    // One row of patches of 2^10 values each: up to 2^36 of them are counted without overflow, and 2^37 refused.
    let g = Graph::new();
    let x = g.input("x", &[1, 1, 1 << 10, 1 << 36], DType::F32).unwrap();
    let conv =
        g.finish(&[g.conv2d(&w.conv2d_no_bias("c").unwrap(), x, Conv2dOptions::default()).unwrap()]).unwrap();
    assert!(runner.measure(&conv).is_ok());
    let g = Graph::new();
    let x = g.input("x", &[1, 1, 1 << 10, 1 << 37], DType::F32).unwrap();
    let conv =
        g.finish(&[g.conv2d(&w.conv2d_no_bias("c").unwrap(), x, Conv2dOptions::default()).unwrap()]).unwrap();
    assert!(runner.measure(&conv).unwrap_err().to_string().contains("more than any device holds"));
}

#[test]
fn runners_move_between_threads() {
    fn is_send<T: Send>() {}
    is_send::<Runner>();
}

/// Two hundred products of 512 by 1024 by 1024: seconds of work.
fn long_program(source: &Arc<Checkpoint>) -> Program {
    let w = Scope::root(source.clone());
    let g = Graph::new();
    let mut x = g.input("x", &[512, 1024], DType::F32).unwrap();
    for _ in 0..200 {
        x = g.tanh(g.linear(&w.linear_no_bias("a").unwrap(), x).unwrap()).unwrap();
    }
    g.finish(&[x]).unwrap()
}

#[test]
fn a_running_graph_can_be_cancelled() {
    let mut r = Random::new(8);
    let source = Arc::new(Checkpoint::default().random(&mut r, "a.weight", &[1024, 1024], DType::F32));
    let program = long_program(&source);
    let x = r.tensor(&[512, 1024]);
    for device in devices() {
        let mut runner = Runner::new(device.clone(), source.clone(), options(Cuts::None)).unwrap();
        let cancel = CancelToken::new();
        let other = cancel.clone();
        let thread = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(150));
            other.cancel();
        });
        let started = std::time::Instant::now();
        let result = runner.run(&program, &[("x", &x)], &cancel);
        assert!(result.is_err_and(|e| e.is_cancelled()), "{device}");
        assert!(started.elapsed() >= Duration::from_millis(100), "it had begun");
        thread.join().unwrap();
        assert!(runner.run(&program, &[("x", &x)], &cancel).is_err_and(|e| e.is_cancelled()));
        // Usable afterwards, with a short program.
        let g = Graph::new();
        let y = g.input("x", &[1], DType::F32).unwrap();
        let short = g.finish(&[g.scale(y, 2.0).unwrap()]).unwrap();
        let one = Tensor::f32(&[1], vec![1.5]).unwrap();
        let got = runner.run(&short, &[("x", &one)], &CancelToken::new()).unwrap();
        assert_eq!(got[0].values(), [3.0]);
    }
}

#[test]
fn bytes_of_any_alignment_give_the_same() {
    let mut r = Random::new(9);
    for dtype in [DType::F32, DType::F16, DType::Q4K, DType::Q8_0] {
        let (n, k) = (24, 256);
        let aligned = Checkpoint::default().random(&mut r, "a.weight", &[n, k], dtype);
        let bytes = aligned.bytes("a.weight").unwrap();
        let x = r.tensor(&[3, k]);
        let result = |source: Checkpoint| {
            let source = Arc::new(source);
            let w = Scope::root(source.clone());
            let g = Graph::new();
            let v = g.input("x", &[3, k], DType::F32).unwrap();
            let program = g.finish(&[g.linear(&w.linear_no_bias("a").unwrap(), v).unwrap()]).unwrap();
            let mut runner = Runner::new(Device::cpu().unwrap(), source, options(Cuts::None)).unwrap();
            let y = runner.run(&program, &[("x", &x)], &CancelToken::new()).unwrap();
            (y, runner.memory().0)
        };
        let (want, uploaded) = result(aligned);
        assert_eq!(uploaded, 0, "weights in host memory are used in place");
        for offset in [1, 2, 4, 8] {
            let mut shifted = vec![0u8; offset];
            shifted.extend_from_slice(&bytes);
            let all = Bytes::from(shifted);
            let len = all.len();
            let moved = Checkpoint::default().stored("a.weight", &[n, k], dtype, all.slice(offset..len).unwrap());
            assert_eq!(result(moved).0, want, "{dtype} at {offset}");
        }
    }
}

/// Files hold kernels that were quantised as if they were flat, and matrices too.
#[test]
fn blocks_may_span_rows() {
    let mut r = Random::new(13);
    let stored = |r: &mut Random, n: usize| from_f32(DType::Q8_0, &r.values(n), n).unwrap().into();
    let source = Checkpoint::default().stored("c.weight", &[4, 8, 3, 3], DType::Q8_0, stored(&mut r, 288)).stored(
        "a.weight",
        &[6, 16],
        DType::Q8_0,
        stored(&mut r, 96),
    );
    let source = Arc::new(source);
    let w = Scope::root(source.clone());
    let g = Graph::new();
    let (x, y) = (g.input("x", &[1, 8, 5, 4], DType::F32).unwrap(), g.input("y", &[3, 16], DType::F32).unwrap());
    let x = g.conv2d(&w.conv2d_no_bias("c").unwrap(), x, Conv2dOptions::padded(1)).unwrap();
    let y = g.linear(&w.linear_no_bias("a").unwrap(), y).unwrap();
    let program = g.finish(&[x, y]).unwrap();
    let (x, y) = (r.tensor(&[1, 8, 5, 4]), r.tensor(&[3, 16]));
    let given = [("x", &x), ("y", &y)];
    let want = reference::evaluate(&program, &*source, &given);
    for device in devices() {
        let mut runner = Runner::new(device, source.clone(), options(Cuts::None)).unwrap();
        for (got, want) in runner.run(&program, &given, &CancelToken::new()).unwrap().iter().zip(&want) {
            // Both factors are rounded to f16.
            assert!(distance(got.values(), &want.data) < 2e-3);
        }
    }
}

/// ggml stores activations in these types and reads them nowhere; a file may name them all the same.
#[test]
fn types_of_activations_are_refused() {
    for dtype in [DType::Q8_1, DType::Q8K] {
        let bytes: Bytes = vec![0; dtype.bytes(512, 256).unwrap()].into();
        let weights = Checkpoint::default().stored("t", &[2, 256], dtype, bytes.clone()).stored(
            "a.weight",
            &[2, 256],
            dtype,
            bytes,
        );
        let source = Arc::new(weights);
        let w = Scope::root(source.clone());
        let g = Graph::new();
        let ids = g.input("ids", &[1], DType::I32).unwrap();
        let row = g.embedding(&w.weight("t", Role::Table).unwrap(), ids).unwrap();
        let table = g.finish(&[row]).unwrap();
        let g = Graph::new();
        let x = g.input("x", &[1, 256], DType::F32).unwrap();
        let matrix = g.finish(&[g.linear(&w.linear_no_bias("a").unwrap(), x).unwrap()]).unwrap();
        let given = [("ids", &Tensor::i32(&[1], vec![1]).unwrap()), ("x", &Tensor::zeros(&[1, 256]).unwrap())];
        for device in devices() {
            let mut runner = Runner::new(device, source.clone(), options(Cuts::None)).unwrap();
            for (program, name) in [(&table, "t"), (&matrix, "a.weight")] {
                let e = runner.run(program, &given, &CancelToken::new()).unwrap_err().to_string();
                assert!(e.contains(&format!("{name}: {dtype} cannot be converted")), "{e}");
            }
        }
    }
}

/// On the stack of a test's thread, which has 2 MiB.
#[test]
fn long_chains_need_no_deep_stack() {
    const LINKS: usize = 100_000;
    let g = Graph::new();
    let mut x = g.input("x", &[1], DType::F32).unwrap();
    for _ in 0..LINKS {
        x = g.affine(x, 1.0, 1.0).unwrap();
    }
    let program = g.finish(&[x]).unwrap();
    let source = Arc::new(Checkpoint::default());
    let mut runner = Runner::new(Device::cpu().unwrap(), source, options(Cuts::None)).unwrap();
    let zero = Tensor::zeros(&[1]).unwrap();
    let got = runner.run(&program, &[("x", &zero)], &CancelToken::new()).unwrap();
    assert_eq!(got[0].values(), [LINKS as f32]);
}

#[test]
fn types_are_converted_as_asked() {
    let mut r = Random::new(10);
    let source = network(&mut r, DType::F32);
    let program = build(&source, 5);
    let x = inputs(&mut r, 5);
    let want = reference::evaluate(&program, &*source, &[("x", &x.0), ("t", &x.1)]);
    // Through all blocks, in multiples of what one product loses.
    for (dtype, tolerance) in
        [(DType::F32, 5e-3), (DType::F16, 1e-2), (DType::BF16, 6e-2), (DType::Q8_0, 6e-2), (DType::Q4_0, 0.5)]
    {
        for device in devices() {
            let options = RunnerOptions { types: TypePolicy::Convert(dtype), ..options(Cuts::None) };
            let mut runner = Runner::new(device, source.clone(), options).unwrap();
            for (got, want) in run(&mut runner, &program, &x).unwrap().iter().zip(&want) {
                let d = distance(got.values(), &want.data);
                assert!(d < tolerance, "{dtype}: {d}");
            }
        }
    }
}

#[test]
fn large_attention_and_convolution_go_in_parts() {
    let mut r = Random::new(11);
    // 2100 x 2100 scores of 5 heads exceed what is computed at a time; so do the patches of 64 channels at 256 x 256.
    let (t, h, d) = (2100, 5, 8);
    let (q, k, v) = (r.tensor(&[1, t, h, d]), r.tensor(&[1, t, h, d]), r.tensor(&[1, t, h, d]));
    let m = r.tensor(&[t, t]);
    let source = Arc::new(Checkpoint::default().random(&mut r, "c.weight", &[1, 64, 3, 3], DType::F32));
    let x = r.tensor(&[1, 64, 256, 256]);
    let w = Scope::root(source.clone());
    let attend = |rows: std::ops::Range<usize>, causal: bool| {
        let g = Graph::new();
        let input = |n: &str, d: &[usize]| g.input(n, d, DType::F32).unwrap();
        let (q, k, v) = (input("q", &[1, t, h, d]), input("k", &[1, t, h, d]), input("v", &[1, t, h, d]));
        let (q, m) = if causal {
            (q, input("m", &[t, t]))
        } else {
            let q = g.slice(q, 1, rows.start, rows.len()).unwrap();
            (q, g.slice(input("m", &[t, t]), 0, rows.start, rows.len()).unwrap())
        };
        let options = AttentionOptions { causal, mask: Some(m), scale: None };
        g.finish(&[g.attention(q, k, v, options).unwrap()]).unwrap()
    };
    let given = [("q", &q), ("k", &k), ("v", &v), ("m", &m)];
    let cancel = CancelToken::new();
    let mut runner = Runner::new(Device::cpu().unwrap(), source.clone(), options(Cuts::None)).unwrap();
    let whole = attend(0..t, false);
    let all = runner.run(&whole, &given, &cancel).unwrap();
    for rows in [0..3, 700..702, 795..801, 1588..1600, 2097..2100] {
        let want = reference::evaluate(&attend(rows.clone(), false), &*source, &given);
        let got = &all[0].values()[rows.start * h * d..rows.end * h * d];
        assert!(distance(got, &want[0].data) < 1e-5, "rows {rows:?}");
    }
    assert!(runner.measure(&whole).unwrap()[0].workspace < 2 * t * t * h * 4, "scores are not all there at once");
    // With a causal mask, the first row sees the first value only, and the last sees all.
    let causal = runner.run(&attend(0..t, true), &given, &cancel).unwrap();
    assert!(
        distance(
            &causal[0].values()[..h * d],
            &v.values()[..h * d].iter().map(|&v| f64::from(v)).collect::<Vec<_>>()
        ) < 1e-6
    );
    let last = (t - 1) * h * d;
    assert_eq!(causal[0].values()[last..], all[0].values()[last..]);

    let g = Graph::new();
    let input = g.input("x", &[1, 64, 256, 256], DType::F32).unwrap();
    let program =
        g.finish(&[g.conv2d(&w.conv2d_no_bias("c").unwrap(), input, Conv2dOptions::padded(1)).unwrap()]).unwrap();
    let got = runner.run(&program, &[("x", &x)], &cancel).unwrap();
    let want = reference::evaluate(&program, &*source, &[("x", &x)]);
    assert!(distance(got[0].values(), &want[0].data) < 1e-5);
    assert!(
        runner.measure(&program).unwrap()[0].workspace < 9 * 64 * 256 * 256 * 4,
        "patches are not all there at once"
    );
}

#[test]
fn a_norm_takes_the_place_of_what_a_shortcut_reads_too() {
    let mut r = Random::new(41);
    let (wide, narrow, side) = (64, 32, 64);
    let source = Checkpoint::default()
        .random(&mut r, "in.weight", &[wide, 4, 3, 3], DType::F32)
        .random(&mut r, "norm.weight", &[wide], DType::F32)
        .random(&mut r, "norm.bias", &[wide], DType::F32)
        .random(&mut r, "conv.weight", &[narrow, wide, 3, 3], DType::F32)
        .random(&mut r, "last.weight", &[narrow, narrow, 3, 3], DType::F32)
        .random(&mut r, "shortcut.weight", &[narrow, wide, 1, 1], DType::F32);
    let source = Arc::new(source);
    let (w, g) = (Scope::root(source.clone()), Graph::new());
    let conv = |name: &str, x: Var, padding: usize| {
        g.conv2d(&w.conv2d_no_bias(name).unwrap(), x, Conv2dOptions::padded(padding)).unwrap()
    };
    let x = conv("in", g.input("x", &[1, 4, side, side], DType::F32).unwrap(), 1);
    let y = g.silu(g.group_norm(&w.norm("norm").unwrap(), x, 8, 1e-5).unwrap()).unwrap();
    let y = conv("last", g.silu(conv("conv", y, 1)).unwrap(), 1);
    let sum = g.add(conv("shortcut", x, 0), y).unwrap();
    let program = g.finish(&[g.silu(sum).unwrap()]).unwrap();
    let mut runner = Runner::new(Device::cpu().unwrap(), source.clone(), options(Cuts::None)).unwrap();
    // Four such tensors: what is normalised in place, the shortcut and the first result; a fifth would be a copy's half.
    let tensor = narrow * side * side * 4;
    let needed = runner.measure(&program).unwrap()[0].workspace;
    assert!(needed < 5 * tensor, "{needed} is {} tensors", needed as f64 / tensor as f64);
    let x = r.tensor(&[1, 4, side, side]);
    let got = runner.run(&program, &[("x", &x)], &CancelToken::new()).unwrap();
    let want = reference::evaluate(&program, &*source, &[("x", &x)]);
    assert!(distance(got[0].values(), &want[0].data) < 1e-4);
}
