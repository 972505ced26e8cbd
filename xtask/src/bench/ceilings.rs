//! What the machine can do at most, measured before anything is compared with it.

use sd_core::{Factors, multiply_add, processor_seconds};
use std::hint::black_box;

/// Runs of each loop; the fastest counts.
const RUNS: usize = 20;
/// Steps of a loop.
const STEPS: usize = 1 << 20;
/// Values of a stream: far more than caches hold.
const STREAM: usize = 1 << 26;
/// Values that are summed side by side.
const LANES: usize = 64;

/// Ceilings of one thread.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ceilings {
    /// Multiplications and additions of f32 in registers, in GFLOP/s.
    pub f32: f64,
    /// Those of bf16; 0 without instructions for it.
    pub bf16: f64,
    /// Those of 8-bit integers; 0 without instructions for it.
    pub int8: f64,
    /// Bytes that a sum over memory reads, in GB/s.
    pub read: f64,
}

impl Ceilings {
    /// Measures them.
    pub fn measure() -> Ceilings {
        let speed = |factors: Factors| {
            let once = |_| {
                let start = processor_seconds();
                multiply_add(factors, STEPS).map(|operations| operations / (processor_seconds() - start) / 1e9)
            };
            (0..RUNS).filter_map(once).fold(0.0, f64::max)
        };
        let memory = vec![1.0f32; STREAM];
        let read = (0..RUNS)
            .map(|_| {
                let start = processor_seconds();
                black_box(sum(&memory));
                (4 * STREAM) as f64 / (processor_seconds() - start) / 1e9
            })
            .fold(0.0, f64::max);
        Ceilings { f32: speed(Factors::F32), bf16: speed(Factors::Bf16), int8: speed(Factors::Int8), read }
    }

    /// That of products with factors in bf16, where the machine has them, else of f32.
    pub fn products(&self, bf16: bool) -> f64 {
        if bf16 && self.bf16 > 0.0 { self.bf16 } else { self.f32 }
    }
}

fn sum(values: &[f32]) -> [f32; LANES] {
    let mut out = [0.0; LANES];
    for chunk in values.chunks_exact(LANES) {
        out.iter_mut().zip(chunk).for_each(|(o, v)| *o += v);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_of_ones_counts_them() {
        assert_eq!(sum(&vec![1.0; 640]).iter().sum::<f32>(), 640.0);
    }

    #[test]
    fn narrower_factors_are_counted_as_more_operations() {
        let steps = |factors| multiply_add(factors, 10);
        if let (Some(f32s), Some(bf16s), Some(int8s)) =
            (steps(Factors::F32), steps(Factors::Bf16), steps(Factors::Int8))
        {
            assert!((f32s, bf16s, int8s) == (10.0 * 20.0 * 32.0, 2.0 * f32s, 4.0 * f32s));
        }
    }
}
