use std::path::Path;

use sd_io::{Checkpoint, TensorSpec, write_safetensors};

use super::*;

fn fixture() -> Arc<Checkpoint> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../oracle/fixtures/scaled.safetensors");
    Arc::new(Checkpoint::open(path).unwrap())
}

fn f32s(source: &dyn WeightSource, name: &str) -> Vec<f32> {
    let meta = source.meta(name).unwrap();
    to_f32(meta.dtype, &source.bytes(name).unwrap(), meta.shape.elements()).unwrap()
}

#[test]
fn every_spelling_has_the_values_of_the_reference() {
    let file = fixture();
    let source = ScaledSource::wrap(file.clone(), ScaledAs::Values(DType::F32)).unwrap();
    let names: Vec<String> = source.names().iter().map(|n| (*n).to_owned()).collect();
    let mut compared = 0;
    for output in names.iter().filter(|n| n.starts_with("output.")) {
        let case = output.strip_prefix("output.").unwrap();
        let weight = format!("{case}.weight");
        let (want, got) = (f32s(&*file, output), f32s(&*source, &weight));
        assert_eq!(source.meta(&weight).unwrap().shape, file.meta(output).unwrap().shape, "{case}");
        // Rotations add in another order than the reference's matrix product; all else is one product.
        let within = if case.starts_with("turned") { 2e-7 } else { 0.0 };
        let worst = want.iter().zip(&got).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst <= within, "{case}: {worst}");
        compared += 1;
    }
    assert_eq!(compared, 17);
    // What scales is not seen, and what does not is.
    assert!(names.contains(&"old.bias".to_owned()));
    let rest: Vec<&String> =
        names.iter().filter(|n| !n.ends_with(".weight") && !n.starts_with("output.")).collect();
    assert_eq!(rest, ["old.bias"]);
}

#[test]
fn blocks_have_the_values_of_the_reference() {
    let file = fixture();
    let source = ScaledSource::wrap(file.clone(), ScaledAs::Blocks).unwrap();
    for (case, dtype) in [
        ("long_rows", DType::F8E4M3S),
        ("long_wide", DType::F8E5M2S),
        ("long_blocks", DType::F8E4M3S),
        ("int8", DType::I8S),
        ("nvfp4", DType::F4S),
    ] {
        let weight = format!("{case}.weight");
        let meta = source.meta(&weight).unwrap();
        assert_eq!(
            (meta.dtype, meta.shape),
            (dtype, file.meta(&format!("output.{case}")).unwrap().shape),
            "{case}"
        );
        assert_eq!(f32s(&*source, &weight), f32s(&*file, &format!("output.{case}")), "{case}");
    }
    // Rows of 32, of 140 by blocks, kernels, and what was rotated.
    for case in ["rows", "edges", "conv", "turned", "mxfp8"] {
        assert_eq!(source.meta(&format!("{case}.weight")).unwrap().dtype, DType::BF16, "{case}");
    }
}

#[test]
fn bf16_is_rounded_once() {
    let file = fixture();
    let source = ScaledSource::wrap(file.clone(), ScaledAs::Values(DType::BF16)).unwrap();
    let want = f32s(&*file, "output.rows");
    let want = from_f32(DType::BF16, &want, want.len()).unwrap();
    assert_eq!(source.meta("rows.weight").unwrap().dtype, DType::BF16);
    assert_eq!(source.bytes("rows.weight").unwrap()[..], want[..]);
}

#[test]
fn rotating_twice_changes_nothing() {
    let mut group: Vec<f32> = (0..64u8).map(f32::from).collect();
    // The first row of the matrix of 4: (1 + 1 + 1 - 1) / 2 for ones.
    let mut ones = [1.0f32; 4];
    rotate(&mut ones);
    assert_eq!(ones, [1.0; 4]);
    let mut unit = [1.0f32, 0.0, 0.0, 0.0];
    rotate(&mut unit);
    assert_eq!(unit, [0.5, 0.5, 0.5, -0.5]);
    rotate(&mut group);
    rotate(&mut group);
    assert!(group.iter().zip(0..64u8).all(|(v, i)| (v - f32::from(i)).abs() < 1e-4));
}

/// Name, type, shape, and the text that it holds before zeros.
type Row<'a> = (&'a str, DType, &'a [usize], &'a str);

/// The error of a file with these tensors.
fn refused(tensors: &[Row<'_>]) -> String {
    let dir = std::env::temp_dir().join(format!("sd-models-scaled-{}-{:p}", std::process::id(), tensors));
    let path = dir.join("m.safetensors");
    let specs: Vec<TensorSpec> = tensors
        .iter()
        .map(|(name, dtype, dims, _)| TensorSpec {
            name: (*name).to_owned(),
            dtype: *dtype,
            shape: sd_core::Shape::new(dims).unwrap(),
        })
        .collect();
    write_safetensors(&path, &[], &specs, |spec| {
        let text = tensors.iter().find(|t| t.0 == spec.name).map(|t| t.3).unwrap_or_default();
        let mut bytes = text.as_bytes().to_vec();
        bytes.resize(spec.bytes()? as usize, 0);
        Ok(bytes)
    })
    .unwrap();
    let opened = ScaledSource::wrap(Arc::new(Checkpoint::open(&path).unwrap()), ScaledAs::Values(DType::F32));
    std::fs::remove_dir_all(dir).unwrap();
    let message = opened.err().unwrap().to_string();
    assert!(message.contains("m.safetensors: tensor "), "{message}");
    message
}

#[test]
fn companions_that_are_not_understood_are_errors() {
    use DType::{F8E4M3, F16, F32, I8, U8};
    let note = r#"{"format": "int8_tensorwise", "convrot": true, "convrot_groupsize": 8}"#;
    let cases: &[(&[Row<'_>], &str)] = &[
        (&[("a.scale_weight", F32, &[], "")], "a.scale_weight scales a.weight, which is missing"),
        (
            &[
                ("a.weight", U8, &[usize::MAX, 0], ""),
                ("a.weight_scale", F8E4M3, &[0], ""),
                ("a.weight_scale_2", F32, &[], ""),
                ("a.comfy_quant", U8, &[19], r#"{"format": "nvfp4"}"#),
            ],
            "want a scale for each group of columns in tiles of 128 rows",
        ),
        (
            &[("a.weight", F8E4M3, &[4, 6], ""), ("a.weight_scale", F32, &[5], "")],
            "a.weight_scale is [5] f32, a.weight is [4, 6] f8_e4m3; want one scale",
        ),
        (
            &[("a.weight", F8E4M3, &[4, 6], ""), ("a.weight_scale", F32, &[3, 2], "")],
            "want one scale, one per row or one per block",
        ),
        (&[("a.weight", F16, &[4, 6], ""), ("a.weight_scale", F32, &[1], "")], "want an FP8 or int8 weight"),
        (
            &[
                ("a.weight", F8E4M3, &[4, 6], ""),
                ("a.weight_scale", F32, &[1], ""),
                ("a.scale_weight", F32, &[1], ""),
            ],
            "scales the same weight as",
        ),
        (&[("a.weight", I8, &[4, 6], "")], "a.weight is stored as int8 without the scales"),
        (
            &[("a.weight", I8, &[4, 8], ""), ("a.weight_scale", F32, &[4], ""), ("a.comfy_quant", U8, &[70], note)],
            "rotated in groups of 8, want a power of 4",
        ),
        (
            &[
                ("a.weight", U8, &[4, 8], ""),
                ("a.weight_scale", F32, &[4], ""),
                ("a.comfy_quant", U8, &[18], r#"{"format": "new4"}"#),
            ],
            "a.weight is stored as u8 in the format new4, which is not read",
        ),
        (
            &[
                ("a.weight", U8, &[4, 8], ""),
                ("a.weight_scale", F8E4M3, &[4], ""),
                ("a.comfy_quant", U8, &[19], r#"{"format": "nvfp4"}"#),
            ],
            "a.weight is nvfp4 without its weight_scale_2",
        ),
        (&[("a.weight", F8E4M3, &[4, 6], ""), ("a.comfy_quant", U8, &[3], "{{}")], "a.comfy_quant is not JSON"),
        (
            &[
                ("a.weight", F8E4M3, &[4, 6], ""),
                ("a.weight_scale", F32, &[1], ""),
                ("a.weight_scale_2", F32, &[1], ""),
            ],
            "which only nvfp4 has",
        ),
        (
            &[("a.weight", U8, &[4, 6], ""), ("a.weight.absmax", F32, &[1], "")],
            "a.weight.absmax belongs to bitsandbytes",
        ),
        (&[("a.wscales", F16, &[4], "")], "a.wscales belongs to SVDQuant"),
    ];
    for (tensors, want) in cases {
        let message = refused(tensors);
        assert!(message.contains(want), "{message:?} lacks {want:?}");
    }
}

#[test]
fn an_ordinary_checkpoint_is_returned_as_it_is() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../oracle/fixtures/clip_text.safetensors");
    let file: Arc<dyn WeightSource> = Arc::new(Checkpoint::open(path).unwrap());
    assert!(Arc::ptr_eq(&ScaledSource::wrap(file.clone(), ScaledAs::Values(DType::F32)).unwrap(), &file));
}

#[test]
fn a_part_of_a_model_has_values() {
    use crate::component::Component;
    let dir = std::env::temp_dir().join(format!("sd-models-scaled-part-{}", std::process::id()));
    let path = dir.join("m.safetensors");
    let unet = "model.diffusion_model";
    let (weight, scale) =
        (format!("{unet}.input_blocks.0.0.weight"), format!("{unet}.input_blocks.0.0.scale_weight"));
    let marker = format!("{unet}.scaled_fp8");
    let spec = |name: &String, dtype, dims: &[usize]| TensorSpec {
        name: name.clone(),
        dtype,
        shape: sd_core::Shape::new(dims).unwrap(),
    };
    let specs =
        [spec(&weight, DType::F8E4M3, &[2, 2]), spec(&scale, DType::F32, &[]), spec(&marker, DType::F8E4M3, &[2])];
    // 1, 2, 4 and -1 in E4M3, times a half.
    write_safetensors(&path, &[], &specs, |s| {
        Ok(match &s.name {
            n if *n == weight => vec![0x38, 0x40, 0x48, 0xb8],
            n if *n == scale => 0.5f32.to_le_bytes().to_vec(),
            _ => vec![0; 2],
        })
    })
    .unwrap();
    let file: Arc<dyn WeightSource> = Arc::new(Checkpoint::open(&path).unwrap());
    let [part] = Component::split(&file, None).try_into().ok().unwrap();
    let source = part.source();
    assert_eq!(source.names(), ["input_blocks.0.0.weight"]);
    assert_eq!(f32s(&*source, "input_blocks.0.0.weight"), [0.5, 1.0, 2.0, -0.5]);
    // The report counts what is stored, and no companion as unread.
    assert_eq!(part.bytes(), 4);
    let mut left_out = part.left_out().to_vec();
    left_out.sort();
    assert_eq!(left_out, [scale, marker]);
    std::fs::remove_dir_all(dir).unwrap();
}
