//! Broken files: each must give an error that names the file and says what is wrong; none may panic or allocate
//! by a number it claims.
#![allow(clippy::unwrap_used, clippy::panic)] // helpers outside of test functions

#[path = "../common/mod.rs"]
mod common;
mod folders;
mod gguf;
mod other;
mod safetensors;
mod torch;

use std::path::Path;

use common::{Dir, Gguf, safetensors as safetensors_file};
use sd_core::WeightSource;
use sd_io::{Access, Checkpoint};

/// The error that opening `path` gives, checked to be one line that names the file.
fn error(path: &Path) -> String {
    let mut messages = [Access::Map, Access::Read].map(|access| match Checkpoint::open_with(path, access) {
        Ok(c) => panic!("opened {c:?}"),
        Err(e) => e.to_string(),
    });
    assert_eq!(messages[0], messages[1]);
    let message = std::mem::take(&mut messages[0]);
    let name = path.file_name().unwrap().to_str().unwrap();
    assert!(message.contains(name), "{message:?} does not name {name}");
    assert!(!message.contains('\n') && message.len() < 1500, "{message}");
    message
}

fn check(cases: Vec<(&str, Vec<u8>, &[&str])>) {
    let dir = Dir::new();
    for (name, bytes, wants) in cases {
        let path = dir.write(&format!("{}.safetensors", name.replace(' ', "_")), bytes);
        let message = error(&path);
        for want in wants {
            assert!(message.contains(want), "{name}: {message:?} lacks {want:?}");
        }
    }
}

/// One small good file of each format.
fn good() -> [Vec<u8>; 5] {
    let json = r#"{"__metadata__":{"a":"b"},"w":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}"#;
    let gguf = Gguf::new(3, 1, 3)
        .str("k")
        .u32(9)
        .u32(8)
        .u64(2)
        .str("x")
        .str("yz")
        .pair_u32("general.alignment", 32)
        .str("comfy.gguf.orig_shape.w")
        .u32(9)
        .u32(5)
        .u64(2)
        .u32(2)
        .u32(2)
        .tensor("w", &[4], 0, 0)
        .align(32)
        .bytes(&[1; 16]);
    let mut swapped = b"GGUF".to_vec();
    swapped.extend_from_slice(&3u32.to_be_bytes());
    for n in [1u64, 0, 1] {
        swapped.extend_from_slice(&n.to_be_bytes());
    }
    swapped.push(b'w');
    swapped.extend_from_slice(&1u32.to_be_bytes());
    swapped.extend_from_slice(&2u64.to_be_bytes());
    swapped.extend_from_slice(&[0; 12]);
    swapped.resize(swapped.len().next_multiple_of(32), 0);
    swapped.extend_from_slice(&[1; 8]);
    let pickle = torch::dict(&[("w", torch::tensor("0", 4, 0, &[2, 2], &[1, 2]))]);
    [
        safetensors_file(json, &[1; 16]),
        gguf.0,
        swapped,
        torch::zip(&[("m/data.pkl", &pickle), ("m/data/0", &[1; 16])]),
        torch::legacy(&pickle, &[("0", 4)], &[1; 16]),
    ]
}

#[test]
fn every_truncation_of_a_good_file_is_an_error() {
    let dir = Dir::new();
    for bytes in good() {
        let path = dir.write("cut.bin", &bytes);
        Checkpoint::open(&path).unwrap();
        for len in 0..bytes.len() {
            dir.write("cut.bin", &bytes[..len]);
            error(&path);
        }
    }
}

#[test]
fn a_file_with_any_byte_changed_opens_whole_or_not_at_all() {
    let mut refused = 0;
    for mut bytes in good() {
        for i in 0..bytes.len() {
            let was = bytes[i];
            for value in (0..=255).step_by(5) {
                bytes[i] = value;
                match Checkpoint::from_bytes("changed", bytes.clone().into()) {
                    Err(e) => {
                        assert!(e.to_string().contains("changed: "), "{e}");
                        refused += 1;
                    }
                    Ok(c) => {
                        for name in c.names() {
                            let meta = c.meta(name).unwrap();
                            let want = meta.dtype.bytes(meta.shape.elements(), meta.shape.last());
                            assert_eq!(Some(c.bytes(name).unwrap().len()), want, "{name} with byte {i} at {value}");
                        }
                    }
                }
            }
            bytes[i] = was;
        }
    }
    assert!(refused > 5_000);
}

#[cfg(unix)]
#[test]
fn a_header_of_gigabytes_is_not_read() {
    let dir = Dir::new();
    let path = dir.write("long.gguf", Gguf::new(3, 0, 1).str("k").u32(8).u64(6 << 30).0);
    std::fs::File::options().write(true).open(&path).unwrap().set_len(7 << 30).unwrap();
    assert!(error(&path).contains("the header goes on after 268435456 bytes"));
    let path = dir.write("long.safetensors", [&(6u64 << 30).to_le_bytes()[..], b"{"].concat());
    std::fs::File::options().write(true).open(&path).unwrap().set_len(7 << 30).unwrap();
    assert!(error(&path).contains("header of 6442450944 bytes is longer than the 100000000"));
}
