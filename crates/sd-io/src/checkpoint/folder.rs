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

/// The weight files of a component, the first that exists counts.
const WEIGHTS: &[&str] = &[
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
    "diffusion_pytorch_model.fp16.safetensors",
    "diffusion_pytorch_model.safetensors.index.fp16.json",
    "diffusion_pytorch_model.fp16.safetensors.index.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model.fp16.safetensors",
    "model.safetensors.index.fp16.json",
    "model.fp16.safetensors.index.json",
];

/// Weight files that are recognised and cannot be read.
const PICKLES: &[&str] = &[
    "diffusion_pytorch_model.bin",
    "diffusion_pytorch_model.fp16.bin",
    "pytorch_model.bin",
    "pytorch_model.fp16.bin",
    "pytorch_model.bin.index.json",
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
        return Err(Error::bad_file(path, format!("no model in this folder{}", contents(path)?))
            .hint("give a model file, or a folder with unet/, vae/ and text_encoder/"));
    }
    add_config(&mut out, "model_index", &path.join("model_index.json"))?;
    Ok(out)
}

/// The weight file of a component's folder.
fn weights_in(folder: &Path) -> Result<Option<PathBuf>> {
    let is_there = |name: &&&str| folder.join(name).is_file();
    if let Some(name) = WEIGHTS.iter().find(is_there) {
        return Ok(Some(folder.join(name)));
    }
    match PICKLES.iter().find(is_there) {
        Some(name) => Err(Error::bad_file(
            folder.join(name),
            "recognised as a PyTorch checkpoint, which is not supported yet",
        )
        .hint("convert it to safetensors")),
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
fn contents(path: &Path) -> Result<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(path).map_err(|e| Error::io(path, e))? {
        let entry = entry.map_err(|e| Error::io(path, e))?;
        let extension = entry.path().extension().map(|e| e.to_string_lossy().to_lowercase());
        if matches!(extension.as_deref(), Some("safetensors" | "gguf" | "ckpt" | "pt" | "pth" | "sft")) {
            found.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    found.sort();
    found.truncate(5);
    Ok(if found.is_empty() { String::new() } else { format!("; it holds {}", found.join(", ")) })
}
