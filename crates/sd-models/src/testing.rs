//! Sources of weights for tests of this crate.

use std::collections::BTreeMap;

use sd_core::{Bytes, DType, Error, Origin, Result, Shape, TensorMeta, WeightSource};

/// Names and shapes of f32 tensors of zeros.
pub(crate) struct Shapes(BTreeMap<String, Vec<usize>>);

impl Shapes {
    pub(crate) fn new(list: &[(&str, &[usize])]) -> Shapes {
        Shapes(list.iter().map(|(n, d)| ((*n).to_owned(), d.to_vec())).collect())
    }

    pub(crate) fn from_pairs(list: impl IntoIterator<Item = (String, Vec<usize>)>) -> Shapes {
        Shapes(list.into_iter().collect())
    }
}

impl WeightSource for Shapes {
    fn names(&self) -> Vec<&str> {
        self.0.keys().map(String::as_str).collect()
    }

    fn meta(&self, name: &str) -> Option<TensorMeta> {
        Some(TensorMeta { shape: Shape::new(self.0.get(name)?).ok()?, dtype: DType::F32 })
    }

    fn bytes(&self, name: &str) -> Result<Bytes> {
        let meta = self.meta(name).ok_or_else(|| Error::missing(name, "heron.safetensors"))?;
        Ok(Bytes::from(vec![0; meta.shape.elements() * 4]))
    }

    fn origin(&self, name: &str) -> Origin {
        Origin { name: name.into(), file: "heron.safetensors".into() }
    }
}
