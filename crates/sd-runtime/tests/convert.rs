//! Conversion of the oracle's tiny SD 1.x between formats and types, and files that are refused.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use sd_core::WeightSource;
use sd_core::convert::{from_f32, to_f32};
use sd_io::{Checkpoint, Format, TensorSpec, write_safetensors};
use sd_runtime::{
    CancelToken, Conversion, Converted, DType, Engine, ImageRequest, Importance, ModelFiles, Part, TypeRules,
};
use support::{json, one, sd1};

fn place(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(name)
}

fn conversion(model: &Path, output: &str, types: TypeRules) -> Conversion {
    let files = ModelFiles { model: Some(model.to_owned()), ..ModelFiles::default() };
    Conversion { files, output: place(output), types, rename: false, importance: Importance::default(), threads: 1 }
}

fn run(c: &Conversion) -> sd_runtime::Result<Converted> {
    c.run(&mut |_, _| {}, &CancelToken::new())
}

fn to(dtype: DType) -> TypeRules {
    TypeRules::new(Some(dtype), "").unwrap()
}

/// Name, type, shape and bytes of everything in a file.
fn contents(path: &Path) -> BTreeMap<String, (DType, Vec<usize>, Vec<u8>)> {
    let file = Checkpoint::open(path).unwrap();
    let tensor = |name: &&str| {
        let meta = file.meta(name).unwrap();
        ((*name).to_owned(), (meta.dtype, meta.shape.dims().to_vec(), file.bytes(name).unwrap().to_vec()))
    };
    file.names().iter().map(tensor).collect()
}

fn picture(path: &Path) -> Vec<u8> {
    let builder = Engine::builder().model(path).device("cpu").threads(1);
    let request = ImageRequest { steps: Some(1), ..support::oracle_request("sd1_pipeline.safetensors") };
    one(builder, &request).rgb
}

#[test]
fn formats_hold_the_same() {
    let original = sd1::write("convert-formats.safetensors", |_, _| {});
    let gguf = conversion(&original, "convert-formats.gguf", TypeRules::default());
    let report = run(&gguf).unwrap();
    assert_eq!(Checkpoint::open(&gguf.output).unwrap().format(), Format::Gguf);
    assert_eq!(contents(&gguf.output), contents(&original));
    assert_eq!(Checkpoint::open(&gguf.output).unwrap().metadata().str("format"), Some("pt"));
    let written: u64 = report.written.values().map(|(_, bytes)| bytes).sum();
    assert_eq!((report.read, report.kept.len()), (written, 0));

    let back = conversion(&gguf.output, "convert-back.safetensors", TypeRules::default());
    run(&back).unwrap();
    assert_eq!(fs::read(&back.output).unwrap(), fs::read(&original).unwrap());
    assert_eq!(picture(&gguf.output), picture(&original));
}

#[test]
fn types_are_those_of_the_rules_for_any_number_of_threads() {
    let original = sd1::write("convert-types.safetensors", |_, _| {});
    let before = contents(&original);
    for dtype in [DType::F32, DType::Q8_0, DType::Q4_0] {
        let rules = TypeRules::new(Some(dtype), "attn2=f32").unwrap();
        let one = conversion(&original, &format!("convert-{dtype}.gguf"), rules);
        let report = run(&one).unwrap();
        let three = Conversion { output: place(&format!("convert-{dtype}-3.gguf")), threads: 3, ..one.clone() };
        run(&three).unwrap();
        assert_eq!(fs::read(&one.output).unwrap(), fs::read(&three.output).unwrap(), "{dtype}");

        let after = contents(&one.output);
        assert_eq!(after.keys().collect::<Vec<_>>(), before.keys().collect::<Vec<_>>());
        let mut count = 0;
        for (name, (got, shape, bytes)) in &after {
            let (stored, _, old) = &before[name];
            let elements = shape.iter().product();
            let values = to_f32(*stored, old, elements).unwrap();
            // Without quantisation every value survives; with it, an eighth of its block's largest is a loose bound.
            let bound = if got.is_quantised() { 1.0 / 8.0 } else { 0.0 };
            let largest = values.iter().fold(0f32, |m, v| m.max(v.abs()));
            let back = to_f32(*got, bytes, elements).unwrap();
            assert!(values.iter().zip(&back).all(|(a, b)| (a - b).abs() <= bound * largest), "{name} as {got}");
            let want = if name.contains("attn2") { DType::F32 } else { dtype };
            count += usize::from(*got == want);
            assert!(*got == want || got == stored, "{name} is {got}");
            let matrix = shape.len() == 2 && shape[1] % 32 == 0;
            let inner = name.contains("mlp") || name.contains("attn1");
            assert!(*got == want || !matrix || !inner || name.ends_with("bias"), "{name} stayed {got}");
        }
        let kept: usize = report.kept.values().sum();
        let reported: usize = report.written.get(&dtype).unwrap().0 + report.written.get(&DType::F32).unwrap().0;
        assert!(count > 100 && (kept > 0) == dtype.is_quantised(), "{dtype}: {count}, kept {:?}", report.kept);
        assert!(reported <= after.len() + report.written.get(&DType::F32).unwrap().0);
    }
}

/// The names of diffusers in one file, as a folder's would be.
fn diffusers(name: &str) -> (PathBuf, BTreeMap<String, String>) {
    let original = contents(&sd1::write(&format!("source-{name}"), |_, _| {}));
    let rows = json("sd1_names.json");
    let text = |v: &serde_json::Value| v.as_str().unwrap().to_owned();
    let names = rows["names"].as_array().unwrap().iter().map(|r| (text(&r[0]), text(&r[2])));
    let names: BTreeMap<String, String> = names.collect();
    let spec = |(to, from): (&String, &String)| {
        let (dtype, _, _) = original[from];
        let row = rows["names"].as_array().unwrap().iter().find(|r| r[0] == to.as_str()).unwrap();
        let dims: Vec<usize> = serde_json::from_value(row[1].clone()).unwrap();
        TensorSpec { name: to.clone(), dtype, shape: sd_core::Shape::new(&dims).unwrap() }
    };
    let specs: Vec<TensorSpec> = names.iter().map(spec).collect();
    let path = place(name);
    write_safetensors(&path, &[], &specs, |s| Ok(original[&names[&s.name]].2.clone())).unwrap();
    (path, names)
}

#[test]
fn names_become_those_of_the_networks() {
    let (path, names) = diffusers("convert-diffusers.safetensors");
    let mut c = conversion(&path, "convert-renamed.safetensors", TypeRules::default());
    c.rename = true;
    run(&c).unwrap();
    let place = |n: &str| match n.strip_prefix("cond_stage_model.transformer.") {
        Some(rest) => format!("text_encoders.clip_l.transformer.{rest}"),
        None => n.to_owned(),
    };
    let want: BTreeSet<String> = names.values().map(|n| place(n)).collect();
    let after = contents(&c.output);
    assert_eq!(after.keys().cloned().collect::<BTreeSet<_>>(), want);
    let original = contents(&sd1::write("convert-renamed-source.safetensors", |_, _| {}));
    for (name, tensor) in &original {
        assert_eq!(after[&place(name)].2, tensor.2, "{name}");
    }
    assert_eq!(picture(&c.output), picture(&path));
}

/// Every code of an 8-bit float is a value of f16 (Micikevicius et al. 2022, table 1).
#[test]
fn eight_bit_floats_are_f16_in_gguf() {
    let codes: Vec<u8> = (0..=255).filter(|c| c & 0x7f != 0x7f).chain([0, 1]).collect();
    let spec = TensorSpec {
        name: "double_blocks.0.img_attn.qkv.weight".into(),
        dtype: DType::F8E4M3,
        shape: sd_core::Shape::new(&[8, 32]).unwrap(),
    };
    let path = place("convert-f8.safetensors");
    write_safetensors(&path, &[], std::slice::from_ref(&spec), |_| Ok(codes.clone())).unwrap();
    let c = conversion(&path, "convert-f8.gguf", TypeRules::default());
    run(&c).unwrap();
    let (dtype, _, bytes) = &contents(&c.output)[&spec.name];
    assert_eq!(*dtype, DType::F16);
    let value = |c: u8| {
        let (e, m) = (i32::from(c >> 3 & 15), f32::from(c & 7) / 8.0);
        let size = if e == 0 { m * 2f32.powi(-6) } else { (1.0 + m) * 2f32.powi(e - 7) };
        if c & 0x80 == 0 { size } else { -size }
    };
    assert_eq!(to_f32(*dtype, bytes, 256).unwrap(), codes.iter().map(|c| value(*c)).collect::<Vec<f32>>());
}

#[test]
fn parts_are_joined_into_one_file() {
    let original = contents(&sd1::write("convert-parts.safetensors", |_, _| {}));
    let part = |prefix: &str| {
        let tensors: Vec<_> = original.iter().filter(|(n, _)| n.starts_with(prefix)).collect();
        let specs: Vec<TensorSpec> = tensors
            .iter()
            .map(|(n, (dtype, shape, _))| TensorSpec {
                name: n[prefix.len()..].to_owned(),
                dtype: *dtype,
                shape: sd_core::Shape::new(shape).unwrap(),
            })
            .collect();
        let path = place(&format!("convert-part-{prefix}safetensors"));
        write_safetensors(&path, &[], &specs, |s| Ok(original[&format!("{prefix}{}", s.name)].2.clone())).unwrap();
        path
    };
    let parts = [
        (Part::Diffusion, part("model.diffusion_model.")),
        (Part::Autoencoder, part("first_stage_model.")),
        (Part::ClipL, part("cond_stage_model.transformer.")),
    ];
    let files = ModelFiles { model: None, parts: parts.into() };
    let mut c = conversion(Path::new(""), "convert-joined.gguf", TypeRules::default());
    c.files = files;
    run(&c).unwrap();
    assert_eq!(contents(&c.output).len(), original.len());
    assert_eq!(picture(&c.output), picture(&place("convert-parts.safetensors")));
}

#[test]
fn what_cannot_be_converted_is_named_and_leaves_nothing() {
    let file = |name: &str, tensors: &[(&str, DType)]| {
        let shape = sd_core::Shape::new(&[32, 32]).unwrap();
        let specs: Vec<TensorSpec> =
            tensors.iter().map(|(n, dtype)| TensorSpec { name: (*n).into(), dtype: *dtype, shape }).collect();
        let path = place(name);
        let bytes = |s: &TensorSpec| from_f32(s.dtype, &[300.0; 1024], 32);
        write_safetensors(&path, &[], &specs, bytes).unwrap();
        path
    };
    let lora = file("convert-lora.safetensors", &[("lora_unet_a.lora_up.weight", DType::F32)]);
    let other = file("convert-heron.safetensors", &[("heron.weight", DType::F32)]);
    let block = "double_blocks.0.img_attn.qkv";
    let (weight, scale) = (format!("{block}.weight"), format!("{block}.scale_weight"));
    let flux = file("convert-flux.safetensors", &[(&weight, DType::F32)]);
    let scaled = file("convert-scaled.safetensors", &[(&weight, DType::F8E4M3), (&scale, DType::F32)]);
    let large = place("convert-large.safetensors");
    let spec =
        TensorSpec { name: weight.clone(), dtype: DType::F32, shape: sd_core::Shape::new(&[32, 32]).unwrap() };
    write_safetensors(&large, &[], &[spec], |s| from_f32(s.dtype, &[1e6; 1024], 32)).unwrap();
    let output = place("convert-refused.gguf");
    let _ = fs::remove_file(&output);
    for (model, output, rules, want) in [
        (&lora, "convert-refused.gguf", TypeRules::default(), "convert-lora.safetensors: is a LoRA, not a model"),
        (&other, "convert-refused.gguf", TypeRules::default(), "holds no tensor of a known model"),
        (&flux, "convert-refused.safetensors", to(DType::Q8_0), "safetensors files cannot hold q8_0"),
        (&scaled, "convert-refused.gguf", to(DType::F16), scale.as_str()),
        (&large, "convert-refused.gguf", to(DType::F16), weight.as_str()),
        (&place("convert-absent.safetensors"), "convert-refused.gguf", to(DType::F16), "convert-absent"),
    ] {
        let e = run(&conversion(model, output, rules)).unwrap_err().to_string();
        assert!(e.contains(want), "{e}");
        assert!(!place(output).exists(), "{want}");
    }
    let cancel = CancelToken::new();
    cancel.cancel();
    let c = conversion(&flux, "convert-refused.gguf", TypeRules::default());
    assert!(c.run(&mut |_, _| {}, &cancel).unwrap_err().is_cancelled());
    let nothing = Conversion { files: ModelFiles::default(), ..c };
    assert!(run(&nothing).unwrap_err().is_request());
    assert!(!output.exists());
}

#[test]
fn an_importance_matrix_is_collected_and_weighs_columns() {
    let original = sd1::write("convert-importance.safetensors", |_, _| {});
    let builder = || Engine::builder().model(&original).device("cpu").threads(1);
    let request = ImageRequest { steps: Some(1), ..support::oracle_request("sd1_pipeline.safetensors") };
    let mut engine = builder().collect_importance(true).build().unwrap();
    let drawn = engine.generate(&request, &mut (), &CancelToken::new()).unwrap();
    assert_eq!(drawn[0].rgb, picture(&original), "taps change nothing");
    let found = engine.importance().unwrap().clone();
    assert!(builder().build().unwrap().importance().is_none());

    // Every linear layer of the network and of the text encoder, by the names in the file of the original layout.
    let file = contents(&original);
    let (path, rows) = (place("convert-importance.dat"), |name: &str| file.get(name).map(|t| t.1[1]));
    found.save(&path).unwrap();
    let read = Importance::open(&path).unwrap();
    let name = "model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight";
    assert_eq!(read.columns(name).map(|c| c.len()), rows(name));
    let matrices = file.iter().filter(|(n, (_, shape, _))| n.starts_with("model.diff") && shape.len() == 2);
    for (name, (_, shape, _)) in matrices {
        assert_eq!(read.columns(name).map(|c| c.len()), Some(shape[1]), "{name}");
    }

    let even = conversion(&original, "convert-even.gguf", to(DType::Q4_0));
    assert_eq!(run(&even).unwrap().weighted, 0);
    let weighted = Conversion { output: place("convert-weighted.gguf"), importance: read, ..even.clone() };
    let report = run(&weighted).unwrap();
    assert!(report.weighted > 20, "{}", report.weighted);
    assert_ne!(fs::read(&even.output).unwrap(), fs::read(&weighted.output).unwrap());
    // The same for a file in diffusers' names, whose tensors are found by the names that the network uses.
    let (other, _) = diffusers("convert-importance-diffusers.safetensors");
    let files = ModelFiles { model: Some(other), ..ModelFiles::default() };
    let renamed = Conversion { files, output: place("convert-weighted-diffusers.gguf"), ..weighted.clone() };
    assert!(run(&renamed).unwrap().weighted > 20);

    let mut wrong = Importance::default();
    wrong.add(name, &[1.0; 5], 1).unwrap();
    let e = run(&Conversion { importance: wrong, ..weighted }).unwrap_err();
    assert!(e.to_string().contains("5 columns") && e.to_string().contains(name), "{e}");
}
