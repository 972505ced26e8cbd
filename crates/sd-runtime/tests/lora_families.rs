//! LoRAs on whole pictures of the oracle's tiny SDXL, Flux.1 and SD 3.5 (`oracle/lora_pipeline.py`): kohya's names with
//! joined projections and diffusers' with each alone, on text encoders and network.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sd_core::{DType, WeightSource};
use sd_io::Checkpoint;
use sd_models::adapter::Lora;
use sd_runtime::{Engine, ImageRequest, LoraChoice, LoraMode, Precision, SamplerKind};
use support::layouts::{edited, single_file};
use support::{Fixture, Log, Tensor, agrees, generate, oracle_request, procedural, relative};

/// A tensor, its shape, and the exponent of the oracle's rule; without axes an alpha.
type Row = (String, Vec<usize>, f32);

/// Writes the files of a family's fixture into a folder.
fn write(family: &str, files: &BTreeMap<String, Vec<Row>>) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("lora-{family}"));
    fs::create_dir_all(&folder).unwrap();
    for (file, rows) in files {
        let tensor = |(name, shape, value): &Row| {
            let elements = shape.iter().product();
            let values = match &shape[..] {
                [] => vec![*value],
                _ => procedural(&format!("{family}.{file}.{name}"), elements, *value as i32, 0.0),
            };
            (name.clone(), shape.clone(), values)
        };
        let tensors: Vec<_> = rows.iter().map(tensor).collect();
        support::write_tensors(&folder.join(format!("{file}.safetensors")), &tensors);
    }
    folder
}

/// Every run of the family's fixture, in both modes on one engine each, gives the reference's picture.
fn check(family: &str, model: &str) {
    let pipeline = format!("{family}_lora_pipeline");
    let config = Fixture::open(&format!("{pipeline}.safetensors")).metadata("config");
    let files: BTreeMap<String, Vec<Row>> = serde_json::from_value(config["files"].clone()).unwrap();
    let runs: BTreeMap<String, Vec<(String, f32)>> = serde_json::from_value(config["runs"].clone()).unwrap();
    assert_eq!((files.len(), runs.len()), (2, 3));
    let folder = write(family, &files);
    let path = single_file(model, &format!("lora-{family}"), &[]);
    let open = |path: &Path| Arc::new(Checkpoint::open(path).unwrap());
    for (file, rows) in &files {
        let model: Arc<dyn WeightSource> = open(&path);
        let lora = Lora::fit(open(&folder.join(format!("{file}.safetensors"))), &model).unwrap();
        let report = lora.report();
        let layers = rows.iter().filter(|r| r.0.ends_with(".weight")).count() / 2;
        assert!(report.unused.is_empty() && report.unfit.is_empty(), "{report}");
        assert_eq!((report.applied.values().sum::<usize>(), report.layers), (layers, layers), "{report}");
    }
    for mode in [LoraMode::Immediately, LoraMode::AtRuntime] {
        let builder = Engine::builder().model(&path).device("cpu").threads(1).lora_folder(&folder).lora_mode(mode);
        let mut engine = builder.weight_type(DType::F32).precision(Precision::F32).build().unwrap();
        for (key, loras) in &runs {
            let choice = |(name, strength): &(String, f32)| LoraChoice {
                name: name.clone(),
                strength: *strength,
                ..LoraChoice::default()
            };
            let request = ImageRequest {
                loras: loras.iter().map(choice).collect(),
                sampler: Some(SamplerKind::Euler),
                guidance: config["guidance"].as_f64().map(|g| g as f32),
                ..oracle_request(&format!("{pipeline}.safetensors"))
            };
            agrees(&mut engine, &pipeline, key, &request);
        }
    }
}

/// Layers of the refiner's network, of both networks, and of the text encoder that both read, with the tensors they change.
const REFINER: [(&str, [usize; 2], &[&str]); 3] = [
    (
        "lora_unet_output_blocks_8_1_transformer_blocks_3_ff_net_2",
        [64, 256],
        &["model.diffusion_model.output_blocks.8.1.transformer_blocks.3.ff.net.2.weight"],
    ),
    (
        "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q",
        [64, 64],
        &["model.diffusion_model.input_blocks.4.1.transformer_blocks.0.attn1.to_q.weight"],
    ),
    (
        "lora_te2_text_model_encoder_layers_0_mlp_fc1",
        [512, 128],
        &[
            "conditioner.embedders.0.model.transformer.resblocks.0.mlp.c_fc.weight",
            "conditioner.embedders.1.model.transformer.resblocks.0.mlp.c_fc.weight",
        ],
    ),
];

/// `up` and `down` of a layer, of rank 1.
fn factors(layer: &str, [n, k]: [usize; 2]) -> [Vec<f32>; 2] {
    [procedural(&format!("{layer}.up"), n, -8, 0.0), procedural(&format!("{layer}.down"), k, -13, 0.0)]
}

/// A model and its refiner take the layers that each has, as if the file were merged into both checkpoints.
#[test]
fn a_refiner_takes_the_layers_that_it_has() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("lora-refiner");
    let mut files: BTreeMap<&str, Vec<Tensor>> = BTreeMap::new();
    for (i, (layer, [n, k], _)) in REFINER.into_iter().enumerate() {
        let [up, down] = factors(layer, [n, k]);
        let rows = [
            (format!("{layer}.lora_up.weight"), vec![n, 1], up),
            (format!("{layer}.lora_down.weight"), vec![1, k], down),
        ];
        files.entry("all").or_default().extend(rows.clone());
        if i == 0 {
            files.entry("alone").or_default().extend(rows);
        }
    }
    fs::create_dir_all(&folder).unwrap();
    for (file, rows) in &files {
        support::write_tensors(&folder.join(format!("{file}.safetensors")), rows);
    }
    let models = |name: &str, layers: usize| {
        ["sdxl_pipeline", "sdxl_refiner_pipeline"].map(|pipeline| {
            edited(pipeline, &format!("lora-{name}-{pipeline}"), |name, values| {
                for (layer, dims, _) in REFINER.iter().take(layers).filter(|(.., names)| names.contains(&name)) {
                    let [up, down] = factors(layer, *dims);
                    values
                        .iter_mut()
                        .enumerate()
                        .for_each(|(i, v)| *v += 0.5 * up[i / dims[1]] * down[i % dims[1]]);
                }
            })
        })
    };
    let start = |[model, refiner]: &[PathBuf; 2]| {
        let builder = Engine::builder().model(model).refiner(refiner).device("cpu").threads(1).lora_folder(&folder);
        builder.weight_type(DType::F32).precision(Precision::F32)
    };
    let request = |prompt: &str| {
        let base = oracle_request("sdxl_refiner_pipeline.safetensors");
        let prompt = format!("{}{prompt}", base.prompt);
        ImageRequest {
            prompt,
            sampler: Some(SamplerKind::Euler),
            refiner_switch: Some(0.5),
            steps: Some(4),
            ..base
        }
    };
    let draw = |engine: &mut Engine, prompt: &str| {
        let mut log = Log::default();
        generate(engine, &request(prompt), &mut log).unwrap();
        assert!(log.warnings.is_empty(), "{:?}", log.warnings);
        log.latents.concat()
    };
    let plain = models("plain", 0);
    let mut engine = start(&plain).build().unwrap();
    let without = draw(&mut engine, "");
    for (file, layers) in [("all", 3), ("alone", 1)] {
        let want = draw(&mut start(&models(file, layers)).build().unwrap(), "");
        assert!(relative(&without, &want) > 1e-3, "{file}: {:.1e}", relative(&without, &want));
        for mode in [LoraMode::Immediately, LoraMode::AtRuntime] {
            let mut engine = start(&plain).lora_mode(mode).build().unwrap();
            let off = relative(&draw(&mut engine, &format!("<lora:{file}:0.5>")), &want);
            assert!(off < 1e-4, "{file} {mode}: {off:.1e}");
            assert!(draw(&mut engine, "") == without, "{file} {mode}: something stayed");
        }
    }
    // Where the refiner is left out, a file that is for it alone changes nothing.
    let left_out = ImageRequest { refiner_switch: Some(1.0), ..request("<lora:alone:1>") };
    let e = generate(&mut engine, &left_out, &mut Log::default()).unwrap_err().to_string();
    assert!(e.contains("changes nothing of this model"), "{e}");
}

#[test]
fn sdxl_with_both_text_encoders() {
    check("sdxl", "sdxl_pipeline");
}

#[test]
fn flux_with_joined_and_single_projections() {
    check("flux", "flux_dev_pipeline");
}

#[test]
fn sd3_with_joined_and_single_projections() {
    check("sd3", "sd3_medium_pipeline");
}
