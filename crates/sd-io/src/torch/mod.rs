//! What `torch.save` writes: a zip archive since PyTorch 1.6, a row of pickles before that, a tar archive before 0.4.
//!
//! A pickle is a program that builds objects, and Python runs whatever it names. Here it only ever builds lists,
//! dictionaries, numbers, texts and descriptions of tensors ([`pickle`]); a class that no checkpoint needs is refused
//! by name ([`classes`]), and of those that are let pass nothing but the name is kept.
//! Source of the layouts: `torch/serialization.py`.

mod classes;
mod legacy;
mod pickle;
mod tar;
mod tree;
mod zip;

use std::ops::Range;

use sd_core::shape::MAX_RANK;
use sd_core::{DType, Error, Result, TensorMeta};

use crate::cursor::Fault;
use crate::file::SourceFile;
use crate::form::Form;
use crate::listing::{Listing, TensorEntry, check_names, shape};
use crate::text::shown;
use pickle::TensorRef;

/// The longest pickle that is read. Those of the largest checkpoints take some megabytes.
const MAX_PICKLE: u64 = 64 << 20;

/// The ways `torch.save` has stored checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layout {
    /// A zip archive with `data.pkl` and a member for each storage.
    Zip,
    /// Pickles one after the other, then the storages.
    Legacy,
    /// A tar archive of `pickle`, `storages` and `tensors`.
    Tar,
}

/// The tensors of a file, and the numbers and texts beside them as metadata.
pub(crate) fn listing(file: &SourceFile, layout: Layout) -> Result<Listing> {
    let listing = match layout {
        Layout::Zip => zip::listing(file),
        Layout::Legacy => legacy::listing(file),
        Layout::Tar => tar::listing(file),
    }?;
    check_names(file.path(), &listing.tensors)?;
    Ok(listing)
}

/// Whether a file that starts so is a tar archive whose first member `torch.save` could have written.
pub(crate) fn is_tar(start: &[u8]) -> bool {
    tar::is_tar(start)
}

/// A storage in the file.
#[derive(Debug, Clone)]
struct Stored {
    range: Range<u64>,
    big_endian: bool,
}

/// The entry of a tensor whose storage is known, or what is wrong with it.
fn entry(name: String, tensor: &TensorRef, stored: &Stored) -> Result<TensorEntry, Fault> {
    let placed = place(tensor, stored);
    let (meta, range, form) = placed.map_err(|what| format!("tensor {}: {what}", shown(&name)))?;
    Ok(TensorEntry { name, meta, range, form })
}

fn place(tensor: &TensorRef, stored: &Stored) -> Result<(TensorMeta, Range<u64>, Form), String> {
    let (dims, strides, dtype) = (&tensor.dims, &tensor.strides, tensor.dtype);
    if dims.len() > MAX_RANK {
        return Err(format!("{} axes, at most {MAX_RANK} are supported", dims.len()));
    }
    if dims.len() != strides.len() {
        return Err(format!("{} axes and {} strides", dims.len(), strides.len()));
    }
    let shape = shape(dims)?;
    let meta = TensorMeta { shape, dtype };
    let width = dtype.block_bytes() as u64;
    let mut form = if stored.big_endian { Form::swapped(dtype.block_bytes()) } else { Form::default() };
    if shape.elements() == 0 {
        return Ok((meta, 0..0, Form::default()));
    }

    let mut row_major = 1u64;
    let mut contiguous = true;
    let mut last = 0u64; // the index of the last element
    let too_far = || "strides that leave any storage".to_owned();
    for (&d, &stride) in dims.iter().zip(strides).rev() {
        if d > 1 {
            contiguous &= stride == row_major;
            let reach = (d - 1).checked_mul(stride).and_then(|n| n.checked_add(last));
            last = reach.ok_or_else(too_far)?;
        }
        row_major *= d; // the shape has checked the product
    }
    let len = last.checked_add(1).and_then(|n| n.checked_mul(width)).ok_or_else(too_far)?;
    let view = &tensor.storage.view;
    let first = tensor.offset.checked_add(view.as_ref().map_or(0, |v| v.start)).and_then(|n| n.checked_mul(width));
    let start = first.and_then(|n| n.checked_add(stored.range.start)).ok_or_else(too_far)?;
    let end = start.checked_add(len).ok_or_else(too_far)?;
    if end > stored.range.end {
        let (wants, has) = (end - stored.range.start, stored.range.end - stored.range.start);
        return Err(format!(
            "{shape} {dtype} with offset {} and strides {strides:?} reaches byte {wants} of storage {}, which has {has}",
            tensor.offset,
            shown(&tensor.storage.key)
        ));
    }
    if !contiguous {
        // Axes that repeat elements could claim more memory than the file has bytes.
        if row_major > last + 1 {
            return Err(format!("{shape} with strides {strides:?} repeats elements; save a contiguous copy"));
        }
        let narrow: Result<Vec<usize>, _> = strides.iter().map(|&s| usize::try_from(s)).collect();
        form.strides = Some(narrow.map_err(|_| too_far())?);
    }
    Ok((meta, start..end, form))
}

/// An error on a storage that is shorter than its tensors need, or whose size is absurd.
fn check_storage(key: &str, dtype: Option<DType>, numel: u64, got: u64) -> Result<(), String> {
    let width = dtype.map_or(1, |d| d.block_bytes() as u64);
    match numel.checked_mul(width) {
        Some(want) if want <= got => Ok(()),
        _ => Err(format!("storage {} has {got} bytes, too few for {numel} elements of {width}", shown(key))),
    }
}

fn bad(file: &SourceFile, fault: Fault) -> Error {
    match fault {
        Fault::Bad(what) => Error::bad_file(file.path(), what),
        Fault::More(end) => {
            Error::bad_file(file.path(), format!("a pickle goes on after {MAX_PICKLE} bytes ({end})"))
        }
    }
}
