//! Fixtures, as `oracle/README.md` describes them, and sources of weights for tests.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use sd_core::{Bytes, DType, Error, Origin, Result, Shape, Tensor, TensorMeta, WeightSource, convert};
use sd_io::Checkpoint;

/// What a reference computed.
pub(crate) struct Fixture {
    file: Checkpoint,
}

impl Fixture {
    pub(crate) fn open(name: &str) -> Fixture {
        let path = format!("{}/../../oracle/fixtures/{name}.safetensors", env!("CARGO_MANIFEST_DIR"));
        Fixture { file: Checkpoint::open(PathBuf::from(path)).unwrap() }
    }

    /// The names of one kind, such as `tap`, without it.
    pub(crate) fn names(&self, kind: &str) -> Vec<String> {
        self.file.names().iter().filter_map(|n| n.strip_prefix(kind)?.strip_prefix('.')).map(String::from).collect()
    }

    pub(crate) fn tensor(&self, name: &str) -> Tensor {
        let meta = self.file.meta(name).unwrap_or_else(|| panic!("no {name} in the fixture"));
        let bytes = self.file.bytes(name).unwrap();
        let values = convert::to_f32(meta.dtype, &bytes, meta.shape.elements()).unwrap();
        match meta.dtype {
            DType::I32 => Tensor::i32(meta.shape.dims(), values.iter().map(|&v| v as i32).collect()).unwrap(),
            _ => Tensor::f32(meta.shape.dims(), values).unwrap(),
        }
    }

    /// The weights, stored or made by the rule, under `rename(name)`.
    pub(crate) fn weights(&self, rename: impl Fn(&str) -> String) -> Tensors {
        let mut out = BTreeMap::new();
        for name in self.names("weight") {
            let t = self.tensor(&format!("weight.{name}"));
            out.insert(rename(&name), (t.dims().to_vec(), t.into_values()));
        }
        if let Some(table) = self.file.metadata().str("procedural") {
            let table: BTreeMap<String, (Vec<usize>, i32, f64)> = serde_json::from_str(table).unwrap();
            for (name, (dims, exponent, shift)) in table {
                let values = procedural(&name, dims.iter().product(), exponent, shift);
                out.insert(rename(&name), (dims, values));
            }
        }
        assert!(!out.is_empty(), "the fixture has no weights");
        Tensors(out)
    }
}

/// The rule of `oracle/README.md`.
fn procedural(name: &str, count: usize, exponent: i32, shift: f64) -> Vec<f32> {
    grid(name, count).map(|m| (shift + m as f64 * f64::from(exponent).exp2()) as f32).collect()
}

fn grid(name: &str, count: usize) -> impl Iterator<Item = i64> {
    let fnv = |h: u64, b: u8| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3);
    let state = name.bytes().fold(0xcbf2_9ce4_8422_2325, fnv);
    (1..=count as u64).map(move |k| {
        let z = k.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(state);
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 53) as i64 - 1024
    })
}

/// Tensors of f32 in memory; those given without values are zeros.
pub(crate) struct Tensors(BTreeMap<String, (Vec<usize>, Vec<f32>)>);

impl Tensors {
    pub(crate) fn shapes(list: &[(&str, &[usize])]) -> Tensors {
        Tensors::of_shapes(list.iter().map(|(n, d)| ((*n).to_owned(), d.to_vec())).collect())
    }

    pub(crate) fn of_shapes(list: Vec<(String, Vec<usize>)>) -> Tensors {
        Tensors(list.into_iter().map(|(n, d)| (n, (d, Vec::new()))).collect())
    }
}

/// A tensor of a published checkpoint: its name and shape, and the operation that makes it of those of the reference.
pub(crate) type Place = (String, Vec<usize>, String, Vec<(String, Vec<usize>)>);

/// The tensors of one set of `real_names.json.gz`, at real size.
pub(crate) fn real_names(set: &str) -> Vec<Place> {
    places(&real(), set)
}

/// Tensors with what stands before their names.
pub(crate) type Set = (String, Vec<Place>);

/// The sets of a published checkpoint, and names and shapes of tensors that nothing reads.
pub(crate) fn real_checkpoint(name: &str) -> (Vec<Set>, Vec<(String, Vec<usize>)>) {
    let all = real();
    let sets: Vec<(String, String)> = serde_json::from_value(all["checkpoints"][name].clone()).unwrap();
    let unused = serde_json::from_value(all["unused"][name].clone()).unwrap_or_default();
    (sets.into_iter().map(|(prefix, set)| (prefix, places(&all, &set))).collect(), unused)
}

fn real() -> serde_json::Value {
    let file = include_bytes!("../../../../oracle/fixtures/real_names.json.gz");
    serde_json::from_reader(flate2::read::GzDecoder::new(&file[..])).unwrap()
}

fn places(all: &serde_json::Value, set: &str) -> Vec<Place> {
    serde_json::from_value(all["sets"][set].clone()).unwrap_or_else(|e| panic!("{set}: {e}"))
}

impl Tensors {
    pub(crate) fn shared(self) -> Arc<dyn WeightSource> {
        Arc::new(self)
    }
}

impl WeightSource for Tensors {
    fn names(&self) -> Vec<&str> {
        self.0.keys().map(String::as_str).collect()
    }

    fn meta(&self, name: &str) -> Option<TensorMeta> {
        Some(TensorMeta { shape: Shape::new(&self.0.get(name)?.0).ok()?, dtype: DType::F32 })
    }

    fn bytes(&self, name: &str) -> Result<Bytes> {
        let (dims, values) = self.0.get(name).ok_or_else(|| Error::missing(name, "heron.safetensors"))?;
        let count: usize = dims.iter().product();
        let values = values.iter().copied().chain(std::iter::repeat(0.0)).take(count);
        Ok(Bytes::from(values.flat_map(f32::to_le_bytes).collect::<Vec<u8>>()))
    }

    fn origin(&self, name: &str) -> Origin {
        Origin { name: name.into(), file: "heron.safetensors".into() }
    }
}

#[test]
fn the_rule_agrees_with_its_examples() {
    let examples: serde_json::Value =
        serde_json::from_str(include_str!("../../../../oracle/fixtures/procedural.json")).unwrap();
    for (name, want) in examples["m"].as_object().unwrap() {
        let want: Vec<i64> = serde_json::from_value(want.clone()).unwrap();
        assert_eq!(grid(name, want.len()).collect::<Vec<_>>(), want, "{name}");
    }
}
