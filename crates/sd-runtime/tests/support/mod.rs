//! Reads the oracle's fixtures.

#![allow(dead_code)] // Every test file uses a part.

pub(crate) mod sd1;

use std::ops::Range;
use std::path::PathBuf;

use serde_json::Value;

/// A fixture in safetensors form: an eight-byte length, a JSON header, the elements.
pub(crate) struct Fixture {
    bytes: Vec<u8>,
    header: Value,
    data: usize,
}

fn read(name: &str) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../oracle/fixtures").join(name);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// A fixture that is not tensors.
pub(crate) fn json(name: &str) -> Value {
    serde_json::from_slice(&read(name)).unwrap()
}

impl Fixture {
    pub(crate) fn open(name: &str) -> Fixture {
        let bytes = read(name);
        let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header = serde_json::from_slice(&bytes[8..data]).unwrap();
        Fixture { bytes, header, data }
    }

    /// A metadata entry that holds JSON.
    pub(crate) fn metadata(&self, key: &str) -> Value {
        serde_json::from_str(self.header["__metadata__"][key].as_str().unwrap()).unwrap()
    }

    /// Every tensor's name.
    pub(crate) fn names(&self) -> Vec<&str> {
        let names = self.header.as_object().unwrap().keys().map(String::as_str);
        names.filter(|n| *n != "__metadata__").collect()
    }

    pub(crate) fn f32s(&self, name: &str) -> Vec<f32> {
        self.elements(name, "F32").as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }

    pub(crate) fn f64s(&self, name: &str) -> Vec<f64> {
        self.elements(name, "F64").as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect()
    }

    pub(crate) fn u8s(&self, name: &str) -> &[u8] {
        self.elements(name, "U8")
    }

    fn elements(&self, name: &str, dtype: &str) -> &[u8] {
        let tensor = &self.header[name];
        assert_eq!(tensor["dtype"], dtype, "{name}");
        let offset = |i: usize| self.data + tensor["data_offsets"][i].as_u64().unwrap() as usize;
        let range: Range<usize> = offset(0)..offset(1);
        &self.bytes[range]
    }
}

/// A tensor that is made by the oracle's rule from its name (`oracle/README.md`).
pub(crate) fn procedural(name: &str, elements: usize, exponent: i32, shift: f32) -> Vec<f32> {
    let fnv = |h: u64, b: u8| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01B3);
    let mut state = name.bytes().fold(0xCBF2_9CE4_8422_2325, fnv);
    let scale = 2f32.powi(exponent);
    let value = || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        let z = z ^ (z >> 31);
        shift + ((z >> 53) as i32 - 1024) as f32 * scale
    };
    std::iter::repeat_with(value).take(elements).collect()
}
