//! Model files that are not what they should be: one message with the file and, where there is one, the tensor.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod support;

use serde_json::{Value, json};
use std::path::Path;
use support::{DEMO, folder, sd_cli};

/// A safetensors file in parts, to be changed and put together again.
struct Parts(Vec<(String, Value, Vec<u8>)>);

impl Parts {
    fn of_demo() -> Parts {
        let file = std::fs::read(DEMO).unwrap();
        let (length, rest) = file.split_at(8);
        let (header, data) = rest.split_at(u64::from_le_bytes(length.try_into().unwrap()) as usize);
        let header: Value = serde_json::from_slice(header).unwrap();
        let tensors = header.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__");
        let parts = tensors.map(|(name, info)| {
            let at = |i: usize| info["data_offsets"][i].as_u64().unwrap() as usize;
            (name.clone(), info.clone(), data[at(0)..at(1)].to_vec())
        });
        Parts(parts.collect())
    }

    fn find(&mut self, name: &str) -> &mut (String, Value, Vec<u8>) {
        self.0.iter_mut().find(|(n, ..)| n == name).unwrap_or_else(|| panic!("the demo model has no {name}"))
    }

    fn to_bytes(&self) -> Vec<u8> {
        let mut header = json!({});
        let mut data = Vec::new();
        for (name, info, bytes) in &self.0 {
            let mut info = info.clone();
            info["data_offsets"] = json!([data.len(), data.len() + bytes.len()]);
            header[name] = info;
            data.extend(bytes);
        }
        safetensors(&header.to_string(), &data)
    }
}

fn safetensors(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

/// A GGUF header with one f32 tensor called `t` of these dimensions, innermost first.
fn gguf(dims: &[u64], count: u32) -> Vec<u8> {
    let mut file = b"GGUF".to_vec();
    file.extend(3u32.to_le_bytes());
    file.extend(1u64.to_le_bytes()); // tensors
    file.extend(0u64.to_le_bytes()); // key-value pairs
    file.extend(1u64.to_le_bytes()); // length of the name
    file.extend(b"t");
    file.extend(count.to_le_bytes());
    file.extend(dims.iter().flat_map(|d| d.to_le_bytes()));
    file.extend(0u32.to_le_bytes()); // f32
    file.extend(0u64.to_le_bytes()); // offset
    file.resize(256, 0);
    file
}

/// Runs `sd-cli -m model` and checks that it ends in one message with all of `parts`, and writes nothing.
fn refuses(folder: &Path, model: &str, parts: &[&str]) {
    let run = sd_cli(
        folder,
        &["-m", model, "-p", "a red circle", "--steps", "2", "-W", "64", "-H", "64", "-o", "never.png"],
    );
    assert_eq!(run.code, Some(1), "{model}: {}", run.stderr);
    let errors: Vec<&str> = run.stderr.lines().filter(|line| line.starts_with("[ERROR")).collect();
    assert_eq!(errors.len(), 1, "{model}: {}", run.stderr);
    for part in [&[model], parts].concat() {
        assert!(errors[0].contains(part), "{model} should mention {part:?}: {}", run.stderr);
    }
    for word in ["panicked", "GGML_ASSERT", "abort", "internal error"] {
        assert!(!run.stderr.contains(word), "{model}: {}", run.stderr);
    }
    assert!(!folder.join("never.png").exists());
}

#[test]
fn files_that_are_no_checkpoints() {
    let folder = folder("broken-formats");
    let write = |name: &str, bytes: &[u8]| std::fs::write(folder.join(name), bytes).unwrap();

    write("empty.safetensors", b"");
    refuses(&folder, "empty.safetensors", &[]);
    write("sixteen.safetensors", &[7; 16]);
    refuses(&folder, "sixteen.safetensors", &[]);
    write("sixteen.gguf", b"GGUF\x03\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff");
    refuses(&folder, "sixteen.gguf", &[]);
    std::fs::create_dir(folder.join("folder")).unwrap();
    refuses(&folder, "folder", &[]);
    refuses(&folder, "missing.safetensors", &[]);

    let demo = std::fs::read(DEMO).unwrap();
    write("truncated.safetensors", &demo[..demo.len() / 2]);
    refuses(&folder, "truncated.safetensors", &[]);
    write("header-cut.safetensors", &demo[..1000]);
    refuses(&folder, "header-cut.safetensors", &[]);
}

#[test]
fn headers_that_lie() {
    let folder = folder("broken-headers");
    let write = |name: &str, bytes: &[u8]| std::fs::write(folder.join(name), bytes).unwrap();
    let tensor = |from: u64, to: u64| json!({"dtype": "F32", "shape": [4], "data_offsets": [from, to]});

    let header = json!({"first": tensor(0, 16), "second": tensor(8, 24)});
    write("overlap.safetensors", &safetensors(&header.to_string(), &[0; 24]));
    refuses(&folder, "overlap.safetensors", &["second"]);
    let header = json!({"far": tensor(1 << 40, (1 << 40) + 16)});
    write("range.safetensors", &safetensors(&header.to_string(), &[0; 16]));
    refuses(&folder, "range.safetensors", &["far"]);
    let header = json!({"huge": {"dtype": "F32", "shape": [1u64 << 62, 1u64 << 62], "data_offsets": [0, 16]}});
    write("product.safetensors", &safetensors(&header.to_string(), &[0; 16]));
    refuses(&folder, "product.safetensors", &["huge"]);
    let nested = format!("{{\"a\":{}{}}}", "[".repeat(10_000), "]".repeat(10_000));
    write("nested.safetensors", &safetensors(&nested, &[]));
    refuses(&folder, "nested.safetensors", &[]);
    write("length.safetensors", &[&u64::MAX.to_le_bytes()[..], b"{}"].concat());
    refuses(&folder, "length.safetensors", &[]);

    write("dims.gguf", &gguf(&[1, 1], u32::MAX));
    refuses(&folder, "dims.gguf", &["t"]);
    write("wraps.gguf", &gguf(&[1 << 33, 1 << 33, 4, 4], 4));
    refuses(&folder, "wraps.gguf", &["t"]);
}

#[test]
fn tensors_that_are_missing_misshapen_or_not_numbers() {
    let folder = folder("broken-tensors");
    const NAME: &str = "model.diffusion_model.middle_block.1.transformer_blocks.0.attn2.to_k.weight";

    let mut parts = Parts::of_demo();
    parts.find(NAME);
    parts.0.retain(|(name, ..)| name != NAME);
    std::fs::write(folder.join("lacking.safetensors"), parts.to_bytes()).unwrap();
    refuses(&folder, "lacking.safetensors", &[NAME]);

    const BIAS: &str = "model.diffusion_model.out.2.bias";
    let mut parts = Parts::of_demo();
    parts.find(BIAS);
    parts.0.retain(|(name, ..)| name != BIAS);
    std::fs::write(folder.join("lacking-bias.safetensors"), parts.to_bytes()).unwrap();
    refuses(&folder, "lacking-bias.safetensors", &[BIAS]);

    let mut parts = Parts::of_demo();
    let (_, info, _) = parts.find(NAME);
    // The same number of elements with the axes in another order.
    let shape = info["shape"].as_array().unwrap().iter().rev().cloned().collect();
    info["shape"] = Value::Array(shape);
    std::fs::write(folder.join("misshapen.safetensors"), parts.to_bytes()).unwrap();
    refuses(&folder, "misshapen.safetensors", &[NAME]);

    let mut parts = Parts::of_demo();
    let (_, info, _) = parts.find("model.diffusion_model.input_blocks.0.0.weight");
    let dims: Vec<u64> = info["shape"].as_array().unwrap().iter().map(|d| d.as_u64().unwrap()).collect();
    info["shape"] = json!([dims[0], dims[1], 1, dims[2] * dims[3]]);
    std::fs::write(folder.join("kernel.safetensors"), parts.to_bytes()).unwrap();
    refuses(&folder, "kernel.safetensors", &["diffusion"]);

    let mut parts = Parts::of_demo();
    let (_, info, bytes) = parts.find(NAME);
    let nan: &[u8] = match info["dtype"].as_str().unwrap() {
        "F16" => &[0x00, 0x7e],
        "F32" => &[0x00, 0x00, 0xc0, 0x7f],
        other => panic!("{NAME} is {other}"),
    };
    bytes[..nan.len()].copy_from_slice(nan);
    std::fs::write(folder.join("nan.safetensors"), parts.to_bytes()).unwrap();
    refuses(&folder, "nan.safetensors", &[NAME]);
}
