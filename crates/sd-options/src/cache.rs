//! Options that say which steps are left out.

use crate::value::named;
use clap::{ArgAction, Args};
use sd_runtime::{CacheMode, Error, Result, StepCache};

/// Which steps are left out, and how.
#[derive(Debug, Args)]
#[command(next_help_heading = "Generation Options")]
pub struct CacheArgs {
    /// Leave out steps: easycache, ucache, spectrum, or for transformers dbcache, taylorseer
    #[arg(long, value_name = "string", value_parser = named::<CacheMode>)]
    cache_mode: Option<CacheMode>,
    /// Fine tuning of --cache-mode, as key=value,...
    #[arg(long, value_name = "string", action = ArgAction::Append)]
    cache_option: Vec<String>,
    /// Which steps dbcache and taylorseer must compute: 1 or 0 for each, separated by commas
    #[arg(long, value_name = "list", value_parser = mask)]
    scm_mask: Option<Mask>,
    /// What decides about the steps that --scm-mask leaves open: dynamic (what has changed) or static (nothing)
    #[arg(long, value_name = "string", value_parser = is_static)]
    scm_policy: Option<bool>,
}

/// For each step whether it must be computed.
#[derive(Debug, Clone)]
pub struct Mask(pub Vec<bool>);

/// A list of 1 and 0.
///
/// # Errors
/// It holds something else.
pub fn mask(text: &str) -> std::result::Result<Mask, String> {
    let one = |item: &str| match item.trim() {
        "1" => Ok(true),
        "0" => Ok(false),
        other => Err(format!("{other:?} is neither 1 nor 0; want one of them for each step, as 1,0,0,1")),
    };
    let items = text.split(',').filter(|item| !item.trim().is_empty());
    items.map(one).collect::<std::result::Result<_, _>>().map(Mask)
}

fn is_static(text: &str) -> std::result::Result<bool, String> {
    match text {
        "dynamic" => Ok(false),
        "static" => Ok(true),
        _ => Err("want dynamic or static".to_owned()),
    }
}

impl CacheArgs {
    /// What is asked for.
    ///
    /// # Errors
    /// Fine tuning without a mode.
    pub fn step_cache(&self) -> Result<Option<StepCache>> {
        let Some(mode) = self.cache_mode else {
            let given = [
                ("--cache-option", !self.cache_option.is_empty()),
                ("--scm-mask", self.scm_mask.is_some()),
                ("--scm-policy", self.scm_policy.is_some()),
            ];
            return match given.iter().find(|(_, given)| *given) {
                Some((option, _)) => Err(Error::request(format!("{option}: there is no --cache-mode"))),
                None => Ok(None),
            };
        };
        Ok(Some(StepCache {
            mode,
            // The last one counts.
            option: self.cache_option.last().cloned().unwrap_or_default(),
            scm_mask: self.scm_mask.clone().map(|mask| mask.0).unwrap_or_default(),
            scm_static: self.scm_policy.unwrap_or(false),
        }))
    }
}
