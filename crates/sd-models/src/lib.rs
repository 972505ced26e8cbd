//! Model families: what a checkpoint is, and the graphs that run it. Knows no device, no flag, no request.

#![forbid(unsafe_code)]

pub mod text;
