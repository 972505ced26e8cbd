//! `--config`: options from a file. What the command line says wins.

use clap::parser::ValueSource;
use clap::{ArgAction, ArgMatches, Command};
use std::ffi::OsString;
use std::path::Path;

/// Values of one option: nothing for a flag that is set.
type Entry = (String, Vec<String>);

/// The command line with the options of the file that it names before its own, of which those that are given are left
/// out of the file's.
pub(super) fn extend(
    command: &mut Command,
    argv: &[OsString],
    matches: &ArgMatches,
    file: &Path,
) -> Result<Vec<OsString>, String> {
    let named = |what: String| format!("--config {}: {what}", file.display());
    let text = std::fs::read_to_string(file).map_err(|e| named(e.to_string()))?;
    let entries = read(file, &text).map_err(named)?;
    let mut from_file = Vec::new();
    for (key, values) in entries {
        let long = option(command, &key).map_err(named)?;
        let Some(arg) = command.get_arguments().find(|arg| arg.get_long() == Some(&long)) else { continue };
        let flag = matches!(arg.get_action(), ArgAction::SetTrue);
        if matches.value_source(arg.get_id().as_str()) == Some(ValueSource::CommandLine) {
            continue;
        }
        match (flag, values.as_slice()) {
            (true, [value]) if value == "true" => from_file.push(OsString::from(format!("--{long}"))),
            (true, [value]) if value == "false" => {}
            (true, _) => return Err(named(format!("{key}: want true or false"))),
            (false, values) => from_file.extend(values.iter().map(|v| OsString::from(format!("--{long}={v}")))),
        }
    }
    // A value that is wrong is the file's.
    let alone = argv.iter().take(1).cloned().chain(from_file.iter().cloned());
    command.try_get_matches_from_mut(alone).map_err(|e| {
        let text = e.render().to_string();
        let text = text.trim_start_matches("error: ").split("\n\n").next().unwrap_or_default();
        named(text.to_owned())
    })?;
    let (program, rest) = argv.split_at(argv.len().min(1));
    Ok([program, &from_file, rest].concat())
}

/// The long name of the option that a key means; `_` and `-` are the same.
fn option(command: &Command, key: &str) -> Result<String, String> {
    let plain = |name: &str| name.replace('_', "-");
    let all = command.get_arguments().filter(|arg| {
        !matches!(
            arg.get_action(),
            ArgAction::Help | ArgAction::HelpShort | ArgAction::HelpLong | ArgAction::Version
        )
    });
    let longs: Vec<&str> = all.filter_map(|arg| arg.get_long()).filter(|long| *long != "config").collect();
    if let Some(long) = longs.iter().find(|long| plain(long) == plain(key)) {
        return Ok((*long).to_owned());
    }
    let nearest = sd_runtime::nearest(&plain(key), longs.iter().copied());
    let hint = nearest.map(|name| format!(", did you mean {name}?")).unwrap_or_default();
    Err(format!("there is no option {key:?}{hint}"))
}

/// The entries of a file: JSON if it begins as an object does, else TOML.
fn read(file: &Path, text: &str) -> Result<Vec<Entry>, String> {
    let json = file.extension().is_some_and(|e| e.eq_ignore_ascii_case("json"));
    if json || text.trim_start().starts_with('{') {
        let object: serde_json::Map<String, serde_json::Value> =
            serde_json::from_str(text).map_err(|e| e.to_string())?;
        object.into_iter().map(|(key, value)| entry(key, &value, json_scalar, json_list)).collect()
    } else {
        let table: toml::Table = text.parse().map_err(|e: toml::de::Error| e.to_string())?;
        table.into_iter().map(|(key, value)| entry(key, &value, toml_scalar, toml_list)).collect()
    }
}

fn entry<V>(
    key: String,
    value: &V,
    scalar: impl Fn(&V) -> Option<String>,
    list: impl Fn(&V) -> Option<&Vec<V>>,
) -> Result<Entry, String> {
    let values = match list(value) {
        Some(items) => items.iter().map(&scalar).collect::<Option<Vec<_>>>(),
        None => scalar(value).map(|text| vec![text]),
    };
    let values = values.ok_or_else(|| format!("{key}: want a text, a number, true, false or a list of them"))?;
    Ok((key, values))
}

fn json_list(value: &serde_json::Value) -> Option<&Vec<serde_json::Value>> {
    value.as_array()
}

fn json_scalar(value: &serde_json::Value) -> Option<String> {
    use serde_json::Value;
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(_) | Value::Bool(_) => Some(value.to_string()),
        Value::Null | Value::Array(_) | Value::Object(_) => None,
    }
}

fn toml_list(value: &toml::Value) -> Option<&Vec<toml::Value>> {
    value.as_array()
}

fn toml_scalar(value: &toml::Value) -> Option<String> {
    use toml::Value;
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Integer(number) => Some(number.to_string()),
        Value::Float(number) => Some(number.to_string()),
        Value::Boolean(flag) => Some(flag.to_string()),
        Value::Datetime(_) | Value::Array(_) | Value::Table(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn show(file: &str, text: &str) -> Result<Vec<String>, String> {
        let mut out: Vec<String> = read(Path::new(file), text)?
            .into_iter()
            .map(|(key, values)| format!("{key}={}", values.join("|")))
            .collect();
        out.sort();
        Ok(out)
    }

    #[test]
    fn both_formats_hold_the_same() {
        let want = ["cfg-scale=4.5", "circular=true", "prompt=a b", "ref-image=x|y", "steps=7"];
        let toml =
            "# a preset\nsteps = 7\ncfg-scale = 4.5\nprompt = \"a b\"\ncircular = true\nref-image = ['x', 'y']\n";
        let json = r#"{"steps": 7, "cfg-scale": 4.5, "prompt": "a b", "circular": true, "ref-image": ["x", "y"]}"#;
        assert_eq!(show("p.toml", toml).unwrap(), want);
        assert_eq!(show("p.json", json).unwrap(), want);
        assert_eq!(show("preset", json).unwrap(), want);
        for (file, text) in
            [("p.toml", "steps"), ("p.toml", "[a]\nb = 1"), ("p.json", "[1]"), ("p.json", r#"{"a": null}"#)]
        {
            assert!(show(file, text).is_err(), "{text}");
        }
    }
}
