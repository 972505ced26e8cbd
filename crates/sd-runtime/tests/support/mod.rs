//! Reads the oracle's fixtures.

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

    fn elements(&self, name: &str, dtype: &str) -> &[u8] {
        let tensor = &self.header[name];
        assert_eq!(tensor["dtype"], dtype, "{name}");
        let offset = |i: usize| self.data + tensor["data_offsets"][i].as_u64().unwrap() as usize;
        let range: Range<usize> = offset(0)..offset(1);
        &self.bytes[range]
    }
}
