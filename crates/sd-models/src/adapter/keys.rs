//! What the names of an adapter file's tensors say: a module, and what the tensor is to it.

use std::collections::BTreeMap;

/// What a tensor is to its module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Slot {
    Down,
    Up,
    Mid,
    /// Added to the module's bias after `Up`.
    UpBias,
    Alpha,
    Scale,
    /// The lengths of rows.
    Magnitude,
    /// The lengths of rows or columns, as the shape says.
    DoraScale,
    Difference,
    BiasDifference,
    Replacement,
    /// The factors `a` and `b` of one side, 1 or 2, of a Hadamard product, and what stands between them.
    HadamardA(u8),
    HadamardB(u8),
    HadamardCore(u8),
    /// The sides of a Kronecker product, whole or as factors `a` and `b`, and what stands between them.
    Kronecker(u8),
    KroneckerA(u8),
    KroneckerB(u8),
    KroneckerCore(u8),
    /// Of a kind that is not supported.
    Unsupported(&'static str),
}

/// Ends of names. Those that others end in come last.
const ENDS: &[(&str, Slot)] = &[
    (".lora_down.weight", Slot::Down),
    (".lora_up.weight", Slot::Up),
    (".lora_mid.weight", Slot::Mid),
    (".lora_up.bias", Slot::UpBias),
    (".lora.down.weight", Slot::Down),
    (".lora.up.weight", Slot::Up),
    (".lora_linear_layer.down.weight", Slot::Down),
    (".lora_linear_layer.up.weight", Slot::Up),
    ("_lora.down.weight", Slot::Down),
    ("_lora.up.weight", Slot::Up),
    ("_lora1.down.weight", Slot::Down),
    ("_lora1.up.weight", Slot::Up),
    ("_lora2.down.weight", Slot::Down),
    ("_lora2.up.weight", Slot::Up),
    (".lora_A.weight", Slot::Down),
    (".lora_B.weight", Slot::Up),
    (".lora_B.bias", Slot::UpBias),
    (".lora_A", Slot::Down),
    (".lora_B", Slot::Up),
    (".weight.lora_a", Slot::Down),
    (".weight.lora_b", Slot::Up),
    (".alpha", Slot::Alpha),
    (".lora_linear", Slot::Alpha),
    (".lora_magnitude_vector.weight", Slot::Magnitude),
    (".lora_magnitude_vector", Slot::Magnitude),
    (".dora_scale", Slot::DoraScale),
    (".diff", Slot::Difference),
    (".diff_b", Slot::BiasDifference),
    (".w_norm", Slot::Difference),
    (".b_norm", Slot::BiasDifference),
    (".set_weight", Slot::Replacement),
    (".hada_w1_a", Slot::HadamardA(1)),
    (".hada_w1_b", Slot::HadamardB(1)),
    (".hada_w2_a", Slot::HadamardA(2)),
    (".hada_w2_b", Slot::HadamardB(2)),
    (".hada_t1", Slot::HadamardCore(1)),
    (".hada_t2", Slot::HadamardCore(2)),
    (".lokr_w1", Slot::Kronecker(1)),
    (".lokr_w2", Slot::Kronecker(2)),
    (".lokr_w1_a", Slot::KroneckerA(1)),
    (".lokr_w1_b", Slot::KroneckerB(1)),
    (".lokr_w2_a", Slot::KroneckerA(2)),
    (".lokr_w2_b", Slot::KroneckerB(2)),
    (".lokr_t2", Slot::KroneckerCore(2)),
    (".oft_blocks", Slot::Unsupported("OFT")),
    (".oft_diag", Slot::Unsupported("OFT")),
    (".oft_R.weight", Slot::Unsupported("OFT")),
    (".on_input", Slot::Unsupported("IA3")),
    (".a1.weight", Slot::Unsupported("GLoRA")),
    (".a2.weight", Slot::Unsupported("GLoRA")),
    (".b1.weight", Slot::Unsupported("GLoRA")),
    (".b2.weight", Slot::Unsupported("GLoRA")),
    (".lora_embedding_A", Slot::Unsupported("LoRA of a table")),
    (".lora_embedding_B", Slot::Unsupported("LoRA of a table")),
];
/// The factor of one element, not the `scale` of a norm.
const SCALE: &str = ".scale";
/// Parts of names that an adapter's own name follows, as PEFT writes them in full.
const NAMED: &[(&str, Slot)] = &[
    (".lora_A.", Slot::Down),
    (".lora_B.", Slot::Up),
    (".lora_magnitude_vector.", Slot::Magnitude),
    (".lora_embedding_A.", Slot::Unsupported("LoRA of a table")),
    (".lora_embedding_B.", Slot::Unsupported("LoRA of a table")),
];

/// The module of a name and what the tensor is to it; `None` if no adapter's tensor ends like this.
pub(super) fn parse(name: &str, elements: usize) -> Option<(String, Slot)> {
    for (end, slot) in ENDS {
        if let Some(module) = name.strip_suffix(end) {
            return Some((module_of(module, end), *slot));
        }
    }
    if elements == 1
        && let Some(module) = name.strip_suffix(SCALE)
    {
        return Some((module.to_owned(), Slot::Scale));
    }
    NAMED.iter().find_map(|(mark, slot)| {
        let (module, rest) = name.split_once(mark)?;
        let slot = match (slot, rest.rsplit_once('.')) {
            (Slot::Up, Some((_, "bias"))) => Slot::UpBias,
            (_, Some((_, "weight")) | None) => *slot,
            _ => return None,
        };
        Some((module.to_owned(), slot))
    })
}

/// Attention processors hold the tensors of old diffusers files and, with numbers for the two streams, of XLabs'.
fn module_of(module: &str, end: &str) -> String {
    let Some((path, name)) = module.rsplit_once(".processor.") else { return module.to_owned() };
    let stream = match (end.as_bytes().get(5), path.split('.').rev().nth(1)) {
        (Some(b'1'), _) => "img_attn.",
        (Some(b'2'), _) => "txt_attn.",
        (_, Some("single_blocks")) => {
            return format!("{path}.{}", if name == "qkv" { "linear1_qkv" } else { "linear2" });
        }
        _ => "",
    };
    format!("{path}.{stream}{name}")
}

/// The tensors of a module.
#[derive(Debug, Default)]
pub(super) struct Group {
    pub(super) slots: BTreeMap<Slot, String>,
}

impl Group {
    pub(super) fn get(&self, slot: Slot) -> Option<&String> {
        self.slots.get(&slot)
    }
}

/// What spelling a file's names have, for the report.
pub(super) fn spelling(names: &[&str]) -> &'static str {
    let any = |f: &dyn Fn(&str) -> bool| names.iter().any(|n| f(n));
    let flat = any(&|n| n.starts_with("lora_"));
    if any(&|n| n.contains(".hada_w") || n.contains(".lokr_w") || n.starts_with("lycoris_")) {
        "LyCORIS"
    } else if any(&|n| n.starts_with("lora_transformer_")) {
        "OneTrainer"
    } else if flat {
        "kohya"
    } else if any(&|n| n.contains(".processor.") || n.contains(".lora.down.") || n.contains(".lora_linear_layer."))
    {
        "older diffusers"
    } else if any(&|n| n.starts_with("diffusion_model.")) {
        "ComfyUI"
    } else if any(&|n| n.contains(".default.")) {
        "PEFT with the adapter's name"
    } else if any(&|n| n.starts_with("base_model.")) {
        "PEFT"
    } else if any(&|n| n.contains(".lora_A") || n.contains(".lora_B")) {
        "diffusers"
    } else if any(&|n| n.contains(".lora_a") || n.contains(".lora_b")) {
        "llama.cpp"
    } else {
        "bare"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_of_names_are_known() {
        for (name, module, slot) in [
            ("lora_unet_a_b.lora_down.weight", "lora_unet_a_b", Slot::Down),
            ("unet.a.b.lora.up.weight", "unet.a.b", Slot::Up),
            ("a.attn1.processor.to_q_lora.down.weight", "a.attn1.to_q", Slot::Down),
            ("text_encoder.a.q_proj.lora_linear_layer.up.weight", "text_encoder.a.q_proj", Slot::Up),
            ("a.lora_A.default.weight", "a", Slot::Down),
            ("a.lora_B.my-adapter.bias", "a", Slot::UpBias),
            ("a.lora_B.default", "a", Slot::Up),
            ("a.lora_magnitude_vector.default.weight", "a", Slot::Magnitude),
            ("a.lokr_w1_a", "a", Slot::KroneckerA(1)),
            ("double_blocks.0.processor.qkv_lora2.down.weight", "double_blocks.0.txt_attn.qkv", Slot::Down),
            ("single_blocks.3.processor.proj_lora.up.weight", "single_blocks.3.linear2", Slot::Up),
        ] {
            assert_eq!(parse(name, 8), Some((module.to_owned(), slot)), "{name}");
        }
        assert_eq!(parse("a.key_norm.scale", 128), None);
        assert_eq!(parse("a.scale", 1), Some(("a".to_owned(), Slot::Scale)));
        assert_eq!(parse("a.weight", 8), None);
    }
}
