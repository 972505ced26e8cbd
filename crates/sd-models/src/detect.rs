//! Which family a checkpoint belongs to, by the names and shapes of its tensors. The rows follow the names that the
//! published files have, as ComfyUI (`model_detection.py`) and diffusers (`single_file_utils.py` and the classes of its
//! networks) tell them apart.

use sd_core::{Shape, WeightSource};

use crate::family::Family;
use crate::vae::tiny;

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

/// What names tell.
enum Found {
    /// A family that is not supported.
    Known(&'static str),
    /// One of several families, which shapes and other names tell apart.
    Decide(fn(&Names<'_>) -> Kind),
    /// Something else, with what to do with it.
    Other(&'static str, &'static str),
}

use Found::{Decide, Known, Other};

/// Names, and what a file is that has all of them. A name counts where it starts or where one of its components starts;
/// with `^` only where it starts; one with `!` must not be there.
type Row = (&'static [&'static str], Found);

const BESIDE: &str = "it works next to a model";
const LORA: Found = Other("a LoRA", "load it next to a model");
const CONTROL_NET: Found = Other("a ControlNet", BESIDE);
const IP_ADAPTER: Found = Other("an IP-Adapter", BESIDE);

/// What stands beside a model. Its names hold those of the model that it was made for, so these rows come first.
const ADAPTERS: &[Row] = &[
    (&["^pmid."], Other("a PhotoMaker adapter", BESIDE)),
    (&["^id_encoder.", "^lora_weights."], Other("a PhotoMaker adapter", BESIDE)),
    (&["pulid_ca."], Other("a PuLID adapter", BESIDE)),
    (&["lora_controlnet"], Other("a ControlNet as LoRA", BESIDE)),
    (&["^lora_unet_"], LORA),
    (&["^lora_te"], LORA),
    (&["^lora_transformer_"], LORA),
    (&["^lycoris_"], LORA),
    (&["^unet:0:"], LORA),
    (&["lora_down.weight"], LORA),
    (&["lora_up.weight"], LORA),
    (&["lora_A"], LORA),
    (&["lora.down.weight"], LORA),
    (&["to_q_lora.down.weight"], LORA),
    (&["lora_linear_layer."], LORA),
    (&["lokr_w1"], LORA),
    (&["lokr_w1_a"], LORA),
    (&["hada_w1_a"], LORA),
    (&["oft_blocks"], LORA),
    (&["oft_diag"], LORA),
    (&["oft_R"], LORA),
    (&["ia3_l"], LORA),
    (&["on_input"], LORA),
    (&["diff_b"], LORA),
    (&["proj_lora1."], LORA),
    (&["control_model."], CONTROL_NET),
    (&["input_hint_block."], CONTROL_NET),
    (&["controlnet_blocks."], CONTROL_NET),
    (&["controlnet_x_embedder."], CONTROL_NET),
    (&["controlnet_cond_embedding."], CONTROL_NET),
    (&["control_all_x_embedder."], CONTROL_NET),
    (&["control_layers."], CONTROL_NET),
    (&["ip_adapter."], IP_ADAPTER),
    (&["ip_adapter_proj_model."], IP_ADAPTER),
    (&["redux_up.weight"], Other("a FLUX.1 Redux adapter", BESIDE)),
    (&["motion_modules."], Other("a motion module", BESIDE)),
    (&["emb_params"], Other("a textual inversion", BESIDE)),
    (&["string_to_param"], Other("a textual inversion", BESIDE)),
];

/// Names that only one family has, or a few. The first row with a hit wins.
const NETWORKS: &[Row] = &[
    (&["lq_proj.latent_proj.0.weight"], Known("PiD")),
    (&["embed_image_indicator.weight"], Known("Ideogram 4")),
    (&["txtfusion.projector.weight"], Known("Krea 2")),
    (&["text_fusion.projector.weight"], Known("Krea 2")),
    (&["nerf_final_layer_conv."], Known("Chroma Radiance")),
    (&["distilled_guidance_layer."], Known("Chroma")),
    (&["early_stream_modulations."], Known("FLUX.3")),
    (&["joint_blocks."], Decide(sd3)),
    (&["double_layers.0.attn.w1q.weight"], Known("AuraFlow")),
    (&["joint_transformer_blocks.0.attn.to_q.weight"], Known("AuraFlow")),
    (&["x_embedder.proj1.weight"], Known("HiDream-O1")),
    (&["double_stream_blocks."], Known("HiDream-I1")),
    (&["img_embedder.proj1.weight"], Known("MiniT2I")),
    (&["transformer_blocks.0.img_mlp.w1.weight"], Known("Lens")),
    (&["transformer_blocks.0.img_mod.1.weight"], Decide(qwen)),
    (&["txt_in.text_norm.weight", "transformer_blocks.0.img_mlp.gate_layer.weight"], Known("Qwen-Image 2.1")),
    (&["txt_in.individual_token_refiner."], Decide(hunyuan)),
    (&["context_embedder.token_refiner."], Decide(hunyuan)),
    (&["mlp_t5.0.weight"], Known("Hunyuan-DiT")),
    (&["time_extra_emb.", "text_embedder.linear_1.weight"], Known("Hunyuan-DiT")),
    (&["llm_adapter.blocks.0.cross_attn.q_proj.weight"], Known("Anima")),
    (&["blocks.0.adaln_modulation_self_attn.1.weight"], Known("Cosmos Predict 2")),
    (&["blocks.block0.blocks.0.block.attn.to_q.0.weight"], Known("Cosmos 1")),
    (&["time_embed.t_embedder.linear_1.weight"], Known("Cosmos")),
    (&["dual_time_embed.semantic_embedder.linear_1.weight"], Known("SeFi-Image")),
    (&["double_blocks.0.img_mlp.gate_proj.weight"], Known("Ovis-Image")),
    (&["context_embedder_norm.weight", "single_transformer_blocks."], Known("Ovis-Image")),
    (&["double_stream_layers.0.img_instruct_attn."], Known("Boogu")),
    (&["siglip_embedder."], Known("Z-Image Omni")),
    (&["cap_pad_token"], Known("Z-Image")),
    (&["all_x_embedder."], Known("Z-Image")),
    (&["ref_image_patch_embedder."], Known("OmniGen 2")),
    (&["cap_embedder.0.weight"], Known("Lumina Image 2.0")),
    (&["time_caption_embed."], Known("Lumina Image 2.0")),
    (&["layers.0.adaLN_sa_ln.weight"], Known("ERNIE-Image")),
    (&["patchify_proj."], Decide(ltx)),
    (&["av_cross_attn_video_scale_shift."], Decide(ltx)),
    (&["video_patch_proj.weight", "audio_patch_proj.weight"], Known("MiniMax-H3")),
    (&["token_refiner.final_norm.weight", "audio_proj_in.weight"], Known("MiniMax-H3")),
    (&["patch_embedder.weight"], Known("LingBot-Video")),
    (&["time_mixer.mix_factor"], Known("Stable Video Diffusion")),
    (&["blocks.0.cross_attn.norm_k.weight"], Decide(wan)),
    (&["condition_embedder.time_proj.weight"], Decide(wan)),
    (&["double_stream_modulation_img."], Decide(flux2)),
    (&["t5_yproj.weight"], Known("Mochi 1")),
    (&["time_embed.pooler."], Known("Mochi 1")),
    (&["effnet_mapper."], Known("Stable Cascade, stage B")),
    (&["clip_txt_mapper."], Known("Stable Cascade, stage C")),
    (&["blocks.0.cross_attn.q_linear.weight", "attention_y_norm."], Known("Sana")),
    (&["caption_norm.weight"], Known("Sana")),
    (&["blocks.0.cross_attn.q_linear.weight", "t_block."], Known("PixArt")),
    (&["adaln_single.", "pos_embed.proj.weight"], Known("PixArt")),
    (&["time_embed.emb.timestep_embedder.", "caption_projection.", "proj_in.weight"], Decide(ltx)),
    (&["time_condition_embed."], Known("CogView 4")),
    (&["patch_embed.text_proj.weight"], Known("CogVideoX")),
    (&["visual_transformer_blocks."], Known("Kandinsky 5")),
    (&["preprocess_conv.weight"], Known("Stable Audio")),
    (&["double_blocks."], Decide(flux)),
    (&["single_transformer_blocks."], Decide(flux)),
    (&["transformer_blocks.0.attn.add_q_proj."], Decide(sd3)),
    (&["embedder.model.visual."], Known("SD 2 unCLIP")),
    (&["edm_mean"], Known("Playground 2.5")),
    (&["input_blocks."], Decide(unet)),
    (&["down_blocks.0.resnets.0.time_emb_proj."], Decide(unet)),
];

const UNREAD: &str = "no family that reads it is supported yet";

/// What a file without a diffusion network may be, beside the parts that families here are made of.
const OTHERS: &[Row] = &[
    (&["deepstack_merger_list."], Other("a Qwen3-VL text encoder", UNREAD)),
    (&["visual.merger.", "model.layers."], Other("a Qwen2.5-VL text encoder", UNREAD)),
    (&["post_feedforward_layernorm.weight"], Other("a Gemma text encoder", UNREAD)),
    (&["self_attn.sinks"], Other("a GPT-OSS text encoder", UNREAD)),
    (&["layers.0.self_attn.q_norm.weight"], Other("a Qwen3 text encoder", UNREAD)),
    (&["model.layers.0.self_attn.q_proj.weight"], Other("a language model", UNREAD)),
    (&["^blk.0.attn_norm.weight"], Other("a language model", UNREAD)),
    (&["vision_model.encoder.layers.", "!text_model."], Other("a CLIP vision encoder", UNREAD)),
    (&["visual.transformer.resblocks.", "!token_embedding."], Other("a CLIP vision encoder", UNREAD)),
    (&["decoder.middle.0.residual.0.gamma"], Other("a VAE of Wan or Qwen-Image", UNREAD)),
    (
        &["decoder.mid_block.resnets.0.norm1.gamma", "!decoder.conv_in.conv.weight"],
        Other("a VAE of Wan or Qwen-Image", UNREAD),
    ),
    (&["decoder.mid_block.resnets.0.norm1.gamma"], Other("a VAE of a video family", UNREAD)),
    (&["bn.running_mean", "decoder."], Other("a VAE of FLUX.2", UNREAD)),
    (&["per_channel_statistics."], Other("a VAE of LTX", UNREAD)),
    (&["decoder.stages."], Other("a VAE of Sana", UNREAD)),
    (&["encoder.down_blocks.0.0.conv1.weight"], Other("a VAE of Sana", UNREAD)),
    (&["^model.22.cv3."], Other("a YOLOv8 detector", "it finds what to draw again, which is not supported yet")),
    (&["RDB1.conv1.0.weight"], UPSCALER),
    (&["rdb1.conv1.weight"], UPSCALER),
    (&["RDB1.conv1.weight"], UPSCALER),
];
const UPSCALER: Found = Other("an upscaler", "give it with --upscale-model");

/// The family of `file`, which should hold at least a diffusion network.
pub(crate) fn detect(file: &dyn WeightSource) -> Kind {
    let names = Names { file, names: file.names() };
    match names.row() {
        Some((_, Known(name))) => Kind::Known(name),
        Some((_, Decide(decide))) => decide(&names),
        Some((_, Other(name, hint))) => Kind::NotAModel(name, hint),
        None if tiny::is_tiny(file) => Kind::NotAModel("a tiny autoencoder", "give it with --taesd"),
        None => Kind::NoNetwork,
    }
}

/// The tensors of a file.
struct Names<'a> {
    file: &'a dyn WeightSource,
    names: Vec<&'a str>,
}

impl Names<'_> {
    /// The first row whose names are there.
    fn row(&self) -> Option<&'static Row> {
        [ADAPTERS, NETWORKS, OTHERS].into_iter().flatten().find(|(keys, _)| keys.iter().all(|key| self.fits(key)))
    }

    fn fits(&self, key: &str) -> bool {
        match (key.strip_prefix('^'), key.strip_prefix('!')) {
            (Some(start), _) => self.names.iter().any(|n| n.starts_with(start)),
            (_, Some(absent)) => !self.has(absent),
            _ => self.has(key),
        }
    }

    fn has(&self, key: &str) -> bool {
        self.names.iter().any(|n| at_component(n, key))
    }

    /// The tensor of the diffusion network or of a text encoder with one of these names, the outermost if there are
    /// several.
    fn outermost(&self, keys: &[&str]) -> Option<&str> {
        let found = |n: &&&str| keys.iter().any(|key| at_component(n, key)) && !n.contains("coder.");
        self.names.iter().filter(found).min_by_key(|n| n.len()).copied()
    }

    /// A size of it.
    fn size(&self, keys: &[&str], axis: usize) -> Option<usize> {
        self.shape(keys)?.dims().get(axis).copied()
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
    let Some((keys, found)) = names.row() else { return Vec::new() };
    let witnesses = if let Decide(_) = found { WITNESSES } else { &[] };
    let mut found: Vec<&str> = Vec::new();
    // Tensors with shapes say more than the first one of a group.
    let by_shape = witnesses.iter().filter_map(|key| names.outermost(&[key]));
    found.extend(by_shape);
    if found.is_empty() {
        let key = keys.first().map_or("", |key| key.trim_start_matches('^'));
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

/// What a network of `family` is beside others of it; `None` if it is the plain one.
pub(crate) fn variant(file: &dyn WeightSource, family: Family) -> Option<&'static str> {
    let names = Names { file, names: file.names() };
    let has = |original: &str, diffusers: &str| names.outermost(&[original, diffusers]).is_some();
    let pruned = match family {
        // Levels without attention have other names than those with it.
        Family::Sd1 if !has("middle_block.", "mid_block.") => {
            let whole = has("output_blocks.7.1.", "up_blocks.2.attentions.");
            Some(if whole { "bk-sdm-tiny" } else { "SDXS-512-DreamShaper" })
        }
        Family::Sd2 if !has("middle_block.", "mid_block.") => Some("bk-sdm-v2-tiny or SDXS-512-0.9"),
        Family::Sdxl if !has("middle_block.1.", "mid_block.attentions.") => {
            let deep = "output_blocks.3.1.transformer_blocks.1.";
            let whole = has(deep, "up_blocks.1.attentions.0.transformer_blocks.1.");
            Some(if whole { "SSD-1B" } else { "Segmind-Vega" })
        }
        _ => None,
    };
    let reads = names.size(&["input_blocks.0.0.weight", "conv_in.weight"], 1);
    let predicts = names.size(&["out.2.weight", "conv_out.weight"], 0);
    pruned.or(match reads.zip(predicts)? {
        (n, out) if n == 2 * out + 1 => Some("inpainting"),
        (n, out) if n == 2 * out => Some("InstructPix2Pix"),
        _ => None,
    })
}

/// FLUX.1 and what others made of it.
fn flux(names: &Names<'_>) -> Kind {
    if !names.has("vector_in.") && !names.has("time_text_embed.text_embedder.") {
        // The width of Qwen2.5-VL 7B.
        return match names.size(&["txt_in.weight", "context_embedder.weight"], 1) {
            Some(3584) => Kind::Known("LongCat-Image"),
            _ => Kind::Known("a FLUX.1 without pooled text"),
        };
    }
    let reads = names.size(&["img_in.weight", "x_embedder.weight"], 1);
    let predicts = names.size(&["final_layer.linear.weight", "proj_out.weight"], 0);
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

/// FLUX.2: only dev is told a strength of guidance.
fn flux2(names: &Names<'_>) -> Kind {
    let dev = names.has("guidance_in.") || names.has("time_guidance_embed.guidance_embedder.");
    Kind::Known(if dev { "FLUX.2 dev" } else { "FLUX.2 klein" })
}

/// Qwen-Image, and Mage-Flow, whose tokens are single values of 128 channels.
fn qwen(names: &Names<'_>) -> Kind {
    Kind::Known(if names.size(&["img_in.weight"], 1) == Some(128) {
        "Mage-Flow"
    } else if names.has("time_text_embed.addition_t_embedding.weight") {
        "Qwen-Image Layered"
    } else if names.has("__index_timestep_zero__") {
        "Qwen-Image-Edit 2511"
    } else {
        "Qwen-Image"
    })
}

/// Hunyuan's transformers with a refiner of text tokens.
fn hunyuan(names: &Names<'_>) -> Kind {
    let patches = names.shape(&["img_in.proj.weight", "x_embedder.proj.weight"]);
    Kind::Known(if names.has("vision_in.") || names.has("cond_type_embed.weight") {
        "HunyuanVideo 1.5"
    } else if patches.is_some_and(|p| p.rank() == 4) || names.has("byt5_in.") {
        "HunyuanImage 2.1"
    } else {
        "HunyuanVideo"
    })
}

/// LTX, from its second version on with sound.
fn ltx(names: &Names<'_>) -> Kind {
    let sound = names.has("audio_patchify_proj.") || names.has("audio_proj_in.");
    Kind::Known(match sound {
        true if names.has("keyframes_abs_pos_embedding") => "LTX-2.5",
        true => "LTX-2",
        false => "LTX-Video",
    })
}

/// Wan: what a network reads beside the noise.
fn wan(names: &Names<'_>) -> Kind {
    let has = |original: &str, diffusers: &str| names.has(original) || names.has(diffusers);
    // A patch is 1×2×2 values; some files have the first two axes merged.
    let elements = |key: &str| names.shape(&[key]).map(|s| s.elements());
    let sizes = elements("patch_embedding.weight").zip(elements("patch_embedding.bias"));
    let reads = sizes.map(|(weight, width)| weight / width.max(1) / 4);
    let predicts = names.size(&["head.head.weight", "proj_out.weight"], 0).map(|rows| rows / 4);
    Kind::Known(if names.has("vace_blocks.") {
        "Wan VACE"
    } else if names.has("pose_patch_embedding.") {
        "Wan Animate"
    } else if names.has("casual_audio_encoder.") {
        "Wan S2V"
    } else if names.has("control_adapter.") {
        "Wan with camera control"
    } else if has("img_emb.emb_pos", "condition_embedder.image_embedder.pos_embed") {
        "Wan 2.1 FLF2V"
    } else if has("img_emb.", "condition_embedder.image_embedder.") {
        "Wan 2.1 I2V"
    } else if reads == Some(48) {
        "Wan 2.2 TI2V"
    } else if reads.zip(predicts).is_some_and(|(n, out)| n == 2 * out + 4) {
        "Wan 2.2 I2V"
    } else {
        "Wan T2V, 2.1 or 2.2"
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
mod tests;
