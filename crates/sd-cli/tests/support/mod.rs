//! Runs the built program.

#![allow(dead_code)] // each test file uses its part

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The demo model as it is committed.
pub(crate) const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo.safetensors");

/// How a run ended.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Runs `sd-cli` with `args` in `folder` and without a terminal. Tests run side by side, so each run gets one thread.
pub(crate) fn sd_cli(folder: &Path, args: &[&str]) -> Run {
    let out = Command::new(env!("CARGO_BIN_EXE_sd-cli"))
        .args(["--threads", "1"])
        .args(args)
        .current_dir(folder)
        .env_remove("RUST_BACKTRACE")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Run { code: out.status.code(), stdout: text(out.stdout), stderr: text(out.stderr) }
}

/// An empty folder of this name, for the files of one test.
pub(crate) fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    match std::fs::remove_dir_all(&folder) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => panic!("{}: {e}", folder.display()),
        _ => std::fs::create_dir_all(&folder).unwrap(),
    }
    folder
}

/// Names of the files in a folder, sorted.
pub(crate) fn files(folder: &Path) -> Vec<String> {
    let names = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

/// Writes an upscaler of zeros, which repeats every pixel twice along each axis.
pub(crate) fn doubler(path: &Path) {
    zeros(
        path,
        &[
            ("body.0.weight", &[4, 3, 3, 3]),
            ("body.0.bias", &[4]),
            ("body.1.weight", &[4]),
            ("body.2.weight", &[12, 4, 3, 3]),
            ("body.2.bias", &[12]),
        ],
    );
}

/// Writes a safetensors file, which is a length, a JSON header and the elements.
pub(crate) fn zeros(path: &Path, tensors: &[(&str, &[usize])]) {
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    for (name, shape) in tensors {
        let begin = end;
        end += 4 * shape.iter().product::<usize>();
        let tensor = serde_json::json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, end]});
        header.insert((*name).to_owned(), tensor);
    }
    let header = serde_json::Value::from(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.bytes());
    file.resize(file.len() + end, 0);
    std::fs::write(path, file).unwrap();
}
