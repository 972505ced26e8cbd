//! Element types: every type ggml stores, those that only files use, and those of scaled weights of files.

use std::fmt;

/// How the elements of a tensor are stored.
///
/// Quantised types come in blocks along the last axis: [`DType::block`] elements take
/// [`DType::block_bytes`] bytes.
#[allow(missing_docs)] // the names are ggml's own
#[allow(non_camel_case_types)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    F32,
    F16,
    BF16,
    F64,
    F8E4M3,
    F8E5M2,
    U8,
    I8,
    I16,
    I32,
    I64,
    Bool,
    Q1_0,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q8_1,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    Q8K,
    IQ1_S,
    IQ1_M,
    IQ2_XXS,
    IQ2_XS,
    IQ2_S,
    IQ3_XXS,
    IQ3_S,
    IQ4_NL,
    IQ4_XS,
    TQ1_0,
    TQ2_0,
    MXFP4,
    NVFP4,
    /// F8E4M3 in blocks after an f32 factor: scaled FP8 of files, in memory only.
    F8E4M3S,
    /// F8E5M2 likewise.
    F8E5M2S,
    /// I8 likewise.
    I8S,
    /// Two 4-bit floats (E2M1) to a byte, the first in the upper bits, likewise: NVFP4 of safetensors files.
    F4S,
}

use DType::*;

/// `(type, name, ggml id, elements per block, bytes per block)`; an id of -1 means ggml has no such type.
/// Ids and sizes are those of `ggml.h` at the pinned version; a test in `ffi` compares them with the library.
const TABLE: &[(DType, &str, i32, usize, usize)] = &[
    (F32, "f32", 0, 1, 4),
    (F16, "f16", 1, 1, 2),
    (BF16, "bf16", 30, 1, 2),
    (F64, "f64", 28, 1, 8),
    (F8E4M3, "f8_e4m3", -1, 1, 1),
    (F8E5M2, "f8_e5m2", -1, 1, 1),
    (U8, "u8", -1, 1, 1),
    (I8, "i8", 24, 1, 1),
    (I16, "i16", 25, 1, 2),
    (I32, "i32", 26, 1, 4),
    (I64, "i64", 27, 1, 8),
    (Bool, "bool", -1, 1, 1),
    (Q1_0, "q1_0", 41, 128, 18),
    (Q4_0, "q4_0", 2, 32, 18),
    (Q4_1, "q4_1", 3, 32, 20),
    (Q5_0, "q5_0", 6, 32, 22),
    (Q5_1, "q5_1", 7, 32, 24),
    (Q8_0, "q8_0", 8, 32, 34),
    (Q8_1, "q8_1", 9, 32, 36),
    (Q2K, "q2_K", 10, 256, 84),
    (Q3K, "q3_K", 11, 256, 110),
    (Q4K, "q4_K", 12, 256, 144),
    (Q5K, "q5_K", 13, 256, 176),
    (Q6K, "q6_K", 14, 256, 210),
    (Q8K, "q8_K", 15, 256, 292),
    (IQ1_S, "iq1_s", 19, 256, 50),
    (IQ1_M, "iq1_m", 29, 256, 56),
    (IQ2_XXS, "iq2_xxs", 16, 256, 66),
    (IQ2_XS, "iq2_xs", 17, 256, 74),
    (IQ2_S, "iq2_s", 22, 256, 82),
    (IQ3_XXS, "iq3_xxs", 18, 256, 98),
    (IQ3_S, "iq3_s", 21, 256, 110),
    (IQ4_NL, "iq4_nl", 20, 32, 18),
    (IQ4_XS, "iq4_xs", 23, 256, 136),
    (TQ1_0, "tq1_0", 34, 256, 54),
    (TQ2_0, "tq2_0", 35, 256, 66),
    (MXFP4, "mxfp4", 39, 32, 17),
    (NVFP4, "nvfp4", 40, 64, 36),
    (F8E4M3S, "f8_e4m3_scaled", -1, 64, 68),
    (F8E5M2S, "f8_e5m2_scaled", -1, 64, 68),
    (I8S, "i8_scaled", -1, 64, 68),
    (F4S, "f4_scaled", -1, 16, 12),
];

impl DType {
    /// Every type, in table order.
    pub fn all() -> impl Iterator<Item = DType> {
        TABLE.iter().map(|row| row.0)
    }

    fn row(self) -> &'static (DType, &'static str, i32, usize, usize) {
        // `TABLE` has a row per variant (tested below), so the fallback row is never taken.
        TABLE.iter().find(|row| row.0 == self).unwrap_or(&TABLE[0])
    }

    /// The name users type: ggml's spelling, such as `q4_K`.
    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// The type a user's spelling names, whatever its case.
    pub fn parse(name: &str) -> Option<DType> {
        TABLE.iter().find(|row| row.1.eq_ignore_ascii_case(name)).map(|row| row.0)
    }

    /// The number of this type in ggml and GGUF files, if ggml has it.
    pub fn ggml_id(self) -> Option<u32> {
        u32::try_from(self.row().2).ok()
    }

    /// The type with this ggml and GGUF number.
    pub fn from_ggml_id(id: u32) -> Option<DType> {
        TABLE.iter().find(|row| i64::from(row.2) == i64::from(id)).map(|row| row.0)
    }

    /// Elements per block: 1 for plain types.
    pub fn block(self) -> usize {
        self.row().3
    }

    /// Bytes per block.
    pub fn block_bytes(self) -> usize {
        self.row().4
    }

    /// Whether elements come in blocks with shared scales.
    pub fn is_quantised(self) -> bool {
        self.block() > 1
    }

    /// Whether elements are floating point, plain or quantised.
    pub fn is_float(self) -> bool {
        !matches!(self, U8 | I8 | I16 | I32 | I64 | Bool)
    }

    /// Whether matrices of weights can be converted to this type: not integers, not the types that only files or only
    /// scaled weights of files have, and not the two in which ggml keeps activations.
    pub fn is_weight_type(self) -> bool {
        match self {
            F32 | F16 | BF16 => true,
            Q8_1 | Q8K => false,
            other => other.is_quantised() && other.ggml_id().is_some(),
        }
    }

    /// Bytes that `elements` take, in rows of `row` elements; `None` when a row is not whole blocks or the
    /// product does not fit.
    pub fn bytes(self, elements: usize, row: usize) -> Option<usize> {
        if self.block() > 1 && (!row.is_multiple_of(self.block()) || !elements.is_multiple_of(self.block())) {
            return None;
        }
        (elements / self.block()).checked_mul(self.block_bytes())
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_has_its_own_row() {
        for d in DType::all() {
            assert_eq!(d.row().0, d);
            assert_eq!(DType::parse(d.name()), Some(d));
            if let Some(id) = d.ggml_id() {
                assert_eq!(DType::from_ggml_id(id), Some(d));
            }
        }
        assert_eq!(F4S as usize + 1, TABLE.len());
    }

    #[test]
    fn rows_must_be_whole_blocks() {
        assert_eq!(Q8_0.bytes(64, 32), Some(68));
        assert_eq!(Q8_0.bytes(96, 48), None);
        assert_eq!(F32.bytes(usize::MAX, 1), None);
        assert_eq!(F16.bytes(3, 3), Some(6));
    }
}
