//! Broken indexes, shards and folders.

use sd_core::WeightSource;
use sd_io::Checkpoint;

use crate::common::{Dir, Gguf, safetensors};
use crate::error;

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
    for outside in ["../s1.safetensors", "/etc/passwd", "x/../../s1.safetensors", "c:\\\\s1", ""] {
        let e = message("i.json", format!("{{\"weight_map\":{{\"a\":\"{outside}\"}}}}").as_bytes());
        assert!(e.contains("names the shard") && e.contains("which is not in the folder of the index"), "{e}");
    }
    let e = message("i.json", format!("{{\"x\":{}1", "[".repeat(10_000)).as_bytes());
    assert!(e.contains("not an index of shards"), "{e}");

    let e = message("m-00002-of-00003.safetensors", &good);
    let want =
        "is one of 3 parts of a model, of which 2 are missing: m-00001-of-00003.safetensors, m-00003-of-00003";
    assert!(e.contains(want) && e.contains("put m-00001-of-00003.safetensors beside it"), "{e}");
    dir.write("n-00001-of-00002.safetensors", &good);
    let e = message("n-00002-of-00002.safetensors", &good);
    assert!(e.contains("tensor a is also in") && e.contains("n-00001-of-00002"), "{e}");

    dir.write("p/unet/diffusion_pytorch_model.bin", b"PK\x03\x04");
    let e = Checkpoint::open(dir.path().join("p")).err().unwrap().to_string();
    assert!(e.contains("diffusion_pytorch_model.bin: a PyTorch checkpoint (zip) whose end is missing"), "{e}");
    dir.write("o/unet/model.onnx", b"\x08");
    let e = Checkpoint::open(dir.path().join("o")).err().unwrap().to_string();
    assert!(e.contains("model.onnx: weights for ONNX only"), "{e}");
    std::fs::create_dir_all(dir.path().join("models--a--b/snapshots")).unwrap();
    let e = error(&dir.path().join("models--a--b"));
    assert!(e.contains("this is a download cache; give a folder in its snapshots/"), "{e}");
    dir.write("q/unet/model.safetensors", &good);
    dir.write("q/vae/config.json", "[".repeat(10_000));
    let e = Checkpoint::open(dir.path().join("q")).err().unwrap().to_string();
    assert!(e.contains("config.json: not JSON: recursion limit exceeded"), "{e}");
}

/// A GGUF file that says which part of how many it is, with one tensor.
fn part(no: u32, count: u32, tensors: u32, name: &str) -> Vec<u8> {
    let g = Gguf::new(3, 1, 3).pair_u32("split.no", no).pair_u32("split.count", count);
    g.pair_u32("split.tensors.count", tensors).tensor(name, &[2], 24, 0).align(32).bytes(&[7; 2]).0
}

#[test]
fn parts_of_a_gguf_model() {
    let dir = Dir::new();
    let e = error(&dir.write("renamed.gguf", part(1, 3, 3, "b")));
    assert!(e.contains("is part 2 of 3 of a GGUF model") && e.contains("…-00002-of-00003.gguf"), "{e}");
    dir.write("m-00001-of-00002.gguf", part(1, 2, 2, "a"));
    let second = dir.write("m-00002-of-00002.gguf", part(0, 2, 2, "b"));
    let e = Checkpoint::open(second).err().unwrap().to_string();
    assert!(e.contains("m-00001-of-00002.gguf: calls itself part 2 of 2, its name says part 1 of 2"), "{e}");
    dir.write("n-00001-of-00002.gguf", part(0, 2, 9, "a"));
    let e = error(&dir.write("n-00002-of-00002.gguf", part(1, 2, 9, "b")));
    assert!(e.contains("the 2 parts hold 2 tensors, the first says 9"), "{e}");
    dir.write("o-00001-of-00002.gguf", part(0, 2, 2, "a"));
    let second = dir.write("o-00002-of-00002.gguf", part(1, 2, 2, "b"));
    assert_eq!(Checkpoint::open(second).unwrap().names(), ["a", "b"]);
    // A file that was never split says so, too.
    assert_eq!(Checkpoint::open(dir.write("whole.gguf", part(0, 1, 1, "a"))).unwrap().names(), ["a"]);
}
