//! Samplers and schedules by the names that clients use for them.

use crate::fields::shortened;
use sd_runtime::{SamplerKind, SchedulerKind};

/// A sampler by its own name or a web UI's, in any case, and the schedule that older web UIs put behind the name.
pub(crate) fn sampler(name: &str) -> Result<(SamplerKind, Option<SchedulerKind>), String> {
    let find = |name: &str| all_samplers().find(|s| same(s.name(), name) || same(s.label(), name));
    if let Some(sampler) = find(name) {
        return Ok((sampler, None));
    }
    let split =
        name.rsplit_once(' ').and_then(|(sampler, schedule)| Some((find(sampler)?, scheduler_of(schedule)?)));
    if let Some((sampler, schedule)) = split {
        return Ok((sampler, Some(schedule)));
    }
    let names: Vec<&str> = SamplerKind::names().collect();
    Err(format!("no {:?} (one of {})", shortened(name), names.join(", ")))
}

/// A sampler as [`sampler`] finds it; `None` for what leaves it to the model.
pub(crate) fn sampler_or_default(name: &str) -> Result<Option<(SamplerKind, Option<SchedulerKind>)>, String> {
    if same(name, "default") { Ok(None) } else { sampler(name).map(Some) }
}

/// A schedule by its own name or a web UI's, in any case; `None` for what leaves it to the model.
pub(crate) fn scheduler(name: &str) -> Result<Option<SchedulerKind>, String> {
    if ["automatic", "default"].iter().any(|n| same(n, name)) {
        return Ok(None);
    }
    let names: Vec<&str> = SchedulerKind::names().collect();
    let unknown = || format!("no {:?} (one of {})", shortened(name), names.join(", "));
    scheduler_of(name).map(Some).ok_or_else(unknown)
}

fn scheduler_of(name: &str) -> Option<SchedulerKind> {
    all_schedulers().find(|s| same(s.label(), name)).or_else(|| {
        let named = SchedulerKind::names().find(|n| same(n, name))?;
        named.parse().ok()
    })
}

/// Every sampler.
pub(crate) fn all_samplers() -> impl Iterator<Item = SamplerKind> {
    SamplerKind::names().filter_map(|n| n.parse().ok())
}

/// Every schedule, once for each of its names.
pub(crate) fn all_schedulers() -> impl Iterator<Item = SchedulerKind> {
    SchedulerKind::names().filter_map(|n| n.parse().ok())
}

/// Whether two spellings mean one name: `DPM++ 2M`, `dpm++2m` and k-diffusion's `k_dpmpp_2m` do.
fn same(a: &str, b: &str) -> bool {
    plain(a) == plain(b)
}

fn plain(name: &str) -> String {
    let lower: String = name.chars().take(60).flat_map(char::to_lowercase).collect();
    let name = lower.strip_prefix("k_").unwrap_or(&lower).replace("dpmpp", "dpm++");
    name.chars().filter(|c| !matches!(c, ' ' | '_' | '-')).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spellings_of_samplers() {
        for (name, want) in [
            ("euler", (SamplerKind::Euler, None)),
            ("Euler a", (SamplerKind::EulerA, None)),
            ("k_euler_a", (SamplerKind::EulerA, None)),
            ("DPM++ 2M", (SamplerKind::DpmPp2m, None)),
            ("k_dpmpp_2m", (SamplerKind::DpmPp2m, None)),
            ("DPM++ 2M Karras", (SamplerKind::DpmPp2m, Some(SchedulerKind::Karras))),
        ] {
            assert_eq!(sampler(name), Ok(want), "{name}");
        }
        let e = sampler(&"x".repeat(1 << 16)).unwrap_err();
        assert!(e.contains("(one of euler") && e.len() < 1000, "{e}");
    }

    #[test]
    fn every_name_and_label_is_found() {
        for s in all_samplers() {
            assert_eq!(sampler(s.name()), Ok((s, None)));
            assert_eq!(sampler(s.label()), Ok((s, None)));
        }
        for s in all_schedulers() {
            assert_eq!(scheduler(s.name()), Ok(Some(s)));
            assert_eq!(scheduler(s.label()), Ok(Some(s)));
        }
        assert_eq!(scheduler("Automatic"), Ok(None));
        assert_eq!(scheduler("normal"), Ok(Some(SchedulerKind::Discrete)));
        assert!(scheduler("karass").unwrap_err().contains("one of"));
    }
}
