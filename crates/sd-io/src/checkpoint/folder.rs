//! Diffusers folders: a subfolder per component, each with weights and a JSON configuration.

use std::fs;
use std::path::{Path, PathBuf};

use sd_core::{Error, Result};
use serde_json::Value as Json;

use super::shards::add_index;
use super::sniff::{self, Kind};
use super::{Checkpoint, Format, listing};
use crate::file::{Access, SourceFile};
use crate::text::cut;

/// The longest configuration that is read.
const MAX_CONFIG: u64 = 1 << 20;

/// What the weights of a component are called, before the variant.
const NAMES: &[&str] = &["diffusion_pytorch_model", "model", "pytorch_model", "pytorch_lora_weights"];

/// The variants of weights, the first that exists counts.
const VARIANTS: &[&str] = &["", ".fp32", ".fp16", ".bf16", ".non_ema"];

/// How a file of weights ends, or the index of shards; `{}` is the variant, `EXT` one of [`EXTENSIONS`].
const ENDINGS: &[&str] = &["{}.EXT", ".EXT.index{}.json", "{}.EXT.index.json"];

/// The formats of weights, the one to be taken first.
const EXTENSIONS: &[&str] = &["safetensors", "bin"];

/// Weights for other programs.
const FOREIGN: &[(&str, &str)] = &[
    ("model.onnx", "ONNX"),
    ("openvino_model.xml", "OpenVINO"),
    ("diffusion_flax_model.msgpack", "Flax"),
    ("flax_model.msgpack", "Flax"),
    ("tf_model.h5", "TensorFlow"),
];

/// A component that judges finished pictures and that nothing here runs.
const UNUSED: &str = "safety_checker";

/// Opens a diffusers folder, or one component of it.
pub(crate) fn open(path: &Path, access: Access) -> Result<Checkpoint> {
    let mut out = Checkpoint::empty(path, Format::Folder);
    if let Some(weights) = weights_in(path)? {
        add_weights(&mut out, &weights, "", access)?;
        add_config(&mut out, "", &path.join("config.json"))?;
        return Ok(out);
    }
    for name in subfolders(path)? {
        let folder = path.join(&name);
        if name == UNUSED {
            continue;
        }
        if let Some(weights) = weights_in(&folder)? {
            add_weights(&mut out, &weights, &format!("{name}."), access)?;
        }
        add_config(&mut out, &name, &folder.join("config.json"))?;
        add_config(&mut out, &name, &folder.join("scheduler_config.json"))?;
    }
    if out.files.is_empty() {
        let found = contents(path)?;
        let hint = match found.first() {
            Some(file) => format!("give one of its files, such as {file}"),
            None if path.join("snapshots").is_dir() => {
                "this is a download cache; give a folder in its snapshots/".into()
            }
            None => "give a model file, or a folder with unet/, vae/ and text_encoder/".into(),
        };
        let held = if found.is_empty() { String::new() } else { format!("; it holds {}", found.join(", ")) };
        return Err(Error::bad_file(path, format!("no model in this folder{held}")).hint(hint));
    }
    add_config(&mut out, "model_index", &path.join("model_index.json"))?;
    Ok(out)
}

/// The weight file of a component's folder: safetensors before PyTorch, the full variant before smaller ones.
fn weights_in(folder: &Path) -> Result<Option<PathBuf>> {
    for extension in EXTENSIONS {
        for (variant, name) in VARIANTS.iter().flat_map(|v| NAMES.iter().map(move |n| (v, n))) {
            for ending in ENDINGS {
                let ending = ending.replace("{}", variant).replace("EXT", extension);
                let path = folder.join(format!("{name}{ending}"));
                if path.is_file() {
                    return Ok(Some(path));
                }
            }
        }
    }
    match FOREIGN.iter().find(|(name, _)| folder.join(name).is_file()) {
        Some((name, format)) => Err(Error::bad_file(folder.join(name), format!("weights for {format} only"))
            .hint("get the component as safetensors")),
        None => Ok(None),
    }
}

fn add_weights(out: &mut Checkpoint, weights: &Path, prefix: &str, access: Access) -> Result<()> {
    let file = SourceFile::open(weights, access)?;
    match sniff::kind(&file)? {
        Kind::Index => add_index(out, weights, prefix, access),
        kind => {
            let listing = listing(&file, kind)?;
            out.add(file, listing, prefix, &|_| true)
        }
    }
}

fn add_config(out: &mut Checkpoint, name: &str, path: &Path) -> Result<()> {
    if !path.is_file() {
        return Ok(());
    }
    let file = SourceFile::open(path, Access::Read)?;
    if file.len() > MAX_CONFIG {
        let what = format!("a configuration of {} bytes, at most {MAX_CONFIG} are read", file.len());
        return Err(Error::bad_file(path, what));
    }
    let json: Json = serde_json::from_slice(&file.prefix(file.len())?)
        .map_err(|e| Error::bad_file(path, format!("not JSON: {}", cut(&e.to_string(), 400))))?;
    out.configs.insert(name.to_owned(), json);
    Ok(())
}

/// The names of the folders in `path`, sorted, so that a folder opens the same way everywhere.
fn subfolders(path: &Path) -> Result<Vec<String>> {
    let mut out = Vec::new();
    for entry in fs::read_dir(path).map_err(|e| Error::io(path, e))? {
        let entry = entry.map_err(|e| Error::io(path, e))?;
        if entry.path().is_dir()
            && let Ok(name) = entry.file_name().into_string()
        {
            out.push(name);
        }
    }
    out.sort();
    Ok(out)
}

/// For the message about a folder without a model: the model files that lie in it.
fn contents(path: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(path).map_err(|e| Error::io(path, e))? {
        let entry = entry.map_err(|e| Error::io(path, e))?;
        let extension = entry.path().extension().map(|e| e.to_string_lossy().to_lowercase());
        if matches!(extension.as_deref(), Some("safetensors" | "gguf" | "ckpt" | "pt" | "pth" | "sft" | "bin")) {
            found.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    found.sort();
    found.truncate(5);
    Ok(found)
}
