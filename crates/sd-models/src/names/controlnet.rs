//! Module paths of ControlNets in diffusers' spelling. Golden values: `oracle/controlnet.py`, whose pairs of names
//! diffusers' own converter confirms.

use super::{Row, diffusers};

/// What may stand before the names of a ControlNet.
pub(crate) const PREFIXES: &[&str] = &["control_model.", "controlnet.", ""];

/// Names that only ControlNets of UNets have, in the original spelling and in diffusers'.
pub(crate) const MARKS: [&str; 2] = ["input_hint_block.", "controlnet_cond_embedding."];

/// Rows for the names of a ControlNet; none if they are the original ones.
pub(crate) fn rows(names: &[&str]) -> Vec<Row> {
    let mut rows = diffusers::unet(names);
    if rows.is_empty() {
        return rows;
    }
    let row = |file: String, here: String| Row::new(file, here, &[]);
    for i in diffusers::children(names, "controlnet_down_blocks.") {
        rows.push(row(format!("controlnet_down_blocks.{i}"), format!("zero_convs.{i}.0")));
    }
    rows.push(row("controlnet_mid_block".into(), "middle_block_out.0".into()));
    // A SiLU follows every convolution of the hint but the last.
    let inner = diffusers::children(names, "controlnet_cond_embedding.blocks.").len();
    let place = |i: usize| format!("input_hint_block.{}", 2 * i);
    rows.push(row("controlnet_cond_embedding.conv_in".into(), place(0)));
    rows.extend((0..inner).map(|i| row(format!("controlnet_cond_embedding.blocks.{i}"), place(i + 1))));
    rows.push(row("controlnet_cond_embedding.conv_out".into(), place(inner + 1)));
    rows
}

#[cfg(test)]
mod tests {
    use super::super::{Form, Spelling};
    use super::*;

    #[test]
    fn names_agree_with_diffusers_converter() {
        let fixture: serde_json::Value =
            serde_json::from_str(include_str!("../../../../oracle/fixtures/controlnet_names.json")).unwrap();
        let pairs: Vec<(String, String, Vec<usize>)> = serde_json::from_value(fixture["names"].clone()).unwrap();
        let files: Vec<&str> = pairs.iter().map(|p| p.0.as_str()).collect();
        let spelling = Spelling::new("", rows(&files));
        for (file, original, _) in &pairs {
            let here = original.strip_prefix(PREFIXES[0]).unwrap();
            assert_eq!(&spelling.file(here), std::slice::from_ref(file));
            assert_eq!(spelling.here(file), [(here.to_owned(), Form::Same)]);
        }
        let originals: Vec<&str> = pairs.iter().map(|p| p.1.as_str()).collect();
        assert!(rows(&originals).is_empty());
    }
}
