//! `-M metadata`: what a picture file says beside its pixels, on stdout.

use crate::args::Metadata;
use anyhow::{Context, Result, bail};
use sd_io::{Container, Entry, Generation, read_generation};
use serde_json::Value;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::path::Path;

/// The largest file that is read.
const MAX_FILE: u64 = 512 << 20;
/// Bytes of a text that a brief report shows.
const BRIEF: usize = 240;

/// The report, in the order in which it is printed.
#[derive(serde::Serialize)]
struct Report<'a> {
    file: String,
    #[serde(flatten)]
    container: &'a Container,
    /// How the picture was made, if one of the known programs says so.
    #[serde(skip_serializing_if = "Option::is_none")]
    generation: Option<Generation>,
}

/// Prints what `options` ask for.
pub(crate) fn run(options: &Metadata) -> Result<()> {
    let Some(path) = &options.image else { bail!("-M metadata: name a picture with --image") };
    let named = || format!("--image {}", path.display());
    let bytes = read(path).with_context(named)?;
    let mut container = Container::read(&bytes).with_context(named)?;
    if !options.metadata_all {
        container.entries.retain(|e| !e.structural);
    }
    if !options.metadata_raw {
        container.entries.iter_mut().for_each(|e| e.raw_hex_preview = None);
    }
    let generation = read_generation(&bytes);
    let report = Report { file: path.display().to_string(), container: &container, generation };
    let text = match options.metadata_format.as_str() {
        "json" => serde_json::to_string_pretty(&report).context("--metadata-format json")? + "\n",
        _ => describe(&report, options.metadata_brief)?,
    };
    io::stdout().lock().write_all(text.as_bytes()).context("-M metadata")
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let file = File::open(path)?;
    let mut bytes = Vec::new();
    file.take(MAX_FILE + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_FILE {
        return Err(io::Error::other(format!("is larger than the {MAX_FILE} bytes that are read")));
    }
    Ok(bytes)
}

fn describe(report: &Report<'_>, brief: bool) -> Result<String> {
    let mut out = Text { out: String::new(), brief };
    out.field(0, "File", &report.file);
    out.field(0, "Format", report.container.format);
    out.out.push('\n');
    if report.container.entries.is_empty() && report.generation.is_none() {
        out.out.push_str("No metadata entries found.\n");
    }
    report.container.entries.iter().for_each(|e| out.entry(e));
    if let Some(generation) = &report.generation {
        out.out.push_str("Generation:\n");
        if let Value::Object(fields) = serde_json::to_value(generation).context("generation")? {
            fields.iter().for_each(|(key, value)| out.value(1, key, value));
        }
    }
    Ok(out.out)
}

struct Text {
    out: String,
    brief: bool,
}

impl Text {
    fn entry(&mut self, e: &Entry) {
        match (&e.name, &e.marker) {
            (Some(name), _) => self.field(0, "Chunk", name),
            (None, marker) => self.field(0, "Segment", marker.as_deref().unwrap_or("?")),
        }
        self.field(1, "length", &e.length.to_string());
        if let Some(crc) = &e.crc {
            self.field(1, "crc", crc);
        }
        if let Some(critical) = e.critical {
            self.field(1, "critical", &critical.to_string());
        }
        if let Some(Value::Object(fields)) = &e.data {
            fields.iter().for_each(|(key, value)| self.value(1, key, value));
        }
        for (key, value) in [("error", &e.error), ("raw", &e.raw_hex_preview)] {
            if let Some(value) = value {
                self.field(1, key, value);
            }
        }
    }

    fn value(&mut self, depth: usize, key: &str, value: &Value) {
        match value {
            Value::Null => {}
            Value::String(text) => self.field(depth, key, text),
            Value::Object(fields) => {
                self.field(depth, key, "");
                fields.iter().for_each(|(key, value)| self.value(depth + 1, key, value));
            }
            Value::Array(list) if list.iter().any(|v| v.is_object() || v.is_array() || v.is_string()) => {
                list.iter().enumerate().for_each(|(i, v)| self.value(depth, &format!("{key}[{i}]"), v));
            }
            Value::Array(list) if list.is_empty() => {}
            other => self.field(depth, key, &other.to_string()),
        }
    }

    /// A line of its own, and further ones for the lines of a text, deeper by one.
    fn field(&mut self, depth: usize, key: &str, text: &str) {
        let cut = match text.char_indices().map(|(i, c)| i + c.len_utf8()).take_while(|end| *end <= BRIEF).last() {
            Some(end) if self.brief && text.len() > BRIEF => format!("{}...", text.get(..end).unwrap_or(text)),
            _ => text.to_owned(),
        };
        let indent = "  ".repeat(depth);
        let mut lines = cut.lines().map(shown);
        let first = lines.next().unwrap_or_default();
        // Writing to a string does not fail.
        let _ = writeln!(self.out, "{}", format!("{indent}{key}: {first}").trim_end());
        for line in lines {
            let _ = writeln!(self.out, "{}", format!("{indent}  {line}").trim_end());
        }
    }
}

/// A line without what would steer a terminal.
fn shown(line: &str) -> String {
    line.chars()
        .map(|c| if c.is_control() && c != '\t' { c.escape_default().to_string() } else { c.into() })
        .collect()
}
