//! Which family a checkpoint belongs to, by the names and shapes of its tensors.

use sd_core::{Shape, WeightSource};

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

/// What a name tells.
enum Found {
    /// A family that is not supported.
    Known(&'static str),
    /// One of several families, which shapes and other names tell apart.
    Decide(fn(&Names<'_>) -> Kind),
}

use Found::{Decide, Known};

/// Names that only one family has. A name counts where it starts, or where one of its components starts. The first
/// row with a hit wins.
const NETWORKS: &[(&str, Found)] = &[
    ("net.lq_proj.latent_proj.0.weight", Known("PiD")),
    ("embed_image_indicator.weight", Known("Ideogram 4")),
    ("txtfusion.projector.weight", Known("Krea 2")),
    ("text_fusion.projector.weight", Known("Krea 2")),
    ("nerf_final_layer_conv.", Known("Chroma Radiance")),
    ("distilled_guidance_layer.", Known("Chroma")),
    ("joint_blocks.", Decide(sd3)),
    ("x_embedder.proj1.weight", Known("HiDream-O1")),
    ("img_embedder.proj1.weight", Known("MiniT2I")),
    ("transformer_blocks.0.img_mlp.w1.weight", Known("Lens")),
    ("transformer_blocks.0.img_mod.1.weight", Known("Qwen-Image")),
    ("txt_in.individual_token_refiner.", Known("HunyuanVideo")),
    ("llm_adapter.blocks.0.cross_attn.q_proj.weight", Known("Anima")),
    ("dual_time_embed.semantic_embedder.linear_1.weight", Known("SeFi-Image")),
    ("double_blocks.0.img_mlp.gate_proj.weight", Known("Ovis-Image")),
    ("cap_embedder.0.weight", Known("Z-Image")),
    ("double_stream_layers.0.img_instruct_attn.", Known("Boogu")),
    ("layers.0.adaLN_sa_ln.weight", Known("ERNIE-Image")),
    ("adaln_single.emb.timestep_embedder.linear_1.bias", Known("LTX")),
    ("video_patch_proj.weight", Known("MiniMax-H3")),
    ("patch_embedder.weight", Known("LingBot-Video")),
    ("time_mixer.mix_factor", Known("Stable Video Diffusion")),
    ("blocks.0.cross_attn.norm_k.weight", Known("Wan")),
    ("double_stream_modulation_img.lin.weight", Known("FLUX.2")),
    ("double_blocks.", Decide(flux)),
    ("single_transformer_blocks.", Decide(flux)),
    ("transformer_blocks.0.attn.add_q_proj.", Decide(sd3)),
    ("embedder.model.visual.", Known("SD 2 unCLIP")),
    ("input_blocks.", Decide(unet)),
    ("down_blocks.0.resnets.0.time_emb_proj.", Decide(unet)),
];

/// Files that hold something else.
const OTHERS: &[(&str, &str, &str)] = &[
    ("lora_unet_", "a LoRA", "load it next to a model"),
    ("lora_te_", "a LoRA", "load it next to a model"),
    ("lora_down.weight", "a LoRA", "load it next to a model"),
    ("lora_A.weight", "a LoRA", "load it next to a model"),
    ("lora_up.weight", "a LoRA", "load it next to a model"),
    ("lokr_w1", "a LoRA", "load it next to a model"),
    ("hada_w1_a", "a LoRA", "load it next to a model"),
    ("proj_lora1.", "a LoRA", "load it next to a model"),
    ("control_model.", "a ControlNet", "it works next to a model"),
    ("input_hint_block.", "a ControlNet", "it works next to a model"),
    ("controlnet_blocks.", "a ControlNet", "it works next to a model"),
    ("controlnet_x_embedder.", "a ControlNet", "it works next to a model"),
    ("ip_adapter.", "an IP-Adapter", "it works next to a model"),
    ("ip_adapter_proj_model.", "an IP-Adapter", "it works next to a model"),
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
    match NETWORKS.iter().find(|(key, _)| has(key)) {
        Some((_, Known(name))) => Kind::Known(name),
        Some((_, Decide(decide))) => decide(&Names { file, names }),
        None => Kind::NoNetwork,
    }
}

/// The tensors of a file.
struct Names<'a> {
    file: &'a dyn WeightSource,
    names: Vec<&'a str>,
}

impl Names<'_> {
    fn has(&self, key: &str) -> bool {
        self.names.iter().any(|n| at_component(n, key))
    }

    /// The tensor of the diffusion network or of a text encoder with one of these names, the outermost if there are
    /// several.
    fn outermost(&self, keys: &[&str]) -> Option<&str> {
        let found = |n: &&&str| keys.iter().any(|key| at_component(n, key)) && !n.contains("coder.");
        self.names.iter().filter(found).min_by_key(|n| n.len()).copied()
    }

    /// Its shape.
    fn shape(&self, keys: &[&str]) -> Option<Shape> {
        self.file.meta(self.outermost(keys)?).map(|m| m.shape)
    }
}

/// What families with the same names are told apart by.
const WITNESSES: &[&str] = &[
    "input_blocks.0.0.weight",
    "conv_in.weight",
    "label_emb.0.0.weight",
    "add_embedding.linear_1.weight",
    "attn2.to_k.weight",
    "proj_in.weight",
    "cond_stage_model.model.ln_final.weight",
    "cond_stage_model.transformer.text_model.final_layer_norm.weight",
    "img_in.weight",
    "x_embedder.weight",
    "final_layer.linear.weight",
    "guidance_in.in_layer.weight",
    "time_text_embed.guidance_embedder.linear_1.weight",
    "joint_blocks.0.x_block.attn.qkv.weight",
    "joint_blocks.0.x_block.attn.ln_q.weight",
    "joint_blocks.0.x_block.attn2.qkv.weight",
    "pos_embed.proj.weight",
    "transformer_blocks.0.attn.norm_q.weight",
    "transformer_blocks.0.attn2.norm_q.weight",
];

/// The tensors that [`detect`] goes by, each with its shape.
pub(crate) fn evidence(file: &dyn WeightSource) -> Vec<String> {
    let names = Names { file, names: file.names() };
    let other = OTHERS.iter().map(|(key, ..)| (*key, &[][..])).find(|(key, _)| names.has(key));
    let network = NETWORKS.iter().find(|(key, _)| names.has(key)).map(|(key, found)| match found {
        Known(_) => (*key, &[][..]),
        Decide(_) => (*key, WITNESSES),
    });
    let Some((key, witnesses)) = other.or(network) else { return Vec::new() };
    let mut found: Vec<&str> = Vec::new();
    // Tensors with shapes say more than the first one of a group.
    let by_shape = witnesses.iter().filter_map(|key| names.outermost(&[key]));
    found.extend(by_shape);
    if found.is_empty() {
        found.extend(names.names.iter().find(|n| at_component(n, key)));
    }
    let shown = |name: &str| {
        let shape = file.meta(name).map(|m| format!(" {}", m.shape)).unwrap_or_default();
        format!("{name}{shape}")
    };
    found.into_iter().map(shown).collect()
}

/// Stable Diffusion up to XL.
fn unet(names: &Names<'_>) -> Kind {
    let vector = names.shape(&["label_emb.0.0.weight", "add_embedding.linear_1.weight"]);
    Kind::Runs(if let Some(vector) = vector {
        // The refiner's vector holds five numbers as 256 values each beside its one encoder's pooled state.
        let context = names.shape(&["attn2.to_k.weight"]);
        if context.is_some_and(|context| context.last() + 5 * 256 == vector.last()) {
            Family::SdxlRefiner
        } else {
            Family::Sdxl
        }
    } else if is_sd2(names) {
        Family::Sd2
    } else {
        Family::Sd1
    })
}

/// FLUX.1 and what others made of it.
fn flux(names: &Names<'_>) -> Kind {
    if !names.has("vector_in.") && !names.has("time_text_embed.text_embedder.") {
        return Kind::Known("a FLUX.1 without pooled text, such as LongCat-Image");
    }
    let channels = |keys: &[&str], axis: usize| names.shape(keys).and_then(|s| s.dims().get(axis).copied());
    let reads = channels(&["img_in.weight", "x_embedder.weight"], 1);
    let predicts = channels(&["final_layer.linear.weight", "proj_out.weight"], 0);
    let guidance = names.has("guidance_in.") || names.has("time_text_embed.guidance_embedder.");
    Kind::Runs(match reads.zip(predicts) {
        // 4 values of the latent in a token have 4 cells of 8×8 pixels of a mask.
        Some((n, out)) if n == 2 * out + 4 * 64 => Family::FluxFill,
        Some((n, out)) if n == 2 * out => Family::FluxControl,
        Some((n, out)) if n == 3 * out + 4 => return Kind::Known("Flex.2"),
        _ if guidance => Family::Flux,
        _ => Family::FluxSchnell,
    })
}

/// SD 3 and 3.5. Every size of 3.5 norms queries and keys; medium also attends to the picture alone.
fn sd3(names: &Names<'_>) -> Kind {
    let has = |original: &str, diffusers: &str| names.has(original) || names.has(diffusers);
    if !has("x_embedder.proj.", "pos_embed.proj.") {
        return Kind::Known("a transformer of SD 3's kind without its table of positions");
    }
    Kind::Runs(if has("x_block.attn2.", "transformer_blocks.0.attn2.") {
        Family::Sd35Medium
    } else if has("x_block.attn.ln_q.", "attn.norm_q.") {
        Family::Sd35Large
    } else {
        Family::Sd3
    })
}

/// Whether the key stands at the start of `name` or after a dot.
fn at_component(name: &str, key: &str) -> bool {
    name.match_indices(key).any(|(i, _)| i == 0 || name.get(..i).is_some_and(|before| before.ends_with('.')))
}

/// SD 2 has OpenCLIP's text encoder. Where that is stored apart or renamed, the attention's projections tell, which are
/// matrices in SD 2 and convolutions in SD 1, and at last the encoder's width.
fn is_sd2(&Names { file, ref names }: &Names<'_>) -> bool {
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
        assert_eq!(one("blocks.0.cross_attn.norm_k.weight"), Kind::Known("Wan"));
        assert_eq!(one(&format!("{D}transformer_blocks.0.img_mod.1.weight")), Kind::Known("Qwen-Image"));
        assert!(matches!(one("lora_unet_down_blocks_0.alpha"), Kind::NotAModel("a LoRA", _)));
        assert!(matches!(one("control_model.input_blocks.0.0.weight"), Kind::NotAModel("a ControlNet", _)));
        let xlabs = kind(&[
            ("double_blocks.0.processor.ip_adapter_double_stream_k_proj.weight", &[4, 4]),
            ("ip_adapter_proj_model.proj.weight", &[4, 4]),
        ]);
        assert!(matches!(xlabs, Kind::NotAModel("an IP-Adapter", _)), "{xlabs:?}");
        let control =
            kind(&[("controlnet_blocks.0.weight", &[4, 4]), ("transformer_blocks.0.norm1.linear.bias", &[4])]);
        assert!(matches!(control, Kind::NotAModel("a ControlNet", _)), "{control:?}");
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
    fn variants_of_flux_are_told_apart_by_what_they_read() {
        let net = |reads: usize, more: &[&str]| {
            let mut all: Vec<(&str, &[usize])> = more.iter().map(|n| (*n, &[4, 4][..])).collect();
            let dims = [4, reads];
            let img = if more[0].starts_with("double") { "img_in.weight" } else { "transformer.x_embedder.weight" };
            all.push((img, &dims));
            kind(&all)
        };
        let bfl =
            ["double_blocks.0.img_attn.qkv.weight", "vector_in.in_layer.weight", "guidance_in.in_layer.weight"];
        let hf = [
            "transformer.single_transformer_blocks.0.proj_out.weight",
            "transformer.time_text_embed.text_embedder.linear_1.weight",
            "transformer.time_text_embed.guidance_embedder.linear_1.weight",
        ];
        for names in [bfl, hf] {
            // What it predicts has 4 channels.
            let out = if names == bfl { "final_layer.linear.weight" } else { "transformer.proj_out.weight" };
            let [first, vector, guidance] = names;
            assert_eq!(net(4, &[first, vector, guidance, out]), Kind::Runs(Family::Flux));
            assert_eq!(net(4, &[first, vector, out]), Kind::Runs(Family::FluxSchnell));
            assert_eq!(net(8, &[first, vector, guidance, out]), Kind::Runs(Family::FluxControl));
            assert_eq!(net(8 + 256, &[first, vector, guidance, out]), Kind::Runs(Family::FluxFill));
            assert_eq!(net(16, &[first, vector, guidance, out]), Kind::Known("Flex.2"));
            assert!(matches!(net(4, &[first, guidance, out]), Kind::Known(name) if name.contains("LongCat")));
        }
    }

    #[test]
    fn variants_of_sd3_are_told_apart_by_their_attentions() {
        let original = ["x_embedder.proj", "joint_blocks.0.x_block.attn.qkv", "attn.ln_q", "attn2.qkv"];
        let diffusers = ["pos_embed.proj", "transformer_blocks.0.attn.add_q_proj", "attn.norm_q", "attn2.to_q"];
        for (prefix, block, names) in [
            (D, "joint_blocks.0.x_block.", original),
            ("", "transformer_blocks.0.", diffusers),
            ("transformer.", "transformer_blocks.0.", diffusers),
        ] {
            let [first, attention, norm, second] = names;
            let list =
                [first.to_owned(), attention.to_owned(), format!("{block}{norm}"), format!("{block}{second}")]
                    .map(|n| format!("{prefix}{n}.weight"));
            let kind = |n: usize| kind(&list[..n].iter().map(|n| (n.as_str(), &[4, 4][..])).collect::<Vec<_>>());
            assert_eq!([2, 3, 4].map(kind), [Family::Sd3, Family::Sd35Large, Family::Sd35Medium].map(Kind::Runs));
        }
        let other = kind(&[("transformer_blocks.0.attn.add_q_proj.weight", &[4, 4])]);
        assert!(matches!(other, Kind::Known(name) if name.contains("without its table")), "{other:?}");
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
        assert_eq!(net(1280, 2560), Kind::Runs(Family::SdxlRefiner));
        assert_eq!(net(192, 1664), Kind::Runs(Family::Sdxl));
        assert_eq!(net(128, 1408), Kind::Runs(Family::SdxlRefiner));
    }
}
