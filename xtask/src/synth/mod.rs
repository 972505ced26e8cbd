//! Random checkpoints with real names and shapes, for benches and size tests.
//!
//! Values are a function of seed and tensor name alone. Matrices and kernels are normal with variance `1 / fan-in`,
//! so that activations keep their size from layer to layer and stay within f16.

mod fill;
pub mod sd15;

pub use fill::{Values, normal_quantile};

use anyhow::{Result, bail};
use sd_core::{DType, Shape};
use sd_io::{TensorSpec, write_safetensors};
use std::collections::HashMap;
use std::path::Path;

/// The models that [`write()`] knows.
pub const MODELS: &[&str] = &["sd15"];

/// The tensors of `model`, one of [`MODELS`].
///
/// # Errors
/// When there is no such model.
pub fn tensors(model: &str) -> Result<Vec<Spec>> {
    match model {
        "sd15" => Ok(sd15::tensors()),
        other => bail!("no model {other:?}; there are {}", MODELS.join(", ")),
    }
}

/// Writes `specs`, filled from `seed`, as a safetensors file.
///
/// # Errors
/// When the file cannot be written.
pub fn write(path: &Path, specs: &[Spec], seed: u64) -> Result<()> {
    let by_name: HashMap<&str, &Spec> = specs.iter().map(|spec| (spec.name.as_str(), spec)).collect();
    let rows: sd_core::Result<Vec<TensorSpec>> = specs.iter().map(Spec::row).collect();
    let seed_text = seed.to_string();
    let metadata = [("generator", "sd-rs xtask synth"), ("seed", seed_text.as_str())];
    let mut values = Values::new(seed);
    write_safetensors(path, &metadata, &rows?, |row| {
        Ok(by_name.get(row.name.as_str()).map(|spec| values.bytes(spec)).unwrap_or_default())
    })?;
    Ok(())
}

/// What a tensor is filled with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fill {
    /// f16, normal with mean 0 and variance `1 / n`.
    FanIn(usize),
    /// f16, normal with the given mean and standard deviation 0.02.
    Around(f32),
    /// i64: 0, 1, 2, …
    Count,
}

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

impl Spec {
    fn row(&self) -> sd_core::Result<TensorSpec> {
        let dtype = if self.fill == Fill::Count { DType::I64 } else { DType::F16 };
        Ok(TensorSpec { name: self.name.clone(), dtype, shape: Shape::new(&self.shape)? })
    }
}
