//! What the command line accepts, refuses and prints.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod support;

use std::path::Path;
use support::{files, folder, sd_cli};

fn here(args: &[&str]) -> support::Run {
    sd_cli(Path::new("."), args)
}

#[test]
fn help_version_and_devices_go_to_stdout() {
    for help in ["-h", "--help"] {
        let run = here(&[help]);
        assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""));
        for part in ["Usage: sd-cli", "CLI Options:", "Context Options:", "Generation Options:", "--clip_l <path>"]
        {
            assert!(run.stdout.contains(part), "{help}: {part}");
        }
        assert!(!run.stdout.contains("--mmap"), "options that do not work yet are not offered");
    }
    let run = here(&["--version"]);
    assert_eq!(run.stdout, concat!("sd-rs version ", env!("CARGO_PKG_VERSION"), "\n"));
    assert_eq!(run.code, Some(0));

    let run = here(&["--list-devices"]);
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    let names: Vec<&str> = run.stdout.lines().map(|line| line.split_once('\t').unwrap().0).collect();
    assert!(names.contains(&"CPU"), "{names:?}");
}

/// Every refusal: the arguments, and what the message must contain.
const REFUSED: &[(&[&str], &[&str])] = &[
    (&["--steps", "12abc"], &["--steps", "12abc", "1 to 10000"]),
    (&["--steps=0"], &["--steps", "1 to 10000"]),
    (&["--steps", "4294967297"], &["--steps"]),
    (&["--seed", "1.5"], &["--seed", "1.5", "whole number"]),
    (&["-s", "9223372036854775808"], &["--seed"]),
    (&["-W", "0"], &["--width", "1 to 16384"]),
    (&["-H", "-8"], &["--height", "-8"]),
    (&["-b", "0"], &["--batch-count"]),
    (&["-t", "two"], &["--threads", "two"]),
    (&["--cfg-scale", "nan"], &["--cfg-scale", "0 or more"]),
    (&["--cfg-scale", "-1"], &["--cfg-scale"]),
    (&["--eta", "inf"], &["--eta"]),
    (&["--compression-quality", "101"], &["--compression-quality", "0 to 100"]),
    (&["--sampling-method", "euler_b"], &["--sampling-method", "did you mean euler_a?", "dpm++2m"]),
    (&["--scheduler", "kerras"], &["--scheduler", "did you mean karras?", "discrete"]),
    (&["--rng", "gpu"], &["--rng", "cuda", "cpu"]),
    (&["--sampler-rng", ""], &["--sampler-rng"]),
    (&["--type", "q9_9"], &["--type", "q8_0", "f16"]),
    (&["--type", "q8_K"], &["--type", "q8_K", "q6_K"]),
    (&["--type=i8"], &["--type", "i8", "bf16"]),
    (&["--log-level", "loud"], &["--log-level", "debug", "error"]),
    (&["-M", "vid_gen"], &["--mode", "not supported yet"]),
    (&["--mode=paint"], &["--mode", "no such mode"]),
    (&["-o", ""], &["--output"]),
    (&["--backend", "no-such-device"], &["--backend", "no-such-device", "CPU"]),
    (&["--backend", "lora=cpu"], &["--backend lora=cpu", "\"lora\"", "diffusion, te"]),
    (&["--params-backend", "te=heron7"], &["--params-backend", "heron7", "CPU"]),
    (&["--split-mode", "column"], &["--split-mode column", "layer or row"]),
    (&["--max-vram", "much"], &["--max-vram much", "GiB"]),
    (&["--max-vram", "heron7=1"], &["--max-vram", "heron7", "CPU"]),
    (&["--auto-fit"], &["--auto-fit", "value"]),
    (&["--auto-fit", "maybe"], &["--auto-fit", "on or off"]),
    (&["--rpc-servers", "127.0.0.1:1"], &["--rpc-servers", "127.0.0.1:1"]),
    (&["--prompt-file", "no/such.txt"], &["--prompt-file", "no/such.txt"]),
    (&["--promt", "x"], &["--promt", "--prompt"]),
    (&["--Steps", "3"], &["--Steps"]),
    (&["--prompt"], &["--prompt", "value"]),
    (&["picture.png"], &["picture.png"]),
    (&["--hires", "--hires-scale", "-2"], &["hires.scale", "-2"]),
    (&["--hires", "--hires-upscaler", "4x"], &["--hires-upscaler", "4x", "--hires-upscalers-dir"]),
    (&["--hires", "--hires-upscaler", "4x", "--hires-upscalers-dir", "src"], &["--hires-upscaler", "4x", "src"]),
    (&["--hires-denoising-strength", "2"], &["--hires-denoising-strength", "0 to 1"]),
    (&["--vae-tile-size", "3y4"], &["--vae-tile-size", "XxY"]),
    (&["--vae-tile-overlap", "0.6"], &["--vae-tile-overlap", "0 to 0.5"]),
    (&["-i", "a.png"], &["--init-img", "a.png"]),
    (&["-r", "a.png"], &["--ref-image", "a.png"]),
    (&["--strength", "1.5"], &["--strength", "0 to 1"]),
    (&["--skip-layers", "[7,8"], &["--skip-layers", "bracket"]),
    (&["--sigmas", "3,x"], &["--sigmas", "\"x\""]),
    (&["--timestep-shift", "1001"], &["--timestep-shift", "0 to 1000"]),
    (&["--vae-format", "sd9"], &["--vae-format", "flux", "sd3"]),
    (&["--ref-image-args", "ref_index_mode=up"], &["--ref-image-args", "up", "increase"]),
    (&["--refiner", "none.safetensors"], &["refiner", "none.safetensors"]),
    (&["--control-net", "none.safetensors"], &["none.safetensors"]),
    (&["--cache-mode", "easycach"], &["--cache-mode", "did you mean easycache?", "spectrum"]),
    (&["--cache-mode", "ucache", "--cache-option", "Fn=1"], &["cache_option: ucache has no \"Fn\""]),
    (&["--cache-option", "x=1"], &["--cache-option: there is no --cache-mode"]),
    (&["--scm-mask", "1,2"], &["--scm-mask", "neither 1 nor 0"]),
    (&["--scm-policy", "x"], &["--scm-policy", "dynamic or static"]),
    (&["--control-end", "1.5"], &["--control-end", "0 to 1"]),
    (
        &["--control-net", "a", "--control-image", "a", "--control-strength", "1", "--control-strength", "2"],
        &["--control-strength: given 2 times for 1 of --control-net"],
    ),
    (&["--moe-boundary=x"], &["--moe-boundary is not supported yet"]),
];

#[test]
fn what_is_refused_is_named() {
    let folder = folder("options-refused");
    for (args, parts) in REFUSED {
        let run = sd_cli(&folder, args);
        assert_eq!(run.code, Some(1), "{args:?}: {}", run.stderr);
        assert_eq!(run.stdout, "", "{args:?}");
        for part in *parts {
            assert!(run.stderr.contains(part), "{args:?} should mention {part:?}: {}", run.stderr);
        }
        assert!(!run.stderr.contains("panicked"), "{args:?}: {}", run.stderr);
    }
    assert_eq!(files(&folder), [""; 0]);
}

#[test]
fn an_output_that_is_a_folder_is_refused_before_the_work() {
    let folder = folder("options-folder");
    std::fs::create_dir(folder.join("out.png")).unwrap();
    let run = sd_cli(&folder, &["-p", "a red circle", "-o", "out.png"]);
    assert_eq!(run.code, Some(1));
    assert!(run.stderr.contains("--output: out.png is a folder"), "{}", run.stderr);
    assert!(!run.stderr.contains("denoising"), "{}", run.stderr);
}

/// Nobody can make files there, root included.
#[cfg(target_os = "linux")]
#[test]
fn a_folder_that_cannot_be_written_is_found_before_the_work() {
    let run = sd_cli(&folder("options-unwritable"), &["-p", "a red circle", "-o", "/proc/out.png"]);
    assert_eq!(run.code, Some(1));
    assert!(run.stderr.contains("--output: cannot write in /proc"), "{}", run.stderr);
    assert!(!run.stderr.contains("demo model"), "{}", run.stderr);
}

#[test]
fn a_file_in_the_way_of_a_folder_is_reported() {
    let folder = folder("options-in-the-way");
    std::fs::write(folder.join("file"), "x").unwrap();
    let run = sd_cli(&folder, &["-p", "a red circle", "-o", "file/out.png"]);
    assert_eq!(run.code, Some(1));
    assert!(run.stderr.contains("--output: file is not a folder"), "{}", run.stderr);
    assert_eq!(files(&folder), ["file"]);
}
