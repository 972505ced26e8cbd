//! Module paths of OpenCLIP's text encoders inside original checkpoints, with those of transformers, which the network
//! uses. Golden values: `oracle/clip_text.py`, whose places diffusers' own converter confirms.

use std::collections::BTreeSet;

use super::{Form, Row};

const TOP: &[(&str, &str)] = &[
    ("token_embedding", "text_model.embeddings.token_embedding"),
    ("positional_embedding", "text_model.embeddings.position_embedding.weight"),
    ("ln_final", "text_model.final_layer_norm"),
];
const LAYER: &[(&str, &str)] = &[
    ("ln_1", "layer_norm1"),
    ("ln_2", "layer_norm2"),
    ("attn.out_proj", "self_attn.out_proj"),
    ("mlp.c_fc", "mlp.fc1"),
    ("mlp.c_proj", "mlp.fc2"),
];
/// The projections that are stored as one.
const PROJECTIONS: [&str; 3] = ["q_proj", "k_proj", "v_proj"];

/// Rows for the names of an encoder; `None` if they are not OpenCLIP's.
pub(super) fn encoder(names: &[&str]) -> Option<Vec<Row>> {
    let number = |name: &&str| name.strip_prefix("transformer.resblocks.")?.split('.').next()?.parse().ok();
    let layers: BTreeSet<usize> = names.iter().filter_map(number).collect();
    if layers.is_empty() {
        return None;
    }
    let mut rows: Vec<Row> = TOP.iter().map(|&(file, here)| Row::new(file, here, &[])).collect();
    // OpenCLIP multiplies by this matrix from the right.
    rows.push(Row::new("text_projection", "text_projection.weight", &[]).form(Form::Transpose));
    for i in layers {
        let (file, here) = (format!("transformer.resblocks.{i}"), format!("text_model.encoder.layers.{i}"));
        rows.extend(LAYER.iter().map(|(f, h)| Row::new(format!("{file}.{f}"), format!("{here}.{h}"), &[])));
        for kind in ["weight", "bias"] {
            for (part, name) in PROJECTIONS.iter().enumerate() {
                let row =
                    Row::new(format!("{file}.attn.in_proj_{kind}"), format!("{here}.self_attn.{name}.{kind}"), &[]);
                rows.push(row.form(Form::Slice { part, of: PROJECTIONS.len() }));
            }
        }
    }
    Some(rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::{Part, Spelling, part_of};

    #[test]
    fn every_tensor_has_the_place_that_diffusers_gives_it() {
        let fixture: serde_json::Value =
            serde_json::from_str(include_str!("../../../../oracle/fixtures/open_clip_names.json")).unwrap();
        let places: Vec<(String, Vec<usize>, String, Vec<String>)> =
            serde_json::from_value(fixture["names"].clone()).unwrap();
        let prefix = "conditioner.embedders.1.model.";
        let bare: Vec<&str> = places.iter().map(|p| p.0.strip_prefix(prefix).unwrap()).collect();
        let spelling = Spelling::detect(Part::ClipG, prefix, &bare);
        for (file, _, operation, sources) in &places {
            assert_eq!(part_of(file, None), Some((Part::ClipG, prefix)));
            let here = spelling.here(file);
            assert_eq!(here.iter().map(|h| &h.0).collect::<Vec<_>>(), sources.iter().collect::<Vec<_>>());
            for (i, (name, form)) in here.iter().enumerate() {
                let want = match operation.as_str() {
                    "same" => Form::Same,
                    "rows" => Form::Slice { part: i, of: 3 },
                    "transpose" => Form::Transpose,
                    other => panic!("{other}"),
                };
                assert_eq!((*form, spelling.file(name)), (want, vec![file.clone()]), "{name}");
            }
        }
        let here: Vec<&str> = places.iter().flat_map(|p| &p.3).map(String::as_str).collect();
        assert!(encoder(&here).is_none());
    }
}
