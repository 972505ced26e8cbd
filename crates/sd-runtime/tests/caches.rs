//! Step caches on the oracle's tiny models (`oracle/caches.py`).
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod support;

use sd_runtime::{
    CacheMode, DType, Engine, EngineBuilder, ImageRequest, RngKind, SamplerKind, SchedulerKind, StepCache,
};
use support::layouts::{apart, single_file};
use support::{Fixture, Log, agrees, generate, oracle_request, sd1};

fn builder() -> EngineBuilder {
    Engine::builder().device("cpu").threads(1).weight_type(DType::F32)
}

/// Holds an engine to the runs of a fixture: every latent, the picture, and which steps are computed.
fn check(engine: &mut Engine, fixture: &str, request: &ImageRequest) {
    let config = Fixture::open(&format!("{fixture}.safetensors")).metadata("config");
    let steps = config["steps"].as_u64().map(|n| n as u32);
    for (key, run) in config["runs"].as_object().unwrap() {
        let mask: Option<Vec<u8>> = serde_json::from_value(run["mask"].clone()).unwrap();
        let cache = StepCache {
            option: run["option"].as_str().unwrap().into(),
            scm_mask: mask.unwrap_or_default().iter().map(|m| *m == 1).collect(),
            scm_static: run["static"].as_bool().unwrap(),
            ..StepCache::new(run["mode"].as_str().unwrap().parse().unwrap())
        };
        let request = ImageRequest { cache: Some(cache), steps, ..request.clone() };
        agrees(engine, fixture, key, &request);
        let mut log = Log::default();
        let image = generate(engine, &request, &mut log).unwrap().remove(0);
        let flags: Vec<bool> = serde_json::from_value(run["computed"].clone()).unwrap();
        assert_eq!(log.computed, Some((flags.iter().filter(|f| **f).count(), flags.len())), "{key}");
        let text = image.parameters.to_text();
        assert!(text.contains(&format!("Cache mode: {}, Cache option: ", run["mode"].as_str().unwrap())), "{text}");
    }
}

fn flux() -> (Engine, ImageRequest) {
    let model = "flux_dev_pipeline";
    let config = Fixture::open(&format!("{model}.safetensors")).metadata("config");
    let engine = builder().model(single_file(model, "caches-flux", &[])).build().unwrap();
    let request = ImageRequest {
        prompt: config["prompt"].as_str().unwrap().into(),
        width: Some(64),
        height: Some(96),
        guidance: Some(3.5),
        seed: Some(42),
        rng: Some(RngKind::Cpu),
        ..Default::default()
    };
    (engine, request)
}

#[test]
fn blocks_of_flux_are_left_out_as_in_the_reference() {
    let (mut engine, request) = flux();
    check(&mut engine, "flux_cache_pipeline", &request);
}

#[test]
fn blocks_of_sd3_are_left_out_as_in_the_reference() {
    let prefixes = [
        "model.diffusion_model.",
        "first_stage_model.",
        "text_encoders.clip_l.transformer.",
        "text_encoders.clip_g.transformer.",
    ];
    let [network, vae, clip_l, clip_g] = apart("sd3_no_t5_pipeline", "caches-sd3", &prefixes).try_into().unwrap();
    let parts = builder().diffusion_model(&network).vae(&vae).clip_l(&clip_l).clip_g(&clip_g);
    let config = Fixture::open("sd3_no_t5_pipeline.safetensors").metadata("config");
    let request = ImageRequest {
        prompt: config["prompt"].as_str().unwrap().into(),
        negative_prompt: config["plain"]["negative_prompt"].as_str().unwrap().into(),
        width: Some(64),
        height: Some(96),
        cfg_scale: Some(7.0),
        seed: Some(42),
        rng: Some(RngKind::Cpu),
        ..Default::default()
    };
    check(&mut parts.build().unwrap(), "sd3_cache_pipeline", &request);
}

/// A network in parts gives the same bits as the whole.
#[test]
fn a_cache_that_leaves_nothing_out_changes_nothing() {
    let (mut engine, request) = flux();
    let request = ImageRequest { steps: Some(3), ..request };
    let mut latents = |cache: Option<StepCache>| {
        let mut log = Log::default();
        generate(&mut engine, &ImageRequest { cache, ..request.clone() }, &mut log).unwrap();
        (log.latents, log.computed)
    };
    let (whole, none) = latents(None);
    assert_eq!(none, None);
    for (mode, option) in [
        (CacheMode::DbCache, "Fn=1,Bn=1,warmup=10"),
        (CacheMode::DbCache, "Fn=2,warmup=10"),
        (CacheMode::TaylorSeer, "Fn=3,warmup=10"),
        (CacheMode::EasyCache, "threshold=0"),
        (CacheMode::UCache, "threshold=0"),
        (CacheMode::Spectrum, "stop=0"),
    ] {
        let cache = StepCache { option: option.into(), ..StepCache::new(mode) };
        let (got, computed) = latents(Some(cache));
        assert_eq!(computed, Some((3, 3)), "{mode} {option}");
        assert!(got == whole, "{mode} {option}");
    }
}

#[test]
fn what_a_model_cannot_leave_out_is_said() {
    let mut engine = builder().model(sd1::write("caches.safetensors", |_, _| {})).build().unwrap();
    let plain = ImageRequest { steps: Some(4), ..oracle_request("sd1_pipeline.safetensors") };
    let with = |cache: StepCache, sampler| ImageRequest { cache: Some(cache), sampler, ..plain.clone() };
    let mut log = Log::default();
    let want = generate(&mut engine, &plain, &mut log).unwrap().remove(0).rgb;
    let got = generate(&mut engine, &with(StepCache::new(CacheMode::DbCache), None), &mut log).unwrap().remove(0);
    assert!(
        log.warnings[0].starts_with("cache_mode: dbcache leaves out blocks of transformers"),
        "{:?}",
        log.warnings
    );
    assert!(got.rgb == want && log.computed.is_none() && !got.parameters.to_text().contains("Cache mode"));

    let guided = with(StepCache::new(CacheMode::Spectrum), Some(SamplerKind::EulerCfgPp));
    generate(&mut engine, &guided, &mut log).unwrap();
    assert!(log.warnings[1].contains("which euler_cfg_pp reads"), "{:?}", log.warnings);

    let wrong = StepCache { option: "Fn=1".into(), ..StepCache::new(CacheMode::EasyCache) };
    let e = generate(&mut engine, &with(wrong, None), &mut log).unwrap_err();
    assert!(e.is_request() && e.to_string().starts_with("cache_option: easycache has no \"Fn\""), "{e}");
    let (mut engine, request) = flux();
    for (option, mask, want) in [
        ("Fn=3,Bn=1", vec![], "cache_option: Fn=3 and Bn=1 leave none of 4 blocks"),
        ("Fn=1", vec![true], "scm_mask: want 2 values, one for each step, got 1"),
    ] {
        let cache = StepCache { option: option.into(), scm_mask: mask, ..StepCache::new(CacheMode::DbCache) };
        let request = ImageRequest { cache: Some(cache), steps: Some(2), ..request.clone() };
        let mut log = Log::default();
        let e = generate(&mut engine, &request, &mut log).unwrap_err();
        assert!(e.is_request() && e.to_string().starts_with(want), "{e}");
        assert!(log.latents.is_empty(), "{option}: found too late");
    }
}

/// Steps of several evaluations compute the first of them always.
#[test]
fn samplers_that_evaluate_twice_compute_one_of_two() {
    let mut engine = builder().model(sd1::write("caches-twice.safetensors", |_, _| {})).build().unwrap();
    let cache = StepCache { option: "threshold=1e9,start=0,end=1".into(), ..StepCache::new(CacheMode::UCache) };
    let request = ImageRequest {
        steps: Some(8),
        sampler: Some(SamplerKind::Heun),
        scheduler: Some(SchedulerKind::Karras),
        cache: Some(cache),
        ..oracle_request("sd1_pipeline.safetensors")
    };
    let mut log = Log::default();
    generate(&mut engine, &request, &mut log).unwrap();
    // Eight first evaluations, and two of the seven second ones.
    assert_eq!(log.computed, Some((10, 15)));
    // Two images of a batch know nothing of each other.
    let both = ImageRequest { batch_count: Some(2), sampler: Some(SamplerKind::Euler), ..request };
    let second = ImageRequest { batch_count: Some(1), seed: both.seed.map(|s| s + 1), ..both.clone() };
    let two = generate(&mut engine, &both, &mut log).unwrap();
    let one = generate(&mut engine, &second, &mut log).unwrap();
    assert!(two[1].rgb == one[0].rgb);
}
