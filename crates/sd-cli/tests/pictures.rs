//! Pictures that go in, with the built-in demo model.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod support;

use sd_io::{Image, read_parameters};
use std::path::Path;
use support::{folder, sd_cli};

fn run(folder: &Path, args: &[&str]) -> support::Run {
    let run = sd_cli(folder, args);
    assert_eq!(run.code, Some(0), "{args:?}: {}", run.stderr);
    run
}

fn save(folder: &Path, name: &str, width: u32, height: u32, rgb: impl Fn(u32, u32) -> [u8; 3]) {
    let pixels = (0..width * height).flat_map(|i| rgb(i % width, i / width)).collect();
    Image::new(width, height, pixels).unwrap().save(folder.join(name), 90, None).unwrap();
}

#[test]
fn what_the_mask_leaves_black_keeps_its_bytes() {
    let folder = folder("pictures-mask");
    save(&folder, "in.png", 64, 64, |x, y| [(x * 4) as u8, (y * 4) as u8, 90]);
    save(&folder, "mask.png", 64, 64, |x, _| [if x < 20 { 255 } else { 0 }; 3]);
    run(&folder, &["-p", "a red circle", "-i", "in.png", "--mask", "mask.png", "--steps", "2", "-o", "out.png"]);
    let (before, after) =
        (Image::open(folder.join("in.png")).unwrap(), Image::open(folder.join("out.png")).unwrap());
    assert_eq!((after.width(), after.height()), (64, 64), "the size is the picture's own");
    let changed = |columns: std::ops::Range<u32>| {
        let pixels = columns.flat_map(|x| (0..64).map(move |y| (x, y)));
        pixels.filter(|(x, y)| before.pixel(*x, *y) != after.pixel(*x, *y)).count()
    };
    assert_eq!(changed(20..64), 0);
    assert!(changed(0..20) > 1000);
    let text = read_parameters(&std::fs::read(folder.join("out.png")).unwrap()).unwrap();
    assert!(text.contains("Denoising strength: 0.75"), "{text}");
}

#[test]
fn strength_decides_how_many_steps_run() {
    let folder = folder("pictures-strength");
    save(&folder, "in.png", 100, 50, |_, y| [if y < 25 { 220 } else { 30 }; 3]);
    let base = ["-p", "a red circle", "-i", "in.png", "-W", "64", "-H", "64", "--steps", "4", "-o", "out.png"];
    let log = run(&folder, &[&base[..], &["--strength", "0.5"]].concat()).stderr;
    assert!(log.contains("denoising 3/3"), "{log}");
    let log = run(&folder, &[&base[..], &["--strength", "0"]].concat()).stderr;
    assert!(!log.contains("denoising"), "{log}");
    // The middle of the picture, through the autoencoder alone.
    let out = Image::open(folder.join("out.png")).unwrap();
    let [top, bottom] = [out.pixel(32, 8), out.pixel(32, 56)].map(|p| p.unwrap()[1]);
    assert!(top > 180 && bottom < 70, "{top} {bottom}");
}

#[test]
fn what_the_model_cannot_read_is_refused() {
    let folder = folder("pictures-refused");
    save(&folder, "in.png", 8, 8, |_, _| [0; 3]);
    for (args, part) in [
        (&["--mask", "in.png"][..], "mask: there is no picture to paint in"),
        (&["-r", "in.png"], "ref_images: this SD 1.x model does not read reference pictures"),
        (&["--control-image", "in.png"], "control_image: this SD 1.x model does not read one"),
        (&["--slg-scale", "2.5"], "slg: no blocks of SD 1.x can be left out"),
        (&["--sigmas", "1,2"], "sigmas: want falling levels"),
        (&["--extra-sample-args", "nonsense=1"], "nonsense"),
    ] {
        let run = sd_cli(&folder, args);
        assert_eq!(run.code, Some(1), "{args:?}: {}", run.stderr);
        assert!(run.stderr.contains(part) && !run.stderr.contains("denoising"), "{args:?}: {}", run.stderr);
    }
}
