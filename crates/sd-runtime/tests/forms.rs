//! The demo model in every form that files have: all load, and draw what the original draws, within one table of bounds.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use sd_core::convert::{from_f32, needs_importance, to_f32};
use sd_core::{Precision, Shape, WeightSource};
use sd_io::{Checkpoint, TensorSpec, write_safetensors};
use sd_runtime::{
    CancelToken, Conversion, DType, Engine, ImageRequest, Importance, ModelFiles, SamplerKind, TypeRules,
};
use support::one;

/// The least signal to noise, in dB, that the picture of a form has against that of f32. Where a form holds every value
/// of the original the pictures are equal.
const BOUNDS: &[(&str, f64)] = &[
    ("bf16", 45.0),
    ("f8_e4m3", 25.0),
    ("f8_e5m2", 21.0),
    ("scaled_f8_e4m3", 36.0),
    ("scaled_f8_e5m2", 32.0),
    ("int8", 50.0),
    ("q8_0", 50.0),
    ("q6_K", 48.0),
    ("q5_", 38.0),
    ("q4_K", 42.0),
    ("iq4_xs", 42.0),
    ("iq3", 34.0),
    ("q3_K", 36.0),
    ("q1_0", 14.0),
    ("tq", 22.0),
    ("", 25.0),
];

fn bound(form: &str) -> f64 {
    BOUNDS.iter().find(|(start, _)| form.starts_with(start)).unwrap().1
}

fn demo_model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/demo.safetensors")
}

struct Demo {
    folder: PathBuf,
    /// Name, shape and values of everything in the demo model.
    tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
    picture: Vec<u8>,
}

impl Demo {
    fn new(name: &str) -> Demo {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        fs::create_dir_all(&folder).unwrap();
        let original = demo_model();
        let file = Checkpoint::open(&original).unwrap();
        let tensor = |name: &&str| {
            let meta = file.meta(name).unwrap();
            let values = to_f32(meta.dtype, &file.bytes(name).unwrap(), meta.shape.elements()).unwrap();
            ((*name).to_owned(), (meta.shape.dims().to_vec(), values))
        };
        let tensors = file.names().iter().map(tensor).collect();
        Demo { folder, tensors, picture: draw(&original) }
    }

    fn place(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// A model converted by the program: to a type if there is one, and to the networks' own names with `rename`.
    fn converted(&self, model: &Path, name: &str, dtype: Option<DType>, rename: bool) -> PathBuf {
        let files = ModelFiles { model: Some(model.to_owned()), ..ModelFiles::default() };
        let (output, types) = (self.place(name), TypeRules::new(dtype, "").unwrap());
        let (importance, threads) = (Importance::default(), 2);
        let conversion = Conversion { files, output: output.clone(), types, rename, importance, threads };
        conversion.run(&mut |_, _| {}, &CancelToken::new()).unwrap();
        output
    }

    /// A safetensors file in which `low` makes tensors of the matrices of attention and feed forward layers of the
    /// diffusion network; the rest is f16.
    fn written(&self, name: &str, low: impl Fn(&[usize; 2], &[f32]) -> Vec<(&'static str, Stored)>) -> PathBuf {
        let mut all: BTreeMap<String, Stored> = BTreeMap::new();
        let mut count = 0;
        for (name, (shape, values)) in &self.tensors {
            let stem = name.strip_suffix(".weight").filter(|n| n.contains("transformer_blocks"));
            match (stem, &shape[..]) {
                (Some(stem), &[rows, columns]) => {
                    all.extend(
                        low(&[rows, columns], values).into_iter().map(|(end, t)| (format!("{stem}.{end}"), t)),
                    );
                    count += 1;
                }
                _ => drop(all.insert(name.clone(), stored(DType::F16, shape, values))),
            }
        }
        assert!(count > 20, "{count} matrices");
        let path = self.place(name);
        let specs: Vec<TensorSpec> = all
            .iter()
            .map(|(name, t)| TensorSpec { name: name.clone(), dtype: t.0, shape: Shape::new(&t.1).unwrap() })
            .collect();
        write_safetensors(&path, &[], &specs, |spec| Ok(all[&spec.name].2.clone())).unwrap();
        path
    }

    fn check(&self, form: &str, path: &Path) {
        let got = draw(path);
        let square = |(a, b): (&u8, &u8)| f64::from(a.abs_diff(*b)).powi(2);
        let error = got.iter().zip(&self.picture).map(square).sum::<f64>() / got.len() as f64;
        let db = 10.0 * (255.0 * 255.0 / error).log10();
        let exact = ["f32", "f16", "torch", "shards"].iter().any(|start| form.starts_with(start));
        assert!(if exact { got == self.picture } else { db >= bound(form) }, "{form}: {db:.1} dB");
    }
}

/// Type, shape and bytes.
type Stored = (DType, Vec<usize>, Vec<u8>);

fn stored(dtype: DType, shape: &[usize], values: &[f32]) -> Stored {
    (dtype, shape.to_vec(), from_f32(dtype, values, values.len()).unwrap())
}

/// Products in f32, so that files of the same values give the same picture.
fn draw(path: &Path) -> Vec<u8> {
    let builder = Engine::builder().model(path).device("cpu").threads(2).precision(Precision::F32);
    let request = ImageRequest {
        prompt: "a red circle on a blue background".to_owned(),
        width: Some(64),
        height: Some(64),
        steps: Some(3),
        seed: Some(7),
        sampler: Some(SamplerKind::Euler),
        ..ImageRequest::default()
    };
    one(builder, &request).rgb
}

#[test]
fn plain_types_and_ggufs_of_every_type() {
    let demo = Demo::new("forms-types");
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::F8E4M3, DType::F8E5M2] {
        demo.check(
            dtype.name(),
            &demo.converted(&demo_model(), &format!("{dtype}.safetensors"), Some(dtype), false),
        );
    }
    let mut count = 0;
    for dtype in DType::all().filter(|d| d.is_weight_type() && !needs_importance(*d)) {
        demo.check(dtype.name(), &demo.converted(&demo_model(), &format!("{dtype}.gguf"), Some(dtype), false));
        count += 1;
    }
    assert!(count >= 20, "{count} types");
    fs::remove_dir_all(&demo.folder).unwrap();
}

/// A note of ComfyUI's, as bytes of text.
fn note(text: &str) -> Stored {
    (DType::U8, vec![text.len()], text.as_bytes().to_vec())
}

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(1e-12, |m, v| m.max(v.abs()))
}

/// Values over a scale for each part of so many, as `dtype`, and the scales.
fn over(dtype: DType, shape: &[usize; 2], values: &[f32], part: usize, most: f32) -> (Stored, Vec<f32>) {
    let scales: Vec<f32> = values.chunks(part).map(|p| largest(p) / most).collect();
    let over: Vec<f32> = values.iter().enumerate().map(|(i, v)| v / scales[i / part]).collect();
    if dtype == DType::I8 {
        let bytes = over.iter().map(|v| v.round_ties_even() as i8 as u8).collect();
        return ((dtype, shape.to_vec(), bytes), scales);
    }
    (stored(dtype, shape, &over), scales)
}

/// The normalised regular Hadamard matrix of 4 applied at every power of 4 below the group's length.
fn turn(values: &mut [f32], group: usize) {
    for part in values.chunks_exact_mut(group) {
        let mut step = 1;
        while step < group {
            for i in (0..group).filter(|i| i / step % 4 == 0) {
                let [a, b, c, d] = [0, 1, 2, 3].map(|k| part[i + k * step]);
                let sum = (a + b + c + d) / 2.0;
                // ½[[1,1,1,−1],[1,1,−1,1],[1,−1,1,1],[−1,1,1,1]]: half of the sum less one of them.
                for (k, v) in [d, c, b, a].into_iter().enumerate() {
                    part[i + k * step] = sum - v;
                }
            }
            step *= 4;
        }
    }
}

#[test]
fn scaled_weights_in_every_spelling() {
    let demo = Demo::new("forms-scaled");
    let f32s = |shape: &[usize], values: &[f32]| stored(DType::F32, shape, values);
    for dtype in [DType::F8E4M3, DType::F8E5M2] {
        let most = if dtype == DType::F8E4M3 { 448.0 } else { 57344.0 };
        let whole = |shape: &[usize; 2], values: &[f32]| {
            let (weight, scales) = over(dtype, shape, values, values.len(), most);
            (weight, f32s(&[], &scales))
        };
        let path = demo.written(&format!("old-{dtype}.safetensors"), |shape, values| {
            let (weight, scale) = whole(shape, values);
            vec![("weight", weight), ("scale_weight", scale), ("scale_input", f32s(&[], &[0.5]))]
        });
        demo.check(&format!("scaled_{dtype}, scale_weight"), &path);
        // Files with the networks' own names hold values.
        for (name, to) in [("values.gguf", Some(DType::Q8_0)), ("values.safetensors", None)] {
            demo.check(&format!("scaled_{dtype}, converted"), &demo.converted(&path, name, to, true));
        }
        let path = demo.written(&format!("new-{dtype}.safetensors"), |shape, values| {
            let (weight, scale) = whole(shape, values);
            let format = if dtype == DType::F8E4M3 { "float8_e4m3fn" } else { "float8_e5m2" };
            let note = note(&format!("{{\"format\":\"{format}\"}}"));
            vec![("weight", weight), ("weight_scale", scale), ("comfy_quant", note)]
        });
        demo.check(&format!("scaled_{dtype}, comfy_quant"), &path);
        let path = demo.written(&format!("rows-{dtype}.safetensors"), |shape, values| {
            let (weight, scales) = over(dtype, shape, values, shape[1], most);
            vec![("weight", weight), ("weight_scale", f32s(&[shape[0], 1], &scales))]
        });
        demo.check(&format!("scaled_{dtype}, rows"), &path);
    }
    for group in [None, Some(16), Some(64)] {
        let path = demo.written(&format!("int8-{}.safetensors", group.unwrap_or(0)), |shape, values| {
            let mut values = values.to_vec();
            let group = group.filter(|g| shape[1].is_multiple_of(*g));
            if let Some(group) = group {
                turn(&mut values, group);
            }
            let (weight, scales) = over(DType::I8, shape, &values, shape[1], 127.0);
            let size = group.map_or(String::new(), |g| format!(",\"convrot_groupsize\":{g}"));
            let text = format!("{{\"format\":\"int8_tensorwise\",\"convrot\":{}{size}}}", group.is_some());
            vec![("weight", weight), ("weight_scale", f32s(&[shape[0], 1], &scales)), ("comfy_quant", note(&text))]
        });
        demo.check(&format!("int8, groups {group:?}"), &path);
    }
    fs::remove_dir_all(&demo.folder).unwrap();
}

/// What a pickle of `torch.save` holds of a state dict of f32 tensors, each in a storage by its number.
fn state_dict(tensors: &BTreeMap<String, (Vec<usize>, Vec<f32>)>, legacy: bool) -> Vec<u8> {
    let text = |s: &str| [&b"X"[..], &(s.len() as u32).to_le_bytes(), s.as_bytes()].concat();
    let number = |n: usize| [&b"J"[..], &(n as i32).to_le_bytes()].concat();
    let tuple = |numbers: &[usize]| {
        let numbers: Vec<u8> = numbers.iter().flat_map(|n| number(*n)).collect();
        [&b"("[..], &numbers, b"t"].concat()
    };
    let mut out = b"\x80\x02}(".to_vec();
    for (i, (name, (shape, values))) in tensors.iter().enumerate() {
        let mut strides = vec![1; shape.len()];
        for at in (1..shape.len()).rev() {
            strides[at - 1] = strides[at] * shape[at];
        }
        out.extend(text(name));
        out.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
        out.extend(
            [text("storage"), b"ctorch\nFloatStorage\n".to_vec(), text(&i.to_string()), text("cpu")].concat(),
        );
        out.extend(number(values.len()));
        // Legacy files say of what a storage is a view: of nothing.
        out.extend(if legacy { &b"NtQ"[..] } else { b"tQ" });
        out.extend([number(0), tuple(shape), tuple(&strides)].concat());
        out.extend(b"\x89ccollections\nOrderedDict\n)RtR");
    }
    out.extend(b"u.");
    out
}

fn little(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// As `torch.save(…, _use_new_zipfile_serialization=False)` writes it.
fn legacy(tensors: &BTreeMap<String, (Vec<usize>, Vec<f32>)>) -> Vec<u8> {
    let mut out = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.".to_vec();
    out.extend(b"\x80\x02M\xe9\x03.");
    out.extend(b"\x80\x02}(X\x0d\x00\x00\x00little_endian\x88u.");
    out.extend(state_dict(tensors, true));
    out.extend(b"\x80\x02](");
    for i in 0..tensors.len() {
        let key = i.to_string();
        out.extend([&b"X"[..], &(key.len() as u32).to_le_bytes(), key.as_bytes()].concat());
    }
    out.extend(b"e.");
    for (_, values) in tensors.values() {
        out.extend((values.len() as u64).to_le_bytes());
        out.extend(little(values));
    }
    out
}

/// A zip archive of stored files.
fn zip(files: &[(String, Vec<u8>)]) -> Vec<u8> {
    fn crc32(bytes: &[u8]) -> u32 {
        let step = |crc: u32, b: &u8| {
            (0..8).fold(crc ^ u32::from(*b), |c, _| if c & 1 == 1 { (c >> 1) ^ 0xedb8_8320 } else { c >> 1 })
        };
        !bytes.iter().fold(!0, step)
    }
    let (mut out, mut directory) = (Vec::new(), Vec::new());
    for (name, bytes) in files {
        let at = out.len() as u32;
        let size = (bytes.len() as u32).to_le_bytes();
        let facts = [
            &[0, 0, 0, 0, 0, 0, 0x21, 0][..],
            &crc32(bytes).to_le_bytes(),
            &size,
            &size,
            &(name.len() as u16).to_le_bytes(),
            &[0, 0],
        ]
        .concat();
        out.extend([&b"PK\x03\x04\x0a\x00"[..], &facts, name.as_bytes(), bytes].concat());
        let place = [&[0; 10][..], &at.to_le_bytes()].concat();
        directory.extend([&b"PK\x01\x02\x0a\x00\x0a\x00"[..], &facts, &place, name.as_bytes()].concat());
    }
    let (at, size) = (out.len() as u32, directory.len() as u32);
    let count = (files.len() as u16).to_le_bytes();
    out.extend(directory);
    out.extend(
        [&b"PK\x05\x06\0\0\0\0"[..], &count, &count, &size.to_le_bytes(), &at.to_le_bytes(), &[0, 0]].concat(),
    );
    out
}

#[test]
fn other_containers() {
    let demo = Demo::new("forms-containers");
    let path = demo.place("legacy.ckpt");
    fs::write(&path, legacy(&demo.tensors)).unwrap();
    demo.check("torch, legacy", &path);

    let mut files = vec![("demo/data.pkl".to_owned(), state_dict(&demo.tensors, false))];
    let storages = demo.tensors.values().enumerate();
    files.extend(storages.map(|(i, (_, values))| (format!("demo/data/{i}"), little(values))));
    files.push(("demo/version".to_owned(), b"3\n".to_vec()));
    let path = demo.place("zip.pt");
    fs::write(&path, zip(&files)).unwrap();
    demo.check("torch, zip", &path);

    // Every other tensor in the second of two files, and the index that says so.
    let folder = demo.place("shards");
    fs::create_dir_all(&folder).unwrap();
    let name = |i: usize| format!("demo-0000{}-of-00002.safetensors", i % 2 + 1);
    let mut map = serde_json::Map::new();
    for side in 0..2 {
        let part = demo.tensors.iter().enumerate().filter(|(i, _)| i % 2 == side).map(|(_, part)| part);
        let specs: Vec<TensorSpec> = part
            .map(|(name, (shape, _))| TensorSpec {
                name: name.clone(),
                dtype: DType::F32,
                shape: Shape::new(shape).unwrap(),
            })
            .collect();
        map.extend(specs.iter().map(|s| (s.name.clone(), name(side).into())));
        write_safetensors(folder.join(name(side)), &[], &specs, |s| Ok(little(&demo.tensors[&s.name].1))).unwrap();
    }
    let index = folder.join("demo.safetensors.index.json");
    fs::write(&index, serde_json::json!({"metadata": {}, "weight_map": map}).to_string()).unwrap();
    demo.check("shards", &index);
    fs::remove_dir_all(&demo.folder).unwrap();
}
