//! The tiny autoencoder in place of the model's, and previews.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod support;

use sd_runtime::{Engine, EngineBuilder, ImageRequest, InputImage, Observer, Preview, PreviewMode, PreviewPicture};
use std::path::PathBuf;
use support::{Log, generate, layouts, sd1};

fn builder(name: &str) -> (EngineBuilder, PathBuf) {
    let model = sd1::write(name, |_, _| {});
    let tiny = layouts::by_rule("tiny_vae_decoder", &format!("{name}-tiny"));
    (Engine::builder().model(&model).device("cpu").threads(1), tiny)
}

fn request(mode: PreviewMode, noisy: bool) -> ImageRequest {
    ImageRequest {
        width: Some(64),
        height: Some(64),
        steps: Some(3),
        preview: Some(Preview { mode, interval: 1, noisy }),
        ..ImageRequest::default()
    }
}

#[derive(Default)]
struct Shown(Vec<(usize, InputImage)>);

impl Observer for Shown {
    fn preview(&mut self, p: PreviewPicture<'_>) {
        self.0.push((p.step, InputImage { width: p.width, height: p.height, rgb: p.rgb.to_vec() }));
    }
}

/// The previews of a request, and its picture.
fn shown(engine: &mut Engine, r: &ImageRequest) -> (Vec<(usize, InputImage)>, Vec<u8>) {
    let mut shown = Shown::default();
    let image = engine.generate(r, &mut shown, &Default::default()).unwrap().remove(0);
    (shown.0, image.rgb)
}

/// What is left after the last step is what is decoded.
#[test]
fn the_last_noisy_preview_is_the_picture() {
    let (builder, tiny) = builder("previews.safetensors");
    let mut engine = builder.clone().build().unwrap();
    let (previews, plain) = shown(&mut engine, &request(PreviewMode::Vae, true));
    assert_eq!(previews.iter().map(|p| p.0).collect::<Vec<_>>(), [1, 2, 3]);
    assert!(previews[2].1.rgb == plain && previews[0].1.rgb != plain);
    let (previews, picture) = shown(&mut engine, &request(PreviewMode::Proj, false));
    assert_eq!((previews[1].1.width, previews[1].1.height), (8, 8));
    assert!(picture == plain, "looking changes nothing");

    let mut engine = builder.clone().taesd(&tiny).build().unwrap();
    let (previews, small) = shown(&mut engine, &request(PreviewMode::Tae, true));
    assert!(previews[2].1.rgb == small && small != plain);
    let mut engine = builder.taesd(&tiny).taesd_preview_only(true).build().unwrap();
    let (previews, full) = shown(&mut engine, &request(PreviewMode::Tae, true));
    assert!(previews[2].1.rgb == small && full == plain);
}

#[test]
fn a_tiny_encoder_reads_pictures() {
    let (builder, _) = builder("previews-encode.safetensors");
    let tiny = layouts::by_rule("tiny_vae_encoder", "previews-encoder");
    let rgb = (0..64 * 64 * 3).map(|i| (i % 200) as u8).collect();
    let init_image = Some(InputImage { width: 64, height: 64, rgb });
    let r = ImageRequest { init_image, strength: Some(0.0), ..request(PreviewMode::Proj, false) };
    let full = generate(&mut builder.clone().build().unwrap(), &r, &mut Log::default()).unwrap().remove(0);
    let small = generate(&mut builder.taesd(&tiny).build().unwrap(), &r, &mut Log::default()).unwrap().remove(0);
    assert!(full.rgb != small.rgb);
    let e = Engine::builder().model(sd1::write("previews-tae.safetensors", |_, _| {})).device("cpu").taesd(&tiny);
    let e = generate(&mut e.build().unwrap(), &request(PreviewMode::Tae, false), &mut Log::default()).unwrap_err();
    assert!(e.is_request() && e.to_string().starts_with("preview: there is no tiny autoencoder"), "{e}");
}

#[test]
fn what_is_no_tiny_autoencoder_is_refused() {
    let (builder, _) = builder("previews-refused.safetensors");
    let upscaler = layouts::doubler("previews-other");
    let e = builder.taesd(&upscaler).build().unwrap_err().to_string();
    assert!(e.contains("previews-other.safetensors") && e.contains("tiny autoencoder"), "{e}");
}
