//! Writers: compared with bytes laid out by hand, and with other programs' readers and writers.
#![allow(clippy::unwrap_used)] // helpers outside of test functions

mod common;

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use common::{Dir, Gguf};
use sd_core::{DType, Error, Shape, WeightSource};
use sd_io::{Array, Checkpoint, TensorSpec, Value, write_gguf, write_safetensors};

fn spec(name: &str, dtype: DType, dims: &[usize]) -> TensorSpec {
    TensorSpec { name: name.into(), dtype, shape: Shape::new(dims).unwrap() }
}

/// As many bytes as the tensor takes, counting up.
fn count(t: &TensorSpec) -> Result<Vec<u8>, Error> {
    Ok((0..t.bytes()?).map(|i| i as u8).collect())
}

fn names(dir: &Path) -> Vec<String> {
    fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn safetensors_for_the_public_library() {
    let dir = Dir::new();
    let path = dir.path().join("new/folder/out.safetensors");
    // Names as plain, quoted and wide as can be; types whose sizes fall and rise.
    let tensors = [
        spec("a\"\\\n猫", DType::U8, &[3]),
        spec("b", DType::F64, &[2, 1]),
        spec("c", DType::BF16, &[5]),
        spec("scalar", DType::F32, &[]),
        spec("none", DType::I64, &[0, 4]),
        spec("e", DType::F8E4M3, &[1, 1, 1, 1, 7]),
    ];
    write_safetensors(&path, &[("format", "pt"), ("k\"", "v\n")], &tensors, count).unwrap();

    let bytes = fs::read(&path).unwrap();
    let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned()), ("k\"".to_owned(), "v\n".to_owned())]);
    assert_eq!(header.metadata().as_ref(), Some(&metadata));
    let read = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(read.len(), tensors.len());
    for t in &tensors {
        let view = read.tensor(&t.name).unwrap();
        assert_eq!((view.shape(), view.data()), (t.shape.dims(), &count(t).unwrap()[..]), "{}", t.name);
        let at = view.data().as_ptr() as usize - bytes.as_ptr() as usize;
        assert_eq!(at % t.dtype.block_bytes(), 0, "{} is not aligned", t.name);
    }
    let types: Vec<_> = tensors.iter().map(|t| format!("{:?}", read.tensor(&t.name).unwrap().dtype())).collect();
    assert_eq!(types, ["U8", "F64", "BF16", "F32", "I64", "F8_E4M3"]);

    let c = Checkpoint::open(&path).unwrap();
    assert_eq!(c.names(), tensors.iter().map(|t| t.name.as_str()).collect::<Vec<_>>());
    assert_eq!(c.bytes("c").unwrap()[..], count(&tensors[2]).unwrap()[..]);
    assert_eq!(names(path.parent().unwrap()), ["out.safetensors"]);
}

#[test]
fn safetensors_that_cannot_be_written_leave_nothing() {
    let dir = Dir::new();
    let path = dir.path().join("out.safetensors");
    let refused = |tensors: &[TensorSpec], bytes: &mut dyn FnMut(&TensorSpec) -> Result<Vec<u8>, Error>| {
        let e = write_safetensors(&path, &[], tensors, bytes).unwrap_err().to_string();
        assert!(names(dir.path()).is_empty(), "{:?} after {e}", names(dir.path()));
        e
    };
    let f32s = spec("w", DType::F32, &[2]);
    let e = refused(&[spec("w", DType::Q8_0, &[32])], &mut count);
    assert!(e.contains("tensor w: safetensors files cannot hold q8_0"), "{e}");
    let e = refused(std::slice::from_ref(&f32s), &mut |_| Ok(vec![0; 7]));
    assert!(e.contains("tensor w: [2] f32 takes 8 bytes, got 7"), "{e}");
    let e = refused(&[f32s.clone(), f32s.clone()], &mut count);
    assert!(e.contains("tensor w appears twice"), "{e}");
    let e = refused(&[f32s], &mut |_| Err(Error::cancelled()));
    assert_eq!(e, "cancelled");
}

#[test]
fn gguf_byte_for_byte() {
    let dir = Dir::new();
    let path = dir.path().join("out.gguf");
    let metadata = [
        ("general.architecture", Value::String("sd1".into())),
        ("n", Value::U32(7)),
        ("tokenizer.ggml.tokens", Value::Array(Array::strings(["a", "bc"]))),
        ("tokenizer.ggml.scores", Value::Array(Array::f32s(&[1.0]))),
    ];
    let tensors = [spec("w", DType::F16, &[2, 3]), spec("q", DType::Q8_0, &[1, 32]), spec("s", DType::F32, &[])];
    write_gguf(&path, &metadata, &tensors, count).unwrap();
    let want = Gguf::new(3, 3, 4)
        .str("general.architecture")
        .u32(8)
        .str("sd1")
        .pair_u32("n", 7)
        .str("tokenizer.ggml.tokens")
        .u32(9)
        .u32(8)
        .u64(2)
        .str("a")
        .str("bc")
        .str("tokenizer.ggml.scores")
        .u32(9)
        .u32(6)
        .u64(1)
        .f32(1.0)
        .tensor("w", &[3, 2], 1, 0)
        .tensor("q", &[32, 1], 8, 32)
        .tensor("s", &[], 0, 96)
        .align(32)
        .bytes(&count(&tensors[0]).unwrap())
        .align(32)
        .bytes(&count(&tensors[1]).unwrap())
        .align(32)
        .bytes(&count(&tensors[2]).unwrap())
        .align(32);
    assert_eq!(fs::read(&path).unwrap(), want.0);
    let c = Checkpoint::open(&path).unwrap();
    assert_eq!(c.names(), ["w", "q", "s"]);
    assert_eq!(c.metadata().iter().map(|(k, v)| (k, v.clone())).collect::<Vec<_>>(), metadata);
}

#[test]
fn gguf_of_every_type_round_trips() {
    let dir = Dir::new();
    let path = dir.path().join("out.gguf");
    let types = DType::all().filter(|d| d.ggml_id().is_some());
    let tensors: Vec<TensorSpec> = types.map(|d| spec(d.name(), d, &[2, 256])).collect();
    assert!(tensors.len() >= 30);
    write_gguf(&path, &[("general.alignment", Value::U32(256))], &tensors, count).unwrap();
    let c = Checkpoint::open(&path).unwrap();
    for t in &tensors {
        let meta = c.meta(&t.name).unwrap();
        assert_eq!((meta.dtype, meta.shape), (t.dtype, t.shape));
        assert_eq!(c.bytes(&t.name).unwrap()[..], count(t).unwrap()[..], "{}", t.name);
    }
}

#[test]
fn gguf_that_cannot_be_written_leaves_nothing() {
    let dir = Dir::new();
    let path = dir.path().join("out.gguf");
    let refused = |metadata: &[(&str, Value)], tensors: &[TensorSpec]| {
        let e = write_gguf(&path, metadata, tensors, count).unwrap_err().to_string();
        assert!(names(dir.path()).is_empty(), "{:?} after {e}", names(dir.path()));
        e
    };
    let e = refused(&[], &[spec("w", DType::F8E4M3, &[2])]);
    assert!(e.contains("tensor w: GGUF files cannot hold f8_e4m3"), "{e}");
    let e = refused(&[], &[spec("w", DType::Q8_0, &[2, 48])]);
    assert!(e.contains("tensor w: rows of [2, 48] are not whole q8_0 blocks of 32"), "{e}");
    let e = refused(&[("k", Value::U8(1)), ("k", Value::U8(2))], &[]);
    assert!(e.contains("metadata key k appears twice"), "{e}");
    let e = refused(&[("general.alignment", Value::U32(20))], &[]);
    assert!(e.contains("general.alignment must be a power of two"), "{e}");
}

/// `tests/data/make.py` wrote this file with the GGUF authors' own package.
#[test]
fn gguf_written_by_the_public_library() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/public.gguf");
    let c = Checkpoint::open(path).unwrap();
    assert_eq!(c.names(), ["a.weight", "b.weight", "q.weight"]);
    assert_eq!(c.metadata().str("general.architecture"), Some("sd1"));
    assert_eq!(c.metadata().get("answer").and_then(Value::as_u64), Some(42));
    let tokenizer = c.tokenizer().unwrap().unwrap();
    assert_eq!((tokenizer.tokens, tokenizer.scores), (vec!["<s>", "é"], vec![0.5, -1.5]));

    let a = c.meta("a.weight").unwrap();
    assert_eq!((a.dtype, a.shape.dims()), (DType::F32, &[2usize, 3][..]));
    let values: Vec<f32> =
        c.bytes("a.weight").unwrap().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    assert_eq!(values, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    // 1.5 and -2 in f16.
    assert_eq!(c.bytes("b.weight").unwrap()[..], [0x00, 0x3e, 0x00, 0xc0]);
    let q = c.meta("q.weight").unwrap();
    assert_eq!((q.dtype, q.shape.dims()), (DType::Q8_0, &[2usize, 32][..]));
    // The largest magnitude of the first row is 1, so its scale is 1/127 and its first element -127.
    let first = c.bytes("q.weight").unwrap();
    assert_eq!((&first[..2], first[2] as i8), (&[0x08, 0x20][..], -127));
}
