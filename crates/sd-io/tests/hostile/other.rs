//! Files and paths of no known kind.

use std::path::Path;

use crate::common::Dir;
use crate::{check, error};

#[test]
fn files_of_no_known_kind() {
    let random = [0xd4, 0x1d, 0x8c, 0xd9, 0x8f, 0x00, 0xb2, 0x04, 0xe9, 0x80, 0x09, 0x98, 0xec, 0xf8, 0x42, 0x7e];
    let lfs = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 4265380512\n";
    check(vec![
        ("empty", vec![], &["the file is empty", "download it again"]),
        (
            "random",
            random.to_vec(),
            &["not a model file: expected GGUF, safetensors, a PyTorch", "16 bytes", "d4 1d 8c d9"],
        ),
        ("short", vec![1, 2, 3], &["not a model file", "3 bytes starting with 01 02 03"]),
        ("zeros", vec![0; 4096], &["not a model file: it starts with zeros", "download it again"]),
        ("answer", b"Invalid username or password.\n".to_vec(), &["is text, not a model: Invalid username"]),
        ("hdf5", b"\x89HDF\r\n\x1a\n\0\0".to_vec(), &["is an HDF5 file, as Keras writes"]),
        ("numpy", b"\x93NUMPY\x01\0".to_vec(), &["is a NumPy array"]),
        ("tflite", b"\x1c\0\0\0TFL3".to_vec(), &["is a TensorFlow Lite model"]),
        ("ggjt", b"tjgg\x03\0\0\0".to_vec(), &["is a GGJT file, older than GGUF"]),
        ("gzip", b"\x1f\x8b\x08\0".to_vec(), &["is compressed with gzip", "unpack it"]),
        ("xz", b"\xfd7zXZ\0\0".to_vec(), &["is compressed with xz"]),
        ("7z", b"7z\xbc\xaf\x27\x1c\0".to_vec(), &["is a 7-Zip archive"]),
        ("png", b"\x89PNG\r\n\x1a\n\0\0\0\x0d".to_vec(), &["is a picture (PNG), not a model"]),
        ("elf", b"\x7fELF\x02".to_vec(), &["is a program, not a model"]),
        (
            "length and junk",
            [&4u64.to_le_bytes()[..], b"\x01\x02\x03\x04", &[0; 64]].concat(),
            &["not a model file"],
        ),
        ("lfs", lfs.into(), &["Git LFS pointer", "git lfs pull"]),
        ("html", b"\n<!DOCTYPE html><html><body>Sign in</body></html>".to_vec(), &["is a web page"]),
        ("xml", b"<?xml version=\"1.0\"?><Error>AccessDenied</Error>".to_vec(), &["is a web page"]),
        ("json", b"{\"a\": 1}".to_vec(), &["not an index of shards", "missing field `weight_map`"]),
        (
            "json list",
            b"{\"weight_map\": [1]}".to_vec(),
            &["not an index of shards", "gives each tensor a file name"],
        ),
        (
            "json twice",
            b"{\"weight_map\":{\"a\":\"x\",\"a\":\"y\"}}".to_vec(),
            &["tensor a is listed twice, in x and y"],
        ),
    ]);
}

#[test]
fn paths_without_a_file() {
    let dir = Dir::new();
    let message = error(&dir.path().join("missing.safetensors"));
    assert!(message.contains("No such file") || message.contains("cannot find"), "{message}");
    let message = error(dir.path());
    assert!(
        message.contains("no model in this folder") && message.contains("give a model file, or a folder"),
        "{message}"
    );
    dir.write("sd15.gguf", b"");
    let message = error(dir.path());
    assert!(
        message.contains("it holds sd15.gguf") && message.contains("give one of its files, such as sd15.gguf"),
        "{message}"
    );
    #[cfg(unix)]
    assert!(error(Path::new("/dev/null")).contains("not a regular file"));
}
