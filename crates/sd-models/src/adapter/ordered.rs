//! Files of cloneofsimo's `lora`, which number layers instead of naming them: `unet:0:down`.
//!
//! The number is the layer's place among those of the classes that were trained, in the order in which diffusers' modules
//! of that time list them (`_find_modules` in `lora_diffusion/lora.py`): down, up, then middle blocks; in a transformer
//! block the self-attention, the first layer of the feed-forward network, the cross-attention. The text encoder's
//! attention lists k, v, q, out.

use crate::names::Part;

use super::keys::Slot;
use super::modules::Modules;

const UNET: &[&str] = &[
    "attn1.to_q",
    "attn1.to_k",
    "attn1.to_v",
    "attn1.to_out.0",
    "ff.net.0.proj",
    "attn2.to_q",
    "attn2.to_k",
    "attn2.to_v",
    "attn2.to_out.0",
];
const TEXT: &[&str] = &["self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj", "self_attn.out_proj"];

/// The modules in the order of their numbers.
pub(super) struct Ordered {
    unet: Vec<String>,
    text: Vec<String>,
}

impl Ordered {
    /// The order for a model.
    pub(super) fn new(modules: &Modules) -> Ordered {
        let mut blocks: Vec<([usize; 3], String)> = Vec::new();
        let mut layers: Vec<(usize, String)> = Vec::new();
        for (part, name, _) in modules.own() {
            match part {
                Part::Diffusion => {
                    let Some(block) = name.strip_suffix(".attn1.to_q.weight") else { continue };
                    let numbers: Vec<usize> = block.split('.').filter_map(|s| s.parse().ok()).collect();
                    let (group, first, last) = match (block.split('.').next(), numbers.as_slice()) {
                        (Some("input_blocks"), [first, .., last]) => (0, *first, *last),
                        (Some("output_blocks"), [first, .., last]) => (1, *first, *last),
                        (Some("middle_block"), [first, .., last]) => (2, *first, *last),
                        _ => continue,
                    };
                    blocks.push(([group, first, last], block.to_owned()));
                }
                Part::ClipL => {
                    let Some(layer) = name.strip_suffix(".self_attn.k_proj.weight") else { continue };
                    if let Some(number) = layer.rsplit('.').next().and_then(|s| s.parse().ok()) {
                        layers.push((number, layer.to_owned()));
                    }
                }
                _ => {}
            }
        }
        blocks.sort();
        layers.sort();
        let list = |blocks: Vec<String>, names: &[&str], prefix: &str| {
            let each = |b: &String| names.iter().map(|n| format!("{prefix}.{b}.{n}")).collect::<Vec<_>>();
            blocks.iter().flat_map(each).collect()
        };
        Ordered {
            unet: list(blocks.into_iter().map(|b| b.1).collect(), UNET, "unet"),
            text: list(layers.into_iter().map(|l| l.1).collect(), TEXT, "te1"),
        }
    }

    /// The module and the place of a tensor; `None` if its name is no number, or of no module.
    pub(super) fn parse(&self, name: &str) -> Option<(String, Slot)> {
        let mut parts = name.split(':');
        let list = match parts.next()? {
            "unet" => &self.unet,
            "text_encoder" => &self.text,
            _ => return None,
        };
        let number: usize = parts.next()?.parse().ok()?;
        let slot = match (parts.next()?, parts.next()) {
            ("down", None) => Slot::Down,
            ("up", None) => Slot::Up,
            _ => return None,
        };
        Some((list.get(number)?.clone(), slot))
    }
}

/// Whether a file's names are numbers.
pub(super) fn is_ordered(names: &[&str]) -> bool {
    names.iter().any(|n| n.starts_with("unet:") || n.starts_with("text_encoder:"))
}
