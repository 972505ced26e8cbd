//! Tokenizers: text to ids.

mod bpe;
mod charsmap;
mod clip;
mod trie;
mod unigram;

pub use clip::{ClipTokenizer, clip};
pub use unigram::{Unigram, t5};
