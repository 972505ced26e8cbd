//! Module paths of diffusers' Flux.1, with those of Black Forest Labs, which the network uses. Golden values:
//! `oracle/flux.py`, whose places diffusers' own converter confirms.
//!
//! diffusers keeps the projections apart that the original joins, and `scale` before `shift` in the last modulation.

use std::collections::BTreeSet;

use super::{Form, Row};

type Pairs = &'static [(&'static str, &'static str)];

const SAME: Pairs = &[];
const EMBEDDER: Pairs = &[("linear_1", "in_layer"), ("linear_2", "out_layer")];
const NORM: Pairs = &[("weight", "scale")];
const TOP: &[(&str, &str, Pairs)] = &[
    ("x_embedder", "img_in", SAME),
    ("context_embedder", "txt_in", SAME),
    ("time_text_embed.timestep_embedder", "time_in", EMBEDDER),
    ("time_text_embed.text_embedder", "vector_in", EMBEDDER),
    ("time_text_embed.guidance_embedder", "guidance_in", EMBEDDER),
    ("proj_out", "final_layer.linear", SAME),
];
const DOUBLE: &[(&str, &str, Pairs)] = &[
    ("norm1.linear", "img_mod.lin", SAME),
    ("norm1_context.linear", "txt_mod.lin", SAME),
    ("attn.norm_q", "img_attn.norm.query_norm", NORM),
    ("attn.norm_k", "img_attn.norm.key_norm", NORM),
    ("attn.norm_added_q", "txt_attn.norm.query_norm", NORM),
    ("attn.norm_added_k", "txt_attn.norm.key_norm", NORM),
    ("attn.to_out.0", "img_attn.proj", SAME),
    ("attn.to_add_out", "txt_attn.proj", SAME),
    ("ff.net.0.proj", "img_mlp.0", SAME),
    ("ff.net.2", "img_mlp.2", SAME),
    ("ff_context.net.0.proj", "txt_mlp.0", SAME),
    ("ff_context.net.2", "txt_mlp.2", SAME),
];
const SINGLE: &[(&str, &str, Pairs)] = &[
    ("norm.linear", "modulation.lin", SAME),
    ("attn.norm_q", "norm.query_norm", NORM),
    ("attn.norm_k", "norm.key_norm", NORM),
    ("proj_out", "linear2", SAME),
];
/// Modules whose outputs are one module's here.
const DOUBLE_JOINED: &[(&[&str], &str)] = &[
    (&["attn.to_q", "attn.to_k", "attn.to_v"], "img_attn.qkv"),
    (&["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"], "txt_attn.qkv"),
];
const SINGLE_JOINED: &[(&[&str], &str)] = &[(&["attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"], "linear1")];

/// Rows for the names of a transformer; none if they are the original ones.
pub(super) fn transformer(names: &[&str]) -> Vec<Row> {
    let single = children(names, "single_transformer_blocks.");
    if single.is_empty() {
        return Vec::new();
    }
    let mut rows: Vec<Row> = TOP.iter().map(|&(file, here, inside)| Row::new(file, here, inside)).collect();
    rows.push(Row::new("norm_out.linear", "final_layer.adaLN_modulation.1", SAME).form(Form::Swap));
    for i in children(names, "transformer_blocks.") {
        block(&mut rows, &format!("transformer_blocks.{i}"), &format!("double_blocks.{i}"), DOUBLE, DOUBLE_JOINED);
    }
    for i in single {
        let file = format!("single_transformer_blocks.{i}");
        block(&mut rows, &file, &format!("single_blocks.{i}"), SINGLE, SINGLE_JOINED);
    }
    rows
}

fn block(rows: &mut Vec<Row>, file: &str, here: &str, modules: &[(&str, &str, Pairs)], joined: &[(&[&str], &str)]) {
    rows.extend(
        modules.iter().map(|(f, h, inside)| Row::new(format!("{file}.{f}"), format!("{here}.{h}"), inside)),
    );
    for (parts, h) in joined {
        let part = |(i, f)| Row::new(format!("{file}.{f}"), format!("{here}.{h}"), SAME).form(Form::Part(i));
        rows.extend(parts.iter().enumerate().map(part));
    }
}

/// The numbers directly below `prefix`.
fn children(names: &[&str], prefix: &str) -> BTreeSet<usize> {
    names.iter().filter_map(|n| n.strip_prefix(prefix)?.split('.').next()?.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Place, check_places};

    fn places() -> Vec<Place> {
        let fixture: serde_json::Value =
            serde_json::from_str(include_str!("../../../../oracle/fixtures/flux_names.json")).unwrap();
        serde_json::from_value(fixture["names"].clone()).unwrap()
    }

    #[test]
    fn every_tensor_has_the_place_that_diffusers_gives_it() {
        let places = places();
        check_places(&places);
        let original: Vec<&str> = places.iter().map(|p| p.0.as_str()).collect();
        assert!(transformer(&original).is_empty());
    }

    #[test]
    fn numbers_of_blocks_may_be_anything() {
        let names =
            ["single_transformer_blocks.18446744073709551615.norm.linear.weight", "transformer_blocks.x.attn"];
        assert_eq!(transformer(&names).len(), TOP.len() + 1 + SINGLE.len() + 4);
    }
}
