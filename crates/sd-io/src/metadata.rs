//! The key-value pairs a checkpoint carries beside its tensors.

use std::collections::HashMap;

use sd_core::{Error, Result};

use crate::text::shown;

/// A metadata value. Safetensors files hold strings only; GGUF files any of these.
#[allow(missing_docs)] // the names are GGUF's own
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    Array(Array),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// The element type of an [`Array`].
#[allow(missing_docs)] // the names are GGUF's own
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ArrayType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

/// An array as GGUF stores it: the elements back to back, little-endian; strings with a u64 length in front.
#[derive(Debug, Clone, PartialEq)]
pub struct Array {
    pub(crate) kind: ArrayType,
    pub(crate) len: u64,
    pub(crate) raw: Vec<u8>,
}

impl Value {
    /// The value as an unsigned integer, if it is a non-negative integer of any width.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Value::U8(v) => Some(v.into()),
            Value::U16(v) => Some(v.into()),
            Value::U32(v) => Some(v.into()),
            Value::U64(v) => Some(v),
            _ => u64::try_from(self.as_i64()?).ok(),
        }
    }

    /// The value as a signed integer, if it is an integer that fits.
    pub fn as_i64(&self) -> Option<i64> {
        match *self {
            Value::U8(v) => Some(v.into()),
            Value::I8(v) => Some(v.into()),
            Value::U16(v) => Some(v.into()),
            Value::I16(v) => Some(v.into()),
            Value::U32(v) => Some(v.into()),
            Value::I32(v) => Some(v.into()),
            Value::U64(v) => i64::try_from(v).ok(),
            Value::I64(v) => Some(v),
            _ => None,
        }
    }

    /// The value as a real number, if it is a float.
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            Value::F32(v) => Some(v.into()),
            Value::F64(v) => Some(v),
            _ => None,
        }
    }

    /// The value, if it is a truth value.
    pub fn as_bool(&self) -> Option<bool> {
        match *self {
            Value::Bool(v) => Some(v),
            _ => None,
        }
    }

    /// The value, if it is a string.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Value::String(v) => Some(v),
            _ => None,
        }
    }

    /// The value, if it is an array.
    pub fn as_array(&self) -> Option<&Array> {
        match self {
            Value::Array(v) => Some(v),
            _ => None,
        }
    }
}

impl Array {
    /// An array of strings.
    pub fn strings<S: AsRef<str>>(items: impl IntoIterator<Item = S>) -> Array {
        let (mut raw, mut len) = (Vec::new(), 0);
        for s in items {
            let s = s.as_ref();
            raw.extend_from_slice(&(s.len() as u64).to_le_bytes());
            raw.extend_from_slice(s.as_bytes());
            len += 1;
        }
        Array { kind: ArrayType::String, len, raw }
    }

    /// An array of f32.
    pub fn f32s(items: &[f32]) -> Array {
        let raw = items.iter().flat_map(|v| v.to_le_bytes()).collect();
        Array { kind: ArrayType::F32, len: items.len() as u64, raw }
    }

    /// The element type.
    pub fn kind(&self) -> ArrayType {
        self.kind
    }

    /// The number of elements.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The strings as raw bytes, borrowed; nothing for another element type. Strings in a file may hold any bytes.
    pub fn byte_strings(&self) -> impl Iterator<Item = &[u8]> {
        let mut rest: &[u8] = if self.kind == ArrayType::String { &self.raw } else { &[] };
        std::iter::from_fn(move || {
            let (len, tail) = rest.split_first_chunk::<8>()?;
            let (item, tail) = tail.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)?;
            rest = tail;
            Some(item)
        })
    }

    /// The elements as i64, if they are integers that fit.
    pub fn to_i64s(&self) -> Option<Vec<i64>> {
        fn each<const N: usize>(raw: &[u8], f: impl Fn([u8; N]) -> Option<i64>) -> Option<Vec<i64>> {
            raw.as_chunks::<N>().0.iter().map(|c| f(*c)).collect()
        }
        let raw = self.raw.as_slice();
        match self.kind {
            ArrayType::U8 => each(raw, |c| Some(u8::from_le_bytes(c).into())),
            ArrayType::I8 => each(raw, |c| Some(i8::from_le_bytes(c).into())),
            ArrayType::U16 => each(raw, |c| Some(u16::from_le_bytes(c).into())),
            ArrayType::I16 => each(raw, |c| Some(i16::from_le_bytes(c).into())),
            ArrayType::U32 => each(raw, |c| Some(u32::from_le_bytes(c).into())),
            ArrayType::I32 => each(raw, |c| Some(i32::from_le_bytes(c).into())),
            ArrayType::U64 => each(raw, |c| i64::try_from(u64::from_le_bytes(c)).ok()),
            ArrayType::I64 => each(raw, |c| Some(i64::from_le_bytes(c))),
            _ => None,
        }
    }

    /// The elements as f32, if they are floats; f64 is rounded.
    pub fn to_f32s(&self) -> Option<Vec<f32>> {
        match self.kind {
            ArrayType::F32 => Some(self.raw.as_chunks().0.iter().map(|c| f32::from_le_bytes(*c)).collect()),
            ArrayType::F64 => Some(self.raw.as_chunks().0.iter().map(|c| f64::from_le_bytes(*c) as f32).collect()),
            _ => None,
        }
    }
}

/// Key-value pairs in file order, each key once.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Metadata {
    entries: Vec<(String, Value)>,
    index: HashMap<String, usize>,
}

impl Metadata {
    /// Adds a pair; returns false and changes nothing when the key is there already.
    pub fn insert(&mut self, key: impl Into<String>, value: Value) -> bool {
        let key = key.into();
        if self.index.contains_key(&key) {
            return false;
        }
        self.index.insert(key.clone(), self.entries.len());
        self.entries.push((key, value));
        true
    }

    /// The value of `key`.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.entries.get(*self.index.get(key)?).map(|(_, v)| v)
    }

    /// The value of `key`, if it is a string.
    pub fn str(&self, key: &str) -> Option<&str> {
        self.get(key)?.as_str()
    }

    /// The strings of the array `key`, borrowed.
    ///
    /// # Errors
    /// The key holds something else, or a string is not UTF-8.
    pub fn strings(&self, key: &str) -> Result<Option<Vec<&str>>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let array = value.as_array().filter(|a| a.kind == ArrayType::String);
        let array = array.ok_or_else(|| wrong_type(key, "an array of strings"))?;
        let mut out = Vec::new();
        for (i, s) in array.byte_strings().enumerate() {
            let s = std::str::from_utf8(s);
            out.push(s.map_err(|e| Error::unsupported(format!("metadata {}[{i}]: {e}", shown(key))))?);
        }
        Ok(Some(out))
    }

    /// The floats of the array `key`.
    ///
    /// # Errors
    /// The key holds something else.
    pub fn f32s(&self, key: &str) -> Result<Option<Vec<f32>>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let values = value.as_array().and_then(Array::to_f32s);
        values.map(Some).ok_or_else(|| wrong_type(key, "an array of floats"))
    }

    /// The integers of the array `key`.
    ///
    /// # Errors
    /// The key holds something else, or a value that does not fit.
    pub fn i64s(&self, key: &str) -> Result<Option<Vec<i64>>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let values = value.as_array().and_then(Array::to_i64s);
        values.map(Some).ok_or_else(|| wrong_type(key, "an array of integers"))
    }

    /// The pairs in file order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(k, v)| (k.as_str(), v))
    }

    /// The number of pairs.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are no pairs.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

impl<K: Into<String>> FromIterator<(K, Value)> for Metadata {
    /// Of pairs with one key the first counts.
    fn from_iter<I: IntoIterator<Item = (K, Value)>>(pairs: I) -> Metadata {
        let mut out = Metadata::default();
        for (k, v) in pairs {
            out.insert(k, v);
        }
        out
    }
}

fn wrong_type(key: &str, want: &str) -> Error {
    Error::unsupported(format!("metadata {} is not {want}", shown(key)))
}
