//! The comma-separated `key=value` list that fine-tunes samplers, schedules and guidance.

use std::str::FromStr;

use sd_core::{Error, Result};

use crate::guidance::{Apg, GuidanceSchedule};

/// What `--extra-sample-args` sets. A field that the chosen sampler, schedule or model does not read has no effect.
#[derive(Debug, Clone, PartialEq)]
pub struct SampleOptions {
    /// Guidance scales by step instead of one for all.
    pub guidance_schedule: Option<GuidanceSchedule>,
    /// Adaptive projected guidance.
    pub apg: Apg,
    /// Skips layers in the pass of the negative prompt instead of adding a pass.
    pub slg_uncond: bool,
    /// lcm: noise is held to so many of its standard deviations; 0 is off.
    pub noise_clip_std: f64,
    /// lcm: factors of the noise of the first and the last step, linear between.
    pub noise_scale: [f64; 2],
    /// euler_ge: how far the last two directions are extrapolated; 1 is plain Euler.
    pub gamma: f64,
    /// lms: how many directions, at least 1.
    pub lms_max_order: usize,
    /// lms: how many places later a coefficient's direction is taken; 0 is the published method.
    pub lms_shift: usize,
    /// lms: integrates coefficients by the midpoint rule with so many divisions; exactly without.
    pub lms_divisions: Option<usize>,
    /// flux, ltx2: mu at the smaller size.
    pub base_shift: Option<f64>,
    /// flux, ltx2: mu at the larger size.
    pub max_shift: Option<f64>,
    /// ltx2: whether the last level above 0 becomes `terminal`.
    pub stretch: bool,
    /// ltx2: the last level above 0, at most 0.99.
    pub terminal: f64,
    /// beta: the two parameters of the distribution, above 0.
    pub beta: [f64; 2],
    /// logit_normal: the mean, at 512x512 pixels if it depends on the size.
    pub mu: f64,
    /// logit_normal: the standard deviation, above 0.
    pub std: f64,
    /// logit_normal: the least and the largest logarithm of the signal-to-noise ratio.
    pub logsnr: [f64; 2],
    /// logit_normal: whether the mean depends on the size.
    pub resolution_aware: bool,
    /// img2img: strength is the share of noise to start from, not a share of the steps.
    pub strength_as_noise_level: bool,
    /// img2img: the run starts at exactly that share instead of at the next level below.
    pub force_first_sigma: bool,
}

impl Default for SampleOptions {
    fn default() -> SampleOptions {
        SampleOptions {
            guidance_schedule: None,
            apg: Apg::default(),
            slg_uncond: false,
            noise_clip_std: 0.0,
            noise_scale: [1.0, 1.0],
            gamma: 2.0,
            lms_max_order: 4,
            lms_shift: 0,
            lms_divisions: None,
            base_shift: None,
            max_shift: None,
            stretch: true,
            terminal: 0.1,
            beta: [0.6, 0.6],
            mu: 0.0,
            std: 1.75,
            logsnr: [-15.0, 18.0],
            resolution_aware: true,
            strength_as_noise_level: false,
            force_first_sigma: false,
        }
    }
}

const OPTION: &str = "extra-sample-args";

const KEYS: &[&str] = &[
    "guidance_schedule",
    "apg_eta",
    "apg_momentum",
    "apg_norm_threshold",
    "apg_norm_threshold_smoothing",
    "slg_uncond",
    "noise_clip_std",
    "noise_scale_start",
    "noise_scale_end",
    "gamma",
    "lms_max_order",
    "lms_shift",
    "lms_divisions",
    "base_shift",
    "max_shift",
    "stretch",
    "terminal",
    "alpha",
    "beta",
    "mu",
    "std",
    "logsnr_min",
    "logsnr_max",
    "resolution_aware",
    "strength_as_noise_level",
    "force_first_sigma",
];

/// The largest order of lms, beyond which its polynomials only amplify noise.
const MAX_ORDER: usize = 16;
const MAX_DIVISIONS: usize = 100_000;

impl FromStr for SampleOptions {
    type Err = Error;

    /// Items are separated by `,` or `;`, later ones override.
    ///
    /// # Errors
    /// An item without `=`, an unknown key, or a value outside its range, by name.
    fn from_str(text: &str) -> Result<SampleOptions> {
        let mut options = SampleOptions::default();
        let mut scale_end = None;
        for item in text.split([',', ';']).map(str::trim).filter(|item| !item.is_empty()) {
            let Some((key, value)) = item.split_once('=') else {
                return Err(Error::request(format!("{OPTION}: want key=value, got {item:?}")));
            };
            let (key, value) = (key.trim(), value.trim());
            match key {
                "noise_scale_end" => scale_end = Some(at_least(key, value, 0.0)?),
                _ => options.set(key, value)?,
            }
        }
        let [start, _] = options.noise_scale;
        options.noise_scale = [start, scale_end.unwrap_or(start)];
        if options.logsnr[0] >= options.logsnr[1] {
            return Err(Error::request(format!("{OPTION}: logsnr_min must be below logsnr_max")));
        }
        Ok(options)
    }
}

impl SampleOptions {
    fn set(&mut self, key: &str, value: &str) -> Result<()> {
        match key {
            "guidance_schedule" => self.guidance_schedule = Some(value.parse()?),
            "apg_eta" => self.apg.eta = number(key, value)?,
            "apg_momentum" => self.apg.momentum = number(key, value)?,
            "apg_norm_threshold" => self.apg.norm_threshold = at_least(key, value, 0.0)?,
            "apg_norm_threshold_smoothing" => self.apg.smoothing = at_least(key, value, 0.0)?,
            "slg_uncond" => self.slg_uncond = flag(key, value)?,
            "noise_clip_std" => self.noise_clip_std = at_least(key, value, 0.0)?,
            "noise_scale_start" => self.noise_scale[0] = at_least(key, value, 0.0)?,
            "gamma" => self.gamma = number(key, value)?,
            "lms_max_order" => self.lms_max_order = count(key, value, 1, MAX_ORDER)?,
            "lms_shift" => self.lms_shift = count(key, value, 0, MAX_ORDER)?,
            "lms_divisions" => self.lms_divisions = Some(count(key, value, 1, MAX_DIVISIONS)?),
            "base_shift" => self.base_shift = Some(number(key, value)?),
            "max_shift" => self.max_shift = Some(number(key, value)?),
            "stretch" => self.stretch = flag(key, value)?,
            "terminal" => self.terminal = number(key, value)?.clamp(0.0, 0.99),
            "alpha" => self.beta[0] = above_zero(key, value)?,
            "beta" => self.beta[1] = above_zero(key, value)?,
            "mu" => self.mu = number(key, value)?,
            "std" => self.std = above_zero(key, value)?,
            "logsnr_min" => self.logsnr[0] = number(key, value)?,
            "logsnr_max" => self.logsnr[1] = number(key, value)?,
            "resolution_aware" => self.resolution_aware = flag(key, value)?,
            "strength_as_noise_level" => self.strength_as_noise_level = flag(key, value)?,
            "force_first_sigma" => self.force_first_sigma = flag(key, value)?,
            _ => {
                let known: Vec<(&'static str, ())> = KEYS.iter().map(|key| (*key, ())).collect();
                crate::names::pick(OPTION, key, &known)?;
            }
        }
        Ok(())
    }
}

fn bad(key: &str, want: &str, value: &str) -> Error {
    Error::request(format!("{OPTION}: {key} wants {want}, got {value:?}"))
}

fn number(key: &str, value: &str) -> Result<f64> {
    value.parse().ok().filter(|v: &f64| v.is_finite()).ok_or_else(|| bad(key, "a number", value))
}

fn at_least(key: &str, value: &str, least: f64) -> Result<f64> {
    let v = number(key, value)?;
    if v >= least { Ok(v) } else { Err(bad(key, &format!("at least {least}"), value)) }
}

fn above_zero(key: &str, value: &str) -> Result<f64> {
    let v = number(key, value)?;
    if v > 0.0 { Ok(v) } else { Err(bad(key, "more than 0", value)) }
}

fn count(key: &str, value: &str, least: usize, most: usize) -> Result<usize> {
    let in_range = value.parse().ok().filter(|n| (least..=most).contains(n));
    in_range.ok_or_else(|| bad(key, &format!("a whole number from {least} to {most}"), value))
}

fn flag(key: &str, value: &str) -> Result<bool> {
    match value.to_ascii_lowercase().as_str() {
        "1" | "true" | "yes" | "on" => Ok(true),
        "0" | "false" | "no" | "off" => Ok(false),
        _ => Err(bad(key, "true or false", value)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses() {
        let options: SampleOptions =
            " gamma=1.5, noise_scale_start=0.9;stretch=OFF ,lms_divisions=1000,".parse().unwrap();
        let want = SampleOptions {
            gamma: 1.5,
            noise_scale: [0.9, 0.9],
            stretch: false,
            lms_divisions: Some(1000),
            ..SampleOptions::default()
        };
        assert_eq!(options, want);
        assert_eq!("".parse::<SampleOptions>().unwrap(), SampleOptions::default());
        let ends: SampleOptions = "noise_scale_end=0.5,guidance_schedule=7x2+3x1".parse().unwrap();
        assert_eq!(ends.noise_scale, [1.0, 0.5]);
        assert_eq!(ends.guidance_schedule.unwrap().scales(5, 2.0), [7.0, 7.0, 3.0, 2.0, 2.0]);
    }

    #[test]
    fn every_key_is_known() {
        for key in KEYS {
            let value = if *key == "guidance_schedule" { "1x1" } else { "1" };
            assert!(format!("{key}={value}").parse::<SampleOptions>().is_ok(), "{key}");
        }
    }

    #[test]
    fn refusals_name_the_key() {
        for (text, message) in [
            ("gama=1", "extra-sample-args: no \"gama\", did you mean gamma?"),
            ("gamma", "extra-sample-args: want key=value, got \"gamma\""),
            ("gamma=x", "extra-sample-args: gamma wants a number, got \"x\""),
            ("std=0", "extra-sample-args: std wants more than 0"),
            ("lms_max_order=0", "extra-sample-args: lms_max_order wants a whole number from 1 to 16"),
            ("stretch=maybe", "extra-sample-args: stretch wants true or false"),
            ("guidance_schedule=7x", "extra-sample-args: guidance_schedule"),
            ("logsnr_min=20", "extra-sample-args: logsnr_min must be below logsnr_max"),
        ] {
            let e = text.parse::<SampleOptions>().unwrap_err();
            assert!(e.is_request() && e.to_string().starts_with(message), "{e}");
        }
    }
}
