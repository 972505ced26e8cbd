//! How the bytes of a tensor lie in a file where they are not simply its elements in row-major order.

use sd_core::{Bytes, TensorMeta};

/// From the bytes in a file to the bytes of a tensor. The default leaves them as they are.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Form {
    /// Elements from one index of an axis to the next, where elements are not in row-major order.
    pub(crate) strides: Option<Vec<usize>>,
    /// The numbers in a block of so many bytes that have their high byte first.
    pub(crate) swapped: Option<Swapped>,
}

/// The numbers of several bytes in one block of a type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Swapped {
    /// Bytes of a block.
    pub(crate) block: usize,
    /// Where the first number starts.
    pub(crate) at: usize,
    /// Bytes of a number.
    pub(crate) width: usize,
    /// How many numbers follow one another.
    pub(crate) count: usize,
}

impl Form {
    /// The form of plain elements of `width` bytes with the high byte first.
    pub(crate) fn swapped(width: usize) -> Form {
        let swapped = (width > 1).then_some(Swapped { block: width, at: 0, width, count: 1 });
        Form { strides: None, swapped }
    }

    /// The tensor's bytes from those of its range; `None` when they are too few.
    pub(crate) fn apply(&self, meta: &TensorMeta, stored: Bytes) -> Option<Bytes> {
        let gathered = match &self.strides {
            Some(strides) => gather(meta, strides, &stored)?,
            None if self.swapped.is_none() => return Some(stored),
            None => stored.to_vec(),
        };
        Some(match self.swapped {
            Some(s) => s.apply(gathered).into(),
            None => gathered.into(),
        })
    }
}

impl Swapped {
    fn apply(self, mut bytes: Vec<u8>) -> Vec<u8> {
        for block in bytes.chunks_exact_mut(self.block) {
            if let Some(numbers) = block.get_mut(self.at..self.at + self.width * self.count) {
                numbers.chunks_exact_mut(self.width).for_each(<[u8]>::reverse);
            }
        }
        bytes
    }
}

/// The elements of a strided tensor in row-major order.
fn gather(meta: &TensorMeta, strides: &[usize], stored: &[u8]) -> Option<Vec<u8>> {
    let (dims, width) = (meta.shape.dims(), meta.dtype.block_bytes());
    let elements = meta.shape.elements();
    let mut out = Vec::new();
    out.try_reserve_exact(elements.checked_mul(width)?).ok()?;
    let mut index = vec![0usize; dims.len()];
    let mut at = 0usize;
    for _ in 0..elements {
        let start = at.checked_mul(width)?;
        out.extend_from_slice(stored.get(start..start.checked_add(width)?)?);
        for ((i, &d), &stride) in index.iter_mut().zip(dims).zip(strides).rev() {
            *i += 1;
            if *i < d {
                at += stride;
                break;
            }
            at -= stride * (*i - 1);
            *i = 0;
        }
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use sd_core::{DType, Shape};

    #[test]
    fn a_transposed_matrix() {
        // Element (i, j) of a [2, 3] tensor stored by columns lies at i + 2 j.
        let meta = TensorMeta { shape: Shape::new(&[2, 3]).unwrap(), dtype: DType::I16 };
        let stored: Vec<u8> = [0u16, 10, 1, 11, 2, 12].iter().flat_map(|v| v.to_be_bytes()).collect();
        let form = Form { strides: Some(vec![1, 2]), ..Form::swapped(2) };
        let want: Vec<u8> = [0u16, 1, 2, 10, 11, 12].iter().flat_map(|v| v.to_le_bytes()).collect();
        assert_eq!(form.apply(&meta, stored.clone().into()).unwrap()[..], want[..]);
        assert!(form.apply(&meta, stored[..10].to_vec().into()).is_none());
    }
}
