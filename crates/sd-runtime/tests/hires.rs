//! The second pass, masks that fade, and what is drawn around a mask alone.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod support;

use sd_runtime::{Engine, Hires, HiresUpscaler, ImageRequest, InputImage, InputMask, Observer, Progress, Stage};
use support::{Log, generate, layouts, sd1};

fn engine(name: &str) -> Engine {
    let model = sd1::write(name, |_, _| {});
    let doubler = layouts::doubler(&format!("{name}-doubler"));
    Engine::builder().model(&model).upscaler(&doubler).device("cpu").threads(1).build().unwrap()
}

fn request() -> ImageRequest {
    ImageRequest {
        prompt: "a".into(),
        width: Some(64),
        height: Some(64),
        steps: Some(4),
        ..ImageRequest::default()
    }
}

/// Steps of each run of the sampler.
#[derive(Default)]
struct Runs(Vec<usize>);

impl Observer for Runs {
    fn progress(&mut self, p: Progress) {
        if p.stage == Stage::Denoise && p.step == 0 {
            self.0.push(p.total);
        }
    }
}

#[test]
fn every_upscaler_gives_the_size_and_the_steps() {
    let mut engine = engine("hires.safetensors");
    for name in HiresUpscaler::names() {
        let hires = Hires { upscaler: name.parse().unwrap(), ..Hires::default() };
        let r = ImageRequest { hires: Some(hires), ..request() };
        let mut runs = Runs::default();
        let image = engine.generate(&r, &mut runs, &Default::default()).unwrap().remove(0);
        assert_eq!((image.width, image.height, image.rgb.len()), (128, 128, 128 * 128 * 3), "{name}");
        // floor(4 / 0.7) = 5 steps of which floor(5 * 0.7) + 1 = 4 run.
        assert_eq!(runs.0, [4, 4], "{name}");
        let text = image.parameters.to_text();
        let want = format!("Denoising strength: 0.7, Hires upscale: 2, Hires upscaler: {name}");
        assert!(text.contains("Size: 64x64") && text.contains(&want), "{text}");
    }
}

#[test]
fn the_second_pass_is_a_picture_from_a_picture() {
    let mut engine = engine("hires-alike.safetensors");
    let first = generate(&mut engine, &request(), &mut Log::default()).unwrap().remove(0);
    let hires = Hires { upscaler: HiresUpscaler::Model, steps: 3, strength: 0.5, ..Hires::default() };
    let got = ImageRequest { hires: Some(hires), ..request() };
    let mut log = Log::default();
    let got = generate(&mut engine, &got, &mut log).unwrap().remove(0);
    // The doubler repeats pixels; 3 / 0.5 = 6 steps, of which 4 run.
    let pixel = |i: usize| {
        let at = (i / 128 / 2 * 64 + i % 128 / 2) * 3;
        first.rgb[at..at + 3].to_vec()
    };
    let image = InputImage { width: 128, height: 128, rgb: (0..128 * 128).flat_map(pixel).collect() };
    let alone = ImageRequest {
        init_image: Some(image),
        strength: Some(0.5),
        width: Some(128),
        height: Some(128),
        steps: Some(6),
        ..request()
    };
    let alone = generate(&mut engine, &alone, &mut Log::default()).unwrap().remove(0);
    assert!(got.rgb == alone.rgb);
    let sigmas = Some(vec![3.0, 1.0, 0.0]);
    let r = ImageRequest { hires: Some(Hires { sigmas, ..Hires::default() }), ..request() };
    let mut runs = Runs::default();
    engine.generate(&r, &mut runs, &Default::default()).unwrap();
    assert_eq!(runs.0, [4, 2]);
}

#[test]
fn wrong_second_passes_are_named() {
    let model = sd1::write("hires-refused.safetensors", |_, _| {});
    let mut engine = Engine::builder().model(&model).device("cpu").threads(1).build().unwrap();
    for (hires, want) in [
        (Hires { upscaler: HiresUpscaler::Model, ..Hires::default() }, "hires.upscaler: there is no upscaler"),
        (Hires { strength: 0.0, ..Hires::default() }, "hires.strength: want"),
        (Hires { scale: f32::NAN, ..Hires::default() }, "hires.scale: want"),
        (Hires { width: 16_000, height: 16_000, ..Hires::default() }, "hires: 16000x16000 has more"),
        (Hires { sigmas: Some(vec![1.0]), ..Hires::default() }, "hires: sigmas: want 2 to"),
    ] {
        let r = ImageRequest { hires: Some(hires), ..request() };
        let e = generate(&mut engine, &r, &mut Log::default()).unwrap_err();
        assert!(e.is_request() && e.to_string().starts_with(want), "{e}");
    }
}

fn picture(width: u32, height: u32) -> InputImage {
    let rgb = (0..width * height * 3).map(|i| (i * 31 % 251) as u8).collect();
    InputImage { width, height, rgb }
}

fn mask(width: u32, height: u32, white: impl Fn(u32, u32) -> bool) -> InputMask {
    let values = (0..width * height).map(|i| if white(i % width, i / width) { 255 } else { 0 }).collect();
    InputMask { width, height, values }
}

/// The pixels that differ.
fn changed(a: &[u8], b: &[u8], width: u32) -> Vec<(u32, u32)> {
    assert_eq!(a.len(), b.len());
    let pixels = a.chunks(3).zip(b.chunks(3)).enumerate().filter(|(_, (a, b))| a != b);
    pixels.map(|(i, _)| (i as u32 % width, i as u32 / width)).collect()
}

#[test]
fn small_masks_change_their_pixels_alone() {
    let mut engine = engine("mask-small.safetensors");
    let image = picture(64, 64);
    let run = |engine: &mut Engine, m: InputMask, blur| {
        let r = ImageRequest { init_image: Some(image.clone()), mask: Some(m), mask_blur: blur, ..request() };
        changed(&generate(engine, &r, &mut Log::default()).unwrap()[0].rgb, &image.rgb, 64)
    };
    assert_eq!(run(&mut engine, mask(64, 64, |x, y| (x, y) == (21, 37)), 0), [(21, 37)]);
    let column = run(&mut engine, mask(64, 64, |x, _| x == 5), 0);
    assert!(column.len() > 60 && column.iter().all(|(x, _)| *x == 5), "{column:?}");
    // A blur of 2 reaches 5 pixels.
    let faded = run(&mut engine, mask(64, 64, |x, _| x < 20), 2);
    assert!(faded.iter().all(|(x, _)| *x < 25) && faded.iter().any(|(x, _)| *x > 19), "{faded:?}");
}

/// A picture of 64 or 128 pixels with a mask, drawn at 64 and then at 128.
fn larger(engine: &mut Engine, upscaler: HiresUpscaler, image: &InputImage, r: ImageRequest) -> Vec<u8> {
    let hires = Hires { upscaler, ..Hires::default() };
    let white = |x: u32, y: u32| (16..32).contains(&x) && (8..40).contains(&y);
    let r =
        ImageRequest { init_image: Some(image.clone()), mask: Some(mask(64, 64, white)), hires: Some(hires), ..r };
    generate(engine, &r, &mut Log::default()).unwrap().remove(0).rgb
}

#[test]
fn both_passes_paint_in_the_mask_alone() {
    let mut engine = engine("hires-mask.safetensors");
    let inside = |x: u32, y: u32| (32..64).contains(&x) && (16..80).contains(&y);
    // A picture of the larger size keeps its own pixels, whatever made the first pass larger.
    let image = picture(128, 128);
    for name in HiresUpscaler::names() {
        let got = larger(&mut engine, name.parse().unwrap(), &image, request());
        let changed = changed(&got, &image.rgb, 128);
        // A mask made larger by Lanczos is half at its edge.
        assert!(changed.len() > 1500 && changed.iter().all(|(x, y)| inside(*x, *y)), "{name}: {}", changed.len());
    }
    // A smaller one keeps what the upscaler makes of its pixels: this one repeats them.
    let small = picture(64, 64);
    let pixel = |i: usize| {
        let at = (i / 128 / 2 * 64 + i % 128 / 2) * 3;
        small.rgb[at..at + 3].to_vec()
    };
    let doubled: Vec<u8> = (0..128 * 128).flat_map(pixel).collect();
    for upscaler in [HiresUpscaler::Model, HiresUpscaler::Nearest] {
        let changed = changed(&larger(&mut engine, upscaler, &small, request()), &doubled, 128);
        assert!(changed.len() > 1500 && changed.iter().all(|(x, y)| inside(*x, *y)), "{upscaler}");
    }
    // With what Lanczos makes of them where the latent becomes larger, which is the picture fitted to the size.
    let fitted = small.fitted(128, 128).unwrap();
    let changed_pixels = changed(&larger(&mut engine, HiresUpscaler::Latent, &small, request()), &fitted.rgb, 128);
    assert!(changed_pixels.len() > 1500 && changed_pixels.iter().all(|(x, y)| inside(*x, *y)));
    // A blur reaches as far as for the picture of the first pass: 5 pixels of it for a deviation of 2.
    let r = ImageRequest { mask_blur: 2, ..request() };
    let faded = changed(&larger(&mut engine, HiresUpscaler::Latent, &image, r), &image.rgb, 128);
    let near = |x: u32, y: u32| (22..75).contains(&x) && (6..91).contains(&y);
    assert!(faded.iter().all(|(x, y)| near(*x, *y)) && faded.iter().any(|(x, y)| !inside(*x, *y)));
}

/// The second pass with a mask is a picture from a picture with that mask, where the first pass is put into the picture.
#[test]
fn the_second_pass_with_a_mask_is_a_picture_from_a_picture() {
    let mut engine = engine("hires-mask-alike.safetensors");
    let (small, white) = (picture(64, 64), |x: u32, y: u32| x < 24 && y >= 40);
    let masked = |image: &InputImage, white: InputMask| ImageRequest {
        init_image: Some(image.clone()),
        mask: Some(white),
        ..request()
    };
    let first = masked(&small, mask(64, 64, white));
    let hires = Hires { upscaler: HiresUpscaler::Nearest, steps: 3, strength: 0.5, ..Hires::default() };
    let got = ImageRequest { hires: Some(hires), ..first.clone() };
    let got = generate(&mut engine, &got, &mut Log::default()).unwrap().remove(0);
    let first = generate(&mut engine, &first, &mut Log::default()).unwrap().remove(0);
    let pixel = |i: usize| {
        let at = (i / 128 / 2 * 64 + i % 128 / 2) * 3;
        first.rgb[at..at + 3].to_vec()
    };
    let image = InputImage { width: 128, height: 128, rgb: (0..128 * 128).flat_map(pixel).collect() };
    let fitted = mask(64, 64, white);
    let size = ImageRequest { width: Some(128), height: Some(128), ..masked(&image, fitted) };
    let alone = ImageRequest { strength: Some(0.5), steps: Some(6), ..size };
    let alone = generate(&mut engine, &alone, &mut Log::default()).unwrap().remove(0);
    assert!(got.rgb == alone.rgb);
}

/// Where the second pass has another shape, picture and mask are stretched as the first pass's picture is.
#[test]
fn masks_follow_the_shape_of_the_second_pass() {
    let mut engine = engine("hires-mask-shape.safetensors");
    let hires = Hires { upscaler: HiresUpscaler::Nearest, width: 128, height: 96, ..Hires::default() };
    let image = InputImage { width: 64, height: 64, rgb: [90, 120, 200].repeat(64 * 64) };
    let r = ImageRequest {
        init_image: Some(image.clone()),
        mask: Some(mask(64, 64, |x, y| (16..32).contains(&x) && y < 16)),
        hires: Some(hires),
        ..request()
    };
    let got = generate(&mut engine, &r, &mut Log::default()).unwrap().remove(0);
    assert_eq!((got.width, got.height), (128, 96));
    let changed = changed(&got.rgb, &[90, 120, 200].repeat(128 * 96), 128);
    assert!(changed.len() > 600 && changed.iter().all(|(x, y)| (32..64).contains(x) && *y < 24), "{changed:?}");
    // Around the mask alone, which is put back into the picture at its own size.
    let large = picture(200, 120);
    let hires = Some(Hires { upscaler: HiresUpscaler::Lanczos, ..Hires::default() });
    let r = ImageRequest {
        init_image: Some(large.clone()),
        mask: Some(mask(200, 120, |x, y| (100..130).contains(&x) && (50..70).contains(&y))),
        only_masked: true,
        mask_padding: Some(8),
        hires,
        ..request()
    };
    let got = generate(&mut engine, &r, &mut Log::default()).unwrap().remove(0);
    let changed = self::changed(&got.rgb, &large.rgb, 200);
    assert!((got.width, got.height) == (200, 120) && changed.len() > 500, "{}", changed.len());
    assert!(changed.iter().all(|(x, y)| (100..130).contains(x) && (50..70).contains(y)));
}

#[test]
fn only_what_is_masked_is_drawn_into_the_whole_picture() {
    let mut engine = engine("mask-only.safetensors");
    let image = picture(200, 120);
    let r = ImageRequest {
        init_image: Some(image.clone()),
        mask: Some(mask(200, 120, |x, y| (100..130).contains(&x) && (50..70).contains(&y))),
        only_masked: true,
        mask_padding: Some(8),
        ..request()
    };
    let got = generate(&mut engine, &r, &mut Log::default()).unwrap().remove(0);
    assert_eq!((got.width, got.height), (200, 120));
    let changed = changed(&got.rgb, &image.rgb, 200);
    assert!(changed.len() > 500, "{}", changed.len());
    assert!(changed.iter().all(|(x, y)| (100..130).contains(x) && (50..70).contains(y)));
    let text = got.parameters.to_text();
    assert!(text.contains("Inpaint area: Only masked, Masked area padding: 8"), "{text}");
    let black = ImageRequest { mask: Some(mask(8, 8, |_, _| false)), ..r };
    let e = generate(&mut engine, &black, &mut Log::default()).unwrap_err();
    assert!(e.is_request() && e.to_string().starts_with("mask: nothing of it is white"), "{e}");
}
