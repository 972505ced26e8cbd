//! The streaming writer.

use std::ops::Deref;
use std::path::Path;

use sd_core::{Error, Result};

use super::{ALIGNMENT_KEY, DEFAULT_ALIGNMENT, MAGIC};
use crate::atomic::{Atomic, Sink};
use crate::file::{Access, SourceFile};
use crate::listing::TensorSpec;
use crate::metadata::Value;
use crate::text::shown;

/// Writes a GGUF file, version 3: `metadata` pairs, then `tensors`, whose bytes `bytes` gives one tensor at a time,
/// in order. The file gets its name once it is complete and its header reads back.
///
/// # Errors
/// A type that GGUF lacks, a name or key given twice, bytes of another length than shape and type need, or the disk.
pub fn write_gguf<B: Deref<Target = [u8]>>(
    path: impl AsRef<Path>,
    metadata: &[(&str, Value)],
    tensors: &[TensorSpec],
    mut bytes: impl FnMut(&TensorSpec) -> Result<B>,
) -> Result<()> {
    stream_gguf(path.as_ref(), metadata, tensors, |spec, sink| sink.write(&bytes(spec)?))
}

/// [`write_gguf`] for tensors whose bytes come in pieces: `fill` writes those of each to the sink.
///
/// # Errors
/// As [`write_gguf`].
pub fn stream_gguf(
    path: &Path,
    metadata: &[(&str, Value)],
    tensors: &[TensorSpec],
    mut fill: impl FnMut(&TensorSpec, &mut Sink<'_>) -> Result<()>,
) -> Result<()> {
    let alignment = match metadata.iter().find(|(k, _)| *k == ALIGNMENT_KEY).map(|(_, v)| v.as_u64()) {
        None => DEFAULT_ALIGNMENT,
        Some(Some(n)) if n.is_power_of_two() => n,
        Some(_) => return Err(Error::request(format!("{ALIGNMENT_KEY} must be a power of two"))),
    };
    let (header, data_len) = header(metadata, tensors, alignment)?;

    let mut out = Atomic::create(path)?;
    out.write(&header)?;
    let mut at = header.len() as u64;
    pad(&mut out, &mut at, alignment)?;
    let len = at + data_len;
    for t in tensors {
        at += Sink::fill(&mut out, t, &mut fill)?;
        pad(&mut out, &mut at, alignment)?;
    }
    out.verify(|temp| {
        let file = SourceFile::open(temp, Access::Read)?;
        if file.len() != len {
            return Err(Error::bad_file(path, format!("{} bytes were written instead of {len}", file.len())));
        }
        super::listing(&file, path).map(drop)
    })?;
    out.commit()
}

/// Everything before the data, unpadded, and the length of the padded data.
fn header(metadata: &[(&str, Value)], tensors: &[TensorSpec], alignment: u64) -> Result<(Vec<u8>, u64)> {
    let mut h = MAGIC.to_vec();
    h.extend_from_slice(&3u32.to_le_bytes());
    h.extend_from_slice(&(tensors.len() as u64).to_le_bytes());
    h.extend_from_slice(&(metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        string(&mut h, key);
        h.extend_from_slice(&value.kind().id().to_le_bytes());
        put(&mut h, value);
    }
    let too_long = || Error::shape("the tensors together do not fit in a file");
    let mut offset = 0u64;
    for t in tensors {
        let id = t.dtype.ggml_id().ok_or_else(|| {
            Error::unsupported(format!("tensor {}: GGUF files cannot hold {}", shown(&t.name), t.dtype))
                .hint("write a safetensors file or convert the tensor")
        })?;
        string(&mut h, &t.name);
        h.extend_from_slice(&(t.shape.rank() as u32).to_le_bytes());
        for &d in t.shape.dims().iter().rev() {
            h.extend_from_slice(&(d as u64).to_le_bytes());
        }
        h.extend_from_slice(&id.to_le_bytes());
        h.extend_from_slice(&offset.to_le_bytes());
        let end = offset.checked_add(t.bytes()?).and_then(|n| n.checked_next_multiple_of(alignment));
        offset = end.ok_or_else(too_long)?;
    }
    Ok((h, offset))
}

fn string(h: &mut Vec<u8>, s: &str) {
    h.extend_from_slice(&(s.len() as u64).to_le_bytes());
    h.extend_from_slice(s.as_bytes());
}

fn put(h: &mut Vec<u8>, value: &Value) {
    match value {
        Value::U8(v) => h.push(*v),
        Value::I8(v) => h.extend_from_slice(&v.to_le_bytes()),
        Value::U16(v) => h.extend_from_slice(&v.to_le_bytes()),
        Value::I16(v) => h.extend_from_slice(&v.to_le_bytes()),
        Value::U32(v) => h.extend_from_slice(&v.to_le_bytes()),
        Value::I32(v) => h.extend_from_slice(&v.to_le_bytes()),
        Value::F32(v) => h.extend_from_slice(&v.to_le_bytes()),
        Value::U64(v) => h.extend_from_slice(&v.to_le_bytes()),
        Value::I64(v) => h.extend_from_slice(&v.to_le_bytes()),
        Value::F64(v) => h.extend_from_slice(&v.to_le_bytes()),
        Value::Bool(v) => h.push((*v).into()),
        Value::String(v) => string(h, v),
        Value::Array(v) => {
            h.extend_from_slice(&v.kind.id().to_le_bytes());
            h.extend_from_slice(&v.len.to_le_bytes());
            h.extend_from_slice(&v.raw);
        }
    }
}

fn pad(out: &mut Atomic, at: &mut u64, alignment: u64) -> Result<()> {
    const ZEROS: [u8; 4096] = [0; 4096];
    let mut left = at.next_multiple_of(alignment) - *at;
    while left > 0 {
        let n = usize::try_from(left).unwrap_or(usize::MAX).min(ZEROS.len());
        out.write(ZEROS.get(..n).unwrap_or_default())?;
        left -= n as u64;
        *at += n as u64;
    }
    Ok(())
}
