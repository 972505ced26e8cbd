//! Options that both front ends have: which files make a model and where it runs, and the parsers of values.
//! `ARCHITECTURE.md` says why this is a crate.
#![forbid(unsafe_code)]

mod cache;
mod model;
pub mod value;

pub use cache::{CacheArgs, mask};
pub use model::{ModelOptions, list_devices};
