//! What a parsed header says: tensors with their place in the file, and metadata.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use sd_core::{DType, Error, Result, Shape, TensorMeta};

use crate::form::Form;
use crate::metadata::Metadata;
use crate::text::shown;

/// A header's contents. Every range lies inside the file. It has the length that shape and type need, unless the
/// elements of a PyTorch tensor lie apart.
#[derive(Debug, Clone, Default)]
pub struct Listing {
    /// The tensors, in the order of the header.
    pub tensors: Vec<TensorEntry>,
    /// The key-value pairs.
    pub metadata: Metadata,
}

/// A tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorEntry {
    /// Its name in the file.
    pub name: String,
    /// Row-major shape and stored type.
    pub meta: TensorMeta,
    /// Where its bytes are, counted from the start of the file.
    pub range: Range<u64>,
    /// How those bytes become the tensor's.
    pub(crate) form: Form,
}

/// A tensor to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Its name.
    pub name: String,
    /// Its stored type.
    pub dtype: DType,
    /// Its row-major shape.
    pub shape: Shape,
}

impl TensorSpec {
    /// How many bytes the tensor takes.
    ///
    /// # Errors
    /// The rows are not whole blocks of the type, or the size does not fit.
    pub fn bytes(&self) -> Result<u64> {
        size(self.dtype, &self.shape).map_err(|e| Error::shape(format!("tensor {}: {e}", shown(&self.name))))
    }

    /// An error unless `got` bytes are what it takes.
    pub(crate) fn check(&self, got: u64) -> Result<()> {
        let want = self.bytes()?;
        if want != got {
            let (name, shape, dtype) = (shown(&self.name), self.shape, self.dtype);
            return Err(Error::shape(format!("tensor {name}: {shape} {dtype} takes {want} bytes, got {got}")));
        }
        Ok(())
    }
}

/// The bytes of a tensor, or why there is no such number.
pub(crate) fn size(dtype: DType, shape: &Shape) -> Result<u64, String> {
    match dtype.bytes(shape.elements(), shape.last()) {
        Some(n) => Ok(n as u64),
        None if dtype.is_quantised() => {
            Err(format!("rows of {shape} are not whole {dtype} blocks of {}", dtype.block()))
        }
        None => Err(format!("the size of {shape} {dtype} does not fit in memory")),
    }
}

/// The shape with these axes, or why there is none.
pub(crate) fn shape(dims: &[u64]) -> Result<Shape, String> {
    let narrow: Result<Vec<usize>, _> = dims.iter().map(|&d| usize::try_from(d)).collect();
    let narrow = narrow.map_err(|_| format!("shape {dims:?} does not fit in memory"))?;
    Shape::new(&narrow).map_err(|e| e.to_string())
}

/// Checks that no name appears twice.
pub(crate) fn check_names(path: &Path, tensors: &[TensorEntry]) -> Result<()> {
    let mut seen = HashMap::with_capacity(tensors.len());
    for t in tensors {
        if let Some(first) = seen.insert(t.name.as_str(), t) {
            let (a, b) = (first.meta, t.meta);
            let name = shown(&t.name);
            let what = format!("tensor {name} appears twice: {} {} and {} {}", a.shape, a.dtype, b.shape, b.dtype);
            return Err(Error::bad_file(path, what));
        }
    }
    Ok(())
}

/// The tensors that take space, by where they start; an error if two overlap.
pub(crate) fn in_file_order<'a>(path: &Path, tensors: &'a [TensorEntry]) -> Result<Vec<&'a TensorEntry>> {
    let mut order: Vec<&TensorEntry> = tensors.iter().filter(|t| !t.range.is_empty()).collect();
    order.sort_by_key(|t| t.range.start);
    for pair in order.windows(2) {
        if let [a, b] = pair
            && b.range.start < a.range.end
        {
            let (x, y) = (shown(&a.name), shown(&b.name));
            let what = format!(
                "tensor {y} at bytes {}..{} overlaps tensor {x} at bytes {}..{}",
                b.range.start, b.range.end, a.range.start, a.range.end
            );
            return Err(Error::bad_file(path, what));
        }
    }
    Ok(order)
}
