//! The engine on the oracle's tiny Flux.1 models (`oracle/flux_pipeline.py`), in the layouts that they are published in.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod support;

use sd_runtime::{
    DType, Engine, EngineBuilder, ImageRequest, InputImage, InputMask, RngKind, SamplerKind, SchedulerKind,
};
use support::layouts::{apart, folder, single_file};
use support::{Fixture, Log, agrees, generate};

const DEV: &str = "flux_dev_pipeline";
const SCHNELL: &str = "flux_schnell_pipeline";
const FILL: &str = "flux_fill_pipeline";
const GUIDED: &str = "flux_guided_pipeline";
const CONTROL: &str = "flux_control_pipeline";

fn builder() -> EngineBuilder {
    Engine::builder().device("cpu").threads(1).weight_type(DType::F32)
}

/// The request of the run `key`.
fn request(pipeline: &str, key: &str) -> ImageRequest {
    let config = Fixture::open(&format!("{pipeline}.safetensors")).metadata("config");
    let number = |v: &serde_json::Value| Some(u32::try_from(v.as_u64().unwrap()).unwrap());
    ImageRequest {
        prompt: config["prompt"].as_str().unwrap().to_owned(),
        width: number(&config["width"]),
        height: number(&config["height"]),
        steps: number(&config[key]["steps"]),
        guidance: config[key]["guidance"].as_f64().map(|g| g as f32),
        seed: config["seed"].as_i64(),
        rng: Some(RngKind::Cpu),
        ..Default::default()
    }
}

fn picture(pipeline: &str, key: &str) -> InputImage {
    let fixture = Fixture::open(&format!("{pipeline}.safetensors"));
    InputImage { width: 64, height: 96, rgb: fixture.u8s(&format!("input.{key}.picture")).to_vec() }
}

#[test]
fn dev_gives_the_references_pictures() {
    let path = single_file(DEV, "flux-dev", &[]);
    let mut engine = builder().model(&path).build().unwrap();
    agrees(&mut engine, DEV, "dev", &request(DEV, "dev"));
    let d = engine.info().defaults;
    assert_eq!((engine.info().family, d.steps, d.cfg_scale, d.guidance), ("FLUX.1 dev", 28, 1.0, Some(3.5)));
    assert_eq!((d.sampler, d.scheduler), (SamplerKind::Euler, SchedulerKind::Flux));
    assert_eq!(engine.info().unused, Vec::<String>::new());
}

#[test]
fn a_reference_picture_is_looked_at() {
    let mut engine = builder().model(folder(DEV, "flux-kontext", "{}")).build().unwrap();
    let with = |ref_images| ImageRequest { ref_images, ..request(DEV, "kontext") };
    agrees(&mut engine, DEV, "kontext", &with(vec![picture(DEV, "kontext")]));
    // A larger one has the pixels of the result, and its own aspect.
    let large = InputImage { width: 128, height: 192, rgb: [40, 120, 200].repeat(128 * 192) };
    let mut log = Log::default();
    let image = generate(&mut engine, &with(vec![large.clone()]), &mut log).unwrap().remove(0);
    let same = InputImage { width: 64, height: 96, rgb: [40, 120, 200].repeat(64 * 96) };
    assert_eq!(generate(&mut engine, &with(vec![same]), &mut log).unwrap().remove(0).rgb, image.rgb);
    let own_size = ImageRequest { ref_resize: Some(false), ..with(vec![large]) };
    assert_ne!(generate(&mut engine, &own_size, &mut log).unwrap().remove(0).rgb, image.rgb);
}

/// Guidance by text and by the reference, `oracle/flux_guided.py`; what cancels out is not evaluated.
#[test]
fn references_guide_as_in_instruct_pix2pix() {
    let mut engine = builder().model(folder(DEV, "flux-guided", "{}")).build().unwrap();
    let config = Fixture::open(&format!("{GUIDED}.safetensors")).metadata("config");
    let mut pictures = Vec::new();
    for key in ["three_way", "two_way", "equal"] {
        let scale = |name: &str| config[key][name].as_f64().map(|scale| scale as f32);
        let guided = ImageRequest {
            negative_prompt: config["negative_prompt"].as_str().unwrap().to_owned(),
            ref_images: vec![picture(GUIDED, "kontext")],
            cfg_scale: scale("cfg"),
            image_cfg_scale: scale("image_cfg"),
            ..request(GUIDED, key)
        };
        agrees(&mut engine, GUIDED, key, &guided);
        pictures.push(generate(&mut engine, &guided, &mut Log::default()).unwrap().remove(0).rgb);
    }
    assert!(pictures[0] != pictures[1] && pictures[1] != pictures[2]);
}

#[test]
fn schnell_gives_the_references_pictures_from_files_of_its_parts() {
    let prefixes =
        ["model.diffusion_model.", "vae.", "text_encoders.clip_l.transformer.", "text_encoders.t5xxl.transformer."];
    let [network, vae, clip_l, t5xxl] = apart(SCHNELL, "flux-schnell", &prefixes).try_into().unwrap();
    let parts = builder().diffusion_model(&network).vae(&vae).clip_l(&clip_l);
    let e = parts.clone().build().unwrap_err().to_string();
    assert!(e.contains("--t5xxl"), "{e}");
    let mut engine = parts.t5xxl(&t5xxl).build().unwrap();
    agrees(&mut engine, SCHNELL, "schnell", &request(SCHNELL, "schnell"));
    // It reads no guidance and says so.
    let guided = ImageRequest { guidance: Some(3.5), ..request(SCHNELL, "schnell") };
    let mut log = Log::default();
    generate(&mut engine, &guided, &mut log).unwrap();
    assert!(log.warnings.len() == 1 && log.warnings[0].starts_with("guidance: "), "{:?}", log.warnings);
}

#[test]
fn fill_paints_what_the_mask_says() {
    let path = single_file(FILL, "flux-fill", &[]);
    let mut engine = builder().model(&path).build().unwrap();
    let fixture = Fixture::open(&format!("{FILL}.safetensors"));
    let mask: Vec<u8> = fixture.u8s("input.fill.mask").iter().map(|m| m * 255).collect();
    let original = picture(FILL, "fill");
    let request = ImageRequest {
        init_image: Some(original.clone()),
        mask: Some(InputMask { width: 64, height: 96, values: mask.clone() }),
        ..request(FILL, "fill")
    };
    // The reference pastes nothing back.
    let want = fixture.u8s("output.fill.image_u8").chunks(3).zip(original.rgb.chunks(3)).zip(&mask);
    let want: Vec<u8> = want.flat_map(|((new, old), m)| if *m > 0 { new } else { old }).copied().collect();
    support::agrees_with(&mut engine, FILL, "fill", &request, &want);
}

#[test]
fn control_follows_its_picture() {
    let path = single_file(CONTROL, "flux-control", &[]);
    let mut engine = builder().model(&path).build().unwrap();
    let control_image = Some(picture(CONTROL, "control"));
    agrees(&mut engine, CONTROL, "control", &ImageRequest { control_image, ..request(CONTROL, "control") });
    assert_eq!(engine.info().family, "FLUX.1 Depth/Canny");
    let e = generate(&mut engine, &request(CONTROL, "control"), &mut Log::default()).unwrap_err().to_string();
    assert!(e.starts_with("control_image: "), "{e}");
}
