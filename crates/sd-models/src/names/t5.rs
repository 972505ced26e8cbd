//! Module paths of llama.cpp's T5 files, with those of transformers, which the network uses. Golden values: the tensor
//! map of the `gguf` package.

use std::collections::BTreeSet;

use super::Row;

type Pairs = &'static [(&'static str, &'static str)];

const BLOCK: Pairs = &[
    ("attn_norm", "layer.0.layer_norm"),
    ("attn_q", "layer.0.SelfAttention.q"),
    ("attn_k", "layer.0.SelfAttention.k"),
    ("attn_v", "layer.0.SelfAttention.v"),
    ("attn_rel_b", "layer.0.SelfAttention.relative_attention_bias"),
    ("attn_o", "layer.0.SelfAttention.o"),
    ("ffn_norm", "layer.1.layer_norm"),
    ("ffn_gate", "layer.1.DenseReluDense.wi_0"),
    ("ffn_up", "layer.1.DenseReluDense.wi_1"),
    ("ffn_down", "layer.1.DenseReluDense.wo"),
];
const OTHERS: Pairs = &[("token_embd", "shared"), ("enc.output_norm", "encoder.final_layer_norm")];

/// Rows for the names of a T5 encoder; none if they are those of transformers.
pub(super) fn encoder(names: &[&str]) -> Vec<Row> {
    let number = |name: &&str| name.strip_prefix("enc.blk.")?.split('.').next()?.parse().ok();
    let blocks: BTreeSet<usize> = names.iter().filter_map(number).collect();
    if blocks.is_empty() {
        return Vec::new();
    }
    let blocks = blocks.iter().map(|i| Row::new(format!("enc.blk.{i}"), format!("encoder.block.{i}"), BLOCK));
    let others = OTHERS.iter().map(|(file, here)| Row::new(*file, *here, &[]));
    blocks.chain(others).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::{Form, Spelling};

    /// As `gguf.get_tensor_name_map(MODEL_ARCH.T5ENCODER, 24)` of gguf 0.19.0 gives them.
    const NAMES: &[(&str, &str)] = &[
        ("token_embd", "shared"),
        ("enc.blk.0.attn_rel_b", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias"),
        ("enc.blk.23.attn_norm", "encoder.block.23.layer.0.layer_norm"),
        ("enc.blk.23.attn_q", "encoder.block.23.layer.0.SelfAttention.q"),
        ("enc.blk.23.attn_k", "encoder.block.23.layer.0.SelfAttention.k"),
        ("enc.blk.23.attn_v", "encoder.block.23.layer.0.SelfAttention.v"),
        ("enc.blk.23.attn_o", "encoder.block.23.layer.0.SelfAttention.o"),
        ("enc.blk.23.ffn_norm", "encoder.block.23.layer.1.layer_norm"),
        ("enc.blk.23.ffn_gate", "encoder.block.23.layer.1.DenseReluDense.wi_0"),
        ("enc.blk.23.ffn_up", "encoder.block.23.layer.1.DenseReluDense.wi_1"),
        ("enc.blk.23.ffn_down", "encoder.block.23.layer.1.DenseReluDense.wo"),
        ("enc.output_norm", "encoder.final_layer_norm"),
    ];

    #[test]
    fn names_are_those_of_the_gguf_package() {
        let files: Vec<String> = NAMES.iter().map(|n| format!("{}.weight", n.0)).collect();
        let names: Vec<&str> = files.iter().map(String::as_str).collect();
        let rows = encoder(&names);
        let spelling = Spelling::new("", rows);
        for (file, (_, here)) in files.iter().zip(NAMES) {
            let here = format!("{here}.weight");
            assert_eq!(spelling.file(&here), [file.as_str()]);
            assert_eq!(spelling.here(file), [(here, Form::Same)]);
        }
        assert_eq!(spelling.here("dec.blk.0.attn_q.weight"), []);
        assert!(encoder(&["shared.weight", "encoder.block.0.layer.0.layer_norm.weight"]).is_empty());
        // A great number asks for one row, not for as many.
        assert_eq!(encoder(&["enc.blk.18446744073709551615.attn_q.weight"]).len(), 3);
    }
}
