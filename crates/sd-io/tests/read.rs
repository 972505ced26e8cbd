//! Well-formed checkpoints of every layout.
#![allow(clippy::unwrap_used, clippy::panic)] // helpers outside of test functions

mod common;

use common::{Dir, Gguf, safetensors};
use sd_core::{Bytes, DType, WeightSource};
use sd_io::{Access, Checkpoint, Format, Value};

fn dims(c: &Checkpoint, name: &str) -> Vec<usize> {
    c.meta(name).unwrap().shape.dims().to_vec()
}

#[test]
fn safetensors_of_every_dtype() {
    // Names and sizes as in the table of the format's documentation.
    let types = [
        ("F64", DType::F64, 8),
        ("F32", DType::F32, 4),
        ("F16", DType::F16, 2),
        ("BF16", DType::BF16, 2),
        ("F8_E4M3", DType::F8E4M3, 1),
        ("F8_E5M2", DType::F8E5M2, 1),
        ("I64", DType::I64, 8),
        ("I32", DType::I32, 4),
        ("I16", DType::I16, 2),
        ("I8", DType::I8, 1),
        ("U8", DType::U8, 1),
        ("BOOL", DType::Bool, 1),
        ("F8_E8M0", DType::U8, 1),
    ];
    let dir = Dir::new();
    for (name, dtype, size) in types {
        let data: Vec<u8> = (0..6 * size as u8).collect();
        let json = format!(r#"{{"t":{{"dtype":"{name}","shape":[2,3],"data_offsets":[0,{}]}}}}"#, 6 * size);
        let path = dir.write("a.bin", safetensors(&json, &data));
        for access in [Access::Map, Access::Read] {
            let c = Checkpoint::open_with(&path, access).unwrap();
            assert_eq!((c.format(), c.names()), (Format::Safetensors, vec!["t"]));
            assert_eq!(c.meta("t").unwrap().dtype, dtype, "{name}");
            assert_eq!(dims(&c, "t"), [2, 3]);
            assert_eq!(c.bytes("t").unwrap()[..], data[..], "{name}");
        }
    }
}

#[test]
fn safetensors_metadata_scalars_empties_and_any_names() {
    let json = r#"{"__metadata__":{"format":"pt","n":3},"späß 🙂.\"w\"":{"dtype":"F32","shape":[],"data_offsets":[0,4]},
        "empty":{"dtype":"F16","shape":[0,7],"data_offsets":[4,4]},"b":{"shape":[1,1,1,1,2],"data_offsets":[4,6],"dtype":"U8"}}"#;
    let dir = Dir::new();
    let path = dir.write("x.gguf", safetensors(json, &[0, 0, 128, 63, 8, 9])); // the extension is not believed
    let c = Checkpoint::open(&path).unwrap();
    assert_eq!(c.names(), ["späß 🙂.\"w\"", "empty", "b"]);
    assert_eq!(c.bytes("späß 🙂.\"w\"").unwrap()[..], 1f32.to_le_bytes());
    assert_eq!((dims(&c, "empty"), c.bytes("empty").unwrap().len()), (vec![0, 7], 0));
    assert_eq!((dims(&c, "b"), &c.bytes("b").unwrap()[..]), (vec![1, 1, 1, 1, 2], &[8u8, 9][..]));
    assert_eq!(c.metadata().str("format"), Some("pt"));
    assert_eq!(c.metadata().str("n"), Some("3"));
    assert_eq!(c.origin("b").file, path.display().to_string());
    let e = c.bytes("c").unwrap_err().to_string();
    assert!(e.starts_with("c: missing from ") && e.contains("x.gguf"), "{e}");
}

#[test]
fn safetensors_written_by_the_public_library() {
    use safetensors::tensor::{Dtype, TensorView, serialize};
    let (a, b) = ([1u8; 24], [2u8; 6]);
    let views = [
        ("a", TensorView::new(Dtype::F32, vec![2, 3], &a).unwrap()),
        ("b", TensorView::new(Dtype::BF16, vec![3], &b).unwrap()),
    ];
    let meta = std::collections::HashMap::from([("k".to_owned(), "v\n\"é".to_owned())]);
    let dir = Dir::new();
    let path = dir.write("lib.safetensors", serialize(views, Some(meta)).unwrap());
    let c = Checkpoint::open(&path).unwrap();
    assert_eq!(c.metadata().str("k"), Some("v\n\"é"));
    assert_eq!((dims(&c, "a"), &c.bytes("a").unwrap()[..]), (vec![2, 3], &a[..]));
    assert_eq!((dims(&c, "b"), &c.bytes("b").unwrap()[..]), (vec![3], &b[..]));
}

fn gguf(version: u32) -> Gguf {
    Gguf::new(version, 3, 4)
        .str("general.architecture")
        .u32(8)
        .str("sd1")
        .pair_u32("general.alignment", 64)
        .str("comfy.gguf.orig_shape.conv")
        .u32(9)
        .u32(5)
        .u64(4)
        .u32(2)
        .u32(4)
        .u32(2)
        .u32(2)
        .str("pi")
        .u32(6)
        .f32(3.25)
        .tensor("lin.weight", &[3, 2], 0, 0) // f32
        .tensor("conv", &[32], 8, 64) // q8_0
        .tensor("scalar", &[], 1, 128) // f16
        .align(64)
        .bytes(&[5; 24])
        .align(64)
        .bytes(&[6; 34])
        .align(64)
        .bytes(&[7; 2])
}

#[test]
fn gguf_of_versions_2_and_3() {
    let dir = Dir::new();
    for version in [2, 3] {
        let path = dir.write("model.safetensors", gguf(version).0);
        for access in [Access::Map, Access::Read] {
            let c = Checkpoint::open_with(&path, access).unwrap();
            assert_eq!((c.format(), c.names()), (Format::Gguf, vec!["lin.weight", "conv", "scalar"]));
            assert_eq!((dims(&c, "lin.weight"), &c.bytes("lin.weight").unwrap()[..]), (vec![2, 3], &[5u8; 24][..]));
            assert_eq!(c.meta("conv").unwrap().dtype, DType::Q8_0);
            // Stored flat, restored from the metadata.
            assert_eq!((dims(&c, "conv"), &c.bytes("conv").unwrap()[..]), (vec![2, 4, 2, 2], &[6u8; 34][..]));
            assert_eq!((dims(&c, "scalar"), &c.bytes("scalar").unwrap()[..]), (vec![], &[7u8; 2][..]));
            assert_eq!(c.metadata().str("general.architecture"), Some("sd1"));
            assert_eq!(c.metadata().get("pi"), Some(&Value::F32(3.25)));
            assert_eq!(c.metadata().get("general.alignment").and_then(Value::as_u64), Some(64));
            assert_eq!(c.tokenizer().unwrap(), None);
        }
    }
}

/// Version 1 has 32-bit lengths, counts and axes.
#[test]
fn gguf_of_version_1() {
    let str = |g: Gguf, s: &str| g.u32(s.len() as u32).bytes(s.as_bytes());
    let g = Gguf(b"GGUF".to_vec()).u32(1).u32(1).u32(2);
    let g = str(str(g, "general.name").u32(8), "old");
    let g = str(str(str(g, "words").u32(9).u32(8).u32(2), "a"), "bc");
    let g = str(g, "w").u32(2).u32(3).u32(2).u32(0).u64(0).align(32).bytes(&[5; 24]);
    let dir = Dir::new();
    let c = Checkpoint::open(dir.write("m.gguf", g.0)).unwrap();
    assert_eq!((dims(&c, "w"), &c.bytes("w").unwrap()[..]), (vec![2, 3], &[5u8; 24][..]));
    assert_eq!(c.metadata().str("general.name"), Some("old"));
    assert_eq!(c.metadata().strings("words").unwrap().unwrap(), ["a", "bc"]);
}

/// Written by the public `gguf` package; the tensors count up as `tests/data/make.py` says.
#[test]
fn gguf_of_a_big_endian_machine() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/big-endian.gguf");
    let c = Checkpoint::open(path).unwrap();
    assert_eq!(c.metadata().get("answer"), Some(&Value::U32(42)));
    let t = c.tokenizer().unwrap().unwrap();
    assert_eq!((t.tokens, t.scores), (vec!["<s>", "é"], vec![0.5, -1.5]));
    let want: Vec<u8> = (0..6u8).flat_map(|v| f32::from(v).to_le_bytes()).collect();
    assert_eq!((dims(&c, "a.weight"), &c.bytes("a.weight").unwrap()[..]), (vec![2, 3], &want[..]));
    // 1.5 and -2 in half floats.
    assert_eq!(c.bytes("b.weight").unwrap()[..], [0x00, 0x3e, 0x00, 0xc0]);
}

/// Of quantised blocks only the f16 scales are turned.
#[test]
fn gguf_blocks_of_a_big_endian_machine() {
    // (type, bytes of a block, elements, where the numbers of two bytes are), from the structures of ggml.
    let cases = [
        (2u32, 18usize, 32u64, vec![0]),
        (3, 20, 32, vec![0, 2]),
        (8, 34, 32, vec![0]),
        (10, 84, 256, vec![80, 82]),
        (11, 110, 256, vec![108]),
        (12, 144, 256, vec![0, 2]),
        (13, 176, 256, vec![0, 2]),
        (14, 210, 256, vec![208]),
        (20, 18, 32, vec![0]),
        (39, 17, 32, vec![]),
    ];
    for (id, size, elements, numbers) in cases {
        let mut f = b"GGUF".to_vec();
        f.extend(3u32.to_be_bytes());
        for n in [1u64, 0, 1] {
            f.extend(n.to_be_bytes());
        }
        f.push(b'w');
        f.extend(
            [2u32.to_be_bytes().to_vec(), elements.to_be_bytes().to_vec(), 2u64.to_be_bytes().to_vec()].concat(),
        );
        f.extend([id.to_be_bytes().to_vec(), vec![0; 8]].concat());
        f.resize(f.len().next_multiple_of(32), 0);
        let stored: Vec<u8> = (0..2 * size).map(|i| i as u8).collect();
        f.extend(&stored);
        let mut want = stored;
        for at in numbers {
            want.swap(at, at + 1);
            want.swap(size + at, size + at + 1);
        }
        let c = Checkpoint::from_bytes("big", f.clone().into()).unwrap();
        assert_eq!(c.bytes("w").unwrap()[..], want[..], "type {id}");
    }
}

#[test]
fn gguf_values_of_every_type_and_the_tokenizer() {
    let mut g = Gguf::new(3, 0, 20);
    g = g.str("u8").u32(0).u8(200).str("i8").u32(1).u8(200);
    g = g.str("u16").u32(2).bytes(&[1, 2]).str("i16").u32(3).bytes(&[0xfe, 0xff]);
    g = g.str("u32").u32(4).u32(70_000).str("i32").u32(5).u32(u32::MAX);
    g = g.str("f32").u32(6).f32(-0.5).str("bool").u32(7).u8(1);
    g = g.str("str").u32(8).str("é").str("u64").u32(10).u64(u64::MAX);
    g = g.str("i64").u32(11).u64(u64::MAX).str("f64").u32(12).bytes(&1e300f64.to_le_bytes());
    // An array of two arrays of u8.
    g = g.str("nested").u32(9).u32(9).u64(2).u32(0).u64(1).u8(1).u32(0).u64(2).u8(2).u8(3);
    g = g.str("latin").u32(8).u64(1).u8(0xe9);
    g = g.str("tokenizer.ggml.model").u32(8).str("gpt2");
    g = g.str("tokenizer.ggml.tokens").u32(9).u32(8).u64(3).str("a").str("").str("Ġb");
    g = g.str("tokenizer.ggml.merges").u32(9).u32(8).u64(1).str("a Ġb");
    g = g.str("tokenizer.ggml.scores").u32(9).u32(6).u64(3).f32(0.0).f32(-1.0).f32(-2.5);
    g = g.str("tokenizer.ggml.token_type").u32(9).u32(5).u64(3).u32(1).u32(3).u32(6);
    g = g.pair_u32("tokenizer.ggml.eos_token_id", 2);
    let dir = Dir::new();
    let c = Checkpoint::open(dir.write("m", g.0)).unwrap();
    let m = c.metadata();
    let int = |k: &str| m.get(k).unwrap().as_i64();
    assert_eq!(
        ["u8", "i8", "u16", "i16", "u32", "i32", "i64", "u64"].map(int),
        [Some(200), Some(-56), Some(513), Some(-2), Some(70_000), Some(-1), Some(-1), None]
    );
    assert_eq!(m.get("u64").unwrap().as_u64(), Some(u64::MAX));
    assert_eq!(m.get("i8").unwrap().as_u64(), None);
    assert_eq!((m.get("f32").unwrap().as_f64(), m.get("f64").unwrap().as_f64()), (Some(-0.5), Some(1e300)));
    assert_eq!(
        (m.get("bool").unwrap().as_bool(), m.str("str"), m.str("latin")),
        (Some(true), Some("é"), Some("\u{fffd}"))
    );
    assert_eq!(m.get("nested").unwrap().as_array().unwrap().len(), 2);
    assert!(m.strings("nested").is_err() && m.f32s("str").is_err() && m.i64s("f32").is_err());
    assert_eq!(m.strings("none").unwrap(), None);

    let t = c.tokenizer().unwrap().unwrap();
    assert_eq!((t.model, t.tokens, t.merges), (Some("gpt2"), vec!["a", "", "Ġb"], vec!["a Ġb"]));
    assert_eq!((t.scores, t.token_types), (vec![0.0, -1.0, -2.5], vec![1, 3, 6]));
    assert_eq!((t.eos, t.bos, t.add_bos), (Some(2), None, None));
}

#[test]
fn a_gguf_header_larger_than_the_first_read() {
    let n = 300_000u64;
    let mut g = Gguf::new(3, 1, 1).str("tokenizer.ggml.tokens").u32(9).u32(8).u64(n);
    for i in 0..n {
        g = g.str(&i.to_string());
    }
    let g = g.tensor("t", &[2], 0, 0).align(32).bytes(&[9; 8]);
    assert!(g.0.len() > 3 << 20);
    let dir = Dir::new();
    let c = Checkpoint::open(dir.write("m.gguf", g.0)).unwrap();
    assert_eq!(c.bytes("t").unwrap()[..], [9; 8]);
    let tokens = c.metadata().strings("tokenizer.ggml.tokens").unwrap().unwrap();
    assert_eq!((tokens.len(), tokens[299_999]), (300_000, "299999"));
}

#[test]
fn a_checkpoint_in_memory() {
    for file in [one("a", 7), Gguf::new(3, 1, 0).tensor("a", &[2], 24, 0).align(32).bytes(&[7; 2]).0] {
        let c = Checkpoint::from_bytes("the demo model", file.clone().into()).unwrap();
        assert_eq!((c.names(), &c.bytes("a").unwrap()[..]), (vec!["a"], &[7u8, 7][..]));
        assert_eq!(c.origin("a").file, "the demo model");
        let cut = file[..file.len() - 1].to_vec();
        let e = Checkpoint::from_bytes("the demo model", cut.into()).unwrap_err().to_string();
        assert!(e.starts_with("the demo model: tensor a: "), "{e}");
    }
    // Bytes compiled into a program are not copied.
    static FILE: [u8; 24] = *b"GGUF\x03\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    let bytes = Bytes::new(std::sync::Arc::new(&FILE[..]));
    assert!(Checkpoint::from_bytes("empty", bytes).unwrap().names().is_empty());
}

/// A tensor of two bytes with the value `v`.
fn one(name: &str, v: u8) -> Vec<u8> {
    safetensors(&format!(r#"{{"{name}":{{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}}}"#), &[v; 2])
}

#[test]
fn a_diffusers_folder() {
    let dir = Dir::new();
    dir.write("model_index.json", r#"{"_class_name":"StableDiffusionPipeline"}"#);
    dir.write("unet/config.json", r#"{"in_channels":4}"#);
    dir.write("unet/diffusion_pytorch_model.fp16.safetensors", one("conv_in.weight", 1));
    dir.write("vae/diffusion_pytorch_model.safetensors", one("conv_in.weight", 2));
    dir.write("vae/diffusion_pytorch_model.bin", b"unused");
    dir.write("text_encoder/model-00001-of-00002.safetensors", one("a", 3));
    dir.write("text_encoder/model-00002-of-00002.safetensors", one("b", 4));
    dir.write(
        "text_encoder/model.safetensors.index.json",
        r#"{"metadata":{"total_size":4},"weight_map":{"a":"model-00001-of-00002.safetensors","b":"model-00002-of-00002.safetensors"}}"#,
    );
    dir.write("text_encoder_2/model.safetensors", one("a", 5));
    dir.write("safety_checker/model.safetensors", one("a", 6));
    dir.write("scheduler/scheduler_config.json", r#"{"prediction_type":"epsilon"}"#);
    let c = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(c.format(), Format::Folder);
    assert_eq!(
        c.names(),
        ["text_encoder.a", "text_encoder.b", "text_encoder_2.a", "unet.conv_in.weight", "vae.conv_in.weight"]
    );
    let values: Vec<u8> = c.names().iter().map(|n| c.bytes(n).unwrap()[0]).collect();
    assert_eq!(values, [3, 4, 5, 1, 2]);
    let origin = c.origin("text_encoder.b");
    assert_eq!(origin.name, "b");
    assert!(origin.file.ends_with("model-00002-of-00002.safetensors"));
    assert_eq!(c.config("unet").unwrap()["in_channels"], 4);
    assert_eq!(c.config("scheduler").unwrap()["prediction_type"], "epsilon");
    assert_eq!(c.config("model_index").unwrap()["_class_name"], "StableDiffusionPipeline");
    assert_eq!(c.config("vae"), None);

    let c = Checkpoint::open(dir.path().join("unet")).unwrap();
    assert_eq!(c.names(), ["conv_in.weight"]);
    assert_eq!(c.config("").unwrap()["in_channels"], 4);
}

#[test]
fn shards_by_index_or_by_any_of_them() {
    let dir = Dir::new();
    let first = dir.write("m-00001-of-00002.safetensors", one("a", 1));
    let second = dir.write("m-00002-of-00002.safetensors", one("b", 2));
    let index = dir.write(
        "m.safetensors.index.json",
        "\n {\"weight_map\":{\"a\":\"m-00001-of-00002.safetensors\",\"b\":\"m-00002-of-00002.safetensors\"}}",
    );
    for path in [first, second, index] {
        let c = Checkpoint::open(&path).unwrap();
        assert_eq!((c.names(), c.files().count()), (vec!["a", "b"], 2), "{}", path.display());
        assert_eq!(c.path(), path);
        assert_eq!((c.bytes("a").unwrap()[0], c.bytes("b").unwrap()[0]), (1, 2));
    }
}

/// Sparse files: a tensor of zeros, then one of two bytes past 2 and past 4 GiB.
#[cfg(unix)]
#[test]
fn tensors_past_2_and_4_gib() {
    use std::os::unix::fs::FileExt;
    let dir = Dir::new();
    for gib in [2u64, 5] {
        let big = gib << 30;
        let json = format!(
            r#"{{"big":{{"dtype":"U8","shape":[{gib},1073741824],"data_offsets":[0,{big}]}},"end":{{"dtype":"U8","shape":[2],"data_offsets":[{big},{}]}}}}"#,
            big + 2
        );
        // The same two as GGUF, and as one storage of PyTorch's layout before 1.6 with the second tensor at its end.
        let gguf = Gguf::new(3, 2, 0).tensor("big", &[1 << 30, gib], 24, 0).tensor("end", &[2], 24, big).align(32);
        let mut pickle =
            b"\x80\x02\x8a\x0al\xfc\x9c\x46\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}.\x80\x02}".to_vec();
        pickle.extend(b"X\x03\0\0\0endctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storage");
        pickle.extend(b"ctorch\nByteStorage\nX\x01\0\0\x000X\x03\0\0\0cpu\x8a\x08");
        pickle.extend((big + 2).to_le_bytes());
        pickle.extend(b"tQ\x8a\x08");
        pickle.extend(big.to_le_bytes());
        pickle.extend(b"K\x02\x85K\x01\x85\x89Nts"); // shape [2], strides [1]
        let at = pickle.len() - 1;
        pickle.insert(at, b'R');
        pickle.extend(b".\x80\x02]X\x01\0\0\x000a.");
        pickle.extend((big + 2).to_le_bytes());
        for (name, header) in [("b.safetensors", safetensors(&json, &[])), ("b.gguf", gguf.0), ("b.pt", pickle)] {
            let path = dir.write(name, &header);
            let file = std::fs::File::options().write(true).open(&path).unwrap();
            file.write_all_at(&[3, 4], header.len() as u64 + big).unwrap();
            for access in [Access::Map, Access::Read] {
                let c = Checkpoint::open_with(&path, access).unwrap();
                assert_eq!(c.bytes("end").unwrap()[..], [3, 4], "{name}");
            }
        }
    }
}
