//! Runs the scripts that make the fixtures with the public reference implementations.

use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

/// How to run the scripts by hand.
pub const INSTRUCTIONS: &str = "\
The fixtures under oracle/fixtures are committed; making them again needs Python with the packages of
oracle/requirements.txt in an environment of its own:

  python3 -m venv ../oracle-venv && ../oracle-venv/bin/pip install -r oracle/requirements.txt
  cargo xtask oracle --python ../oracle-venv/bin/python

oracle/README.md describes the scripts and the format.";

/// Runs `oracle/all.py`, or only the named scripts (with or without `.py`), and nothing else after one that fails.
///
/// # Errors
/// When a script does not exist, Python cannot be started, or a script fails.
pub fn run(root: &Path, python: &Path, scripts: &[String]) -> Result<()> {
    // A relative interpreter is meant from where the command was typed, not from the repository.
    let python = if python.components().count() > 1 { std::path::absolute(python)? } else { python.to_path_buf() };
    let all = ["all".to_owned()];
    for script in if scripts.is_empty() { &all[..] } else { scripts } {
        let file: PathBuf = root.join("oracle").join(format!("{}.py", script.trim_end_matches(".py")));
        if !file.is_file() {
            bail!("there is no {}", file.display());
        }
        let mut command = Command::new(&python);
        command.arg(&file).current_dir(root).env("HF_HUB_OFFLINE", "1");
        let status = command.status().with_context(|| format!("start {}", python.display()))?;
        if !status.success() {
            bail!("{} ended with {status}", file.display());
        }
    }
    Ok(())
}
