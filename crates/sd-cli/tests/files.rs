//! `-M convert` and `--model-info` on the demo model.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod support;

use support::{DEMO, files, folder, sd_cli};

#[test]
fn a_converted_model_is_described_and_draws() {
    let dir = folder("convert");
    let run = sd_cli(&dir, &["-M", "convert", "-m", DEMO, "-o", "demo.gguf", "--type", "q8_0"]);
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    assert!(run.stderr.contains("wrote demo.gguf") && run.stderr.contains("MB/s"), "{}", run.stderr);

    let run = sd_cli(&dir, &["--model-info", "demo.gguf"]);
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    for part in ["file      demo.gguf (gguf, ", "is        SD 1.x", " q8_0 ", "VAE: ", "defaults  "] {
        assert!(run.stdout.contains(part), "{part}: {}", run.stdout);
    }
    assert!(!run.stdout.contains("missing") && !run.stdout.contains("problem"), "{}", run.stdout);
    assert_eq!(sd_cli(&dir, &["-m", "demo.gguf", "--model-info"]).stdout, run.stdout);

    let run = sd_cli(&dir, &["-m", "demo.gguf", "-p", "a red circle", "--steps", "1", "-o", "a.png"]);
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    assert_eq!(files(&dir), ["a.png", "demo.gguf"]);
}

#[test]
fn what_is_loaded_is_told() {
    let dir = folder("load-report");
    let args =
        ["-v", "-m", DEMO, "-p", "a star", "--steps", "1", "--type", "q8_0", "-o", "a.png", "--backend", "cpu"];
    let run = sd_cli(&dir, &args);
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    for part in [
        "demo.safetensors: safetensors, 480 tensors, SD 1.x by model.diffusion_model.input_blocks.0.0.weight [64, 4, 3, 3]",
        "diffusion network: weights in memory: ",
        " f16 as q8_0, ",
        "CLIP text encoder: weights in memory: ",
        "f8_e4m3 as q8_0, ",
        "VAE: weights in memory: ",
    ] {
        assert!(run.stderr.contains(part), "{part}: {}", run.stderr);
    }
}

#[test]
fn missing_parts_are_no_error_of_model_info() {
    let dir = folder("model-info");
    let run = sd_cli(&dir, &["--diffusion-model", DEMO, "--model-info"]);
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    assert!(run.stdout.contains("given with --diffusion-model"), "{}", run.stdout);
    let run = sd_cli(&dir, &["--model-info", "absent.gguf"]);
    assert_eq!(run.code, Some(1), "{}", run.stdout);
    assert!(run.stderr.contains("absent.gguf"), "{}", run.stderr);
    assert_eq!(sd_cli(&dir, &["--model-info"]).code, Some(1));
}

#[test]
fn conversions_that_make_no_sense_are_refused() {
    let dir = folder("convert-refused");
    for (args, want) in [
        (&["-M", "convert", "-m", DEMO][..], "--output output.png: want a .gguf or .safetensors file"),
        (&["-M", "convert", "-o", "a.gguf"], "nothing to convert"),
        (&["-M", "convert", "-m", DEMO, "-o", "a.gguf", "--tensor-type-rules", "x"], "--tensor-type-rules"),
        (&["-M", "convert", "-m", DEMO, "-o", "a.safetensors", "--type", "q8_0"], "cannot hold q8_0"),
        (&["-p", "a star", "--tensor-type-rules", "x=f16"], "with -M convert only"),
    ] {
        let run = sd_cli(&dir, args);
        assert_eq!(run.code, Some(1), "{args:?}");
        assert!(run.stderr.contains(want), "{args:?}: {}", run.stderr);
    }
    assert_eq!(files(&dir), Vec::<String>::new());
}

#[test]
fn importance_is_collected_continued_and_used() {
    let dir = folder("importance");
    let draw =
        |args: &[&str]| sd_cli(&dir, &[&["-p", "a red circle", "--steps", "1", "-o", "a.png"], args].concat());
    let to_two_bits = ["-M", "convert", "-m", DEMO, "-o", "two.gguf", "--type", "iq2_xxs"];
    let run = sd_cli(&dir, &to_two_bits);
    assert_eq!(run.code, Some(1));
    assert!(run.stderr.contains("iq2_xxs wants to know which columns matter"), "{}", run.stderr);
    assert!(run.stderr.contains("--imat-in"), "{}", run.stderr);

    let run = draw(&["--imat-out", "one.dat"]);
    assert!(run.code == Some(0) && run.stderr.contains("wrote one.dat: the importance"), "{}", run.stderr);
    let first = std::fs::read(dir.join("a.png")).unwrap();
    let run = draw(&[]);
    assert_eq!((run.code, std::fs::read(dir.join("a.png")).unwrap()), (Some(0), first));
    let run = draw(&["--imat-in", "one.dat", "--imat-out", "two.dat"]);
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    // Twice the calls, hence twice the values, and the same length.
    let [one, two] = ["one.dat", "two.dat"].map(|n| std::fs::read(dir.join(n)).unwrap());
    let last = |bytes: &[u8]| bytes.last_chunk::<4>().map(|b| u32::from_le_bytes(*b)).unwrap();
    assert_eq!((one.len(), 2 * last(&one)), (two.len(), last(&two)));
    assert!(draw(&["--imat-out", "one.dat"]).stderr.contains("one.dat is there already"));

    let run = sd_cli(&dir, &[&to_two_bits[..], &["--imat-in", "one.dat", "--imat-in", "two.dat"]].concat());
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    assert!(run.stderr.contains("quantised with regard to the importance"), "{}", run.stderr);
    let run = sd_cli(&dir, &["-m", "two.gguf", "-p", "a red circle", "--steps", "1", "-o", "b.png"]);
    assert_eq!(run.code, Some(0), "{}", run.stderr);

    for (args, want) in
        [(&["--imat-in", "absent.dat"][..], "absent.dat"), (&["--imat-in", "a.png"], "a.png: no importance matrix")]
    {
        let run = sd_cli(&dir, &[&to_two_bits[..], args].concat());
        assert!(run.code == Some(1) && run.stderr.contains(want), "{want}: {}", run.stderr);
        let run = draw(&[args, &["--imat-out", "c.dat"]].concat());
        assert!(run.code == Some(1) && run.stderr.contains(want), "{want}: {}", run.stderr);
    }
    assert!(draw(&["--imat-in", "one.dat"]).stderr.contains("says nothing without --imat-out"));
    assert_eq!(files(&dir), ["a.png", "b.png", "one.dat", "two.dat", "two.gguf"]);
}
