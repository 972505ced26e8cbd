//! The oracle's tiny SD 1.x as a single-file checkpoint.

use std::path::{Path, PathBuf};

use sd_core::convert::from_f32;
use sd_core::{DType, Shape};
use sd_io::{TensorSpec, write_safetensors};
use serde_json::Value;

use crate::support::{Fixture, json, procedural};

/// Writes the checkpoint as `name` into the folder for tests' files. `edit` sees every tensor's name and values.
pub(crate) fn write(name: &str, edit: impl FnMut(&str, &mut Vec<f32>)) -> PathBuf {
    write_with(name, &[], edit)
}

/// [`write`] with further vectors by name.
pub(crate) fn write_with(name: &str, more: &[(&str, Vec<f32>)], edit: impl FnMut(&str, &mut Vec<f32>)) -> PathBuf {
    write_reading(name, 4, more, edit)
}

/// [`write_with`] for a network that reads `channels` channels, 8 or 9 in `sd1_pictures.safetensors`.
pub(crate) fn write_reading(
    name: &str,
    channels: usize,
    more: &[(&str, Vec<f32>)],
    mut edit: impl FnMut(&str, &mut Vec<f32>),
) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let rule = Fixture::open("sd1_pipeline.safetensors").metadata("procedural");
    let names = json("sd1_names.json");
    let dims = |v: &Value| serde_json::from_value::<Vec<usize>>(v.clone()).unwrap();
    let mut specs = Vec::new();
    let mut made_from = Vec::new();
    let pictures = Fixture::open("sd1_pictures.safetensors").metadata("procedural");
    for row in names["names"].as_array().unwrap() {
        let (title, stored_name, mut shape) = (row[0].as_str().unwrap(), row[2].as_str().unwrap(), dims(&row[3]));
        let mut rule = &rule[title];
        if title == "unet.conv_in.weight" && channels != 4 {
            shape[1] = channels;
            rule = &pictures[format!("{}.{title}", if channels == 8 { "pix2pix" } else { "inpaint" })];
        }
        let (exponent, shift) = (rule[1].as_i64().unwrap() as i32, rule[2].as_f64().unwrap() as f32);
        // Matrices and kernels are exact in f16.
        let dtype = if shape.len() > 1 && shift == 0.0 { DType::F16 } else { DType::F32 };
        specs.push(TensorSpec { name: stored_name.into(), dtype, shape: Shape::new(&shape).unwrap() });
        made_from.push((title, exponent, shift));
    }
    for (name, values) in more {
        let shape = Shape::new(&[values.len()]).unwrap();
        specs.push(TensorSpec { name: (*name).into(), dtype: DType::F32, shape });
    }
    write_safetensors(&path, &[("format", "pt")], &specs, |spec| {
        if let Some((_, values)) = more.iter().find(|(name, _)| *name == spec.name) {
            return from_f32(spec.dtype, values, values.len());
        }
        let at = specs.iter().position(|s| s.name == spec.name).unwrap();
        let (title, exponent, shift) = made_from[at];
        let mut values = procedural(title, spec.shape.elements(), exponent, shift);
        edit(&spec.name, &mut values);
        from_f32(spec.dtype, &values, spec.shape.last())
    })
    .unwrap();
    path
}
