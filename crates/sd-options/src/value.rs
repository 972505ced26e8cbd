//! Parsers of option values. They return what is wrong with a value; clap names the option.

use sd_runtime::{DType, PreviewMode, VaeFormat};
use std::fmt::Display;
use std::str::FromStr;
use tracing::level_filters::LevelFilter;

/// Level names, most verbose first. `tracing` has the same five under other names.
///
/// # Errors
/// There is no such level.
pub fn log_level(text: &str) -> Result<LevelFilter, String> {
    match text {
        "debug" => Ok(LevelFilter::TRACE),
        "verbose" => Ok(LevelFilter::DEBUG),
        "info" => Ok(LevelFilter::INFO),
        "warn" => Ok(LevelFilter::WARN),
        "error" => Ok(LevelFilter::ERROR),
        _ => Err("want debug, verbose, info, warn or error".to_owned()),
    }
}

/// `on` or `off`.
///
/// # Errors
/// It is neither.
pub fn switch(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("want on or off".to_owned()),
    }
}

/// A type that weights can be converted to.
///
/// # Errors
/// There is no such type; the message lists them.
pub fn weight_type(text: &str) -> Result<DType, String> {
    DType::parse(text).filter(|d| d.is_weight_type()).ok_or_else(|| {
        let names: Vec<&str> = DType::all().filter(|d| d.is_weight_type()).map(DType::name).collect();
        format!("want one of {}", names.join(", "))
    })
}

/// The latents of an autoencoder, if they are not those of the model's family.
#[derive(Debug, Clone, Copy)]
pub struct OwnVae(pub Option<VaeFormat>);

/// The latents of an autoencoder by name.
///
/// # Errors
/// There are no such latents.
pub fn vae_format(text: &str) -> Result<OwnVae, String> {
    if text == "auto" { Ok(OwnVae(None)) } else { named(text).map(|format| OwnVae(Some(format))) }
}

/// A parser of whole numbers from `least` to `most`, of which not a character may be left over.
pub fn whole<T>(least: T, most: T) -> impl Fn(&str) -> Result<T, String> + Clone
where
    T: FromStr + PartialOrd + Display + Copy,
{
    move |text| {
        let number: Option<T> = text.parse().ok();
        let number = number.filter(|n| *n >= least && *n <= most);
        number.ok_or_else(|| format!("want a whole number from {least} to {most}"))
    }
}

/// A finite number.
///
/// # Errors
/// It is none.
pub fn number(text: &str) -> Result<f32, String> {
    let number: Option<f32> = text.trim().parse().ok();
    number.filter(|x| x.is_finite()).ok_or_else(|| "want a number".to_owned())
}

/// A finite number of 0 or more.
///
/// # Errors
/// It is none.
pub fn not_negative(text: &str) -> Result<f32, String> {
    number(text).ok().filter(|x| *x >= 0.0).ok_or_else(|| "want a number of 0 or more".to_owned())
}

/// A number from 0 to 1.
///
/// # Errors
/// It is none.
pub fn fraction<T: FromStr + PartialOrd + From<u8>>(text: &str) -> Result<T, String> {
    let number: Option<T> = text.trim().parse().ok();
    number.filter(|x| *x >= T::from(0) && *x <= T::from(1)).ok_or_else(|| "want a number from 0 to 1".to_owned())
}

/// A choice by its name.
///
/// # Errors
/// There is none of this name; the message suggests the nearest one.
pub fn named<T: FromStr<Err = sd_runtime::Error>>(text: &str) -> Result<T, String> {
    text.parse().map_err(|e: sd_runtime::Error| {
        let message = e.to_string();
        // clap names the option itself.
        message.split_once(": ").map_or(message.clone(), |(_, rest)| rest.to_owned())
    })
}

/// What previews are made by, if there are any.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shown(pub Option<PreviewMode>);

/// A kind of preview by its name, or `none`.
///
/// # Errors
/// There is none of this name.
pub fn shown(text: &str) -> Result<Shown, String> {
    if text == "none" { Ok(Shown(None)) } else { named(text).map(|mode| Shown(Some(mode))) }
}

/// Several values in one: a list with commas or blanks between, in brackets or not.
#[derive(Debug, Clone, PartialEq)]
pub struct List<T>(pub Vec<T>);

impl<T: FromStr> FromStr for List<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<List<T>, String> {
        let inner = text.trim();
        let inner = match (inner.strip_prefix('['), inner.ends_with(']')) {
            (Some(inner), true) => inner.strip_suffix(']').unwrap_or(inner),
            (None, false) => inner,
            _ => return Err("want a list such as [7,8,9], a bracket is missing".to_owned()),
        };
        let items = inner.split([',', ' ']).map(str::trim).filter(|item| !item.is_empty());
        let item =
            |item: &str| item.parse().map_err(|_| format!("{item:?} is no such number; want a list as [7,8,9]"));
        items.map(item).collect::<Result<_, _>>().map(List)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists() {
        let list = |text: &str| text.parse::<List<usize>>().map(|l| l.0);
        assert_eq!(list("[7,8,9]"), Ok(vec![7, 8, 9]));
        assert_eq!(list(" 7 8,, 9 "), Ok(vec![7, 8, 9]));
        assert_eq!(list("[]"), Ok(vec![]));
        for wrong in ["[7", "7]", "7,x", "-1", "7.5"] {
            assert!(list(wrong).is_err(), "{wrong}");
        }
        assert_eq!("1,0.5,0".parse::<List<f64>>().map(|l| l.0), Ok(vec![1.0, 0.5, 0.0]));
    }
}
