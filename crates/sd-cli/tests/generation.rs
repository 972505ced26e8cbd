//! Pictures of the built-in demo model, as a user gets them.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod support;

use sd_io::{Image, read_parameters};
use std::path::Path;
use support::{files, folder, sd_cli};

fn draw(folder: &Path, args: &[&str]) -> support::Run {
    let run = sd_cli(folder, &[&["-p", "a red circle", "--steps", "2", "-W", "64", "-H", "64"], args].concat());
    assert_eq!(run.code, Some(0), "{args:?}: {}", run.stderr);
    run
}

fn read(folder: &Path, name: &str) -> Vec<u8> {
    std::fs::read(folder.join(name)).unwrap()
}

#[test]
fn without_a_model_the_demo_model_draws_and_says_so() {
    let folder = folder("generation-demo");
    let run = draw(&folder, &[]);
    assert_eq!(run.stdout, "");
    assert!(run.stderr.contains("demo model"), "{}", run.stderr);
    assert!(run.stderr.contains("[INFO   ] "), "{}", run.stderr);
    assert!(run.stderr.contains("denoising 2/2 - ") && run.stderr.contains("it"), "{}", run.stderr);
    assert!(!run.stderr.contains('\r') && !run.stderr.contains('\x1b'), "no terminal, no control characters");
    assert_eq!(files(&folder), ["output.png"]);
    let text = read_parameters(&read(&folder, "output.png")).unwrap();
    for part in ["a red circle\n", "Steps: 2", "Sampler: Euler a", "Seed: 42", "Model: demo"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn both_forms_of_an_option_and_its_last_value_count() {
    let folder = folder("generation-forms");
    draw(&folder, &["-s", "7", "-o", "a.png"]);
    draw(&folder, &["--seed=7", "--output=b.png"]);
    draw(&folder, &["--seed", "1", "-s", "7", "-o", "x.png", "-o", "c.png"]);
    draw(&folder, &["-s", "8", "-o", "d.png"]);
    assert_eq!(files(&folder), ["a.png", "b.png", "c.png", "d.png"]);
    let a = read(&folder, "a.png");
    assert_eq!(read(&folder, "b.png"), a);
    assert_eq!(read(&folder, "c.png"), a);
    assert_ne!(read(&folder, "d.png"), a);
}

#[test]
fn names_sizes_and_formats() {
    let folder = folder("generation-names");
    draw(&folder, &["-b", "2", "-o", "sub/b.png", "--output-begin-idx", "5"]);
    draw(&folder, &["-o", "n_%03d.jpg", "--compression-quality", "40"]);
    draw(&folder, &["-o", "w.webp"]);
    draw(&folder, &["-o", "w.png"]);
    draw(&folder, &["-o", "x.gif", "-W", "60", "-H", "64", "--disable-image-metadata"]);
    assert_eq!(files(&folder), ["n_000.jpg", "sub", "w.png", "w.webp", "x.gif.png"]);
    assert_eq!(files(&folder.join("sub")), ["b_5.png", "b_6.png"]);
    assert!(read(&folder, "n_000.jpg").starts_with(&[0xff, 0xd8, 0xff]));
    let [webp, png] = ["w.webp", "w.png"].map(|name| read(&folder, name));
    assert_eq!((&webp[..4], &webp[8..12]), (&b"RIFF"[..], &b"WEBP"[..]));
    assert_eq!(Image::decode(&webp).unwrap(), Image::decode(&png).unwrap(), "WebP is without loss");
    assert_eq!(read_parameters(&webp), read_parameters(&png));
    let second = read(&folder.join("sub"), "b_6.png");
    assert!(read_parameters(&second).unwrap().contains("Seed: 43"));

    let plain = read(&folder, "x.gif.png");
    assert!(read_parameters(&plain).is_none());
    // Width and height stand after the signature, the chunk's length and its name.
    let side = |at: usize| u32::from_be_bytes(plain[at..at + 4].try_into().unwrap());
    assert_eq!((side(16), side(20)), (64, 64), "60 is rounded up");
}

#[test]
fn a_prompt_file_replaces_the_prompt_unless_the_prompt_comes_later() {
    let folder = folder("generation-prompt-file");
    std::fs::write(folder.join("p.txt"), "a blue square\n").unwrap();
    std::fs::write(folder.join("n.txt"), "ugly").unwrap();
    draw(&folder, &["--prompt-file", "p.txt", "--negative-prompt-file", "n.txt", "-o", "a.png"]);
    draw(&folder, &["--prompt-file", "p.txt", "-p", "a green ring", "-o", "b.png"]);
    let text = read_parameters(&read(&folder, "a.png")).unwrap();
    assert!(text.starts_with("a blue square\n") && text.contains("\nNegative prompt: ugly\n"), "{text}");
    assert!(read_parameters(&read(&folder, "b.png")).unwrap().starts_with("a green ring\n"));

    std::fs::write(folder.join("p.txt"), [0xff, 0xfe]).unwrap();
    let run = sd_cli(&folder, &["--prompt-file", "p.txt"]);
    assert!(run.code == Some(1) && run.stderr.contains("--prompt-file p.txt"), "{}", run.stderr);
}

#[test]
fn a_random_seed_is_recorded() {
    let folder = folder("generation-seed");
    draw(&folder, &["-s", "-1"]);
    let text = read_parameters(&read(&folder, "output.png")).unwrap();
    let seed = text.split("Seed: ").nth(1).unwrap().split(',').next().unwrap();
    assert!(seed.parse::<i64>().unwrap() >= 0, "{seed}");
    draw(&folder, &["-s", seed, "-o", "again.png"]);
    assert_eq!(read(&folder, "output.png"), read(&folder, "again.png"));
}

#[test]
fn log_levels_say_more_or_less() {
    let folder = folder("generation-levels");
    let verbose = draw(&folder, &["-v"]).stderr;
    assert!(verbose.contains("[VERBOSE] "), "{verbose}");
    let quiet = draw(&folder, &["-v", "--log-level", "error"]).stderr;
    assert!(!quiet.contains('['), "{quiet}");
    let loud = draw(&folder, &["--log-level", "error", "-v", "--color"]).stderr;
    assert!(loud.contains("\x1b[1;34m[INFO   ]\x1b[0m "), "{loud:?}");
}

/// A signal while the pictures are drawn: what is finished stays, nothing half-written does.
#[cfg(unix)]
#[test]
fn signals_stop_without_leaving_half_a_file() {
    stop_by("INT");
    stop_by("TERM");
}

#[cfg(unix)]
fn stop_by(signal: &str) {
    use std::io::{BufRead, BufReader, Read};
    use std::process::{Command, Stdio};

    let folder = folder(&format!("generation-{signal}"));
    let mut child = Command::new(env!("CARGO_BIN_EXE_sd-cli"))
        .args(["-p", "a red circle", "--steps", "2", "-W", "64", "-H", "64", "-b", "1000", "-t", "1"])
        .current_dir(&folder)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut log = BufReader::new(child.stderr.take().unwrap());
    let mut text = String::new();
    while !text.contains("wrote output_0.png") {
        assert_ne!(log.read_line(&mut text).unwrap(), 0, "{text}");
    }
    assert!(Command::new("sh").arg("-c").arg(format!("kill -{signal} {}", child.id())).status().unwrap().success());
    log.read_to_string(&mut text).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(1), "{text}");
    assert!(text.contains("cancelled"), "{text}");

    let written = text.matches("wrote ").count();
    let names = files(&folder);
    assert_eq!(names.len(), written, "{names:?}");
    for name in names {
        let bytes = std::fs::read(folder.join(&name)).unwrap();
        assert!(bytes.starts_with(b"\x89PNG") && bytes.ends_with(b"IEND\xaeB`\x82"), "{name} is not whole");
    }
}
