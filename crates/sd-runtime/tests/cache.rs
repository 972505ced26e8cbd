//! Converted weights that are kept in files.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod support;

use std::path::{Path, PathBuf};

use sd_core::DType;
use sd_runtime::{Engine, EngineBuilder, ImageRequest};
use support::one;

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo.safetensors");

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    if folder.exists() {
        std::fs::remove_dir_all(&folder).unwrap();
    }
    folder
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    files
}

fn builder(model: &Path, dtype: DType) -> EngineBuilder {
    Engine::builder().model(model).device("cpu").threads(1).weight_type(dtype)
}

fn request() -> ImageRequest {
    ImageRequest {
        prompt: "a red circle".into(),
        width: Some(64),
        height: Some(64),
        steps: Some(2),
        ..Default::default()
    }
}

#[test]
fn a_kept_conversion_gives_the_same_picture_and_is_used_again() {
    let folder = folder("cache-kept");
    let model = Path::new(DEMO);
    let want = one(builder(model, DType::Q8_0), &request());
    let cached = || builder(model, DType::Q8_0).cache_folder(&folder);
    assert!(one(cached(), &request()).rgb == want.rgb);
    let made = files(&folder);
    assert_eq!(made.len(), 2, "the text encoder and the network: {made:?}");
    let times =
        |files: &[PathBuf]| files.iter().map(|f| f.metadata().unwrap().modified().unwrap()).collect::<Vec<_>>();
    let before = times(&made);
    assert!(one(cached(), &request()).rgb == want.rgb);
    assert_eq!(times(&files(&folder)), before, "nothing is written again");

    // Another type has files of its own, and what is not converted has none.
    one(builder(model, DType::Q4_0).cache_folder(&folder), &request());
    assert_eq!(files(&folder).len(), 4);
    one(builder(model, DType::F16).cache_folder(&folder), &request());
    assert_eq!(files(&folder).len(), 4);

    // A damaged file is made again.
    std::fs::write(&made[0], b"GGUF").unwrap();
    assert!(one(cached(), &request()).rgb == want.rgb);
    assert!(made[0].metadata().unwrap().len() > 100_000);
}

#[test]
fn a_changed_checkpoint_is_converted_again() {
    let folder = folder("cache-changed");
    std::fs::create_dir_all(&folder).unwrap();
    let model = folder.join("model.safetensors");
    let kept = folder.join("kept");
    let run = || one(builder(&model, DType::Q8_0).cache_folder(&kept), &request()).rgb;
    std::fs::copy(DEMO, &model).unwrap();
    let first = run();
    let mut bytes = std::fs::read(DEMO).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle / 2..middle + middle / 2].fill(0);
    std::fs::write(&model, &bytes).unwrap();
    let second = run();
    assert!(second == one(builder(&model, DType::Q8_0), &request()).rgb);
    assert!(first != second);
}

#[test]
fn a_folder_that_cannot_be_written_is_an_error() {
    let e = builder(Path::new(DEMO), DType::Q8_0).cache_folder(Path::new(DEMO).join("x")).build().unwrap_err();
    assert!(e.to_string().contains("demo.safetensors"), "{e}");
}
