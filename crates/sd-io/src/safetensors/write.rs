//! The streaming writer.

use std::ops::Deref;
use std::path::Path;

use sd_core::{Error, Result};

use super::{DTYPES, parse_safetensors};
use crate::atomic::{Atomic, Sink};
use crate::file::{Access, SourceFile};
use crate::listing::TensorSpec;
use crate::text::shown;

/// Writes a safetensors file: `metadata` pairs, then `tensors`, whose bytes `bytes` gives one tensor at a time.
///
/// The header lists the tensors in the order given. Their bytes are asked for and stored by falling element size, so
/// that each is aligned to its elements. The file gets its name once it is complete and its header reads back.
///
/// # Errors
/// A type the format lacks, a name given twice, bytes of another length than shape and type need, or the disk.
pub fn write_safetensors<B: Deref<Target = [u8]>>(
    path: impl AsRef<Path>,
    metadata: &[(&str, &str)],
    tensors: &[TensorSpec],
    mut bytes: impl FnMut(&TensorSpec) -> Result<B>,
) -> Result<()> {
    stream_safetensors(path.as_ref(), metadata, tensors, |spec, sink| sink.write(&bytes(spec)?))
}

/// [`write_safetensors`] for tensors whose bytes come in pieces: `fill` writes those of each to the sink.
///
/// # Errors
/// As [`write_safetensors`].
pub fn stream_safetensors(
    path: &Path,
    metadata: &[(&str, &str)],
    tensors: &[TensorSpec],
    mut fill: impl FnMut(&TensorSpec, &mut Sink<'_>) -> Result<()>,
) -> Result<()> {
    let mut order: Vec<(usize, &TensorSpec)> = tensors.iter().enumerate().collect();
    order.sort_by_key(|(_, t)| std::cmp::Reverse(t.dtype.block_bytes()));

    let mut ranges = vec![(0, 0); tensors.len()];
    let mut end = 0u64;
    for (i, t) in &order {
        let start = end;
        let size = t.bytes()?;
        end = end.checked_add(size).ok_or_else(|| Error::shape("the tensors together do not fit in a file"))?;
        if let Some(range) = ranges.get_mut(*i) {
            *range = (start, end);
        }
    }
    let header = header(metadata, tensors, &ranges)?;

    let mut out = Atomic::create(path)?;
    out.write(&(header.len() as u64).to_le_bytes())?;
    out.write(header.as_bytes())?;
    for (_, t) in order {
        Sink::fill(&mut out, t, &mut fill)?;
    }
    let len = 8 + header.len() as u64 + end;
    out.verify(|temp| verify(temp, path, len))?;
    out.commit()
}

/// The JSON header, padded with spaces to a multiple of 8 bytes.
fn header(metadata: &[(&str, &str)], tensors: &[TensorSpec], ranges: &[(u64, u64)]) -> Result<String> {
    let mut parts = Vec::with_capacity(tensors.len() + 1);
    if !metadata.is_empty() {
        let pairs: Result<Vec<String>> =
            metadata.iter().map(|(k, v)| Ok(format!("{}:{}", quoted(k)?, quoted(v)?))).collect();
        parts.push(format!("\"__metadata__\":{{{}}}", pairs?.join(",")));
    }
    for (t, (start, end)) in tensors.iter().zip(ranges) {
        let name = DTYPES.iter().find(|(_, d)| *d == t.dtype).map(|(n, _)| n);
        let name = name.ok_or_else(|| {
            Error::unsupported(format!("tensor {}: safetensors files cannot hold {}", shown(&t.name), t.dtype))
                .hint("write a GGUF file")
        })?;
        let (key, shape) = (quoted(&t.name)?, t.shape.dims());
        parts.push(format!("{key}:{{\"dtype\":\"{name}\",\"shape\":{shape:?},\"data_offsets\":[{start},{end}]}}"));
    }
    let mut json = format!("{{{}}}", parts.join(","));
    while !json.len().is_multiple_of(8) {
        json.push(' ');
    }
    Ok(json)
}

fn quoted(text: &str) -> Result<String> {
    serde_json::to_string(text).map_err(|e| Error::internal(format!("JSON of a string: {e}")))
}

fn verify(temp: &Path, path: &Path, len: u64) -> Result<()> {
    let file = SourceFile::open(temp, Access::Read)?;
    if file.len() != len {
        return Err(Error::bad_file(path, format!("{} bytes were written instead of {len}", file.len())));
    }
    let prefix = file.prefix(8)?;
    let header = super::header_len(&prefix, len).map_err(|e| Error::bad_file(path, e))?;
    parse_safetensors(path, &file.prefix(8 + header)?, len).map(drop)
}
