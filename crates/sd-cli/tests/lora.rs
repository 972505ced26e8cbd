//! Adapters and embeddings with the built-in demo model.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod support;

use sd_io::{Image, read_parameters};
use std::path::Path;
use support::{folder, sd_cli};

/// A file in safetensors form with one tensor of f32.
fn write(path: &Path, name: &str, shape: &[usize], value: f32) {
    let bytes = value.to_le_bytes().repeat(shape.iter().product());
    let header = serde_json::json!({name: {"dtype": "F32", "shape": shape, "data_offsets": [0, bytes.len()]}});
    let header = header.to_string();
    let len = (header.len() as u64).to_le_bytes();
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, [&len[..], header.as_bytes(), &bytes].concat()).unwrap();
}

#[test]
fn tags_and_words_name_files() {
    let folder = folder("lora");
    write(&folder.join("loras/styles/pale.safetensors"), "diffusion_model.out.2.diff_b", &[4], 0.5);
    write(&folder.join("loras/other.safetensors"), "lora_unet_heron_to_q.lora_up.weight", &[4, 1], 0.5);
    write(&folder.join("words/heron.safetensors"), "emb_params", &[2, 64], 0.5);
    let draw = |prompt: &str, extra: &[&str]| {
        let args = ["-W", "64", "-H", "64", "--steps", "2", "-p", prompt, "-o", "out.png"];
        let run = sd_cli(&folder, &[&args[..], extra].concat());
        assert_eq!(run.code, Some(0), "{prompt} {extra:?}: {}", run.stderr);
        (Image::open(folder.join("out.png")).unwrap().rgb().to_vec(), run.stderr)
    };
    let loras = ["--lora-model-dir", "loras"];
    let (without, _) = draw("a circle", &[]);
    let (with, log) = draw("a circle<lora:styles/pale:1>", &loras);
    assert!(with != without && log.contains("1 of 1 layers applied (1 of the diffusion network)"), "{log}");
    let text = read_parameters(&std::fs::read(folder.join("out.png")).unwrap()).unwrap();
    assert!(text.starts_with("a circle<lora:styles/pale:1>\n"), "{text}");
    for mode in ["immediately", "at_runtime"] {
        let (again, _) = draw("a circle<lora:loras/styles/pale.safetensors>", &["--lora-apply-mode", mode]);
        assert!(again == with, "{mode}");
    }
    let (_, log) = draw("a <lora:styles/pale:1> circle", &["--lora-model-dir="]);
    assert!(log.contains("tags are read as text"), "{log}");
    let (word, log) = draw("a heron", &["--embd-dir", "words"]);
    assert!(word != draw("a heron", &[]).0 && log.contains("embedding heron: 2 vectors"), "{log}");

    let (unused, log) = draw("a circle<lora:other:1>", &["--lora-model-dir", "loras", "--allow-unused-loras"]);
    assert!(unused == without && log.contains("LoRA other: changes nothing of this model"), "{log}");
    assert!(draw("a circle<lora:pale>", &loras).0 == with, "the name without its folder");

    for (args, part) in [
        (&["-p", "<lora:heron:1>"][..], "LoRA heron: not found in loras"),
        (&["-p", "<lora:other:1>"], "other.safetensors: changes nothing of this model"),
        (&["--embd-dir", "none"], "none is not a folder"),
        (&["--lora-apply-mode", "never"], "--lora-apply-mode"),
    ] {
        let run = sd_cli(&folder, &[&loras[..], args].concat());
        assert_eq!(run.code, Some(1), "{args:?}: {}", run.stderr);
        assert!(run.stderr.contains(part) && !run.stderr.contains("denoising"), "{args:?}: {}", run.stderr);
    }
}
