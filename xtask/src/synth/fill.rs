//! Seeded values, fast enough that the disk is the limit.

use super::Spec;
use sd_core::{DType, Result, convert};
use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// Draws are looked up by 16 random bits in a table of that many equally likely values.
const TABLE: usize = 1 << 16;
/// Elements in the table of a quantised type, whose entries are blocks.
const QUANTISED: usize = 1 << 18;
/// Random numbers that one task draws. Four table entries are taken from each.
const TASK: usize = 1 << 18;

/// What a tensor is filled with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fill {
    /// Normal with mean 0 and variance `1 / n`.
    FanIn(usize),
    /// Normal with the given mean and standard deviation 0.02.
    Around(f32),
}

/// Makes tensor contents; tables are kept, because many tensors share one.
pub struct Values {
    seed: u64,
    quantiles: Vec<f32>,
    tables: HashMap<Key, Table>,
}

/// A type, and mean and standard deviation as bit patterns.
type Key = (DType, u32, u32);

/// Blocks of a type, of a power of two of which each is as likely as any.
struct Table {
    /// Bytes of a block.
    size: usize,
    blocks: Vec<u8>,
}

impl Values {
    /// Values of the stream `seed`.
    pub fn new(seed: u64) -> Values {
        let quantiles = (0..TABLE).map(|i| normal_quantile((i as f64 + 0.5) / TABLE as f64) as f32);
        Values { seed, quantiles: quantiles.collect(), tables: HashMap::new() }
    }

    /// The bytes of `spec` as `dtype`. Blocks of quantised types are drawn from a table of quantised random values.
    ///
    /// # Errors
    /// No values are written as `dtype`.
    pub fn bytes(&mut self, spec: &Spec, dtype: DType) -> Result<Vec<u8>> {
        let (mean, deviation) = match spec.fill {
            Fill::FanIn(n) => (0.0, (n.max(1) as f32).sqrt().recip()),
            Fill::Around(mean) => (mean, 0.02),
        };
        let table = match self.tables.entry((dtype, mean.to_bits(), deviation.to_bits())) {
            Entry::Occupied(found) => found.into_mut(),
            Entry::Vacant(place) => place.insert(Table::new(dtype, &self.quantiles, mean, deviation)?),
        };
        let count = spec.shape.iter().product::<usize>() / dtype.block();
        let mut bytes = vec![0u8; count * table.size];
        let start = self.seed ^ fnv1a(spec.name.as_bytes());
        let tasks = std::sync::Mutex::new(bytes.chunks_mut(4 * TASK * table.size).enumerate());
        let next = || tasks.lock().ok()?.next();
        std::thread::scope(|scope| {
            for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
                scope.spawn(|| {
                    while let Some((task, chunk)) = next() {
                        table.draw(start.wrapping_add(GAMMA.wrapping_mul((task * TASK) as u64)), chunk);
                    }
                });
            }
        });
        Ok(bytes)
    }
}

impl Table {
    fn new(dtype: DType, quantiles: &[f32], mean: f32, deviation: f32) -> Result<Table> {
        let values: Vec<f32> = if dtype.is_quantised() {
            let mut state = 0;
            let draw = |_| quantiles.get((split_mix(&mut state) & 0xffff) as usize).copied().unwrap_or_default();
            (0..QUANTISED).map(draw).collect()
        } else {
            quantiles.to_vec()
        };
        let values: Vec<f32> = values.iter().map(|q| mean + deviation * q).collect();
        Ok(Table { size: dtype.block_bytes(), blocks: convert::from_f32(dtype, &values, dtype.block())? })
    }

    fn draw(&self, mut state: u64, out: &mut [u8]) {
        let mask = (self.blocks.len() / self.size).min(TABLE) - 1;
        for chunk in out.chunks_mut(4 * self.size) {
            let mut bits = split_mix(&mut state);
            for block in chunk.chunks_exact_mut(self.size) {
                let from = (bits as usize & mask) * self.size;
                block.copy_from_slice(self.blocks.get(from..from + self.size).unwrap_or_default());
                bits >>= 16;
            }
        }
    }
}

/// The 64-bit FNV-1a hash.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &b| (hash ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3))
}

/// What SplitMix64's state grows by.
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// SplitMix64 (Steele, Lea, Flood 2014).
fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(GAMMA);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The standard normal quantile of `p` in (0, 1), to a few units of 1e-4: Abramowitz & Stegun 26.2.23.
pub fn normal_quantile(p: f64) -> f64 {
    let tail = p.min(1.0 - p);
    let t = (-2.0 * tail.ln()).sqrt();
    let above = 2.515_517 + t * (0.802_853 + t * 0.010_328);
    let below = 1.0 + t * (1.432_788 + t * (0.189_269 + t * 0.001_308));
    (t - above / below).copysign(p - 0.5)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known quantiles of the normal distribution.
    #[test]
    fn quantiles() {
        for (p, want) in [(0.5, 0.0), (0.975, 1.959_964), (0.841_344_7, 1.0), (0.001, -3.090_232)] {
            let got = normal_quantile(p);
            assert!((got - want).abs() < 5e-4, "{p}: {got}, want {want}");
        }
    }

    fn floats(bytes: &[u8], dtype: DType) -> Vec<f64> {
        let count = bytes.len() / dtype.block_bytes() * dtype.block();
        convert::to_f32(dtype, bytes, count).unwrap().into_iter().map(f64::from).collect()
    }

    #[test]
    fn values_have_their_spread_and_depend_on_seed_and_name_only() {
        let spec = |name: &str, fill| Spec { name: name.into(), shape: vec![100, 1280], fill };
        let moments = |v: &[f64]| {
            let mean = v.iter().sum::<f64>() / v.len() as f64;
            (mean, (v.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / v.len() as f64).sqrt())
        };
        for dtype in [DType::F16, DType::Q8_0, DType::Q4K] {
            let draw = |seed, name| Values::new(seed).bytes(&spec(name, Fill::FanIn(1280)), dtype).unwrap();
            let v = draw(1, "a");
            let (mean, deviation) = moments(&floats(&v, dtype));
            let want = 1280f64.sqrt().recip();
            // Standard errors of mean and deviation over 128,000 draws are 0.3 % and 0.2 % of the deviation. Blocks
            // that are drawn several times, and rounding to 16 levels, add to them.
            assert!(
                mean.abs() < 0.02 * want && (deviation / want - 1.0).abs() < 0.02,
                "{dtype}: {mean} {deviation}"
            );
            assert_eq!(draw(1, "a"), v, "{dtype}");
            assert_ne!(draw(2, "a"), v, "{dtype}");
            assert_ne!(draw(1, "b"), v, "{dtype}");
        }
        let ones = Values::new(1).bytes(&spec("a", Fill::Around(1.0)), DType::F16).unwrap();
        let (mean, deviation) = moments(&floats(&ones, DType::F16));
        assert!((mean - 1.0).abs() < 1e-3 && (deviation - 0.02).abs() < 1e-3, "{mean} {deviation}");
    }

    /// Tasks of several threads together draw what one would.
    #[test]
    fn long_tensors_are_one_stream() {
        let elements = 4 * TASK + 1000;
        let long = Spec { name: "a".into(), shape: vec![elements], fill: Fill::Around(0.0) };
        let bytes = Values::new(3).bytes(&long, DType::F16).unwrap();
        let table = Table::new(DType::F16, &Values::new(3).quantiles, 0.0, 0.02).unwrap();
        let mut want = vec![0; 2 * elements];
        table.draw(3 ^ fnv1a(b"a"), &mut want);
        assert_eq!(bytes, want);
    }
}
