//! Checks against real files that are too large, or under terms too narrow, to be part of the repository. They lie in
//! a folder `shared` beside it; where that is absent, nothing is checked and the report says so.

use anyhow::{Context, Result, bail, ensure};
use sd_core::WeightSource;
use sd_io::{Checkpoint, read_parameters};
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
    ("weights", checkpoints),
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

/// Every safetensors file opens and the bytes of each tensor can be read; every other file is refused.
fn checkpoints(folder: &Path) -> Result<String> {
    let mut tensors = 0;
    for path in files(folder)? {
        if path.extension().is_none_or(|e| e != "safetensors") {
            ensure!(Checkpoint::open(&path).is_err(), "{} was taken for a checkpoint", path.display());
            continue;
        }
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

/// Pictures written by the A1111 web UI carry parameters that are found, in PNG and in JPEG; pictures of other
/// programs, or damaged ones, are looked at without harm.
fn parameters(folder: &Path) -> Result<String> {
    let mut found = 0;
    for path in files(folder)? {
        let bytes = std::fs::read(&path).with_context(|| format!("read {}", path.display()))?;
        let text = read_parameters(&bytes);
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with("automatic1111_cropped") {
            let text = text.with_context(|| format!("{name} has no parameters"))?;
            ensure!(text.contains("Steps: "), "{name}: {text:?}");
            found += 1;
        }
    }
    ensure!(found > 0, "there was no picture of the A1111 web UI");
    Ok(format!("{found} pictures with parameters"))
}
