//! The engine with ControlNets on the oracle's tiny SD 1.x and SDXL (`oracle/controlnet.py`).
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod support;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use sd_core::convert::from_f32;
use sd_core::{DType, Shape};
use sd_io::{TensorSpec, write_safetensors};
use sd_runtime::{ControlChoice, Engine, ImageRequest, InputImage, SamplerKind, SchedulerKind};
use support::layouts::single_file;
use support::{Fixture, Log, agrees, generate, json, oracle_request, procedural, sd1};

const SD1: &str = "sd1_control_pipeline";
const SDXL: &str = "sdxl_control_pipeline";

/// A tensor by the rule: its name there, and shape, exponent and shift.
type Rule = (String, (Vec<usize>, i32, f32));

/// Writes the ControlNet `key` of a fixture, each name as `rename` makes it of diffusers'.
fn write(fixture: &str, key: &str, rename: &dyn Fn(&str) -> String) -> PathBuf {
    let rules: BTreeMap<String, (Vec<usize>, i32, f32)> =
        serde_json::from_value(Fixture::open(&format!("{fixture}.safetensors")).metadata("procedural")).unwrap();
    let own = |(name, rule): Rule| {
        let bare = name.strip_prefix(key)?.strip_prefix('.')?;
        Some((rename(bare), (name, rule)))
    };
    let tensors: BTreeMap<String, _> = rules.into_iter().filter_map(own).collect();
    let spec = |(name, (_, (shape, ..))): (&String, &Rule)| TensorSpec {
        name: name.clone(),
        dtype: DType::F32,
        shape: Shape::new(shape).unwrap(),
    };
    let specs: Vec<TensorSpec> = tensors.iter().map(spec).collect();
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{fixture}-{key}.safetensors"));
    write_safetensors(&path, &[], &specs, |spec| {
        let (name, (_, exponent, shift)) = &tensors[&spec.name];
        from_f32(spec.dtype, &procedural(name, spec.shape.elements(), *exponent, *shift), spec.shape.last())
    })
    .unwrap();
    path
}

fn same(name: &str) -> String {
    name.to_owned()
}

/// In original names.
fn original(fixture: &str, key: &str) -> PathBuf {
    let names = json("controlnet_names.json");
    let rows: Vec<(String, String, Vec<usize>)> = serde_json::from_value(names["names"].clone()).unwrap();
    let pairs: BTreeMap<String, String> = rows.into_iter().map(|r| (r.0, r.1)).collect();
    write(fixture, key, &|name| pairs[name].clone())
}

fn engine(model: &PathBuf, controls: &[&PathBuf]) -> sd_runtime::Result<Engine> {
    let builder = Engine::builder().model(model).device("cpu").threads(1).weight_type(DType::F32);
    controls.iter().fold(builder, |builder, path| builder.control_net(path)).build()
}

fn request(fixture: &str) -> ImageRequest {
    ImageRequest {
        sampler: Some(SamplerKind::Euler),
        scheduler: Some(SchedulerKind::Discrete),
        ..oracle_request(&format!("{fixture}.safetensors"))
    }
}

fn picture(fixture: &str) -> InputImage {
    let file = Fixture::open(&format!("{fixture}.safetensors"));
    let config = file.metadata("config");
    let side = |key: &str| u32::try_from(config[key].as_u64().unwrap()).unwrap();
    InputImage { width: side("width"), height: side("height"), rgb: file.u8s("input.picture").to_vec() }
}

/// Controls with strengths, starts and ends of the fixture.
fn two() -> Vec<ControlChoice> {
    let spans = &Fixture::open(&format!("{SD1}.safetensors")).metadata("config")["two"];
    let control = |key: &str| {
        let number = |i: usize| spans[key][i].as_f64().unwrap();
        let (strength, start, end) = (number(0) as f32, number(1), number(2));
        ControlChoice { strength, start, end, ..ControlChoice::new(picture(SD1)) }
    };
    vec![control("a"), control("b")]
}

#[test]
fn sd1_agrees_with_diffusers_and_controls_are_swapped() {
    let (a, b) = (write(SD1, "control_a", &same), original(SD1, "control_b"));
    let model = sd1::write("controls.safetensors", |_, _| {});
    let mut engine = engine(&model, &[&a]).unwrap();
    assert_eq!(engine.info().control_nets, [format!("{SD1}-control_a")]);
    let one = ImageRequest { controls: vec![ControlChoice::new(picture(SD1))], ..request(SD1) };
    agrees(&mut engine, SD1, "one", &one);
    // A request without controls is followed as if there were no ControlNet.
    let plain = ImageRequest {
        sampler: Some(SamplerKind::Euler),
        scheduler: Some(SchedulerKind::Discrete),
        ..oracle_request("sd1_pipeline.safetensors")
    };
    agrees(&mut engine, "sd1_pipeline", "euler.discrete", &plain);

    let e = engine.set_control_nets(&[PathBuf::from("none.safetensors")]).unwrap_err();
    assert!(e.to_string().contains("none.safetensors"), "{e}");
    agrees(&mut engine, SD1, "one", &one);

    engine.set_control_nets(&[b.clone(), a.clone()]).unwrap();
    let named = |mut controls: Vec<ControlChoice>| {
        controls[0].net = Some(format!("{SD1}-control_a"));
        controls[1].net = Some(format!("{SD1}-control_b"));
        controls
    };
    agrees(&mut engine, SD1, "two", &ImageRequest { controls: named(two()), ..request(SD1) });
    engine.set_control_nets(&[a, b]).unwrap();
    agrees(&mut engine, SD1, "two", &ImageRequest { controls: two(), ..request(SD1) });

    engine.set_control_nets(&[]).unwrap();
    agrees(&mut engine, "sd1_pipeline", "euler.discrete", &plain);
    let e = generate(&mut engine, &one, &mut Log::default()).unwrap_err();
    assert!(e.is_request() && e.to_string().starts_with("controls: no ControlNet number 1, there is none"), "{e}");
}

/// A folder with these files, by their names there.
fn folder(name: &str, files: &[(&str, &Path)]) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    if folder.exists() {
        std::fs::remove_dir_all(&folder).unwrap();
    }
    for (name, file) in files {
        let to = folder.join(name);
        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
        std::fs::copy(file, to).unwrap();
    }
    folder
}

#[test]
fn requests_name_files_of_the_folder() {
    let (a, b) = (write(SD1, "control_a", &same), original(SD1, "control_b"));
    let model = sd1::write("controls-folder.safetensors", |_, _| {});
    let folder =
        folder("controls-folder", &[("sd15/a.safetensors", &a), ("b.safetensors", &b), ("model.pth", &model)]);
    let builder = Engine::builder().model(&model).device("cpu").threads(1).weight_type(DType::F32);
    let mut engine = builder.control_net(&b).control_net_folder(&folder).build().unwrap();
    let given = engine.info().control_nets[0].clone();
    let named = |nets: [&str; 2]| {
        let controls = two().into_iter().zip(nets);
        let controls = controls.map(|(c, net)| ControlChoice { net: Some(net.to_owned()), ..c }).collect();
        ImageRequest { controls, ..request(SD1) }
    };
    // In the folder, given, and both; each request swaps what is followed.
    agrees(&mut engine, SD1, "two", &named(["sd15/a", "b.safetensors"]));
    agrees(&mut engine, SD1, "two", &named(["sd15/a.safetensors", &given]));
    let one = ControlChoice { net: Some("sd15/a".into()), ..ControlChoice::new(picture(SD1)) };
    let one = ImageRequest { controls: vec![one], ..request(SD1) };
    agrees(&mut engine, SD1, "one", &one);
    let drawn = generate(&mut engine, &one, &mut Log::default()).unwrap().remove(0);
    assert!(drawn.parameters.to_text().contains("Model: sd15/a, "), "{}", drawn.parameters.to_text());
    // What was given may change, and what was named stays where it is.
    engine.set_control_nets(&[]).unwrap();
    agrees(&mut engine, SD1, "two", &named(["sd15/a", "b"]));
    // A file that is another one now is opened again.
    std::fs::copy(&b, folder.join("sd15/a.safetensors")).unwrap();
    let swapped = generate(&mut engine, &one, &mut Log::default()).unwrap().remove(0);
    assert!(swapped.rgb != drawn.rgb);
    std::fs::copy(&a, folder.join("sd15/a.safetensors")).unwrap();
    agrees(&mut engine, SD1, "one", &one);
    for (net, want) in [
        ("c", "ControlNet c: not found in the folder of ControlNets"),
        ("../controls-folder/b", "ControlNet ../controls-folder/b: is outside of the folder"),
        (a.to_str().unwrap(), "is outside of the folder of ControlNets"),
        ("model", "ControlNet model: model.pth: holds no ControlNet"),
    ] {
        let e = generate(&mut engine, &named(["sd15/a", net]), &mut Log::default()).unwrap_err();
        assert!(e.is_request() && e.to_string().contains(want), "{e}");
        assert!(!e.to_string().contains(folder.to_str().unwrap()), "{e}");
    }
    let controls = vec![ControlChoice::new(picture(SD1)); 9];
    let e = generate(&mut engine, &ImageRequest { controls, ..request(SD1) }, &mut Log::default()).unwrap_err();
    assert!(e.is_request() && e.to_string().starts_with("controls: want at most 8, got 9"), "{e}");
}

/// More ControlNets than stay open, one after the other, each drawn as by an engine that has it alone.
#[test]
fn the_latest_of_the_folder_stay_open() {
    let (a, b) = (write(SD1, "control_a", &same), original(SD1, "control_b"));
    let model = sd1::write("controls-many.safetensors", |_, _| {});
    let names: Vec<String> = (0..11).map(|i| format!("{i}.safetensors")).collect();
    let files: Vec<(&str, &Path)> = (0..).zip(&names).map(|(i, n)| (n.as_str(), [&*a, &*b][i % 2])).collect();
    let folder = folder("controls-many", &files);
    let builder = Engine::builder().model(&model).device("cpu").threads(1).weight_type(DType::F32);
    let mut engine = builder.control_net_folder(&folder).build().unwrap();
    let of = |net: usize| {
        let control = ControlChoice { net: Some(net.to_string()), ..ControlChoice::new(picture(SD1)) };
        ImageRequest { controls: vec![control], steps: Some(1), ..request(SD1) }
    };
    let mut draw = |net| generate(&mut engine, &of(net), &mut Log::default()).unwrap().remove(0).rgb;
    let first = [draw(0), draw(1)];
    assert!(first[0] != first[1]);
    for net in [2, 3, 4, 5, 6, 7, 8, 9, 10, 3, 0, 1] {
        assert!(draw(net) == first[net % 2], "{net}");
    }
}

#[test]
fn sdxl_agrees_with_diffusers() {
    let control = write(SDXL, "control", &same);
    let model = single_file("sdxl_pipeline", "controls-sdxl", &[]);
    let mut engine = engine(&model, &[&control]).unwrap();
    let request = ImageRequest { controls: vec![ControlChoice::new(picture(SDXL))], ..request(SDXL) };
    agrees(&mut engine, SDXL, "one", &request);
    // The parameters say what was followed.
    let image = generate(&mut engine, &request, &mut Log::default()).unwrap().remove(0);
    let want = format!(
        "ControlNet 0: \"Module: none, Model: {SDXL}-control, Weight: 0.9, Guidance Start: 0, Guidance End: 1\""
    );
    assert!(image.parameters.to_text().contains(&want), "{}", image.parameters.to_text());
}

#[test]
fn a_controlnet_of_another_family_is_named() {
    let model = sd1::write("controls-other.safetensors", |_, _| {});
    let error = |path: PathBuf| engine(&model, &[&path]).unwrap_err().to_string();
    let e = error(write(SDXL, "control", &same));
    for part in [
        "control_net",
        "sdxl_control_pipeline-control.safetensors",
        "states of the prompt: the ControlNet reads 192 channels, SD 1.x has 64 channels",
        "another family of models",
    ] {
        assert!(e.contains(part), "{e}");
    }
    let e = error(model.clone());
    assert!(e.contains("holds no ControlNet"), "{e}");
}

#[test]
fn pictures_are_fitted_and_wrong_controls_are_named() {
    let a = write(SD1, "control_a", &|name| format!("controlnet.{name}"));
    let mut engine = engine(&sd1::write("controls-sizes.safetensors", |_, _| {}), &[&a]).unwrap();
    let image = InputImage { width: 30, height: 20, rgb: [200, 90, 30].repeat(600) };
    let control = ControlChoice { canny: true, ..ControlChoice::new(image) };
    let of = |control: ControlChoice| ImageRequest { controls: vec![control], steps: Some(1), ..request(SD1) };
    // Without a size the picture has that of what it follows.
    let free = ImageRequest { width: None, height: None, ..of(control.clone()) };
    let drawn = generate(&mut engine, &free, &mut Log::default()).unwrap().remove(0);
    assert_eq!((drawn.width, drawn.height), (32, 24));
    for (control, want) in [
        (ControlChoice { start: 0.7, end: 0.2, ..control.clone() }, "controls: it starts at 0.7"),
        (ControlChoice { end: 2.0, ..control.clone() }, "controls.end: want a number from 0 to 1"),
        (ControlChoice { strength: f32::NAN, ..control.clone() }, "controls.strength: want a number"),
        (ControlChoice { net: Some("x".into()), ..control.clone() }, "controls: no ControlNet x, want one of"),
        (ControlChoice::new(InputImage { width: 0, height: 1, rgb: vec![] }), "controls.image: "),
    ] {
        let e = generate(&mut engine, &of(control), &mut Log::default()).unwrap_err();
        assert!(e.is_request() && e.to_string().starts_with(want), "{e}");
    }
}

/// The demo's ControlNet puts objects where there are edges, though the prompt would have them in the middle.
#[test]
fn objects_follow_the_edges() {
    let asset = |name: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets").join(name);
    let mut engine = engine(&asset("demo.safetensors"), &[&asset("demo-edges.safetensors")]).unwrap();
    let side = 128u32;
    // The outline of a square of 42 pixels in a corner.
    let edges = |left: u32, top: u32| {
        let on = |x: u32, y: u32| {
            let (x, y) = (x.wrapping_sub(left), y.wrapping_sub(top));
            x <= 42 && y <= 42 && (x <= 1 || y <= 1 || x >= 41 || y >= 41)
        };
        let pixels = (0..side * side).flat_map(|i| [if on(i % side, i / side) { 255 } else { 0 }; 3]);
        InputImage { width: side, height: side, rgb: pixels.collect() }
    };
    // The middle of what is red.
    let mut middle = |controls: Vec<ControlChoice>| {
        let r = ImageRequest {
            prompt: "a red square on a blue background".to_owned(),
            width: Some(side),
            height: Some(side),
            controls,
            ..Default::default()
        };
        let rgb = generate(&mut engine, &r, &mut Log::default()).unwrap().remove(0).rgb;
        let red = rgb.chunks(3).zip(0..).filter(|(p, _)| i32::from(p[0]) > i32::from(p[2]) + 60);
        let at: Vec<(f64, f64)> = red.map(|(_, i)| (f64::from(i % side), f64::from(i / side))).collect();
        assert!(at.len() > 500, "{} red pixels", at.len());
        let mean = |of: fn(&(f64, f64)) -> f64| at.iter().map(of).sum::<f64>() / at.len() as f64;
        (mean(|p| p.0), mean(|p| p.1))
    };
    let near = |(x, y): (f64, f64), (a, b): (f64, f64)| (x - a).abs() < 8.0 && (y - b).abs() < 8.0;
    let free = middle(Vec::new());
    assert!(near(free, (64.0, 64.0)), "{free:?}");
    for (left, top) in [(12, 12), (74, 12), (12, 74), (74, 74)] {
        let control = ControlChoice { strength: 1.0, ..ControlChoice::new(edges(left, top)) };
        let found = middle(vec![control]);
        assert!(near(found, (f64::from(left) + 21.0, f64::from(top) + 21.0)), "{left}, {top}: {found:?}");
    }
}
