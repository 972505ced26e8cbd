//! Loops of nothing but multiplications and additions in registers: what no product can exceed.

/// What is multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Factors {
    /// f32, by the widest instructions.
    F32,
    /// Pairs of bf16, added to f32.
    Bf16,
    /// Fours of 8-bit integers, added to 32 bits.
    Int8,
}

/// Multiplies and adds `steps` times in each of `SUMS` independent sums; returns how many operations that were, or `None`
/// if the processor has no instruction for it.
pub fn multiply_add(factors: Factors, steps: usize) -> Option<f64> {
    #[cfg(target_arch = "x86_64")]
    {
        let wide = is_x86_feature_detected!("avx512f");
        let run: unsafe fn(usize) -> usize = match factors {
            Factors::F32 if wide => x86::f32s,
            Factors::F32 if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") => {
                x86::f32s_of_256_bits
            }
            Factors::Bf16 if wide && is_x86_feature_detected!("avx512bf16") => x86::bf16s,
            Factors::Int8 if wide && is_x86_feature_detected!("avx512vnni") => x86::int8s,
            _ => return None,
        };
        // SAFETY: the processor has the instructions.
        let lanes = unsafe { run(steps) };
        Some(2.0 * (lanes * SUMS * steps) as f64)
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = (factors, steps);
        None
    }
}

/// Enough to hide the latency of an instruction.
const SUMS: usize = 20;

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::hint::black_box;

    use super::SUMS;

    /// A loop over `sum = f(sum, a, b)`, which returns how many products one instruction has.
    macro_rules! looped {
        ($name:ident, $feature:literal, $lanes:literal, $zero:expr, $f:expr) => {
            /// # Safety
            /// The processor has the instructions.
            #[target_feature(enable = $feature)]
            pub(super) unsafe fn $name(steps: usize) -> usize {
                let (a, b) = (black_box($zero), black_box($zero));
                let mut sums = [$zero; SUMS];
                for _ in 0..steps {
                    for sum in &mut sums {
                        *sum = $f(*sum, a, b);
                    }
                }
                black_box(sums);
                $lanes
            }
        };
    }

    looped!(f32s, "avx512f", 16, _mm512_setzero_ps(), |s, a, b| _mm512_fmadd_ps(a, b, s));
    looped!(f32s_of_256_bits, "avx2,fma", 8, _mm256_setzero_ps(), |s, a, b| _mm256_fmadd_ps(a, b, s));
    looped!(bf16s, "avx512f,avx512bf16", 32, _mm512_setzero_ps(), |s, a: __m512, b: __m512| {
        // SAFETY: 512 bits are 512 bits.
        let (a, b) =
            unsafe { (std::mem::transmute::<__m512, __m512bh>(a), std::mem::transmute::<__m512, __m512bh>(b)) };
        _mm512_dpbf16_ps(s, a, b)
    });
    looped!(int8s, "avx512f,avx512vnni", 64, _mm512_setzero_si512(), |s, a, b| _mm512_dpbusd_epi32(s, a, b));
}
