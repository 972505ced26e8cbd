//! Formats that are one JSON object: Fooocus, InvokeAI, NovelAI.

use serde_json::{Map, Value as Json};

use super::{Generation, Generator};

type Object = Map<String, Json>;

fn object(text: &str) -> Option<Object> {
    serde_json::from_str(text).ok()
}

/// A value as people read it.
pub(super) fn plain(v: &Json) -> String {
    v.as_str().map_or_else(|| v.to_string(), str::to_owned)
}

fn text(o: &Object, key: &str) -> Option<String> {
    o.get(key)?.as_str().map(str::to_owned)
}

/// A number, which some programs write in quotes.
pub(super) fn real(v: &Json) -> Option<f64> {
    v.as_f64().or_else(|| v.as_str()?.trim().parse().ok())
}

/// An integer, which some programs write in quotes or with a point.
pub(super) fn integer(v: &Json) -> Option<i128> {
    let whole = |f: f64| (f.fract() == 0.0 && f.abs() < 1e18).then_some(f as i128);
    let exact = v.as_i64().map(i128::from).or_else(|| v.as_u64().map(i128::from));
    exact.or_else(|| v.as_str()?.trim().parse().ok()).or_else(|| v.as_f64().and_then(whole))
}

fn count(o: &Object, key: &str) -> Option<u64> {
    integer(o.get(key)?).and_then(|n| u64::try_from(n).ok())
}

/// Keeps what no field has taken.
fn others(out: &mut Generation, o: &Object, taken: &[&str]) {
    let rest = o.iter().filter(|(k, _)| !taken.contains(&k.as_str()));
    out.others.extend(rest.map(|(k, v)| (k.clone(), plain(v))));
}

/// The object under `parameters` of Fooocus.
pub(super) fn fooocus(source: &str) -> Option<Generation> {
    let o = object(source)?;
    let known = text(&o, "metadata_scheme").as_deref() == Some("fooocus")
        || text(&o, "version").is_some_and(|v| v.starts_with("Fooocus"));
    if !known {
        return None;
    }
    let mut out = Generation::new(Generator::Fooocus);
    out.prompt = text(&o, "prompt").unwrap_or_default();
    out.negative_prompt = text(&o, "negative_prompt").unwrap_or_default();
    out.steps = count(&o, "steps");
    out.sampler = text(&o, "sampler");
    out.scheduler = text(&o, "scheduler");
    out.cfg_scale = o.get("guidance_scale").and_then(real);
    out.seed = o.get("seed").and_then(integer);
    // Written as Python writes a pair: (768, 1280).
    out.size = text(&o, "resolution").and_then(|r| {
        let (w, h) = r.trim_matches(['(', ')']).split_once(',')?;
        Some((w.trim().parse().ok()?, h.trim().parse().ok()?))
    });
    out.model = text(&o, "base_model");
    out.model_hash = text(&o, "base_model_hash");
    out.clip_skip = count(&o, "clip_skip").and_then(|n| i64::try_from(n).ok());
    for lora in o.get("loras").and_then(Json::as_array).into_iter().flatten() {
        if let (Some(name), Some(weight)) = (lora.get(0).and_then(Json::as_str), lora.get(1).and_then(real)) {
            out.loras.push((name.to_owned(), weight));
        }
    }
    let taken = [
        "prompt",
        "negative_prompt",
        "steps",
        "sampler",
        "scheduler",
        "guidance_scale",
        "seed",
        "resolution",
        "base_model",
        "base_model_hash",
        "clip_skip",
        "loras",
    ];
    others(&mut out, &o, &taken);
    Some(out)
}

/// The texts of NovelAI: the prompt, the model, and an object of settings.
pub(super) fn novel_ai(description: Option<&str>, source: Option<&str>, comment: &str) -> Option<Generation> {
    let o = object(comment)?;
    let mut out = Generation::new(Generator::NovelAi);
    out.prompt = description.map(str::to_owned).or_else(|| text(&o, "prompt")).unwrap_or_default();
    out.negative_prompt = text(&o, "uc").unwrap_or_default();
    out.steps = count(&o, "steps");
    out.sampler = text(&o, "sampler");
    out.scheduler = text(&o, "noise_schedule");
    out.cfg_scale = o.get("scale").and_then(real);
    out.seed = o.get("seed").and_then(integer);
    out.size = count(&o, "width").zip(count(&o, "height"));
    out.denoise = o.get("strength").and_then(real);
    // The model's name ends in its hash.
    if let Some(source) = source {
        let hash =
            source.rsplit_once(' ').filter(|(_, h)| h.len() == 8 && h.bytes().all(|b| b.is_ascii_hexdigit()));
        out.model = Some(hash.map_or(source, |(name, _)| name).to_owned());
        out.model_hash = hash.map(|(_, h)| h.to_owned());
    }
    let taken =
        ["prompt", "uc", "steps", "sampler", "noise_schedule", "scale", "seed", "width", "height", "strength"];
    others(&mut out, &o, &taken);
    Some(out)
}

/// All texts of NovelAI in one object, as it hides them in pixels.
pub(super) fn novel_ai_hidden(source: &str) -> Option<Generation> {
    let o = object(source)?;
    if text(&o, "Software").as_deref() != Some("NovelAI") {
        return None;
    }
    novel_ai(text(&o, "Description").as_deref(), text(&o, "Source").as_deref(), &text(&o, "Comment")?)
}

/// The object under `invokeai_metadata`, written since version 3.
pub(super) fn invoke_ai(source: &str) -> Option<Generation> {
    let o = object(source)?;
    let mut out = Generation::new(Generator::InvokeAi);
    out.prompt = text(&o, "positive_prompt").unwrap_or_default();
    out.negative_prompt = text(&o, "negative_prompt").unwrap_or_default();
    out.steps = count(&o, "steps");
    out.scheduler = text(&o, "scheduler");
    out.sampler = out.scheduler.clone();
    out.cfg_scale = o.get("cfg_scale").and_then(real);
    out.seed = o.get("seed").and_then(integer);
    out.size = count(&o, "width").zip(count(&o, "height"));
    out.clip_skip = count(&o, "clip_skip").and_then(|n| i64::try_from(n).ok());
    out.denoise = o.get("strength").and_then(real);
    if let Some(model) = o.get("model").and_then(Json::as_object) {
        out.model = text(model, "name").or_else(|| text(model, "model_name"));
        out.model_hash = text(model, "hash");
    }
    for lora in o.get("loras").and_then(Json::as_array).into_iter().flatten() {
        let model = lora.get("model").or_else(|| lora.get("lora"));
        let name = model.and_then(|m| m.get("name").or_else(|| m.get("model_name"))).and_then(Json::as_str);
        if let (Some(name), Some(weight)) = (name, lora.get("weight").and_then(real)) {
            out.loras.push((name.to_owned(), weight));
        }
    }
    let taken = [
        "positive_prompt",
        "negative_prompt",
        "steps",
        "scheduler",
        "cfg_scale",
        "seed",
        "width",
        "height",
        "clip_skip",
        "strength",
        "model",
        "loras",
    ];
    others(&mut out, &o, &taken);
    Some(out)
}

/// The object under `sd-metadata`, written by version 2, which puts what is to be avoided in brackets.
pub(super) fn invoke_ai_2(source: &str) -> Option<Generation> {
    let o = object(source)?;
    let image = o.get("image")?.as_object()?;
    let mut out = Generation::new(Generator::InvokeAi);
    let prompt = match image.get("prompt")? {
        Json::String(text) => text.clone(),
        Json::Array(parts) => {
            let parts: Vec<&str> = parts.iter().filter_map(|p| p.get("prompt").and_then(Json::as_str)).collect();
            parts.join(" ")
        }
        _ => return None,
    };
    (out.prompt, out.negative_prompt) = brackets(&prompt);
    out.steps = count(image, "steps");
    out.sampler = text(image, "sampler");
    out.cfg_scale = image.get("cfg_scale").and_then(real);
    out.seed = image.get("seed").and_then(integer);
    out.size = count(image, "width").zip(count(image, "height"));
    out.denoise = image.get("strength").and_then(real);
    out.model = text(&o, "model_weights");
    out.model_hash = text(&o, "model_hash");
    let taken = ["prompt", "steps", "sampler", "cfg_scale", "seed", "width", "height", "strength"];
    others(&mut out, image, &taken);
    others(&mut out, &o, &["image", "model_weights", "model_hash"]);
    Some(out)
}

/// What is outside of brackets, and what is in them.
fn brackets(prompt: &str) -> (String, String) {
    let (mut outside, mut inside) = (String::new(), Vec::new());
    let mut rest = prompt;
    while let Some((before, after)) = rest.split_once('[') {
        let Some((negative, tail)) = after.split_once(']') else { break };
        outside.push_str(before);
        inside.push(negative.trim());
        rest = tail;
    }
    outside.push_str(rest);
    (outside.trim().to_owned(), inside.join(", "))
}
