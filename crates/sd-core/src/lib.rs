//! Tensors, the graph, devices, weights and execution. Knows no file format, no model name, no argv.
//! `ARCHITECTURE.md` says how the parts fit.

pub mod cancel;
pub mod convert;
pub mod device;
pub mod dtype;
pub mod error;
pub mod exec;
mod ffi;
pub mod graph;
mod kernels;
mod lower;
pub mod passes;
pub mod plan;
pub mod residency;
pub mod scope;
pub mod shape;
pub mod tensor;
pub mod trace;

pub use cancel::CancelToken;
pub use device::Device;
pub use dtype::DType;
pub use error::{Error, Kind, Result};
pub use exec::{Precision, Runner, RunnerOptions, TypePolicy};
pub use graph::{AttentionOptions, Conv2dOptions, Graph, Program, RopeLayout, Var};
pub use kernels::{Computed, CpuKernels, Factors, multiply_add, observe, processor_seconds};
pub use plan::Cuts;
pub use residency::{Home, Manager, ManagerOptions};
pub use scope::Scope;
pub use shape::Shape;
pub use tensor::{Advice, Bytes, Data, Mapped, Origin, Tensor, TensorMeta, WeightSource};
pub use trace::Trace;
