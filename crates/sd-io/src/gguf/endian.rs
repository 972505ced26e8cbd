//! Files of big-endian machines: which bytes of a block are numbers that have to be turned round.
//!
//! Sources: the block structures in `ggml-common.h`, and `gguf_convert_endian.py` of llama.cpp, which turns the same
//! fields. The scales of the types below are f16 or one byte; all else in their blocks is single bytes.

use sd_core::DType;

use crate::form::{Form, Swapped};

/// How a tensor of `dtype` lies in a big-endian file, or why it cannot be read.
pub(crate) fn form(dtype: DType) -> Result<Form, String> {
    if !dtype.is_quantised() {
        return Ok(Form::swapped(dtype.block_bytes()));
    }
    // Where the f16 scales start, and how many there are.
    let (at, count) = match dtype {
        DType::Q4_0 | DType::Q8_0 | DType::IQ4_NL | DType::Q1_0 => (0, 1),
        DType::Q4_1 | DType::Q4K | DType::Q5K => (0, 2),
        DType::Q2K => (80, 2),
        DType::Q3K => (108, 1),
        DType::Q6K => (208, 1),
        DType::MXFP4 | DType::NVFP4 => return Ok(Form::default()),
        other => return Err(format!("{other} cannot be read from a big-endian GGUF; write a little-endian one")),
    };
    Ok(Form { strides: None, swapped: Some(Swapped { block: dtype.block_bytes(), at, width: 2, count }) })
}
