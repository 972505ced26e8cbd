//! What pictures say about how they were made. The texts have the structure that each program writes; `cargo xtask
//! accept` looks at real files of these programs.
#![allow(clippy::unwrap_used, clippy::panic)] // helpers outside of test functions

mod common;

use std::path::Path;

use sd_io::{Generation, Generator, Image, read_generation, read_parameters, read_texts};

/// A PNG file of one pixel with these text chunks.
fn png(texts: &[(&str, &str)]) -> Vec<u8> {
    let png = Image::new(1, 1, vec![0; 3]).unwrap().to_png(None).unwrap();
    let mut out = png[..33].to_vec(); // up to the end of IHDR
    for (keyword, text) in texts {
        let data = [b"tEXt", keyword.as_bytes(), b"\0", text.as_bytes()].concat();
        let mut crc = flate2::Crc::new();
        crc.update(&data);
        out.extend((data.len() as u32 - 4).to_be_bytes());
        out.extend(&data);
        out.extend(crc.sum().to_be_bytes());
    }
    out.extend_from_slice(&png[33..]);
    out
}

fn read(texts: &[(&str, &str)]) -> Generation {
    read_generation(&png(texts)).unwrap()
}

fn some(s: &str) -> Option<String> {
    Some(s.to_owned())
}

#[test]
fn a1111() {
    let text = "a red fox, <lora:snow:0.7> (sharp:1.2)\nsecond line: still the prompt\nNegative prompt: blurry\nand dull\n\
                Steps: 25, Sampler: DPM++ 2M, Schedule type: Karras, CFG scale: 6.5, Seed: 4294967297, Size: 512x768, \
                Model hash: 0123abcdef, Model: my_model, Denoising strength: 0.45, Clip skip: 2, \
                Lora hashes: \"snow: 11aa, rain: 22bb\", Version: v1.10.1";
    let g = read(&[("parameters", text)]);
    assert_eq!(g.generator, Generator::A1111);
    assert_eq!(g.prompt, "a red fox, <lora:snow:0.7> (sharp:1.2)\nsecond line: still the prompt");
    assert_eq!(g.negative_prompt, "blurry\nand dull");
    assert_eq!(
        (g.steps, g.cfg_scale, g.seed, g.size),
        (Some(25), Some(6.5), Some(4_294_967_297), Some((512, 768)))
    );
    assert_eq!((g.sampler, g.scheduler), (some("DPM++ 2M"), some("Karras")));
    assert_eq!((g.model, g.model_hash), (some("my_model"), some("0123abcdef")));
    assert_eq!((g.clip_skip, g.denoise, g.loras), (Some(2), Some(0.45), vec![("snow".to_owned(), 0.7)]));
    assert_eq!(g.others[0], ("Lora hashes".to_owned(), "snow: 11aa, rain: 22bb".to_owned()));
    // A prompt alone is no record of settings, and neither is any other text.
    for text in ["a red fox", "a: b, c: d, e: f", "", "Steps: 5, x"] {
        assert_eq!(read_generation(&png(&[("parameters", text)])), None, "{text:?}");
    }
    let g = read(&[("parameters", "x\nSteps: 3, Template: a, b and c, Seed: 5, Script: x/y: z, Size: 8x8")]);
    assert_eq!((g.steps, g.seed, g.size), (Some(3), Some(5), Some((8, 8))));
    assert_eq!(g.others[0], ("Template".to_owned(), "a".to_owned()));
    let g = read(&[("parameters", "Negative prompt: dull\nSteps: 1, Sampler: x, Seed: -1")]);
    assert_eq!((g.prompt.as_str(), g.negative_prompt.as_str(), g.seed), ("", "dull", Some(-1)));
}

#[test]
fn stable_diffusion_cpp_and_this_program() {
    let text = "a cat\nSteps: 20, CFG scale: 4.500000, Seed: 42, Size: 512x512, Sampler: euler, \
                Version: stable-diffusion.cpp, SDCPP: {\"a\":[1,{\"b\":\"c, d: e\"}]}";
    let g = read(&[("parameters", text)]);
    assert_eq!(
        (g.generator, g.prompt.as_str(), g.cfg_scale, g.seed),
        (Generator::SdCpp, "a cat", Some(4.5), Some(42))
    );
    assert_eq!(g.others[1], ("SDCPP".to_owned(), "{\"a\":[1,{\"b\":\"c, d: e\"}]}".to_owned()));
    let g = read(&[("parameters", "a cat\nSteps: 2, Seed: 7, Model: \"x, y: z\", Version: sd-rs")]);
    assert_eq!((g.generator, g.model.clone()), (Generator::SdRs, some("x, y: z")));
    let json = serde_json::to_value(&g).unwrap();
    assert_eq!((json["generator"].as_str(), json["seed"].as_i64()), (Some("sd-rs"), Some(7)));
}

#[test]
fn comfy_ui() {
    // A checkpoint with a LoRA, the plain sampler, and a text that comes from another node.
    let graph = r#"{
        "3": {"class_type": "KSampler", "inputs": {"seed": 156680208700286, "steps": 20, "cfg": 8, "sampler_name": "euler",
            "scheduler": "normal", "denoise": 1, "model": ["10", 0], "positive": ["6", 0], "negative": ["7", 0], "latent_image": ["5", 0]}},
        "4": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "sd15.safetensors"}},
        "5": {"class_type": "EmptyLatentImage", "inputs": {"width": 512, "height": 640, "batch_size": 1}},
        "6": {"class_type": "CLIPTextEncode", "inputs": {"text": ["11", 0], "clip": ["10", 1]}},
        "7": {"class_type": "CLIPTextEncode", "inputs": {"text": "text, watermark", "clip": ["10", 1]}},
        "10": {"class_type": "LoraLoader", "inputs": {"lora_name": "snow.safetensors", "strength_model": 0.5, "model": ["4", 0], "clip": ["4", 1]}},
        "11": {"class_type": "StringNode", "inputs": {"string": "a glass bottle"}},
        "9": {"class_type": "SaveImage", "inputs": {"images": ["8", 0]}}}"#;
    let g = read(&[("prompt", graph), ("workflow", "{}")]);
    assert_eq!((g.generator, g.prompt.as_str()), (Generator::ComfyUi, "a glass bottle"));
    assert_eq!(g.negative_prompt, "text, watermark");
    assert_eq!(
        (g.steps, g.cfg_scale, g.seed, g.size),
        (Some(20), Some(8.0), Some(156_680_208_700_286), Some((512, 640)))
    );
    assert_eq!((g.sampler, g.scheduler, g.denoise), (some("euler"), some("normal"), Some(1.0)));
    assert_eq!((g.model, g.loras), (some("sd15.safetensors"), vec![("snow.safetensors".to_owned(), 0.5)]));

    // The sampler of Flux, whose settings lie in nodes of their own.
    let graph = r#"{
        "13": {"class_type": "SamplerCustomAdvanced", "inputs": {"noise": ["25", 0], "guider": ["22", 0], "sampler": ["16", 0], "sigmas": ["17", 0], "latent_image": ["27", 0]}},
        "16": {"class_type": "KSamplerSelect", "inputs": {"sampler_name": "euler"}},
        "17": {"class_type": "BasicScheduler", "inputs": {"scheduler": "simple", "steps": 4, "denoise": 1.0, "model": ["12", 0]}},
        "22": {"class_type": "BasicGuider", "inputs": {"model": ["12", 0], "conditioning": ["26", 0]}},
        "25": {"class_type": "RandomNoise", "inputs": {"noise_seed": 9}},
        "26": {"class_type": "FluxGuidance", "inputs": {"guidance": 3.5, "conditioning": ["6", 0]}},
        "6": {"class_type": "CLIPTextEncode", "inputs": {"text": "a fox", "clip": ["11", 0]}},
        "12": {"class_type": "UNETLoader", "inputs": {"unet_name": "flux.safetensors"}},
        "27": {"class_type": "EmptySD3LatentImage", "inputs": {"width": 1024, "height": 1024}}}"#;
    let g = read(&[("prompt", graph)]);
    assert_eq!((g.prompt.as_str(), g.negative_prompt.as_str(), g.seed, g.steps), ("a fox", "", Some(9), Some(4)));
    assert_eq!((g.cfg_scale, g.sampler, g.model), (Some(3.5), some("euler"), some("flux.safetensors")));
    assert_eq!(g.size, Some((1024, 1024)));

    // Links in a circle end; a graph without a sampler says nothing.
    let round = r#"{"1": {"class_type": "KSampler", "inputs": {"latent_image": ["2", 0], "positive": ["2", 0]}},
        "2": {"class_type": "A", "inputs": {"a": ["1", 0], "b": ["2", 0]}}}"#;
    assert_eq!(read(&[("prompt", round)]).prompt, "");
    for graph in ["{}", "[]", "a fox", r#"{"1": {"class_type": "SaveImage", "inputs": {}}}"#] {
        assert_eq!(read_generation(&png(&[("prompt", graph)])), None, "{graph}");
    }
}

#[test]
fn fooocus() {
    let text = r#"{"metadata_scheme": "fooocus", "version": "Fooocus v2.5.0", "prompt": "a boat", "negative_prompt": "fog",
        "steps": 30, "sampler": "dpmpp_2m_sde_gpu", "scheduler": "karras", "guidance_scale": 4.0, "seed": "1234567890123456789",
        "resolution": "(1152, 896)", "base_model": "xl", "base_model_hash": "ab12", "clip_skip": 2, "loras": [["detail", 0.25, "cd34"]],
        "styles": ["One"]}"#;
    let g = read(&[("parameters", text), ("fooocus_scheme", "fooocus")]);
    assert_eq!((g.generator, g.prompt.as_str(), g.negative_prompt.as_str()), (Generator::Fooocus, "a boat", "fog"));
    assert_eq!((g.seed, g.size), (Some(1_234_567_890_123_456_789), Some((1152, 896))));
    assert_eq!((g.cfg_scale, g.loras, g.model_hash), (Some(4.0), vec![("detail".to_owned(), 0.25)], some("ab12")));
    assert!(g.others.contains(&("styles".to_owned(), "[\"One\"]".to_owned())));
}

#[test]
fn invoke_ai() {
    let text = r#"{"positive_prompt": "a hill", "negative_prompt": "rain", "width": 640, "height": 512, "seed": 77, "cfg_scale": 7.5,
        "steps": 40, "scheduler": "euler_k", "model": {"name": "dream", "hash": "blake3:aa"}, "loras": [{"model": {"name": "wet"}, "weight": 0.6}],
        "app_version": "5.0.0"}"#;
    let g = read(&[("invokeai_metadata", text)]);
    assert_eq!(
        (g.generator, g.prompt.as_str(), g.negative_prompt.as_str()),
        (Generator::InvokeAi, "a hill", "rain")
    );
    assert_eq!((g.steps, g.seed, g.size, g.model), (Some(40), Some(77), Some((640, 512)), some("dream")));
    assert_eq!((g.scheduler, g.loras), (some("euler_k"), vec![("wet".to_owned(), 0.6)]));
    let old = r#"{"model_weights": "dream2", "app_version": "2.3.0", "image": {"prompt": [{"prompt": "a hill [rain, fog] at night", "weight": 1.0}],
        "steps": 50, "cfg_scale": 5, "seed": 3, "width": 512, "height": 768, "sampler": "k_lms"}}"#;
    let g = read(&[("Dream", "x"), ("sd-metadata", old)]);
    assert_eq!((g.prompt.as_str(), g.negative_prompt.as_str()), ("a hill  at night", "rain, fog"));
    assert_eq!((g.sampler, g.size, g.model), (some("k_lms"), Some((512, 768)), some("dream2")));
}

#[test]
fn novel_ai() {
    let comment = r#"{"steps": 28, "sampler": "k_euler", "seed": 5, "strength": 0.7, "scale": 11.0, "uc": "bad hands", "width": 832, "height": 1216}"#;
    let texts = [
        ("Title", "AI generated image"),
        ("Description", "a cat, 1.1::space::"),
        ("Software", "NovelAI"),
        ("Source", "Stable Diffusion 1D44365E"),
        ("Comment", comment),
    ];
    let g = read(&texts);
    assert_eq!(
        (g.generator, g.prompt.as_str(), g.negative_prompt.as_str()),
        (Generator::NovelAi, "a cat, 1.1::space::", "bad hands")
    );
    assert_eq!((g.steps, g.cfg_scale, g.seed, g.size), (Some(28), Some(11.0), Some(5), Some((832, 1216))));
    assert_eq!((g.model, g.model_hash, g.denoise), (some("Stable Diffusion"), some("1D44365E"), Some(0.7)));
    let raw = read_texts(&png(&texts));
    assert_eq!(raw.iter().map(|t| t.keyword.as_str()).collect::<Vec<_>>(), texts.map(|t| t.0));
}

/// Pillow has written these with the texts of `tests/data/make.py`.
#[test]
fn other_places_of_texts() {
    let data =
        |name: &str| std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)).unwrap();
    let settings = |g: &Generation| (g.prompt.clone(), g.steps, g.seed);
    for name in
        ["comment.webp", "comment.jpg", "after.png", "hidden-alpha.png", "hidden-packed.png", "hidden-rgb.png"]
    {
        let g = read_generation(&data(name)).unwrap_or_else(|| panic!("{name}"));
        assert_eq!(settings(&g), ("a fox, 狐".to_owned(), Some(9), Some(8)), "{name}");
    }
    assert!(read_parameters(&data("comment.webp")).unwrap().starts_with("a fox, 狐\n"));
    // What is hidden is no text that the format knows.
    assert_eq!(read_parameters(&data("hidden-alpha.png")), None);
    let g = read_generation(&data("comfy.webp")).unwrap();
    assert_eq!((g.generator, g.steps, g.seed), (Generator::ComfyUi, Some(4), Some(11)));
    let keywords: Vec<String> = read_texts(&data("comfy.webp")).into_iter().map(|t| t.keyword).collect();
    assert_eq!(keywords, ["Make", "Model"]);
}
