//! The safetensors format: a u64 little-endian header length, a JSON header, the tensors.
//! Source: the format section of the safetensors documentation.

mod header;
mod write;

use std::path::Path;

use sd_core::{DType, Error, Result, TensorMeta};

use crate::form::Form;
use crate::listing::{Listing, TensorEntry, check_names, in_file_order, shape, size};
use crate::metadata::{Metadata, Value};
use crate::text::{cut, shown};

pub use write::{stream_safetensors, write_safetensors};

/// The longest header that is read, the limit of the format's own library.
const MAX_HEADER: u64 = 100_000_000;

/// The dtypes of the format that have a [`DType`], by the name the format gives them; the first name of a type is the
/// one that is written.
const DTYPES: &[(&str, DType)] = &[
    ("F64", DType::F64),
    ("F32", DType::F32),
    ("F16", DType::F16),
    ("BF16", DType::BF16),
    ("F8_E4M3", DType::F8E4M3),
    ("F8_E5M2", DType::F8E5M2),
    ("I64", DType::I64),
    ("I32", DType::I32),
    ("I16", DType::I16),
    ("I8", DType::I8),
    ("U8", DType::U8),
    ("BOOL", DType::Bool),
    // Exponents, which are looked at byte by byte.
    ("F8_E8M0", DType::U8),
];

/// Reads the header of a safetensors file given the whole file, or at least its header, and its length.
///
/// # Errors
/// Anything about the header that is not exactly as the format wants it; the message names `path`, which is used
/// for nothing else, and the tensor.
pub fn parse_safetensors(path: &Path, bytes: &[u8], file_len: u64) -> Result<Listing> {
    let bad = |what: String| Error::bad_file(path, what);
    let len = header_len(bytes, file_len).map_err(bad)?;
    let json = usize::try_from(len).ok().and_then(|n| bytes.get(8..)?.get(..n));
    let json = json.ok_or_else(|| bad(format!("header of {len} bytes is cut off")))?;
    let text = std::str::from_utf8(json).map_err(|e| bad(format!("header is not UTF-8: {e}")))?;
    let header = header::parse(text).map_err(|e| bad(format!("header: {}", cut(&e.to_string(), 400))))?;

    let data = 8 + len;
    let mut tensors = Vec::with_capacity(header.tensors.len());
    for (name, info) in header.tensors {
        let entry = entry(name, &info, data, file_len);
        tensors.push(entry.map_err(|(name, what)| bad(format!("tensor {}: {what}", shown(&name))))?);
    }
    check_names(path, &tensors)?;
    check_no_gaps(path, &tensors, data, file_len)?;

    let mut metadata = Metadata::default();
    for (key, value) in header.metadata {
        let name = shown(&key);
        if !metadata.insert(key, Value::String(value)) {
            return Err(bad(format!("metadata key {name} appears twice")));
        }
    }
    Ok(Listing { tensors, metadata })
}

/// The length of the JSON header, or why it cannot be right.
pub(crate) fn header_len(bytes: &[u8], file_len: u64) -> Result<u64, String> {
    let Some(len) = bytes.first_chunk().map(|b| u64::from_le_bytes(*b)) else {
        return Err(format!("a safetensors file starts with an 8-byte length, the file has {file_len} bytes"));
    };
    let room = file_len.saturating_sub(8);
    if len > room {
        return Err(format!(
            "header of {len} bytes does not fit in the {room} that follow; the file is cut off or damaged"
        ));
    }
    if len > MAX_HEADER {
        return Err(format!("header of {len} bytes is longer than the {MAX_HEADER} the format allows"));
    }
    Ok(len)
}

fn entry(name: String, info: &header::Info, data: u64, file_len: u64) -> Result<TensorEntry, (String, String)> {
    match place(info, data, file_len) {
        Ok((meta, range)) => Ok(TensorEntry { name, meta, range, form: Form::default() }),
        Err(what) => Err((name, what)),
    }
}

fn place(info: &header::Info, data: u64, file_len: u64) -> Result<(TensorMeta, std::ops::Range<u64>), String> {
    let found = DTYPES.iter().find(|(n, _)| *n == info.dtype);
    let &(_, dtype) = found.ok_or_else(|| {
        let known: Vec<&str> = DTYPES.iter().map(|d| d.0).collect();
        format!("dtype {} is not supported, only {}", shown(&info.dtype), known.join(", "))
    })?;
    if info.axes > info.shape.len() {
        return Err(format!("{} axes, at most {} are supported", info.axes, sd_core::shape::MAX_RANK));
    }
    let shape = shape(&info.shape)?;
    let (start, end) = info.offsets;
    if start > end {
        return Err(format!("data_offsets [{start}, {end}] are reversed"));
    }
    let room = file_len.saturating_sub(data);
    if end > room {
        return Err(format!(
            "data_offsets [{start}, {end}] leave the {room} bytes of data; the file is cut off or damaged"
        ));
    }
    let (want, got) = (size(dtype, &shape)?, end - start);
    if want != got {
        return Err(format!("{shape} {dtype} takes {want} bytes, data_offsets [{start}, {end}] hold {got}"));
    }
    Ok((TensorMeta { shape, dtype }, data + start..data + end))
}

/// The format wants tensors back to back from the first byte of data to the last of the file.
fn check_no_gaps(path: &Path, tensors: &[TensorEntry], data: u64, file_len: u64) -> Result<()> {
    let mut at = data;
    for t in in_file_order(path, tensors)? {
        if t.range.start != at {
            let what = format!("{} unused bytes before tensor {}", t.range.start - at, shown(&t.name));
            return Err(Error::bad_file(path, what));
        }
        at = t.range.end;
    }
    if at != file_len {
        let what = format!("{} unused bytes after the last tensor", file_len.saturating_sub(at));
        return Err(Error::bad_file(path, what));
    }
    Ok(())
}
