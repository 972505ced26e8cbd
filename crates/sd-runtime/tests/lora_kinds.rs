//! One change in every kind of adapter, on whole pictures of the oracle's tiny SD 1.x, against the checkpoint that it is
//! merged into. The change is made of whole numbers of the weights' steps, so that the merged weights are exact in f16.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use sd_runtime::{Engine, ImageRequest, LoraMode, Precision};
use support::{Fixture, Log, Tensor, generate, json, oracle_request, procedural, relative, sd1, write_tensors};

/// Layers of the network and of the text encoder, and what adapters call them.
const LAYERS: [(&str, &str); 5] = [
    ("model.diffusion_model.input_blocks.1.0.in_layers.2", "lora_unet_input_blocks_1_0_in_layers_2"),
    ("model.diffusion_model.input_blocks.1.1.proj_in", "lora_unet_input_blocks_1_1_proj_in"),
    (
        "model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_q",
        "lora_unet_input_blocks_1_1_transformer_blocks_0_attn1_to_q",
    ),
    ("model.diffusion_model.output_blocks.8.0.out_layers.3", "lora_unet_output_blocks_8_0_out_layers_3"),
    (
        "cond_stage_model.transformer.text_model.encoder.layers.0.mlp.fc1",
        "lora_te_text_model_encoder_layers_0_mlp_fc1",
    ),
];
/// Kinds of files. Where a layer has no kernel, those with a core are as those without.
const KINDS: [&str; 13] = [
    "lora",
    "tucker",
    "loha",
    "loha tucker",
    "lokr",
    "lokr left",
    "lokr right",
    "lokr both",
    "lokr tucker",
    "lokr left tucker",
    "dora",
    "dora tucker",
    "diff",
];

/// A weight `[n, c, kernel]` with its change `(u₁ ⊗ u₂) (d₁ ⊗ d₂)ᵀ`, times `m` over the kernel.
struct Layer {
    n: usize,
    c: usize,
    /// Empty for a matrix.
    kernel: Vec<usize>,
    /// What the weight's values are whole multiples of.
    step: f32,
    weight: Vec<f32>,
    u: [Vec<f32>; 2],
    d: [Vec<f32>; 2],
    m: Vec<f32>,
}

fn outer(a: &[f32], b: &[f32]) -> Vec<f32> {
    a.iter().flat_map(|x| b.iter().map(move |y| x * y)).collect()
}

impl Layer {
    fn new(name: &str, table: &BTreeMap<String, (String, Vec<usize>)>, rule: &serde_json::Value) -> Layer {
        let (title, dims) = &table[&format!("{name}.weight")];
        let exponent = rule[title][1].as_i64().unwrap() as i32;
        let (n, c, kernel) = (dims[0], dims[1], dims[2..].to_vec());
        // Whole numbers from -most to most.
        let whole = |part: &str, count: usize, most: f32| -> Vec<f32> {
            let values = procedural(&format!("{name}.{part}"), count, -10, 0.0);
            values.iter().map(|v| (v * (most + 0.49)).round()).collect()
        };
        Layer {
            step: 2f32.powi(exponent),
            weight: procedural(title, dims.iter().product(), exponent, 0.0),
            u: [whole("u1", 2, 2.0), whole("u2", n / 2, 8.0)],
            d: [whole("d1", 2, 2.0), whole("d2", c / 2, 8.0)],
            m: whole("m", kernel.iter().product(), 3.0),
            n,
            c,
            kernel,
        }
    }

    /// The change.
    fn delta(&self) -> Vec<f32> {
        let (up, down) = (outer(&self.u[0], &self.u[1]), outer(&self.d[0], &self.d[1]));
        outer(&outer(&up, &down), &self.m).iter().map(|v| v * self.step).collect()
    }

    fn merged(&self) -> Vec<f32> {
        self.weight.iter().zip(self.delta()).map(|(w, d)| w + d).collect()
    }

    /// The tensors of a file of `kind`.
    fn tensors(&self, module: &str, kind: &str) -> Vec<Tensor> {
        let Layer { n, c, kernel, u, d, m, .. } = self;
        let (n, c) = (*n, *c);
        let with = |dims: &[usize]| [dims, &kernel[..]].concat();
        let ones = |dims: &[usize]| vec![1.0; dims.iter().product()];
        let scaled = |values: Vec<f32>| values.iter().map(|v| v * self.step).collect::<Vec<f32>>();
        // 1x1 where the layer is a convolution.
        let flat: Vec<usize> = kernel.iter().map(|_| 1).collect();
        let up = scaled(outer(&u[0], &u[1]));
        let down = outer(&d[0], &d[1]);
        let core = kind.contains("tucker") && !kernel.is_empty();
        let list: Vec<(&str, Vec<usize>, Vec<f32>)> = match kind {
            "diff" => vec![("diff", with(&[n, c]), self.delta())],
            _ if kind.starts_with("loha") && core => vec![
                ("hada_t1", with(&[1, 1]), m.clone()),
                ("hada_w1_a", vec![1, n], up),
                ("hada_w1_b", vec![1, c], down),
                ("hada_t2", with(&[1, 1]), ones(&with(&[1, 1]))),
                ("hada_w2_a", vec![1, n], ones(&[n])),
                ("hada_w2_b", vec![1, c], ones(&[c])),
            ],
            _ if kind.starts_with("loha") => {
                let k = c * m.len();
                vec![
                    ("hada_w1_a", vec![n, 1], up),
                    ("hada_w1_b", vec![1, k], outer(&down, m)),
                    ("hada_w2_a", vec![n, 1], ones(&[n])),
                    ("hada_w2_b", vec![1, k], ones(&[k])),
                ]
            }
            _ if kind.starts_with("lokr") => {
                let mut list = match kind.contains("left") || kind.contains("both") {
                    true => vec![("lokr_w1_a", vec![2, 1], u[0].clone()), ("lokr_w1_b", vec![1, 2], d[0].clone())],
                    false => vec![("lokr_w1", vec![2, 2], outer(&u[0], &d[0]))],
                };
                let right = scaled(u[1].clone());
                if core {
                    list.push(("lokr_t2", with(&[1, 1]), m.clone()));
                    list.push(("lokr_w2_a", vec![1, n / 2], right));
                    list.push(("lokr_w2_b", vec![1, c / 2], d[1].clone()));
                } else if kind.contains("right") || kind.contains("both") {
                    list.push(("lokr_w2_a", vec![n / 2, 1], right));
                    list.push(("lokr_w2_b", vec![1, c / 2 * m.len()], outer(&d[1], m)));
                } else {
                    list.push(("lokr_w2", with(&[n / 2, c / 2]), outer(&outer(&right, &d[1]), m)));
                }
                list
            }
            _ => {
                let mut list = vec![("lora_up.weight", [&[n, 1], &flat[..]].concat(), up)];
                if core {
                    list.push(("lora_down.weight", [&[1, c], &flat[..]].concat(), down));
                    list.push(("lora_mid.weight", with(&[1, 1]), m.clone()));
                } else {
                    list.push(("lora_down.weight", with(&[1, c]), outer(&down, m)));
                }
                if kind.starts_with("dora") {
                    // Lengths that the merged rows have already.
                    let square = |row: &[f32]| row.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt() as f32;
                    let lengths = self.merged().chunks(c * m.len()).map(square).collect();
                    list.push(("dora_scale", [&[n, 1], &flat[..]].concat(), lengths));
                }
                list
            }
        };
        list.into_iter().map(|(end, dims, values)| (format!("{module}.{end}"), dims, values)).collect()
    }
}

#[test]
fn one_change_in_every_kind_gives_the_merged_checkpoints_picture() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("lora-kinds");
    fs::create_dir_all(&folder).unwrap();
    let rule = Fixture::open("sd1_pipeline.safetensors").metadata("procedural");
    let rows: Vec<(String, Vec<usize>, String, Vec<usize>)> =
        serde_json::from_value(json("sd1_names.json")["names"].clone()).unwrap();
    let table = rows.into_iter().map(|(title, dims, stored, _)| (stored, (title, dims))).collect();
    let layers = LAYERS.map(|(name, module)| (name, module, Layer::new(name, &table, &rule)));
    for kind in KINDS {
        let tensors: Vec<Tensor> =
            layers.iter().flat_map(|(_, module, layer)| layer.tensors(module, kind)).collect();
        write_tensors(&folder.join(format!("{kind}.safetensors")), &tensors);
    }
    let plain = sd1::write("lora-kinds.safetensors", |_, _| {});
    let merged = sd1::write("lora-kinds-merged.safetensors", |name, values| {
        let changed = layers.iter().find(|(layer, ..)| name.strip_suffix(".weight") == Some(layer));
        if let Some((.., layer)) = changed {
            assert!(*values == layer.weight, "{name}");
            *values = layer.merged();
        }
    });
    let start = |path: &Path, mode| {
        let builder = Engine::builder().model(path).device("cpu").threads(1).lora_folder(&folder).lora_mode(mode);
        builder.precision(Precision::F32).build().unwrap()
    };
    let draw = |engine: &mut Engine, tag: &str| {
        let base = oracle_request("sd1_pipeline.safetensors");
        let mut log = Log::default();
        let request = ImageRequest { prompt: format!("{}{tag}", base.prompt), steps: Some(1), ..base };
        generate(engine, &request, &mut log).unwrap();
        assert!(log.warnings.is_empty(), "{tag}: {:?}", log.warnings);
        log.latents.concat()
    };
    let want = draw(&mut start(&merged, LoraMode::Auto), "");
    for mode in [LoraMode::Immediately, LoraMode::AtRuntime] {
        let mut engine = start(&plain, mode);
        let without = draw(&mut engine, "");
        assert!(relative(&without, &want) > 0.02, "{:.1e}", relative(&without, &want));
        for kind in KINDS {
            let got = draw(&mut engine, &format!("<lora:{kind}:1>"));
            let off = relative(&got, &want);
            assert!(off < 1e-4, "{kind} {mode}: {off:.1e}");
            // Whole numbers add up to the same bits; lengths are roots.
            assert!(mode != LoraMode::Immediately || kind.starts_with("dora") || got == want, "{kind}: {off:.1e}");
        }
        assert!(draw(&mut engine, "") == without, "{mode}: something stayed");
    }
}
