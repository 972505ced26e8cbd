//! Standard normal noise, value for value as torch draws it on the CPU and on CUDA, and as libstdc++ does.
//!
//! Transcendental functions are evaluated in f64 and rounded once, so values differ between machines at most where
//! their mathematics libraries disagree in the last bit of an f64.

mod minstd;

use std::f32::consts::TAU as TAU_F32;
use std::f64::consts::TAU;

use crate::names::named;
use minstd::MinStd;

/// Which generator draws noise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum RngKind {
    /// Philox4x32-10, as torch on CUDA.
    #[default]
    Cuda,
    /// MT19937, as torch on the CPU.
    Cpu,
    /// C++'s default engine, as libstdc++ has it.
    StdDefault,
}

named!(RngKind, "rng", [("std_default", RngKind::StdDefault), ("cuda", RngKind::Cuda), ("cpu", RngKind::Cpu)]);

/// A seeded stream of standard normal values.
#[derive(Debug, Clone)]
pub struct Rng(Stream);

#[derive(Debug, Clone)]
enum Stream {
    Philox(Philox),
    Mt19937(Box<Mt19937>),
    MinStd(MinStd),
}

impl Rng {
    /// A generator in the state torch's has after `manual_seed(seed)`, or C++'s after `seed(seed)`.
    pub fn new(kind: RngKind, seed: u64) -> Rng {
        Rng(match kind {
            RngKind::Cuda => Stream::Philox(Philox { key: seed, calls: 0 }),
            RngKind::Cpu => Stream::Mt19937(Box::new(Mt19937::new(seed))),
            RngKind::StdDefault => Stream::MinStd(MinStd::new(seed)),
        })
    }

    /// What one call of `torch.randn` with `n` elements gives, in memory order, or one new `normal_distribution`.
    pub fn randn(&mut self, n: usize) -> Vec<f32> {
        match &mut self.0 {
            Stream::Philox(p) => p.randn(n),
            Stream::Mt19937(m) => m.randn(n),
            Stream::MinStd(m) => m.randn(n),
        }
    }
}

/// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11).
#[derive(Debug, Clone)]
struct Philox {
    key: u64,
    calls: u32,
}

impl Philox {
    /// The counter is (call, 0, element, 0); the normal is cuRAND's Box-Muller on the first two words.
    fn randn(&mut self, n: usize) -> Vec<f32> {
        let call = self.calls;
        self.calls = self.calls.wrapping_add(1);
        (0..n)
            .map(|i| {
                let [a, b, ..] = philox4x32_10([call, 0, i as u32, 0], self.key);
                let u = (f64::from(a) + 0.5) / 4_294_967_296.0;
                let v = (f64::from(b) + 0.5) * (TAU / 4_294_967_296.0);
                ((-2.0 * u.ln()).sqrt() * v.sin()) as f32
            })
            .collect()
    }
}

fn philox4x32_10(mut c: [u32; 4], key: u64) -> [u32; 4] {
    let mut k = [key as u32, (key >> 32) as u32];
    for _ in 0..10 {
        let a = u64::from(c[0]) * 0xD251_1F53;
        let b = u64::from(c[2]) * 0xCD9E_8D57;
        c = [(b >> 32) as u32 ^ c[1] ^ k[0], b as u32, (a >> 32) as u32 ^ c[3] ^ k[1], a as u32];
        k = [k[0].wrapping_add(0x9E37_79B9), k[1].wrapping_add(0xBB67_AE85)];
    }
    c
}

const N: usize = 624;
const M: usize = 397;

/// MT19937 (Matsumoto and Nishimura, 1998) with torch's two ways to make normals from it.
#[derive(Debug, Clone)]
struct Mt19937 {
    state: [u32; N],
    next: usize,
    /// The second value of the last pair drawn one by one; later calls for few values use it up first.
    spare: Option<f64>,
}

impl Mt19937 {
    /// Only the low 32 bits of the seed count, as in torch.
    fn new(seed: u64) -> Mt19937 {
        let mut state = [0; N];
        let mut last = seed as u32;
        for (i, s) in (0u32..).zip(state.iter_mut()) {
            if i > 0 {
                last = 1_812_433_253u32.wrapping_mul(last ^ (last >> 30)).wrapping_add(i);
            }
            *s = last;
        }
        Mt19937 { state, next: N, spare: None }
    }

    fn word(&mut self) -> u32 {
        if self.next >= N {
            self.refill();
        }
        let mut y = self.state[self.next];
        self.next += 1;
        y ^= y >> 11;
        y ^= (y << 7) & 0x9D2C_5680;
        y ^= (y << 15) & 0xEFC6_0000;
        y ^ (y >> 18)
    }

    fn refill(&mut self) {
        for i in 0..N {
            let y = (self.state[i] & 0x8000_0000) | (self.state[(i + 1) % N] & 0x7FFF_FFFF);
            let twist = if y & 1 == 1 { 0x9908_B0DF } else { 0 };
            self.state[i] = self.state[(i + M) % N] ^ (y >> 1) ^ twist;
        }
        self.next = 0;
    }

    /// Uniform in [0, 1), 24 bits.
    fn uniform_f32(&mut self) -> f32 {
        (self.word() & 0x00FF_FFFF) as f32 / 16_777_216.0
    }

    /// Uniform in [0, 1), 53 bits of a 64-bit word whose high half is drawn first.
    fn uniform_f64(&mut self) -> f64 {
        let word = u64::from(self.word()) << 32 | u64::from(self.word());
        (word & ((1 << 53) - 1)) as f64 / 9_007_199_254_740_992.0
    }

    fn randn(&mut self, n: usize) -> Vec<f32> {
        if n < 16 {
            return (0..n).map(|_| self.normal() as f32).collect();
        }
        let mut x: Vec<f32> = (0..n).map(|_| self.uniform_f32()).collect();
        let (blocks, tail) = x.as_chunks_mut::<16>();
        blocks.iter_mut().for_each(normal_block);
        if !tail.is_empty() {
            // The last 16 values are drawn afresh, over the end of the last whole block.
            let mut last: [f32; 16] = std::array::from_fn(|_| self.uniform_f32());
            normal_block(&mut last);
            if let Some(end) = x.last_chunk_mut() {
                *end = last;
            }
        }
        x
    }

    fn normal(&mut self) -> f64 {
        if let Some(spare) = self.spare.take() {
            return spare;
        }
        let (angle, u) = (self.uniform_f64() * TAU, self.uniform_f64());
        let radius = (-2.0 * (-u).ln_1p()).sqrt();
        self.spare = Some(radius * angle.sin());
        radius * angle.cos()
    }
}

/// Box-Muller on a block of uniforms: eight radii, then eight angles, which torch rounds to f32.
fn normal_block(x: &mut [f32; 16]) {
    let (radii, angles) = x.split_at_mut(8);
    for (a, b) in radii.iter_mut().zip(angles) {
        let radius = (-2.0 * f64::from(1.0 - *a).ln()).sqrt();
        let (sin, cos) = f64::from(TAU_F32 * *b).sin_cos();
        *a = (radius * cos) as f32;
        *b = (radius * sin) as f32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Random123's published vectors for philox4x32 with 10 rounds.
    #[test]
    fn philox_known_answers() {
        let cases = [
            ([0; 4], 0, [0x6627_E8D5, 0xE169_C58D, 0xBC57_AC4C, 0x9B00_DBD8]),
            ([u32::MAX; 4], u64::MAX, [0x408F_276D, 0x41C8_3B0E, 0xA20B_C7C6, 0x6D54_51FD]),
            (
                [0x243F_6A88, 0x85A3_08D3, 0x1319_8A2E, 0x0370_7344],
                0x299F_31D0_A409_3822,
                [0xD16C_FE09, 0x94FD_CCEB, 0x5001_E420, 0x2412_6EA1],
            ),
        ];
        for (counter, key, want) in cases {
            assert_eq!(philox4x32_10(counter, key), want);
        }
    }

    /// The 10,000th word from the default seed, from the C++ standard's [rand.predef].
    #[test]
    fn mt19937_known_answer() {
        let mut m = Mt19937::new(5489);
        let last = (0..10_000).map(|_| m.word()).last();
        assert_eq!(last, Some(4_123_659_995));
    }
}
