//! Tensors, the graph, devices, weights and execution. Knows no file format, no model name, no argv.
//! `ARCHITECTURE.md` says how the parts fit.

pub mod dtype;
pub mod error;
pub mod shape;
pub mod tensor;

pub use dtype::DType;
pub use error::{Error, Kind, Result};
pub use shape::Shape;
pub use tensor::{Bytes, Data, Origin, Tensor, TensorMeta, WeightSource};
