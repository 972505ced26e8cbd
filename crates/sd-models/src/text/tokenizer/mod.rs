//! Tokenizers: text to ids.

mod bpe;
mod clip;

pub use clip::{ClipTokenizer, clip};
