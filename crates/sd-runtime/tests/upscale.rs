//! Larger pictures: pieces against the whole, edges that meet, and the engine's own.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod support;

use sd_runtime::{
    CancelToken, Engine, ImageRequest, InputImage, Observer, Progress, Stage, UpscaleOptions, Upscaler,
};
use support::{Log, generate, layouts, sd1};

fn picture(width: u32, height: u32) -> InputImage {
    let wave = |i: u32, c: u32| {
        let (x, y) = (f64::from(i % width), f64::from(i / width));
        (127.0 + 90.0 * ((x * 0.31 + f64::from(c)).sin() * (y * 0.23).cos())) as u8
    };
    let rgb = (0..width * height).flat_map(|i| (0..3).map(move |c| wave(i, c))).collect();
    InputImage { width, height, rgb }
}

fn upscaled(u: &mut Upscaler, image: &InputImage, tile: u32, circular: [bool; 2]) -> InputImage {
    let options = UpscaleOptions { tile, ..UpscaleOptions::default() };
    u.upscale(image, options, circular, &mut (), &CancelToken::new()).unwrap()
}

fn most(a: &InputImage, b: &InputImage) -> u8 {
    assert_eq!((a.width, a.height), (b.width, b.height));
    a.rgb.iter().zip(&b.rgb).map(|(a, b)| a.abs_diff(*b)).max().unwrap()
}

/// The network looks 5 pixels far, as many as a piece of 80 leaves to its neighbour.
#[test]
fn pieces_join_without_a_seam() {
    let path = layouts::by_rule("upscale_compact_x4", "upscale-pieces");
    let mut upscaler = Upscaler::open(&path, "cpu", 1).unwrap();
    assert_eq!((upscaler.scale(), upscaler.name()), (4, "upscale-pieces"));
    let image = picture(150, 100);
    let whole = upscaled(&mut upscaler, &image, 256, [false; 2]);
    assert_eq!((whole.width, whole.height), (600, 400));
    assert!(most(&upscaled(&mut upscaler, &image, 80, [false; 2]), &whole) <= 1);
    // Smaller pieces see less, which fades rather than ends.
    assert!(most(&upscaled(&mut upscaler, &image, 32, [false; 2]), &whole) <= 4);
}

#[test]
fn networks_that_read_cells_take_any_size() {
    let path = layouts::by_rule("upscale_rrdb_x2", "upscale-cells");
    let mut upscaler = Upscaler::open(&path, "cpu", 1).unwrap();
    let image = picture(33, 21);
    let whole = upscaled(&mut upscaler, &image, 128, [false; 2]);
    assert_eq!((whole.width, whole.height, whole.rgb.len()), (66, 42, 66 * 42 * 3));
    // What is mirrored beyond the right edge leaves the left side alone.
    let even = upscaled(&mut upscaler, &picture(34, 22), 128, [false; 2]);
    assert_eq!((even.width, even.height), (68, 44));
}

/// A picture that repeats, moved around, becomes the same larger one, moved around.
#[test]
fn edges_that_meet_still_do() {
    let path = layouts::by_rule("upscale_compact_x2", "upscale-around");
    let mut upscaler = Upscaler::open(&path, "cpu", 1).unwrap();
    let (image, by) = (picture(40, 24), 13);
    let moved = |image: &InputImage, by: u32| {
        let at = |i: u32| ((i / image.width) * image.width + (i % image.width + by) % image.width) as usize * 3;
        let rgb = (0..image.width * image.height).flat_map(|i| image.rgb[at(i)..at(i) + 3].to_vec()).collect();
        InputImage { rgb, ..image.clone() }
    };
    let want = moved(&upscaled(&mut upscaler, &image, 128, [false, true]), 2 * by);
    let got = upscaled(&mut upscaler, &moved(&image, by), 128, [false, true]);
    assert!(most(&got, &want) <= 1);
    let without = upscaled(&mut upscaler, &moved(&image, by), 128, [false; 2]);
    assert!(most(&without, &want) > 4);
}

#[test]
fn the_engine_makes_its_pictures_larger() {
    let model = sd1::write("upscale-sd1.safetensors", |_, _| {});
    let doubler = layouts::doubler("upscale-doubler");
    let mut engine = Engine::builder().model(&model).upscaler(&doubler).device("cpu").threads(1).build().unwrap();
    let request = ImageRequest { width: Some(64), height: Some(64), steps: Some(2), ..ImageRequest::default() };
    let small = generate(&mut engine, &request, &mut Log::default()).unwrap().remove(0);
    let upscale = Some(UpscaleOptions { repeats: 2, tile: 48 });
    let large = ImageRequest { upscale, ..request.clone() };
    let large = generate(&mut engine, &large, &mut Log::default()).unwrap().remove(0);
    assert_eq!((large.width, large.height, large.parameters.width), (256, 256, 64));
    for (i, pixel) in large.rgb.chunks(3).enumerate() {
        let at = (i / 256 / 4 * 64 + i % 256 / 4) * 3;
        assert_eq!(pixel, &small.rgb[at..at + 3], "{i}");
    }
    let text = large.parameters.to_text();
    assert!(text.contains("Postprocess upscale by: 4, Postprocess upscaler: upscale-doubler"), "{text}");
    for (repeats, want) in
        [(9, "upscale_repeats: want at most 8, got 9"), (8, "upscale_repeats: 16384x16384 has more")]
    {
        let large = ImageRequest { upscale: Some(UpscaleOptions { repeats, tile: 128 }), ..request.clone() };
        let e = generate(&mut engine, &large, &mut Log::default()).unwrap_err();
        assert!(e.is_request() && e.to_string().starts_with(want), "{e}");
    }
}

/// Cancelled when the first piece is done.
struct Stop(CancelToken, Vec<(usize, usize)>);

impl Observer for Stop {
    fn progress(&mut self, p: Progress) {
        assert_eq!(p.stage, Stage::Upscale);
        self.1.push((p.step, p.total));
        if p.step == 1 {
            self.0.cancel();
        }
    }
}

#[test]
fn pieces_are_reported_and_can_be_stopped() {
    let path = layouts::doubler("upscale-stopped");
    let mut upscaler = Upscaler::open(&path, "cpu", 1).unwrap();
    let mut stop = Stop(CancelToken::new(), Vec::new());
    let token = stop.0.clone();
    let options = UpscaleOptions { repeats: 1, tile: 32 };
    let e = upscaler.upscale(&picture(64, 32), options, [false; 2], &mut stop, &token).unwrap_err();
    assert!(e.is_cancelled(), "{e}");
    assert_eq!(stop.1, [(0, 3), (1, 3)]);
}

#[test]
fn what_is_no_upscaler_is_refused() {
    let model = sd1::write("upscale-refused.safetensors", |_, _| {});
    let e = Upscaler::open(&model, "cpu", 1).unwrap_err().to_string();
    assert!(e.contains("upscale-refused.safetensors") && e.contains("holds no upscaler"), "{e}");
}
