//! The GGUF format, versions 1 to 3, of either byte order: counts, key-value pairs, tensor descriptions, aligned data.
//! Source: `docs/gguf.md` of ggml.

mod endian;
mod read;
mod tokenizer;
mod write;

pub(crate) use read::listing;
pub use read::parse_gguf;
pub use tokenizer::EmbeddedTokenizer;
pub use write::{stream_gguf, write_gguf};

use crate::metadata::{ArrayType, Value};

/// The first bytes of every file.
pub(crate) const MAGIC: &[u8; 4] = b"GGUF";

/// Tensor data starts at a multiple of this, unless the file says otherwise.
const DEFAULT_ALIGNMENT: u64 = 32;

/// The key under which a file says otherwise.
const ALIGNMENT_KEY: &str = "general.alignment";

/// Keys that start so give the shape a tensor had before a converter flattened it to whole blocks.
const ORIG_SHAPE_PREFIX: &str = "comfy.gguf.orig_shape.";

/// The value types in the order of their numbers.
const TYPES: [ArrayType; 13] = [
    ArrayType::U8,
    ArrayType::I8,
    ArrayType::U16,
    ArrayType::I16,
    ArrayType::U32,
    ArrayType::I32,
    ArrayType::F32,
    ArrayType::Bool,
    ArrayType::String,
    ArrayType::Array,
    ArrayType::U64,
    ArrayType::I64,
    ArrayType::F64,
];

impl ArrayType {
    fn from_id(id: u32) -> Option<ArrayType> {
        TYPES.get(usize::try_from(id).ok()?).copied()
    }

    fn id(self) -> u32 {
        TYPES.iter().zip(0..).find(|(t, _)| **t == self).map_or(0, |(_, id)| id)
    }

    /// Bytes of one value; `None` for those without a fixed size.
    fn fixed_size(self) -> Option<u64> {
        match self {
            ArrayType::U8 | ArrayType::I8 | ArrayType::Bool => Some(1),
            ArrayType::U16 | ArrayType::I16 => Some(2),
            ArrayType::U32 | ArrayType::I32 | ArrayType::F32 => Some(4),
            ArrayType::U64 | ArrayType::I64 | ArrayType::F64 => Some(8),
            ArrayType::String | ArrayType::Array => None,
        }
    }
}

impl Value {
    fn kind(&self) -> ArrayType {
        match self {
            Value::U8(_) => ArrayType::U8,
            Value::I8(_) => ArrayType::I8,
            Value::U16(_) => ArrayType::U16,
            Value::I16(_) => ArrayType::I16,
            Value::U32(_) => ArrayType::U32,
            Value::I32(_) => ArrayType::I32,
            Value::F32(_) => ArrayType::F32,
            Value::Bool(_) => ArrayType::Bool,
            Value::String(_) => ArrayType::String,
            Value::Array(_) => ArrayType::Array,
            Value::U64(_) => ArrayType::U64,
            Value::I64(_) => ArrayType::I64,
            Value::F64(_) => ArrayType::F64,
        }
    }
}
