//! The oracle's tiny models in published file layouts (`pipeline_names.json.gz`).

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use flate2::read::GzDecoder;
use sd_core::convert::{from_f32, to_f32};
use sd_core::{DType, Shape};
use sd_io::{TensorSpec, write_safetensors};
use serde_json::Value;

use crate::support::{Fixture, Tensor, procedural, read};

/// Name in the file, shape, operation, names and shapes in the reference.
type Row = (String, Vec<usize>, String, Vec<(String, Vec<usize>)>);

fn target(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(name)
}

fn rows(pipeline: &str) -> Vec<Row> {
    let bytes = read("pipeline_names.json.gz");
    let names: Value = serde_json::from_reader(GzDecoder::new(&bytes[..])).unwrap();
    let mut out = Vec::new();
    for entry in names["checkpoints"][pipeline].as_array().unwrap() {
        let (prefix, set) = (entry[0].as_str().unwrap(), entry[1].as_str().unwrap());
        let rows: Vec<Row> = serde_json::from_value(names["sets"][set].clone()).unwrap();
        out.extend(rows.into_iter().map(|r| (format!("{prefix}{}", r.0), r.1, r.2, r.3)));
    }
    out
}

/// Makes tensors of the reference by the oracle's rule.
struct Weights(BTreeMap<String, (Vec<usize>, i32, f32)>);

impl Weights {
    fn of(pipeline: &str) -> Weights {
        let fixture = Fixture::open(&format!("{pipeline}.safetensors"));
        Weights(serde_json::from_value(fixture.metadata("procedural")).unwrap())
    }

    fn values(&self, name: &str) -> Vec<f32> {
        let (shape, exponent, shift) = &self.0[name];
        procedural(name, shape.iter().product(), *exponent, *shift)
    }

    /// A tensor of the file.
    fn apply(&self, (_, shape, operation, sources): &Row) -> Vec<f32> {
        let mut all: Vec<Vec<f32>> = sources.iter().map(|s| self.values(&s.0)).collect();
        match operation.as_str() {
            // Joining along the first axis is one after the other.
            "same" | "conv" | "rows" => all.concat(),
            "swap" => {
                let half = all[0].len() / 2;
                all[0].rotate_left(half);
                all.remove(0)
            }
            "transpose" => {
                let (values, [n, k]) = (&all[0], [shape[0], shape[1]]);
                (0..n * k).map(|i| values[i % k * n + i / k]).collect()
            }
            other => panic!("{other}"),
        }
    }
}

fn write(path: &Path, tensors: &[Tensor]) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let spec = |(name, shape, values): &Tensor| {
        // Matrices and kernels are exact in f16, unless they were edited.
        let halves = from_f32(DType::F16, values, values.len()).unwrap();
        let exact = to_f32(DType::F16, &halves, values.len()).unwrap() == *values;
        let dtype = if shape.len() > 1 && exact { DType::F16 } else { DType::F32 };
        TensorSpec { name: name.clone(), dtype, shape: Shape::new(shape).unwrap() }
    };
    let specs: Vec<TensorSpec> = tensors.iter().map(spec).collect();
    write_safetensors(path, &[("format", "pt")], &specs, |spec| {
        let (_, _, values) = tensors.iter().find(|t| t.0 == spec.name).unwrap();
        from_f32(spec.dtype, values, spec.shape.last())
    })
    .unwrap();
}

/// Writes one file with the original names, and with `more` tensors of one value each.
pub(crate) fn single_file(pipeline: &str, name: &str, more: &[(&str, f32)]) -> PathBuf {
    let more = more.iter().map(|(name, value)| ((*name).to_owned(), vec![1], vec![*value]));
    write_file(name, whole(pipeline).into_iter().chain(more).collect())
}

/// The same without more, of values that `edit` has seen under the tensors' names.
pub(crate) fn edited(pipeline: &str, name: &str, mut edit: impl FnMut(&str, &mut [f32])) -> PathBuf {
    let mut tensors = whole(pipeline);
    tensors.iter_mut().for_each(|(name, _, values)| edit(name, values));
    write_file(name, tensors)
}

fn whole(pipeline: &str) -> Vec<Tensor> {
    let weights = Weights::of(pipeline);
    rows(pipeline).iter().map(|r| (r.0.clone(), r.1.clone(), weights.apply(r))).collect()
}

fn write_file(name: &str, tensors: Vec<Tensor>) -> PathBuf {
    let path = target(&format!("{name}.safetensors"));
    write(&path, &tensors);
    path
}

/// Writes a folder of components with diffusers' names, and the scheduler's configuration.
pub(crate) fn folder(pipeline: &str, name: &str, scheduler: &str) -> PathBuf {
    let weights = Weights::of(pipeline);
    let mut components: BTreeMap<&str, Vec<Tensor>> = BTreeMap::new();
    for (name, (shape, ..)) in &weights.0 {
        let (component, inner) = name.split_once('.').unwrap();
        components.entry(component).or_default().push((inner.to_owned(), shape.clone(), weights.values(name)));
    }
    let path = target(name);
    for (component, tensors) in &components {
        let file = if component.starts_with("text") { "model" } else { "diffusion_pytorch_model" };
        write(&path.join(component).join(format!("{file}.safetensors")), tensors);
    }
    fs::create_dir_all(path.join("scheduler")).unwrap();
    fs::write(path.join("scheduler/scheduler_config.json"), scheduler).unwrap();
    fs::write(path.join("model_index.json"), "{}").unwrap();
    path
}

/// Writes each component of the single file into a file of its own, without the prefix its names have there.
pub(crate) fn apart(pipeline: &str, name: &str, prefixes: &[&str]) -> Vec<PathBuf> {
    let (weights, rows) = (Weights::of(pipeline), rows(pipeline));
    let part = |prefix: &&str| {
        let bare = |r: &Row| Some((r.0.strip_prefix(prefix)?.to_owned(), r.1.clone(), weights.apply(r)));
        let path = target(&format!("{name}-{}safetensors", prefix));
        write(&path, &rows.iter().filter_map(bare).collect::<Vec<_>>());
        path
    };
    prefixes.iter().map(part).collect()
}

/// Writes the weights of a fixture that has them by rule, under their own names.
pub(crate) fn by_rule(fixture: &str, name: &str) -> PathBuf {
    let weights = Weights::of(fixture);
    let tensors: Vec<Tensor> =
        weights.0.iter().map(|(name, (shape, ..))| (name.clone(), shape.clone(), weights.values(name))).collect();
    let path = target(&format!("{name}.safetensors"));
    write(&path, &tensors);
    path
}

/// Writes a compact upscaler of zeros, which repeats every pixel twice along each axis.
pub(crate) fn doubler(name: &str) -> PathBuf {
    let zeros = |name: &str, shape: &[usize]| (name.to_owned(), shape.to_vec(), vec![0.0; shape.iter().product()]);
    let path = target(&format!("{name}.safetensors"));
    let tensors = [
        zeros("body.0.weight", &[4, 3, 3, 3]),
        zeros("body.0.bias", &[4]),
        zeros("body.1.weight", &[4]),
        zeros("body.2.weight", &[12, 4, 3, 3]),
        zeros("body.2.bias", &[12]),
    ];
    write(&path, &tensors);
    path
}
