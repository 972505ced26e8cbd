use std::collections::BTreeMap;

use super::*;
use crate::testing::{Tensors, real_checkpoint};

fn kind(list: &[(&str, &[usize])]) -> Kind {
    detect(&Tensors::shapes(list))
}

const D: &str = "model.diffusion_model.";

#[test]
fn families_are_told_apart_by_names() {
    let one = |n: &str| kind(&[(n, &[4, 4])]);
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
    let bfl = ["double_blocks.0.img_attn.qkv.weight", "vector_in.in_layer.weight", "guidance_in.in_layer.weight"];
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
        assert_eq!(net(4, &[first, guidance, out]), Kind::Known("a FLUX.1 without pooled text"));
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
        let list = [first.to_owned(), attention.to_owned(), format!("{block}{norm}"), format!("{block}{second}")]
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

/// The networks of the reference, and other files, by what `oracle/family_names.py` calls them.
fn reference() -> BTreeMap<String, BTreeMap<String, Vec<usize>>> {
    let file = include_bytes!("../../../../oracle/fixtures/family_names.json.gz");
    let all: serde_json::Value = serde_json::from_reader(flate2::read::GzDecoder::new(&file[..])).unwrap();
    serde_json::from_value(all["sets"].clone()).unwrap()
}

/// `tensors` with `prefix` before their names.
fn below(prefix: &str, tensors: &BTreeMap<String, Vec<usize>>) -> Tensors {
    Tensors::of_shapes(tensors.iter().map(|(n, d)| (format!("{prefix}{n}"), d.clone())).collect())
}

#[test]
fn networks_of_the_reference_are_recognised() {
    let networks = ["", "transformer.", "model.diffusion_model.", "diffusion_model."];
    let mut seen = 0;
    for (label, tensors) in reference() {
        let (prefixes, want): (&[&str], _) = match label.as_str() {
            "SDXS-512-DreamShaper" | "bk-sdm-tiny" | "SD 1.x inpainting" | "SD 1.x InstructPix2Pix" => {
                (&["", "unet."], (Ok(Family::Sd1), Some(label.trim_start_matches("SD 1.x "))))
            }
            "bk-sdm-v2-tiny" => (&["", "unet."], (Ok(Family::Sd2), Some("bk-sdm-v2-tiny or SDXS-512-0.9"))),
            "a VAE of Wan" | "a VAE of Qwen-Image" => (&["", "vae."], (Err("a VAE of Wan or Qwen-Image"), None)),
            "a tiny autoencoder" => (&[""], (Err("a tiny autoencoder"), None)),
            "a motion module" => (&["", "motion_module."], (Err("a motion module"), None)),
            other if other.starts_with("a VAE") => (&["", "vae."], (Err(other), None)),
            other if other.starts_with("a ControlNet") => (&[""], (Err("a ControlNet"), None)),
            other => (&networks, (Err(other), None)),
        };
        for prefix in prefixes {
            let file = below(prefix, &tensors);
            let found = match detect(&file) {
                Kind::Runs(family) => (Ok(family), variant(&file, family)),
                Kind::Known(name) | Kind::NotAModel(name, _) => (Err(name), None),
                Kind::NoNetwork => (Err("nothing"), None),
            };
            assert_eq!(found, want, "{prefix}{label}");
            assert!(!evidence(&file).is_empty() || label == "a tiny autoencoder", "{prefix}{label}");
            seen += 1;
        }
    }
    assert!(seen > 180, "{seen}");
}

#[test]
fn published_checkpoints_are_recognised() {
    use Family::*;
    for (name, family, of_family) in [
        ("sd1", Sd1, None),
        ("sd2", Sd2, None),
        ("sd2_inpaint", Sd2, Some("inpainting")),
        ("sdxl", Sdxl, None),
        ("sdxl_inpaint", Sdxl, Some("inpainting")),
        ("ssd1b", Sdxl, Some("SSD-1B")),
        ("vega", Sdxl, Some("Segmind-Vega")),
        ("sdxl_refiner", SdxlRefiner, None),
        ("flux_dev_all_in_one", Flux, None),
        ("flux_schnell_all_in_one", FluxSchnell, None),
        ("flux_fill_all_in_one", FluxFill, None),
        ("flux_control_all_in_one", FluxControl, None),
        ("sd3_all_in_one", Sd3, None),
        ("sd35_medium_all_in_one", Sd35Medium, None),
        ("sd35_large_all_in_one", Sd35Large, None),
    ] {
        let (sets, unused) = real_checkpoint(name);
        let mut original: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        let mut diffusers: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        for (name, shape, _, sources) in &sets[0].1 {
            original.insert(name.clone(), shape.clone());
            diffusers.extend(sources.iter().cloned());
        }
        let mut whole = unused;
        for (prefix, places) in &sets {
            whole.extend(places.iter().map(|(name, shape, ..)| (format!("{prefix}{name}"), shape.clone())));
        }
        let folder = if matches!(family, Sd1 | Sd2 | Sdxl | SdxlRefiner) { "unet." } else { "transformer." };
        for (layout, file) in [
            ("whole", Tensors::of_shapes(whole)),
            ("network with prefix", below("model.diffusion_model.", &original)),
            ("network without", below("", &original)),
            ("folder", below(folder, &diffusers)),
            ("diffusers without prefix", below("", &diffusers)),
        ] {
            assert_eq!(detect(&file), Kind::Runs(family), "{name}, {layout}");
            assert_eq!(variant(&file, family), of_family, "{name}, {layout}");
            assert!(!evidence(&file).is_empty(), "{name}, {layout}");
        }
    }
}

#[test]
fn original_files_of_other_families_are_recognised() {
    type Listed = &'static [(&'static str, &'static [usize])];
    // Names and shapes that ComfyUI's `model_detection.py`, stable-diffusion.cpp and the authors' files have.
    const FLUX: (&str, &[usize]) = ("double_blocks.0.img_attn.norm.key_norm.scale", &[128]);
    const WAN: (&str, &[usize]) = ("blocks.0.cross_attn.norm_k.weight", &[5120]);
    const WIDTH: (&str, &[usize]) = ("patch_embedding.bias", &[5120]);
    const HEAD: (&str, &[usize]) = ("head.head.weight", &[64, 5120]);
    const HUNYUAN: (&str, &[usize]) =
        ("txt_in.individual_token_refiner.blocks.0.adaLN_modulation.1.weight", &[6, 3]);
    const LTX: (&str, &[usize]) = ("adaln_single.emb.timestep_embedder.linear_1.bias", &[4096]);
    const PATCHES: (&str, &[usize]) = ("patchify_proj.weight", &[4096, 128]);
    let originals: &[(&str, Listed)] = &[
        ("PiD", &[("net.lq_proj.latent_proj.0.weight", &[512, 16, 3, 3])]),
        ("Ideogram 4", &[("embed_image_indicator.weight", &[2, 4608])]),
        ("Krea 2", &[("txtfusion.projector.weight", &[1, 12])]),
        (
            "Chroma Radiance",
            &[
                FLUX,
                ("nerf_final_layer_conv.conv.weight", &[3, 64, 3, 3]),
                ("distilled_guidance_layer.in_proj.weight", &[5120, 64]),
            ],
        ),
        ("Chroma", &[FLUX, ("distilled_guidance_layer.in_proj.weight", &[5120, 64])]),
        ("AuraFlow", &[("double_layers.0.attn.w1q.weight", &[3072, 3072])]),
        (
            "HiDream-O1",
            &[
                ("model.x_embedder.proj1.weight", &[1024, 3072]),
                ("model.language_model.layers.0.self_attn.q_proj.weight", &[4, 4]),
            ],
        ),
        ("HiDream-I1", &[("double_stream_blocks.0.block.adaLN_modulation.1.bias", &[6])]),
        ("MiniT2I", &[("net.img_embedder.proj1.weight", &[768, 768])]),
        (
            "Lens",
            &[
                ("transformer_blocks.0.attn.norm_added_q.weight", &[64]),
                ("transformer_blocks.0.img_mlp.w1.weight", &[4096, 1536]),
            ],
        ),
        (
            "Qwen-Image",
            &[("transformer_blocks.0.img_mod.1.weight", &[18432, 3072]), ("img_in.weight", &[3072, 64])],
        ),
        (
            "Qwen-Image-Edit 2511",
            &[("transformer_blocks.0.img_mod.1.weight", &[18432, 3072]), ("__index_timestep_zero__", &[])],
        ),
        (
            "Qwen-Image Layered",
            &[
                ("transformer_blocks.0.img_mod.1.weight", &[18432, 3072]),
                ("time_text_embed.addition_t_embedding.weight", &[2, 3072]),
            ],
        ),
        (
            "Mage-Flow",
            &[("transformer_blocks.0.img_mod.1.weight", &[18432, 3072]), ("img_in.weight", &[3072, 128])],
        ),
        ("HunyuanVideo", &[HUNYUAN, FLUX, ("img_in.proj.weight", &[3072, 16, 1, 2, 2])]),
        (
            "HunyuanVideo 1.5",
            &[HUNYUAN, FLUX, ("vision_in.proj.0.weight", &[1152]), ("byt5_in.fc1.weight", &[2048, 1472])],
        ),
        ("HunyuanImage 2.1", &[HUNYUAN, FLUX, ("byt5_in.fc1.weight", &[2048, 1472])]),
        ("Hunyuan-DiT", &[("mlp_t5.0.weight", &[8192, 2048]), ("blocks.0.attn1.Wqkv.weight", &[4, 4])]),
        (
            "Anima",
            &[
                ("net.llm_adapter.blocks.0.cross_attn.q_proj.weight", &[1024, 1024]),
                ("net.blocks.0.adaln_modulation_self_attn.1.weight", &[256, 2048]),
            ],
        ),
        (
            "Cosmos Predict 2",
            &[
                ("net.blocks.0.adaln_modulation_self_attn.1.weight", &[256, 2048]),
                ("net.x_embedder.proj.1.weight", &[2048, 68]),
            ],
        ),
        ("Cosmos 1", &[("net.blocks.block0.blocks.0.block.attn.to_q.0.weight", &[4096, 4096])]),
        (
            "SeFi-Image",
            &[
                ("dual_time_embed.semantic_embedder.linear_1.weight", &[4, 4]),
                ("double_stream_modulation_img.lin.weight", &[4, 4]),
            ],
        ),
        ("Ovis-Image", &[FLUX, ("double_blocks.0.img_mlp.gate_proj.weight", &[4, 4])]),
        ("Boogu", &[("double_stream_layers.0.img_instruct_attn.processor.img_to_q.weight", &[3360, 3360])]),
        ("Z-Image", &[("cap_embedder.0.weight", &[2560]), ("cap_pad_token", &[1, 3840])]),
        (
            "Z-Image Omni",
            &[
                ("cap_embedder.0.weight", &[2560]),
                ("cap_pad_token", &[1, 3840]),
                ("siglip_embedder.0.weight", &[1152]),
            ],
        ),
        (
            "Lumina Image 2.0",
            &[("cap_embedder.0.weight", &[2304]), ("layers.0.adaLN_modulation.1.weight", &[9216, 1024])],
        ),
        (
            "OmniGen 2",
            &[
                ("ref_image_patch_embedder.weight", &[2520, 64]),
                ("time_caption_embed.timestep_embedder.linear_1.bias", &[1024]),
            ],
        ),
        ("ERNIE-Image", &[("layers.0.adaLN_sa_ln.weight", &[4096])]),
        ("LTX-Video", &[LTX, PATCHES]),
        ("LTX-2", &[LTX, PATCHES, ("audio_patchify_proj.weight", &[2048, 128])]),
        (
            "LTX-2.5",
            &[
                LTX,
                PATCHES,
                ("audio_patchify_proj.weight", &[2048, 128]),
                ("keyframes_abs_pos_embedding", &[1, 4096]),
            ],
        ),
        ("MiniMax-H3", &[("video_patch_proj.weight", &[5376, 96]), ("audio_patch_proj.weight", &[5376, 32])]),
        ("LingBot-Video", &[("patch_embedder.weight", &[2048, 64])]),
        (
            "Stable Video Diffusion",
            &[("input_blocks.0.0.weight", &[320, 8, 3, 3]), ("input_blocks.8.0.time_mixer.mix_factor", &[1])],
        ),
        ("Wan T2V, 2.1 or 2.2", &[WAN, WIDTH, HEAD, ("patch_embedding.weight", &[5120, 16, 1, 2, 2])]),
        (
            "Wan 2.1 I2V",
            &[
                WAN,
                WIDTH,
                HEAD,
                ("patch_embedding.weight", &[5120, 36, 1, 2, 2]),
                ("img_emb.proj.0.weight", &[1280]),
            ],
        ),
        (
            "Wan 2.1 FLF2V",
            &[WAN, WIDTH, HEAD, ("img_emb.proj.0.weight", &[1280]), ("img_emb.emb_pos", &[1, 514, 1280])],
        ),
        ("Wan 2.2 I2V", &[WAN, WIDTH, HEAD, ("patch_embedding.weight", &[184320, 1, 2, 2])]),
        (
            "Wan 2.2 TI2V",
            &[WAN, ("patch_embedding.bias", &[3072]), ("patch_embedding.weight", &[3072, 48, 1, 2, 2])],
        ),
        ("Wan VACE", &[WAN, WIDTH, ("vace_blocks.0.after_proj.bias", &[5120])]),
        ("Wan Animate", &[WAN, WIDTH, ("pose_patch_embedding.weight", &[5120, 16, 1, 2, 2])]),
        ("Wan S2V", &[WAN, WIDTH, ("casual_audio_encoder.encoder.final_linear.weight", &[5120, 4])]),
        (
            "FLUX.2 dev",
            &[
                FLUX,
                ("double_stream_modulation_img.lin.weight", &[4, 4]),
                ("guidance_in.in_layer.weight", &[6144, 256]),
            ],
        ),
        ("FLUX.2 klein", &[FLUX, ("double_stream_modulation_img.lin.weight", &[4, 4])]),
        ("Mochi 1", &[("t5_yproj.weight", &[1536, 4096])]),
        ("Stable Cascade, stage B", &[("clip_mapper.weight", &[5120, 1280]), ("effnet_mapper.0.weight", &[4, 4])]),
        ("Stable Cascade, stage C", &[("clip_txt_mapper.weight", &[2048, 1280])]),
        ("Sana", &[("blocks.0.cross_attn.q_linear.weight", &[2240, 2240]), ("attention_y_norm.weight", &[2240])]),
        ("PixArt", &[("blocks.0.cross_attn.q_linear.weight", &[1152, 1152]), ("t_block.1.weight", &[6912, 1152])]),
        ("LongCat-Image", &[FLUX, ("txt_in.weight", &[3072, 3584])]),
        (
            "Flex.2",
            &[
                FLUX,
                ("vector_in.in_layer.weight", &[3072, 768]),
                ("img_in.weight", &[3072, 196]),
                ("final_layer.linear.weight", &[64, 3072]),
            ],
        ),
        (
            "SD 2 unCLIP",
            &[("input_blocks.0.0.weight", &[320, 4, 3, 3]), ("embedder.model.visual.proj", &[1280, 1024])],
        ),
        ("Playground 2.5", &[("input_blocks.0.0.weight", &[320, 4, 3, 3]), ("edm_mean", &[1, 4, 1, 1])]),
    ];
    for (want, listed) in originals {
        for prefix in ["", D, "diffusion_model."] {
            let own: Vec<(String, Vec<usize>)> =
                listed.iter().map(|(n, d)| (format!("{prefix}{n}"), d.to_vec())).collect();
            let beside = [
                ("vae.decoder.conv_in.weight".to_owned(), vec![512, 16, 3, 3]),
                (
                    "text_encoders.qwen25_7b.transformer.model.layers.0.self_attn.q_proj.weight".to_owned(),
                    vec![4, 4],
                ),
            ];
            let whole = own.iter().cloned().chain(beside).collect();
            for file in [Tensors::of_shapes(own.clone()), Tensors::of_shapes(whole)] {
                assert_eq!(detect(&file), Kind::Known(want), "{prefix}");
                assert!(!evidence(&file).is_empty(), "{want}");
            }
        }
    }
}

#[test]
fn files_beside_models_are_recognised() {
    for (want, name) in [
        ("a LoRA", "lora_te1_text_model_encoder_layers_0_mlp_fc1.alpha"),
        ("a LoRA", "transformer.transformer_blocks.0.attn.to_q.lora_A.default.weight"),
        ("a LoRA", "unet.down_blocks.0.attentions.0.proj_in.lora.down.weight"),
        ("a LoRA", "down_blocks.0.attentions.0.transformer_blocks.0.attn1.processor.to_q_lora.down.weight"),
        ("a LoRA", "base_model.model.blocks.0.to_q.oft_R.weight"),
        ("a LoRA", "base_model.model.blocks.0.to_q.ia3_l"),
        ("a LoRA", "unet:0:down"),
        ("a PhotoMaker adapter", "pmid.fuse_module.mlp1.fc1.weight"),
        ("a PhotoMaker adapter", "pmid.unet.up_blocks.0.to_q_lora.down.weight"),
        ("a PuLID adapter", "pulid_ca.0.norm1.weight"),
        ("a ControlNet as LoRA", "lora_controlnet"),
        ("a ControlNet", "control_all_x_embedder.2-1.weight"),
        ("an IP-Adapter", "ip_adapter.1.to_k_ip.weight"),
        ("a FLUX.1 Redux adapter", "redux_up.weight"),
        ("a motion module", "down_blocks.0.motion_modules.0.temporal_transformer.norm.bias"),
        ("a textual inversion", "string_to_param.*"),
        ("a Qwen3-VL text encoder", "visual.deepstack_merger_list.0.norm.weight"),
        ("a Qwen3 text encoder", "model.layers.0.self_attn.q_norm.weight"),
        ("a Gemma text encoder", "model.layers.0.post_feedforward_layernorm.weight"),
        ("a GPT-OSS text encoder", "model.layers.0.self_attn.sinks"),
        ("a language model", "model.layers.0.self_attn.q_proj.weight"),
        ("a language model", "blk.0.attn_norm.weight"),
        ("a CLIP vision encoder", "vision_model.encoder.layers.0.mlp.fc1.weight"),
        ("a VAE of LTX", "vae.per_channel_statistics.mean-of-means"),
        ("a VAE of Wan or Qwen-Image", "decoder.middle.0.residual.0.gamma"),
        ("a YOLOv8 detector", "model.22.cv3.0.2.weight"),
        ("an upscaler", "body.0.rdb1.conv1.weight"),
        ("an upscaler", "model.1.sub.0.RDB1.conv1.0.weight"),
        ("an upscaler", "RRDB_trunk.0.RDB1.conv1.weight"),
    ] {
        assert!(matches!(kind(&[(name, &[4, 4])]), Kind::NotAModel(found, _) if found == want), "{name}");
    }
    for name in [
        "enc.blk.0.attn_norm.weight",
        "text_encoder.text_model.encoder.layers.0.mlp.fc1.weight",
        "encoder.block.0.layer.0.SelfAttention.q.weight",
        "vae.decoder.conv_in.weight",
        "heron.weight",
    ] {
        assert_eq!(kind(&[(name, &[4, 4])]), Kind::NoNetwork, "{name}");
    }
    let whole = kind(&[("vision_model.encoder.layers.0.x", &[4]), ("text_model.encoder.layers.0.x", &[4])]);
    assert_eq!(whole, Kind::NoNetwork, "the text encoder of a whole CLIP can be used");
}
