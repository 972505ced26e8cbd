use std::collections::BTreeMap;
use std::fs;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use sd_core::exec::Runner;
use sd_core::{CancelToken, DType, Device, RunnerOptions, Shape, TypePolicy};
use sd_io::{TensorSpec, write_gguf, write_safetensors};

use super::*;
use crate::family::Joined;
use crate::testing::{Fixture, real_checkpoint};

/// A folder that goes when the test ends.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("sd-models-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Names and shapes of a tiny SD 1.x.
type Shapes = BTreeMap<String, Vec<usize>>;

/// `[diffusers, single file]`, as the oracle lists them.
fn tiny() -> [Shapes; 2] {
    let names: serde_json::Value =
        serde_json::from_str(include_str!("../../../../oracle/fixtures/sd1_names.json")).unwrap();
    let rows = names["names"].as_array().unwrap();
    [0, 2].map(|i| {
        let dims = |v: &serde_json::Value| serde_json::from_value(v.clone()).unwrap();
        rows.iter().map(|r| (r[i].as_str().unwrap().to_owned(), dims(&r[i + 1]))).collect()
    })
}

fn single() -> Shapes {
    tiny().into_iter().nth(1).unwrap()
}

/// Those that start with `prefix`, which is replaced.
fn below(shapes: &Shapes, prefix: &str, by: &str) -> Shapes {
    shapes.iter().filter_map(|(n, s)| Some((format!("{by}{}", n.strip_prefix(prefix)?), s.clone()))).collect()
}

fn specs(shapes: &Shapes) -> Vec<TensorSpec> {
    let spec = |(n, s): (&String, &Vec<usize>)| TensorSpec {
        name: n.clone(),
        dtype: DType::F16,
        shape: Shape::new(s).unwrap(),
    };
    shapes.iter().map(spec).collect()
}

fn zeros(spec: &TensorSpec) -> Result<Vec<u8>> {
    Ok(vec![0; spec.bytes()? as usize])
}

fn write(path: &Path, metadata: &[(&str, &str)], shapes: &Shapes) -> Arc<Checkpoint> {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    match path.extension().and_then(|e| e.to_str()) {
        Some("gguf") => write_gguf(path, &[], &specs(shapes), zeros).unwrap(),
        _ => write_safetensors(path, metadata, &specs(shapes), zeros).unwrap(),
    }
    Arc::new(Checkpoint::open(path).unwrap())
}

fn open(shapes: &Shapes) -> Result<Model> {
    open_with(&[], shapes)
}

fn open_with(metadata: &[(&str, &str)], shapes: &Shapes) -> Result<Model> {
    let folder = Folder::new();
    let file = write(&folder.join("m.safetensors"), metadata, shapes);
    Model::open(&Files { model: Some(file), ..Files::default() })
}

fn error(shapes: &Shapes) -> String {
    let result = open(shapes).and_then(|m| m.dry_run());
    result.unwrap_err().to_string()
}

fn evaluation(batch: usize, size: [usize; 2], tokens: usize) -> Evaluation {
    Evaluation { batch, size, tokens, ..Evaluation::default() }
}

fn signatures(m: &Model) -> Vec<u128> {
    let programs = [
        m.text_program(Part::ClipL, 2, 1),
        m.diffusion_program(&evaluation(2, [8, 16], 154)),
        m.decode_program(1, 8, 16, [false; 2]),
        m.encode_program(1, 64, 32, [false; 2]),
    ];
    programs.into_iter().map(|p| p.unwrap().signature()).collect()
}

#[test]
fn every_naming_gives_the_same_graphs() {
    let [diffusers, original] = tiny();
    let dir = Folder::new();
    let whole = Model::open(&Files {
        model: Some(write(&dir.join("whole.safetensors"), &[], &original)),
        ..Files::default()
    })
    .unwrap();
    let report = whole.dry_run().unwrap();
    assert_eq!(report.unused, []);
    assert_eq!(report.parts.iter().map(|p| p.tensors).sum::<usize>(), original.len());
    let elements: usize = original.values().map(|s| s.iter().product::<usize>()).sum();
    assert_eq!(report.parts.iter().map(|p| p.parameters).sum::<u64>(), elements as u64);
    assert_eq!(report.parts.iter().map(|p| p.bytes).sum::<u64>(), 2 * elements as u64);

    for (component, file) in
        [("unet", "diffusion_pytorch_model"), ("vae", "diffusion_pytorch_model"), ("text_encoder", "model")]
    {
        let path = dir.join(&format!("folder/{component}/{file}.safetensors"));
        write(&path, &[], &below(&diffusers, &format!("{component}."), ""));
    }
    let folder = Arc::new(Checkpoint::open(dir.join("folder")).unwrap());
    let gguf = write(&dir.join("whole.gguf"), &[], &original);
    let unet = write(&dir.join("unet.gguf"), &[], &below(&original, "model.diffusion_model.", ""));
    let unet_prefixed = write(
        &dir.join("unet.safetensors"),
        &[],
        &below(&original, "model.diffusion_model.", "model.diffusion_model."),
    );
    let clip = write(&dir.join("clip_l.safetensors"), &[], &below(&original, "cond_stage_model.transformer.", ""));
    let vae = write(&dir.join("vae.safetensors"), &[], &below(&original, "first_stage_model.", ""));
    let vae_diffusers = write(&dir.join("vae2.safetensors"), &[], &below(&diffusers, "vae.", ""));
    let parts = |diffusion: &Arc<Checkpoint>, vae: &Arc<Checkpoint>| Files {
        model: None,
        parts: [(Part::Diffusion, diffusion), (Part::ClipL, &clip), (Part::Autoencoder, vae)]
            .map(|(part, file)| (part, file.clone()))
            .into(),
        ..Files::default()
    };
    for files in [
        Files { model: Some(folder), ..Files::default() },
        Files { model: Some(gguf), ..Files::default() },
        parts(&unet, &vae),
        parts(&unet_prefixed, &vae_diffusers),
    ] {
        let model = Model::open(&files).unwrap();
        assert_eq!(model.dry_run().unwrap().unused, []);
        assert_eq!(signatures(&model), signatures(&whole));
        assert_eq!(model.info(), whole.info());
    }
}

#[test]
fn facts_of_sd1() {
    let model = open(&single()).unwrap();
    let info = model.info();
    assert_eq!((info.family, info.size_multiple, info.tokens), (Family::Sd1, 64, 77));
    assert_eq!(info.latent, Latent { channels: 4, compression: 8, scale: 0.18215, shift: 0.0 });
    assert_eq!((info.prediction, &info.noise), (Some(Prediction::Epsilon), &Noise::ScaledLinear));
    assert_eq!((info.defaults.size, info.defaults.steps, info.defaults.cfg), ([512, 512], 20, 7.0));
}

#[test]
fn a_file_can_name_its_size() {
    let size = |text| open_with(&[("sd-rs.default_size", text)], &single()).unwrap().info().defaults.size;
    assert_eq!(size("128x192"), [128, 192]);
    for bad in ["", "128", "100x100", "-64x64", "0x64", "99999999999999999999x64", "8192x64", "64x64x64"] {
        assert_eq!(size(bad), [512, 512], "{bad}");
    }
}

#[test]
fn a_file_can_bring_its_noise_table() {
    let dir = Folder::new();
    let mut shapes = single();
    shapes.insert("alphas_cumprod".into(), vec![1000]);
    shapes.insert("v_pred".into(), vec![1]);
    let open = |value: u16| {
        let bytes = |spec: &TensorSpec| match spec.name.as_str() {
            "alphas_cumprod" => Ok(value.to_le_bytes().repeat(1000)),
            _ => zeros(spec),
        };
        let path = dir.join("m.safetensors");
        write_safetensors(&path, &[], &specs(&shapes), bytes).unwrap();
        let file = Arc::new(Checkpoint::open(&path).unwrap());
        Model::open(&Files { model: Some(file), ..Files::default() })
    };
    // 0.5, 2 and not-a-number as f16.
    let model = open(0x3800).unwrap();
    assert_eq!(model.info().noise, Noise::AlphasCumprod(vec![0.5; 1000]));
    assert_eq!(model.info().prediction, Some(Prediction::V));
    assert_eq!(model.dry_run().unwrap().unused, []);
    for (value, shown) in [(0x4000, "value 0 is 2"), (0x7e00, "value 0 is NaN")] {
        let e = open(value).err().unwrap().to_string();
        assert!(e.contains("m.safetensors: alphas_cumprod") && e.contains(shown), "{e}");
    }
}

#[test]
fn messages_say_what_is_wrong_and_what_to_do() {
    let without =
        |prefix: &str| -> Shapes { single().into_iter().filter(|(n, _)| !n.starts_with(prefix)).collect() };
    let with = |name: &str, dims: &[usize]| -> Shapes {
        let mut all = single();
        all.insert(name.into(), dims.to_vec());
        all
    };
    let says = |shapes: &Shapes, parts: &[&str]| {
        let e = error(shapes);
        assert!(parts.iter().all(|p| e.contains(p)), "{e}");
    };
    says(&without("first_stage_model."), &["m.safetensors: holds no VAE", "--vae"]);
    says(&without("cond_stage_model."), &["m.safetensors: holds no CLIP text encoder", "--clip_l"]);
    let network: Shapes = single().into_iter().filter(|(n, _)| n.starts_with("model.diffusion_model.")).collect();
    let all = "m.safetensors: holds no CLIP text encoder and VAE, which SD 1.x needs   hint: give them with --clip_l and --vae";
    says(&network, &[all]);
    says(&without("model.diffusion_model."), &["holds no diffusion network, only: VAE, CLIP text encoder", "-m"]);
    says(&Shapes::from([("x".into(), vec![1])]), &["m.safetensors: holds no tensor of a known model"]);

    let first = "model.diffusion_model.input_blocks.0.0.weight";
    says(&with(first, &[32, 7, 3, 3]), &["a UNet that reads 7 channels and predicts 4"]);
    let vector = "model.diffusion_model.label_emb.0.0.weight";
    says(&with(vector, &[4, 1344]), &["holds no second CLIP text encoder", "--clip_g"]);
    says(&with(vector, &[4, 4]), &["holds no second CLIP text encoder", "--clip_g"]);

    let conv = "model.diffusion_model.input_blocks.4.0.in_layers.2.weight";
    says(&without(conv), &[conv, "missing from", "m.safetensors"]);
    let mut renamed = without(conv);
    renamed.insert(conv.replace("in_layers.2.w", "in_layers.1.w"), vec![64, 32, 3, 3]);
    says(&renamed, &[conv, "hint: the file has", "in_layers.1.weight, which nothing reads"]);
    says(&with(conv, &[64, 31, 3, 3]), &[conv, "want [*, 32, *, *]; file has [64, 31, 3, 3] f16", "m.safetensors"]);

    let table = "cond_stage_model.transformer.text_model.embeddings.token_embedding.weight";
    says(&with(table, &[49408, 128]), &["text encoder's states have 128 channels", "reads 64"]);
    says(&with(table, &[400, 64]), &["knows 400 tokens, CLIP has 49408"]);
}

#[test]
fn what_nothing_reads_is_counted_in_groups() {
    let mut shapes = single();
    for name in ["model_ema.decay", "betas", "cond_stage_model.transformer.text_model.embeddings.position_ids"] {
        shapes.insert(name.into(), vec![1]);
    }
    for name in ["model.diffusion_model.extra.0", "model.diffusion_model.extra.1", "other"] {
        shapes.insert(name.into(), vec![1]);
    }
    let unused = open(&shapes).unwrap().dry_run().unwrap().unused;
    let short: Vec<(&str, usize, &str)> =
        unused.iter().map(|u| (u.group.as_str(), u.count, u.example.as_str())).collect();
    assert_eq!(short, [("model.diffusion_model", 2, "model.diffusion_model.extra.0"), ("other", 1, "other")],);
}

/// Prompts to contexts, as transformers computes them and the web UI weighs them.
/// Matrices in FP8, each with a scale, as files of ComfyUI have them.
#[test]
fn scaled_weights_are_read_with_their_scales() {
    let folder = Folder::new();
    let scaled = |s: &Shapes, scale: &str| {
        let mut out = Vec::new();
        for mut spec in specs(s) {
            if spec.shape.rank() == 2 && spec.name.contains(".attn") {
                let module = spec.name.strip_suffix(".weight").unwrap();
                let name = format!("{module}.{scale}");
                spec.dtype = DType::F8E4M3;
                out.push(TensorSpec { name, dtype: DType::F32, shape: Shape::new(&[]).unwrap() });
            }
            out.push(spec);
        }
        let marker = "model.diffusion_model.scaled_fp8".to_owned();
        out.push(TensorSpec { name: marker, dtype: DType::F8E4M3, shape: Shape::new(&[2]).unwrap() });
        out
    };
    let open = |specs: &[TensorSpec]| {
        let path = folder.join("m.safetensors");
        write_safetensors(&path, &[], specs, zeros).unwrap();
        Model::open(&Files { model: Some(Arc::new(Checkpoint::open(&path).unwrap())), ..Files::default() })
    };
    for scale in ["scale_weight", "weight_scale"] {
        let specs = scaled(&single(), scale);
        assert!(specs.iter().filter(|s| s.dtype == DType::F8E4M3).count() > 10);
        let report = open(&specs).unwrap().dry_run().unwrap();
        assert!(report.unused.is_empty(), "{scale}: {:?}", report.unused);
    }
    let mut specs = scaled(&single(), "scale_weight");
    let first = specs.iter_mut().find(|s| s.name.ends_with("scale_weight")).unwrap();
    first.shape = Shape::new(&[3]).unwrap();
    let e = open(&specs).err().unwrap().to_string();
    assert!(e.contains(".scale_weight is [3] f32") && e.contains("want one scale, one per row"), "{e}");
}

#[test]
fn contexts_agree_with_the_reference() {
    let fixture = Fixture::open("sd1_pipeline");
    let weights: Arc<dyn WeightSource> = fixture.weights(str::to_owned).shared();
    let parts: BTreeMap<Part, Component> =
        Component::split(&weights, None).into_iter().map(|c| (c.part(), c)).collect();
    let recipe = Family::Sd1.recipe();
    let encoders = recipe.encoders.iter().map(|r| r.detect(&parts[&r.part()]).unwrap()).collect();
    let model = Model { parts, encoders, ..open(&single()).unwrap() };
    let mut runner = text_runner(&model, Part::ClipL);

    let prompts = [
        ("cond", "a photo of a red cat sitting on a blue sofa"),
        ("uncond", "blurry, low quality"),
        (
            "weighted",
            "a photo of a (red cat sitting on a blue sofa with two yellow cushions, next to a tall window:1.6) at dusk[, blurry]",
        ),
    ];
    for (key, prompt) in prompts {
        let prompt = Prompt { text: prompt, negative: key == "uncond", clip_skip: 1, size: [64, 64] };
        let mut run = |_: Part, program: &Program, inputs: &[(&str, &Tensor)]| {
            assert_eq!(*inputs[0].1, fixture.tensor(&format!("input.ids.{key}")), "{key}");
            runner.run(program, inputs, &CancelToken::default())
        };
        let Conditioning { context: got, vector: None } = model.condition(&prompt, &mut run).unwrap() else {
            panic!("SD 1.x has no vector")
        };
        let want = fixture.tensor(&format!("output.context.{key}"));
        close(&got, &want, key);
    }
}

fn text_runner(model: &Model, part: Part) -> Runner {
    let options = RunnerOptions { threads: 1, types: TypePolicy::Convert(DType::F32), ..RunnerOptions::default() };
    Runner::new(Device::cpu().unwrap(), model.component(part).unwrap().source(), options).unwrap()
}

fn close(got: &Tensor, want: &Tensor, what: &str) {
    assert_eq!(got.shape(), want.shape(), "{what}");
    let far = got.values().iter().zip(want.values()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    let size = want.values().iter().map(|x| x.abs()).fold(0.0, f32::max);
    assert!(far < 1e-5 * size, "{what}: {far} of {size}");
}

/// SDXL's two encoders side by side, the second's pooled state, and the picture's sizes.
#[test]
fn sdxl_is_conditioned_as_by_the_reference() {
    let fixture = Fixture::open("sdxl_pipeline");
    let weights: Arc<dyn WeightSource> = fixture.weights(str::to_owned).shared();
    let parts: BTreeMap<Part, Component> =
        Component::split(&weights, None).into_iter().map(|c| (c.part(), c)).collect();
    let recipe = Family::Sdxl.recipe();
    let encoders = recipe.encoders.iter().map(|r| r.detect(&parts[&r.part()]).unwrap()).collect();
    let info = Info { family: Family::Sdxl, ..open(&single()).unwrap().info().clone() };
    let model = Model { info, parts, encoders, ..open(&single()).unwrap() };
    let mut runners: BTreeMap<Part, Runner> =
        [Part::ClipL, Part::ClipG].map(|part| (part, text_runner(&model, part))).into();

    let long = ["a photo of a red cat sitting on a blue sofa"; 12].join(", ");
    for (key, text) in [("cond", &long[..43]), ("uncond", "blurry, low quality"), ("long", &long)] {
        let prompt = Prompt { text, negative: key == "uncond", clip_skip: 2, size: [64, 96] };
        let mut run = |part: Part, program: &Program, inputs: &[(&str, &Tensor)]| {
            let ids = if part == Part::ClipG { "ids_2" } else { "ids" };
            assert_eq!(*inputs[0].1, fixture.tensor(&format!("input.{ids}.{key}")), "{key}");
            runners.get_mut(&part).unwrap().run(program, inputs, &CancelToken::default())
        };
        let Conditioning { context, vector: Some(vector) } = model.condition(&prompt, &mut run).unwrap() else {
            panic!("SDXL has a vector")
        };
        // Of the long prompt the fixture has every seventh token.
        let rows = context.values().chunks(192).step_by(if key == "long" { 7 } else { 1 });
        let rows: Vec<f32> = rows.flatten().copied().collect();
        let context = Tensor::f32(&[1, rows.len() / 192, 192], rows).unwrap();
        close(&context, &fixture.tensor(&format!("output.context.{key}")), key);
        let (pooled, sizes) = vector.values().split_at(128);
        close(
            &Tensor::f32(&[1, 128], pooled.to_vec()).unwrap(),
            &fixture.tensor(&format!("output.pooled.{key}")),
            key,
        );
        // cos 0 and sin 0 of the crop; the first cosines and sines are those of height and width themselves.
        assert_eq!(sizes.len(), 6 * 256);
        assert_eq!((sizes[2 * 256], sizes[2 * 256 + 128]), (1.0, 0.0));
        for (i, n) in [(0, 96.0f64), (1, 64.0), (4, 96.0), (5, 64.0)] {
            assert_eq!((sizes[i * 256], sizes[i * 256 + 128]), (n.cos() as f32, n.sin() as f32));
        }
    }

    let empty = Prompt { text: "", negative: true, clip_skip: 2, size: [64, 96] };
    let zeros = model.condition(&empty, &mut |_, _, _| panic!("nothing is encoded")).unwrap();
    assert!(zeros.context.values().iter().all(|v| *v == 0.0));
    let vector = zeros.vector.unwrap();
    assert!(vector.values()[..128].iter().all(|v| *v == 0.0));
    assert_eq!(vector.values().len(), 128 + 6 * 256);
}

/// A file of which only the header is written; its tensors are a hole.
fn hollow(path: &Path, tensors: &[(String, Vec<usize>)]) {
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for (name, shape) in tensors {
        let start = end;
        end += 2 * shape.iter().product::<usize>();
        let entry = serde_json::json!({ "dtype": "F16", "shape": shape, "data_offsets": [start, end] });
        header.insert(name.clone(), entry);
    }
    let header = serde_json::to_vec(&header).unwrap();
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, [&(header.len() as u64).to_le_bytes()[..], &header].concat()).unwrap();
    let mut file = fs::File::options().write(true).open(path).unwrap();
    file.set_len((8 + header.len() + end) as u64).unwrap();
    // A noise table is read when a model is opened, and zero is no level.
    let mut at = 8 + header.len();
    for (name, shape) in tensors {
        let count = shape.iter().product::<usize>();
        if name == "alphas_cumprod" {
            let half = 0x3800u16.to_le_bytes().repeat(count);
            file.seek(SeekFrom::Start(at as u64)).unwrap();
            file.write_all(&half).unwrap();
        }
        at += 2 * count;
    }
}

/// T5's states as context, CLIP's pooled state after the final norm as vector.
#[test]
fn flux_is_conditioned_as_by_the_reference() {
    for (fixture, family) in [("flux_dev_pipeline", Family::Flux), ("flux_schnell_pipeline", Family::FluxSchnell)] {
        let fixture = Fixture::open(fixture);
        let weights: Arc<dyn WeightSource> = fixture.weights(str::to_owned).shared();
        let parts: BTreeMap<Part, Component> =
            Component::split(&weights, None).into_iter().map(|c| (c.part(), c)).collect();
        assert_eq!(
            parts.keys().copied().collect::<Vec<_>>(),
            [Part::Diffusion, Part::Autoencoder, Part::ClipL, Part::T5]
        );
        let encoders = family.recipe().encoders.iter().map(|r| r.detect(&parts[&r.part()]).unwrap()).collect();
        let info = Info { family, ..open(&single()).unwrap().info().clone() };
        let model = Model { info, parts, encoders, ..open(&single()).unwrap() };
        let mut runners: BTreeMap<Part, Runner> =
            [Part::ClipL, Part::T5].map(|part| (part, text_runner(&model, part))).into();

        let text = "a photo of a red cat sitting on a blue sofa";
        let prompt = Prompt { text, negative: false, clip_skip: 1, size: [64, 96] };
        let mut run = |part: Part, program: &Program, inputs: &[(&str, &Tensor)]| {
            let ids = if part == Part::T5 { "ids.t5" } else { "ids.clip" };
            assert_eq!(*inputs[0].1, fixture.tensor(&format!("input.{ids}")));
            runners.get_mut(&part).unwrap().run(program, inputs, &CancelToken::default())
        };
        let got = model.condition(&prompt, &mut run).unwrap();
        close(&got.vector.unwrap(), &fixture.tensor("output.pooled"), "pooled");
        if family == Family::Flux {
            close(&got.context, &fixture.tensor("output.context"), "context");
        }

        // 600 words are a window of CLIP's and several of T5's.
        let long = vec!["cat"; 600].join(" ");
        let prompt = Prompt { text: &long, ..prompt };
        let got = model.condition(&prompt, &mut |part, program, inputs| {
            let [windows, tokens] = inputs[0].1.shape().array().unwrap();
            let t5 = family.recipe().encoders.len() == 2 && part == Part::T5;
            assert_eq!(windows, if t5 { 600usize.div_ceil(tokens - 1) } else { 1 });
            runners.get_mut(&part).unwrap().run(program, inputs, &CancelToken::default())
        });
        assert_eq!(got.unwrap().context.shape().dim(1) % 256, 0);
        let endless = vec!["cat"; 6000].join(" ");
        let e = model.condition(&Prompt { text: &endless, ..prompt }, &mut |_, _, _| Ok(Vec::new())).unwrap_err();
        assert!(e.is_request() && e.to_string().contains("more than 4800 tokens"), "{e}");
    }
}

/// The refiner has one encoder, and is told how good the picture should look.
#[test]
fn the_refiner_is_told_a_score() {
    let fixture = Fixture::open("sdxl_pipeline");
    let weights: Arc<dyn WeightSource> = fixture.weights(str::to_owned).shared();
    let parts: BTreeMap<Part, Component> =
        Component::split(&weights, None).into_iter().map(|c| (c.part(), c)).collect();
    let recipe = Family::SdxlRefiner.recipe();
    let encoders = recipe.encoders.iter().map(|r| r.detect(&parts[&r.part()]).unwrap()).collect();
    let info = Info { family: Family::SdxlRefiner, ..open(&single()).unwrap().info().clone() };
    let model = Model { info, parts, encoders, ..open(&single()).unwrap() };
    let mut runner = text_runner(&model, Part::ClipG);
    for (negative, score) in [(false, 6.0f64), (true, 2.5)] {
        let prompt = Prompt { text: "", negative, clip_skip: 2, size: [64, 96] };
        let got = model
            .condition(&prompt, &mut |_, program, inputs| runner.run(program, inputs, &CancelToken::default()))
            .unwrap();
        assert!(got.context.values().iter().any(|v| *v != 0.0), "an empty prompt is encoded");
        let vector = got.vector.unwrap();
        let numbers = &vector.values()[vector.values().len() - 5 * 256..];
        // The first cosine and sine of each number are those of the number itself.
        for (i, n) in [96.0, 64.0, 0.0, 0.0, score].into_iter().enumerate() {
            assert_eq!((numbers[i * 256], numbers[i * 256 + 128]), (n.cos() as f32, n.sin() as f32));
        }
    }
}

#[test]
fn at_real_size_every_tensor_is_used_and_none_is_missing() {
    let dir = Folder::new();
    for (name, family) in [
        ("sd1", Family::Sd1),
        ("sd2", Family::Sd2),
        ("sd2_inpaint", Family::Sd2),
        ("sdxl", Family::Sdxl),
        ("sdxl_inpaint", Family::Sdxl),
        ("ssd1b", Family::Sdxl),
        ("vega", Family::Sdxl),
        ("sdxl_refiner", Family::SdxlRefiner),
        ("flux_dev_all_in_one", Family::Flux),
        ("flux_schnell_all_in_one", Family::FluxSchnell),
        ("flux_fill_all_in_one", Family::FluxFill),
        ("flux_control_all_in_one", Family::FluxControl),
        ("sd3_all_in_one", Family::Sd3),
        ("sd35_medium_all_in_one", Family::Sd35Medium),
        ("sd35_large_all_in_one", Family::Sd35Large),
    ] {
        let (sets, unused) = real_checkpoint(name);
        let single = sets.iter().flat_map(|(prefix, set)| {
            set.iter().map(move |(name, shape, ..)| (format!("{prefix}{name}"), shape.clone()))
        });
        let path = dir.join(&format!("{name}.safetensors"));
        hollow(&path, &single.chain(unused).collect::<Vec<_>>());

        let folder = dir.join(name);
        let components: &[&str] = match family {
            Family::SdxlRefiner => &["unet", "vae", "text_encoder_2"],
            _ if name.starts_with("flux") => &["transformer", "vae", "text_encoder", "text_encoder_2"],
            _ if name.starts_with("sd3") => {
                &["transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3"]
            }
            _ => &["unet", "vae", "text_encoder", "text_encoder_2"],
        };
        for ((_, set), component) in sets.iter().zip(components) {
            let file = if component.starts_with("text") { "model" } else { "diffusion_pytorch_model" };
            let reference = set.iter().flat_map(|(.., sources)| sources.clone());
            // diffusers' SD 2.x leaves out what it does not use.
            let left_out = |n: &str| family == Family::Sd2 && (n.contains("layers.23.") || n.contains("text_proj"));
            let tensors: Vec<_> = reference.filter(|(n, _)| !left_out(n)).collect();
            hollow(&folder.join(format!("{component}/{file}.safetensors")), &tensors);
        }

        for path in [path, folder] {
            let file = Arc::new(Checkpoint::open(&path).unwrap());
            let model = Model::open(&Files { model: Some(file), ..Files::default() }).unwrap();
            assert_eq!(model.info().family, family, "{}", path.display());
            assert_eq!(model.dry_run().unwrap().unused, [], "{}", path.display());
            assert!(model.diffusion_program(&evaluation(2, [16, 24], 154)).unwrap().cuts().len() > 10);
        }
    }
}

/// The parts of Flux as they are published one by one.
#[test]
fn flux_is_opened_from_files_of_its_parts() {
    let dir = Folder::new();
    let (sets, _) = real_checkpoint("flux_dev_all_in_one");
    let mut t5: Vec<(String, Vec<usize>)> = sets[3].1.iter().map(|row| (row.0.clone(), row.1.clone())).collect();
    t5.push(("encoder.embed_tokens.weight".into(), vec![32128, 4096]));
    t5.push(("decoder.block.0.layer.0.layer_norm.weight".into(), vec![4096]));
    let files: Vec<(Part, Arc<Checkpoint>)> = [Part::Diffusion, Part::Autoencoder, Part::ClipL, Part::T5]
        .into_iter()
        .zip(&sets)
        .map(|(part, (_, set))| {
            let path = dir.join(&format!("{part:?}.safetensors"));
            let tensors: Vec<_> = set.iter().map(|row| (row.0.clone(), row.1.clone())).collect();
            hollow(&path, if part == Part::T5 { &t5 } else { &tensors });
            (part, Arc::new(Checkpoint::open(&path).unwrap()))
        })
        .collect();
    let open = |without: Option<Part>| {
        let parts = files.iter().filter(|(part, _)| Some(*part) != without).cloned().collect();
        Model::open(&Files { parts, ..Files::default() })
    };
    let model = open(None).unwrap();
    assert_eq!(model.dry_run().unwrap().unused, []);
    let info = model.info();
    assert_eq!((info.family, info.tokens, info.size_multiple, info.blocks), (Family::Flux, 512, 16, 57));
    assert_eq!((info.guidance, info.references, info.joined), (true, true, Joined::None));
    assert_eq!((info.prediction, info.latent.channels), (Some(Prediction::Flow), 16));
    for part in [Part::Autoencoder, Part::ClipL, Part::T5] {
        let e = open(Some(part)).err().unwrap().to_string();
        assert!(e.contains("Diffusion.safetensors: holds no ") && e.contains(part.option()), "{e}");
    }
    let parts = files.iter().cloned().collect();
    let sd3 = Model::open(&Files { parts, vae_format: Some("sd3".parse().unwrap()), ..Files::default() }).unwrap();
    assert_eq!((sd3.info().latent.scale, sd3.info().latent.shift), (1.5305, 0.0609));
}

/// Zeros stand for the text encoders of SD 3 that no file has, but not for all of them.
#[test]
fn sd3_is_opened_with_any_of_its_text_encoders() {
    let dir = Folder::new();
    let (sets, _) = real_checkpoint("sd3_all_in_one");
    let files: Vec<(Part, Arc<Checkpoint>)> =
        [Part::Diffusion, Part::Autoencoder, Part::ClipL, Part::ClipG, Part::T5]
            .into_iter()
            .zip(&sets)
            .map(|(part, (_, set))| {
                let path = dir.join(&format!("{part:?}.safetensors"));
                hollow(&path, &set.iter().map(|row| (row.0.clone(), row.1.clone())).collect::<Vec<_>>());
                (part, Arc::new(Checkpoint::open(&path).unwrap()))
            })
            .collect();
    for encoders in [&[Part::ClipL][..], &[Part::ClipG], &[Part::T5], &[Part::ClipL, Part::ClipG], &[]] {
        let wanted = |p: &Part| [Part::Diffusion, Part::Autoencoder].contains(p) || encoders.contains(p);
        let parts = files.iter().filter(|(part, _)| wanted(part)).cloned().collect();
        match Model::open(&Files { parts, ..Files::default() }) {
            Ok(model) => {
                assert_eq!((model.dry_run().unwrap().unused.len(), model.info().tokens), (0, 77 + 256));
                assert!(!encoders.is_empty());
            }
            Err(e) => assert!(encoders.is_empty() && e.to_string().contains("--clip_l"), "{encoders:?}: {e}"),
        }
    }
}

#[test]
fn networks_that_read_more_than_the_latent_are_known_by_their_channels() {
    let first = "model.diffusion_model.input_blocks.0.0.weight";
    for (channels, joined, more) in [(4, Joined::None, 0), (8, Joined::Picture, 4), (9, Joined::Inpaint, 5)] {
        let mut shapes = single();
        shapes.insert(first.into(), vec![32, channels, 3, 3]);
        let model = open(&shapes).unwrap();
        model.dry_run().unwrap();
        assert_eq!((model.info().joined, joined.channels(4)), (joined, more));
        let program = model.diffusion_program(&evaluation(1, [8, 8], 77)).unwrap();
        let reads = |n: &sd_core::graph::Node| matches!(&n.op, Op::Input(name) if &**name == "joined");
        assert_eq!(program.nodes().iter().any(reads), more > 0);
        let reference = Evaluation { references: vec![[8, 8]], ..evaluation(1, [8, 8], 77) };
        assert!(model.diffusion_program(&reference).unwrap_err().to_string().contains("no reference pictures"));
        let skip = Evaluation { skip: vec![1], ..evaluation(1, [8, 8], 77) };
        assert!(model.diffusion_program(&skip).unwrap_err().to_string().contains("can be skipped"));
    }
}

#[test]
fn files_given_with_the_wrong_option_are_named() {
    let dir = Folder::new();
    let model = write(&dir.join("m.safetensors"), &[], &single());
    let tiny = [("decoder.1.weight", vec![64, 4, 3, 3]), ("decoder.3.conv.0.weight", vec![64, 64, 3, 3])];
    for (part, shapes, want) in [
        (
            Part::Autoencoder,
            tiny.to_vec(),
            "is a tiny autoencoder, not a VAE for --vae   hint: give it with --taesd",
        ),
        (
            Part::ClipL,
            vec![("model.layers.0.self_attn.q_norm.weight", vec![128])],
            "is a Qwen3 text encoder, not a CLIP text encoder for --clip_l   hint: no family that reads it is supported yet",
        ),
        (Part::T5, vec![("a.lora_A.weight", vec![4, 4])], "is a LoRA, not a T5 text encoder for --t5xxl"),
    ] {
        let shapes = shapes.into_iter().map(|(n, d)| (n.to_owned(), d)).collect();
        let file = write(&dir.join("x.safetensors"), &[], &shapes);
        let files = Files { model: Some(model.clone()), parts: [(part, file)].into(), ..Files::default() };
        let e = Model::open(&files).err().unwrap().to_string();
        assert!(e.contains("x.safetensors: ") && e.contains(want), "{e}");
    }
}
