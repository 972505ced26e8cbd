//! Random checkpoints with published names and shapes, for benches and size tests.
//!
//! Names and shapes are those of `oracle/fixtures/real_names.json.gz`. Values are a function of seed, tensor name and
//! type alone. Matrices and kernels are normal with variance `1 / fan-in`, so that activations keep their size from
//! layer to layer and stay within f16.

mod fill;
mod names;
mod sparse;

pub use fill::{Fill, Values, normal_quantile};
pub use names::{models, tensors};
pub use sparse::write_sparse;

use anyhow::{Result, bail};
use sd_core::{DType, Shape, TensorMeta};
use sd_io::{TensorSpec, Value, write_gguf, write_safetensors};
use sd_runtime::{Choice, TypeRules};
use std::collections::HashMap;
use std::path::Path;

/// One tensor of a checkpoint: its name as stored and its shape, row-major.
#[derive(Debug, Clone, PartialEq)]
pub struct Spec {
    /// Name as stored.
    pub name: String,
    /// Row-major shape.
    pub shape: Vec<usize>,
    /// Contents.
    pub fill: Fill,
}

/// Writes `specs`, filled from `seed`: a GGUF file if the path ends in `.gguf`, else a safetensors file. Every tensor is
/// f16 but those that conversion to `dtype` would convert. Returns the bytes of all tensors.
///
/// # Errors
/// The format does not have the type, or the file cannot be written.
pub fn write(path: &Path, specs: &[Spec], dtype: DType, seed: u64) -> Result<u64> {
    let rules = TypeRules::new(Some(dtype), "")?;
    let rows = specs.iter().map(|spec| spec.row(&rules)).collect::<sd_core::Result<Vec<_>>>()?;
    let by_name: HashMap<&str, &Spec> = specs.iter().map(|spec| (spec.name.as_str(), spec)).collect();
    let mut values = Values::new(seed);
    let mut bytes = |row: &TensorSpec| match by_name.get(row.name.as_str()) {
        Some(spec) => values.bytes(spec, row.dtype),
        None => Ok(Vec::new()),
    };
    let (generator, seed) = ("sd-rs xtask synth", seed.to_string());
    if path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf")) {
        let text = |s: &str| Value::String(s.to_owned());
        write_gguf(path, &[("general.name", text(generator)), ("synth.seed", text(&seed))], &rows, &mut bytes)?;
    } else if dtype.is_quantised() {
        bail!("{}: {dtype} is for GGUF files; end the name in .gguf", path.display());
    } else {
        write_safetensors(path, &[("generator", generator), ("seed", &seed)], &rows, &mut bytes)?;
    }
    Ok(rows.iter().map(TensorSpec::bytes).sum::<sd_core::Result<u64>>()?)
}

impl Spec {
    fn row(&self, rules: &TypeRules) -> sd_core::Result<TensorSpec> {
        let shape = Shape::new(&self.shape)?;
        let dtype = match rules.choose(&self.name, &TensorMeta { shape, dtype: DType::F16 }) {
            Choice::Type(dtype) => dtype,
            Choice::Kept(_) => DType::F16,
        };
        Ok(TensorSpec { name: self.name.clone(), dtype, shape })
    }
}
