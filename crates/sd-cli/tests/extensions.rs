//! What extends the demo model (`tools/demo-model/extend.py`) does to its pictures what it says.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod judge;
mod support;

use std::time::{Duration, Instant};

use judge::{Seen, look};
use sd_runtime::{
    CancelToken, Engine, EngineBuilder, GeneratedImage, ImageRequest, InputImage, InputMask, LoraChoice, Observer,
    Progress, Stage,
};

const SIDE: u32 = 128;

fn asset(name: &str) -> String {
    support::DEMO.replace("demo.safetensors", name)
}

fn demo() -> EngineBuilder {
    Engine::builder().model(support::DEMO).threads(1)
}

fn asks(prompt: &str) -> ImageRequest {
    ImageRequest { prompt: prompt.to_owned(), ..Default::default() }
}

fn draw(engine: &mut Engine, request: &ImageRequest) -> GeneratedImage {
    engine.generate(request, &mut (), &CancelToken::new()).unwrap().remove(0)
}

/// The mean difference between the strongest and the weakest channel, in levels.
fn colour(rgb: &[u8]) -> f64 {
    let spread = |p: &[u8]| f64::from(p.iter().max().unwrap() - p.iter().min().unwrap());
    rgb.chunks_exact(3).map(spread).sum::<f64>() / (rgb.len() / 3) as f64
}

/// The peak signal to noise ratio of two pictures, in dB.
fn psnr(a: &[u8], b: &[u8]) -> f64 {
    assert_eq!(a.len(), b.len());
    let squares: f64 = a.iter().zip(b).map(|(a, b)| f64::from(a.abs_diff(*b)).powi(2)).sum();
    10.0 * (255.0 * 255.0 * a.len() as f64 / squares).log10()
}

#[test]
fn the_style_takes_colour_away() {
    let mut engine = demo().lora_folder(asset("")).build().unwrap();
    for (prompt, shape) in [
        ("a red circle on a blue background", "circle"),
        ("a large yellow star on a purple background", "star"),
        ("a green heart on a pink background", "heart"),
    ] {
        let mut at = |strength: f32| {
            let lora = LoraChoice { name: "demo-style".to_owned(), strength, ..Default::default() };
            draw(&mut engine, &ImageRequest { loras: vec![lora], ..asks(prompt) }).rgb
        };
        let (none, some, all, more) = (at(0.0), at(0.5), at(1.0), at(-0.3));
        assert!(none == draw(&mut engine, &asks(prompt)).rgb, "{prompt}: strength 0 is the model");
        let colours = [&more, &none, &some, &all].map(|rgb| colour(rgb));
        assert!(colours.windows(2).all(|c| c[0] > c[1]) && 5.0 * colours[3] < colours[1], "{prompt}: {colours:?}");
        let seen = look(SIDE as usize, SIDE as usize, &all).unwrap();
        assert_eq!((seen.shape, seen.position.as_str()), (shape, "center"), "{prompt}");
    }
}

/// The time that this thread has computed for, which other work on the machine does not lengthen; where the system does not
/// tell it, the time that passed since `begin`.
fn computed(begin: Instant) -> Duration {
    let told = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
    let nanoseconds = told.and_then(|text| text.split_whitespace().next()?.parse().ok());
    nanoseconds.map_or_else(|| begin.elapsed(), Duration::from_nanos)
}

/// How long the last decoding took. Observers are called by the thread that computes.
struct Decoding {
    begin: Instant,
    from: Duration,
    took: Duration,
}

impl Observer for Decoding {
    fn progress(&mut self, p: Progress) {
        if p.stage == Stage::Decode && p.step == 0 {
            self.from = computed(self.begin);
        } else if p.stage == Stage::Decode && p.step == p.total {
            self.took = computed(self.begin) - self.from;
        }
    }
}

#[test]
fn the_tiny_autoencoder_is_near_the_full_one_and_faster() {
    let mut full = demo().build().unwrap();
    let mut tiny = demo().taesd(asset("demo-tiny.safetensors")).build().unwrap();
    for prompt in ["a red circle on a blue background", "a small white star in the top left on a green background"]
    {
        let [a, b] = [&mut full, &mut tiny].map(|engine| draw(engine, &asks(prompt)).rgb);
        let near = psnr(&a, &b);
        assert!(near > 29.0, "{prompt}: {near} dB");
        // The picture through its encoder and decoder alone.
        let init_image = Some(InputImage { width: SIDE, height: SIDE, rgb: a.clone() });
        let through = draw(&mut tiny, &ImageRequest { init_image, strength: Some(0.0), ..asks("") }).rgb;
        let near = psnr(&a, &through);
        assert!(near > 27.0, "{prompt}, through both halves: {near} dB");
    }
    let mut seen = Decoding { begin: Instant::now(), from: Duration::ZERO, took: Duration::ZERO };
    let mut decoding = |engine: &mut Engine| {
        let r = ImageRequest { width: Some(256), height: Some(256), steps: Some(1), ..asks("a red circle") };
        engine.generate(&r, &mut seen, &CancelToken::new()).unwrap();
        seen.took.as_secs_f64()
    };
    // Pairs, one after the other, so that both see the same machine; the first also plans.
    let mut times: Vec<f64> = (0..8).map(|_| decoding(&mut full) / decoding(&mut tiny)).skip(1).collect();
    times.sort_by(f64::total_cmp);
    assert!(times[3] > 2.0, "so many times as fast: {times:?}");
}

/// A picture of 128x128 pixels that the demo model draws, and a mask that is white where `anew` says.
fn masked(prompt: &str, anew: impl Fn(u32, u32) -> bool) -> (InputImage, InputMask) {
    let rgb = draw(&mut demo().build().unwrap(), &asks(prompt)).rgb;
    let values = (0..SIDE * SIDE).map(|i| if anew(i % SIDE, i / SIDE) { 255 } else { 0 }).collect();
    (InputImage { width: SIDE, height: SIDE, rgb }, InputMask { width: SIDE, height: SIDE, values })
}

/// The network of nine channels draws in the masked part what the prompt says, on the background that is there, and no
/// other pixel changes.
#[test]
fn the_inpainting_model_draws_in_the_masked_part() {
    let mut engine = demo().diffusion_model(asset("demo-inpaint.safetensors")).build().unwrap();
    let (picture, mask) =
        masked("a blue square on a yellow background", |x, y| (16..112).contains(&x) && (16..112).contains(&y));
    for (color, shape) in
        [("red", "circle"), ("green", "star"), ("black", "heart"), ("purple", "square"), ("white", "ring")]
    {
        let request = ImageRequest {
            init_image: Some(picture.clone()),
            mask: Some(mask.clone()),
            ..asks(&format!("a {color} {shape} on a yellow background"))
        };
        let rgb = draw(&mut engine, &request).rgb;
        let want = Seen { shape, color, background: "yellow", position: "center".into() };
        assert_eq!(look(SIDE as usize, SIDE as usize, &rgb), Some(want));
        let all = rgb.chunks(3).zip(picture.rgb.chunks(3)).zip(&mask.values);
        let changed = all.filter(|((new, old), m)| **m == 0 && new != old).count();
        assert_eq!(changed, 0, "pixels outside the mask");
    }
    // Without an object in the prompt's part that is masked, the surroundings go on.
    let (picture, mask) = masked("a red heart on the left on a white background", |x, _| x >= 72);
    let request = ImageRequest {
        init_image: Some(picture.clone()),
        mask: Some(mask),
        ..asks("a red heart on the left on a white background")
    };
    let rgb = draw(&mut engine, &request).rgb;
    let near = psnr(&rgb, &picture.rgb);
    assert!(near > 25.0, "{near} dB");
}
