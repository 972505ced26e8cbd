//! Execution of programs on a device.
//!
//! A [`Runner`](self) belongs to one network: it holds the device, the weights' place on it and the lowered
//! segments, keyed by [`Program::signature`](crate::Program::signature), so that a program run again only gets new
//! inputs.
//!
//! ```text
//! impl Runner {
//!     pub fn new(device: Arc<Device>, source: Arc<dyn WeightSource>, options: RunnerOptions) -> Result<Runner>;
//!     /// `inputs` by the names given to `Graph::input`; results in the order given to `Graph::finish`.
//!     pub fn run(&mut self, program: &Program, inputs: &[(&str, &Tensor)], cancel: &CancelToken) -> Result<Vec<Tensor>>;
//!     pub fn release_weights(&mut self);      // frees replicas; the next run loads them again
//!     pub fn lowered(&self) -> usize;         // how many segments have been lowered so far
//! }
//! ```

mod options;

pub use options::{RunnerOptions, TypePolicy};
