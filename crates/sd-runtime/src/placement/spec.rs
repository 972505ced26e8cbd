//! What users write: `--backend`, `--params-backend`, `--split-mode` and `--max-vram`. Names of devices stay text here.

use std::collections::BTreeMap;

use sd_core::residency::autofit::Limit;
use sd_core::{Error, Result};

use super::module::Module;

/// Keys that stand for every module or device.
const ALL: [&str; 3] = ["all", "default", "*"];

/// A value for every module that has none of its own, and those of modules.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Spec<T> {
    pub(super) default: Option<T>,
    pub(super) modules: BTreeMap<Module, T>,
}

impl<T> Default for Spec<T> {
    fn default() -> Spec<T> {
        Spec { default: None, modules: BTreeMap::new() }
    }
}

impl<T> Spec<T> {
    /// The value of `module`.
    pub(super) fn get(&self, module: Module) -> Option<&T> {
        self.modules.get(&module).or(self.default.as_ref())
    }

    /// Reads `value,module=value,...`; later items replace earlier ones.
    fn parse(option: &str, text: &str, mut value: impl FnMut(&str) -> Result<T>) -> Result<Spec<T>> {
        let mut spec = Spec::default();
        for item in items(text) {
            let named = |e: Error| e.context(format!("{option} {item}"));
            let (key, text) = key_value(item).map_err(named)?;
            match key {
                None => spec.default = Some(value(text).map_err(named)?),
                Some(key) => {
                    let module = Module::parse(key).map_err(named)?;
                    spec.modules.insert(module, value(text).map_err(named)?);
                }
            }
        }
        Ok(spec)
    }
}

/// Where the weights of a module are between uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Store {
    /// In their file.
    Disk,
    /// On the device of that name.
    Device(String),
}

/// How a module is divided among several devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SplitMode {
    /// Runs of layers, one after the other.
    Layer,
    /// Rows of matrices, side by side.
    Row,
}

/// Devices that compute.
pub(super) fn backend(text: &str) -> Result<Spec<Vec<String>>> {
    Spec::parse("--backend", text, |value| {
        let names: Vec<&str> = value.split('&').map(str::trim).collect();
        for name in &names {
            if name.eq_ignore_ascii_case("disk") {
                return Err(Error::request("nothing computes on disk").hint("--params-backend keeps weights there"));
            }
            if names.len() > 1 && ["", "auto", "default"].contains(&name.to_ascii_lowercase().as_str()) {
                return Err(Error::request(format!("{name:?} in a list of devices, want a device's name")));
            }
        }
        Ok(names.into_iter().map(str::to_owned).collect())
    })
}

/// Where weights are between uses.
pub(super) fn params_backend(text: &str) -> Result<Spec<Store>> {
    Spec::parse("--params-backend", text, |value| {
        if value.contains('&') {
            return Err(Error::request("weights are kept in one place, not in a list of devices"));
        }
        Ok(if value.eq_ignore_ascii_case("disk") { Store::Disk } else { Store::Device(value.to_owned()) })
    })
}

/// How lists of devices share a module.
pub(super) fn split_mode(text: &str) -> Result<Spec<SplitMode>> {
    Spec::parse("--split-mode", text, |value| match value.to_ascii_lowercase().as_str() {
        "layer" => Ok(SplitMode::Layer),
        "row" => Ok(SplitMode::Row),
        _ => Err(Error::request(format!("{value:?}, want layer or row"))),
    })
}

/// How much of its memory each device may have.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Limits {
    /// Of devices that are not named.
    pub(super) default: Limit,
    /// By the names that the user wrote, in order.
    pub(super) devices: Vec<(String, Limit)>,
}

/// Reads `GiB,device=GiB,...`; a negative number leaves so much free, 0 sets no limit.
pub(super) fn max_vram(text: &str) -> Result<Limits> {
    let mut limits = Limits::default();
    for item in items(text) {
        let named = |e: Error| e.context(format!("--max-vram {item}"));
        let (key, text) = key_value(item).map_err(named)?;
        let limit = limit(text).map_err(named)?;
        match key {
            None => limits.default = limit,
            Some(key) => {
                limits.devices.retain(|(name, _)| !name.eq_ignore_ascii_case(key));
                limits.devices.push((key.to_owned(), limit));
            }
        }
    }
    Ok(limits)
}

fn limit(text: &str) -> Result<Limit> {
    const GIB: f64 = (1u64 << 30) as f64;
    let number: Option<f64> = text.parse().ok();
    let gib = number.filter(|n| n.is_finite()).ok_or_else(|| Error::request("want a number of GiB"))?;
    // A value beyond the range becomes its end.
    let bytes = (gib.abs() * GIB) as u64;
    Ok(match gib {
        0.0 => Limit::None,
        gib if gib < 0.0 => Limit::Leave(bytes),
        _ => Limit::Most(bytes.max(1)),
    })
}

fn items(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim).filter(|item| !item.is_empty())
}

/// The key of an item, if it is one of its own, and the value.
fn key_value(item: &str) -> Result<(Option<&str>, &str)> {
    let Some((key, value)) = item.split_once('=') else { return Ok((None, item)) };
    let (key, value) = (key.trim(), value.trim());
    if key.is_empty() || value.is_empty() {
        return Err(Error::request("want key=value"));
    }
    let all = ALL.iter().any(|all| key.eq_ignore_ascii_case(all));
    Ok(((!all).then_some(key), value))
}

/// Options that older scripts use, which stand for items of other options.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shorthands {
    /// `*=cpu` before `--params-backend`.
    pub offload_to_cpu: bool,
    /// `te=cpu` before `--backend`.
    pub clip_on_cpu: bool,
    /// `vae=cpu` before `--backend`.
    pub vae_on_cpu: bool,
    /// `controlnet=cpu` before `--backend`.
    pub control_net_cpu: bool,
}

impl Shorthands {
    /// `backend` and `params_backend` with what these stand for before them, so that what is there wins.
    pub fn before(self, backend: &str, params_backend: &str) -> [String; 2] {
        let join = |first: &str, rest: &str| [first, rest].map(str::trim).join(",").trim_matches(',').to_owned();
        let mut out = [backend, params_backend].map(str::to_owned);
        let [backend, params] = &mut out;
        if self.offload_to_cpu {
            *params = join("*=cpu", params);
        }
        for (given, item) in
            [(self.clip_on_cpu, "te=cpu"), (self.vae_on_cpu, "vae=cpu"), (self.control_net_cpu, "controlnet=cpu")]
        {
            if given {
                *backend = join(item, backend);
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn show<T: Clone>(spec: &Spec<T>, text: impl Fn(&T) -> String) -> String {
        let mut out: Vec<String> = spec.default.iter().map(|v| format!("*={}", text(v))).collect();
        out.extend(spec.modules.iter().map(|(m, v)| format!("{}={}", m.name(), text(v))));
        out.join(" ")
    }

    #[test]
    fn assignments() {
        for (text, want) in [
            ("", ""),
            (" , ,", ""),
            ("cuda0", "*=cuda0"),
            ("cuda0,cpu", "*=cpu"),
            ("all=a, default=b , *=c", "*=c"),
            ("ALL=a", "*=a"),
            ("cuda0 , vae = cpu", "*=cuda0 vae=cpu"),
            ("vae=a,first-stage=b", "vae=b"),
            ("auto,t5xxl=gpu", "*=auto te=gpu"),
            ("diffusion=CUDA0&CUDA1, te = CUDA1 & CUDA0 ", "diffusion=CUDA0&CUDA1 te=CUDA1&CUDA0"),
        ] {
            assert_eq!(show(&backend(text).unwrap(), |v| v.join("&")), want, "{text}");
        }
        let store = |s: &Store| match s {
            Store::Disk => "DISK".to_owned(),
            Store::Device(name) => name.clone(),
        };
        for (text, want) in
            [("", ""), ("cpu,te=Disk", "*=cpu te=DISK"), ("*=disk,unet=CUDA1", "*=DISK diffusion=CUDA1")]
        {
            assert_eq!(show(&params_backend(text).unwrap(), store), want, "{text}");
        }
        for (text, want) in [("row", "*=Row"), ("layer, dit=ROW", "*=Layer diffusion=Row")] {
            assert_eq!(show(&split_mode(text).unwrap(), |m| format!("{m:?}")), want, "{text}");
        }
    }

    #[test]
    fn wrong_assignments_are_named() {
        for (e, want) in [
            (backend("=cpu").err(), "--backend =cpu: want key=value"),
            (backend("vae=").err(), "--backend vae=: want key=value"),
            (backend("lora=cpu").err(), "--backend lora=cpu: there is no module \"lora\""),
            (backend("disk").err(), "--backend disk: nothing computes on disk"),
            (backend("te=CUDA0&disk").err(), "--backend te=CUDA0&disk: nothing computes on disk"),
            (backend("dit=CUDA0&auto").err(), "--backend dit=CUDA0&auto: \"auto\" in a list of devices"),
            (backend("dit=CUDA0&").err(), "--backend dit=CUDA0&: \"\" in a list of devices"),
            (params_backend("te=a&b").err(), "--params-backend te=a&b: weights are kept in one place"),
            (params_backend("te=").err(), "--params-backend te=: want key=value"),
            (split_mode("column").err(), "--split-mode column: \"column\", want layer or row"),
            (max_vram("x").err(), "--max-vram x: want a number of GiB"),
            (max_vram("CUDA0=inf").err(), "--max-vram CUDA0=inf: want a number of GiB"),
            (max_vram("CUDA0=").err(), "--max-vram CUDA0=: want key=value"),
        ] {
            let e = e.unwrap();
            assert!(e.is_request() && e.to_string().starts_with(want), "{e}");
        }
    }

    #[test]
    fn limits() {
        let most = |n: f64| Limit::Most((n * 1073741824.0) as u64);
        let of = |default, devices: &[(&str, Limit)]| Limits {
            default,
            devices: devices.iter().map(|(n, l)| ((*n).to_owned(), *l)).collect(),
        };
        for (text, want) in [
            ("", of(Limit::None, &[])),
            ("0", of(Limit::None, &[])),
            ("-0", of(Limit::None, &[])),
            ("1e-300", of(Limit::Most(1), &[])),
            ("0.35", of(most(0.35), &[])),
            ("-1", of(Limit::Leave(1 << 30), &[])),
            ("8,all=4", of(most(4.0), &[])),
            ("cuda0=6, 2, CUDA1 = -1", of(most(2.0), &[("cuda0", most(6.0)), ("CUDA1", Limit::Leave(1 << 30))])),
            ("cuda0=6,CUDA0=1", of(Limit::None, &[("CUDA0", most(1.0))])),
            ("1e30", of(Limit::Most(u64::MAX), &[])),
        ] {
            assert_eq!(max_vram(text).unwrap(), want, "{text}");
        }
    }

    #[test]
    fn shorthands_stand_before_what_is_given() {
        let all = Shorthands { offload_to_cpu: true, clip_on_cpu: true, vae_on_cpu: true, control_net_cpu: true };
        let none = Shorthands::default();
        for (given, backend, params, want) in [
            (none, "a", "b", ["a", "b"]),
            (all, "", "", ["controlnet=cpu,vae=cpu,te=cpu", "*=cpu"]),
            (Shorthands { offload_to_cpu: true, ..none }, "", "te=disk", ["", "*=cpu,te=disk"]),
            (Shorthands { clip_on_cpu: true, ..none }, "cuda0,te=cuda1", "", ["te=cpu,cuda0,te=cuda1", ""]),
        ] {
            assert_eq!(given.before(backend, params), want, "{given:?}");
        }
    }
}
