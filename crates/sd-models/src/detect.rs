//! Which family a checkpoint belongs to, by the names and shapes of its tensors.

use sd_core::WeightSource;

use crate::family::Family;

/// What a file turned out to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A family that can be run.
    Runs(Family),
    /// Known by this name, and not supported.
    Known(&'static str),
    /// Not a diffusion model but this, with what to do with it.
    NotAModel(&'static str, &'static str),
    /// Holds no diffusion network.
    NoNetwork,
}

/// Names that only one family has. A name counts where it starts, or where one of its components starts. The first
/// row with a hit wins.
const NETWORKS: &[(&str, &str)] = &[
    ("net.lq_proj.latent_proj.0.weight", "PiD"),
    ("embed_image_indicator.weight", "Ideogram 4"),
    ("txtfusion.projector.weight", "Krea 2"),
    ("text_fusion.projector.weight", "Krea 2"),
    ("nerf_final_layer_conv.", "Chroma Radiance"),
    ("distilled_guidance_layer.", "Chroma"),
    ("joint_blocks.", "SD 3"),
    ("x_embedder.proj1.weight", "HiDream-O1"),
    ("img_embedder.proj1.weight", "MiniT2I"),
    ("transformer_blocks.0.img_mlp.w1.weight", "Lens"),
    ("transformer_blocks.0.img_mod.1.weight", "Qwen-Image"),
    ("txt_in.individual_token_refiner.", "HunyuanVideo"),
    ("llm_adapter.blocks.0.cross_attn.q_proj.weight", "Anima"),
    ("dual_time_embed.semantic_embedder.linear_1.weight", "SeFi-Image"),
    ("double_blocks.0.img_mlp.gate_proj.weight", "Ovis-Image"),
    ("cap_embedder.0.weight", "Z-Image"),
    ("double_stream_layers.0.img_instruct_attn.", "Boogu"),
    ("layers.0.adaLN_sa_ln.weight", "ERNIE-Image"),
    ("adaln_single.emb.timestep_embedder.linear_1.bias", "LTX"),
    ("video_patch_proj.weight", "MiniMax-H3"),
    ("patch_embedder.weight", "LingBot-Video"),
    ("time_mixer.mix_factor", "Stable Video Diffusion"),
    ("blocks.0.cross_attn.norm_k.weight", "Wan"),
    ("double_stream_modulation_img.lin.weight", "FLUX.2"),
    ("double_blocks.", "FLUX.1"),
    ("single_transformer_blocks.", "FLUX.1"),
    ("transformer_blocks.0.attn.add_q_proj.", "SD 3"),
    ("embedder.model.visual.", "SD 2 unCLIP"),
];

/// Files that hold something else.
const OTHERS: &[(&str, &str, &str)] = &[
    ("lora_unet_", "a LoRA", "load it next to a model"),
    ("lora_te_", "a LoRA", "load it next to a model"),
    ("lora_down.weight", "a LoRA", "load it next to a model"),
    ("lora_A.weight", "a LoRA", "load it next to a model"),
    ("lora_up.weight", "a LoRA", "load it next to a model"),
    ("control_model.", "a ControlNet", "it works next to a model"),
    ("input_hint_block.", "a ControlNet", "it works next to a model"),
    ("controlnet_cond_embedding.", "a ControlNet", "it works next to a model"),
    ("motion_modules.", "a motion module", "it works next to a model"),
    ("emb_params", "a textual inversion", "it works next to a model"),
    ("string_to_param", "a textual inversion", "it works next to a model"),
];

/// The family of `file`, which should hold at least a diffusion network.
pub(crate) fn detect(file: &dyn WeightSource) -> Kind {
    let names = file.names();
    let has = |key: &str| names.iter().any(|n| at_component(n, key));
    if let Some((_, name, hint)) = OTHERS.iter().find(|(key, ..)| has(key)) {
        return Kind::NotAModel(name, hint);
    }
    if let Some((_, name)) = NETWORKS.iter().find(|(key, _)| has(key)) {
        return Kind::Known(name);
    }
    if !(has("input_blocks.") || has("down_blocks.0.resnets.0.time_emb_proj.")) {
        return Kind::NoNetwork;
    }
    let shape = |keys: &[&str]| {
        let found = |n: &&&str| keys.iter().any(|key| at_component(n, key)) && !n.contains("coder.");
        names.iter().find(found).and_then(|n| file.meta(n)).map(|m| m.shape)
    };
    let vector = shape(&["label_emb.0.0.weight", "add_embedding.linear_1.weight"]);
    Kind::Runs(if let Some(vector) = vector {
        // The refiner's vector holds five numbers as 256 values each beside its one encoder's pooled state.
        let context = shape(&["attn2.to_k.weight"]);
        if context.is_some_and(|context| context.last() + 5 * 256 == vector.last()) {
            return Kind::Known("SDXL refiner");
        }
        Family::Sdxl
    } else if is_sd2(file, &names) {
        Family::Sd2
    } else {
        Family::Sd1
    })
}

/// Those of UNets that tell their families apart.
const TELLING: &[&[&str]] = &[
    &["input_blocks.0.0.weight", "conv_in.weight"],
    &["label_emb.0.0.weight", "add_embedding.linear_1.weight"],
    &["attn2.to_k.weight"],
    &["transformer_blocks.0.proj_in.weight", "1.proj_in.weight", "attentions.0.proj_in.weight"],
    &["cond_stage_model.model.", "cond_stage_model.transformer."],
];

/// The tensors of `file` by which [`detect`] knows it.
pub(crate) fn evidence(file: &dyn WeightSource) -> Vec<String> {
    let names = file.names();
    let first = |key: &&str| names.iter().find(|n| at_component(n, key) && !n.contains("coder.")).copied();
    let rows = OTHERS.iter().map(|row| row.0).chain(NETWORKS.iter().map(|row| row.0));
    let found: Vec<&str> = match rows.filter_map(|key| first(&key)).next() {
        Some(name) => vec![name],
        None if detect(file) == Kind::NoNetwork => Vec::new(),
        None => TELLING.iter().filter_map(|keys| keys.iter().find_map(first)).collect(),
    };
    let shape = |name: &str| file.meta(name).map(|m| m.shape.to_string()).unwrap_or_default();
    found.into_iter().map(|name| format!("{name} {}", shape(name))).collect()
}

/// Whether the key stands at the start of `name` or after a dot.
fn at_component(name: &str, key: &str) -> bool {
    name.match_indices(key).any(|(i, _)| i == 0 || name.get(..i).is_some_and(|before| before.ends_with('.')))
}

/// SD 2 has OpenCLIP's text encoder. Where that is stored apart or renamed, the attention's projections tell, which are
/// matrices in SD 2 and convolutions in SD 1, and at last the encoder's width.
fn is_sd2(file: &dyn WeightSource, names: &[&str]) -> bool {
    if names.iter().any(|n| n.starts_with("cond_stage_model.model.")) {
        return true;
    }
    if names.iter().any(|n| n.starts_with("cond_stage_model.transformer.")) {
        return false;
    }
    let shape = |key: &str| names.iter().find(|n| n.ends_with(key)).and_then(|n| file.meta(n)).map(|m| m.shape);
    if let Some(projection) = shape(".proj_in.weight") {
        return projection.rank() == 2;
    }
    shape("embeddings.token_embedding.weight").is_some_and(|table| table.last() == 1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Tensors;

    fn kind(list: &[(&str, &[usize])]) -> Kind {
        detect(&Tensors::shapes(list))
    }

    const D: &str = "model.diffusion_model.";

    #[test]
    fn families_are_told_apart_by_names() {
        let one = |n: &str| kind(&[(n, &[4, 4])]);
        assert_eq!(one(&format!("{D}double_blocks.0.img_attn.qkv.weight")), Kind::Known("FLUX.1"));
        assert_eq!(one("double_blocks.0.img_attn.qkv.weight"), Kind::Known("FLUX.1"));
        assert_eq!(one(&format!("{D}joint_blocks.0.x_block.mlp.fc1.weight")), Kind::Known("SD 3"));
        assert_eq!(one("blocks.0.cross_attn.norm_k.weight"), Kind::Known("Wan"));
        assert_eq!(one(&format!("{D}transformer_blocks.0.img_mod.1.weight")), Kind::Known("Qwen-Image"));
        assert!(matches!(one("lora_unet_down_blocks_0.alpha"), Kind::NotAModel("a LoRA", _)));
        assert!(matches!(one("control_model.input_blocks.0.0.weight"), Kind::NotAModel("a ControlNet", _)));
        assert_eq!(one("first_stage_model.decoder.conv_in.weight"), Kind::NoNetwork);
        assert_eq!(one("encoder.down_blocks.0.resnets.0.conv1.weight"), Kind::NoNetwork);
    }

    #[test]
    fn sd1_and_sd2_are_told_apart_by_structure() {
        let net = |list: &[(&str, &[usize])]| {
            let own: Vec<(String, Vec<usize>)> = list.iter().map(|(n, s)| (n.to_string(), s.to_vec())).collect();
            let mut all: Vec<(&str, &[usize])> = own.iter().map(|(n, s)| (n.as_str(), s.as_slice())).collect();
            let first = "model.diffusion_model.input_blocks.0.0.weight";
            if !all.iter().any(|(n, _)| *n == first) {
                all.push((first, &[32, 4, 3, 3]));
            }
            kind(&all)
        };
        let linear = "model.diffusion_model.input_blocks.1.1.proj_in.weight";
        assert_eq!(net(&[]), Kind::Runs(Family::Sd1));
        assert_eq!(net(&[("cond_stage_model.model.ln_final.weight", &[64])]), Kind::Runs(Family::Sd2));
        assert_eq!(net(&[(linear, &[64, 64])]), Kind::Runs(Family::Sd2));
        assert_eq!(net(&[(linear, &[64, 64, 1, 1])]), Kind::Runs(Family::Sd1));
        let text = "cond_stage_model.transformer.text_model.embeddings.token_embedding.weight";
        assert_eq!(net(&[(linear, &[64, 64]), (text, &[9, 64])]), Kind::Runs(Family::Sd1));
        let folder: &[(&str, &[usize])] = &[
            ("unet.conv_in.weight", &[32, 4, 3, 3]),
            ("unet.down_blocks.0.resnets.0.time_emb_proj.weight", &[32, 32]),
            ("vae.decoder.conv_in.weight", &[32, 9, 3, 3]),
            ("text_encoder.text_model.embeddings.token_embedding.weight", &[9, 1024]),
        ];
        assert_eq!(kind(folder), Kind::Runs(Family::Sd2));
        assert_eq!(kind(&folder[..3]), Kind::Runs(Family::Sd1));
        let projection: (&str, &[usize]) = ("unet.down_blocks.0.attentions.0.proj_in.weight", &[64, 64]);
        let text: (&str, &[usize]) = ("text_encoder.text_model.embeddings.token_embedding.weight", &[9, 64]);
        assert_eq!(kind(&[folder[0], folder[1], projection, text]), Kind::Runs(Family::Sd2));
    }

    #[test]
    fn sdxl_and_its_refiner_are_told_apart_by_ratios() {
        let net = |context: usize, vector: usize| {
            kind(&[
                ("model.diffusion_model.input_blocks.0.0.weight", &[32, 4, 3, 3]),
                ("model.diffusion_model.input_blocks.4.1.transformer_blocks.0.attn2.to_k.weight", &[64, context]),
                ("model.diffusion_model.label_emb.0.0.weight", &[64, vector]),
            ])
        };
        assert_eq!(net(2048, 2816), Kind::Runs(Family::Sdxl));
        assert_eq!(net(1280, 2560), Kind::Known("SDXL refiner"));
        assert_eq!(net(192, 1664), Kind::Runs(Family::Sdxl));
        assert_eq!(net(128, 1408), Kind::Known("SDXL refiner"));
    }
}
