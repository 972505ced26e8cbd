//! Checkpoints of any names and shapes, for targets that look at names only.

use std::sync::Arc;

use sd_core::{DType, Shape};
use sd_io::{Checkpoint, TensorSpec};

/// Bytes of all tensors together, at most.
const MOST: u64 = 1 << 16;

/// A checkpoint from lines, each a tensor's name and its sizes behind spaces; an `8`, `b`, `h`, `i` or `u` before the name
/// says FP8, bf16, f16, int8 or bytes, and any other letter f32. Lines that name no tensor are passed over.
pub fn checkpoint(text: &str) -> Option<Arc<Checkpoint>> {
    let mut specs: Vec<TensorSpec> = Vec::new();
    let mut left = MOST;
    for line in text.lines() {
        let mut words = line.split(' ');
        let Some(word) = words.next() else { continue };
        let Some((kind, name)) = word.split_at_checked(1) else { continue };
        let dims: Vec<usize> = words.filter_map(|w| w.parse().ok()).collect();
        let dtype = match kind {
            "8" => DType::F8E4M3,
            "b" => DType::BF16,
            "h" => DType::F16,
            "i" => DType::I8,
            "u" => DType::U8,
            _ => DType::F32,
        };
        let Ok(shape) = Shape::new(&dims) else { continue };
        let spec = TensorSpec { name: name.to_owned(), dtype, shape };
        let Some(rest) = spec.bytes().ok().and_then(|n| left.checked_sub(n)) else { continue };
        if name.is_empty() || specs.iter().any(|s| s.name == name) {
            continue;
        }
        left = rest;
        specs.push(spec);
    }
    let mut header = serde_json::Map::new();
    let mut data: Vec<u8> = Vec::new();
    for spec in &specs {
        let start = data.len();
        // Small numbers, which are scales as well as values.
        data.extend((0..spec.bytes().ok()?).map(|i| [0u8, 0, 0x80, 0x3c][i as usize % 4]));
        let name = match spec.dtype {
            DType::F8E4M3 => "F8_E4M3",
            DType::BF16 => "BF16",
            DType::F16 => "F16",
            DType::I8 => "I8",
            DType::U8 => "U8",
            _ => "F32",
        };
        let entry = serde_json::json!({"dtype": name, "shape": spec.shape.dims(), "data_offsets": [start, data.len()]});
        header.insert(spec.name.clone(), entry);
    }
    let header = serde_json::to_vec(&header).ok()?;
    let file = [(header.len() as u64).to_le_bytes().to_vec(), header, data].concat();
    Checkpoint::from_bytes("fuzz.safetensors", file.into()).ok().map(Arc::new)
}
