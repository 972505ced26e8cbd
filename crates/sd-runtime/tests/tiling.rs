//! An autoencoder in pieces gives what it gives at once.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod support;

use sd_runtime::{DType, Engine, ImageRequest, InputImage, VaeTiling};
use support::{Log, generate};

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo.safetensors");

/// Coloured waves and an edge: mean and variance differ from place to place.
fn picture(width: u32, height: u32) -> InputImage {
    let value = |i: u32, c: u32| {
        let (x, y) = (f64::from(i % width), f64::from(i / width));
        let wave = 120.0 + 100.0 * ((x * 0.02 + f64::from(c)).sin() * (y * 0.03).cos());
        if x + y > 90.0 { wave as u8 } else { (40 * c) as u8 }
    };
    let rgb = (0..width * height).flat_map(|i| (0..3).map(move |c| value(i, c))).collect();
    InputImage { width, height, rgb }
}

/// Through the autoencoder alone.
fn round_trip(width: u32, height: u32) -> ImageRequest {
    ImageRequest { init_image: Some(picture(width, height)), strength: Some(0.0), ..ImageRequest::default() }
}

/// Weights are f32, with which every kernel rounds alike.
fn engine() -> Engine {
    Engine::builder().model(DEMO).weight_type(DType::F32).device("cpu").threads(1).build().unwrap()
}

fn most(a: &[u8], b: &[u8]) -> u8 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| a.abs_diff(*b)).max().unwrap()
}

/// What one picture in pieces differs from the whole by, in levels.
fn check(engine: &mut Engine, whole: &[u8], request: &ImageRequest, vae_tiling: VaeTiling) {
    let pieces = ImageRequest { vae_tiling: Some(vae_tiling), ..request.clone() };
    let pieces = generate(engine, &pieces, &mut Log::default()).unwrap().remove(0);
    let off = most(&pieces.rgb, whole);
    assert!(off <= 1, "{}x{} {vae_tiling:?}: {off} levels", pieces.width, pieces.height);
}

#[test]
fn pieces_of_any_size_give_the_whole() {
    let mut engine = engine();
    for (width, height) in [(64, 64), (200, 72), (520, 136)] {
        let request = round_trip(width, height);
        let whole = generate(&mut engine, &request, &mut Log::default()).unwrap().remove(0).rgb;
        for (tile, relative) in [([7, 5], [0.0; 2]), ([0, 0], [0.0; 2]), ([0, 0], [0.5, 0.3]), ([0, 0], [3.0, 2.0])]
        {
            check(&mut engine, &whole, &request, VaeTiling { tile, relative });
        }
    }
}

/// Every size from 64 to 520, and every size of a piece up to one that holds all.
#[test]
fn every_size_and_every_piece_give_the_whole() {
    let mut engine = engine();
    for side in (64..=520).step_by(8) {
        // Long in one direction, so that it costs little.
        let (width, height) = if side % 16 == 0 { (side, 64) } else { (64, side) };
        let request = round_trip(width, height);
        let whole = generate(&mut engine, &request, &mut Log::default()).unwrap().remove(0).rgb;
        let length = side / 8 - 4;
        let pieces = if side == 520 { vec![4, 9, 22, 33, 61, 62, 63, 64, 65] } else { vec![length] };
        for piece in pieces {
            let tile = if width > height { [piece, 4 + piece % 5] } else { [4 + piece % 5, piece] };
            check(&mut engine, &whole, &request, VaeTiling { tile, relative: [0.0; 2] });
        }
    }
}

#[test]
fn pieces_of_what_repeats_go_around() {
    let mut engine = engine();
    for (circular_x, circular_y) in [(true, false), (true, true)] {
        let request = ImageRequest { circular_x, circular_y, ..round_trip(128, 64) };
        let whole = generate(&mut engine, &request, &mut Log::default()).unwrap().remove(0);
        for tile in [[5, 32], [8, 6]] {
            let vae_tiling = Some(VaeTiling { tile, relative: [0.0; 2] });
            let pieces = ImageRequest { vae_tiling, ..request.clone() };
            let pieces = generate(&mut engine, &pieces, &mut Log::default()).unwrap().remove(0);
            let off = most(&pieces.rgb, &whole.rgb);
            assert!(off <= 1, "{tile:?}: {off} levels");
        }
    }
}
