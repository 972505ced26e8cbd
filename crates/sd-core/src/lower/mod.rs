//! From the graph to what devices execute. Only here do shapes turn from row-major to ggml's order.

mod bands;
mod cpu;
mod ggml;
mod host;
mod layout;
mod noop;
mod rope;
#[cfg(test)]
mod tests;
mod view;
mod workspace;

pub(crate) use ggml::{Lowered, lower};
pub(crate) use host::{Host, Narrow, lower as lower_host};
pub(crate) use layout::ne;
pub(crate) use noop::{Pretend, bytes, given, lower as pretend, tensor};
