use std::collections::BTreeMap;
use std::sync::Arc;

use sd_core::{CancelToken, Device, Runner, RunnerOptions, TypePolicy, WeightSource};

use super::*;
use crate::component::Component;
use crate::diffusion::patches::ReferencePlan;
use crate::names::Part;
use crate::testing::{Case, Fixture, Tensors, check, check_cuts, real_names};

fn component(weights: Arc<dyn WeightSource>) -> Component {
    let [part] = Component::split(&weights, None).try_into().ok().unwrap();
    assert_eq!(part.part(), Part::Diffusion);
    part
}

/// The inputs of a fixture by name.
struct Given<'a> {
    g: &'a Graph,
    w: &'a Scope,
    vars: BTreeMap<String, Var>,
}

impl Given<'_> {
    fn latent(&self, name: &str) -> Var {
        self.vars[name]
    }

    fn packed(&self, name: &str) -> Var {
        pack(self.g, self.latent(name)).unwrap()
    }

    fn size(&self, name: &str) -> [usize; 2] {
        let [_, _, h, w] = self.g.dims(self.latent(name)).unwrap();
        [h, w]
    }

    /// The prediction for tokens `img` with references of the given sizes, packed.
    fn predict(&self, img: Var, references: &[[usize; 2]], plan: ReferencePlan, skip: &[usize]) -> Result<Var> {
        let (g, cfg) = (self.g, Config::detect(self.w)?);
        let txt = self.vars["text"];
        let [_, n, _] = g.dims(txt)?;
        let [h, w] = self.size("latent");
        let rope = cfg.rope(&positions(n, [h, w], references, plan), [None; 2])?;
        let inputs = Inputs {
            img,
            txt,
            timestep: self.vars["timestep"],
            pooled: self.vars["pooled"],
            guidance: self.vars.get("guidance").copied(),
            rope: rope.map(|t| g.constant(t)),
            predicted: (h / 2) * (w / 2),
        };
        build(g, self.w, &cfg, &inputs, skip)
    }

    /// The same as an image.
    fn unpacked(&self, sample: Var) -> Result<Var> {
        let [h, w] = self.size("latent");
        unpack(self.g, sample, h, w)
    }
}

/// A mask of pixels as channels: the places in the 8×8 cell of a latent value, row by row.
fn folded(mask: &Tensor) -> Tensor {
    let [_, _, h, w] = mask.shape().array().unwrap();
    let at = |cell: usize, y: usize, x: usize| mask.values()[(8 * y + cell / 8) * w + 8 * x + cell % 8];
    let cells = (0..64).flat_map(|c| (0..h / 8).flat_map(move |y| (0..w / 8).map(move |x| (c, y, x))));
    Tensor::f32(&[1, 64, h / 8, w / 8], cells.map(|(c, y, x)| at(c, y, x)).collect()).unwrap()
}

type Outputs = Vec<(&'static str, Var)>;

fn whole(fixture: &str, run: fn(&Case), outputs: impl Fn(&Given) -> Result<Outputs>) {
    let file = Fixture::open(fixture);
    let part = component(file.weights(str::to_owned).shared());
    let mut names = file.names("input");
    names.sort();
    let network = |g: &Graph, w: &Scope, inputs: &[Var]| {
        outputs(&Given { g, w, vars: names.iter().cloned().zip(inputs.iter().copied()).collect() })
    };
    run(&Case { fixture, source: part.source(), prefix: "", build: &network });
}

fn plain(given: &Given) -> Result<Outputs> {
    let sample = given.predict(given.packed("latent"), &[], ReferencePlan::Fixed, &[])?;
    Ok(vec![("sample", sample), ("velocity", given.unpacked(sample)?)])
}

#[test]
fn dev_agrees_with_diffusers_at_every_block_and_without_one() {
    whole("flux", check, |given| {
        // Taps are taken from what is built last.
        let without = |i| given.predict(given.packed("latent"), &[], ReferencePlan::Fixed, &[i]);
        let skipped = vec![("sample.skip_1", without(1)?), ("sample.skip_2", without(2)?)];
        Ok([skipped, plain(given)?].concat())
    });
}

#[test]
fn a_batch_and_a_network_without_guidance_agree_with_diffusers() {
    whole("flux_batch", check, plain);
    whole("flux_schnell", check, plain);
}

#[test]
fn joined_channels_agree_with_diffusers() {
    whole("flux_control", check, |given| {
        let img = given.g.concat(&[given.packed("latent"), given.packed("control")], 2)?;
        let sample = given.predict(img, &[], ReferencePlan::Fixed, &[])?;
        Ok(vec![("sample", sample), ("velocity", given.unpacked(sample)?)])
    });
    whole("flux_fill", check, |given| {
        let mask = pack(given.g, given.g.constant(folded(&Fixture::open("flux_fill").tensor("input.mask"))))?;
        let img = given.g.concat(&[given.packed("latent"), given.packed("masked_latent"), mask], 2)?;
        let sample = given.predict(img, &[], ReferencePlan::Fixed, &[])?;
        Ok(vec![("sample", sample), ("velocity", given.unpacked(sample)?)])
    });
}

/// The prediction of a fixture's network for an evaluation, whose size and tokens are the fixture's.
fn evaluated(fixture: &Fixture, e: Evaluation, joined: Option<Tensor>) -> Tensor {
    let part = component(fixture.weights(str::to_owned).shared());
    let input = |name: &str| fixture.tensor(&format!("input.{name}"));
    let (x, context) = (input("latent"), input("text"));
    let [batch, _, h, w] = x.shape().array().unwrap();
    let e = Evaluation { batch, size: [h, w], tokens: context.shape().dim(1), ..e };

    let network: &dyn Network = &Config::detect(part.scope()).unwrap();
    let g = Graph::new();
    let given = crate::diffusion::Given::declare(&g, &network.facts(), &e).unwrap();
    let program = g.finish(&[network.build(&g, part.scope(), &given, &e).unwrap()]).unwrap();
    let mut inputs = network.tables(&e).unwrap();
    inputs.extend([("x", x), ("context", context), ("vector", input("pooled")), ("timesteps", input("timestep"))]);
    inputs.extend(network.facts().guidance.then(|| ("guidance", input("guidance"))));
    inputs.extend(joined.map(|t| ("joined", t)));
    let references = ["reference.0", "reference.1", "reference.2"].into_iter().take(e.references.len());
    inputs.extend(references.map(|name| (name, input(name))));

    let options = RunnerOptions { threads: 1, types: TypePolicy::Convert(DType::F32), ..RunnerOptions::default() };
    let mut runner = Runner::new(Device::cpu().unwrap(), part.source(), options).unwrap();
    let inputs: Vec<(&str, &Tensor)> = inputs.iter().map(|(name, t)| (*name, t)).collect();
    runner.run(&program, &inputs, &CancelToken::default()).unwrap().remove(0)
}

fn near(got: &Tensor, want: &Tensor, what: &str) {
    assert_eq!(got.shape(), want.shape(), "{what}");
    let far = got.values().iter().zip(want.values()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    let size = want.values().iter().map(|x| x.abs()).fold(0.0, f32::max);
    assert!(far < 1e-4 * size, "{what}: {far} of {size}");
}

/// Channels of several latents, one picture each, one after the other.
fn joined(parts: &[Tensor]) -> Tensor {
    let [_, _, h, w] = parts[0].shape().array().unwrap();
    let values: Vec<f32> = parts.iter().flat_map(|t| t.values().iter().copied()).collect();
    Tensor::f32(&[1, values.len() / (h * w), h, w], values).unwrap()
}

#[test]
fn evaluations_agree_with_diffusers() {
    let open = |name: &str| (Fixture::open(name), Evaluation::default());
    for name in ["flux_batch", "flux_schnell"] {
        let (file, e) = open(name);
        near(&evaluated(&file, e, None), &file.tensor("output.velocity"), name);
    }

    let (file, e) = open("flux_control");
    let control = joined(&[file.tensor("input.control")]);
    near(&evaluated(&file, e, Some(control)), &file.tensor("output.velocity"), "control");

    let (file, e) = open("flux_fill");
    let mask = folded(&file.tensor("input.mask"));
    let given = joined(&[file.tensor("input.masked_latent"), mask]);
    near(&evaluated(&file, e, Some(given)), &file.tensor("output.velocity"), "fill");

    let (file, _) = open("flux_kontext");
    let size = |name| {
        let [_, _, h, w] = file.tensor(name).shape().array().unwrap();
        [h, w]
    };
    let sizes = ["input.reference.0", "input.reference.1", "input.reference.2"].map(size);
    for &(name, count, reference_plan) in PLANS {
        let e = Evaluation { references: sizes[..count].to_vec(), reference_plan, ..Evaluation::default() };
        near(&evaluated(&file, e, None), &file.tensor(&format!("output.{name}")), name);
    }
}

#[test]
fn a_picture_that_repeats_has_its_size_in_tokens_as_period() {
    let part = component(Fixture::open("flux").weights(str::to_owned).shared());
    let cfg = Config::detect(part.scope()).unwrap();
    let e = Evaluation { batch: 1, size: [16, 12], tokens: 3, circular: [true, false], ..Evaluation::default() };
    let want = |periods| cfg.rope(&positions(3, e.size, &[], e.reference_plan), periods).unwrap();
    let [(_, cos), (_, sin)] = cfg.tables(&e).unwrap().try_into().unwrap();
    assert_eq!([cos, sin], want([Some(8), None]));
    assert_ne!(want([Some(8), None]), want([None; 2]));
}

const PLANS: &[(&str, usize, ReferencePlan)] = &[
    ("velocity.one", 1, ReferencePlan::Fixed),
    ("velocity.fixed", 3, ReferencePlan::Fixed),
    ("velocity.increase", 3, ReferencePlan::Increase),
    ("velocity.decrease", 3, ReferencePlan::Decrease),
];

fn with_references(given: &Given, plans: &[(&'static str, usize, ReferencePlan)]) -> Result<Outputs> {
    let mut out = Outputs::new();
    for &(name, count, plan) in plans {
        let references: Vec<String> = (0..count).map(|i| format!("reference.{i}")).collect();
        let sizes: Vec<[usize; 2]> = references.iter().map(|r| given.size(r)).collect();
        let mut img = vec![given.packed("latent")];
        img.extend(references.iter().map(|r| given.packed(r)));
        let sample = given.predict(given.g.concat(&img, 1)?, &sizes, plan, &[])?;
        out.push((name, given.unpacked(sample)?));
    }
    Ok(out)
}

#[test]
fn references_agree_with_diffusers() {
    whole("flux_kontext", check, |given| with_references(given, PLANS));
}

#[test]
fn positions_are_those_of_the_pipelines() {
    let file = Fixture::open("flux_kontext");
    let sizes = ["latent", "reference.0", "reference.1", "reference.2"].map(|n| {
        let [_, _, h, w] = file.tensor(&format!("input.{n}")).shape().array().unwrap();
        [h, w]
    });
    for (name, count, plan) in PLANS {
        let want = file.tensor(&format!("input.img_ids.{}", name.strip_prefix("velocity.").unwrap()));
        let sd_core::Data::I32(want) = want.data() else { panic!("{name}") };
        let got = positions(2, sizes[0], &sizes[1..=*count], *plan);
        assert_eq!(got[..2], [[0; 3]; 2]);
        assert_eq!(got[2..].concat(), *want, "{name}");
    }
}

#[test]
fn cuts_change_nothing() {
    whole("flux_batch", check_cuts, plain);
    whole("flux_kontext", check_cuts, |given| with_references(given, &PLANS[1..2]));
}

#[test]
fn sizes_are_read_off_the_weights() {
    let part = component(Fixture::open("flux_fill").weights(str::to_owned).shared());
    let want = Config {
        in_channels: 384,
        out_channels: 64,
        hidden: 256,
        heads: 2,
        mlp: 1024,
        context: 64,
        pooled: 64,
        sinusoid: 256,
        guidance: true,
        blocks: [2, 2],
        axes: [16, 56, 56],
    };
    assert_eq!(Config::detect(part.scope()).unwrap(), want);
    let schnell = component(Fixture::open("flux_schnell").weights(str::to_owned).shared());
    assert!(!Config::detect(schnell.scope()).unwrap().guidance);
}

/// Builds the network for pictures of 1024² and 512 text tokens, without bytes.
fn dry_build(part: &Component, guidance: bool, skip: &[usize]) -> Result<Config> {
    let (g, w) = (Graph::new(), part.scope());
    let cfg = Config::detect(w)?;
    let input = |name: &str, dims: &[usize]| g.input(name, dims, DType::F32);
    let table = [512 + 4096, cfg.axes.iter().sum::<usize>() / 2];
    let inputs = Inputs {
        img: input("img", &[1, 4096, cfg.in_channels])?,
        txt: input("txt", &[1, 512, cfg.context])?,
        timestep: input("timestep", &[1])?,
        pooled: input("pooled", &[1, cfg.pooled])?,
        guidance: if guidance { Some(input("guidance", &[1])?) } else { None },
        rope: [input("cos", &table)?, input("sin", &table)?],
        predicted: 4096,
    };
    let y = build(&g, w, &cfg, &inputs, skip)?;
    assert_eq!(g.shape(y).dims(), [1, 4096, 64]);
    assert_eq!(g.finish(&[y])?.cuts().len(), cfg.blocks.iter().sum::<usize>() - skip.len());
    Ok(cfg)
}

#[test]
fn at_real_size_every_tensor_is_used_and_none_is_missing() {
    for (set, in_channels, guidance) in
        [("flux_dev", 64, true), ("flux_schnell", 64, false), ("flux_fill", 384, true), ("flux_control", 128, true)]
    {
        let rows = real_names(set);
        let original: Vec<(String, Vec<usize>)> = rows.iter().map(|r| (r.0.clone(), r.1.clone())).collect();
        let comfy = original.iter().map(|(n, d)| (format!("model.diffusion_model.{n}"), d.clone())).collect();
        let diffusers: Vec<(String, Vec<usize>)> = rows.iter().flat_map(|r| r.3.clone()).collect();
        let folder = diffusers.iter().map(|(n, d)| (format!("transformer.{n}"), d.clone())).collect();
        for names in [original, comfy, diffusers, folder] {
            let part = component(Tensors::of_shapes(names).shared());
            let cfg = dry_build(&part, guidance, &[]).unwrap();
            let sizes = (cfg.hidden, cfg.heads, cfg.mlp, cfg.context, cfg.pooled, cfg.blocks);
            assert_eq!(sizes, (3072, 24, 12288, 4096, 768, [19, 38]));
            assert_eq!((cfg.in_channels, cfg.guidance), (in_channels, guidance));
            assert_eq!(part.scope().unused(), Vec::<String>::new());
            assert_eq!(part.tensors(), rows.len());
        }
    }
}

#[test]
fn what_cannot_be_built_is_said() {
    let part = component(Fixture::open("flux").weights(str::to_owned).shared());
    let e = |r: Result<Config>| r.unwrap_err().to_string();
    assert_eq!(e(dry_build(&part, true, &[1, 4])), "block 4 cannot be skipped, the last one is 3");
    let unguided = e(dry_build(&part, false, &[]));
    assert!(unguided.contains("the network has an input for guidance, which is not given"), "{unguided}");
    dry_build(&part, true, &[0, 3]).unwrap();

    let missing = "transformer_blocks.1.attn.add_k_proj.bias";
    let file = Fixture::open("flux");
    let weights = file.weights(|n| if n == missing { "elsewhere".into() } else { n.into() });
    let e = dry_build(&component(weights.shared()), true, &[]).unwrap_err().to_string();
    assert_eq!(e, format!("{missing}: missing from heron.safetensors"));

    let heads = component(
        Tensors::of_shapes(vec![
            ("img_in.weight".into(), vec![128, 64]),
            ("txt_in.weight".into(), vec![128, 64]),
            ("time_in.in_layer.weight".into(), vec![128, 256]),
            ("vector_in.in_layer.weight".into(), vec![128, 64]),
            ("double_blocks.0.img_mlp.0.weight".into(), vec![512, 128]),
            ("double_blocks.0.img_attn.norm.query_norm.scale".into(), vec![64]),
            ("final_layer.linear.weight".into(), vec![64, 128]),
        ])
        .shared(),
    );
    let e = Config::detect(heads.scope()).unwrap_err().to_string();
    assert_eq!(e, "Flux with heads of 64 channels, want 128");
}

#[test]
fn odd_sides_are_filled_up_and_cut_off_again() {
    let g = Graph::new();
    let x = g.input("x", &[2, 16, 5, 6], DType::F32).unwrap();
    let tokens = pack(&g, x).unwrap();
    assert_eq!(g.shape(tokens).dims(), [2, 9, 64]);
    assert_eq!(g.shape(unpack(&g, tokens, 5, 6).unwrap()), g.shape(x));
    assert!(unpack(&g, tokens, 8, 6).is_err());
    assert_eq!(positions(0, [5, 6], &[], ReferencePlan::Fixed).len(), 9);
}
