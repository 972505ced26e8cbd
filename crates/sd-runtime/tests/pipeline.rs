//! The engine on the oracle's tiny SD 1.x (`oracle/sd1_pipeline.py`): pictures, determinism, failures.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod support;

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use sd_runtime::{
    CancelToken, Cuts, DType, Engine, EngineBuilder, ImageRequest, Precision, SamplerKind, SchedulerKind, Stage,
};
use support::{Fixture, Log, generate, one, psnr, relative, remote_device, sd1};

fn checkpoint() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| sd1::write("pipeline-sd1.safetensors", |_, _| {}))
}

fn builder() -> EngineBuilder {
    // Tests run side by side, and threads that wait for each other are slow on a busy machine.
    Engine::builder().model(checkpoint()).device("cpu").threads(1)
}

fn oracle_request() -> ImageRequest {
    support::oracle_request("sd1_pipeline.safetensors")
}

/// A short request for tests that compare runs with each other.
fn short() -> ImageRequest {
    ImageRequest {
        prompt: "a (red:1.3) circle".into(),
        steps: Some(2),
        sampler: Some(SamplerKind::EulerA),
        ..oracle_request()
    }
}

/// Against the reference in f64: relative error of each latent, and peak signal-to-noise ratio of the picture in dB.
fn agrees_with_the_oracle(device: &str, (weights, precision, latent, picture): Case) {
    let fixture = Fixture::open("sd1_pipeline.safetensors");
    let mut engine = builder().device(device).weight_type(weights).precision(precision).build().unwrap();
    for (sampler, scheduler) in
        [(SamplerKind::Euler, SchedulerKind::Discrete), (SamplerKind::DpmPp2m, SchedulerKind::Karras)]
    {
        let request = ImageRequest { sampler: Some(sampler), scheduler: Some(scheduler), ..oracle_request() };
        let mut log = Log::default();
        let image = generate(&mut engine, &request, &mut log).unwrap().remove(0);
        let want = fixture.f32s(&format!("output.{sampler}.{scheduler}.latents"));
        let size = want.len() / log.latents.len();
        for (step, (got, want)) in log.latents.iter().zip(want.chunks(size)).enumerate() {
            let off = relative(got, want);
            assert!(off <= latent, "{sampler} step {step}: {weights} latent is off by {off:.2e}");
        }
        let db = psnr(&image.rgb, fixture.u8s(&format!("output.{sampler}.{scheduler}.image_u8")));
        assert!(db >= picture, "{sampler}: the picture with {weights} weights has {db:.1} dB");
        assert!(log.warnings.is_empty(), "{:?}", log.warnings);
    }
}

/// The tiny model's weights are uniform noise, so what quantising loses is large; guidance of 7 multiplies it.
const TOLERANCES: [Case; 4] = [
    (DType::F32, Precision::Auto, 1e-5, 70.0),
    (DType::F16, Precision::F32, 1e-2, 50.0),
    (DType::F16, Precision::Auto, 8e-2, 32.0),
    (DType::Q8_0, Precision::Auto, 1e-1, 30.0),
];

type Case = (DType, Precision, f64, f64);

#[test]
fn pictures_are_the_references() {
    for case in TOLERANCES {
        agrees_with_the_oracle("cpu", case);
    }
}

#[test]
fn pictures_of_a_remote_device_are_the_references() {
    for case in TOLERANCES {
        agrees_with_the_oracle(remote_device(), case);
    }
}

#[test]
fn the_same_request_gives_the_same_bytes() {
    let mut engine = builder().build().unwrap();
    let first = generate(&mut engine, &short(), &mut Log::default()).unwrap().remove(0);
    // Another request between leaves nothing behind.
    let other = ImageRequest { prompt: "else".into(), width: Some(128), cfg_scale: Some(1.0), ..short() };
    let other = generate(&mut engine, &other, &mut Log::default()).unwrap().remove(0);
    assert_eq!((other.width, other.height), (128, 64));
    assert_eq!(generate(&mut engine, &short(), &mut Log::default()).unwrap(), std::slice::from_ref(&first));
    assert_eq!(one(builder().threads(2), &short()), first, "two threads");
    assert_eq!(one(builder().cuts(Cuts::All), &short()), first, "every cut taken");
}

#[test]
fn an_image_of_a_batch_is_the_image_alone() {
    let mut engine = builder().build().unwrap();
    let request = ImageRequest { batch_count: Some(3), ..short() };
    let batch = generate(&mut engine, &request, &mut Log::default()).unwrap();
    for (i, image) in (0..).zip(&batch) {
        let alone = ImageRequest { seed: Some(42 + i), ..short() };
        assert_eq!(&one(builder(), &alone), image);
    }
}

#[test]
fn a_prompt_of_another_length_than_the_negative_prompt() {
    let long = ImageRequest { prompt: "red ".repeat(80), ..short() };
    let broken = ImageRequest { prompt: format!("{}BREAK {}", "red ".repeat(75), "red ".repeat(5)), ..short() };
    // A window holds 75 tokens, so both prompts have the same two windows.
    assert_eq!(one(builder(), &long).rgb, one(builder(), &broken).rgb);
}

#[test]
fn a_damaged_weight_is_named_with_its_stage() {
    for (stage, tensor) in [
        ("text encoding", "cond_stage_model.transformer.text_model.final_layer_norm.weight"),
        ("denoising", "model.diffusion_model.out.0.bias"),
        ("decoding", "first_stage_model.decoder.norm_out.weight"),
    ] {
        let file = format!("pipeline-damaged-{}.safetensors", stage.replace(' ', "-"));
        let path = sd1::write(&file, |name, values| {
            if name == tensor {
                values[3] = f32::NAN;
            }
        });
        let mut engine = Engine::builder().model(&path).device("cpu").threads(1).build().unwrap();
        let mut log = Log::default();
        let e = generate(&mut engine, &short(), &mut log).unwrap_err().to_string();
        assert!(e.starts_with(stage) && e.contains(tensor) && e.contains(&file), "{e}");
        assert_eq!(log.warnings.len(), usize::from(stage == "decoding"), "{:?}", log.warnings);
    }
}

/// The cumulative products for betas from `first` to `last`, evenly spaced in their `1 / power`th root.
fn alphas(first: f64, last: f64, power: i32) -> Vec<f32> {
    let root = |beta: f64| beta.powf(1.0 / f64::from(power));
    let beta = |i: usize| (root(first) + (root(last) - root(first)) * i as f64 / 999.0).powi(power);
    (0..1000)
        .scan(1.0, |product, i| {
            *product *= 1.0 - beta(i);
            Some(*product as f32)
        })
        .collect()
}

#[test]
fn a_stored_noise_table_is_used() {
    let last = |builder: EngineBuilder| {
        let mut log = Log::default();
        generate(&mut builder.build().unwrap(), &short(), &mut log).unwrap();
        log.latents.pop().unwrap()
    };
    let with = |name: &str, alphas: Vec<f32>| {
        let path = sd1::write_with(name, &[("alphas_cumprod", alphas)], |_, _| {});
        last(Engine::builder().model(&path).device("cpu").threads(1))
    };
    let own = last(builder());
    // Stable Diffusion's own table, rounded to f32, and the linear one of DDPM (Ho et al. 2020), whose noise reaches
    // a level of 157 rather than 15.
    assert!(relative(&with("pipeline-table.safetensors", alphas(0.00085, 0.012, 2)), &own) < 1e-3);
    assert!(relative(&with("pipeline-ddpm.safetensors", alphas(1e-4, 0.02, 1)), &own) > 2.0);
}

/// Activations beyond the range of f16 break the product with an f16 kernel, and only that. No norm lies between this
/// layer's bias and the next convolution. The processor's own kernels multiply in f32; ggml's, which the remote device
/// uses, round activations.
#[test]
fn an_autoencoder_that_overflows_is_run_again_in_f32() {
    let path = sd1::write("pipeline-overflow.safetensors", |name, values| {
        if name == "first_stage_model.decoder.mid.block_1.norm2.bias" {
            values[0] = 2e5;
        }
    });
    let mut log = Log::default();
    let engine = |dtype| Engine::builder().model(&path).device(remote_device()).threads(1).weight_type(dtype);
    let image = generate(&mut engine(DType::F16).build().unwrap(), &short(), &mut log).unwrap().remove(0);
    assert!(log.warnings.len() == 1 && log.warnings[0].contains("f32"), "{:?}", log.warnings);
    let want = one(engine(DType::F32), &short());
    assert!(psnr(&image.rgb, &want.rgb) > 30.0);
    assert_ne!(image.rgb.iter().min(), image.rgb.iter().max());
}

#[test]
fn cancelling_stops_at_every_stage_and_leaves_the_engine_usable() {
    let mut engine = builder().build().unwrap();
    let want = generate(&mut engine, &short(), &mut Log::default()).unwrap();
    for (stage, step) in [(Stage::TextEncode, 0), (Stage::Denoise, 0), (Stage::Denoise, 1), (Stage::Decode, 0)] {
        let mut log = Log { cancel: Some((stage, step, CancelToken::new())), ..Default::default() };
        let e = generate(&mut engine, &short(), &mut log).unwrap_err();
        assert!(e.is_cancelled(), "{stage:?} {step}: {e}");
    }
    assert_eq!(generate(&mut engine, &short(), &mut Log::default()).unwrap(), want);
}

#[test]
fn what_cannot_be_loaded_says_why() {
    let e = |b: EngineBuilder| b.build().unwrap_err().to_string();
    assert!(e(Engine::builder()).contains("model"));
    assert!(e(Engine::builder().model("no/such.safetensors")).contains("no/such.safetensors"));
    let device = e(builder().device("no-such-device"));
    for dtype in [DType::I32, DType::Q8_1, DType::F8E4M3, DType::F8E4M3S, DType::IQ2_XXS, DType::IQ1_S] {
        let message = e(builder().weight_type(dtype));
        assert!(message.contains("weight_type") && message.contains(dtype.name()), "{message}");
    }
    assert!(device.contains("no-such-device"), "{device}");
    let folder = e(builder().vae(env!("CARGO_TARGET_TMPDIR")));
    assert!(folder.contains("tmp"), "{folder}");
}

#[test]
fn wrong_requests_name_the_field() {
    let mut engine = builder().build().unwrap();
    for (field, request) in [
        ("width", ImageRequest { width: Some(65), ..short() }),
        ("width, height", ImageRequest { width: Some(8192), height: Some(8192), ..short() }),
        ("steps", ImageRequest { steps: Some(0), ..short() }),
        ("clip_skip", ImageRequest { clip_skip: Some(9), ..short() }),
        ("prompt", ImageRequest { prompt: "red ".repeat(75 * 65), ..short() }),
    ] {
        let e = generate(&mut engine, &request, &mut Log::default()).unwrap_err();
        assert!(e.is_request() && e.to_string().contains(field), "{field}: {e}");
    }
}
