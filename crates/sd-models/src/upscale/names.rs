//! How files spell the names of an RRDBNet: as Real-ESRGAN, which is the spelling used here, as BSRGAN, or as the
//! original ESRGAN, which numbers its layers. Golden values: `oracle/upscale.py`.

use std::collections::BTreeSet;

use crate::names::{Row, Spelling};

const DENSE: &[(&str, &str)] =
    &[("conv1.0", "conv1"), ("conv2.0", "conv2"), ("conv3.0", "conv3"), ("conv4.0", "conv4"), ("conv5.0", "conv5")];
const SAME: &[(&str, &str)] = &[];

/// The spelling of a file with these names.
pub(super) fn spelling(names: &[&str]) -> Spelling {
    let rows = if names.contains(&"model.0.weight") {
        original(names)
    } else if names.contains(&"trunk_conv.weight") {
        bsrgan(names)
    } else {
        Vec::new()
    };
    Spelling::new("", rows)
}

fn original(names: &[&str]) -> Vec<Row> {
    let mut rows = Vec::new();
    for block in children(names, "model.1.sub.") {
        let file = format!("model.1.sub.{block}");
        if names.iter().any(|n| n.strip_prefix(&file).is_some_and(|rest| rest.starts_with(".RDB"))) {
            rows.extend((1..=3).map(|k| Row::new(format!("{file}.RDB{k}"), format!("body.{block}.rdb{k}"), DENSE)));
        } else {
            rows.push(Row::new(file, "conv_body", SAME));
        }
    }
    // The first layer, an upsampling one for each doubling, and the last two.
    let mut layers: Vec<usize> = children(names, "model.").into_iter().filter(|layer| *layer != 1).collect();
    let ends = [layers.pop().map(|layer| (layer, "conv_last")), layers.pop().map(|layer| (layer, "conv_hr"))];
    let place =
        |(i, layer): (usize, usize)| (layer, if i == 0 { "conv_first".into() } else { format!("conv_up{i}") });
    let first = layers.into_iter().enumerate().map(place);
    let ends = ends.into_iter().flatten().map(|(layer, here)| (layer, here.to_owned()));
    rows.extend(first.chain(ends).map(|(layer, here)| Row::new(format!("model.{layer}"), here, SAME)));
    rows
}

fn bsrgan(names: &[&str]) -> Vec<Row> {
    let mut rows = vec![Row::new("trunk_conv", "conv_body", SAME), Row::new("HRconv", "conv_hr", SAME)];
    rows.extend(["conv_first", "conv_last"].map(|same| Row::new(same, same, SAME)));
    for block in children(names, "RRDB_trunk.") {
        let dense = |k| Row::new(format!("RRDB_trunk.{block}.RDB{k}"), format!("body.{block}.rdb{k}"), SAME);
        rows.extend((1..=3).map(dense));
    }
    let upsamplers = names.iter().filter_map(|n| n.strip_prefix("upconv")?.strip_suffix(".weight"));
    rows.extend(upsamplers.map(|i| Row::new(format!("upconv{i}"), format!("conv_up{i}"), SAME)));
    rows
}

/// The numbers directly below `prefix`.
fn children(names: &[&str], prefix: &str) -> BTreeSet<usize> {
    names.iter().filter_map(|n| n.strip_prefix(prefix)?.split('.').next()?.parse().ok()).collect()
}
