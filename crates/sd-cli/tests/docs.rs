//! The commands of the documentation run as they stand, with fewer steps, where they need no model that is not here.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod support;

use std::path::{Path, PathBuf};
use support::{doubler, folder, sd_cli, tiny_decoder};

/// Options that name a model, or a part of one.
const MODELS: &[&str] = &["-m", "--model", "--diffusion-model", "--control-net", "--refiner", "--vae"];

/// The lines of all blocks of commands that begin with `sd-cli`, those that go on joined.
fn commands(page: &str) -> Vec<String> {
    let (mut inside, mut commands, mut line) = (false, Vec::new(), String::new());
    for text in page.lines() {
        if text.starts_with("```") {
            inside = text == "```sh";
            continue;
        }
        match text.strip_suffix('\\') {
            Some(begun) => line.push_str(begun),
            None => {
                let whole = std::mem::take(&mut line) + text;
                if inside && whole.starts_with("sd-cli ") {
                    commands.push(whole);
                }
            }
        }
    }
    commands
}

/// The arguments of a command, quotes taken off; nothing of a comment.
fn arguments(command: &str) -> Vec<String> {
    let (mut all, mut word, mut quoted) = (Vec::new(), None::<String>, false);
    for c in command.chars() {
        match c {
            '"' => {
                quoted = !quoted;
                word.get_or_insert_default();
            }
            '#' if !quoted && word.is_none() => break,
            ' ' if !quoted => all.extend(word.take()),
            c => word.get_or_insert_default().push(c),
        }
    }
    all.extend(word);
    all.into_iter().skip(1).collect()
}

fn pages() -> Vec<PathBuf> {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    ["img2img.md", "hires.md", "previews.md", "upscaling.md"].map(|page| docs.join(page)).to_vec()
}

#[test]
fn commands_of_pages_run() {
    let mut run = 0;
    for page in pages() {
        let name = page.file_stem().unwrap().to_str().unwrap();
        let folder = folder(&format!("docs-{name}"));
        doubler(&folder.join("RealESRGAN_x4plus.pth"));
        tiny_decoder(&folder.join("taesd_decoder.pth"));
        let photo = sd_io::Image::new(40, 30, vec![90; 40 * 30 * 3]).unwrap();
        photo.save(folder.join("photo.png"), 90, None).unwrap();
        for command in commands(&std::fs::read_to_string(&page).unwrap()) {
            let arguments = arguments(&command);
            if arguments.iter().any(|a| MODELS.contains(&a.as_str())) {
                continue;
            }
            let output = arguments.iter().position(|a| a == "-o").map(|at| arguments[at + 1].clone()).unwrap();
            let mut arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            arguments.extend(["--steps", "2"]);
            let done = sd_cli(&folder, &arguments);
            assert_eq!(done.code, Some(0), "{name}: {command}\n{}", done.stderr);
            assert!(folder.join(&output).is_file(), "{name}: {command} wrote no {output}");
            run += 1;
        }
    }
    assert!(run >= 12, "{run} commands");
    let previews = Path::new(env!("CARGO_TARGET_TMPDIR")).join("docs-previews");
    for step in ["step-00.png", "step-01.png", "preview.png"] {
        assert!(previews.join(step).is_file(), "{step}");
    }
}
