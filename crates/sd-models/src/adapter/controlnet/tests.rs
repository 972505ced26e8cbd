use sd_core::Tensor;

use super::*;
use crate::testing::{Case, Fixture, Tensors, check, check_cuts};

const HEADS: Heads = Heads::Count(8);
const NARROW: Heads = Heads::Width(64);
const OUTPUTS: [&str; 13] = [
    "control.0",
    "control.1",
    "control.2",
    "control.3",
    "control.4",
    "control.5",
    "control.6",
    "control.7",
    "control.8",
    "control.9",
    "control.10",
    "control.11",
    "control.12",
];

fn whole(fixture: &str, heads: Heads, run: fn(&Case)) {
    let source = read(&Fixture::open(fixture).weights(str::to_owned).shared()).unwrap().source().clone();
    let network = |g: &Graph, w: &Scope, inputs: &[Var]| {
        let cfg = Config::detect(w)?;
        // Inputs come in the order of their names.
        let (context, hint, x, timesteps, vector) = match *inputs {
            [context, hint, x, timesteps] => (context, hint, x, timesteps, None),
            [context, hint, pooled, x, numbers, timesteps] => {
                let [b, n] = g.dims(numbers)?;
                let numbers = g.timestep_embedding(g.reshape(numbers, &[b * n])?, 256, 10_000.0)?;
                let vector = g.concat(&[pooled, g.reshape(numbers, &[b, n * 256])?], 1)?;
                (context, hint, x, timesteps, Some(vector))
            }
            _ => panic!("{inputs:?}"),
        };
        let hint = embed_hint(g, &w.sub("input_hint_block"), cfg.convolutions, hint)?;
        let inputs = Inputs { x, timesteps, context, vector, hint, circular: [false; 2] };
        Ok(OUTPUTS.into_iter().zip(build(g, w, &cfg, heads, inputs)?).collect())
    };
    run(&Case { fixture, source, prefix: "", build: &network });
}

#[test]
fn controlnets_agree_with_diffusers() {
    whole("controlnet_sd1", HEADS, check);
    whole("controlnet_sd2", NARROW, check);
    whole("controlnet_sdxl", NARROW, check);
}

#[test]
fn cuts_change_nothing() {
    whole("controlnet_sd1", HEADS, check_cuts);
}

/// Name in diffusers, original name, shape.
type Row = (String, String, Vec<usize>);

#[test]
fn prefixes_and_other_parts_do_not_matter() {
    let names: serde_json::Value =
        serde_json::from_str(include_str!("../../../../../oracle/fixtures/controlnet_names.json")).unwrap();
    let rows: Vec<Row> = serde_json::from_value(names["names"].clone()).unwrap();
    let scope = |of: fn(&Row) -> String| {
        let mut list: Vec<(String, Vec<usize>)> = rows.iter().map(|r| (of(r), r.2.clone())).collect();
        if list.iter().all(|(name, _)| name.starts_with("control")) {
            list.push(("model.diffusion_model.input_blocks.0.0.weight".into(), vec![1]));
        }
        let scope = read(&Tensors::of_shapes(list).shared()).unwrap();
        let names: Vec<String> = scope.source().names().into_iter().map(String::from).collect();
        (Config::detect(&scope).unwrap(), names)
    };
    let (config, names) = scope(|r| r.1.clone());
    let want = Config { latent: 4, channels: 32, context: Some(64), vector: None, blocks: 12, convolutions: 8 };
    assert_eq!(config, want);
    assert_eq!(config.halvings(), 3);
    assert!(!names.iter().any(|n| n.starts_with("model.")));
    for (config, other) in [scope(|r| format!("controlnet.{}", r.0)), scope(|r| r.1.replace("control_model.", ""))]
    {
        assert_eq!((&config, &other), (&want, &names));
    }
}

#[test]
fn other_files_are_named() {
    let error = |names: &[&str]| {
        let list = names.iter().map(|n| ((*n).to_owned(), vec![4])).collect();
        read(&Tensors::of_shapes(list).shared()).err().unwrap().to_string()
    };
    for (name, what) in [
        ("lora_controlnet", "a Control-LoRA"),
        ("controlnet_x_embedder.weight", "a ControlNet of a diffusion transformer"),
        ("control_add_embedding.linear_1.weight", "(union)"),
        ("conv_in.weight", "holds no ControlNet: no name begins with input_hint_block."),
    ] {
        let message = error(&[name, "down_blocks.0.resnets.0.conv1.weight"]);
        assert!(message.contains(what), "{name}: {message}");
    }
}

#[test]
fn unets_add_residuals_as_diffusers_does() {
    use crate::component::Component;
    use crate::diffusion::{Given, Network, unet};
    use crate::names::Part;
    use sd_core::{CancelToken, Cuts, Device, Runner, RunnerOptions, TypePolicy};

    let fixture = Fixture::open("unet_sd1_control");
    let weights = fixture.weights(str::to_owned).shared();
    let [part] = Component::split(&weights, Some(Part::Diffusion)).try_into().ok().unwrap();
    let cfg = unet::Config::detect(part.scope(), HEADS).unwrap();
    let e = Evaluation { batch: 1, size: [8, 8], tokens: 20, control: true, ..Evaluation::default() };
    let g = Graph::new();
    let given = Given::declare(&g, &cfg.facts(), &e).unwrap();
    let program = g.finish(&[cfg.build(&g, part.scope(), &given, &e).unwrap()]).unwrap();
    let input = |name: &str| fixture.tensor(&format!("input.{name}"));
    let residuals = OUTPUTS.iter().enumerate().map(|(i, name)| (*name, input(&format!("control.{i:02}"))));
    let given = [("x", input("sample")), ("context", input("context")), ("timesteps", input("timestep"))];
    let inputs: Vec<(&str, Tensor)> = residuals.chain(given).collect();
    let inputs: Vec<(&str, &Tensor)> = inputs.iter().map(|(n, t)| (*n, t)).collect();
    let want = fixture.tensor("output.sample");
    let size = want.values().iter().map(|x| x.abs()).fold(0.0, f32::max);
    for cuts in [Cuts::None, Cuts::All] {
        let types = TypePolicy::Convert(DType::F32);
        let options = RunnerOptions { threads: 1, types, cuts, ..RunnerOptions::default() };
        let mut runner = Runner::new(Device::cpu().unwrap(), part.source(), options).unwrap();
        let got = runner.run(&program, &inputs, &CancelToken::default()).unwrap().remove(0);
        let far = got.values().iter().zip(want.values()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(far < 1e-4 * size, "{far} of {size}");
    }
}
