//! The engine on the oracle's tiny SD 2.x and SDXL, in the layouts that they are published in.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod support;

use std::path::Path;

use sd_runtime::{DType, Engine, EngineBuilder, ImageRequest, Prediction, SamplerKind, SchedulerKind};
use support::layouts::{apart, folder, single_file};
use support::{Log, generate, oracle_request};

const SD2: &str = "sd2_pipeline";
const SDXL: &str = "sdxl_pipeline";

fn builder() -> EngineBuilder {
    Engine::builder().device("cpu").threads(1).weight_type(DType::F32)
}

fn open(path: &Path) -> EngineBuilder {
    builder().model(path)
}

/// Compares with the run `key` of a pipeline's fixture, such as `eps.euler.discrete`.
fn agrees(builder: EngineBuilder, pipeline: &str, key: &str, request: ImageRequest) {
    let mut parts = key.split('.').skip(1);
    let sampler: SamplerKind = parts.next().unwrap().parse().unwrap();
    let scheduler: SchedulerKind = parts.next().unwrap().parse().unwrap();
    let request = ImageRequest { sampler: Some(sampler), scheduler: Some(scheduler), ..request };
    support::agrees(&mut builder.build().unwrap(), pipeline, key, &request);
}

fn request(pipeline: &str) -> ImageRequest {
    oracle_request(&format!("{pipeline}.safetensors"))
}

#[test]
fn sd2_gives_the_references_pictures() {
    let path = single_file(SD2, "families-sd2", &[]);
    for (prediction, key) in [(Prediction::V, "v.euler.discrete"), (Prediction::Eps, "eps.euler.discrete")] {
        agrees(open(&path).prediction(prediction), SD2, key, request(SD2));
    }
    let engine = open(&path).prediction(Prediction::V).build().unwrap();
    let info = engine.info();
    assert_eq!((info.family, info.defaults.width, info.defaults.clip_skip), ("SD 2.x", 768, 2));
    assert_eq!(info.unused, Vec::<String>::new());
}

#[test]
fn a_folder_says_what_its_network_predicts() {
    for (prediction, key) in [("v_prediction", "v.euler.discrete"), ("epsilon", "eps.euler.discrete")] {
        let scheduler = format!("{{\"prediction_type\": \"{prediction}\"}}");
        let path = folder(SD2, &format!("families-sd2-{prediction}"), &scheduler);
        agrees(open(&path), SD2, key, request(SD2));
    }
}

#[test]
fn sdxl_gives_the_references_pictures() {
    let path = single_file(SDXL, "families-sdxl", &[]);
    agrees(open(&path), SDXL, "eps.euler.discrete", request(SDXL));
    agrees(open(&path), SDXL, "eps.dpm++2m.karras", request(SDXL));
    let empty = ImageRequest { negative_prompt: String::new(), ..request(SDXL) };
    agrees(open(&path), SDXL, "empty_negative.euler.discrete", empty);
    let without = ImageRequest { cfg_scale: Some(1.0), ..request(SDXL) };
    agrees(open(&path), SDXL, "cfg1.euler.discrete", without);
    let engine = open(&path).build().unwrap();
    let info = engine.info();
    assert_eq!((info.family, info.defaults.width, info.defaults.clip_skip), ("SDXL", 1024, 2));
    assert_eq!(info.unused, Vec::<String>::new());
}

#[test]
fn markers_say_what_sdxl_predicts() {
    let path = single_file(SDXL, "families-sdxl-v", &[("v_pred", 0.0)]);
    agrees(open(&path), SDXL, "v.euler.discrete", request(SDXL));
    let levels = [("edm_vpred.sigma_max", 120.0), ("edm_vpred.sigma_min", 0.002)];
    let path = single_file(SDXL, "families-sdxl-edm", &levels);
    agrees(open(&path), SDXL, "edm_v.euler.exponential", request(SDXL));
    assert_eq!(open(&path).build().unwrap().info().defaults.scheduler, SchedulerKind::Exponential);
}

#[test]
fn sdxl_runs_from_a_folder_and_from_files_of_its_parts() {
    let path = folder(SDXL, "families-sdxl-folder", "{}");
    agrees(open(&path), SDXL, "eps.euler.discrete", request(SDXL));
    let prefixes = [
        "model.diffusion_model.",
        "first_stage_model.",
        "conditioner.embedders.0.transformer.",
        "conditioner.embedders.1.model.",
    ];
    let [network, vae, clip_l, clip_g] = apart(SDXL, "families-sdxl", &prefixes).try_into().unwrap();
    let parts = builder().diffusion_model(&network).vae(&vae).clip_l(&clip_l);
    let e = parts.clone().build().unwrap_err().to_string();
    assert!(e.contains("holds no second CLIP text encoder") && e.contains("--clip_g"), "{e}");
    agrees(parts.clip_g(&clip_g), SDXL, "eps.euler.discrete", request(SDXL));
}

/// Without a marker the network itself is asked; the answer is settled before the request is filled up.
#[test]
fn a_try_tells_what_sd2_predicts() {
    let path = single_file(SD2, "families-sd2-try", &[]);
    let mut engine = open(&path).build().unwrap();
    let image = generate(&mut engine, &request(SD2), &mut Log::default()).unwrap();
    let of = |p: Prediction| {
        let mut engine = open(&path).prediction(p).build().unwrap();
        (generate(&mut engine, &request(SD2), &mut Log::default()).unwrap(), engine.info().defaults)
    };
    // Uniform noise for weights answers with neither, so the rule says noise.
    assert_eq!((image, engine.info().defaults), of(Prediction::Eps));
}
