//! The options of caches as users write them.

use std::str::FromStr;

use sd_core::{Error, Result};

use super::{CacheMode, StepCache};

const OPTION: &str = "cache_option";
/// The most blocks, steps or orders that an option can ask for.
const MOST: usize = 10_000;
const MAX_ORDER: usize = 4;
/// The most coefficients of a forecast.
const MAX_DEGREE: usize = 16;

/// A [`StepCache`], read.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum CacheOptions {
    Easy(EasyOptions),
    UCache(UOptions),
    Blocks(BlockOptions),
    Spectrum(SpectrumOptions),
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct EasyOptions {
    /// How much may be missed, as a share of the output.
    pub(super) threshold: f64,
    /// The share of the timesteps after which steps are left out.
    pub(super) start: f64,
    /// And before which.
    pub(super) end: f64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct UOptions {
    pub(super) threshold: f64,
    /// Shares of the steps.
    pub(super) start: f64,
    pub(super) end: f64,
    /// What an error is multiplied by in each step.
    pub(super) decay: f64,
    /// Whether errors are measured by the output and its usual change.
    pub(super) relative: bool,
    /// Whether a computed step begins anew.
    pub(super) reset: bool,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct BlockOptions {
    /// Blocks at the beginning and at the end that are always computed.
    pub(super) ends: [usize; 2],
    /// The relative change of what the first blocks add, below which the middle is left out.
    pub(super) threshold: f64,
    /// Steps at the beginning that are computed.
    pub(super) warmup: usize,
    /// The most steps that are left out, and in a row.
    pub(super) most: Option<usize>,
    pub(super) most_in_a_row: Option<usize>,
    /// Derivatives of the forecast; 0 repeats the last value.
    pub(super) order: usize,
    /// For each step whether it must be computed; empty for none.
    pub(super) mask: Vec<bool>,
    /// Whether the other steps are left out whatever has changed.
    pub(super) fixed: bool,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct SpectrumOptions {
    /// The share of the polynomials in a forecast; a straight line has the rest.
    pub(super) weight: f64,
    /// The degree of the polynomials.
    pub(super) degree: usize,
    /// The factor of the coefficients' squares in the fit.
    pub(super) ridge: f64,
    /// Every how many steps one is computed at first.
    pub(super) window: f64,
    /// How much the window grows with each computed step.
    pub(super) flex: f64,
    /// Steps at the beginning that are computed.
    pub(super) warmup: usize,
    /// The share of the steps after which all are computed.
    pub(super) stop: f64,
}

impl CacheOptions {
    /// # Errors
    /// An item without `=`, a key that the mode does not have, or a value outside of its range, by name.
    pub(crate) fn new(cache: &StepCache) -> Result<CacheOptions> {
        let mut options = match cache.mode {
            CacheMode::EasyCache => CacheOptions::Easy(EasyOptions { threshold: 0.2, start: 0.15, end: 0.95 }),
            CacheMode::UCache => CacheOptions::UCache(UOptions {
                threshold: 1.0,
                start: 0.15,
                end: 0.95,
                decay: 1.0,
                relative: true,
                reset: true,
            }),
            CacheMode::DbCache | CacheMode::TaylorSeer => CacheOptions::Blocks(BlockOptions {
                ends: [8, 0],
                threshold: 0.08,
                // A mask says itself which steps are computed.
                warmup: if cache.scm_mask.is_empty() { 8 } else { 0 },
                most: None,
                most_in_a_row: None,
                order: usize::from(cache.mode == CacheMode::TaylorSeer),
                mask: cache.scm_mask.clone(),
                fixed: cache.scm_static,
            }),
            CacheMode::Spectrum => CacheOptions::Spectrum(SpectrumOptions {
                weight: 0.4,
                degree: 3,
                ridge: 1.0,
                window: 2.0,
                flex: 0.5,
                warmup: 4,
                stop: 0.9,
            }),
        };
        for item in cache.option.split(',').map(str::trim).filter(|item| !item.is_empty()) {
            let Some((key, value)) = item.split_once('=') else {
                return Err(Error::request(format!("{OPTION}: want key=value, got {item:?}")));
            };
            options.set(cache.mode, key.trim(), value.trim())?;
        }
        if let CacheOptions::Easy(EasyOptions { start, end, .. })
        | CacheOptions::UCache(UOptions { start, end, .. }) = &options
            && start >= end
        {
            return Err(Error::request(format!("{OPTION}: start must be below end, got {start} and {end}")));
        }
        if !cache.mode.is_of_blocks() && (!cache.scm_mask.is_empty() || cache.scm_static) {
            let mode = cache.mode;
            return Err(Error::request(format!("scm_mask: {mode} has none")).hint("dbcache and taylorseer do"));
        }
        Ok(options)
    }

    fn set(&mut self, mode: CacheMode, key: &str, value: &str) -> Result<()> {
        match (self, key) {
            (CacheOptions::Easy(o), "threshold") => o.threshold = within(key, value, 0.0, f64::MAX)?,
            (CacheOptions::Easy(o), "start") => o.start = within(key, value, 0.0, 1.0)?,
            (CacheOptions::Easy(o), "end") => o.end = within(key, value, 0.0, 1.0)?,
            (CacheOptions::UCache(o), "threshold") => o.threshold = within(key, value, 0.0, f64::MAX)?,
            (CacheOptions::UCache(o), "start") => o.start = within(key, value, 0.0, 1.0)?,
            (CacheOptions::UCache(o), "end") => o.end = within(key, value, 0.0, 1.0)?,
            (CacheOptions::UCache(o), "decay") => o.decay = within(key, value, 0.0, 1.0)?,
            (CacheOptions::UCache(o), "relative") => o.relative = within(key, value, 0, 1)? == 1,
            (CacheOptions::UCache(o), "reset") => o.reset = within(key, value, 0, 1)? == 1,
            (CacheOptions::Blocks(o), "Fn" | "fn") => o.ends[0] = within(key, value, 1, MOST)?,
            (CacheOptions::Blocks(o), "Bn" | "bn") => o.ends[1] = within(key, value, 0, MOST)?,
            (CacheOptions::Blocks(o), "threshold") => o.threshold = within(key, value, 0.0, f64::MAX)?,
            (CacheOptions::Blocks(o), "warmup") => o.warmup = within(key, value, 0, MOST)?,
            (CacheOptions::Blocks(o), "max_cached") => o.most = limit(key, value)?,
            (CacheOptions::Blocks(o), "max_continuous") => o.most_in_a_row = limit(key, value)?,
            (CacheOptions::Blocks(o), "order") if mode == CacheMode::TaylorSeer => {
                o.order = within(key, value, 1, MAX_ORDER)?;
            }
            (CacheOptions::Spectrum(o), "w") => o.weight = within(key, value, 0.0, 1.0)?,
            (CacheOptions::Spectrum(o), "m") => o.degree = within(key, value, 1, MAX_DEGREE)?,
            (CacheOptions::Spectrum(o), "lam") => o.ridge = within(key, value, 1e-9, f64::MAX)?,
            (CacheOptions::Spectrum(o), "window") => o.window = within(key, value, 1.0, MOST as f64)?,
            (CacheOptions::Spectrum(o), "flex") => o.flex = within(key, value, 0.0, MOST as f64)?,
            (CacheOptions::Spectrum(o), "warmup") => o.warmup = within(key, value, 0, MOST)?,
            (CacheOptions::Spectrum(o), "stop") => o.stop = within(key, value, 0.0, 1.0)?,
            (options, _) => {
                let known = options.keys(mode);
                let shown: String = key.chars().take(40).collect();
                return Err(Error::request(format!("{OPTION}: {mode} has no {shown:?}, want one of {known}")));
            }
        }
        Ok(())
    }

    fn keys(&self, mode: CacheMode) -> &'static str {
        match self {
            CacheOptions::Easy(_) => "threshold, start, end",
            CacheOptions::UCache(_) => "threshold, start, end, decay, relative, reset",
            CacheOptions::Blocks(_) if mode == CacheMode::TaylorSeer => {
                "Fn, Bn, threshold, warmup, max_cached, max_continuous, order"
            }
            CacheOptions::Blocks(_) => "Fn, Bn, threshold, warmup, max_cached, max_continuous",
            CacheOptions::Spectrum(_) => "w, m, lam, window, flex, warmup, stop",
        }
    }
}

fn within<T: FromStr + PartialOrd + std::fmt::Display + Copy>(
    key: &str,
    value: &str,
    least: T,
    most: T,
) -> Result<T> {
    let number: Option<T> = value.parse().ok();
    number.filter(|n| *n >= least && *n <= most).ok_or_else(|| {
        let shown: String = value.chars().take(40).collect();
        let range =
            if format!("{most}").len() > 20 { format!("at least {least}") } else { format!("{least} to {most}") };
        Error::request(format!("{OPTION}: {key} wants {range}, got {shown:?}"))
    })
}

/// A limit; -1 is none.
fn limit(key: &str, value: &str) -> Result<Option<usize>> {
    if value == "-1" { Ok(None) } else { within(key, value, 0, MOST).map(Some) }
}
