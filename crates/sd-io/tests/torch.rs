//! Files of `torch.save`, made by PyTorch itself (`tests/data/make.py`) or put together by hand.
#![allow(clippy::unwrap_used, clippy::panic)] // helpers outside of test functions

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::Dir;
use sd_core::{DType, WeightSource};
use sd_io::{Access, Checkpoint, Format, Value};

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn open(name: &str) -> Checkpoint {
    let c = Checkpoint::open(data(name)).unwrap();
    let read = Checkpoint::open_with(data(name), Access::Read).unwrap();
    assert_eq!((c.format(), c.names()), (Format::Torch, read.names()));
    for name in c.names() {
        assert_eq!(c.bytes(name).unwrap()[..], read.bytes(name).unwrap()[..], "{name}");
    }
    c
}

/// The elements of a tensor as numbers.
fn values(c: &Checkpoint, name: &str) -> Vec<f64> {
    let bytes = c.bytes(name).unwrap();
    match c.meta(name).unwrap().dtype {
        DType::F32 => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b).into()).collect(),
        DType::F64 => bytes.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect(),
        DType::I64 => bytes.as_chunks().0.iter().map(|b| i64::from_le_bytes(*b) as f64).collect(),
        DType::I32 => bytes.as_chunks().0.iter().map(|b| i32::from_le_bytes(*b).into()).collect(),
        DType::I16 => bytes.as_chunks().0.iter().map(|b| i16::from_le_bytes(*b).into()).collect(),
        DType::I8 | DType::U8 | DType::Bool => bytes.iter().map(|b| f64::from(*b)).collect(),
        other => panic!("{name} is {other}"),
    }
}

fn dims(c: &Checkpoint, name: &str) -> Vec<usize> {
    c.meta(name).unwrap().shape.dims().to_vec()
}

#[test]
fn tensors_of_every_type_and_form() {
    for file in ["torch-zip.pt", "torch-legacy.pt"] {
        let c = open(file);
        let up = |n: u32| (0..n).map(f64::from).collect::<Vec<_>>();
        for (name, dtype) in [
            ("f32", DType::F32),
            ("f64", DType::F64),
            ("i64", DType::I64),
            ("i32", DType::I32),
            ("i16", DType::I16),
            ("i8", DType::I8),
            ("u8", DType::U8),
            ("turned", DType::F32),
        ] {
            assert_eq!((c.meta(name).unwrap().dtype, dims(&c, name)), (dtype, vec![2, 3]), "{file} {name}");
            assert_eq!(values(&c, name), up(6), "{file} {name}");
        }
        // 0 to 5 in half and brain floats, by IEEE 754 and by cutting f32.
        let f16 = [0, 0x3c00, 0x4000, 0x4200, 0x4400, 0x4500u16];
        let bf16 = [0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0u16];
        for (name, dtype, want) in [("f16", DType::F16, f16), ("bf16", DType::BF16, bf16)] {
            assert_eq!(c.meta(name).unwrap().dtype, dtype);
            let want: Vec<u8> = want.iter().flat_map(|v| v.to_le_bytes()).collect();
            assert_eq!(c.bytes(name).unwrap()[..], want[..], "{file} {name}");
        }
        assert_eq!(values(&c, "bool"), [0.0, 1.0, 0.0, 1.0, 1.0, 0.0]);
        assert_eq!((dims(&c, "rows"), values(&c, "rows")), (vec![2, 4], (4..12).map(f64::from).collect()));
        assert_eq!((dims(&c, "columns"), values(&c, "columns")), (vec![3, 2], vec![1.0, 2.0, 5.0, 6.0, 9.0, 10.0]));
        assert_eq!((dims(&c, "shared"), values(&c, "shared")), (vec![3, 4], up(12)));
        assert_eq!((dims(&c, "scalar"), values(&c, "scalar")), (vec![], vec![7.0]));
        assert_eq!((dims(&c, "empty"), values(&c, "empty")), (vec![0, 5], vec![]));
        assert_eq!(values(&c, "parameter"), [0.0, 1.0]);
    }
    let c = open("torch-zip.pt");
    // 0 to 5 in E4M3: exponent bias 7, three bits of mantissa.
    assert_eq!(c.meta("f8").unwrap().dtype, DType::F8E4M3);
    assert_eq!(c.bytes("f8").unwrap()[..], [0, 0x38, 0x40, 0x44, 0x48, 0x4a]);
}

#[test]
fn the_layout_before_0_4() {
    let c = open("torch-tar.pt");
    assert_eq!(c.names(), ["w", "v"]);
    assert_eq!((dims(&c, "w"), values(&c, "w")), (vec![2, 3], vec![0.0, 1.0, 2.0, 3.0, 4.0, 5.0]));
    // A view of four elements from the third, stored by columns.
    assert_eq!((dims(&c, "v"), values(&c, "v")), (vec![2, 2], vec![2.0, 4.0, 3.0, 5.0]));
}

#[test]
fn what_a_state_dict_is_wrapped_in() {
    let c = open("torch-bare.pt");
    assert_eq!((c.names(), values(&c, "tensor").len()), (vec!["tensor"], 6));
    let c = open("torch-list.pt");
    assert_eq!((c.names(), values(&c, "1")), (vec!["0", "1"], vec![1.0]));
    let c = open("torch-ema.pth");
    assert_eq!((c.names(), values(&c, "w")), (vec!["w"], vec![2.0, 3.0]));
    let c = open("torch-odd.pt");
    assert_eq!((c.names(), values(&c, "w")), (vec!["w"], vec![0.0, 1.0]));
    for file in ["torch-lightning.ckpt", "torch-lightning-legacy.ckpt"] {
        let c = open(file);
        assert_eq!(c.names(), ["model.diffusion_model.w"]);
        assert_eq!(c.metadata().get("global_step"), Some(&Value::I64(470_000)));
        assert_eq!(c.metadata().str("pytorch-lightning_version"), Some("1.4.2"));
    }
    let c = open("torch-inversion.pt");
    assert_eq!(c.names(), ["string_to_token.*", "string_to_param.*"]);
    assert_eq!((dims(&c, "string_to_param.*"), values(&c, "string_to_token.*")), (vec![2, 4], vec![265.0]));
    assert_eq!(c.metadata().str("name"), Some("my cat"));
    assert_eq!(c.metadata().get("step"), Some(&Value::I64(500)));
}

#[test]
fn files_of_big_endian_machines() {
    let c = open("torch-big-endian.pt");
    assert_eq!(values(&c, "w"), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    assert_eq!(values(&c, "b"), [0.0, 1.0, 2.0, 3.0]);
}

#[test]
fn in_memory_and_in_folders() {
    let bytes = fs::read(data("torch-zip.pt")).unwrap();
    let c = Checkpoint::from_bytes("downloaded", bytes.clone().into()).unwrap();
    assert_eq!(c.origin("f32").file, "downloaded");
    assert_eq!(values(&c, "columns")[2], 5.0);
    let dir = Dir::new();
    dir.write("unet/diffusion_pytorch_model.bin", &bytes);
    dir.write("text_encoder/pytorch_model.fp16.bin", fs::read(data("torch-ema.pth")).unwrap());
    let c = Checkpoint::open(dir.path()).unwrap();
    assert_eq!((c.format(), values(&c, "text_encoder.w")), (Format::Folder, vec![2.0, 3.0]));
    assert_eq!(values(&c, "unet.rows")[0], 4.0);
    // Shards with an index, as transformers writes them.
    let dir = Dir::new();
    dir.write("pytorch_model-00001-of-00002.bin", fs::read(data("torch-ema.pth")).unwrap());
    dir.write("pytorch_model-00002-of-00002.bin", fs::read(data("torch-big-endian.pt")).unwrap());
    let map = r#"{"weight_map":{"w":"pytorch_model-00001-of-00002.bin","b":"pytorch_model-00002-of-00002.bin"}}"#;
    dir.write("pytorch_model.bin.index.json", map);
    let c = Checkpoint::open(dir.path()).unwrap();
    assert_eq!((values(&c, "w"), values(&c, "b").len()), (vec![2.0, 3.0], 4));
}

#[test]
fn nothing_is_run_and_unknown_classes_are_named() {
    let cases = [
        (
            "torch-evil.pt",
            "names posix.system, which is neither a tensor nor plain data; nothing in the file is run",
        ),
        ("torch-evil-legacy.pt", "names posix.system"),
        ("torch-module.pt", "names torch.nn.modules.linear.Linear, which is neither"),
        ("torch-script.pt", "is a TorchScript program, not a checkpoint"),
    ];
    for (name, want) in cases {
        let e = Checkpoint::open(data(name)).err().unwrap().to_string();
        assert!(e.contains(want) && e.contains(name), "{name}: {e}");
    }
}

#[test]
fn a_zip_archive_with_64_bit_numbers() {
    // The archive of PyTorch, its end record replaced by one whose numbers are in the 64-bit record.
    let zip = fs::read(data("torch-ema.pth")).unwrap();
    let end = zip.windows(4).rposition(|w| w == b"PK\x05\x06").unwrap();
    let number = |at: usize, n: usize| zip[at..at + n].iter().rev().fold(0u64, |v, b| v << 8 | u64::from(*b));
    let (count, len, start) = (number(end + 10, 2), number(end + 12, 4), number(end + 16, 4));
    let mut out = zip[..end].to_vec();
    let record = out.len() as u64;
    out.extend_from_slice(b"PK\x06\x06");
    out.extend_from_slice(&44u64.to_le_bytes());
    out.extend_from_slice(&[45, 0, 45, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    for n in [count, count, len, start] {
        out.extend_from_slice(&n.to_le_bytes());
    }
    out.extend_from_slice(b"PK\x06\x07\0\0\0\0");
    out.extend_from_slice(&record.to_le_bytes());
    out.extend_from_slice(&1u32.to_le_bytes());
    out.extend_from_slice(b"PK\x05\x06\0\0\0\0");
    out.extend_from_slice(&[0xff; 12]);
    out.extend_from_slice(&[0, 0]);
    let c = Checkpoint::from_bytes("zip64", out.into()).unwrap();
    assert_eq!(values(&c, "w"), [2.0, 3.0]);
}
