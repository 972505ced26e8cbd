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

#[test]
fn a_flipped_byte_is_noticed_wherever_it_is() {
    let folder = folder("cache-flipped");
    let model = Path::new(DEMO);
    let cached = || builder(model, DType::Q8_0).cache_folder(&folder);
    let want = one(cached(), &request());
    let made = files(&folder);
    for file in &made {
        let whole = std::fs::read(file).unwrap();
        for at in (0..5).map(|i| whole.len() / 5 * i + whole.len() / 9).chain([5, 40, whole.len() - 3]) {
            let mut bytes = whole.clone();
            bytes[at] ^= 0x10;
            std::fs::write(file, &bytes).unwrap();
            let drawn = cached()
                .build()
                .and_then(|mut engine| engine.generate(&request(), &mut (), &sd_runtime::CancelToken::new()));
            // What shows in the header is made again; what does not is an error.
            match drawn {
                Ok(images) => assert!(images[0].rgb == want.rgb, "{}, byte {at}", file.display()),
                Err(e) => {
                    let e = e.to_string();
                    assert!(e.contains("is not what was written") && e.contains("delete it"), "{at}: {e}");
                    assert!(e.contains(file.file_name().unwrap().to_str().unwrap()), "{e}");
                }
            }
        }
        std::fs::write(file, &whole).unwrap();
    }
    std::fs::remove_file(&made[0]).unwrap();
    assert!(one(cached(), &request()).rgb == want.rgb);
}

#[test]
fn a_checkpoint_of_the_same_name_size_and_time_is_told_apart() {
    let folder = folder("cache-replaced");
    std::fs::create_dir_all(&folder).unwrap();
    let (model, kept) = (folder.join("model.safetensors"), folder.join("kept"));
    let run = || one(builder(&model, DType::Q8_0).cache_folder(&kept), &request()).rgb;
    std::fs::copy(DEMO, &model).unwrap();
    let time = model.metadata().unwrap().modified().unwrap();
    let first = run();
    let mut bytes = std::fs::read(DEMO).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    // Another training: a little of every value.
    bytes[header..].iter_mut().step_by(2).for_each(|b| *b ^= 0x40);
    std::fs::write(&model, &bytes).unwrap();
    std::fs::File::options().write(true).open(&model).unwrap().set_modified(time).unwrap();
    let second = run();
    assert!(second == one(builder(&model, DType::Q8_0), &request()).rgb && first != second);
    assert_eq!(files(&kept).len(), 4);
}
