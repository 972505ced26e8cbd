//! The tokenizer that language-model files carry.

use sd_core::Result;

use crate::metadata::Metadata;

/// The `tokenizer.ggml.*` keys of a file, borrowed from its metadata.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct EmbeddedTokenizer<'a> {
    /// The algorithm, such as `gpt2` (byte-level BPE), `llama` (SentencePiece) or `t5`.
    pub model: Option<&'a str>,
    /// The vocabulary; a token's index is its id.
    pub tokens: Vec<&'a str>,
    /// BPE merges in order of rank, each two pieces with a space between.
    pub merges: Vec<&'a str>,
    /// A score per token, for SentencePiece models.
    pub scores: Vec<f32>,
    /// A kind per token: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte.
    pub token_types: Vec<i64>,
    /// The id that starts a text.
    pub bos: Option<u64>,
    /// The id that ends a text.
    pub eos: Option<u64>,
    /// The id for what the vocabulary lacks.
    pub unknown: Option<u64>,
    /// The id that fills up.
    pub padding: Option<u64>,
    /// Whether a text starts with [`EmbeddedTokenizer::bos`].
    pub add_bos: Option<bool>,
    /// Whether a text ends with [`EmbeddedTokenizer::eos`].
    pub add_eos: Option<bool>,
}

impl<'a> EmbeddedTokenizer<'a> {
    /// The tokenizer in `metadata`, if there are tokens.
    ///
    /// # Errors
    /// A key holds a value of another type, or a token is not UTF-8.
    pub fn read(metadata: &'a Metadata) -> Result<Option<EmbeddedTokenizer<'a>>> {
        let Some(tokens) = metadata.strings("tokenizer.ggml.tokens")? else { return Ok(None) };
        let id = |name: &str| metadata.get(&format!("tokenizer.ggml.{name}_token_id")).and_then(|v| v.as_u64());
        let flag = |name: &str| metadata.get(&format!("tokenizer.ggml.{name}")).and_then(|v| v.as_bool());
        Ok(Some(EmbeddedTokenizer {
            model: metadata.str("tokenizer.ggml.model"),
            tokens,
            merges: metadata.strings("tokenizer.ggml.merges")?.unwrap_or_default(),
            scores: metadata.f32s("tokenizer.ggml.scores")?.unwrap_or_default(),
            token_types: metadata.i64s("tokenizer.ggml.token_type")?.unwrap_or_default(),
            bos: id("bos"),
            eos: id("eos"),
            unknown: id("unknown"),
            padding: id("padding"),
            add_bos: flag("add_bos_token"),
            add_eos: flag("add_eos_token"),
        }))
    }
}
