//! ComfyUI keeps the graph that made the picture: nodes by number, each with a class and inputs, where an input is a
//! value or a link `[node, output]`. What is looked for lies upstream of the sampler; nodes of extensions are followed
//! like any other.

use std::collections::{BTreeSet, VecDeque};

use serde_json::{Map, Value as Json};

use super::json::{integer, plain, real};
use super::{Generation, Generator};

type Nodes = Map<String, Json>;

/// The most nodes that are followed from one link.
const MAX_VISITS: usize = 10_000;

pub(super) fn read(text: &str) -> Option<Generation> {
    let nodes: Nodes = serde_json::from_str(text).ok()?;
    let mut samplers: Vec<&String> = nodes.iter().filter(|(_, n)| is_sampler(n)).map(|(id, _)| id).collect();
    samplers.sort_by_key(|id| (id.parse::<u64>().unwrap_or(u64::MAX), id.as_str()));
    let sampler = nodes.get(*samplers.first()?)?;
    let inputs = sampler.get("inputs")?.as_object()?;

    let mut out = Generation::new(Generator::ComfyUi);
    let prompt = |key: &str| inputs.get(key).and_then(|link| first_text(&nodes, link));
    out.prompt = ["positive", "guider", "conditioning"].into_iter().find_map(prompt).unwrap_or_default();
    let guided = || inputs.get("guider").and_then(|link| node(&nodes, link)?.get("inputs")?.get("negative"));
    let negative = prompt("negative").or_else(|| first_text(&nodes, guided()?));
    out.negative_prompt = negative.unwrap_or_default();

    let find =
        |keys: &[&str]| search(&nodes, sampler, |inputs| keys.iter().find_map(|k| value(&nodes, inputs.get(*k)?)));
    out.seed = find(&["seed", "noise_seed"]).and_then(integer);
    out.steps = find(&["steps"]).and_then(integer).and_then(|n| u64::try_from(n).ok());
    out.cfg_scale = find(&["cfg", "guidance"]).and_then(real);
    out.sampler = find(&["sampler_name"]).map(plain);
    out.scheduler = find(&["scheduler"]).map(plain);
    out.denoise = find(&["denoise"]).and_then(real);
    out.model = find(&["ckpt_name", "unet_name", "model_name"]).map(plain);
    out.clip_skip = find(&["stop_at_clip_layer"]).and_then(integer).and_then(|n| i64::try_from(-n).ok());
    let side = |key: &str| size_of_latent(&nodes, sampler, key);
    out.size = side("width").zip(side("height"));
    for (_, node) in walk(&nodes, sampler) {
        let Some(inputs) = node.get("inputs").and_then(Json::as_object) else { continue };
        if let Some(name) = inputs.get("lora_name").and_then(Json::as_str) {
            let weight = ["strength_model", "strength"].into_iter().find_map(|k| inputs.get(k).and_then(real));
            out.loras.push((name.to_owned(), weight.unwrap_or(1.0)));
        }
    }
    Some(out)
}

/// Width or height of the empty latent.
fn size_of_latent(nodes: &Nodes, sampler: &Json, key: &str) -> Option<u64> {
    let (_, source) = walk(nodes, sampler).into_iter().find(|(_, n)| {
        let class = class(n);
        class.contains("Empty") && class.contains("Latent")
    })?;
    let found = value(nodes, source.get("inputs")?.get(key)?)?;
    integer(found).and_then(|n| u64::try_from(n).ok())
}

fn class(node: &Json) -> &str {
    node.get("class_type").and_then(Json::as_str).unwrap_or_default()
}

/// A node that draws a picture: ComfyUI's own, or one of an extension with the same inputs.
fn is_sampler(node: &Json) -> bool {
    let has = |key: &str| node.get("inputs").is_some_and(|i| i.get(key).is_some());
    (has("latent_image") || has("latent")) && (has("positive") || has("guider") || class(node).contains("KSampler"))
}

/// The node that a link leads to.
fn node<'a>(nodes: &'a Nodes, link: &Json) -> Option<&'a Json> {
    let [id, output] = link.as_array()?.as_slice() else { return None };
    output.as_u64()?;
    nodes.get(&id.as_str().map_or_else(|| id.to_string(), str::to_owned))
}

/// The value of an input; of a link, the value of the node it leads to, if that has a single one.
fn value<'a>(nodes: &'a Nodes, input: &'a Json) -> Option<&'a Json> {
    match node(nodes, input) {
        None if input.is_array() => None,
        None => Some(input),
        Some(source) => ["value", "seed", "int", "float", "string"]
            .into_iter()
            .find_map(|k| source.get("inputs")?.get(k))
            .filter(|v| !v.is_array()),
    }
}

/// The nodes upstream of one, nearest first, itself included, each once, with its number; its own is empty.
fn walk<'a>(nodes: &'a Nodes, from: &'a Json) -> Vec<(String, &'a Json)> {
    let mut seen = BTreeSet::new();
    let mut out = Vec::new();
    let mut next = VecDeque::from([(String::new(), from)]);
    while let Some((id, at)) = next.pop_front() {
        for link in at.get("inputs").and_then(Json::as_object).into_iter().flat_map(Map::values) {
            if let Some(source) = node(nodes, link)
                && let Some(id) = link.get(0).map(plain)
                && seen.len() < MAX_VISITS
                && seen.insert(id.clone())
            {
                next.push_back((id, source));
            }
        }
        out.push((id, at));
    }
    out
}

/// The first that `pick` finds, given the inputs of the nodes upstream.
fn search<'a>(nodes: &'a Nodes, from: &'a Json, pick: impl Fn(&'a Nodes) -> Option<&'a Json>) -> Option<&'a Json> {
    walk(nodes, from).into_iter().find_map(|(_, n)| pick(n.get("inputs")?.as_object()?))
}

/// The first text upstream of a link.
fn first_text(nodes: &Nodes, link: &Json) -> Option<String> {
    let from = node(nodes, link)?;
    let keys = ["text", "text_g", "t5xxl", "clip_l", "prompt", "string", "value"];
    let text = |node: &Json| -> Option<String> {
        let inputs = node.get("inputs")?;
        keys.iter().find_map(|k| inputs.get(*k)?.as_str().map(|s| s.trim().to_owned()))
    };
    walk(nodes, from).into_iter().find_map(|(_, n)| text(n))
}
