//! Tokenizers: text to ids.

mod bpe;
mod charsmap;
mod clip;
mod special;
mod trie;
mod unigram;

pub use clip::{ClipTokenizer, clip};
pub use unigram::{Unigram, t5};
