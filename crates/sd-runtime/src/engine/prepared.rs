//! Weights that were converted for an earlier engine, kept in files, so that they are not converted again.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::hash::{Hash, Hasher};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::UNIX_EPOCH;

use flate2::Crc;
use sd_core::scope::Weight;
use sd_core::{Bytes, DType, Error, Origin, Result, Shape, TensorMeta, TypePolicy, WeightSource, convert};
use sd_io::{Checkpoint, TensorSpec, write_gguf};
use sd_models::{Component, Model, Part};

/// What the names of files begin with; another layout needs another.
const LAYOUT: &str = "sd-rs-2";
/// The tensor with the sums of all others, in their order.
const SUMS: &str = "sd-rs.checksums";
/// How many places of a checkpoint tell its contents, and how many bytes are read at each.
const PLACES: u64 = 256;
const READ: u64 = 4096;

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
        out.insert(component.part(), Arc::new(Checked::new(file)?));
    }
    Ok(out)
}

/// The file for these weights: its name tells apart types and parts, and files that were changed or replaced, by what is
/// read at places in them too. None if nothing is converted, or if the checkpoint is no file.
fn path(folder: &Path, component: &Component, converted: &[(&Weight, DType)]) -> Result<Option<PathBuf>> {
    let files: BTreeSet<&str> = converted.iter().map(|(w, _)| w.origin().file.as_str()).collect();
    let mut hash = Fnv::default();
    for file in &files {
        let Ok(data) = Path::new(file).metadata().and_then(|m| Ok((m.len(), m.modified()?))) else {
            return Ok(None);
        };
        let path = Path::new(file).canonicalize().map_err(|e| Error::io(file, e))?;
        sample(&path, data.0, &mut hash).map_err(|e| Error::io(file, e))?;
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

/// Tells `hash` what a file of `len` bytes has at places that are spread over it.
fn sample(path: &Path, len: u64, hash: &mut Fnv) -> std::io::Result<()> {
    let mut file = File::open(path)?;
    let mut block = Vec::new();
    for place in 0..PLACES {
        file.seek(SeekFrom::Start((len / PLACES).saturating_mul(place)))?;
        block.clear();
        (&mut file).take(READ).read_to_end(&mut block)?;
        hash.write(&block);
    }
    Ok(())
}

/// Whether a file has all of them, as a file that another program wrote or that was damaged may not.
fn holds(file: &Checkpoint, converted: &[(&Weight, DType)]) -> bool {
    file.meta(SUMS).is_some()
        && converted.iter().all(|(w, dtype)| {
            file.meta(w.name()).is_some_and(|m| m.dtype == *dtype && m.shape.elements() == w.shape().elements())
        })
}

fn write(path: &Path, component: &Component, converted: &[(&Weight, DType)]) -> Result<Checkpoint> {
    tracing::info!("converting the {} once; kept in {}", component.part().name(), path.display());
    let source = component.source();
    let mut specs: Vec<TensorSpec> = converted
        .iter()
        .map(|(w, dtype)| TensorSpec { name: w.name().to_owned(), dtype: *dtype, shape: w.shape() })
        .collect();
    specs.sort_by(|a, b| a.name.cmp(&b.name));
    specs.push(TensorSpec { name: SUMS.to_owned(), dtype: DType::I32, shape: Shape::new(&[converted.len()])? });
    let stored: BTreeMap<&str, &Weight> = converted.iter().map(|(w, _)| (w.name(), *w)).collect();
    let mut sums: Vec<u8> = Vec::new();
    write_gguf(path, &[], &specs, |spec| {
        if spec.name == SUMS {
            return Ok(std::mem::take(&mut sums));
        }
        let named = |e: Error| e.context(spec.name.clone());
        let weight = stored.get(spec.name.as_str()).ok_or_else(|| Error::internal("an unknown weight"))?;
        let values = convert::to_f32(weight.dtype(), &source.bytes(&spec.name)?.read()?, spec.shape.elements());
        let bytes = convert::from_f32(spec.dtype, &values.map_err(named)?, spec.shape.last()).map_err(named)?;
        sums.extend(sum(&bytes).to_le_bytes());
        Ok(bytes)
    })?;
    Checkpoint::open(path)
}

fn sum(bytes: &[u8]) -> u32 {
    let mut crc = Crc::new();
    crc.update(bytes);
    crc.sum()
}

/// Kept weights, each compared with its sum when it is first read.
struct Checked {
    file: Checkpoint,
    sums: BTreeMap<String, u32>,
    /// Those that were not read yet.
    unread: Mutex<BTreeSet<String>>,
}

impl Checked {
    fn new(file: Checkpoint) -> Result<Checked> {
        let mut names: Vec<&str> = file.names().into_iter().filter(|n| *n != SUMS).collect();
        names.sort_unstable();
        let bytes = file.bytes(SUMS)?;
        let sums = bytes.as_ref().as_chunks().0.iter().map(|sum| u32::from_le_bytes(*sum));
        let sums: BTreeMap<String, u32> = names.into_iter().map(str::to_owned).zip(sums).collect();
        let unread = Mutex::new(sums.keys().cloned().collect());
        Ok(Checked { file, sums, unread })
    }
}

impl WeightSource for Checked {
    fn names(&self) -> Vec<&str> {
        self.sums.keys().map(String::as_str).collect()
    }

    fn meta(&self, name: &str) -> Option<TensorMeta> {
        self.sums.get(name)?;
        self.file.meta(name)
    }

    fn bytes(&self, name: &str) -> Result<Bytes> {
        let bytes = self.file.bytes(name)?;
        let unread = |change: &dyn Fn(&mut BTreeSet<String>) -> bool| {
            change(&mut self.unread.lock().unwrap_or_else(PoisonError::into_inner))
        };
        if unread(&|names| names.contains(name)) {
            if self.sums.get(name) != Some(&sum(bytes.as_ref())) {
                let e = Error::bad_file(self.file.path(), format!("{name} is not what was written"));
                return Err(e.hint("the file was damaged; delete it, and it is made again"));
            }
            unread(&|names| names.remove(name));
        }
        Ok(bytes)
    }

    fn origin(&self, name: &str) -> Origin {
        self.file.origin(name)
    }
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
