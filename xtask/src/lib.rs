//! Developer commands. `cargo xtask help` lists them; `tests/` runs the ones that guard the repository.
#![forbid(unsafe_code)]

pub mod accept;
pub mod bench;
pub mod dist;
pub mod files;
mod keytables;
pub mod larger;
mod lora;
pub mod memory;
pub mod networks;
pub mod oracle;
pub mod plot;
pub mod synth;
pub mod tidy;
mod tiny;
mod upscale;

use std::path::{Path, PathBuf};

/// The top folder of the repository this command was built from.
pub fn repo_root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_path_buf()
}
