//! Files that are larger than what is written of them.

use super::{Spec, Values};
use anyhow::{Context, Result};
use sd_core::DType;
use serde_json::{Map, json};
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;

/// Tensors of fewer elements have values.
const SMALL: usize = 1 << 16;

/// Writes `specs` as a safetensors file of f16. Small tensors are filled from `seed`; the others are holes, which read as
/// zeros and take no room on the disk. Returns the length of the file.
///
/// # Errors
/// The file cannot be written.
pub fn write_sparse(path: &Path, specs: &[Spec], seed: u64) -> Result<u64> {
    let mut header = Map::new();
    let mut starts = Vec::with_capacity(specs.len());
    let mut end = 0u64;
    for spec in specs {
        let start = end;
        end += 2 * spec.shape.iter().product::<usize>() as u64;
        starts.push(start);
        let row = json!({ "dtype": "F16", "shape": spec.shape, "data_offsets": [start, end] });
        header.insert(spec.name.clone(), row);
    }
    let mut header = serde_json::to_string(&header)?;
    header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(8) - header.len()));
    let begin = 8 + header.len() as u64;
    let mut file = File::create(path).with_context(|| format!("create {}", path.display()))?;
    file.set_len(begin + end)?;
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    let mut values = Values::new(seed);
    for (spec, start) in specs.iter().zip(starts) {
        if spec.shape.iter().product::<usize>() < SMALL {
            file.seek(SeekFrom::Start(begin + start))?;
            file.write_all(&values.bytes(spec, DType::F16)?)?;
        }
    }
    file.sync_all()?;
    Ok(begin + end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synth::Fill;
    use sd_core::WeightSource;

    #[test]
    fn small_tensors_have_values_and_large_ones_are_zeros() {
        let spec = |name: &str, shape: &[usize]| Spec {
            name: name.into(),
            shape: shape.to_vec(),
            fill: Fill::Around(1.0),
        };
        let specs = [spec("a.weight", &[300, 300]), spec("a.bias", &[300]), spec("b.weight", &[3, 5])];
        let path = std::env::temp_dir().join(format!("sd-rs-sparse-{}.safetensors", std::process::id()));
        let len = write_sparse(&path, &specs, 7).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), len);
        let file = sd_io::Checkpoint::open(&path).unwrap();
        assert!(file.bytes("a.weight").unwrap().iter().all(|b| *b == 0));
        for spec in &specs[1..] {
            let bytes = file.bytes(&spec.name).unwrap();
            assert_eq!(bytes[..], Values::new(7).bytes(spec, DType::F16).unwrap()[..], "{}", spec.name);
        }
        drop(file);
        std::fs::remove_file(path).unwrap();
    }
}
