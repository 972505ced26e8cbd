//! The engine on the oracle's tiny Stable Diffusion 3 and 3.5 (`oracle/sd3_pipeline.py`), in the layouts that they are
//! published in.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod support;

use sd_runtime::{
    DType, Engine, EngineBuilder, ImageRequest, RngKind, SamplerKind, ScheduleInput, SchedulerKind, SigmaTable,
    SkipLayers,
};
use support::layouts::{apart, folder, single_file};
use support::{Fixture, agrees, json};

const MEDIUM: &str = "sd3_medium_pipeline";
const NO_T5: &str = "sd3_no_t5_pipeline";

fn builder() -> EngineBuilder {
    Engine::builder().device("cpu").threads(1).weight_type(DType::F32)
}

/// The request of the run `key`.
fn request(pipeline: &str, key: &str) -> ImageRequest {
    let config = Fixture::open(&format!("{pipeline}.safetensors")).metadata("config");
    let number = |v: &serde_json::Value| Some(u32::try_from(v.as_u64().unwrap()).unwrap());
    let text = |v: &serde_json::Value| v.as_str().unwrap().to_owned();
    let float = |v: &serde_json::Value| v.as_f64().unwrap() as f32;
    let run = &config[key];
    let skip = &run["skip"];
    ImageRequest {
        prompt: text(&config["prompt"]),
        negative_prompt: text(&run["negative_prompt"]),
        width: number(&config["width"]),
        height: number(&config["height"]),
        steps: number(&config["steps"]),
        cfg_scale: Some(float(&run["cfg"])),
        slg: skip.is_object().then(|| SkipLayers {
            scale: float(&skip["scale"]),
            layers: serde_json::from_value(skip["layers"].clone()).unwrap(),
            start: skip["start"].as_f64().unwrap(),
            end: skip["stop"].as_f64().unwrap(),
        }),
        seed: config["seed"].as_i64(),
        rng: Some(RngKind::Cpu),
        ..Default::default()
    }
}

#[test]
fn medium_gives_the_references_pictures() {
    let path = single_file(MEDIUM, "sd35-medium", &[]);
    let mut engine = builder().model(&path).build().unwrap();
    agrees(&mut engine, MEDIUM, "plain", &request(MEDIUM, "plain"));
    let info = engine.info();
    let d = info.defaults;
    assert_eq!((info.family, d.steps, d.cfg_scale, d.clip_skip), ("SD 3.5 medium", 40, 4.5, 2));
    assert_eq!((d.sampler, d.scheduler, d.width), (SamplerKind::Euler, SchedulerKind::Discrete, 1024));
    assert_eq!(info.unused, Vec::<String>::new());
}

#[test]
fn blocks_are_left_out_where_guidance_says() {
    let mut engine = builder().model(folder(MEDIUM, "sd35-medium-folder", "{}")).build().unwrap();
    agrees(&mut engine, MEDIUM, "slg", &request(MEDIUM, "slg"));
}

#[test]
fn without_t5_its_tokens_are_zeros() {
    let prefixes = [
        "model.diffusion_model.",
        "first_stage_model.",
        "text_encoders.clip_l.transformer.",
        "text_encoders.clip_g.transformer.",
    ];
    let [network, vae, clip_l, clip_g] = apart(NO_T5, "sd3", &prefixes).try_into().unwrap();
    let parts = builder().diffusion_model(&network).vae(&vae);
    let e = parts.clone().build().unwrap_err().to_string();
    assert!(e.contains("--clip_l"), "{e}");
    let mut engine = parts.clip_l(&clip_l).clip_g(&clip_g).build().unwrap();
    for key in ["plain", "cfg1"] {
        agrees(&mut engine, NO_T5, key, &request(NO_T5, key));
    }
    let d = engine.info().defaults;
    assert_eq!((engine.info().family, d.steps, d.cfg_scale), ("SD 3", 28, 7.0));
}

#[test]
fn the_default_schedule_is_that_of_the_pipeline() {
    let table = SigmaTable::flow(3.0, 1000.0);
    let rows = json("schedules_sd3.json")["rows"].as_array().unwrap().clone();
    for row in &rows {
        let numbers: fn(&serde_json::Value) -> Vec<f64> = |v| serde_json::from_value(v.clone()).unwrap();
        let (sigmas, timesteps) = (numbers(&row["sigmas"]), numbers(&row["timesteps"]));
        let got = SchedulerKind::Discrete.sigmas(&ScheduleInput::new(&table, timesteps.len())).unwrap();
        assert_eq!(got.len(), sigmas.len());
        for (i, (got, want)) in got.iter().zip(&sigmas).enumerate() {
            assert!((got - want).abs() < 3e-7, "{} steps: {got} at {i}, want {want}", timesteps.len());
        }
        for (got, want) in got.iter().zip(&timesteps) {
            assert!((table.timestep(*got) - want).abs() < 3e-4, "{got}: want {want}");
        }
    }
    assert_eq!(rows.len(), 6);
}
