use sd_core::Bytes;
use serde_json::{Map, Value, json};

use super::*;

type Shapes = BTreeMap<String, Vec<usize>>;

/// The tensors of a tiny SD 1.x in its single file.
fn single() -> Shapes {
    let names: Value = serde_json::from_str(include_str!("../../../../oracle/fixtures/sd1_names.json")).unwrap();
    let rows = names["names"].as_array().unwrap().iter();
    rows.map(|r| (r[2].as_str().unwrap().to_owned(), serde_json::from_value(r[3].clone()).unwrap())).collect()
}

fn below(prefix: &str) -> Shapes {
    single().iter().filter_map(|(n, s)| Some((n.strip_prefix(prefix)?.to_owned(), s.clone()))).collect()
}

/// A safetensors file of zeros in f16, but biases in f32.
fn file(name: &str, shapes: &Shapes) -> Arc<Checkpoint> {
    let (mut header, mut at) = (Map::new(), 0);
    for (n, shape) in shapes {
        let (dtype, size) = if n.ends_with("bias") { ("F32", 4) } else { ("F16", 2) };
        let end = at + size * shape.iter().product::<usize>();
        header.insert(n.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": [at, end]}));
        at = end;
    }
    let header = Value::Object(header).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.resize(bytes.len() + at, 0);
    Arc::new(Checkpoint::from_bytes(name, Bytes::from(bytes)).unwrap())
}

fn of_model(shapes: &Shapes) -> Survey {
    Survey::new(&Files { model: Some(file("m.safetensors", shapes)), ..Files::default() })
}

#[test]
fn a_whole_model() {
    let mut shapes = single();
    shapes.insert("model.diffusion_model.extra.weight".to_owned(), vec![3, 5]);
    let s = of_model(&shapes);
    assert_eq!((s.family, &s.missing[..]), (Some(Family::Sd1), &[][..]));
    assert!(s.problem.is_none(), "{:?}", s.problem);
    assert_eq!(s.info.as_ref().map(|i| i.family), Some(Family::Sd1));
    assert_eq!(s.defaults.as_ref().map(|d| d.size), Some([512, 512]));
    let unused: Vec<(&str, usize)> = s.unused.iter().map(|u| (u.example.as_str(), u.count)).collect();
    assert_eq!(unused, [("model.diffusion_model.extra.weight", 1)]);

    assert_eq!(s.parts.iter().map(|p| p.tensors).sum::<usize>(), shapes.len());
    let elements = |pick: fn(&str) -> bool| -> u64 {
        shapes.iter().filter(|(n, _)| pick(n)).map(|(_, s)| s.iter().product::<usize>() as u64).sum()
    };
    assert_eq!(s.parts.iter().map(|p| p.parameters).sum::<u64>(), elements(|_| true));
    let bytes = |dtype| s.parts.iter().filter_map(|p| p.stored.get(&dtype)).map(|(_, bytes)| bytes).sum::<u64>();
    assert_eq!(bytes(DType::F16), 2 * elements(|n| !n.ends_with("bias")));
    assert_eq!(bytes(DType::F32), 4 * elements(|n| n.ends_with("bias")));

    let [f] = &s.files[..] else { panic!("{:?}", s.files) };
    assert_eq!((f.kind, f.tensors), (FileKind::Model(Family::Sd1), shapes.len()));
    assert!(f.evidence.iter().any(|e| e.starts_with("cond_stage_model.transformer.")), "{:?}", f.evidence);
    assert!(f.evidence.iter().any(|e| e == "model.diffusion_model.input_blocks.0.0.weight [32, 4, 3, 3]"));
}

#[test]
fn missing_parts_are_named_and_the_others_checked() {
    let mut shapes = single();
    shapes.retain(|n, _| !n.starts_with("cond_stage_model."));
    let s = of_model(&shapes);
    assert_eq!((s.family, &s.missing[..]), (Some(Family::Sd1), &[Part::ClipL][..]));
    assert!(s.info.is_none() && s.problem.is_none() && s.unused.is_empty(), "{s:?}");
    assert_eq!(s.defaults.as_ref().map(|d| d.steps), Some(20));
    let sizes: Vec<_> = s.parts.iter().map(|p| (p.part, p.sizes.clone())).collect();
    let network = vec![("latent channels", 4), ("context channels", 64)];
    let vae = vec![("latent channels", 4), ("pixels per latent value", 8)];
    assert_eq!(sizes, [(Part::Diffusion, network), (Part::Autoencoder, vae)]);

    let name = "model.diffusion_model.middle_block.1.proj_in.weight";
    shapes.remove(name).unwrap();
    let s = of_model(&shapes);
    let problems: Vec<String> =
        s.parts.iter().filter_map(|p| p.problem.as_ref()).map(ToString::to_string).collect();
    assert!(matches!(&problems[..], [one] if one.contains(name)), "{problems:?}");
}

#[test]
fn files_of_one_part() {
    let vae = of_model(&below("first_stage_model."));
    assert_eq!((vae.files[0].kind, vae.family, vae.parts.len()), (FileKind::Parts, None, 1));
    assert_eq!((vae.parts[0].part, vae.parts[0].sizes[0]), (Part::Autoencoder, ("latent channels", 4)));
    assert!(vae.unused.is_empty(), "{:?}", vae.unused);

    let clip = of_model(&below("cond_stage_model.transformer."));
    assert_eq!((clip.files[0].kind, clip.parts[0].part), (FileKind::Parts, Part::ClipL));
    assert_eq!(clip.parts[0].sizes[0], ("channels", 64));

    let apart = Files {
        model: Some(file("m.safetensors", &below("first_stage_model."))),
        parts: [(Part::Diffusion, file("u.safetensors", &below("model.diffusion_model.")))].into(),
        ..Files::default()
    };
    let s = Survey::new(&apart);
    assert_eq!((s.family, &s.missing[..]), (Some(Family::Sd1), &[Part::ClipL][..]));
    assert_eq!((s.files[0].given_as, s.files[1].given_as), (None, Some(Part::Diffusion)));
    assert_eq!(s.parts[0].file, PathBuf::from("u.safetensors"));
}

#[test]
fn what_is_no_model() {
    let one = |name: &str| of_model(&[(name.to_owned(), vec![4, 4])].into()).files.remove(0);
    let lora = one("lora_unet_down_blocks_0.lora_up.weight");
    assert!(matches!(lora.kind, FileKind::Other("a LoRA", _)), "{lora:?}");
    assert_eq!(lora.evidence, ["lora_unet_down_blocks_0.lora_up.weight [4, 4]"]);
    assert_eq!(one("time_mixer.mix_factor").kind, FileKind::Unsupported("Stable Video Diffusion"));
    assert_eq!((one("heron.weight").kind, one("heron.weight").evidence.len()), (FileKind::Unknown, 0));
}
