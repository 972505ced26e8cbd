//! The header parser.

use std::ops::Range;
use std::path::Path;

use sd_core::shape::MAX_RANK;
use sd_core::{DType, Error, Result, Shape, TensorMeta};

use super::{ALIGNMENT_KEY, DEFAULT_ALIGNMENT, MAGIC, ORIG_SHAPE_PREFIX, endian};
use crate::cursor::{Cursor, Fault, read_growing};
use crate::file::SourceFile;
use crate::form::Form;
use crate::listing::{Listing, TensorEntry, check_names, in_file_order, shape, size};
use crate::metadata::{Array, ArrayType, Metadata, Value};
use crate::text::shown;

/// The longest header that is read; the largest vocabularies take some tens of MB.
const MAX_HEADER: u64 = 256 << 20;

/// Arrays of arrays deeper than this are refused; no known key has any.
const MAX_ARRAY_DEPTH: usize = 4;

/// The most tensors or pairs; the largest models have some thousands.
const MAX_COUNT: u64 = 1 << 20;

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
    match header(Cursor::new(bytes, bytes.len() as u64)) {
        Ok(listing) => check(path, listing),
        Err(Fault::Bad(what)) => Err(Error::bad_file(path, what)),
        Err(Fault::More(_)) => Err(Error::internal("a whole file asked for more of itself")),
    }
}

/// The header of a file, read piece by piece until it is complete; messages call the file `path`.
pub(crate) fn listing(file: &SourceFile, path: &Path) -> Result<Listing> {
    check(path, read_growing(file, path, MAX_HEADER, "header", header)?)
}

fn check(path: &Path, listing: Listing) -> Result<Listing> {
    check_names(path, &listing.tensors)?;
    in_file_order(path, &listing.tensors)?;
    Ok(listing)
}

/// A reader of a file whose version is known: version 1 has 32-bit lengths and counts where later ones have 64-bit.
struct Reader<'a> {
    c: Cursor<'a>,
    narrow: bool,
}

impl<'a> Reader<'a> {
    /// A length, a count or an axis.
    fn count(&mut self, what: &str) -> Result<u64, Fault> {
        if self.narrow { self.c.u32(what).map(u64::from) } else { self.c.u64(what) }
    }

    /// A string: its length and that many bytes.
    fn string(&mut self, what: &str) -> Result<&'a [u8], Fault> {
        let len = self.count(what)?;
        self.c.take(len, what)
    }

    /// A string that must be UTF-8.
    fn utf8(&mut self, what: &str) -> Result<&'a str, Fault> {
        let bytes = self.string(what)?;
        std::str::from_utf8(bytes).map_err(|e| Fault::Bad(format!("{what} is not UTF-8: {e}")))
    }

    /// The bytes a count takes.
    fn width(&self) -> u64 {
        if self.narrow { 4 } else { 8 }
    }
}

fn header(mut c: Cursor<'_>) -> Result<Listing, Fault> {
    if c.array::<4>("magic")? != *MAGIC {
        return Err(Fault::Bad("does not start with GGUF".into()));
    }
    let version = version(&mut c)?;
    let r = &mut Reader { c, narrow: version == 1 };
    let tensors = r.count("tensor count")?;
    let pairs = r.count("metadata count")?;
    // A pair takes at least a key length, one character, a type and a value of one byte; a description a name length,
    // a count of axes, a type and an offset.
    let (pair_least, tensor_least) = (r.width() + 1 + 4 + 1, r.width() + 4 + 4 + 8);
    for (what, count, least) in [("metadata entries", pairs, pair_least), ("tensors", tensors, tensor_least)] {
        check_count(what, count, least, r.c.remaining())?;
        if count > MAX_COUNT {
            return Err(Fault::Bad(format!("{count} {what}, at most {MAX_COUNT} are read")));
        }
    }

    let mut metadata = Metadata::default();
    for i in 0..pairs {
        let (key, value) = pair(r, i)?;
        if !metadata.insert(key, value) {
            return Err(Fault::Bad(format!("metadata key {} appears twice", shown(key))));
        }
    }
    let alignment = alignment(&metadata)?;

    let mut raw = Vec::new();
    for i in 0..tensors {
        raw.push(description(r, i)?);
    }
    let data = r.c.at().checked_next_multiple_of(alignment).unwrap_or(u64::MAX);
    let file_len = r.c.at() + r.c.remaining();
    let big_endian = r.c.is_big_endian();

    let mut out = Vec::with_capacity(raw.len());
    for t in raw {
        let placed = place(&t, &metadata, alignment, data, file_len);
        let (meta, range) = placed.map_err(|what| format!("tensor {}: {what}", shown(t.name)))?;
        let form = if big_endian { endian::form(meta.dtype) } else { Ok(Form::default()) };
        let form = form.map_err(|what| format!("tensor {}: {what}", shown(t.name)))?;
        out.push(TensorEntry { name: t.name.to_owned(), meta, range, form });
    }
    Ok(Listing { tensors: out, metadata })
}

/// The version, after which the cursor knows the byte order of the file.
fn version(c: &mut Cursor<'_>) -> Result<u32, Fault> {
    let mut version = c.u32("version")?;
    if version.swap_bytes() <= 0xffff && version > 0xffff {
        c.set_big_endian();
        version = version.swap_bytes();
    }
    match version {
        1..=3 => Ok(version),
        v => Err(Fault::Bad(format!("GGUF version {v} is not known, only 1 to 3"))),
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

fn pair<'a>(r: &mut Reader<'a>, i: u64) -> Result<(&'a str, Value), Fault> {
    let key = r.utf8(&format!("key of metadata entry {i}"))?;
    if key.is_empty() {
        return Err(Fault::Bad(format!("metadata entry {i} has an empty key")));
    }
    let what = format!("metadata {}", shown(key));
    let kind = value_type(r, &what)?;
    Ok((key, value(r, kind, &what)?))
}

fn value_type(r: &mut Reader<'_>, what: &str) -> Result<ArrayType, Fault> {
    let id = r.c.u32(what)?;
    ArrayType::from_id(id).ok_or_else(|| Fault::Bad(format!("{what} has unknown value type {id}")))
}

fn value(r: &mut Reader<'_>, kind: ArrayType, what: &str) -> Result<Value, Fault> {
    Ok(match kind {
        ArrayType::U8 => Value::U8(u8::from_le_bytes(r.c.number(what)?)),
        ArrayType::I8 => Value::I8(i8::from_le_bytes(r.c.number(what)?)),
        ArrayType::U16 => Value::U16(u16::from_le_bytes(r.c.number(what)?)),
        ArrayType::I16 => Value::I16(i16::from_le_bytes(r.c.number(what)?)),
        ArrayType::U32 => Value::U32(u32::from_le_bytes(r.c.number(what)?)),
        ArrayType::I32 => Value::I32(i32::from_le_bytes(r.c.number(what)?)),
        ArrayType::F32 => Value::F32(f32::from_le_bytes(r.c.number(what)?)),
        ArrayType::U64 => Value::U64(u64::from_le_bytes(r.c.number(what)?)),
        ArrayType::I64 => Value::I64(i64::from_le_bytes(r.c.number(what)?)),
        ArrayType::F64 => Value::F64(f64::from_le_bytes(r.c.number(what)?)),
        ArrayType::Bool => match r.c.u8(what)? {
            0 => Value::Bool(false),
            1 => Value::Bool(true),
            b => return Err(Fault::Bad(format!("{what} is a truth value of {b}"))),
        },
        // Free text such as a description; a stray byte in it does not make the tensors unusable.
        ArrayType::String => Value::String(String::from_utf8_lossy(r.string(what)?).into_owned()),
        ArrayType::Array => Value::Array(array(r, what)?),
    })
}

fn array(r: &mut Reader<'_>, what: &str) -> Result<Array, Fault> {
    let kind = value_type(r, what)?;
    let len = r.count(what)?;
    let mut raw = Vec::new();
    elements(r, kind, len, what, 1, &mut raw)?;
    Ok(Array { kind, len, raw })
}

/// Appends `len` elements as [`Array`] keeps them, whatever the version and the byte order of the file.
fn elements(
    r: &mut Reader<'_>,
    kind: ArrayType,
    len: u64,
    what: &str,
    depth: usize,
    raw: &mut Vec<u8>,
) -> Result<(), Fault> {
    if let Some(size) = kind.fixed_size() {
        let part = r.c.take(len.saturating_mul(size), what)?;
        let start = raw.len();
        raw.extend_from_slice(part);
        if r.c.is_big_endian() {
            let added = raw.get_mut(start..).unwrap_or_default();
            added.chunks_exact_mut(usize::try_from(size).unwrap_or(1)).for_each(<[u8]>::reverse);
        }
        return Ok(());
    }
    let least = if kind == ArrayType::String { r.width() } else { 4 + r.width() };
    check_count(&format!("elements of {what}"), len, least, r.c.remaining())?;
    if kind == ArrayType::Array && depth >= MAX_ARRAY_DEPTH {
        return Err(Fault::Bad(format!("{what} nests arrays deeper than {MAX_ARRAY_DEPTH}")));
    }
    for _ in 0..len {
        if kind == ArrayType::String {
            let text = r.string(what)?;
            raw.extend_from_slice(&(text.len() as u64).to_le_bytes());
            raw.extend_from_slice(text);
        } else {
            let kind = value_type(r, what)?;
            let len = r.count(what)?;
            raw.extend_from_slice(&kind.id().to_le_bytes());
            raw.extend_from_slice(&len.to_le_bytes());
            elements(r, kind, len, what, depth + 1, raw)?;
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

fn description<'a>(r: &mut Reader<'a>, i: u64) -> Result<Description<'a>, Fault> {
    let name = r.utf8(&format!("name of tensor {i}"))?;
    let what = format!("tensor {}", shown(name));
    let axes = r.c.u32(&what)?;
    if axes as usize > MAX_RANK {
        return Err(Fault::Bad(format!("{what}: {axes} axes, at most {MAX_RANK} are supported")));
    }
    let mut dims = Vec::with_capacity(MAX_RANK);
    for _ in 0..axes {
        dims.push(r.count(&what)?);
    }
    dims.reverse(); // the file has the fastest axis first
    Ok(Description { name, dims, type_id: r.c.u32(&what)?, offset: r.c.u64(&what)? })
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
