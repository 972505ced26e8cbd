//! Reads fixtures of the oracle in unit tests.

use std::path::Path;

use serde_json::Value;

/// A fixture in safetensors form: an eight-byte length, a JSON header, the elements.
pub(crate) struct Fixture {
    bytes: Vec<u8>,
    header: Value,
    data: usize,
}

impl Fixture {
    pub(crate) fn open(name: &str) -> Fixture {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../oracle/fixtures").join(name);
        let bytes = std::fs::read(path).unwrap();
        let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header = serde_json::from_slice(&bytes[8..data]).unwrap();
        Fixture { bytes, header, data }
    }

    /// A metadata entry that holds JSON.
    pub(crate) fn metadata(&self, key: &str) -> Value {
        serde_json::from_str(self.header["__metadata__"][key].as_str().unwrap()).unwrap()
    }

    /// The elements of a tensor.
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
        &self.bytes[offset(0)..offset(1)]
    }
}
