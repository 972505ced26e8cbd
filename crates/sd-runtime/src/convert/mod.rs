//! Checkpoints written again: other types, another format, one file of several, other names.

mod rules;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;

use sd_core::{Bytes, CancelToken, DType, Error, Result, TensorMeta, WeightSource, convert, convert::Workers};
use sd_io::{Access, Importance, Sink, TensorSpec, Value, stream_gguf, stream_safetensors};
use sd_models::{Bundle, Files};

use crate::files::ModelFiles;

pub use rules::{Choice, TypeRules};

/// Elements that are converted at once: what bounds the memory, next to one tensor as it is stored.
const CHUNK: usize = 1 << 22;
/// A key of GGUF that says how the file it is in is laid out.
const ALIGNMENT: &str = "general.alignment";

/// A conversion to do.
#[derive(Debug, Clone)]
pub struct Conversion {
    /// What to read.
    pub files: ModelFiles,
    /// What to write: a safetensors file if it ends in `.safetensors`, else a GGUF file.
    pub output: PathBuf,
    /// Which tensor gets which type.
    pub types: TypeRules,
    /// Whether tensors get the names and layouts that the networks use.
    pub rename: bool,
    /// Which columns of weights matter, by the names that the networks use. Quantised types keep these closest.
    pub importance: Importance,
    /// CPU threads; 0 for one per processor. The file does not depend on it.
    pub threads: usize,
}

/// What a conversion did.
#[derive(Debug, Clone, PartialEq)]
pub struct Converted {
    /// Bytes of tensors that were read.
    pub read: u64,
    /// Tensors and bytes that were written, by type.
    pub written: BTreeMap<DType, (usize, u64)>,
    /// Tensors that were quantised with regard to the importance of their columns.
    pub weighted: usize,
    /// Tensors that kept their type though the rules named another, by reason.
    pub kept: BTreeMap<&'static str, usize>,
}

impl Conversion {
    /// Reads, converts and writes tensor by tensor. The output appears under its name when it is complete and its
    /// header reads back. `progress` is told the bytes written so far and those to be written.
    ///
    /// # Errors
    /// No file is given, a file is no model, a tensor has values or a type that the format or the new type does not have,
    /// the disk, cancellation.
    pub fn run(&self, progress: &mut dyn FnMut(u64, u64), cancel: &CancelToken) -> Result<Converted> {
        if self.files.is_empty() {
            return Err(Error::request("nothing to convert: give a checkpoint or a part of one"));
        }
        let files = self.files.open(Access::Read)?;
        let bundle = Bundle::new(&files, self.rename)?;
        let (specs, converted) = self.plan(&bundle)?;
        let total = converted.written.values().map(|(_, bytes)| bytes).sum();
        let mut done = 0;
        let workers = Workers::new(self.threads)?;
        let mut write = |spec: &TensorSpec, sink: &mut Sink<'_>| {
            cancel.check()?;
            self.write_tensor(&bundle, spec, &workers, cancel, sink)?;
            done += spec.bytes()?;
            progress(done, total);
            Ok(())
        };
        let metadata = metadata(&files);
        if self.is_safetensors() {
            let texts = metadata.iter().filter_map(|(key, value)| Some((key.as_str(), value.as_str()?)));
            stream_safetensors(&self.output, &texts.collect::<Vec<_>>(), &specs, &mut write)?;
        } else {
            let pairs: Vec<(&str, Value)> = metadata.iter().map(|(k, v)| (k.as_str(), v.clone())).collect();
            stream_gguf(&self.output, &pairs, &specs, &mut write)?;
        }
        Ok(converted)
    }

    fn is_safetensors(&self) -> bool {
        self.output.extension().is_some_and(|e| e.eq_ignore_ascii_case("safetensors"))
    }

    /// What is written, and the report of it.
    fn plan(&self, bundle: &Bundle) -> Result<(Vec<TensorSpec>, Converted)> {
        let mut converted = Converted { read: 0, written: BTreeMap::new(), weighted: 0, kept: BTreeMap::new() };
        let mut specs = Vec::new();
        for rule in self.types.unmatched(&bundle.names()) {
            tracing::warn!("--tensor-type-rules: {rule:?} is found in no tensor's name");
        }
        for name in bundle.names() {
            let meta = bundle.meta(name).ok_or_else(|| Error::internal(format!("no tensor {name}")))?;
            let dtype = match self.types.choose(name, &meta) {
                Choice::Type(dtype) => dtype,
                Choice::Kept(why) => {
                    *converted.kept.entry(why).or_default() += 1;
                    meta.dtype
                }
            };
            // GGUF lacks 8-bit floats; each of their values is one of f16 too.
            let narrow = matches!(dtype, DType::F8E4M3 | DType::F8E5M2) && !self.is_safetensors();
            let dtype = if narrow { DType::F16 } else { dtype };
            if dtype != meta.dtype
                && let Some(scale) = scale_of(name, bundle)
            {
                return Err(Error::unsupported(format!(
                    "{name}: {} values with a scale, {scale}, cannot be converted to {dtype}",
                    meta.dtype
                ))
                .hint(if narrow {
                    "write a .safetensors file, or add --convert-name"
                } else {
                    "leave out --type"
                }));
            }
            if dtype != meta.dtype && dtype.is_quantised() {
                let importance = self.importance_of(bundle, name, &meta)?;
                converted.weighted += usize::from(importance.is_some());
                if importance.is_none() && convert::needs_importance(dtype) {
                    let known = bundle.known(name);
                    return Err(Error::request(format!("{name}: {dtype} wants to know which columns matter"))
                        .hint(format!(
                            "give an importance matrix with {known} (--imat-in), or another type by a rule"
                        )));
                }
            }
            let spec = TensorSpec { name: name.to_owned(), dtype, shape: meta.shape };
            let bytes = spec.bytes()?;
            converted.read += bytes_of(&meta);
            let (count, sum) = converted.written.entry(dtype).or_default();
            *count += 1;
            *sum += bytes;
            specs.push(spec);
        }
        Ok((specs, converted))
    }
}

fn bytes_of(meta: &TensorMeta) -> u64 {
    meta.dtype.bytes(meta.shape.elements(), meta.shape.last()).unwrap_or(0) as u64
}

/// The tensor that scales the values of `name`, if there is one.
fn scale_of(name: &str, bundle: &Bundle) -> Option<String> {
    let stem = name.strip_suffix(".weight").unwrap_or(name);
    let names = [".scale_weight", ".weight_scale", ".weight_scale_inv", ".weight.scale", ".comfy_quant"]
        .map(|end| format!("{stem}{end}"));
    names.into_iter().find(|n| bundle.meta(n).is_some())
}

/// Key-value pairs of the files; of several with one key the first.
fn metadata(files: &Files) -> Vec<(String, Value)> {
    let mut out: Vec<(String, Value)> = Vec::new();
    for file in files.model.iter().chain(files.parts.values()) {
        for (key, value) in file.metadata().iter().filter(|(key, _)| *key != ALIGNMENT) {
            if !out.iter().any(|(k, _)| k == key) {
                out.push((key.to_owned(), value.clone()));
            }
        }
    }
    out
}

impl Conversion {
    /// The importance of a tensor's columns, if there is any.
    fn importance_of(&self, bundle: &Bundle, name: &str, meta: &TensorMeta) -> Result<Option<Vec<f32>>> {
        let known = bundle.known(name);
        let Some(columns) = self.importance.columns(known) else { return Ok(None) };
        if columns.len() == meta.shape.last() {
            return Ok(Some(columns));
        }
        let what =
            format!("{known}: the importance matrix has {} columns, {name} is {}", columns.len(), meta.shape);
        Err(Error::request(what).hint("it was collected with another model"))
    }

    fn write_tensor(
        &self,
        bundle: &Bundle,
        spec: &TensorSpec,
        workers: &Workers,
        cancel: &CancelToken,
        sink: &mut Sink<'_>,
    ) -> Result<()> {
        let named = |e: Error| e.context(spec.name.clone());
        let meta = bundle.meta(&spec.name).ok_or_else(|| Error::internal(format!("no tensor {}", spec.name)))?;
        let stored = bundle.bytes(&spec.name)?;
        let part = |range: Range<usize>| -> Result<Bytes> {
            cancel.check()?;
            stored.slice(range).ok_or_else(|| Error::internal("a part of a tensor"))?.read()
        };
        let len = stored.len();
        let parts = |step: usize| (0..len).step_by(step).map(move |at| at..len.min(at + step)).map(&part);
        if meta.dtype == spec.dtype {
            return parts(CHUNK).try_for_each(|part| sink.write(&part?));
        }
        let importance =
            if spec.dtype.is_quantised() { self.importance_of(bundle, &spec.name, &meta)? } else { None };
        let (row, elements) = (meta.shape.last(), meta.shape.elements());
        // Rows of some files are not whole blocks; such a tensor is converted in one piece.
        let rows = (CHUNK / row.max(1)).max(1);
        let (chunk, bytes) = match meta.dtype.bytes(row * rows, row) {
            Some(bytes) if bytes > 0 => (row * rows, bytes),
            _ => (elements, stored.len().max(1)),
        };
        let mut left = elements;
        for part in parts(bytes) {
            let part = part?;
            let count = left.min(chunk);
            left -= count;
            let converted = workers.run(|| {
                let values = convert::to_f32(meta.dtype, &part, count)?;
                match &importance {
                    Some(importance) => convert::from_f32_weighted(spec.dtype, &values, row, importance),
                    None => convert::from_f32(spec.dtype, &values, row),
                }
            });
            sink.write(&converted.map_err(named)?)?;
        }
        Ok(())
    }
}
