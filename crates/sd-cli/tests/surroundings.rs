//! Files and streams around a run that are not as one would wish.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod support;

use std::process::{Command, Stdio};
use support::{files, folder, sd_cli};

#[test]
fn a_prompt_file_is_text_of_a_sensible_length() {
    let folder = folder("surroundings-prompt");
    std::fs::write(folder.join("nul.txt"), "red\0circle").unwrap();
    std::fs::write(folder.join("latin1.txt"), b"caf\xe9").unwrap();
    std::fs::write(folder.join("long.txt"), vec![b'a'; (1 << 16) + 1]).unwrap();
    for (name, part) in [("nul.txt", "NUL"), ("latin1.txt", "UTF-8"), ("long.txt", "more than 65536 bytes")] {
        for option in ["--prompt-file", "--negative-prompt-file"] {
            let run = sd_cli(&folder, &[option, name]);
            assert_eq!(run.code, Some(1), "{name}: {}", run.stderr);
            assert!(run.stderr.contains(&format!("{option} {name}: ")), "{}", run.stderr);
            assert!(run.stderr.contains(part) && !run.stderr.contains("denoising"), "{name}: {}", run.stderr);
        }
    }
    assert_eq!(files(&folder), ["latin1.txt", "long.txt", "nul.txt"]);
}

#[test]
fn an_output_without_a_name_is_refused_before_the_work() {
    let folder = folder("surroundings-nameless");
    for output in ["pictures/", ".png", "/"] {
        let run = sd_cli(&folder, &["-p", "a red circle", "-o", output]);
        assert_eq!(run.code, Some(1), "{output}: {}", run.stderr);
        assert!(run.stderr.contains(&format!("--output: {output} names no file")), "{}", run.stderr);
        assert!(!run.stderr.contains("denoising"), "{}", run.stderr);
    }
    assert_eq!(files(&folder), [""; 0]);
}

#[test]
fn a_missing_model_is_reported_once() {
    let run = sd_cli(&folder("surroundings-missing"), &["-m", "none.safetensors"]);
    assert_eq!(run.code, Some(1));
    assert_eq!(run.stderr.matches("os error 2").count(), 1, "{}", run.stderr);
    assert_eq!(run.stderr.matches("none.safetensors: ").count(), 1, "{}", run.stderr);
}

#[cfg(unix)]
#[test]
fn an_argument_that_is_not_utf_8_is_shown() {
    use std::os::unix::ffi::OsStrExt;
    let command = || Command::new(env!("CARGO_BIN_EXE_sd-cli"));
    let wrong = std::ffi::OsStr::from_bytes(b"a\xff.png");
    for (run, part) in [
        (command().args(["--steps", "1", "-o"]).arg(wrong).output().unwrap(), "'-o a\u{fffd}.png' is not UTF-8"),
        (command().arg(wrong).output().unwrap(), "a\u{fffd}.png"),
    ] {
        let stderr = String::from_utf8(run.stderr).unwrap();
        assert_eq!(run.status.code(), Some(1), "{stderr}");
        assert!(stderr.contains(part), "{stderr}");
    }
}

#[test]
fn a_stderr_that_nobody_reads_does_not_end_the_run() {
    let folder = folder("surroundings-stderr");
    let mut command = Command::new(env!("CARGO_BIN_EXE_sd-cli"));
    command.args(["-p", "a red circle", "--steps", "1", "-W", "64", "-H", "64", "--threads", "1", "-v"]);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let status = command.current_dir(&folder).stdin(Stdio::null()).stderr(writer).status().unwrap();
    assert_eq!(status.code(), Some(0));
    assert_eq!(files(&folder), ["output.png"]);
}
