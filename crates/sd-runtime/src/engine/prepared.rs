//! Weights that were converted for an earlier engine, kept in files, so that they are not converted again.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use sd_core::scope::Weight;
use sd_core::{DType, Error, Result, TypePolicy, WeightSource, convert};
use sd_io::{Checkpoint, TensorSpec, write_gguf};
use sd_models::{Component, Model, Part};

/// What the names of files begin with; another layout needs another.
const LAYOUT: &str = "sd-rs-1";

/// The weights of `model` that become quantised in memory, from files in `folder`, which are made where there are none. Not
/// those of the autoencoder: it may have to run with what the checkpoint holds. `types` are the network's.
///
/// # Errors
/// A weight cannot be read or converted, or a file cannot be written.
pub(super) fn prepared(
    folder: &Path,
    model: &Model,
    types: TypePolicy,
) -> Result<BTreeMap<Part, Arc<dyn WeightSource>>> {
    let mut out: BTreeMap<Part, Arc<dyn WeightSource>> = BTreeMap::new();
    for component in model.components().filter(|c| c.part() != Part::Autoencoder) {
        let weights = model.weights(component.part())?;
        let converted = weights.iter().map(|w| (w, types.memory_type(w, false)));
        let converted: Vec<(&Weight, DType)> =
            converted.filter(|(w, dtype)| dtype.is_quantised() && *dtype != w.dtype()).collect();
        let Some(path) = path(folder, component, &converted)? else { continue };
        let file = match Checkpoint::open(&path).ok().filter(|file| holds(file, &converted)) {
            Some(file) => file,
            None => write(&path, component, &converted)?,
        };
        out.insert(component.part(), Arc::new(file));
    }
    Ok(out)
}

/// The file for these weights: its name tells apart files that were changed, types and parts. None if nothing is
/// converted, or if the checkpoint is no file.
fn path(folder: &Path, component: &Component, converted: &[(&Weight, DType)]) -> Result<Option<PathBuf>> {
    let files: BTreeSet<&str> = converted.iter().map(|(w, _)| w.origin().file.as_str()).collect();
    let mut hash = Fnv::default();
    for file in &files {
        let Ok(data) = Path::new(file).metadata().and_then(|m| Ok((m.len(), m.modified()?))) else {
            return Ok(None);
        };
        let path = Path::new(file).canonicalize().map_err(|e| Error::io(file, e))?;
        (path, data.0, data.1.duration_since(UNIX_EPOCH).unwrap_or_default()).hash(&mut hash);
    }
    for (weight, dtype) in converted {
        (weight.name(), dtype, weight.dtype()).hash(&mut hash);
    }
    let Some(first) = files.first() else { return Ok(None) };
    let stem = Path::new(first).file_stem().unwrap_or_default().to_string_lossy();
    let part = component.part().name().replace(' ', "-");
    Ok(Some(folder.join(format!("{LAYOUT}-{stem}-{part}-{:016x}.gguf", hash.finish()))))
}

/// Whether a file has all of them, as a file that another program wrote or that was damaged may not.
fn holds(file: &Checkpoint, converted: &[(&Weight, DType)]) -> bool {
    converted.iter().all(|(w, dtype)| {
        file.meta(w.name()).is_some_and(|m| m.dtype == *dtype && m.shape.elements() == w.shape().elements())
    })
}

fn write(path: &Path, component: &Component, converted: &[(&Weight, DType)]) -> Result<Checkpoint> {
    tracing::info!("converting the {} once; kept in {}", component.part().name(), path.display());
    let source = component.source();
    let specs: Vec<TensorSpec> = converted
        .iter()
        .map(|(w, dtype)| TensorSpec { name: w.name().to_owned(), dtype: *dtype, shape: w.shape() })
        .collect();
    let stored: BTreeMap<&str, &Weight> = converted.iter().map(|(w, _)| (w.name(), *w)).collect();
    write_gguf(path, &[], &specs, |spec| {
        let named = |e: Error| e.context(spec.name.clone());
        let weight = stored.get(spec.name.as_str()).ok_or_else(|| Error::internal("an unknown weight"))?;
        let values = convert::to_f32(weight.dtype(), &source.bytes(&spec.name)?.read()?, spec.shape.elements());
        convert::from_f32(spec.dtype, &values.map_err(named)?, spec.shape.last()).map_err(named)
    })?;
    Checkpoint::open(path)
}

/// The hash of Fowler, Noll and Vo, which stays the same from one version of the standard library to the next.
struct Fnv(u64);

impl Default for Fnv {
    fn default() -> Fnv {
        Fnv(0xCBF2_9CE4_8422_2325)
    }
}

impl Hasher for Fnv {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0 = bytes.iter().fold(self.0, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01B3));
    }
}
