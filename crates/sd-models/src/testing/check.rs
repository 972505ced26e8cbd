//! Comparison of a graph with a fixture, on every device and with every type of weights.

use std::net::TcpListener;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use sd_core::device::{add_rpc_server, serve_rpc};
use sd_core::exec::Runner;
use sd_core::{
    CancelToken, Cuts, DType, Device, Graph, Precision, Program, Result, RunnerOptions, Scope, Tensor, TypePolicy,
    Var, WeightSource,
};

use super::Fixture;

/// How far a value may be from the reference. `error` is the root of the mean squared difference over that of the
/// reference; an outlier differs by more than `outlier` times the latter.
struct Tolerance {
    weights: DType,
    precision: Precision,
    error: f64,
    outlier: f64,
}

/// The reference computes in f64. Rounding of weights dominates except in f32. Factors in bf16 have three bits fewer than f16.
const TOLERANCES: &[Tolerance] = &[
    Tolerance { weights: DType::F32, precision: Precision::Auto, error: 1e-5, outlier: 5e-5 },
    Tolerance { weights: DType::F16, precision: Precision::F32, error: 3e-3, outlier: 3e-2 },
    Tolerance { weights: DType::F16, precision: Precision::Auto, error: 2.4e-2, outlier: 2.4e-1 },
    Tolerance { weights: DType::Q8_0, precision: Precision::Auto, error: 4e-2, outlier: 3e-1 },
];

/// Fixtures of deep networks, where rounding adds up over stacks of transformer layers, and how many times further they
/// may be from the reference with q8_0 weights or factors in bf16.
const DEEP: &[(&str, f64)] = &[
    ("unet_sdxl_refiner", 4.0),
    ("unet_sdxl", 3.0),
    ("unet_ssd1b", 2.0),
    ("unet_vega", 2.0),
    ("controlnet_sdxl", 1.5),
];

/// As for [`DEEP`], otherwise.
const DEEP_EXACT: f64 = 2.0;

/// A graph and what it should compute.
pub(crate) struct Case<'a> {
    pub(crate) fixture: &'a str,
    /// Weights under the names that `build` uses.
    pub(crate) source: Arc<dyn WeightSource>,
    /// What stands before the names of taps in the graph.
    pub(crate) prefix: &'a str,
    /// Gets the inputs of the fixture in the order of their names; returns the outputs that are compared, by name.
    pub(crate) build: &'a Build<'a>,
}

type Build<'a> = dyn Fn(&Graph, &Scope, &[Var]) -> Result<Vec<(&'static str, Var)>> + 'a;

/// Runs the graph on each device with each type of weights and compares taps, in the order they are computed, and
/// outputs with the fixture.
pub(crate) fn check(case: &Case) {
    let fixture = Fixture::open(case.fixture);
    let (graph, outputs, inputs) = built(case, &fixture);
    let mut points: Vec<(String, Var)> = Vec::new();
    for tap in fixture.names("tap") {
        let label = format!("{}{tap}", case.prefix);
        let v = graph.find(&label).unwrap_or_else(|| panic!("{}: nothing is labelled {label}", case.fixture));
        points.push((format!("tap.{tap}"), v));
    }
    points.extend(outputs.iter().map(|(n, v)| (format!("output.{n}"), *v)));
    points.sort_by_key(|p| p.1);
    let program = graph.finish(&points.iter().map(|p| p.1).collect::<Vec<_>>()).unwrap();

    for device in devices() {
        for t in TOLERANCES {
            let got = run(&mut runner(case, &device, t.weights, t.precision), &program, &inputs);
            for ((name, _), got) in points.iter().zip(&got) {
                compare(case.fixture, &device, t, name, got, &fixture.tensor(name));
            }
        }
    }
}

/// Runs the graph whole, at each cut and at all cuts: the results must not differ in a bit.
pub(crate) fn check_cuts(case: &Case) {
    let (graph, outputs, inputs) = built(case, &Fixture::open(case.fixture));
    let program = graph.finish(&outputs.iter().map(|o| o.1).collect::<Vec<_>>()).unwrap();
    let count = program.cuts().len();
    assert!(count > 1, "{} has {count} cuts", case.fixture);
    for device in devices() {
        let mut runner = runner(case, &device, DType::F32, Precision::Auto);
        let whole = run(&mut runner, &program, &inputs);
        for cuts in (0..count).map(|i| Cuts::At(vec![i])).chain([Cuts::All]) {
            runner.set_cuts(cuts.clone());
            let same = run(&mut runner, &program, &inputs).iter().zip(&whole).all(|(a, b)| bits(a) == bits(b));
            assert!(same, "{} on {device}: {cuts:?} of {count} changes the result", case.fixture);
        }
    }
}

/// Runs a graph whose picture repeats on an input and on that input moved around by `by` rows and columns: the results
/// must be moved by `times` as many, whatever else is given.
pub(crate) fn check_circular(case: &Case, moved: &str, by: [usize; 2], times: fn([usize; 2]) -> [usize; 2]) {
    let fixture = Fixture::open(case.fixture);
    let (graph, outputs, mut inputs) = built(case, &fixture);
    let program = graph.finish(&outputs.iter().map(|o| o.1).collect::<Vec<_>>()).unwrap();
    let mut runner = runner(case, &Device::cpu().unwrap(), DType::F32, Precision::Auto);
    let whole = run(&mut runner, &program, &inputs);
    let input = inputs.iter_mut().find(|(name, _)| name == moved).unwrap();
    input.1 = roll(&input.1, by);
    for ((name, _), (got, want)) in outputs.iter().zip(run(&mut runner, &program, &inputs).iter().zip(&whole)) {
        let want = roll(want, times(by));
        let far = got.values().iter().zip(want.values()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        let size = want.values().iter().map(|x| x.abs()).fold(0.0, f32::max);
        assert!(far < 1e-4 * size, "{}: {name} departs by {far} of {size}", case.fixture);
    }
}

/// `x [b, c, h, w]` whose rows and columns come `by` later, the last ones first.
fn roll(x: &Tensor, by: [usize; 2]) -> Tensor {
    let [_, _, h, w] = x.shape().array().unwrap();
    let at = |i: usize| {
        let (plane, y, x) = (i / (h * w), i / w % h, i % w);
        plane * h * w + (y + h - by[0] % h) % h * w + (x + w - by[1] % w) % w
    };
    let values = x.values();
    Tensor::f32(x.dims(), (0..values.len()).map(|i| values[at(i)]).collect()).unwrap()
}

fn bits(t: &Tensor) -> Vec<u32> {
    t.values().iter().map(|v| v.to_bits()).collect()
}

type Built = (Graph, Vec<(&'static str, Var)>, Vec<(String, Tensor)>);

fn built(case: &Case, fixture: &Fixture) -> Built {
    let graph = Graph::new();
    let mut inputs: Vec<(String, Tensor)> =
        fixture.names("input").into_iter().map(|n| (n.clone(), fixture.tensor(&format!("input.{n}")))).collect();
    inputs.sort_by(|a, b| a.0.cmp(&b.0));
    let vars: Vec<Var> = inputs.iter().map(|(n, t)| graph.input(n, t.dims(), t.dtype()).unwrap()).collect();
    let outputs = (case.build)(&graph, &Scope::root(case.source.clone()), &vars).unwrap();
    (graph, outputs, inputs)
}

/// With one thread: threads of ggml wait for each other busily, which costs much on a busy machine.
fn runner(case: &Case, device: &Arc<Device>, weights: DType, precision: Precision) -> Runner {
    let types = TypePolicy::Convert(weights);
    let options = RunnerOptions { threads: 1, types, cuts: Cuts::None, precision, ..RunnerOptions::default() };
    Runner::new(device.clone(), case.source.clone(), options).unwrap()
}

fn run(runner: &mut Runner, program: &Program, inputs: &[(String, Tensor)]) -> Vec<Tensor> {
    let inputs: Vec<(&str, &Tensor)> = inputs.iter().map(|(n, t)| (n.as_str(), t)).collect();
    runner.run(program, &inputs, &CancelToken::default()).unwrap()
}

fn compare(fixture: &str, device: &Device, t: &Tolerance, name: &str, got: &Tensor, want: &Tensor) {
    let got =
        like(got, want).unwrap_or_else(|| panic!("{fixture}: {name} is {}, want {}", got.shape(), want.shape()));
    let want = want.values();
    let deep = DEEP.iter().find(|(name, _)| fixture.starts_with(name));
    let times = deep.map_or(1.0, |d| if t.error > 1e-2 { d.1 } else { DEEP_EXACT });
    let (most, outlier) = (times * t.error, times * t.outlier);
    let squares = |v: &mut dyn Iterator<Item = f64>| (v.map(|x| x * x).sum::<f64>() / want.len() as f64).sqrt();
    let size = squares(&mut want.iter().map(|&x| f64::from(x)));
    let off = |i: usize| (f64::from(got[i]) - f64::from(want[i])).abs();
    let error = squares(&mut (0..want.len()).map(off)) / size;
    let outliers = (0..want.len()).filter(|&i| off(i).is_nan() || off(i) > outlier * size).count();
    let worst = (0..want.len()).max_by(|&a, &b| off(a).total_cmp(&off(b))).unwrap();
    assert!(
        error <= most && outliers == 0,
        "{fixture} on {device} with {} weights in {:?} departs first at {name}: error {error:.2e}, at most {:.0e}; \
         {outliers} of {} are outliers; at {worst} got {}, want {}",
        t.weights,
        t.precision,
        most,
        want.len(),
        got[worst],
        want[worst],
    );
}

/// The values in the order of `want`: tokens `[b, h w, c]` may stand for an image `[b, c, h, w]`.
fn like(got: &Tensor, want: &Tensor) -> Option<Vec<f32>> {
    if got.shape() == want.shape() {
        return Some(got.values().to_vec());
    }
    let ([b, t, c], [wb, wc, h, w]) = (got.shape().array()?, want.shape().array()?);
    if (b, t, c) != (wb, h * w, wc) {
        return None;
    }
    let v = got.values();
    Some(
        (0..b)
            .flat_map(|b| (0..c).flat_map(move |c| (0..t).map(move |i| v[(b * t + i) * c_of(want) + c])))
            .collect(),
    )
}

fn c_of(image: &Tensor) -> usize {
    image.shape().dim(1)
}

/// The processor, and the same processor behind a loopback RPC server, which ggml treats as a GPU.
fn devices() -> Vec<Arc<Device>> {
    static REMOTE: OnceLock<Arc<Device>> = OnceLock::new();
    let remote = REMOTE.get_or_init(|| {
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let endpoint = free.to_string();
        let serving = endpoint.clone();
        std::thread::spawn(move || serve_rpc(&serving, 1, &[Device::cpu().unwrap()]).unwrap());
        for _ in 0..100 {
            if let Ok(devices) = add_rpc_server(&endpoint) {
                return devices[0].clone();
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        panic!("no RPC server at {endpoint}");
    });
    vec![Device::cpu().unwrap(), remote.clone()]
}
