use std::sync::Arc;

use sd_core::WeightSource;

use super::*;
use crate::component::Component;
use crate::names::Part;
use crate::testing::{Case, Fixture, Tensors, check, check_cuts, real_names};

fn component(weights: Arc<dyn WeightSource>) -> Component {
    let [part] = Component::split(&weights, None).try_into().ok().unwrap();
    assert_eq!(part.part(), Part::Diffusion);
    part
}

/// Builds the network of a fixture on its inputs, once without each block in `skips`, then whole.
fn whole(fixture: &str, run: fn(&Case), skips: &[(&'static str, usize)]) {
    let file = Fixture::open(fixture);
    let part = component(file.weights(str::to_owned).shared());
    let mut names = file.names("input");
    names.sort();
    assert_eq!(names, ["latent", "pooled", "text", "timestep"]);
    let network = |g: &Graph, w: &Scope, inputs: &[Var]| {
        let cfg = Config::detect(w)?;
        let inputs = Inputs { x: inputs[0], pooled: inputs[1], context: inputs[2], timestep: inputs[3] };
        let mut out = Vec::new();
        // Taps are taken from what is built last.
        for (name, i) in skips {
            out.push((*name, build(g, w, &cfg, &inputs, &[*i])?));
        }
        out.push(("velocity", build(g, w, &cfg, &inputs, &[])?));
        Ok(out)
    };
    run(&Case { fixture, source: part.source(), prefix: "", build: &network });
}

#[test]
fn every_variant_agrees_with_diffusers_at_every_block_and_without_one() {
    for fixture in ["sd3", "sd35_medium", "sd35_large"] {
        whole(fixture, check, &[("velocity.skip_1", 1), ("velocity.skip_2", 2)]);
    }
}

#[test]
fn a_batch_of_odd_patches_agrees_with_diffusers() {
    whole("sd3_batch", check, &[]);
}

#[test]
fn cuts_change_nothing() {
    whole("sd35_medium", check_cuts, &[]);
    whole("sd3_batch", check_cuts, &[]);
}

#[test]
fn sizes_are_read_off_the_weights() {
    let read = |fixture: &str| {
        let part = component(Fixture::open(fixture).weights(str::to_owned).shared());
        Config::detect(part.scope()).unwrap()
    };
    let sd3 = Config {
        latent: 16,
        hidden: 128,
        heads: 2,
        context: 64,
        pooled: 48,
        sinusoid: 256,
        side: 11,
        normed: false,
        blocks: 3,
    };
    assert_eq!(read("sd35_medium"), Config { normed: true, ..sd3.clone() });
    assert_eq!(read("sd3"), sd3);
}

/// Builds the network without bytes.
fn dry_build(part: &Component, e: &Evaluation) -> Result<Config> {
    let g = Graph::new();
    let cfg = Config::detect(part.scope())?;
    let given = Given::declare(&g, &cfg.facts(), e)?;
    let y = cfg.build(&g, part.scope(), &given, e)?;
    assert_eq!(g.shape(y).dims(), [e.batch, cfg.latent, e.size[0], e.size[1]]);
    assert_eq!(g.finish(&[y])?.cuts().len(), cfg.blocks - e.skip.len());
    Ok(cfg)
}

fn evaluation(size: [usize; 2]) -> Evaluation {
    Evaluation { batch: 1, size, tokens: 77 + 256, ..Evaluation::default() }
}

#[test]
fn at_real_size_every_tensor_is_used_and_none_is_missing() {
    for (set, hidden, side, blocks) in
        [("sd3", 1536, 192, 24), ("sd35_medium", 1536, 384, 24), ("sd35_large", 2432, 192, 38)]
    {
        let rows = real_names(set);
        let original: Vec<(String, Vec<usize>)> = rows.iter().map(|r| (r.0.clone(), r.1.clone())).collect();
        let comfy = original.iter().map(|(n, d)| (format!("model.diffusion_model.{n}"), d.clone())).collect();
        let diffusers: Vec<(String, Vec<usize>)> = rows.iter().flat_map(|r| r.3.clone()).collect();
        let folder = diffusers.iter().map(|(n, d)| (format!("transformer.{n}"), d.clone())).collect();
        // ggml counts no axes of 1 behind its last one, so files it writes may lack the first one here.
        let flat =
            |(n, d): &(String, Vec<usize>)| (n.clone(), if n == "pos_embed" { d[1..].to_vec() } else { d.clone() });
        let gguf = original.iter().map(flat).collect();
        for names in [original, comfy, diffusers, folder, gguf] {
            let part = component(Tensors::of_shapes(names).shared());
            let cfg = dry_build(&part, &evaluation([128, 128])).unwrap();
            assert_eq!((cfg.hidden, cfg.heads, cfg.side, cfg.blocks), (hidden, hidden / 64, side, blocks));
            assert_eq!((cfg.latent, cfg.context, cfg.pooled, cfg.normed), (16, 4096, 2048, set != "sd3"));
            assert_eq!(part.scope().unused(), Vec::<String>::new());
            assert_eq!(part.tensors(), rows.len());
        }
    }
}

#[test]
fn what_cannot_be_built_is_said() {
    let part = component(Fixture::open("sd3").weights(str::to_owned).shared());
    let e = |e: Evaluation| dry_build(&part, &e).unwrap_err().to_string();
    let small = || evaluation([4, 6]);
    assert_eq!(e(Evaluation { skip: vec![1, 3], ..small() }), "block 3 cannot be skipped, the last one is 2");
    dry_build(&part, &Evaluation { skip: vec![0, 2], ..small() }).unwrap();
    assert!(e(Evaluation { circular: [false, true], ..small() }).starts_with("circular: "));
    for size in [[24, 6], [6, 24], [5, 6]] {
        let e = e(evaluation(size));
        assert!(e.starts_with("width, height: ") && e.contains("multiples of 16 of at most 176 pixels"), "{e}");
    }
    dry_build(&part, &evaluation([22, 22])).unwrap();

    let with = |name: &'static str, dims: &[usize]| {
        let mut all: Vec<(String, Vec<usize>)> = [
            ("x_embedder.proj.weight", &[128, 16, 2, 2][..]),
            ("t_embedder.mlp.0.weight", &[128, 256]),
            ("y_embedder.mlp.0.weight", &[128, 48]),
            ("context_embedder.weight", &[128, 64]),
            ("pos_embed", &[1, 9, 128]),
            ("joint_blocks.0.x_block.attn.ln_q.weight", &[64]),
        ]
        .map(|(n, d)| (n.to_owned(), d.to_vec()))
        .into();
        all.retain(|(n, _)| n != name);
        all.push((name.to_owned(), dims.to_vec()));
        let part = component(Tensors::of_shapes(all).shared());
        Config::detect(part.scope()).map(|_| ()).unwrap_err().to_string()
    };
    assert!(with("pos_embed", &[1, 10, 128]).contains("square of positions"));
    assert!(with("joint_blocks.0.x_block.attn.ln_q.weight", &[48]).contains("whole heads of 48"));
    assert!(with("joint_blocks.0.x_block.attn.ln_q.bias", &[64]).contains("layer norms"));
}
