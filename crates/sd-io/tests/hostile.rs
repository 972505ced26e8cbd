//! Broken files: each must give an error that names the file and says what is wrong; none may panic or allocate
//! by a number it claims.
#![allow(clippy::unwrap_used, clippy::panic)] // helpers outside of test functions

mod common;

use std::path::Path;

use common::{Dir, Gguf, safetensors};
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

#[test]
fn files_of_no_known_kind() {
    let random = [0xd4, 0x1d, 0x8c, 0xd9, 0x8f, 0x00, 0xb2, 0x04, 0xe9, 0x80, 0x09, 0x98, 0xec, 0xf8, 0x42, 0x7e];
    let lfs = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 4265380512\n";
    check(vec![
        ("empty", vec![], &["the file is empty"]),
        ("random", random.to_vec(), &["not a model file: expected GGUF, safetensors", "16 bytes", "d4 1d 8c d9"]),
        ("short", vec![1, 2, 3], &["not a model file", "3 bytes starting with 01 02 03"]),
        ("zeros", vec![0; 4096], &["not a model file"]),
        (
            "length and junk",
            [&4u64.to_le_bytes()[..], b"\x01\x02\x03\x04", &[0; 64]].concat(),
            &["not a model file"],
        ),
        ("lfs", lfs.into(), &["Git LFS pointer", "git lfs pull"]),
        ("html", b"\n<!DOCTYPE html><html><body>Sign in</body></html>".to_vec(), &["is a web page"]),
        ("xml", b"<?xml version=\"1.0\"?><Error>AccessDenied</Error>".to_vec(), &["is a web page"]),
        (
            "zip",
            b"PK\x03\x04\x00\x00\x08\x08archive/data.pkl".to_vec(),
            &["PyTorch checkpoint (zip)", "convert it to safetensors"],
        ),
        (
            "pickle",
            b"\x80\x02\x8a\x0al\xfc\x9c\x46\xf9 j\xa8P\x19.".to_vec(),
            &["PyTorch checkpoint (pickle)", "convert it"],
        ),
        ("json", b"{\"a\": 1}".to_vec(), &["not a safetensors index", "missing field `weight_map`"]),
        (
            "json list",
            b"{\"weight_map\": [1]}".to_vec(),
            &["not a safetensors index", "gives each tensor a file name"],
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
    assert!(message.contains("no model in this folder") && message.contains("give a model file"), "{message}");
    dir.write("sd15.gguf", b"");
    let message = error(dir.path());
    assert!(message.contains("it holds sd15.gguf"), "{message}");
    #[cfg(unix)]
    assert!(error(Path::new("/dev/null")).contains("not a regular file"));
}

/// A safetensors file whose only tensor, called `w`, has this description, over 16 bytes of data.
fn tensor(info: &str) -> Vec<u8> {
    safetensors(&format!("{{\"w\":{{{info}}}}}"), &[0; 16])
}

#[test]
fn safetensors_headers() {
    let ok = r#""dtype":"F32","shape":[4],"data_offsets":[0,16]"#;
    let deep = |open: &str, close: &str, before: &str, after: &str| {
        safetensors(&format!("{before}{}{}{after}", open.repeat(10_000), close.repeat(10_000)), &[])
    };
    let mut huge = (200u64 << 20).to_le_bytes().to_vec();
    huge.extend_from_slice(b"{}");
    let mut endless = u64::MAX.to_le_bytes().to_vec();
    endless.extend_from_slice(b"{}");
    let mut cut = tensor(ok);
    cut.truncate(20);
    let mut latin = safetensors("{\"w?\":{}}", &[]);
    latin[11] = 0xe9;
    let long_name = format!("{{\"{}\":7}}", "n".repeat(50_000));
    let long_type = format!(r#"{{"w":{{"dtype":"{}","shape":[4],"data_offsets":[0,16]}}}}"#, "T".repeat(50_000));
    let long_value = format!(r#"{{"w":"{}"}}"#, "v".repeat(50_000));
    check(vec![
        ("length past the end", huge, &["header of 209715200 bytes does not fit in the 2 that follow"]),
        ("length of all ones", endless, &["header of 18446744073709551615 bytes does not fit"]),
        ("header cut off", cut, &["header of", "does not fit in the 12 that follow"]),
        ("not UTF-8", latin, &["header is not UTF-8"]),
        ("not JSON", safetensors("{\"w\":", &[]), &["header: ", "EOF"]),
        ("text after the JSON", safetensors("{}x", &[]), &["header: trailing characters"]),
        ("deep arrays", deep("[", "]", "{\"w\":", "}"), &["header: tensor w: invalid type: sequence"]),
        ("deep objects", deep("{\"a\":", "}", "", ""), &["header: tensor a"]),
        (
            "deep in a tensor",
            deep("[", "]", "{\"w\":{\"shape\":", "}}"),
            &["header: tensor w: invalid type: sequence"],
        ),
        (
            "deep in metadata",
            deep("[", "]", "{\"__metadata__\":{\"k\":", "}}"),
            &["__metadata__: k: invalid type: sequence"],
        ),
        ("deep and ignored", deep("[", "]", "{\"w\":{\"extra\":", "}}"), &["header: tensor w: missing field"]),
        (
            "metadata twice",
            safetensors(r#"{"__metadata__":{},"__metadata__":{}}"#, &[]),
            &["__metadata__ appears twice"],
        ),
        (
            "metadata key twice",
            safetensors(r#"{"__metadata__":{"k":"1","k":"2"}}"#, &[]),
            &["metadata key k appears twice"],
        ),
        (
            "metadata is a list",
            safetensors(r#"{"__metadata__":[]}"#, &[]),
            &["__metadata__: invalid type: sequence"],
        ),
        ("tensor is a number", safetensors(&long_name, &[]), &["tensor nnn", "invalid type: integer `7`"]),
        ("tensor is a long string", safetensors(&long_value, &[]), &["tensor w: invalid type: string"]),
        ("type with a long name", safetensors(&long_type, &[0; 16]), &["tensor w: dtype TTT", "is not supported"]),
    ]);
}

#[test]
fn safetensors_tensors() {
    let two = |a: &str, b: &str, bytes: usize| {
        let t = |o: &str| format!(r#"{{"dtype":"U8","shape":[8],"data_offsets":{o}}}"#);
        safetensors(&format!(r#"{{"a":{},"b":{}}}"#, t(a), t(b)), &vec![0; bytes])
    };
    let twice = r#"{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"w":{"dtype":"I8","shape":[1],"data_offsets":[1,2]}}"#;
    check(vec![
        ("no dtype", tensor(r#""shape":[4],"data_offsets":[0,16]"#), &["tensor w: missing field `dtype`"]),
        ("no shape", tensor(r#""dtype":"F32","data_offsets":[0,16]"#), &["tensor w: missing field `shape`"]),
        ("no offsets", tensor(r#""dtype":"F32","shape":[4]"#), &["tensor w: missing field `data_offsets`"]),
        (
            "shape twice",
            tensor(r#""dtype":"F32","shape":[4],"shape":[4],"data_offsets":[0,16]"#),
            &["tensor w: shape appears twice"],
        ),
        (
            "unknown dtype",
            tensor(r#""dtype":"F7","shape":[4],"data_offsets":[0,16]"#),
            &["tensor w: dtype F7 is not supported"],
        ),
        (
            "U32",
            tensor(r#""dtype":"U32","shape":[4],"data_offsets":[0,16]"#),
            &["tensor w: dtype U32 is not supported, only F64"],
        ),
        (
            "six axes",
            tensor(r#""dtype":"F32","shape":[1,1,1,1,1,4],"data_offsets":[0,16]"#),
            &["tensor w: 6 axes, at most 5"],
        ),
        (
            "million axes",
            tensor(&format!(r#""dtype":"U8","shape":[{}16],"data_offsets":[0,16]"#, "1,".repeat(1_000_000))),
            &["tensor w: 1000001 axes"],
        ),
        (
            "negative axis",
            tensor(r#""dtype":"F32","shape":[-4],"data_offsets":[0,16]"#),
            &["tensor w: invalid value: integer `-4`"],
        ),
        (
            "fractional axis",
            tensor(r#""dtype":"F32","shape":[4.5],"data_offsets":[0,16]"#),
            &["tensor w: invalid type: floating point"],
        ),
        (
            "product wraps",
            tensor(r#""dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,16]"#),
            &["tensor w: the product of [4294967296, 4294967296] does not fit"],
        ),
        (
            "size wraps",
            tensor(r#""dtype":"F64","shape":[4611686018427387904],"data_offsets":[0,16]"#),
            &["tensor w: the size of [4611686018427387904] f64 does not fit"],
        ),
        (
            "reversed offsets",
            tensor(r#""dtype":"F32","shape":[4],"data_offsets":[16,0]"#),
            &["tensor w: data_offsets [16, 0] are reversed"],
        ),
        (
            "offsets past the end",
            tensor(r#""dtype":"F32","shape":[4],"data_offsets":[8,24]"#),
            &["tensor w: data_offsets [8, 24] leave the 16 bytes", "cut off"],
        ),
        (
            "offsets of all ones",
            tensor(r#""dtype":"F32","shape":[4],"data_offsets":[18446744073709551600,18446744073709551615]"#),
            &["tensor w: data_offsets", "leave the 16 bytes"],
        ),
        (
            "offsets too large",
            tensor(r#""dtype":"F32","shape":[4],"data_offsets":[0,18446744073709551616]"#),
            &["tensor w: invalid type: floating point"],
        ),
        ("three offsets", tensor(r#""dtype":"F32","shape":[4],"data_offsets":[0,8,16]"#), &["tensor w:"]),
        (
            "too few bytes",
            tensor(r#""dtype":"F64","shape":[4],"data_offsets":[0,16]"#),
            &["tensor w: [4] f64 takes 32 bytes, data_offsets [0, 16] hold 16"],
        ),
        (
            "too many bytes",
            tensor(r#""dtype":"F16","shape":[4],"data_offsets":[0,16]"#),
            &["tensor w: [4] f16 takes 8 bytes"],
        ),
        ("name twice", safetensors(twice, &[0; 2]), &["tensor w appears twice: [1] u8 and [1] i8"]),
        ("overlap", two("[0,8]", "[4,12]", 12), &["tensor b at bytes", "overlaps tensor a"]),
        ("same bytes", two("[0,8]", "[0,8]", 8), &["overlaps tensor"]),
        ("hole", two("[0,8]", "[12,20]", 20), &["4 unused bytes before tensor b"]),
        ("hole at the start", two("[16,24]", "[8,16]", 24), &["8 unused bytes before tensor b"]),
        ("bytes left over", two("[8,16]", "[0,8]", 19), &["3 unused bytes after the last tensor"]),
        (
            "data cut off",
            two("[0,8]", "[8,16]", 10),
            &["tensor b: data_offsets [8, 16] leave the 10 bytes of data"],
        ),
    ]);
}

/// One small good file of each format.
fn good() -> [Vec<u8>; 2] {
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
    [safetensors(json, &[1; 16]), gguf.0]
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
            for value in 0..=255 {
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
    assert!(refused > 10_000);
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

#[test]
fn gguf_headers() {
    let g = Gguf::new;
    let mut swapped = b"GGUF".to_vec();
    swapped.extend_from_slice(&3u32.to_be_bytes());
    swapped.extend_from_slice(&[0; 16]);
    let nested = |depth: usize| {
        let mut f = g(3, 0, 1).str("k").u32(9);
        for _ in 0..depth {
            f = f.u32(9).u64(1);
        }
        f.u32(0).u64(1).u8(1).0
    };
    check(vec![
        ("only magic", b"GGUF".to_vec(), &["version takes 4 bytes at byte 4, the file has 0 more"]),
        ("version 1", g(1, 0, 0).0, &["GGUF version 1 is not supported"]),
        ("version 4", g(4, 0, 0).0, &["GGUF version 4 is not known"]),
        ("big endian", swapped, &["big-endian GGUF (version 3)"]),
        ("tensor count", g(3, u64::MAX, 0).0, &["18446744073709551615 tensors do not fit in the 0 bytes"]),
        ("tensor count just too large", g(3, 3, 0).bytes(&[0; 71]).0, &["3 tensors do not fit in the 71 bytes"]),
        ("metadata count", g(3, 0, 1 << 40).0, &["1099511627776 metadata entries do not fit"]),
        (
            "more tensors than any model",
            g(3, 2_000_000, 0).bytes(&vec![0; 48_000_000]).0,
            &["2000000 tensors, at most 1048576"],
        ),
        ("empty key", g(3, 0, 1).str("").u32(4).u32(1).bytes(&[0; 8]).0, &["metadata entry 0 has an empty key"]),
        (
            "key length",
            g(3, 0, 1).u64(u64::MAX).bytes(&[0; 40]).0,
            &["key of metadata entry 0 takes 18446744073709551615 bytes"],
        ),
        ("key not UTF-8", g(3, 0, 1).u64(1).u8(0xff).bytes(&[0; 40]).0, &["key of metadata entry 0 is not UTF-8"]),
        ("key twice", g(3, 0, 2).pair_u32("a", 1).pair_u32("a", 2).0, &["metadata key a appears twice"]),
        ("value type", g(3, 0, 1).str("k").u32(13).u64(0).0, &["metadata k has unknown value type 13"]),
        ("truth value", g(3, 0, 1).str("k").u32(7).u8(2).0, &["metadata k is a truth value of 2"]),
        (
            "string length",
            g(3, 0, 1).str("k").u32(8).u64(1 << 60).0,
            &["metadata k takes 1152921504606846976 bytes"],
        ),
        ("array length", g(3, 0, 1).str("k").u32(9).u32(4).u64(1 << 62).0, &["metadata k takes"]),
        (
            "array length wraps",
            g(3, 0, 1).str("k").u32(9).u32(10).u64((1 << 61) + 1).0,
            &["metadata k takes 18446744073709551615 bytes"],
        ),
        ("strings", g(3, 0, 1).str("k").u32(9).u32(8).u64(1 << 50).0, &["elements of metadata k do not fit"]),
        (
            "array type",
            g(3, 0, 1).str("k").u32(9).u32(77).u64(1).u8(0).0,
            &["metadata k has unknown value type 77"],
        ),
        ("nested arrays", nested(10_000), &["metadata k nests arrays deeper than 4"]),
        ("alignment 0", g(3, 0, 1).pair_u32("general.alignment", 0).0, &["general.alignment is 0", "power of two"]),
        ("alignment 24", g(3, 0, 1).pair_u32("general.alignment", 24).0, &["general.alignment is 24"]),
        (
            "alignment text",
            g(3, 0, 1).str("general.alignment").u32(8).str("32").0,
            &["general.alignment is not an unsigned"],
        ),
    ]);
}

#[test]
fn gguf_tensors() {
    let one = |ne: &[u64], id: u32, offset: u64| {
        Gguf::new(3, 1, 0).tensor("blk.w", ne, id, offset).align(32).bytes(&[0; 64]).0
    };
    let two = |a: u64, b: u64| {
        Gguf::new(3, 2, 0).tensor("a", &[16], 0, a).tensor("b", &[16], 0, b).align(32).bytes(&[0; 160]).0
    };
    let axes = |n: u32| Gguf::new(3, 1, 0).str("blk.w").u32(n).bytes(&[1; 64]).0;
    let orig = |array: Gguf| array.tensor("w", &[4], 0, 0).align(32).bytes(&[0; 16]).0;
    let orig_key = || Gguf::new(3, 1, 1).str("comfy.gguf.orig_shape.w");
    check(vec![
        ("all axes", axes(u32::MAX), &["tensor blk.w: 4294967295 axes, at most 5"]),
        ("six axes", axes(6), &["tensor blk.w: 6 axes"]),
        (
            "product wraps",
            one(&[1 << 33, 1 << 33], 0, 0),
            &["tensor blk.w: the product of [8589934592, 8589934592] does not fit"],
        ),
        ("product wraps to zero", one(&[1 << 32, 1 << 32], 0, 0), &["tensor blk.w: the product of"]),
        (
            "axis of 2^32",
            one(&[1 << 32], 0, 0),
            &["tensor blk.w: [4294967296] f32 takes 17179869184 bytes", "cut off"],
        ),
        ("axis of all ones", one(&[u64::MAX], 0, 0), &["tensor blk.w: "]),
        ("negative axis", one(&[1 << 63], 0, 0), &["tensor blk.w: "]),
        ("unknown type", one(&[16], 1234, 0), &["tensor blk.w: unknown type 1234"]),
        ("withdrawn type", one(&[32], 31, 0), &["tensor blk.w: type q4_0_4_4 was withdrawn"]),
        (
            "rows that are not blocks",
            one(&[48, 2], 8, 0),
            &["tensor blk.w: rows of [2, 48] are not whole q8_0 blocks of 32"],
        ),
        ("offset not aligned", one(&[4], 0, 8), &["tensor blk.w: offset 8 is not a multiple of the alignment 32"]),
        (
            "offset past the end",
            one(&[4], 0, 64),
            &["tensor blk.w: [4] f32 takes 16 bytes at offset 64 of the data, which has 64"],
        ),
        ("offset wraps", one(&[4], 0, u64::MAX - 31), &["tensor blk.w: [4] f32 takes 16 bytes at offset"]),
        (
            "data cut off",
            one(&[32], 0, 0),
            &["tensor blk.w: [32] f32 takes 128 bytes at offset 0 of the data, which has 64"],
        ),
        ("overlap", two(0, 32), &["tensor b at bytes", "overlaps tensor a"]),
        ("same bytes", two(64, 64), &["overlaps tensor"]),
        (
            "name twice",
            Gguf::new(3, 2, 0).tensor("a", &[1], 0, 0).tensor("a", &[1], 1, 32).align(32).bytes(&[0; 64]).0,
            &["tensor a appears twice: [1] f32 and [1] f16"],
        ),
        (
            "name not UTF-8",
            Gguf::new(3, 1, 0).u64(2).bytes(&[0xc3, 0x28]).bytes(&[0; 64]).0,
            &["name of tensor 0 is not UTF-8"],
        ),
        (
            "name length",
            Gguf::new(3, 1, 0).u64(1 << 63).bytes(&[0; 64]).0,
            &["name of tensor 0 takes 9223372036854775808 bytes"],
        ),
        (
            "original shape of another size",
            orig(orig_key().u32(9).u32(5).u64(2).u32(2).u32(3)),
            &["tensor w: comfy.gguf.orig_shape.w is [2, 3], the file has [4]"],
        ),
        (
            "original shape negative",
            orig(orig_key().u32(9).u32(5).u64(1).u32(u32::MAX)),
            &["tensor w: comfy.gguf.orig_shape.w is not an array"],
        ),
        (
            "original shape is text",
            orig(orig_key().u32(8).str("4")),
            &["tensor w: comfy.gguf.orig_shape.w is not an array"],
        ),
    ]);
}

#[test]
fn indexes_and_folders() {
    let good = safetensors(r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#, &[1, 2]);
    let dir = Dir::new();
    let message = |name: &str, bytes: &[u8]| {
        let e = error(&dir.write(name, bytes));
        assert!(!e.is_empty());
        e
    };
    dir.write("s1.safetensors", &good);
    dir.write("s2.safetensors", &good);
    dir.write("bad.safetensors", [0; 40]);

    let e = message("i.json", br#"{"weight_map":{"a":"s1.safetensors","b":"gone.safetensors"}}"#);
    assert!(e.contains("gone.safetensors") && e.contains("with 1 tensors"), "{e}");
    let e = message("i.json", br#"{"weight_map":{"a":"s1.safetensors","b":"s1.safetensors"}}"#);
    assert!(e.contains("tensor b is not in s1.safetensors"), "{e}");
    let e = message("i.json", br#"{"weight_map":{"a":"bad.safetensors"}}"#);
    assert!(e.contains("bad.safetensors: not a model file"), "{e}");
    let e = message("i.json", br#"{"weight_map":{"a":"i.json"}}"#);
    assert!(e.contains("is an index, not a shard"), "{e}");
    let e = message("i.json", br#"{"weight_map":{"a":"."}}"#);
    assert!(e.contains("not a regular file"), "{e}");
    let e = message("i.json", format!("{{\"x\":{}1", "[".repeat(10_000)).as_bytes());
    assert!(e.contains("not a safetensors index"), "{e}");

    let e = message("m-00002-of-00003.safetensors", &good);
    assert!(e.contains("m-00001-of-00003.safetensors") && e.contains("one of 3 parts"), "{e}");
    dir.write("n-00001-of-00002.safetensors", &good);
    let e = message("n-00002-of-00002.safetensors", &good);
    assert!(e.contains("tensor a is also in") && e.contains("n-00001-of-00002"), "{e}");

    dir.write("p/unet/diffusion_pytorch_model.bin", b"PK\x03\x04");
    let e = error(&dir.path().join("p/unet"));
    assert!(e.contains("diffusion_pytorch_model.bin: recognised as a PyTorch checkpoint"), "{e}");
    dir.write("q/unet/model.safetensors", &good);
    dir.write("q/vae/config.json", "[".repeat(10_000));
    let e = Checkpoint::open(dir.path().join("q")).err().unwrap().to_string();
    assert!(e.contains("config.json: not JSON: recursion limit exceeded"), "{e}");
}
