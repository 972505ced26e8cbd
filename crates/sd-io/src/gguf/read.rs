//! The header parser.

use std::ops::Range;
use std::path::Path;

use sd_core::shape::MAX_RANK;
use sd_core::{DType, Error, Result, Shape, TensorMeta};

use super::cursor::{Cursor, Fault};
use super::{ALIGNMENT_KEY, DEFAULT_ALIGNMENT, MAGIC, ORIG_SHAPE_PREFIX};
use crate::listing::{Listing, TensorEntry, check_names, in_file_order, shape, size};
use crate::metadata::{Array, ArrayType, Metadata, Value};
use crate::text::shown;

/// Arrays of arrays deeper than this are refused; no known key has any.
const MAX_ARRAY_DEPTH: usize = 4;

/// The most tensors or pairs; the largest models have some thousands.
const MAX_COUNT: u64 = 1 << 20;

/// A key-value pair takes at least a key length, one character, a type and a value of one byte.
const MIN_PAIR: u64 = 8 + 1 + 4 + 1;

/// A tensor description takes at least a name length, a count of axes, a type and an offset.
const MIN_TENSOR: u64 = 8 + 4 + 4 + 8;

/// Numbers of types that ggml has withdrawn.
const WITHDRAWN: &[(u32, &str)] = &[
    (4, "q4_2"),
    (5, "q4_3"),
    (31, "q4_0_4_4"),
    (32, "q4_0_4_8"),
    (33, "q4_0_8_8"),
    (36, "iq4_nl_4_4"),
    (37, "iq4_nl_4_8"),
    (38, "iq4_nl_8_8"),
];

/// Reads the header of a GGUF file given as a whole.
///
/// Shapes are turned into row-major order. Where the metadata keep the shape a tensor had before it was flattened
/// to whole blocks, the tensor gets that shape; its elements are in the same order, and if its type is quantised the
/// last axis need not be whole blocks then.
///
/// # Errors
/// Anything malformed; the message names `path`, which is used for nothing else, and the tensor or key.
pub fn parse_gguf(path: &Path, bytes: &[u8]) -> Result<Listing> {
    match parse_prefix(path, bytes, bytes.len() as u64) {
        Ok(listing) => Ok(listing),
        Err(Needs::Error(e)) => Err(e),
        Err(Needs::More(_)) => Err(Error::internal("a whole file asked for more of itself")),
    }
}

/// Why a prefix did not parse.
pub(crate) enum Needs {
    /// The header goes on; the prefix must reach at least this far.
    More(u64),
    /// The file is wrong.
    Error(Error),
}

/// [`parse_gguf`] given only the first part of a file of `file_len` bytes.
pub(crate) fn parse_prefix(path: &Path, bytes: &[u8], file_len: u64) -> Result<Listing, Needs> {
    let header = header(&mut Cursor::new(bytes, file_len)).map_err(|fault| match fault {
        Fault::More(end) => Needs::More(end),
        Fault::Bad(what) => Needs::Error(Error::bad_file(path, what)),
    })?;
    check_names(path, &header.tensors).map_err(Needs::Error)?;
    in_file_order(path, &header.tensors).map_err(Needs::Error)?;
    Ok(header)
}

fn header(c: &mut Cursor<'_>) -> Result<Listing, Fault> {
    if c.array::<4>("magic")? != *MAGIC {
        return Err(Fault::Bad("does not start with GGUF".into()));
    }
    check_version(c.u32("version")?)?;
    let tensors = c.u64("tensor count")?;
    let pairs = c.u64("metadata count")?;
    for (what, count, least) in [("metadata entries", pairs, MIN_PAIR), ("tensors", tensors, MIN_TENSOR)] {
        check_count(what, count, least, c.remaining())?;
        if count > MAX_COUNT {
            return Err(Fault::Bad(format!("{count} {what}, at most {MAX_COUNT} are read")));
        }
    }

    let mut metadata = Metadata::default();
    for i in 0..pairs {
        let (key, value) = pair(c, i)?;
        if !metadata.insert(key, value) {
            return Err(Fault::Bad(format!("metadata key {} appears twice", shown(key))));
        }
    }
    let alignment = alignment(&metadata)?;

    let mut raw = Vec::new();
    for i in 0..tensors {
        raw.push(description(c, i)?);
    }
    let data = c.at().checked_next_multiple_of(alignment).unwrap_or(u64::MAX);
    let file_len = c.at() + c.remaining();

    let mut out = Vec::with_capacity(raw.len());
    for t in raw {
        let placed = place(&t, &metadata, alignment, data, file_len);
        let (meta, range) = placed.map_err(|what| format!("tensor {}: {what}", shown(t.name)))?;
        out.push(TensorEntry { name: t.name.to_owned(), meta, range });
    }
    Ok(Listing { tensors: out, metadata })
}

fn check_version(version: u32) -> Result<(), String> {
    match version {
        2 | 3 => Ok(()),
        1 => Err("GGUF version 1 is not supported; convert the file with a current program".into()),
        v if v.swap_bytes() <= 0xffff && v > 0xffff => {
            Err(format!("big-endian GGUF (version {}) is not supported", v.swap_bytes()))
        }
        v => Err(format!("GGUF version {v} is not known, only 2 and 3")),
    }
}

fn check_count(what: &str, count: u64, least: u64, remaining: u64) -> Result<(), String> {
    match count.checked_mul(least) {
        Some(n) if n <= remaining => Ok(()),
        _ => Err(format!("{count} {what} do not fit in the {remaining} bytes that follow")),
    }
}

fn alignment(metadata: &Metadata) -> Result<u64, String> {
    let Some(value) = metadata.get(ALIGNMENT_KEY) else { return Ok(DEFAULT_ALIGNMENT) };
    match value.as_u64() {
        Some(n) if n.is_power_of_two() => Ok(n),
        Some(n) => Err(format!("{ALIGNMENT_KEY} is {n}, which is not a power of two")),
        None => Err(format!("{ALIGNMENT_KEY} is not an unsigned integer")),
    }
}

fn pair<'a>(c: &mut Cursor<'a>, i: u64) -> Result<(&'a str, Value), Fault> {
    let key = c.utf8(&format!("key of metadata entry {i}"))?;
    if key.is_empty() {
        return Err(Fault::Bad(format!("metadata entry {i} has an empty key")));
    }
    let what = format!("metadata {}", shown(key));
    let kind = value_type(c, &what)?;
    Ok((key, value(c, kind, &what)?))
}

fn value_type(c: &mut Cursor<'_>, what: &str) -> Result<ArrayType, Fault> {
    let id = c.u32(what)?;
    ArrayType::from_id(id).ok_or_else(|| Fault::Bad(format!("{what} has unknown value type {id}")))
}

fn value(c: &mut Cursor<'_>, kind: ArrayType, what: &str) -> Result<Value, Fault> {
    Ok(match kind {
        ArrayType::U8 => Value::U8(u8::from_le_bytes(c.array(what)?)),
        ArrayType::I8 => Value::I8(i8::from_le_bytes(c.array(what)?)),
        ArrayType::U16 => Value::U16(u16::from_le_bytes(c.array(what)?)),
        ArrayType::I16 => Value::I16(i16::from_le_bytes(c.array(what)?)),
        ArrayType::U32 => Value::U32(c.u32(what)?),
        ArrayType::I32 => Value::I32(i32::from_le_bytes(c.array(what)?)),
        ArrayType::F32 => Value::F32(f32::from_le_bytes(c.array(what)?)),
        ArrayType::U64 => Value::U64(c.u64(what)?),
        ArrayType::I64 => Value::I64(i64::from_le_bytes(c.array(what)?)),
        ArrayType::F64 => Value::F64(f64::from_le_bytes(c.array(what)?)),
        ArrayType::Bool => match c.array::<1>(what)? {
            [0] => Value::Bool(false),
            [1] => Value::Bool(true),
            [b] => return Err(Fault::Bad(format!("{what} is a truth value of {b}"))),
        },
        // Free text such as a description; a stray byte in it does not make the tensors unusable.
        ArrayType::String => Value::String(String::from_utf8_lossy(c.string(what)?).into_owned()),
        ArrayType::Array => Value::Array(array(c, what)?),
    })
}

fn array(c: &mut Cursor<'_>, what: &str) -> Result<Array, Fault> {
    let kind = value_type(c, what)?;
    let len = c.u64(what)?;
    let mut start = *c;
    skip_elements(c, kind, len, what, 1)?;
    let raw = start.take(c.at() - start.at(), what)?.to_vec();
    Ok(Array { kind, len, raw })
}

fn skip_elements(c: &mut Cursor<'_>, kind: ArrayType, len: u64, what: &str, depth: usize) -> Result<(), Fault> {
    if let Some(size) = kind.fixed_size() {
        c.take(len.saturating_mul(size), what)?;
        return Ok(());
    }
    let least = if kind == ArrayType::String { 8 } else { 4 + 8 };
    check_count(&format!("elements of {what}"), len, least, c.remaining())?;
    if kind == ArrayType::Array && depth >= MAX_ARRAY_DEPTH {
        return Err(Fault::Bad(format!("{what} nests arrays deeper than {MAX_ARRAY_DEPTH}")));
    }
    for _ in 0..len {
        if kind == ArrayType::String {
            c.string(what)?;
        } else {
            let kind = value_type(c, what)?;
            let len = c.u64(what)?;
            skip_elements(c, kind, len, what, depth + 1)?;
        }
    }
    Ok(())
}

struct Description<'a> {
    name: &'a str,
    /// Row-major.
    dims: Vec<u64>,
    type_id: u32,
    offset: u64,
}

fn description<'a>(c: &mut Cursor<'a>, i: u64) -> Result<Description<'a>, Fault> {
    let name = c.utf8(&format!("name of tensor {i}"))?;
    let what = format!("tensor {}", shown(name));
    let axes = c.u32(&what)?;
    if axes as usize > MAX_RANK {
        return Err(Fault::Bad(format!("{what}: {axes} axes, at most {MAX_RANK} are supported")));
    }
    let mut dims = Vec::with_capacity(MAX_RANK);
    for _ in 0..axes {
        dims.push(c.u64(&what)?);
    }
    dims.reverse(); // the file has the fastest axis first
    Ok(Description { name, dims, type_id: c.u32(&what)?, offset: c.u64(&what)? })
}

fn place(
    t: &Description<'_>,
    metadata: &Metadata,
    alignment: u64,
    data: u64,
    file_len: u64,
) -> Result<(TensorMeta, Range<u64>), String> {
    let dtype = dtype(t.type_id)?;
    let stored = shape(&t.dims)?;
    let bytes = size(dtype, &stored)?;
    if !t.offset.is_multiple_of(alignment) {
        return Err(format!("offset {} is not a multiple of the alignment {alignment}", t.offset));
    }
    let start = data.checked_add(t.offset);
    let end = start.and_then(|s| s.checked_add(bytes));
    let range = match (start, end) {
        _ if bytes == 0 => 0..0,
        (Some(start), Some(end)) if end <= file_len => start..end,
        _ => {
            let (offset, room) = (t.offset, file_len.saturating_sub(data));
            let what = format!("{stored} {dtype} takes {bytes} bytes at offset {offset} of the data");
            return Err(format!("{what}, which has {room}; the file is cut off or damaged"));
        }
    };
    let shape = original_shape(metadata, t.name, stored)?;
    Ok((TensorMeta { shape, dtype }, range))
}

fn dtype(id: u32) -> Result<DType, String> {
    if let Some(dtype) = DType::from_ggml_id(id) {
        return Ok(dtype);
    }
    Err(match WITHDRAWN.iter().find(|(n, _)| *n == id) {
        Some((_, name)) => format!("type {name} was withdrawn from GGUF; quantise the model anew"),
        None => format!("unknown type {id}"),
    })
}

/// The shape before flattening, from the metadata, in row-major order.
fn original_shape(metadata: &Metadata, name: &str, stored: Shape) -> Result<Shape, String> {
    let key = format!("{ORIG_SHAPE_PREFIX}{name}");
    let Some(value) = metadata.get(&key) else { return Ok(stored) };
    let key = shown(&key);
    let dims = value.as_array().filter(|a| a.len() <= MAX_RANK as u64).and_then(Array::to_i64s);
    let dims: Option<Vec<u64>> = dims.and_then(|d| d.into_iter().map(|n| u64::try_from(n).ok()).collect());
    let dims = dims.ok_or_else(|| format!("{key} is not an array of at most {MAX_RANK} axis sizes"))?;
    let original = shape(&dims)?;
    if original.elements() != stored.elements() {
        return Err(format!("{key} is {original}, the file has {stored}"));
    }
    Ok(original)
}
