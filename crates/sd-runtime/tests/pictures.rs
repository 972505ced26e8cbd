//! The engine on the oracle's tiny SD 1.x with pictures (`oracle/sd1_pictures.py`), and on SDXL with a refiner.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod support;

use std::path::{Path, PathBuf};

use sd_core::{Shape, WeightSource};
use sd_io::{Checkpoint, TensorSpec, write_safetensors};
use sd_runtime::{
    DType, Engine, Hires, ImageRequest, InputImage, InputMask, SamplerKind, SchedulerKind, SkipLayers, Stage,
};
use support::layouts::single_file;
use support::{Fixture, Log, agrees, agrees_with, generate, oracle_request, sd1};

const PICTURES: &str = "sd1_pictures";
const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo.safetensors");

/// The root of the mean square of the differences, in levels.
fn distance(a: &[u8], b: &[u8]) -> f64 {
    let squares = a.iter().zip(b).map(|(a, b)| f64::from(a.abs_diff(*b)).powi(2)).sum::<f64>();
    (squares / a.len() as f64).sqrt()
}

fn engine(path: &PathBuf) -> Engine {
    Engine::builder().model(path).device("cpu").threads(1).weight_type(DType::F32).build().unwrap()
}

fn request() -> ImageRequest {
    ImageRequest {
        sampler: Some(SamplerKind::Euler),
        scheduler: Some(SchedulerKind::Discrete),
        ..oracle_request("sd1_pictures.safetensors")
    }
}

fn picture() -> InputImage {
    let rgb = Fixture::open("sd1_pictures.safetensors").u8s("input.picture").to_vec();
    InputImage { width: 64, height: 64, rgb }
}

fn mask() -> InputMask {
    let values = Fixture::open("sd1_pictures.safetensors").u8s("input.mask").iter().map(|m| m * 255).collect();
    InputMask { width: 64, height: 64, values }
}

/// A picture with the original's pixels where the mask is black; the reference pastes nothing back.
fn pasted(key: &str) -> Vec<u8> {
    let fixture = Fixture::open("sd1_pictures.safetensors");
    let new = fixture.u8s(&format!("output.{key}.image_u8")).chunks(3);
    let both = new.zip(fixture.u8s("input.picture").chunks(3)).zip(fixture.u8s("input.mask"));
    both.flat_map(|((new, old), m)| if *m > 0 { new } else { old }).copied().collect()
}

#[test]
fn runs_that_start_from_a_picture_agree() {
    let mut engine = engine(&sd1::write("pictures-plain.safetensors", |_, _| {}));
    let request = ImageRequest { init_image: Some(picture()), strength: Some(0.7), ..request() };
    agrees(&mut engine, PICTURES, "img2img", &request);
    let request = ImageRequest { mask: Some(mask()), ..request };
    agrees_with(&mut engine, PICTURES, "inpaint", &request, &pasted("inpaint"));
}

#[test]
fn networks_that_read_the_picture_agree() {
    let path = sd1::write_reading("pictures-inpaint.safetensors", 9, &[], |_, _| {});
    let masked = ImageRequest { init_image: Some(picture()), mask: Some(mask()), ..request() };
    agrees_with(&mut engine(&path), PICTURES, "inpaint9", &masked, &pasted("inpaint9"));
    let path = sd1::write_reading("pictures-pix2pix.safetensors", 8, &[], |_, _| {});
    let mut engine = engine(&path);
    let edited = ImageRequest { init_image: Some(picture()), ..request() };
    agrees(&mut engine, PICTURES, "pix2pix", &edited);
    let e = generate(&mut engine, &request(), &mut Log::default()).unwrap_err();
    assert!(e.is_request() && e.to_string().contains("edits a picture"), "{e}");
    // A second pass edits the same picture.
    let larger = ImageRequest { hires: Some(Hires::default()), steps: Some(2), ..edited };
    let image = generate(&mut engine, &larger, &mut Log::default()).unwrap().remove(0);
    assert_eq!((image.width, image.height), (128, 128));
}

/// The larger the strength, the further from the picture; without any it goes through the autoencoder alone.
#[test]
fn strength_is_monotone() {
    let mut engine = Engine::builder().model(DEMO).device("cpu").threads(1).build().unwrap();
    let side = 128;
    let draw = |engine: &mut Engine, prompt: &str, request: ImageRequest| {
        let mut log = Log::default();
        let r = ImageRequest { prompt: prompt.to_owned(), ..request };
        (generate(engine, &r, &mut log).unwrap().remove(0).rgb, log.latents.len())
    };
    let (input, _) = draw(&mut engine, "a green square on a white background", ImageRequest::default());
    let mut through = Vec::new();
    for steps in [1, 2, 20] {
        let mut far = Vec::new();
        for strength in [0.0, 0.01, 0.5, 0.99, 1.0] {
            let r = ImageRequest {
                init_image: Some(InputImage { width: side, height: side, rgb: input.clone() }),
                steps: Some(steps),
                strength: Some(strength),
                ..Default::default()
            };
            let (rgb, ran) = draw(&mut engine, "a red circle on a black background", r);
            let kept = if strength == 0.0 { 0 } else { ((strength * steps as f32) as u32).min(steps - 1) + 1 };
            assert_eq!(ran, kept as usize, "steps of {steps} at {strength}");
            far.push(distance(&rgb, &input));
            if strength == 0.0 {
                through.push(rgb);
            }
        }
        assert!(far.windows(2).all(|d| d[0] <= d[1]), "{steps} steps: {far:?}");
        assert!(far[0] < 4.0 && far[1] > far[0] && far[4] > 100.0, "{steps} steps: {far:?}");
    }
    assert!(through.iter().all(|rgb| *rgb == through[0]), "what does not run has no effect");
}

#[test]
fn small_masks_change_their_pixels_alone() {
    let plain = sd1::write("pictures-masks.safetensors", |_, _| {});
    let reading = sd1::write_reading("pictures-masks-inpaint.safetensors", 9, &[], |_, _| {});
    let original = picture();
    let dot = |x: usize, y: usize| x == 13 && y == 40;
    let column = |x: usize, _: usize| x == 63;
    for path in [plain, reading] {
        let mut engine = engine(&path);
        for anew in [&dot as &dyn Fn(usize, usize) -> bool, &column] {
            let values = (0..64 * 64).map(|i| if anew(i % 64, i / 64) { 255 } else { 0 }).collect();
            let mask = Some(InputMask { width: 64, height: 64, values });
            let r = ImageRequest { init_image: Some(original.clone()), mask, steps: Some(3), ..request() };
            let image = generate(&mut engine, &r, &mut Log::default()).unwrap().remove(0);
            for (i, (got, old)) in image.rgb.chunks(3).zip(original.rgb.chunks(3)).enumerate() {
                assert_eq!(got == old, !anew(i % 64, i / 64), "pixel {}, {}", i % 64, i / 64);
            }
        }
    }
}

/// A picture of any size is fitted, and what the network needs beyond the result's size is its edge.
#[test]
fn pictures_of_any_size_are_fitted() {
    let mut engine = engine(&sd1::write("pictures-sizes.safetensors", |_, _| {}));
    for (width, height) in [(1, 1), (7, 300), (200, 64)] {
        let rgb = [200, 90, 30].repeat((width * height) as usize);
        let init_image = Some(InputImage { width, height, rgb });
        let r = ImageRequest { init_image, strength: Some(0.0), width: Some(72), height: Some(40), ..request() };
        let image = generate(&mut engine, &r, &mut Log::default()).unwrap().remove(0);
        assert_eq!((image.width, image.height, image.rgb.len()), (72, 40, 72 * 40 * 3));
    }
}

/// Pixels along each side of the demo model's pictures.
const SIDE: u32 = 128;

/// The model's own network with five more inputs that it does not read: what training of the inpainting network begins with.
fn untrained() -> PathBuf {
    const FIRST: &str = "model.diffusion_model.input_blocks.0.0.weight";
    let model = Checkpoint::open(DEMO).unwrap();
    let mut specs = Vec::new();
    for name in model.names().into_iter().filter(|name| name.starts_with("model.diffusion_model.")) {
        let meta = model.meta(name).unwrap();
        let shape = if name == FIRST { Shape::new(&[64, 9, 3, 3]).unwrap() } else { meta.shape };
        specs.push(TensorSpec { name: name.to_owned(), dtype: meta.dtype, shape });
    }
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("untrained-inpaint.safetensors");
    write_safetensors(&path, &[], &specs, |spec| {
        let bytes = model.bytes(&spec.name)?.to_vec();
        if spec.name != FIRST {
            return Ok(bytes);
        }
        // Four channels of the latent, then the mask and the picture's.
        let rows = bytes.chunks_exact(bytes.len() / 64);
        Ok(rows.flat_map(|row| [row, &vec![0; row.len() / 4 * 5]].concat()).collect())
    })
    .unwrap();
    path
}

/// The mean distance in RGB between what was painted along the inside of a box and the picture around it.
fn seam(rgb: &[u8], around: &[u8], [from, to]: [u32; 2]) -> f64 {
    let on_edge = |i: u32| {
        let (x, y) = (i % SIDE, i / SIDE);
        let inside = (from..to).contains(&x) && (from..to).contains(&y);
        inside && (x < from + 4 || y < from + 4 || x >= to - 4 || y >= to - 4)
    };
    let pixel = |rgb: &[u8], i: u32| [0, 1, 2].map(|c| f64::from(rgb[i as usize * 3 + c]));
    let all: Vec<f64> = (0..SIDE * SIDE)
        .filter(|i| on_edge(*i))
        .map(|i| {
            let (a, b) = (pixel(rgb, i), pixel(around, i));
            (0..3).map(|c| (a[c] - b[c]).powi(2)).sum::<f64>().sqrt()
        })
        .collect();
    all.iter().sum::<f64>() / all.len() as f64
}

/// Where no prompt says what is there, the demo's inpainting network goes on with the colour around the mask. One that does
/// not read the picture, as before training, paints the same whatever that is.
#[test]
fn the_inpainting_network_looks_at_the_picture() {
    let build = |network: &Path| {
        Engine::builder().model(DEMO).diffusion_model(network).device("cpu").threads(1).build().unwrap()
    };
    let mut trained = build(&Path::new(DEMO).with_file_name("demo-inpaint.safetensors"));
    let mut blind = build(&untrained());
    let area = [16, 112];
    let white = |i: u32| [i % SIDE, i / SIDE].iter().all(|at| (area[0]..area[1]).contains(at));
    let values = (0..SIDE * SIDE).map(|i| if white(i) { 255 } else { 0 }).collect();
    let mask = InputMask { width: SIDE, height: SIDE, values };
    for shade in [[205, 180, 40], [90, 110, 230], [150, 60, 60], [60, 120, 60]] {
        let picture = InputImage { width: SIDE, height: SIDE, rgb: shade.repeat((SIDE * SIDE) as usize) };
        let r = ImageRequest { init_image: Some(picture.clone()), mask: Some(mask.clone()), ..Default::default() };
        let [near, far] = [&mut trained, &mut blind].map(|engine| {
            let rgb = generate(engine, &r, &mut Log::default()).unwrap().remove(0).rgb;
            seam(&rgb, &picture.rgb, area)
        });
        assert!(near < 80.0 && far > 120.0, "{shade:?}: {near}, and {far} without looking");
    }
}

/// The demo model draws stripes that go on over the seam where they should.
#[test]
fn tileable_pictures_have_no_seam() {
    let mut engine = Engine::builder().model(DEMO).device("cpu").threads(1).build().unwrap();
    let (width, height) = (128, 128);
    let draw = |engine: &mut Engine, circular_x, circular_y| {
        let prompt = "a red circle on a gradient blue background".to_owned();
        let r = ImageRequest {
            prompt,
            width: Some(width),
            height: Some(height),
            steps: Some(6),
            circular_x,
            circular_y,
            ..Default::default()
        };
        generate(engine, &r, &mut Log::default()).unwrap().remove(0).rgb
    };
    // The mean step of brightness from the last column to the first, and from the last row to the first.
    let seams = |rgb: &[u8]| {
        let at = |x: u32, y: u32| {
            rgb.iter().skip(((y * width + x) * 3) as usize).take(3).map(|v| f64::from(*v)).sum::<f64>()
        };
        let across = (0..height).map(|y| (at(0, y) - at(width - 1, y)).abs()).sum::<f64>();
        let down = (0..width).map(|x| (at(x, 0) - at(x, height - 1)).abs()).sum::<f64>();
        [across, down].map(|sum| sum / 3.0 / f64::from(width))
    };
    let plain = seams(&draw(&mut engine, false, false));
    let [across, _] = seams(&draw(&mut engine, true, false));
    let [_, down] = seams(&draw(&mut engine, false, true));
    let both = seams(&draw(&mut engine, true, true));
    let all = format!("{plain:?} {across} {down} {both:?}");
    assert!(across < 6.0 && down < 6.0 && both.iter().all(|s| *s < 6.0), "{all}");
    assert!(plain.iter().any(|s| *s > 12.0), "{all}");
    let cut = ImageRequest { width: Some(72), circular_x: true, ..Default::default() };
    let e = generate(&mut engine, &cut, &mut Log::default()).unwrap_err();
    assert!(e.to_string().starts_with("width: 72 cannot repeat"), "{e}");
}

#[test]
fn a_refiner_finishes_the_picture() {
    let base = single_file("sdxl_pipeline", "pictures-sdxl", &[]);
    let refiner = single_file("sdxl_refiner_pipeline", "pictures-sdxl-refiner", &[]);
    let builder = Engine::builder().model(&base).refiner(&refiner).device("cpu").threads(1).weight_type(DType::F32);
    let mut engine = builder.build().unwrap();
    let request = ImageRequest {
        sampler: Some(SamplerKind::Euler),
        scheduler: Some(SchedulerKind::Discrete),
        ..oracle_request("sdxl_refiner_pipeline.safetensors")
    };
    agrees(&mut engine, "sdxl_refiner_pipeline", "refined", &request);
    // Left out, the picture is the base's alone.
    let alone = ImageRequest { refiner_switch: Some(1.0), width: Some(64), height: Some(96), ..request };
    agrees(&mut engine, "sdxl_pipeline", "eps.euler.discrete", &alone);
}

#[test]
fn blocks_cannot_be_skipped_in_a_unet() {
    let mut engine = engine(&sd1::write("pictures-slg.safetensors", |_, _| {}));
    let r = ImageRequest { slg: Some(SkipLayers { scale: 2.5, ..Default::default() }), ..request() };
    let e = generate(&mut engine, &r, &mut Log::default()).unwrap_err();
    assert!(e.is_request() && e.to_string().starts_with("slg: no blocks"), "{e}");
}

#[test]
fn cancelling_stops_before_a_picture_is_encoded() {
    let mut engine = engine(&sd1::write("pictures-cancel.safetensors", |_, _| {}));
    let r = ImageRequest { init_image: Some(picture()), steps: Some(2), ..request() };
    let want = generate(&mut engine, &r, &mut Log::default()).unwrap();
    let mut log = Log { cancel: Some((Stage::Encode, 0, Default::default())), ..Default::default() };
    assert!(generate(&mut engine, &r, &mut log).unwrap_err().is_cancelled());
    assert_eq!(generate(&mut engine, &r, &mut Log::default()).unwrap(), want);
}
