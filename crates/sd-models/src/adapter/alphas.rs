//! What products are multiplied by where the tensors of an adapter do not say it: in its metadata or beside it.

use std::fmt;
use std::marker::PhantomData;
use std::path::Path;

use regex_lite::Regex;
use sd_core::{Error, Result};
use sd_io::Checkpoint;
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::Value as Json;

use super::build::Alpha;
use super::tags;

/// Alphas in a file's metadata, as diffusers writes them (`lora_adapter_metadata`) and llama.cpp (`adapter.lora.alpha`),
/// or beside the file, where PEFT writes them.
#[derive(Debug, Default)]
pub(super) struct Alphas {
    pub(super) config: Entries<Setting>,
    /// Whether `config` is that of the whole file, and not of parts by their names.
    pub(super) whole: bool,
    pub(super) all: Option<f64>,
}

/// An entry of a configuration.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Setting {
    /// An object, such as patterns, the first of which counts that matches.
    Listed(Entries<Json>),
    Other(Json),
}

/// The entries of a JSON object in the file's order.
#[derive(Debug)]
pub(super) struct Entries<V>(pub(super) Vec<(String, V)>);

impl<V> Default for Entries<V> {
    fn default() -> Entries<V> {
        Entries(Vec::new())
    }
}

impl<'de, V: Deserialize<'de>> Deserialize<'de> for Entries<V> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Entries<V>, D::Error> {
        struct InOrder<V>(PhantomData<V>);
        impl<'de, V: Deserialize<'de>> Visitor<'de> for InOrder<V> {
            type Value = Entries<V>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries<V>, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Entries(entries))
            }
        }
        from.deserialize_map(InOrder(PhantomData))
    }
}

impl Entries<Setting> {
    /// What `name` is set to, by the last of entries of one name as in Python; what is null is left out.
    fn get(&self, name: &str) -> Option<&Setting> {
        let given = self.0.iter().rfind(|(n, _)| n == name).map(|(_, setting)| setting);
        given.filter(|setting| !matches!(setting, Setting::Other(Json::Null)))
    }

    /// The same where that is no object.
    fn value(&self, name: &str) -> Option<&Json> {
        match self.get(name)? {
            Setting::Other(value) => Some(value),
            Setting::Listed(_) => None,
        }
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Setting::Listed(_) => f.write_str("an object"),
            Setting::Other(value) => value.fmt(f),
        }
    }
}

/// The key of a file's metadata where diffusers writes the configuration.
const DIFFUSERS_CONFIG: &str = "lora_adapter_metadata";

/// The longest configuration that is read.
const MAX_CONFIG: u64 = 1 << 20;

impl Alphas {
    pub(super) fn read(file: &Checkpoint) -> Result<Alphas> {
        if let Some(alphas) = Alphas::beside(file.path())? {
            return Ok(alphas);
        }
        let text = file.metadata().str(DIFFUSERS_CONFIG);
        let config = text.map_or_else(
            || Ok(Entries::default()),
            |text| {
                serde_json::from_str(text).map_err(|e| {
                    let e = Error::bad_file(file.path(), format!("{DIFFUSERS_CONFIG} in its metadata: {e}"));
                    e.hint("it says what the changes are multiplied by; save the LoRA again, or get another copy")
                })
            },
        )?;
        let all = file.metadata().get("adapter.lora.alpha").and_then(sd_io::Value::as_f64);
        Ok(Alphas { config, whole: false, all })
    }

    /// What PEFT's configuration says, if there is one for this file.
    fn beside(file: &Path) -> Result<Option<Alphas>> {
        let Some(config) = tags::config_of(file) else { return Ok(None) };
        let io = |e| Error::io(&config, e);
        let size = std::fs::metadata(&config).map_err(io)?.len();
        if size > MAX_CONFIG {
            return Err(Error::bad_file(&config, format!("has {size} bytes, which is no configuration")));
        }
        let text = std::fs::read_to_string(&config).map_err(io)?;
        let json: Entries<Setting> =
            serde_json::from_str(&text).map_err(|e| Error::bad_file(&config, format!("is not JSON: {e}")))?;
        let kind = json.value("peft_type").and_then(Json::as_str).unwrap_or("LORA");
        if kind != "LORA" {
            let what = format!("the adapter is {kind}, of PEFT's kinds only LORA is read");
            return Err(Error::bad_file(&config, what).hint("merge it into the model with PEFT, or get a LoRA"));
        }
        if json.value("fan_in_fan_out").and_then(Json::as_bool) == Some(true) {
            return Err(Error::bad_file(&config, "its matrices have their axes exchanged (fan_in_fan_out)"));
        }
        Ok(Some(Alphas { config: json, whole: true, all: None }))
    }

    /// The alpha of a module: that of its pattern, else that of its part; `Err` with what is wrong with the configuration.
    pub(super) fn of(&self, module: &str) -> Result<Option<Alpha>, String> {
        if let Some(alpha) = self.all {
            return Ok(Some(Alpha { alpha, root: false }));
        }
        let (part, path) = module.split_once('.').unwrap_or(("", module));
        let key = |name: &str| match self.whole {
            true => self.config.get(name),
            false => self.config.get(&format!("{part}.{name}")),
        };
        let place = if self.whole { tags::PEFT_CONFIG } else { DIFFUSERS_CONFIG };
        let wrong =
            |what: &str, value: &dyn fmt::Display, want: &str| format!("{place}: {what} is {value}, want {want}");
        let root = match key("use_rslora") {
            None => false,
            Some(Setting::Other(Json::Bool(root))) => *root,
            Some(value) => return Err(wrong("use_rslora", value, "true or false")),
        };
        let number =
            |what: &str, value: &Json| value.as_f64().ok_or_else(|| wrong(what, value, "a number")).map(Some);
        let mut alpha = match key("lora_alpha") {
            None => None,
            Some(Setting::Other(value)) => number("lora_alpha", value)?,
            Some(value) => return Err(wrong("lora_alpha", value, "a number")),
        };
        let patterns = match key("alpha_pattern") {
            None => &[][..],
            Some(Setting::Listed(Entries(patterns))) => patterns,
            Some(value) => return Err(wrong("alpha_pattern", value, "names and numbers")),
        };
        let path = path.strip_prefix("model.").filter(|_| part == "base_model").unwrap_or(path);
        for (pattern, value) in patterns {
            if is_meant(pattern, path).map_err(|e| format!("{place}: alpha_pattern {pattern:?}: {e}"))? {
                alpha = number(&format!("alpha_pattern of {pattern}"), value)?;
                break;
            }
        }
        Ok(alpha.map(|alpha| Alpha { alpha, root }))
    }
}

/// Whether PEFT's `pattern` means the module at `path`: a regular expression that matches it, or what follows one of its
/// dots, to the end.
fn is_meant(pattern: &str, path: &str) -> Result<bool, String> {
    if pattern.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.')) {
        return Ok(path == pattern || path.strip_suffix(pattern).is_some_and(|before| before.ends_with('.')));
    }
    let regex = Regex::new(&format!(r"^(?:.*\.)?(?:{pattern})$")).map_err(|e| e.to_string())?;
    Ok(regex.is_match(path))
}
