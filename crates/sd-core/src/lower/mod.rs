//! From the graph to what devices execute. Only here do shapes turn from row-major to ggml's order.

mod cpu;
mod ggml;
mod layout;
mod rope;
mod workspace;

pub(crate) use ggml::{Lowered, lower};
pub(crate) use layout::ne;
