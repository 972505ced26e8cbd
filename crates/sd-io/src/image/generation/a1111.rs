//! The format of the A1111 web UI, which stable-diffusion.cpp and this workspace write, too: the prompt, a line that
//! starts with `Negative prompt:`, and a last line of `Name: value` pairs between commas. A value with a comma stands
//! in quotes as a JSON string; stable-diffusion.cpp also writes JSON objects.

use super::{Generation, Generator};

/// Fewer pairs make no line of settings: a prompt may hold a colon, too.
const MIN_PAIRS: usize = 3;

pub(super) fn read(text: &str) -> Option<Generation> {
    let text = text.trim();
    let (head, last) = text.rsplit_once('\n').unwrap_or(("", text));
    let pairs = pairs(last);
    if pairs.len() < MIN_PAIRS || !pairs.iter().any(|(k, _)| k == "Steps") {
        return None;
    }
    let mut out = Generation::new(Generator::A1111);
    match split_negative(head) {
        Some((prompt, negative)) => {
            out.prompt = prompt.trim().to_owned();
            out.negative_prompt = negative.trim().to_owned();
        }
        None => out.prompt = head.trim().to_owned(),
    }
    for (key, value) in pairs {
        if !set(&mut out, &key, &value) {
            out.others.push((key, value));
        }
    }
    out.loras = tags(&out.prompt);
    Some(out)
}

/// Prompt and negative prompt.
fn split_negative(head: &str) -> Option<(&str, &str)> {
    const MARK: &str = "Negative prompt:";
    if let Some(negative) = head.strip_prefix(MARK) {
        return Some(("", negative));
    }
    let at = head.find(&format!("\n{MARK}"))?;
    Some((head.get(..at)?, head.get(at + 1 + MARK.len()..)?))
}

/// Puts a value where it belongs; false if it has no place or is not what it should be.
fn set(out: &mut Generation, key: &str, value: &str) -> bool {
    fn some<T: std::str::FromStr>(to: &mut Option<T>, value: &str) -> bool {
        *to = value.parse().ok();
        to.is_some()
    }
    match key {
        "Steps" => some(&mut out.steps, value),
        "Sampler" => some(&mut out.sampler, value),
        "Schedule type" | "Scheduler" => some(&mut out.scheduler, value),
        "CFG scale" => some(&mut out.cfg_scale, value),
        "Seed" => some(&mut out.seed, value),
        "Model" => some(&mut out.model, value),
        "Model hash" => some(&mut out.model_hash, value),
        "Clip skip" => some(&mut out.clip_skip, value),
        "Denoising strength" => some(&mut out.denoise, value),
        "Size" => {
            out.size = value.split_once('x').and_then(|(w, h)| Some((w.parse().ok()?, h.parse().ok()?)));
            out.size.is_some()
        }
        "Version" => {
            if value.starts_with("stable-diffusion.cpp") {
                out.generator = Generator::SdCpp;
            } else if value.starts_with("sd-rs") {
                out.generator = Generator::SdRs;
            }
            false
        }
        _ => false,
    }
}

/// The pairs of a line; nothing if it is no such line.
fn pairs(line: &str) -> Vec<(String, String)> {
    let mut out = Vec::new();
    let mut rest = line.trim();
    while let Some((key, tail)) = rest.split_once(':') {
        // What stands between a value and the next name is an unquoted comma of that value.
        let key = key.rsplit(',').next().unwrap_or_default().trim();
        let plain = |c: char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_' | '/' | '.' | '(' | ')');
        if key.is_empty() || key.len() > 100 || !key.chars().all(plain) {
            rest = tail;
            continue;
        }
        let (value, after) = value(tail.trim_start());
        out.push((key.to_owned(), value));
        rest = after.trim_start().trim_start_matches(',').trim_start();
    }
    out
}

/// A value and what follows it.
fn value(text: &str) -> (String, &str) {
    if text.starts_with(['"', '{', '[']) {
        let mut found = serde_json::Deserializer::from_str(text).into_iter::<serde_json::Value>();
        if let Some(Ok(value)) = found.next()
            && let Some((raw, rest)) = text.split_at_checked(found.byte_offset())
        {
            let value = value.as_str().map_or_else(|| raw.to_owned(), str::to_owned);
            return (value, rest);
        }
    }
    let (value, rest) = text.split_once(',').unwrap_or((text, ""));
    (value.trim().to_owned(), rest)
}

/// The LoRA tags of a prompt: `<lora:name:weight>`.
fn tags(prompt: &str) -> Vec<(String, f64)> {
    let tagged = prompt.split("<lora:").skip(1).filter_map(|t| t.split_once('>')).map(|(tag, _)| tag);
    tagged
        .map(|tag| {
            let mut parts = tag.split(':');
            let name = parts.next().unwrap_or_default().to_owned();
            (name, parts.next().and_then(|w| w.parse().ok()).unwrap_or(1.0))
        })
        .collect()
}
