//! Rules about the repository that the compiler does not check.
//!
//! [`packages`] reads manifests and `cargo metadata`; [`sources`] reads the files themselves.

pub mod packages;
pub mod sources;
mod spdx;
mod strip;

use anyhow::{Context, Result, bail};
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// One broken rule.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    /// File, relative to the repository root.
    pub file: String,
    /// Line, counted from 1; 0 when the finding is about the whole file.
    pub line: usize,
    /// What is wrong and what to do.
    pub message: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}: {}", self.file, self.message),
            line => write!(f, "{}:{line}: {}", self.file, self.message),
        }
    }
}

/// A finding about a file as a whole.
pub(crate) fn about(file: impl Into<String>, message: impl Into<String>) -> Finding {
    Finding { file: file.into(), line: 0, message: message.into() }
}

/// Checks the repository at `root` and returns what breaks a rule, sorted.
///
/// # Errors
/// When `git` or `cargo metadata` cannot be run or a file cannot be read.
pub fn run(root: &Path) -> Result<Vec<Finding>> {
    let mut found = packages::check(root)?;
    for file in files(root)? {
        let bytes = std::fs::read(root.join(&file)).with_context(|| format!("read {}", file.display()))?;
        if let Ok(text) = String::from_utf8(bytes) {
            let name = file.to_string_lossy().replace('\\', "/");
            found.extend(sources::check(&name, &text));
        }
    }
    found.extend(sources::check_crate_attributes(root)?);
    found.sort();
    Ok(found)
}

/// Every file that is or could be committed, relative to `root`.
fn files(root: &Path) -> Result<Vec<PathBuf>> {
    let out = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root)
        .output()
        .context("run git ls-files")?;
    if !out.status.success() {
        bail!("git ls-files failed in {}: {}", root.display(), String::from_utf8_lossy(&out.stderr));
    }
    let mut files: Vec<PathBuf> = String::from_utf8(out.stdout)
        .context("file names that are not UTF-8")?
        .split('\0')
        .filter(|name| !name.is_empty())
        .map(PathBuf::from)
        .filter(|file| root.join(file).is_file())
        .collect();
    files.sort();
    files.dedup();
    Ok(files)
}
