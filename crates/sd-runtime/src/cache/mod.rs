//! Step caches: what a run reuses of its earlier steps instead of computing it. Golden values: `oracle/caches.py`.

mod blocks;
mod options;
mod spectrum;
#[cfg(test)]
mod tests;
mod whole;

use sd_core::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::names::named;
pub(crate) use blocks::{BlockCache, Decision};
pub(crate) use options::CacheOptions;
use spectrum::Spectrum;
pub(crate) use whole::{Whole, Window};

/// How steps are left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CacheMode {
    /// What the network adds to its input is added again while the input has changed little (Zhou et al. 2025).
    EasyCache,
    /// The same with an error that grows with the steps left out in a row.
    UCache,
    /// The middle blocks of a transformer add what they added before while the first ones do about the same (cache-dit).
    DbCache,
    /// The same with what they add forecast by a Taylor expansion (Liu et al. 2025).
    TaylorSeer,
    /// Estimates are forecast by Chebyshev polynomials of the step (Han et al. 2026).
    Spectrum,
}

named!(
    CacheMode,
    "cache_mode",
    [
        ("easycache", CacheMode::EasyCache),
        ("ucache", CacheMode::UCache),
        ("dbcache", CacheMode::DbCache),
        ("taylorseer", CacheMode::TaylorSeer),
        ("cache-dit", CacheMode::TaylorSeer),
        ("spectrum", CacheMode::Spectrum),
    ]
);

impl CacheMode {
    /// Whether it works on the blocks of transformers.
    pub fn is_of_blocks(self) -> bool {
        matches!(self, CacheMode::DbCache | CacheMode::TaylorSeer)
    }
}

/// Which steps are left out, and how.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepCache {
    /// How.
    pub mode: CacheMode,
    /// Fine tuning: a list `key=value,…`; `docs/caches.md` has the keys of each mode.
    #[serde(default)]
    pub option: String,
    /// For each step whether it must be computed, for the modes on blocks. Empty leaves it to the mode.
    #[serde(default)]
    pub scm_mask: Vec<bool>,
    /// Whether steps that the mask leaves open are left out without looking at what changed.
    #[serde(default)]
    pub scm_static: bool,
}

impl StepCache {
    /// A mode with its defaults.
    pub fn new(mode: CacheMode) -> StepCache {
        StepCache { mode, option: String::new(), scm_mask: Vec::new(), scm_static: false }
    }
}

/// The cache of a run.
pub(crate) enum Cache<K> {
    Whole(Whole<K>),
    Blocks(BlockCache),
    Spectrum(Spectrum),
}

impl<K: Copy + PartialEq> Cache<K> {
    /// For a run of `steps` steps by a network of `blocks` blocks. `window` are the noise levels at a share of the
    /// timesteps that are done.
    ///
    /// # Errors
    /// The mask has another number of steps, or so many blocks have no middle.
    pub(crate) fn new(
        options: &CacheOptions,
        steps: usize,
        blocks: usize,
        window: &dyn Fn(f64) -> f64,
    ) -> Result<Cache<K>> {
        Ok(match options {
            CacheOptions::Easy(o) => {
                Cache::Whole(Whole::easy(o.threshold, Window::Levels([window(o.end), window(o.start)])))
            }
            CacheOptions::UCache(o) => Cache::Whole(Whole::ucache(*o, steps)),
            CacheOptions::Spectrum(o) => Cache::Spectrum(Spectrum::new(*o, steps)),
            CacheOptions::Blocks(o) => {
                let (mask, [front, back]) = (o.mask.len(), o.ends);
                if mask > 0 && mask != steps {
                    return Err(Error::request(format!(
                        "scm_mask: want {steps} values, one for each step, got {mask}"
                    )));
                }
                if front + back >= blocks {
                    let message = format!(
                        "cache_option: Fn={front} and Bn={back} leave none of {blocks} blocks to be cached"
                    );
                    return Err(Error::request(message));
                }
                Cache::Blocks(BlockCache::new(o.clone(), blocks))
            }
        })
    }
}

/// The mean of absolute values.
fn mean(values: impl ExactSizeIterator<Item = f32>) -> f64 {
    let count = values.len().max(1) as f64;
    values.map(|v| f64::from(v.abs())).sum::<f64>() / count
}

/// The mean distance of two lists of values.
fn distance(a: &[f32], b: &[f32]) -> f64 {
    let all = a.iter().zip(b).map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs());
    all.sum::<f64>() / a.len().max(1) as f64
}
