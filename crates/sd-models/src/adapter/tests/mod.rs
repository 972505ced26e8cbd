//! Every kind of adapter against what peft and lycoris compute, and every spelling against the others.

use sd_core::exec::Runner;
use sd_core::{
    Bytes, CancelToken, Conv2dOptions, DType, Device, Graph, Origin, RunnerOptions, Scope, Shape, Tensor,
    TensorMeta, convert,
};

use super::*;

mod requests;
mod spellings;

/// How far results in f32 may be from the reference: the root of the mean squared difference over that of the reference.
const EXACT: f64 = 1e-5;

/// Tensors in memory.
#[derive(Default, Clone)]
pub(super) struct Tensors(BTreeMap<String, (Vec<usize>, DType, Vec<u8>)>);

impl Tensors {
    pub(super) fn put(&mut self, name: &str, dims: &[usize], dtype: DType, values: &[f32]) {
        let bytes = convert::from_f32(dtype, values, dims.last().copied().unwrap_or(1)).unwrap();
        self.0.insert(name.to_owned(), (dims.to_vec(), dtype, bytes));
    }

    fn listed(&self, part: Part) -> Vec<(Part, String, Shape)> {
        self.0.iter().map(|(n, t)| (part, n.clone(), Shape::new(&t.0).unwrap())).collect()
    }
}

impl WeightSource for Tensors {
    fn names(&self) -> Vec<&str> {
        self.0.keys().map(String::as_str).collect()
    }

    fn meta(&self, name: &str) -> Option<TensorMeta> {
        let t = self.0.get(name)?;
        Some(TensorMeta { shape: Shape::new(&t.0).ok()?, dtype: t.1 })
    }

    fn bytes(&self, name: &str) -> Result<Bytes> {
        let t = self.0.get(name).ok_or_else(|| Error::missing(name, "heron.safetensors"))?;
        Ok(Bytes::from(t.2.clone()))
    }

    fn origin(&self, name: &str) -> Origin {
        Origin { name: name.into(), file: "heron.safetensors".into() }
    }
}

/// Numbers that look random: a fixed linear congruential generator.
pub(super) fn noise(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1664525).wrapping_add(1013904223);
        (state >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..count).map(|_| next()).collect()
}

/// The layer `name` of `adapted` applied to `x`.
fn run(adapted: &Arc<Adapted>, kind: &str, name: &str, x: &Tensor) -> Tensor {
    let source: Arc<dyn WeightSource> = adapted.clone();
    let mut runner = Runner::new(
        Device::cpu().unwrap(),
        source.clone(),
        RunnerOptions { threads: 1, ..RunnerOptions::default() },
    )
    .unwrap();
    let (g, w) = (Graph::new(), Scope::root(source));
    let v = g.input("x", x.dims(), DType::F32).unwrap();
    let y = match kind {
        "linear" => g.linear(&w.linear(name).unwrap(), v),
        "norm" => g.layer_norm(&w.norm(name).unwrap(), v, 1e-5),
        _ => g.conv2d(&w.conv2d(name).unwrap(), v, Conv2dOptions { stride: 2, padding: 1, dilation: 1 }),
    };
    let program = adapted.apply(&g.finish(&[y.unwrap()]).unwrap()).unwrap();
    runner.run(&program, &[("x", x)], &CancelToken::new()).unwrap().remove(0)
}

/// Bits of values.
fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn distance(got: &Tensor, want: &Tensor) -> f64 {
    assert_eq!(got.shape(), want.shape());
    let square = |v: f64| v * v;
    let off: f64 = got.values().iter().zip(want.values()).map(|(a, b)| square(f64::from(*a) - f64::from(*b))).sum();
    (off / want.values().iter().map(|v| square(f64::from(*v))).sum::<f64>()).sqrt()
}

fn tensor(file: &Checkpoint, name: &str) -> Tensor {
    let meta = file.meta(name).unwrap();
    let values = convert::to_f32(meta.dtype, &file.bytes(name).unwrap(), meta.shape.elements()).unwrap();
    Tensor::f32(meta.shape.dims(), values).unwrap()
}

#[test]
fn every_kind_agrees_with_the_package_that_trains_it() {
    let path = format!("{}/../../oracle/fixtures/lora_kinds.safetensors", env!("CARGO_MANIFEST_DIR"));
    let fixture = Checkpoint::open(path).unwrap();
    let config: serde_json::Value = serde_json::from_str(fixture.metadata().str("config").unwrap()).unwrap();
    let (mut base, mut files) = (Tensors::default(), BTreeMap::<String, Tensors>::new());
    for name in fixture.names() {
        let Some(bare) = name.strip_prefix("weight.") else { continue };
        let t = tensor(&fixture, name);
        let to = match bare.strip_prefix("base_model.model.") {
            Some(rest) => files.entry(rest.split('.').next().unwrap().to_owned()).or_default(),
            None if bare.starts_with("lora_unet_") => files.entry(String::new()).or_default(),
            None => &mut base,
        };
        to.put(bare, t.dims(), DType::F32, t.values());
    }
    let modules = Modules::new(base.listed(Part::Diffusion));
    let base: Arc<dyn WeightSource> = Arc::new(base);
    let mut adapters = BTreeMap::new();
    for (case, file) in files {
        let mut alphas = Alphas::default();
        if let Some([_, alpha, root]) = config["peft"][&case].as_array().map(Vec::as_slice) {
            let config = serde_json::json!({"base_model.lora_alpha": alpha, "base_model.use_rslora": root});
            alphas.config = serde_json::from_value(config).unwrap();
        }
        let source: Arc<dyn WeightSource> = Arc::new(file);
        let lora = read(&source, "heron.safetensors", &alphas, &modules).unwrap();
        assert!(lora.report.unused.is_empty() && lora.report.unfit.is_empty(), "{}", lora.report);
        adapters.insert(case, lora.part(Part::Diffusion).unwrap().clone());
    }
    let layers = config["layers"].as_object().unwrap();
    assert!(layers.len() >= 28);
    for (name, kind) in layers {
        let x = tensor(&fixture, &format!("input.{name}"));
        let adapter = adapters.get(name).unwrap_or(&adapters[""]);
        for strength in config["strengths"].as_array().unwrap() {
            let want = tensor(&fixture, &format!("output.{name}@{strength}"));
            for mode in [Mode::Immediately, Mode::AtRuntime] {
                let list = vec![(adapter.clone(), strength.as_f64().unwrap() as f32)];
                let adapted = Arc::new(Adapted::new(base.clone(), list, mode, TypePolicy::Stored).unwrap());
                let got = run(&adapted, kind.as_str().unwrap(), name, &x);
                let off = distance(&got, &want);
                assert!(off < EXACT, "{name} at {strength}, {mode:?}: {off:.1e}");
            }
        }
    }
}
