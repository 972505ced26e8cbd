//! ggml's element types: sizes, names, and conversion of blocks to and from f32.

use ggml_sys as sys;

use super::text;
use crate::dtype::DType;
use crate::error::{Error, Result};

/// ggml's number for `dtype`, which must be one of ggml's types.
pub(crate) fn id(dtype: DType) -> Result<sys::ggml_type> {
    dtype.ggml_id().ok_or_else(|| Error::internal(format!("ggml has no type {dtype}")))
}

/// `(name, elements per block, bytes per block)` of a type by ggml's own account, for ids below the count it knows.
#[cfg_attr(not(test), allow(dead_code))]
pub(crate) fn facts(id: u32) -> Option<(String, i64, usize)> {
    if id >= sys::GGML_TYPE_COUNT {
        return None;
    }
    // SAFETY: the id is below GGML_TYPE_COUNT, the length of ggml's table.
    unsafe { Some((text(sys::ggml_type_name(id)), sys::ggml_blck_size(id), sys::ggml_type_size(id))) }
}

/// Whether the CPU can multiply a matrix stored as `dtype` with f32 values.
pub(crate) fn multiplies(dtype: DType) -> bool {
    // ggml's table of products belongs to its CPU driver, which may be a library that is loaded later.
    dtype == DType::F32 || decoder(dtype).is_some()
}

/// Converts whole blocks at any even address to f32: `(blocks, values, elements)`.
pub(crate) type Decoder = unsafe extern "C" fn(*const std::ffi::c_void, *mut f32, i64);

/// ggml's conversion of a type to f32.
pub(crate) fn decoder(dtype: DType) -> Option<Decoder> {
    // SAFETY: the id is one of ggml's; the table entry is static.
    unsafe { (*sys::ggml_get_type_traits(dtype.ggml_id()?)).to_float }
}

/// Elements converted per call: whole blocks of every type.
const STEP: usize = 4096;

/// Converts blocks to f32. Any bit pattern is valid input; results may then be NaN or infinite.
pub(crate) fn dequantise(dtype: DType, bytes: &[u8], out: &mut [f32]) -> Result<()> {
    if dtype.bytes(out.len(), out.len()) != Some(bytes.len()) {
        return Err(Error::internal(format!("{} bytes are not {} elements of {dtype}", bytes.len(), out.len())));
    }
    // SAFETY: the id is one of ggml's; the table entry is static.
    let traits = unsafe { &*sys::ggml_get_type_traits(id(dtype)?) };
    let Some(to_float) = traits.to_float else {
        return Err(Error::unsupported(format!("{dtype} cannot be converted to f32")));
    };
    // Blocks hold 16- and 32-bit fields, and file bytes have any alignment: go through an aligned copy.
    let mut aligned = [0u32; STEP + STEP / 4];
    let step_bytes = STEP / dtype.block() * dtype.block_bytes();
    for (src, dst) in bytes.chunks(step_bytes).zip(out.chunks_mut(STEP)) {
        // SAFETY: `src` is at most `step_bytes` <= 4.5 bytes per element * STEP, which `aligned` holds; `to_float`
        // reads whole blocks of `dst.len()` elements, which `src` is by the length check above, and writes
        // `dst.len()` floats.
        unsafe {
            std::ptr::copy_nonoverlapping(src.as_ptr(), aligned.as_mut_ptr().cast::<u8>(), src.len());
            to_float(aligned.as_ptr().cast(), dst.as_mut_ptr(), dst.len() as i64);
        }
    }
    Ok(())
}

/// Whether [`quantise`] can write `dtype`.
pub(crate) fn can_quantise(dtype: DType) -> bool {
    dtype.is_weight_type() && dtype.is_quantised()
}

/// Whether so few bits are left that a quantisation makes no sense without knowing which columns matter.
pub(crate) fn needs_importance(dtype: DType) -> bool {
    // SAFETY: the type is one of ggml's.
    dtype.ggml_id().is_some_and(|id| unsafe { sys::ggml_quantize_requires_imatrix(id) })
}

/// Converts rows of finite f32 values to blocks. `importance` is that of each column, finite and not negative; without it all
/// are equally important.
pub(crate) fn quantise(
    dtype: DType,
    values: &[f32],
    row: usize,
    importance: Option<&[f32]>,
    out: &mut [u8],
) -> Result<()> {
    let fits = row > 0
        && values.len().is_multiple_of(row)
        && row.is_multiple_of(dtype.block())
        && dtype.bytes(values.len(), row) == Some(out.len());
    let weighed = importance.is_none_or(|i| i.len() == row && i.iter().all(|v| v.is_finite() && *v >= 0.0));
    if !fits || !weighed || !can_quantise(dtype) || !values.iter().all(|v| v.is_finite()) {
        return Err(Error::internal(format!("{} values in rows of {row} cannot become {dtype}", values.len())));
    }
    let id = id(dtype)?;
    let even = if importance.is_none() && needs_importance(dtype) { vec![1.0f32; row] } else { Vec::new() };
    let weights = importance.unwrap_or(&even);
    let imatrix = if weights.is_empty() { std::ptr::null() } else { weights.as_ptr() };
    // SAFETY: `values` is whole rows of whole blocks, `out` is exactly as long as the result, the type is one
    // `ggml_quantize_chunk` handles, and the importance matrix, where there is one, has one entry per column.
    let written = unsafe {
        sys::ggml_quantize_chunk(
            id,
            values.as_ptr(),
            out.as_mut_ptr().cast(),
            0,
            (values.len() / row) as i64,
            row as i64,
            imatrix,
        )
    };
    if written == out.len() { Ok(()) } else { Err(Error::internal(format!("{dtype}: wrote {written} bytes"))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Types ggml knows and no published checkpoint of our formats uses.
    const ABSENT: &[&str] = &["q2_0"];

    #[test]
    fn table_equals_ggml() {
        for dtype in DType::all() {
            let Some(id) = dtype.ggml_id() else { continue };
            let (name, block, bytes) = facts(id).unwrap();
            assert_eq!(name, dtype.name());
            assert_eq!((block as usize, bytes), (dtype.block(), dtype.block_bytes()), "{name}");
        }
    }

    #[test]
    fn table_is_complete() {
        for id in 0..sys::GGML_TYPE_COUNT {
            let (name, block, _) = facts(id).unwrap();
            // Removed types keep their number with an empty block.
            if block > 0 && !ABSENT.contains(&name.as_str()) {
                assert!(DType::from_ggml_id(id).is_some(), "{name} ({id})");
            }
        }
    }

    #[cfg(not(feature = "dynamic-backends"))]
    #[test]
    fn products_are_those_of_ggmls_table() {
        for dtype in DType::all() {
            let Some(id) = dtype.ggml_id() else { continue };
            // SAFETY: the id is one of ggml's; the table entry is static.
            let product =
                unsafe { sys::ggml_get_type_traits_cpu(id).as_ref() }.is_some_and(|t| t.vec_dot.is_some());
            assert_eq!(multiplies(dtype), product, "{dtype}");
        }
    }

    #[test]
    fn blocks_fill_a_step() {
        for dtype in DType::all() {
            assert_eq!(STEP % dtype.block(), 0);
            assert!(STEP / dtype.block() * dtype.block_bytes() <= 4 * (STEP + STEP / 4) || dtype.block() == 1);
        }
    }
}
