//! Adapters come and go with requests: nothing of one is in the next. Weak ones change quantised weights.

use sd_core::{Cuts, Precision};

use super::*;

const N: usize = 64;

/// Two layers and a convolution with cuts between them.
fn base(dtype: DType) -> Tensors {
    let mut base = Tensors::default();
    for (i, name) in ["a", "b"].into_iter().enumerate() {
        base.put(&format!("{name}.weight"), &[N, N], dtype, &noise(N * N, i as u32));
        base.put(&format!("{name}.bias"), &[N], DType::F32, &noise(N, 9));
    }
    base.put("c.weight", &[4, 1, 3, 3], DType::F32, &noise(36, 5));
    base.put("c.bias", &[4], DType::F32, &noise(4, 6));
    base
}

fn program(source: &Arc<dyn WeightSource>) -> sd_core::Program {
    let (g, w) = (Graph::new(), Scope::root(source.clone()));
    let x = g.input("x", &[3, N], DType::F32).unwrap();
    let a = g.linear(&w.linear("a").unwrap(), x).unwrap();
    g.cut(&w.sub("a"), &[a]);
    let b = g.silu(g.linear(&w.linear("b").unwrap(), a).unwrap()).unwrap();
    g.cut(&w.sub("b"), &[a, b]);
    let image = g.reshape(g.add(a, b).unwrap(), &[1, 1, 3, N]).unwrap();
    let c = g.conv2d(&w.conv2d("c").unwrap(), image, Conv2dOptions::padded(1)).unwrap();
    g.finish(&[c, b]).unwrap()
}

/// A LoRA of the layers, and differences of biases.
fn adapter(base: &Tensors, seed: u32, size: f32) -> Arc<Adapter> {
    let mut file = Tensors::default();
    let small = |count, seed| noise(count, seed).iter().map(|v| v * size).collect::<Vec<_>>();
    for (i, name) in ["a", "b"].into_iter().enumerate() {
        file.put(&format!("{name}.lora_up.weight"), &[N, 2], DType::F16, &small(2 * N, seed + i as u32));
        file.put(&format!("{name}.lora_down.weight"), &[2, N], DType::F16, &noise(2 * N, seed + 7));
    }
    file.put("b.diff_b", &[N], DType::F32, &small(N, seed));
    file.put("c.lora_up.weight", &[4, 2, 1, 1], DType::F32, &small(8, seed));
    file.put("c.lora_down.weight", &[2, 1, 3, 3], DType::F32, &noise(18, seed));
    let source: Arc<dyn WeightSource> = Arc::new(file);
    let modules = Modules::new(base.listed(Part::Diffusion));
    let lora = read(&source, "heron.safetensors", &Alphas::default(), &modules).unwrap();
    assert!(lora.report.unfit.is_empty() && lora.report.unused.is_empty(), "{}", lora.report);
    lora.part(Part::Diffusion).unwrap().clone()
}

struct Engine {
    base: Arc<dyn WeightSource>,
    runner: Runner,
    types: TypePolicy,
}

impl Engine {
    fn new(base: &Tensors, types: TypePolicy) -> Engine {
        let base: Arc<dyn WeightSource> = Arc::new(base.clone());
        // Steps of bf16 would hide the changes that tests look for.
        let options = RunnerOptions { threads: 1, types, precision: Precision::F32, ..RunnerOptions::default() };
        Engine { runner: Runner::new(Device::cpu().unwrap(), base.clone(), options).unwrap(), base, types }
    }

    fn run(&mut self, list: &[(&Arc<Adapter>, f32)], mode: Mode) -> Vec<f32> {
        let list = list.iter().map(|(a, s)| ((*a).clone(), *s)).collect();
        let adapted = Arc::new(Adapted::new(self.base.clone(), list, mode, self.types).unwrap());
        self.runner.set_adapters(adapted);
        let program = program(&self.base);
        let x = Tensor::f32(&[3, N], noise(3 * N, 77)).unwrap();
        let out = self.runner.run(&program, &[("x", &x)], &CancelToken::new()).unwrap();
        out.into_iter().flat_map(Tensor::into_values).collect()
    }
}

#[test]
fn nothing_of_a_request_is_in_the_next() {
    for dtype in [DType::F32, DType::F16, DType::Q8_0] {
        let tensors = base(dtype);
        let (a, b) = (adapter(&tensors, 100, 1.0), adapter(&tensors, 200, 1.0));
        for mode in [Mode::Auto, Mode::Immediately, Mode::AtRuntime] {
            let mut engine = Engine::new(&tensors, TypePolicy::Stored);
            let requests: [&[(&Arc<Adapter>, f32)]; 6] =
                [&[], &[(&a, 1.0)], &[(&b, -0.5)], &[(&a, 0.5), (&b, 1.0)], &[(&a, 1.0)], &[]];
            let got: Vec<Vec<f32>> = requests.iter().map(|r| engine.run(r, mode)).collect();
            for (request, got) in requests.iter().zip(&got) {
                let alone = Engine::new(&tensors, TypePolicy::Stored).run(request, mode);
                assert_eq!(bits(got), bits(&alone), "{dtype} {mode:?}");
            }
            assert_eq!(bits(&got[0]), bits(&got[5]));
            assert!(got[0] != got[1] && got[1] != got[2] && got[2] != got[3], "{dtype} {mode:?}");
        }
    }
}

#[test]
fn cuts_change_nothing() {
    let tensors = base(DType::F16);
    let a = adapter(&tensors, 100, 1.0);
    for mode in [Mode::Immediately, Mode::AtRuntime] {
        let mut engine = Engine::new(&tensors, TypePolicy::Stored);
        let whole = engine.run(&[(&a, 0.75)], mode);
        for cuts in [Cuts::All, Cuts::At(vec![0]), Cuts::At(vec![1])] {
            engine.runner.set_cuts(cuts.clone());
            assert_eq!(bits(&engine.run(&[(&a, 0.75)], mode)), bits(&whole), "{cuts:?}");
        }
    }
}

/// The change of a weak LoRA is far below a step of q4_0, which is about a seventh of the largest weight of a block.
#[test]
fn a_weak_lora_changes_quantised_weights_in_proportion() {
    let (stored, convert) = (TypePolicy::Stored, TypePolicy::Convert);
    // Stored as, in memory as, where the changes are made, how large they are.
    for (dtype, types, mode, size) in [
        (DType::Q4_0, stored, Mode::Auto, 2e-3),
        (DType::Q8_0, stored, Mode::Auto, 2e-3),
        (DType::F8E4M3, stored, Mode::Auto, 2e-3),
        (DType::F16, convert(DType::Q4_0), Mode::Auto, 2e-3),
        (DType::F32, convert(DType::Q8_0), Mode::Auto, 2e-3),
        // In the weights, which are f16 then: changes are to be above its steps.
        (DType::Q4_0, stored, Mode::Immediately, 0.1),
        (DType::Q4_0, convert(DType::Q4_0), Mode::Immediately, 0.1),
        (DType::F32, convert(DType::Q4_0), Mode::Immediately, 0.1),
    ] {
        let tensors = base(dtype);
        let a = adapter(&tensors, 100, size);
        let mut engine = Engine::new(&tensors, types);
        // The convolution is f16 at most, so its change is in its weights; what comes before it is the last output.
        let quantised = |out: Vec<f32>| out[4 * 3 * N..].to_vec();
        let mut moves = |strength: f32, from: &[f32]| {
            let with = quantised(engine.run(&[(&a, strength)], mode));
            with.iter().zip(from).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt()
        };
        // Weights that were quantised in memory are f16 when they are changed, so the way starts at next to nothing.
        let start = {
            let mut engine = Engine::new(&tensors, types);
            quantised(engine.run(&[(&a, 1e-20)], mode))
        };
        let first = moves(0.01, &start);
        let mut last = 0.0;
        for strength in [0.01f32, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0] {
            let moved = moves(strength, &start);
            let case = format!("{dtype} {types:?} {mode:?} at {strength}");
            assert!(moved > last, "{case}: {moved}, {last} before");
            let ratio = moved / (first * f64::from(strength) * 100.0);
            let near = if mode == Mode::Auto { 0.95..1.05 } else { 0.8..1.25 };
            assert!(near.contains(&ratio), "{case}: {ratio}");
            last = moved;
        }
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let tensors = base(DType::F32);
    let modules = Modules::new(tensors.listed(Part::Diffusion));
    let read_file = |list: &[(&str, &[usize])]| {
        let mut file = Tensors::default();
        for (name, dims) in list {
            file.put(name, dims, DType::F32, &vec![0.5; dims.iter().product()]);
        }
        let source: Arc<dyn WeightSource> = Arc::new(file);
        let lora = read(&source, "heron.safetensors", &Alphas::default(), &modules)?;
        lora.check().map(|()| lora)
    };
    let e = |list: &[(&str, &[usize])]| read_file(list).err().unwrap().to_string();
    assert_eq!(
        e(&[("x.weight", &[2])]),
        "heron.safetensors: holds no LoRA   hint: a LoRA's names end in lora_down.weight, lora_A.weight, …"
    );
    assert_eq!(
        e(&[("lora_unet_blocks_0_q.lora_down.weight", &[2, 8]), ("lora_unet_blocks_0_q.lora_up.weight", &[8, 2])]),
        "heron.safetensors: changes nothing of this model (heron.safetensors: kohya, 0 of 1 layers applied; 2 keys \
         unused: lora_unet_blocks_*_q.lora_down.weight (1), lora_unet_blocks_*_q.lora_up.weight (1))   hint: it was \
         made for another family; --allow-unused-loras draws without it"
    );
    let good: &[(&str, &[usize])] = &[("a.lora_A.weight", &[2, N]), ("a.lora_B.weight", &[N, 2])];
    for (bad, why) in [
        (
            &[("b.lora_A.weight", &[2, 32][..]), ("b.lora_B.weight", &[N, 2])][..],
            "b: b.lora_A.weight: the change is [64, 32], the weight [64, 64]",
        ),
        (
            &[("b.lora_A.weight", &[2, N]), ("b.lora_B.weight", &[N, 3])],
            "b: b.lora_A.weight [2, 64] and b.lora_B.weight [64, 3] do not fit together (heron.safetensors)",
        ),
        (&[("b.lora_A.weight", &[2, N])], "b: the factor up (lora_up, lora_B) is missing"),
        (&[("b.oft_blocks", &[2, N])], "b: OFT is not supported"),
        (
            &[("b.lora_A.weight", &[0, N]), ("b.lora_B.weight", &[N, 0])],
            "b: b.lora_A.weight is empty: [0, 64] (heron.safetensors)",
        ),
    ] {
        let lora = read_file(&[good, bad].concat()).unwrap();
        assert_eq!((lora.report.applied[&Part::Diffusion], lora.report.layers), (1, 2));
        assert_eq!(lora.report.unfit, [why]);
    }
}

#[test]
fn rows_can_follow_a_table() {
    let mut tensors = Tensors::default();
    let values = noise(10 * 32, 3);
    for dtype in [DType::F32, DType::F16, DType::F8E4M3, DType::Q8_0, DType::Q4_0] {
        tensors.put("table", &[10, 32], dtype, &values);
        let stored = convert::to_f32(dtype, &tensors.bytes("table").unwrap(), 10 * 32).unwrap();
        let base: Arc<dyn WeightSource> = Arc::new(tensors.clone());
        let (g, w) = (Graph::new(), Scope::root(base.clone()));
        let ids = g.input("ids", &[4], DType::I32).unwrap();
        let y = g.embedding(&w.weight("table", sd_core::scope::Role::Table).unwrap(), ids).unwrap();
        let program = g.finish(&[y]).unwrap();
        let extra = noise(2 * 32, 4);
        let adapted = Adapted::new(base, Vec::new(), Mode::Auto, TypePolicy::Stored).unwrap();
        let adapted = Arc::new(adapted.with_rows("table", extra.clone()).unwrap());
        let options = RunnerOptions { threads: 1, ..RunnerOptions::default() };
        let mut runner = Runner::new(Device::cpu().unwrap(), adapted.clone(), options).unwrap();
        let ids = Tensor::i32(&[4], vec![11, 0, 10, 9]).unwrap();
        let program = adapted.apply(&program).unwrap();
        let got = runner.run(&program, &[("ids", &ids)], &CancelToken::new()).unwrap().remove(0);
        let got = got.values();
        assert!(got[32..64] == stored[..32] && got[96..] == stored[9 * 32..], "{dtype}: the table's own rows");
        // Where the table is f16 or FP8, the rows after it are f16.
        let within = if matches!(dtype, DType::F16 | DType::F8E4M3) { 2f32.powi(-11) } else { 0.0 };
        let close =
            |got: &[f32], want: &[f32]| got.iter().zip(want).all(|(a, b)| (a - b).abs() <= within * b.abs());
        assert!(close(&got[..32], &extra[32..]) && close(&got[64..96], &extra[..32]), "{dtype}: the rows after it");
        let outside = Tensor::i32(&[4], vec![12, 0, 0, 0]).unwrap();
        assert!(runner.run(&program, &[("ids", &outside)], &CancelToken::new()).is_err());
    }
}

#[test]
fn patterns_of_alpha_mean_what_peft_matches() {
    // `re.match(rf"(.*\.)?({pattern})$", path)`, as peft's `get_pattern_key` does.
    for (pattern, yes, no) in [
        ("to_q", "down.0.to_q", "down.0.add_to_q"),
        ("0.to_q", "down.0.to_q", "down.10.to_q"),
        ("to_(q|k)", "down.0.to_k", "down.0.to_v"),
        (r"attn[12]\..*", "down.0.attn2.to_v", "down.0.attn3.to_v"),
        ("^down.0.to_q", "down.0.to_q", "up.down.0.to_q"),
        (r"\d+\.to_q", "down.17.to_q", "down.x.to_q"),
    ] {
        let config = serde_json::json!({ "lora_alpha": 4, "alpha_pattern": { pattern: 16 } });
        let config = serde_json::from_value(config).unwrap();
        let alphas = Alphas { whole: true, config, ..Alphas::default() };
        let of = |path: &str| alphas.of(&format!("base_model.model.{path}")).unwrap().unwrap().alpha;
        assert_eq!((of(yes), of(no)), (16.0, 4.0), "{pattern}");
    }
}

#[test]
fn of_patterns_that_both_match_the_first_in_the_file_counts() {
    // peft takes the keys of the JSON object one after another.
    let file = |metadata: &str, names: &[(&str, &[usize])]| {
        let mut header = serde_json::json!({ "__metadata__": { "lora_adapter_metadata": metadata } });
        let mut at = 0;
        for (name, dims) in names {
            let end = at + 4 * dims.iter().product::<usize>();
            header[*name] = serde_json::json!({ "dtype": "F32", "shape": dims, "data_offsets": [at, end] });
            at = end;
        }
        let header = header.to_string();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.resize(bytes.len() + at, 0);
        Checkpoint::from_bytes("heron.safetensors", Bytes::from(bytes)).unwrap()
    };
    let name = "unet.down.0.attn1.to_q.lora_A.weight";
    for (patterns, want) in
        [(r#"{"to_q": 16, "attn1.*": 8}"#, 16.0), (r#"{"attn1.*": 8, "to_q": 16}"#, 8.0), (r#"{"to_k": 2}"#, 4.0)]
    {
        let metadata = format!(r#"{{"unet.lora_alpha": 4, "unet.r": 4, "unet.alpha_pattern": {patterns}}}"#);
        let alphas = Alphas::read(&file(&metadata, &[(name, &[4, 8])])).unwrap();
        assert_eq!(alphas.of("unet.down.0.attn1.to_q").unwrap().unwrap().alpha, want, "{patterns}");
    }
    for (metadata, want) in [
        ("{\"unet.lora_alpha\": 4", "heron.safetensors: lora_adapter_metadata in its metadata: EOF while parsing"),
        ("[4]", "expected an object at line 1"),
    ] {
        let e = Alphas::read(&file(metadata, &[(name, &[4, 8])])).unwrap_err().to_string();
        assert!(e.contains(want), "{e}");
    }
    for (setting, want) in [
        (r#""unet.lora_alpha": "4""#, r#"lora_alpha is "4", want a number"#),
        (r#""unet.lora_alpha": {"a": 1}"#, "lora_alpha is an object, want a number"),
        (r#""unet.use_rslora": 1"#, "use_rslora is 1, want true or false"),
        (r#""unet.alpha_pattern": 1"#, "alpha_pattern is 1, want names and numbers"),
        (r#""unet.alpha_pattern": {"to_q": "x"}"#, r#"alpha_pattern of to_q is "x", want a number"#),
        (r#""unet.alpha_pattern": {"(": 1}"#, r#"alpha_pattern "(""#),
    ] {
        let alphas = Alphas::read(&file(&format!("{{{setting}}}"), &[(name, &[4, 8])])).unwrap();
        let e = alphas.of("unet.down.0.attn1.to_q").unwrap_err();
        assert!(e.contains(want), "{e}");
    }
}
