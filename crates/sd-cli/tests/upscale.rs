//! `-M upscale` and `--upscale-model`, with a network whose result is known.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod support;

use sd_io::{Image, read_parameters};
use std::fs;
use support::{doubler, folder, sd_cli};

fn doubled(pixels: &[u8], width: usize, channels: usize) -> Vec<u8> {
    let rows = pixels.chunks(width * channels).map(|row| {
        let row: Vec<u8> = row.chunks(channels).flat_map(|pixel| [pixel, pixel].concat()).collect();
        [row.clone(), row].concat()
    });
    rows.flatten().collect()
}

#[test]
fn a_picture_becomes_larger_and_keeps_alpha_and_text() {
    let folder = folder("upscale");
    doubler(&folder.join("double.safetensors"));
    let rgb: Vec<u8> = (0..20 * 10 * 3).map(|i| (i * 7 % 256) as u8).collect();
    let alpha: Vec<u8> = (0..200).map(|i| (i + 30) as u8).collect();
    let image = Image::new(20, 10, rgb.clone()).unwrap().with_alpha(alpha.clone()).unwrap();
    fs::write(folder.join("in.png"), image.to_png(Some("a cat\nSteps: 20")).unwrap()).unwrap();
    let base = ["-M", "upscale", "--upscale-model", "double.safetensors", "-i", "in.png"];
    let run = sd_cli(&folder, &[&base[..], &["--upscale-tile-size", "16", "-o", "out.png"]].concat());
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    assert!(run.stderr.contains("upscaling 2/2"), "{}", run.stderr);
    let out = Image::open(folder.join("out.png")).unwrap();
    assert_eq!((out.width(), out.height()), (40, 20));
    assert!(out.rgb() == doubled(&rgb, 20, 3) && out.alpha().unwrap() == doubled(&alpha, 20, 1));
    let text = read_parameters(&fs::read(folder.join("out.png")).unwrap()).unwrap();
    assert_eq!(text, "a cat\nSteps: 20, Postprocess upscale by: 2, Postprocess upscaler: double");
    // Fitted to a size first.
    let fit = ["-W", "8", "-H", "8", "--upscale-repeats", "2", "-o", "fit.png"];
    let run = sd_cli(&folder, &[&base[..], &fit].concat());
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    let out = Image::open(folder.join("fit.png")).unwrap();
    assert_eq!((out.width(), out.height()), (32, 32));
}

#[test]
fn drawn_pictures_become_larger() {
    let folder = folder("upscale-drawn");
    doubler(&folder.join("double.safetensors"));
    let draw = ["-p", "a red circle", "-W", "64", "-H", "64", "--steps", "1"];
    let run = sd_cli(&folder, &[&draw[..], &["-o", "small.png"]].concat());
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    let run = sd_cli(&folder, &[&draw[..], &["--upscale-model", "double.safetensors", "-o", "large.png"]].concat());
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    let open = |name: &str| Image::open(folder.join(name)).unwrap();
    assert!(open("large.png").rgb() == doubled(open("small.png").rgb(), 64, 3));
}

#[test]
fn what_is_missing_is_named() {
    let folder = folder("upscale-refused");
    fs::write(folder.join("in.png"), Image::new(1, 1, vec![0; 3]).unwrap().to_png(None).unwrap()).unwrap();
    for (args, want) in [
        (&[][..], "give the picture with --init-img"),
        (&["-i", "in.png"], "give the network with --upscale-model"),
        (&["-i", "in.png", "--upscale-model", support::DEMO], "holds no upscaler"),
        (&["-i", "in.png", "--upscale-model", "none.pth"], "none.pth"),
        (&["-i", "none.png", "--upscale-model", "none.pth"], "--init-img none.png"),
        (&["--upscale-repeats", "0"], "--upscale-repeats"),
        (&["--upscale-tile-size", "0"], "--upscale-tile-size"),
    ] {
        let run = sd_cli(&folder, &[&["-M", "upscale"], args].concat());
        assert_eq!(run.code, Some(1), "{args:?}: {}", run.stderr);
        assert!(run.stderr.contains(want), "{args:?}: {}", run.stderr);
    }
}
