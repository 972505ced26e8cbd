//! The JSON header, read in one pass: duplicate keys are kept for the caller to refuse, over-long shapes are
//! counted and not stored, and nothing nests deeper than the format does.

use std::fmt;

use sd_core::shape::MAX_RANK;
use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::text::shown;

/// The header, keys in file order.
#[derive(Default)]
pub(crate) struct Header {
    pub(crate) tensors: Vec<(String, Info)>,
    pub(crate) metadata: Vec<(String, String)>,
}

/// What the header says of one tensor.
pub(crate) struct Info {
    pub(crate) dtype: String,
    /// The first [`MAX_RANK`] axes.
    pub(crate) shape: Vec<u64>,
    /// How many axes there are.
    pub(crate) axes: usize,
    pub(crate) offsets: (u64, u64),
}

pub(crate) fn parse(json: &str) -> Result<Header, serde_json::Error> {
    serde_json::from_str(json)
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Header, D::Error> {
        d.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Header;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
        let mut header = Header::default();
        let mut has_metadata = false;
        while let Some(key) = map.next_key::<String>()? {
            if key == "__metadata__" {
                if std::mem::replace(&mut has_metadata, true) {
                    return Err(A::Error::custom("__metadata__ appears twice"));
                }
                let found = map.next_value::<Option<Strings>>();
                header.metadata =
                    found.map_err(|e| A::Error::custom(format!("__metadata__: {e}")))?.unwrap_or_default().0;
            } else {
                let info = map.next_value::<Info>();
                let info = info.map_err(|e| A::Error::custom(format!("tensor {}: {e}", shown(&key))))?;
                header.tensors.push((key, info));
            }
        }
        Ok(header)
    }
}

impl<'de> Deserialize<'de> for Info {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Info, D::Error> {
        d.deserialize_map(InfoVisitor)
    }
}

struct InfoVisitor;

impl<'de> Visitor<'de> for InfoVisitor {
    type Value = Info;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with dtype, shape and data_offsets")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Info, A::Error> {
        let (mut dtype, mut shape, mut offsets) = (None, None, None);
        let twice = |key: &str| A::Error::custom(format!("{key} appears twice"));
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "dtype" if dtype.is_some() => return Err(twice("dtype")),
                "dtype" => dtype = Some(map.next_value::<String>()?),
                "shape" if shape.is_some() => return Err(twice("shape")),
                "shape" => shape = Some(map.next_value::<Axes>()?),
                "data_offsets" if offsets.is_some() => return Err(twice("data_offsets")),
                "data_offsets" => offsets = Some(map.next_value::<(u64, u64)>()?),
                _ => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        let shape: Axes = shape.ok_or_else(|| A::Error::missing_field("shape"))?;
        Ok(Info {
            dtype: dtype.ok_or_else(|| A::Error::missing_field("dtype"))?,
            shape: shape.first,
            axes: shape.count,
            offsets: offsets.ok_or_else(|| A::Error::missing_field("data_offsets"))?,
        })
    }
}

struct Axes {
    first: Vec<u64>,
    count: usize,
}

impl<'de> Deserialize<'de> for Axes {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Axes, D::Error> {
        d.deserialize_seq(AxesVisitor)
    }
}

struct AxesVisitor;

impl<'de> Visitor<'de> for AxesVisitor {
    type Value = Axes;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of axis sizes")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Axes, A::Error> {
        let mut axes = Axes { first: Vec::with_capacity(MAX_RANK), count: 0 };
        while let Some(size) = seq.next_element::<u64>()? {
            if axes.count < MAX_RANK {
                axes.first.push(size);
            }
            axes.count += 1;
        }
        Ok(axes)
    }
}

/// The metadata object. The format wants strings; numbers and truth values, which some writers leave, become text.
#[derive(Default)]
struct Strings(Vec<(String, String)>);

impl<'de> Deserialize<'de> for Strings {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Strings, D::Error> {
        d.deserialize_map(StringsVisitor)
    }
}

struct StringsVisitor;

impl<'de> Visitor<'de> for StringsVisitor {
    type Value = Strings;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of strings")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Strings, A::Error> {
        let mut out = Vec::new();
        while let Some(key) = map.next_key::<String>()? {
            let text = map.next_value::<Text>();
            let text = text.map_err(|e| A::Error::custom(format!("{}: {e}", shown(&key))))?;
            out.push((key, text.0));
        }
        Ok(Strings(out))
    }
}

struct Text(String);

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Text, D::Error> {
        d.deserialize_any(TextVisitor)
    }
}

struct TextVisitor;

impl Visitor<'_> for TextVisitor {
    type Value = Text;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_str<E>(self, v: &str) -> Result<Text, E> {
        Ok(Text(v.to_owned()))
    }

    fn visit_string<E>(self, v: String) -> Result<Text, E> {
        Ok(Text(v))
    }

    fn visit_bool<E>(self, v: bool) -> Result<Text, E> {
        Ok(Text(v.to_string()))
    }

    fn visit_u64<E>(self, v: u64) -> Result<Text, E> {
        Ok(Text(v.to_string()))
    }

    fn visit_i64<E>(self, v: i64) -> Result<Text, E> {
        Ok(Text(v.to_string()))
    }

    fn visit_f64<E>(self, v: f64) -> Result<Text, E> {
        Ok(Text(v.to_string()))
    }

    fn visit_unit<E>(self) -> Result<Text, E> {
        Ok(Text(String::new()))
    }
}
