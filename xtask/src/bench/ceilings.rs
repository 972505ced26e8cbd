//! What the machine can do at most, measured before anything is compared with it.

use std::hint::black_box;
use std::time::Instant;

/// Runs of each loop; the fastest counts.
const RUNS: usize = 20;
/// Independent sums, enough to hide the latency of a multiply-add.
const SUMS: usize = 12;
/// Values in a sum: a register of the widest vectors.
const LANES: usize = 16;
/// Multiply-adds of each value.
const STEPS: usize = 1 << 20;
/// Values of a stream: far more than caches hold.
const STREAM: usize = 1 << 25;

/// Ceilings of the processor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ceilings {
    /// Threads that computed.
    pub threads: usize,
    /// f32 multiply-adds, counted as two operations, in GFLOP/s. The compiler picks the width of the vectors, which may be
    /// half of the widest.
    pub gflops: f64,
    /// Bytes that a sum over memory reads, in GB/s.
    pub read: f64,
}

impl Ceilings {
    /// One thread per processor.
    pub fn threads() -> usize {
        std::thread::available_parallelism().map_or(1, usize::from)
    }

    /// Measures them on `threads` threads at once; 0 for one per processor.
    pub fn measure(threads: usize) -> Ceilings {
        let threads = if threads == 0 { Ceilings::threads() } else { threads };
        let flop = (2 * SUMS * LANES * STEPS * threads) as f64;
        let gflops = flop / fastest(threads, |_| _ = black_box(multiply_add())) / 1e9;
        let memory = vec![1.0f32; STREAM];
        let parts: Vec<&[f32]> = memory.chunks(STREAM.div_ceil(threads)).collect();
        let part = |i: usize| parts.get(i).copied().unwrap_or_default();
        let read = (4 * STREAM) as f64 / fastest(threads, |i| _ = black_box(sum(part(i)))) / 1e9;
        Ceilings { threads, gflops, read }
    }
}

/// Seconds of the fastest run of `work` on every thread at once, each with its number.
fn fastest(threads: usize, work: impl Fn(usize) + Sync) -> f64 {
    let once = || {
        let start = Instant::now();
        std::thread::scope(|scope| {
            for i in 0..threads {
                let work = &work;
                scope.spawn(move || work(i));
            }
        });
        start.elapsed().as_secs_f64()
    };
    (0..RUNS).map(|_| once()).fold(f64::INFINITY, f64::min)
}

/// Sums that stay in registers.
fn multiply_add() -> [[f32; LANES]; SUMS] {
    let mut sums = [[0.0f32; LANES]; SUMS];
    let (a, b) = (black_box([0.999f32; LANES]), black_box([1e-3f32; LANES]));
    for _ in 0..STEPS {
        for sum in &mut sums {
            for ((s, a), b) in sum.iter_mut().zip(&a).zip(&b) {
                *s = s.mul_add(*a, *b);
            }
        }
    }
    sums
}

fn sum(values: &[f32]) -> [f32; 4 * LANES] {
    let mut out = [0.0; 4 * LANES];
    for chunk in values.chunks_exact(4 * LANES) {
        out.iter_mut().zip(chunk).for_each(|(o, v)| *o += v);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The fixed point of `s = 0.999 s + 0.001` is 1, and a sum of ones counts them.
    #[test]
    fn loops_compute_what_they_claim() {
        assert!(multiply_add().iter().flatten().all(|s| (s - 1.0).abs() < 1e-2));
        assert_eq!(sum(&vec![1.0; 640]).iter().sum::<f32>(), 640.0);
    }
}
