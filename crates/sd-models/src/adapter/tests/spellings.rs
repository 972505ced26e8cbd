//! Every spelling of one LoRA gives the same weights, and those that the formula gives.

use super::*;

type Row = (String, Vec<usize>, String);
/// Bits of weights by part and name.
type Bits = BTreeMap<(Part, String), Vec<u32>>;

/// The tiny SD1's tensors under the names used here, each with diffusers' name.
fn model() -> Vec<(Part, String, Vec<usize>, String)> {
    let fixture: serde_json::Value =
        serde_json::from_str(include_str!("../../../../../oracle/fixtures/sd1_names.json")).unwrap();
    let rows: Vec<(String, Vec<usize>, String, Vec<usize>)> =
        serde_json::from_value(fixture["names"].clone()).unwrap();
    let parts = [
        (Part::Diffusion, "model.diffusion_model."),
        (Part::ClipL, "cond_stage_model.transformer."),
        (Part::Autoencoder, "first_stage_model."),
    ];
    let own = |(there, _, name, dims): (String, Vec<usize>, String, Vec<usize>)| {
        let (part, here) = parts.iter().find_map(|(p, prefix)| Some((*p, name.strip_prefix(prefix)?)))?;
        Some((part, here.to_owned(), dims, there))
    };
    rows.into_iter().filter_map(own).collect()
}

fn seed(name: &str) -> u32 {
    name.bytes().fold(7, |h, b| (h ^ u32::from(b)).wrapping_mul(16777619))
}

/// Changed weights by part and name.
fn merged(lora: &Lora, base: &BTreeMap<Part, Tensors>) -> BTreeMap<(Part, String), Vec<f32>> {
    let mut out = BTreeMap::new();
    for (part, base) in base {
        let Some(adapter) = lora.part(*part) else { continue };
        let source: Arc<dyn WeightSource> = Arc::new(base.clone());
        let adapted = Adapted::new(source, vec![(adapter.clone(), 1.0)], Mode::Immediately, TypePolicy::Stored);
        let adapted = Arc::new(adapted.unwrap());
        let targets: Vec<String> = adapted.targets().map(str::to_owned).collect();
        for (name, values) in targets.iter().zip(values(&adapted, &targets)) {
            out.insert((*part, name.clone()), values);
        }
    }
    out
}

/// The values of weights as a program reads them.
fn values(adapted: &Arc<Adapted>, names: &[String]) -> Vec<Vec<f32>> {
    let source: Arc<dyn WeightSource> = adapted.clone();
    let (g, w) = (Graph::new(), Scope::root(source.clone()));
    let read = |n: &String| g.weight(&w.weight(n, sd_core::scope::Role::Vector).unwrap());
    let vars: Vec<_> = names.iter().map(read).collect();
    let program = adapted.apply(&g.finish(&vars).unwrap()).unwrap();
    let options = RunnerOptions { threads: 1, ..RunnerOptions::default() };
    let mut runner = Runner::new(Device::cpu().unwrap(), source, options).unwrap();
    runner.run(&program, &[], &CancelToken::new()).unwrap().into_iter().map(Tensor::into_values).collect()
}

#[test]
fn every_spelling_of_one_lora_gives_the_same_weights() {
    let fixture: serde_json::Value =
        serde_json::from_str(include_str!("../../../../../oracle/fixtures/lora_names.json")).unwrap();
    let files: BTreeMap<String, Vec<Row>> = serde_json::from_value(fixture["files"].clone()).unwrap();
    assert!(files.len() >= 12);
    let model = model();
    let mut base: BTreeMap<Part, Tensors> = BTreeMap::new();
    for (part, here, dims, _) in &model {
        let count = dims.iter().product();
        base.entry(*part).or_default().put(here, dims, DType::F32, &noise(count, seed(here)));
    }
    let modules = Modules::new(base.iter().flat_map(|(part, t)| t.listed(*part)).collect());

    let factors = |whole: &str, rows: &[Row]| -> (Vec<f32>, usize) {
        let (_, dims, _) = rows.iter().find(|r| r.2 == whole).unwrap();
        (noise(dims.iter().product(), seed(whole)), dims[0])
    };
    let mut first: Option<(String, Bits)> = None;
    for (spelling, rows) in &files {
        let mut file = Tensors::default();
        for (name, dims, whole) in rows {
            match whole.ends_with(".alpha") {
                true => file.put(name, dims, DType::F32, &[fixture["rank"].as_f64().unwrap() as f32]),
                false => file.put(name, dims, DType::F32, &noise(dims.iter().product(), seed(whole))),
            }
        }
        let source: Arc<dyn WeightSource> = Arc::new(file);
        let lora = read(&source, "heron.safetensors", &Alphas::default(), &modules).unwrap();
        let report = &lora.report;
        assert!(report.unused.is_empty() && report.unfit.is_empty(), "{spelling}: {report}");
        assert_eq!(report.applied.values().sum::<usize>(), report.layers, "{spelling}");
        let got = merged(&lora, &base);
        if first.is_none() {
            // Up times down, at the place that diffusers' converter gives the module.
            let ups = rows.iter().filter_map(|r| r.2.strip_suffix(".up"));
            let mut count = 0;
            for module in ups {
                let (_, here, _, _) = model.iter().find(|m| m.3 == format!("{module}.weight")).unwrap();
                let part = model.iter().find(|m| m.1 == *here).unwrap().0;
                let ((up, n), (down, r)) =
                    (factors(&format!("{module}.up"), rows), factors(&format!("{module}.down"), rows));
                let k = down.len() / r;
                let before = noise(n * k, seed(here));
                let after = &got[&(part, here.clone())];
                for i in 0..n * k {
                    let sum: f64 =
                        (0..r).map(|j| f64::from(up[i / k * r + j]) * f64::from(down[j * k + i % k])).sum();
                    let want = f64::from(before[i]) + sum;
                    assert!((f64::from(after[i]) - want).abs() < 1e-6, "{module} at {i}: {} {want}", after[i]);
                }
                count += 1;
            }
            assert_eq!(count, got.len());
        }
        let got: BTreeMap<_, Vec<u32>> = got.into_iter().map(|(k, v)| (k, bits(&v))).collect();
        let (name, want) = first.get_or_insert_with(|| (spelling.clone(), got.clone()));
        assert!(*want == got, "{spelling} differs from {name}");
    }
}

#[test]
fn projections_that_the_model_has_joined_change_their_rows() {
    let fixture: serde_json::Value =
        serde_json::from_str(include_str!("../../../../../oracle/fixtures/flux_names.json")).unwrap();
    let places: Vec<(String, Vec<usize>, String, Vec<String>)> =
        serde_json::from_value(fixture["names"].clone()).unwrap();
    let mut base = Tensors::default();
    for (here, dims, ..) in places.iter().filter(|p| p.0.ends_with(".weight")) {
        base.put(here, dims, DType::F32, &vec![0.0; dims.iter().product()]);
    }
    let modules = Modules::new(base.listed(Part::Diffusion));
    let hidden = 256;
    // Alone, one of three, and one behind a gap: rows follow from the places of the projections in the joined weight.
    for trained in [vec!["to_q", "to_k", "to_v", "proj_mlp", "norm_out"], vec!["to_k"], vec!["proj_mlp", "to_v"]] {
        let mut file = Tensors::default();
        let mut wanted: BTreeMap<String, Vec<f32>> = BTreeMap::new();
        for (here, dims, operation, sources) in places.iter().filter(|p| p.0.ends_with(".weight")) {
            let (n, k) = (dims[0], dims.iter().skip(1).product::<usize>());
            for (i, source) in sources.iter().enumerate() {
                if !trained.iter().any(|t| source.contains(t)) || source.contains("norm_q") {
                    continue;
                }
                let module = source.strip_suffix(".weight").unwrap();
                let rows = match operation.as_str() {
                    "same" | "swap" => n,
                    _ if source.contains("proj_mlp") => n - 3 * hidden,
                    _ => hidden,
                };
                let (up, down) = (noise(rows, seed(module)), noise(k, seed(source)));
                file.put(&format!("transformer.{module}.lora_B.weight"), &[rows, 1], DType::F32, &up);
                file.put(&format!("transformer.{module}.lora_A.weight"), &[1, k], DType::F32, &down);
                let want = wanted.entry(here.clone()).or_insert_with(|| vec![0.0; n * k]);
                for (row, factor) in up.iter().enumerate() {
                    let to = if operation == "swap" { (row + n / 2) % n } else { i * hidden + row };
                    for column in 0..k {
                        want[to * k + column] = factor * down[column];
                    }
                }
            }
        }
        assert!(!wanted.is_empty());
        let source: Arc<dyn WeightSource> = Arc::new(file);
        let lora = read(&source, "heron.safetensors", &Alphas::default(), &modules).unwrap();
        assert!(lora.report.unused.is_empty() && lora.report.unfit.is_empty(), "{trained:?}: {}", lora.report);
        let got = merged(&lora, &BTreeMap::from([(Part::Diffusion, base.clone())]));
        let got: BTreeMap<String, Vec<f32>> = got.into_iter().map(|((_, n), v)| (n, v)).collect();
        assert!(got == wanted, "{trained:?}: {:?}", got.keys());
    }
}

#[test]
fn numbered_layers_have_their_places() {
    let own: Vec<_> = model().into_iter().map(|(p, n, d, _)| (p, n, Shape::new(&d).unwrap())).collect();
    let ordered = Ordered::new(&Modules::new(own));
    for (name, module) in [
        ("unet:0:down", "unet.input_blocks.1.1.transformer_blocks.0.attn1.to_q"),
        ("unet:4:down", "unet.input_blocks.1.1.transformer_blocks.0.ff.net.0.proj"),
        ("unet:54:down", "unet.output_blocks.3.1.transformer_blocks.0.attn1.to_q"),
        ("unet:143:down", "unet.middle_block.1.transformer_blocks.0.attn2.to_out.0"),
        ("text_encoder:2:down", "te1.text_model.encoder.layers.0.self_attn.q_proj"),
        ("text_encoder:7:down", "te1.text_model.encoder.layers.1.self_attn.out_proj"),
    ] {
        assert_eq!(ordered.parse(name), Some((module.to_owned(), keys::Slot::Down)), "{name}");
    }
    assert_eq!((ordered.parse("unet:144:down"), ordered.parse("unet:x:up")), (None, None));
}
