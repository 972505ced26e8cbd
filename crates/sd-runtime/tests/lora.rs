//! LoRAs and embeddings on whole pictures of the oracle's tiny SD 1.x. Every spelling of one LoRA is in
//! `lora_names.json`.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use sd_core::WeightSource;
use sd_core::convert::to_f32;
use sd_io::Checkpoint;
use sd_models::text::tokenizer;
use sd_runtime::{Engine, EngineBuilder, ImageRequest, LoraChoice, LoraMode, Precision};
use support::{Log, generate, json, one, procedural, psnr, sd1, write_tensors as write};

const TABLE: &str = "cond_stage_model.transformer.text_model.embeddings.token_embedding.weight";
const PROMPT: &str = "a red circle";

fn checkpoint() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| sd1::write("lora-sd1.safetensors", |_, _| {}))
}

/// An empty folder.
fn folder(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).unwrap();
    path
}

fn builder(folder: &Path) -> EngineBuilder {
    Engine::builder().model(checkpoint()).device("cpu").threads(1).lora_folder(folder)
}

fn request(prompt: &str) -> ImageRequest {
    ImageRequest { prompt: prompt.into(), steps: Some(1), ..support::oracle_request("sd1_pipeline.safetensors") }
}

fn draw(engine: &mut Engine, prompt: &str) -> Vec<u8> {
    let mut log = Log::default();
    let image = generate(engine, &request(prompt), &mut log).unwrap().remove(0);
    assert!(log.warnings.is_empty(), "{:?}", log.warnings);
    image.rgb
}

fn fails(engine: &mut Engine, prompt: &str) -> String {
    generate(engine, &request(prompt), &mut Log::default()).unwrap_err().to_string()
}

type Tensors = Vec<(String, Vec<usize>, Vec<f32>)>;

fn spellings() -> BTreeMap<String, Vec<(String, Vec<usize>, String)>> {
    serde_json::from_value(json("lora_names.json")["files"].clone()).unwrap()
}

/// A factor of the LoRA `seed`; `whole` is the module in the reference with `.down` or `.up`.
fn factor(seed: &str, whole: &str, elements: usize) -> Vec<f32> {
    procedural(&format!("{seed}{whole}"), elements, -13, 0.0)
}

/// The LoRA `seed` in one of the spellings.
fn lora(seed: &str, rows: &[(String, Vec<usize>, String)]) -> Tensors {
    let rank = json("lora_names.json")["rank"].as_f64().unwrap() as f32;
    let tensor = |(name, dims, whole): &(String, Vec<usize>, String)| {
        let elements = dims.iter().product();
        let values = if whole.ends_with(".alpha") { vec![rank] } else { factor(seed, whole, elements) };
        (name.clone(), dims.clone(), values)
    };
    rows.iter().map(tensor).collect()
}

#[test]
fn every_spelling_of_one_lora_gives_the_same_picture() {
    let folder = folder("lora-spellings");
    let mut engine = builder(&folder).build().unwrap();
    let without = draw(&mut engine, PROMPT);
    let mut first = None;
    let all = spellings();
    assert!(all.len() >= 9);
    for (i, (spelling, rows)) in all.iter().enumerate() {
        write(&folder.join(format!("{i}.safetensors")), &lora("a", rows));
        let picture = draw(&mut engine, &format!("{PROMPT}<lora:{i}:1>"));
        assert!(picture != without, "{spelling} changes nothing");
        assert!(picture == *first.get_or_insert_with(|| picture.clone()), "{spelling} differs");
    }
}

#[test]
fn a_folder_of_peft_is_read_with_its_configuration() {
    let folder = folder("lora-peft");
    let rows = &spellings()["PEFT with the adapter's name"];
    write(&folder.join("plain.safetensors"), &lora("a", rows));
    let inside = folder.join("styles/ink");
    fs::create_dir_all(&inside).unwrap();
    write(&inside.join("adapter_model.safetensors"), &lora("a", rows));
    let rank = json("lora_names.json")["rank"].as_u64().unwrap();
    let config = |extra: &str| {
        let text = format!("{{\"peft_type\": \"LORA\", \"r\": {rank}, \"lora_alpha\": {}{extra}}}", 2 * rank);
        fs::write(inside.join("adapter_config.json"), text).unwrap();
        builder(&folder).build().unwrap()
    };
    // Alpha over rank is 2.
    let mut engine = config("");
    let plain = draw(&mut engine, &format!("{PROMPT}<lora:plain:1>"));
    assert!(draw(&mut engine, &format!("{PROMPT}<lora:styles/ink:0.5>")) == plain);
    assert!(draw(&mut engine, &format!("{PROMPT}<lora:styles/ink/adapter_model:0.5>")) == plain);
    // The same engine reads a configuration that has changed.
    config(", \"use_rslora\": true");
    assert!(draw(&mut engine, &format!("{PROMPT}<lora:styles/ink:0.5>")) != plain);
    // A pattern counts for the layers that it names.
    let patterns = ", \"alpha_pattern\": {\"nowhere\": 64}";
    assert!(draw(&mut config(patterns), &format!("{PROMPT}<lora:styles/ink:0.5>")) == plain);
    for (extra, want) in [
        (", \"peft_type\": \"IA3\"", "the adapter is IA3, of PEFT's kinds only LORA is read"),
        (", \"fan_in_fan_out\": true", "fan_in_fan_out"),
        (",", "is not JSON"),
        (", \"lora_alpha\": \"8\"", "lora_alpha is \"8\", want a number"),
        (", \"use_rslora\": 1", "is 1, want true or false"),
        (", \"alpha_pattern\": [\"to_q\"]", "want names and numbers"),
        (", \"alpha_pattern\": {\".*\": null}", "is null, want a number"),
        (", \"alpha_pattern\": {\"to_(q\": 8}", "alpha_pattern \"to_(q\""),
    ] {
        let e = fails(&mut config(extra), &format!("{PROMPT}<lora:styles/ink:1>"));
        assert!(e.contains(want) && e.contains("adapter_config.json"), "{e}");
    }
    fs::remove_file(inside.join("adapter_model.safetensors")).unwrap();
    let e = fails(&mut config(""), &format!("{PROMPT}<lora:styles/ink:1>"));
    assert!(e.contains("LoRA styles/ink: not found"), "{e}");
}

/// The checkpoint with `strength` times the LoRA `seed` added to its weights.
fn merged(name: &str, seed: &str, strength: f32) -> PathBuf {
    let names = json("sd1_names.json");
    let stored: BTreeMap<&str, &str> = names["names"]
        .as_array()
        .unwrap()
        .iter()
        .map(|r| (r[2].as_str().unwrap(), r[0].as_str().unwrap()))
        .collect();
    let rows = &spellings()["diffusers"];
    let dims: BTreeMap<&str, &[usize]> = rows.iter().map(|(_, d, whole)| (whole.as_str(), &d[..])).collect();
    let mut changed = 0;
    let path = sd1::write(name, |name, values| {
        let Some(module) = stored[name].strip_suffix(".weight") else { return };
        let (up, down) = (format!("{module}.up"), format!("{module}.down"));
        let (Some(u), Some(d)) = (dims.get(up.as_str()), dims.get(down.as_str())) else { return };
        let (n, r, k) = (u[0], d[0], d.iter().skip(1).product::<usize>());
        let (u, d) = (factor(seed, &up, n * r), factor(seed, &down, r * k));
        for (i, value) in values.iter_mut().enumerate() {
            *value += strength * (0..r).map(|j| u[i / k * r + j] * d[j * k + i % k]).sum::<f32>();
        }
        changed += 1;
    });
    assert_eq!(changed, rows.len() / 2);
    path
}

#[test]
fn a_lora_gives_the_picture_of_a_checkpoint_that_it_was_merged_into() {
    let folder = folder("lora-merged");
    write(&folder.join("a.safetensors"), &lora("a", &spellings()["kohya"]));
    for strength in [1.0, -0.5] {
        let path = merged(&format!("lora-merged-{strength}.safetensors"), "a", strength);
        // Products beside weights round otherwise than those of changed ones, which bf16 shows.
        let merged = Engine::builder().model(path).device("cpu").threads(1).precision(Precision::F32);
        let want = one(merged, &request(PROMPT)).rgb;
        for mode in [LoraMode::Auto, LoraMode::Immediately, LoraMode::AtRuntime] {
            let mut engine = builder(&folder).lora_mode(mode).precision(Precision::F32).build().unwrap();
            let db = psnr(&draw(&mut engine, &format!("{PROMPT}<lora:a:{strength}>")), &want);
            assert!(db >= 40.0, "{mode} at {strength}: {db:.1} dB");
            let without = psnr(&draw(&mut engine, PROMPT), &want);
            assert!(without < 35.0, "the picture without is as near: {without:.1} dB");
        }
    }
}

#[test]
fn nothing_of_a_request_is_in_the_next() {
    let folder = folder("lora-requests");
    let rows = &spellings()["kohya"];
    for name in ["a", "b"] {
        write(&folder.join(format!("{name}.safetensors")), &lora(name, rows));
    }
    for mode in [LoraMode::Immediately, LoraMode::AtRuntime] {
        let build = || builder(&folder).lora_mode(mode).build().unwrap();
        let mut engine = build();
        let prompts =
            ["", "<lora:a:1>", "<lora:b:0.5>", "<lora:a:1><lora:b:-1>", ""].map(|t| format!("{PROMPT}{t}"));
        let got: Vec<Vec<u8>> = prompts.iter().map(|p| draw(&mut engine, p)).collect();
        assert!(got[0] == got[4], "{mode}: something stayed");
        assert!(got[0] != got[1] && got[1] != got[2] && got[2] != got[3], "{mode}");
        assert!(got[3] == draw(&mut build(), &prompts[3]), "{mode}: what was there before counts");
    }
}

#[test]
fn loras_are_named_in_the_prompt_or_beside_it() {
    let folder = folder("lora-names");
    fs::create_dir_all(folder.join("styles")).unwrap();
    let rows = &spellings()["diffusers"];
    write(&folder.join("styles/a.safetensors"), &lora("a", rows));
    let mut engine = builder(&folder).build().unwrap();
    let want = draw(&mut engine, &format!("{PROMPT}<lora:styles/a:0.75>"));
    // Strengths of one file add up, whatever it is called.
    assert!(want == draw(&mut engine, &format!("<lora:styles/a.safetensors:0.5>{PROMPT}<lora:styles/a:0.25>")));
    let choice = |name: &str, strength| LoraChoice { name: name.into(), strength, ..LoraChoice::default() };
    let beside = ImageRequest { loras: vec![choice("styles/a", 0.75)], ..request(PROMPT) };
    let image = generate(&mut engine, &beside, &mut Log::default()).unwrap().remove(0);
    assert!(want == image.rgb);
    assert!(image.parameters.to_text().starts_with("a red circle<lora:styles/a:0.75>\n"));
    // A file that has changed is read again.
    write(&folder.join("styles/a.safetensors"), &lora("b", rows));
    assert!(want != draw(&mut engine, &format!("{PROMPT}<lora:styles/a:0.75>")));
    let mut log = Log::default();
    let odd = "<lora:styles/a:much><lora:|high_noise|styles/a:1>";
    let image = generate(&mut engine, &request(&format!("{PROMPT}{odd}")), &mut log).unwrap().remove(0);
    assert!(image.rgb == draw(&mut engine, PROMPT));
    assert_eq!(
        log.warnings,
        [
            "prompt: <lora:styles/a:much> has no name or no number, left out",
            "LoRA styles/a: is for a network of high noise levels, which SD 1.x does not have; left out"
        ]
    );
    let mut log = Log::default();
    let mut bare = Engine::builder().model(checkpoint()).device("cpu").threads(1).build().unwrap();
    generate(&mut bare, &request("<lora:a:1>"), &mut log).unwrap();
    assert_eq!(log.warnings, ["prompt: there is no folder of LoRAs, so tags are read as text"]);
    assert!(
        generate(&mut bare, &beside, &mut log).unwrap_err().to_string().contains("there is no folder of LoRAs")
    );
}

#[test]
fn files_that_cannot_be_applied_are_named() {
    let folder = folder("lora-broken");
    let layer = |path: &str| {
        vec![
            (format!("{path}.lora_down.weight"), vec![2, 24], vec![0.5; 48]),
            (format!("{path}.lora_up.weight"), vec![24, 2], vec![0.5; 48]),
        ]
    };
    write(&folder.join("other.safetensors"), &layer("lora_unet_heron_to_q"));
    write(
        &folder.join("wide.safetensors"),
        &layer("lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q"),
    );
    write(&folder.join("plain.safetensors"), &[("heron".into(), vec![2], vec![0.5; 2])]);
    fs::write(folder.join("page.safetensors"), "<!DOCTYPE html><html>").unwrap();
    fs::write(folder.join("cut.safetensors"), &fs::read(folder.join("other.safetensors")).unwrap()[..200]).unwrap();
    let mut engine = builder(&folder).build().unwrap();
    let without = draw(&mut engine, PROMPT);
    for (name, message) in [
        ("heron", "LoRA heron: not found in "),
        ("../lora-broken/other", "LoRA ../lora-broken/other: is outside of "),
        ("other", "changes nothing of this model"),
        ("wide", "changes nothing of this model"),
        ("plain", "holds no LoRA"),
        ("page", "page.safetensors"),
        ("cut", "cut.safetensors"),
    ] {
        let e = fails(&mut engine, &format!("{PROMPT}<lora:{name}:1>"));
        assert!(e.contains(message), "{name}: {e}");
        assert!(e.contains(name), "{name}: {e}");
    }
    assert!(without == draw(&mut engine, PROMPT), "a request that failed left something");
    let mut lenient = builder(&folder).allow_unused_loras(true).build().unwrap();
    for _ in 0..2 {
        let mut log = Log::default();
        let picture = generate(&mut lenient, &request(&format!("{PROMPT}<lora:other:1>")), &mut log).unwrap();
        let want = "LoRA other: changes nothing of this model (0 of 1 layers applied); drawn without it";
        assert_eq!(log.warnings, [want]);
        assert!(picture[0].rgb == without);
    }
    for name in ["heron", "plain", "page"] {
        assert!(fails(&mut lenient, &format!("{PROMPT}<lora:{name}:1>")).contains(name));
    }
    let e = builder(&folder.join("heron")).build().unwrap_err().to_string();
    assert!(e.ends_with("heron is not a folder"), "{e}");
}

#[test]
fn a_layer_that_does_not_fit_is_warned_about() {
    let folder = folder("lora-unfit");
    let mut tensors = lora("a", &spellings()["kohya"]);
    let wrong = tensors.iter_mut().find(|t| t.0.ends_with("attn1_to_q.lora_up.weight")).unwrap();
    (wrong.1, wrong.2) = (vec![3, 2], vec![0.5; 6]);
    write(&folder.join("a.safetensors"), &tensors);
    let mut engine = builder(&folder).build().unwrap();
    for _ in 0..2 {
        let mut log = Log::default();
        generate(&mut engine, &request("<lora:a>"), &mut log).unwrap();
        let [warning] = &log.warnings[..] else { panic!("{:?}", log.warnings) };
        assert!(warning.starts_with("LoRA a: 1 of 133 layers do not fit: lora_unet_"), "{warning}");
    }
}

/// The rows of a file's table of tokens for the words "red circle", with their shape.
fn words(file: &Path, table: &str) -> (Vec<f32>, [usize; 2]) {
    let file = Checkpoint::open(file).unwrap();
    let meta = file.meta(table).unwrap();
    let width = meta.shape.last();
    let values = to_f32(meta.dtype, &file.bytes(table).unwrap(), meta.shape.elements()).unwrap();
    let ids = tokenizer::clip().unwrap().encode("red circle");
    let rows = ids.iter().flat_map(|id| &values[*id as usize * width..(*id as usize + 1) * width]);
    (rows.copied().collect(), [ids.len(), width])
}

/// A vector that is a token's own stands for that token.
#[test]
fn words_of_embeddings_stand_for_their_vectors() {
    let folder = folder("embeddings");
    let vectors = words(checkpoint(), TABLE);
    let [rows, width] = vectors.1;
    write(&folder.join("Heron.safetensors"), &[("emb_params".into(), vec![rows, width], vectors.0)]);
    write(&folder.join("wide.safetensors"), &[("emb_params".into(), vec![1, 7], vec![0.5; 7])]);
    fs::write(folder.join("notes.txt"), "").unwrap();
    let mut engine = builder(&folder).embedding_folder(&folder).build().unwrap();
    let want = draw(&mut engine, PROMPT);
    assert!(want == draw(&mut engine, "a heron"));
    assert!(draw(&mut engine, "(a:1.2) red circle") == draw(&mut engine, "(a:1.2) HERON"));
    let negative = |text: &str| ImageRequest { negative_prompt: text.into(), ..request("a green ring") };
    let mut draw_negative =
        |text| generate(&mut engine, &negative(text), &mut Log::default()).unwrap().remove(0).rgb;
    assert!(draw_negative("heron") == draw_negative("red circle"));
    assert!(want == draw(&mut engine, PROMPT), "something stayed");
    let mut log = Log::default();
    let image = generate(&mut engine, &request("a wide circle"), &mut log).unwrap().remove(0);
    let [warning] = &log.warnings[..] else { panic!("{:?}", log.warnings) };
    assert!(warning.starts_with("embedding wide: ") && warning.contains("emb_params [1, 7]"), "{warning}");
    assert!(image.rgb == one(builder(&folder), &request("a wide circle")).rgb);
}

#[test]
fn embeddings_of_every_program_stand_for_their_vectors() {
    let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let model = assets.join("assets/demo.safetensors");
    let drawn = |folder: &Path| {
        let builder = Engine::builder().model(&model).device("cpu").threads(1).embedding_folder(folder);
        let mut engine = builder.build().unwrap();
        // The word, and parts of words, which are left alone.
        let prompts = ["a heron", "a (Heron:1.3), blue", "herons", "a heron_2", "a sheron"];
        prompts.map(|prompt| draw_small(&mut engine, prompt))
    };
    let none = folder("embeddings-none");
    let plain = drawn(&none);
    let builder = Engine::builder().model(&model).device("cpu").threads(1);
    let mut engine = builder.build().unwrap();
    let words = ["a red circle", "a (red circle:1.3), blue"].map(|prompt| draw_small(&mut engine, prompt));
    for (file, name) in [
        ("embedding.safetensors", "heron.safetensors"),
        ("embedding_web.pt", "heron.pt"),
        ("embedding_web_legacy.pt", "heron.pt"),
        ("embedding_original.pt", "heron.pt"),
        ("embedding_diffusers.bin", "heron.bin"),
    ] {
        let folder = folder("embeddings-files");
        fs::copy(assets.join("oracle/fixtures").join(file), folder.join(name)).unwrap();
        let got = drawn(&folder);
        assert!(got[..2] == words && got[2..] == plain[2..] && got[..2] != plain[..2], "{file}");
    }
}

fn draw_small(engine: &mut Engine, prompt: &str) -> Vec<u8> {
    let mut log = Log::default();
    let asked = ImageRequest { width: Some(64), height: Some(64), ..request(prompt) };
    let image = generate(engine, &asked, &mut log).unwrap().remove(0);
    assert!(log.warnings.is_empty(), "{:?}", log.warnings);
    image.rgb
}

#[test]
fn embeddings_have_vectors_for_both_text_encoders() {
    let model = support::layouts::single_file("sdxl_pipeline", "lora-embeddings-sdxl", &[]);
    let (first, [rows, narrow]) =
        words(&model, "conditioner.embedders.0.transformer.text_model.embeddings.token_embedding.weight");
    let (second, [_, wide]) = words(&model, "conditioner.embedders.1.model.token_embedding.weight");
    let folder = folder("embeddings-two");
    let (one, two) =
        (("clip_l".to_owned(), vec![rows, narrow], first), ("clip_g".to_owned(), vec![rows, wide], second));
    write(&folder.join("heron.safetensors"), &[one.clone(), two]);
    write(&folder.join("half.safetensors"), &[one]);
    let builder = Engine::builder().model(&model).device("cpu").threads(1).embedding_folder(&folder);
    let mut engine = builder.build().unwrap();
    let request = |prompt: &str| ImageRequest {
        prompt: prompt.into(),
        steps: Some(1),
        ..support::oracle_request("sdxl_pipeline.safetensors")
    };
    let mut drawn = |prompt: &str| {
        let mut log = Log::default();
        (generate(&mut engine, &request(prompt), &mut log).unwrap().remove(0).rgb, log.warnings)
    };
    let want = drawn("a red circle");
    assert!(drawn("a heron") == want && drawn("a ring") != want);
    let (_, warnings) = drawn("a half");
    let [warning] = &warnings[..] else { panic!("{warnings:?}") };
    assert!(
        warning.starts_with("embedding half: ") && warning.contains("the second CLIP text encoder"),
        "{warning}"
    );
}
