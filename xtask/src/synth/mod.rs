//! Random checkpoints with real names and shapes, for benches and size tests.
//!
//! Values are a function of seed and tensor name alone. Matrices and kernels are normal with variance `1 / fan-in`,
//! so that activations keep their size from layer to layer and stay within f16.

mod fill;
pub mod sd15;

pub use fill::{Values, normal_quantile};

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
