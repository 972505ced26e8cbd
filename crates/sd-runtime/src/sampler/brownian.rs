//! Noise that belongs to an interval of levels, so that runs of different step counts follow one path.
//!
//! The path is that of torchsde's `BrownianTree` as k-diffusion's `BrownianTreeNoiseSampler` queries it on the CPU: a
//! binary tree of halvings down to millionths, each node's normals from torch's CPU generator, whose seed is numpy's
//! `SeedSequence` of the run's seed and the node's place. Values agree with torchsde's to rounding.

use crate::rng::{Rng, RngKind};

/// Where torchsde stops halving: levels are rounded to so many decimals.
const DECIMALS: usize = 6;
/// Halvings that reach millionths from any level a model has.
const DEEPEST: u64 = 64;
/// Words of numpy's pool, as torchsde asks for.
const POOL: usize = 24;

/// A Brownian path over an interval of levels.
#[derive(Debug, Clone)]
pub(super) struct Brownian {
    seed: u64,
    elements: usize,
    ends: [f64; 2],
    /// The path's increment over the whole interval, once it was needed.
    whole: Option<Vec<f64>>,
    /// The path at the level asked for last.
    last: Option<(f64, Vec<f64>)>,
}

impl Brownian {
    /// A path for `elements` values over the levels from `low` to `high`.
    pub(super) fn new(seed: u64, elements: usize, low: f64, high: f64) -> Brownian {
        Brownian { seed, elements, ends: [asked(low), asked(high)], whole: None, last: None }
    }

    /// The path's change from level `from` to `to`, divided by the root of their distance: standard normal.
    pub(super) fn increment(&mut self, from: f64, to: f64) -> Vec<f32> {
        let span = f64::from((from as f32 - to as f32).abs()).sqrt();
        if span == 0.0 {
            return vec![0.0; self.elements];
        }
        let (start, end) = (self.at(from), self.at(to));
        end.iter().zip(&start).map(|(e, s)| ((e - s) / span) as f32).collect()
    }

    /// The path at a level, 0 at the lower end.
    fn at(&mut self, level: f64) -> Vec<f64> {
        let [low, high] = self.ends;
        let level = asked(level).clamp(low, high);
        if let Some((_, path)) = self.last.as_ref().filter(|(known, _)| *known == level) {
            return path.clone();
        }
        let path = self.descend(level);
        self.last = Some((level, path.clone()));
        path
    }

    fn descend(&mut self, level: f64) -> Vec<f64> {
        let [mut start, mut end] = self.ends;
        let mut path = vec![0.0; self.elements];
        let mut piece = self.whole();
        let (mut key, mut depth) = (0u64, 0u64);
        while level != start {
            if level == end || depth > DEEPEST {
                path.iter_mut().zip(&piece).for_each(|(p, w)| *p += w);
                break;
            }
            let middle = rounded(0.5 * (start + end));
            let (left, right) = (middle - start, end - middle);
            let h = end - start;
            let noise = self.normals(node_seed(self.seed, Some((key, depth))));
            let spread = (left * right / h).sqrt();
            let at_middle: Vec<f64> =
                piece.iter().zip(&noise).map(|(w, n)| left * w / h + spread * f64::from(*n)).collect();
            if level <= middle {
                (end, piece, key) = (middle, at_middle, 2 * key);
            } else {
                path.iter_mut().zip(&at_middle).for_each(|(p, w)| *p += w);
                piece.iter_mut().zip(&at_middle).for_each(|(w, l)| *w -= l);
                (start, key) = (middle, 2 * key + 1);
            }
            depth += 1;
        }
        path
    }

    fn whole(&mut self) -> Vec<f64> {
        if let Some(whole) = &self.whole {
            return whole.clone();
        }
        let scale = (self.ends[1] - self.ends[0]).max(0.0).sqrt();
        let noise = self.normals(node_seed(self.seed, None));
        let whole: Vec<f64> = noise.iter().map(|n| f64::from(*n) * scale).collect();
        self.whole = Some(whole.clone());
        whole
    }

    fn normals(&self, seed: u32) -> Vec<f32> {
        Rng::new(RngKind::Cpu, u64::from(seed)).randn(self.elements)
    }
}

/// A level as the tree is asked for it: k-diffusion's are f32.
fn asked(level: f64) -> f64 {
    rounded(f64::from(level as f32))
}

/// Rounded in decimal, as Python's `round`.
fn rounded(level: f64) -> f64 {
    format!("{level:.DECIMALS$}").parse().unwrap_or(level)
}

/// The seed of a node's normals: the first word of numpy's `SeedSequence(seed, spawn_key = (key, depth))`; of the
/// whole interval, without a key.
fn node_seed(seed: u64, place: Option<(u64, u64)>) -> u32 {
    let mut words = words(seed);
    if let Some((key, depth)) = place {
        words.resize(words.len().max(POOL), 0);
        words.extend(self::words(key));
        words.extend(self::words(depth));
    }
    first_word(&words)
}

/// An integer in 32-bit words, the least first; 0 is one word.
fn words(n: u64) -> Vec<u32> {
    let (low, high) = (n as u32, (n >> 32) as u32);
    if high == 0 { vec![low] } else { vec![low, high] }
}

/// numpy's `SeedSequence`, of which only the first word of state is needed (O'Neill, "Developing a seed_seq
/// alternative", 2015).
fn first_word(entropy: &[u32]) -> u32 {
    let mut constant = 0x43B0_D7E5u32;
    let mut hash = |value: u32| {
        let value = value ^ constant;
        constant = constant.wrapping_mul(0x931E_8875);
        let value = value.wrapping_mul(constant);
        value ^ (value >> 16)
    };
    let mix = |x: u32, y: u32| {
        let z = x.wrapping_mul(0xCA01_F9DD).wrapping_sub(y.wrapping_mul(0x4973_F715));
        z ^ (z >> 16)
    };
    let mut pool: Vec<u32> = (0..POOL).map(|i| hash(entropy.get(i).copied().unwrap_or(0))).collect();
    for source in 0..POOL {
        for target in (0..POOL).filter(|t| *t != source) {
            let hashed = hash(pool.get(source).copied().unwrap_or(0));
            if let Some(word) = pool.get_mut(target) {
                *word = mix(*word, hashed);
            }
        }
    }
    for source in entropy.iter().skip(POOL) {
        pool.iter_mut().for_each(|word| *word = mix(*word, hash(*source)));
    }
    let start = 0x8B51_F9DDu32;
    let word = pool.first().copied().unwrap_or(0) ^ start;
    let word = word.wrapping_mul(start.wrapping_mul(0x58F3_8DED));
    word ^ (word >> 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `numpy.random.SeedSequence(3, spawn_key=..., pool_size=24).generate_state(1)`.
    #[test]
    fn seeds_are_numpys() {
        assert_eq!(node_seed(3, None), 1_578_447_408);
        assert_eq!(node_seed(3, Some((0, 0))), 884_927_448);
        assert_eq!(node_seed((1 << 40) + 5, Some((1 << 33, 33))), 4_272_764_576);
    }

    #[test]
    fn increments_add_up_and_have_the_right_size() {
        let mut tree = Brownian::new(7, 4096, 0.03, 14.6);
        let whole = tree.increment(14.6, 0.03);
        let (upper, lower) = (tree.increment(14.6, 2.0), tree.increment(2.0, 0.03));
        for ((w, u), l) in whole.iter().zip(&upper).zip(&lower) {
            let sum = u * 12.6f32.sqrt() + l * 1.97f32.sqrt();
            assert!((w * 14.57f32.sqrt() - sum).abs() < 1e-4);
        }
        for part in [&whole, &upper, &lower] {
            let variance = part.iter().map(|v| f64::from(v * v)).sum::<f64>() / 4096.0;
            assert!((variance - 1.0).abs() < 0.1, "{variance}");
        }
        let covariance = upper.iter().zip(&lower).map(|(u, l)| f64::from(u * l)).sum::<f64>() / 4096.0;
        assert!(covariance.abs() < 0.1, "{covariance}");
        assert_eq!(tree.increment(1.0, 1.0), vec![0.0; 4096]);
    }
}
