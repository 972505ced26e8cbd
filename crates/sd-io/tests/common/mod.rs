//! Files made by hand, byte by byte, so that no expectation comes from the writers under test.
#![allow(dead_code, clippy::unwrap_used)] // each test file uses a part

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// A folder in the temporary directory that is removed again.
pub(crate) struct Dir(PathBuf);

impl Dir {
    pub(crate) fn new() -> Dir {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("sd-io-test-{}-{n}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        Dir(dir)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Writes a file, making its folders.
    pub(crate) fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, bytes).unwrap();
        path
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).unwrap();
    }
}

/// A safetensors file with this JSON header and data.
pub(crate) fn safetensors(json: &str, data: &[u8]) -> Vec<u8> {
    let mut out = (json.len() as u64).to_le_bytes().to_vec();
    out.extend_from_slice(json.as_bytes());
    out.extend_from_slice(data);
    out
}

/// A GGUF file put together field by field.
#[derive(Clone, Default)]
pub(crate) struct Gguf(pub(crate) Vec<u8>);

impl Gguf {
    pub(crate) fn new(version: u32, tensors: u64, pairs: u64) -> Gguf {
        Gguf(b"GGUF".to_vec()).u32(version).u64(tensors).u64(pairs)
    }

    pub(crate) fn bytes(mut self, bytes: &[u8]) -> Gguf {
        self.0.extend_from_slice(bytes);
        self
    }

    pub(crate) fn u8(self, v: u8) -> Gguf {
        self.bytes(&[v])
    }

    pub(crate) fn u32(self, v: u32) -> Gguf {
        self.bytes(&v.to_le_bytes())
    }

    pub(crate) fn u64(self, v: u64) -> Gguf {
        self.bytes(&v.to_le_bytes())
    }

    pub(crate) fn f32(self, v: f32) -> Gguf {
        self.bytes(&v.to_le_bytes())
    }

    pub(crate) fn str(self, s: &str) -> Gguf {
        self.u64(s.len() as u64).bytes(s.as_bytes())
    }

    /// A pair whose value is a u32, type 4.
    pub(crate) fn pair_u32(self, key: &str, v: u32) -> Gguf {
        self.str(key).u32(4).u32(v)
    }

    /// A tensor description; `ne` has the fastest axis first.
    pub(crate) fn tensor(mut self, name: &str, ne: &[u64], type_id: u32, offset: u64) -> Gguf {
        self = self.str(name).u32(ne.len() as u32);
        for &n in ne {
            self = self.u64(n);
        }
        self.u32(type_id).u64(offset)
    }

    /// Zeros up to a multiple of `n`.
    pub(crate) fn align(mut self, n: usize) -> Gguf {
        self.0.resize(self.0.len().next_multiple_of(n), 0);
        self
    }
}
