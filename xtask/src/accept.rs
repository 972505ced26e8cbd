//! Checks against real files that are too large, or under terms too narrow, to be part of the repository. They lie in
//! a folder `shared` beside it; where that is absent, nothing is checked and the report says so.

use anyhow::{Context, Result, bail, ensure};
use sd_core::WeightSource;
use sd_io::{Checkpoint, Generator, read_generation};
use std::path::{Path, PathBuf};

/// Runs every check and returns a line for each.
///
/// # Errors
/// When a file is not read as it should be; the message has all lines.
pub fn run(root: &Path) -> Result<Vec<String>> {
    let data = root.join("../shared/data");
    if !data.is_dir() {
        return Ok(vec![format!("skipped all checks: there is no {}", data.display())]);
    }
    let mut lines = Vec::new();
    let mut failed = 0;
    for (file, check) in CHECKS {
        let path = data.join(file);
        let result =
            if path.exists() { check(&path) } else { Ok(format!("skipped: there is no {}", path.display())) };
        match result {
            Ok(line) => lines.push(format!("{file}: {line}")),
            Err(e) => {
                failed += 1;
                lines.push(format!("{file}: FAILED: {e:#}"));
            }
        }
    }
    if failed > 0 {
        bail!("{failed} checks failed\n{}", lines.join("\n"));
    }
    Ok(lines)
}

type Check = fn(&Path) -> Result<String>;

const CHECKS: &[(&str, Check)] = &[
    ("embeddings", checkpoints),
    ("lora", checkpoints),
    ("lora", crate::lora::numbered),
    ("keytables", crate::lora::key_tables),
    ("keytables", crate::keytables::recognised),
    ("weights", checkpoints),
    ("weights/realesrgan_x4plus_anime_6B_f16.safetensors", crate::upscale::photo),
    ("weights", crate::tiny::photo),
    ("vocab", no_checkpoints),
    ("png-metadata", parameters),
];

fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(folder).with_context(|| format!("read {}", folder.display()))?;
    let mut files = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    files.retain(|path| path.is_file());
    files.sort();
    Ok(files)
}

/// Every file opens and the bytes of each tensor can be read.
fn checkpoints(folder: &Path) -> Result<String> {
    let mut tensors = 0;
    for path in files(folder)? {
        let file = Checkpoint::open(&path)?;
        for name in file.names() {
            let meta = file.meta(name).with_context(|| format!("{name} has no shape"))?;
            let want = meta.dtype.bytes(meta.shape.elements(), meta.shape.last());
            let got = file.bytes(name)?.as_ref().len();
            ensure!(want == Some(got), "{name}: {got} bytes, want {want:?}");
            tensors += 1;
        }
    }
    ensure!(tensors > 0, "no tensors were read");
    Ok(format!("{tensors} tensors read"))
}

/// Files of quite another kind end in an error that names them.
fn no_checkpoints(folder: &Path) -> Result<String> {
    let files = files(folder)?;
    for path in &files {
        let name = path.display().to_string();
        match Checkpoint::open(path) {
            Ok(_) => bail!("{name} was taken for a checkpoint"),
            Err(e) => ensure!(e.to_string().contains(&name), "the error does not name {name}: {e}"),
        }
    }
    Ok(format!("{} files refused", files.len()))
}

/// Pictures of other programs say how they were made; damaged ones are looked at without harm.
fn parameters(folder: &Path) -> Result<String> {
    // (start of the name, program, steps, seed, start of the prompt), as the files show in a text editor.
    let known = [
        ("automatic1111_cropped", Generator::A1111, 15, 235_284_042, "photo of a duck"),
        ("text_after_idat", Generator::A1111, 15, 235_284_042, "photo of a duck"),
        ("fooocus1", Generator::Fooocus, 30, 6_952_411_511_246_973_023, "a smiling goldfish"),
        ("img2img", Generator::ComfyUi, 20, 280_823_642_470_253, "photograph of victorian woman with wings"),
        ("invokeai_sdmeta1", Generator::InvokeAi, 50, 2_980_747_362, "professional full body photo"),
        ("novelai1", Generator::NovelAi, 50, 2_253_955_223, "masterpiece, best quality,  cat"),
    ];
    let mut found = 0;
    for path in files(folder)? {
        let bytes = std::fs::read(&path).with_context(|| format!("read {}", path.display()))?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let made = read_generation(&bytes);
        if let Some((_, program, steps, seed, prompt)) = known.iter().find(|k| name.starts_with(k.0)) {
            let made = made.with_context(|| format!("{name} says nothing"))?;
            let facts = (made.generator, made.steps, made.seed);
            ensure!(facts == (*program, Some(*steps), Some(*seed)), "{name}: {facts:?}");
            ensure!(made.prompt.starts_with(prompt), "{name}: {:?}", made.prompt);
            found += 1;
        } else if name.contains("stealth") {
            let made = made.with_context(|| format!("{name} hides nothing"))?;
            ensure!(made.generator == Generator::A1111 && made.steps.is_some(), "{name}: {made:?}");
            found += 1;
        } else {
            ensure!(made.is_none(), "{name}: {made:?}");
        }
    }
    ensure!(found > 0, "there was no picture of another program");
    Ok(format!("{found} pictures say how they were made"))
}
