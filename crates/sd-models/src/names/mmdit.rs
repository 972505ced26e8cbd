//! Module paths of diffusers' Stable Diffusion 3, with those of Stability AI, which the network uses. Golden values:
//! `oracle/sd3.py`, whose places diffusers' own converter confirms.
//!
//! diffusers keeps the projections apart that the original joins, and `scale` before `shift` where a modulation has no
//! gate.

use std::collections::BTreeSet;

use super::{Form, Row};

const TOP: &[(&str, &str)] = &[
    ("pos_embed.pos_embed", "pos_embed"),
    ("pos_embed.proj", "x_embedder.proj"),
    ("time_text_embed.timestep_embedder.linear_1", "t_embedder.mlp.0"),
    ("time_text_embed.timestep_embedder.linear_2", "t_embedder.mlp.2"),
    ("time_text_embed.text_embedder.linear_1", "y_embedder.mlp.0"),
    ("time_text_embed.text_embedder.linear_2", "y_embedder.mlp.2"),
    ("context_embedder", "context_embedder"),
    ("proj_out", "final_layer.linear"),
];
const BLOCK: &[(&str, &str)] = &[
    ("norm1.linear", "x_block.adaLN_modulation.1"),
    ("attn.norm_q", "x_block.attn.ln_q"),
    ("attn.norm_k", "x_block.attn.ln_k"),
    ("attn.to_out.0", "x_block.attn.proj"),
    ("attn2.norm_q", "x_block.attn2.ln_q"),
    ("attn2.norm_k", "x_block.attn2.ln_k"),
    ("attn2.to_out.0", "x_block.attn2.proj"),
    ("ff.net.0.proj", "x_block.mlp.fc1"),
    ("ff.net.2", "x_block.mlp.fc2"),
    ("attn.norm_added_q", "context_block.attn.ln_q"),
    ("attn.norm_added_k", "context_block.attn.ln_k"),
    ("attn.to_add_out", "context_block.attn.proj"),
    ("ff_context.net.0.proj", "context_block.mlp.fc1"),
    ("ff_context.net.2", "context_block.mlp.fc2"),
];
/// Modules whose outputs are one module's here.
const JOINED: &[([&str; 3], &str)] = &[
    (["attn.to_q", "attn.to_k", "attn.to_v"], "x_block.attn.qkv"),
    (["attn2.to_q", "attn2.to_k", "attn2.to_v"], "x_block.attn2.qkv"),
    (["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"], "context_block.attn.qkv"),
];

/// Rows for the names of a transformer; none if they are the original ones.
pub(super) fn transformer(names: &[&str]) -> Vec<Row> {
    if !names.iter().any(|n| n.starts_with("pos_embed.proj.")) {
        return Vec::new();
    }
    let row = |file: String, here: String| Row::new(file, here, &[]);
    let mut rows: Vec<Row> = TOP.iter().map(|(file, here)| Row::new(*file, *here, &[])).collect();
    rows.push(row("norm_out.linear".into(), "final_layer.adaLN_modulation.1".into()).form(Form::Swap));
    let number = |n: &&str| n.strip_prefix("transformer_blocks.")?.split('.').next()?.parse().ok();
    let blocks: BTreeSet<usize> = names.iter().filter_map(number).collect();
    for i in &blocks {
        let (file, here) = (format!("transformer_blocks.{i}"), format!("joint_blocks.{i}"));
        rows.extend(BLOCK.iter().map(|(f, h)| row(format!("{file}.{f}"), format!("{here}.{h}"))));
        for (parts, h) in JOINED {
            let part = |(i, f)| row(format!("{file}.{f}"), format!("{here}.{h}")).form(Form::Part(i));
            rows.extend(parts.iter().enumerate().map(part));
        }
        // The last block changes no text.
        let form = if Some(i) == blocks.last() { Form::Swap } else { Form::Same };
        let (file, here) =
            (format!("{file}.norm1_context.linear"), format!("{here}.context_block.adaLN_modulation.1"));
        rows.push(row(file, here).form(form));
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Place, check_places};

    #[test]
    fn every_tensor_has_the_place_that_diffusers_gives_it() {
        let fixture: serde_json::Value =
            serde_json::from_str(include_str!("../../../../oracle/fixtures/sd3_names.json")).unwrap();
        for variant in ["sd3", "sd35_medium", "sd35_large"] {
            let places: Vec<Place> = serde_json::from_value(fixture[variant].clone()).unwrap();
            check_places(&places);
            let original: Vec<&str> = places.iter().map(|p| p.0.as_str()).collect();
            assert!(transformer(&original).is_empty());
        }
    }

    #[test]
    fn numbers_of_blocks_may_be_anything() {
        let names =
            ["pos_embed.proj.weight", "transformer_blocks.18446744073709551615.x", "transformer_blocks.x.y"];
        assert_eq!(transformer(&names).len(), TOP.len() + 1 + BLOCK.len() + 9 + 1);
    }
}
