//! The tensors of a model by the names that adapter files may have for them.
//!
//! Files write a module's path with dots or with underscores, in the original's names or in diffusers', with what
//! trainers and programs put before it. So every name is looked up with underscores only.

use std::collections::{BTreeMap, HashMap};

use sd_core::Shape;

use crate::names::{Form, Part, Spelling};

/// What may stand before a path, and before the rest of these.
const OUTER: &[&str] = &["base_model_model_", "lora_", "lycoris_", ""];
/// What stands before the paths of a part, with the parts it may mean.
const PREFIXES: &[(&str, &[Part])] = &[
    ("model_diffusion_model_", &[Part::Diffusion]),
    ("diffusion_model_", &[Part::Diffusion]),
    ("unet_", &[Part::Diffusion]),
    ("transformer_", &[Part::Diffusion]),
    ("text_encoder_2_", &[Part::ClipG, Part::T5]),
    ("text_encoder_3_", &[Part::T5]),
    ("text_encoder_", &[Part::ClipL, Part::ClipG]),
    ("text_encoders_clip_l_transformer_", &[Part::ClipL]),
    ("text_encoders_clip_l_", &[Part::ClipL]),
    ("text_encoders_clip_g_transformer_", &[Part::ClipG]),
    ("text_encoders_clip_g_", &[Part::ClipG]),
    ("text_encoders_t5xxl_transformer_", &[Part::T5]),
    ("text_encoders_t5xxl_", &[Part::T5]),
    ("cond_stage_model_transformer_", &[Part::ClipL]),
    ("cond_stage_model_model_", &[Part::ClipL]),
    ("conditioner_embedders_0_transformer_", &[Part::ClipL]),
    ("conditioner_embedders_1_model_", &[Part::ClipG]),
    ("clip_l_", &[Part::ClipL]),
    ("clip_g_", &[Part::ClipG]),
    ("t5xxl_", &[Part::T5]),
    ("te1_", &[Part::ClipL, Part::ClipG]),
    ("te2_", &[Part::ClipG, Part::T5]),
    ("te3_", &[Part::T5]),
    ("te_", &[Part::ClipL, Part::ClipG, Part::T5]),
    ("first_stage_model_", &[Part::Autoencoder]),
    ("vae_", &[Part::Autoencoder]),
    ("", &[Part::Diffusion, Part::ClipL, Part::ClipG, Part::T5, Part::Autoencoder]),
];

/// Where a tensor of a file belongs.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Place {
    pub(super) part: Part,
    /// The name of the model's tensor.
    pub(super) here: String,
    pub(super) shape: Shape,
    pub(super) form: Form,
    /// How many of the file's make one of the model's.
    pub(super) of: usize,
}

/// The tensors of a model.
pub(super) struct Modules {
    /// By part and name with underscores.
    places: BTreeMap<(Part, String), Vec<Place>>,
    /// The model's own names, each part's in order.
    own: Vec<(Part, String, Shape)>,
}

impl Modules {
    /// Tensors by part, name and shape.
    pub(super) fn new(tensors: Vec<(Part, String, Shape)>) -> Modules {
        let mut places: BTreeMap<(Part, String), Vec<Place>> = BTreeMap::new();
        for (part, here, shape) in &tensors {
            let place = Place { part: *part, here: here.clone(), shape: *shape, form: Form::Same, of: 1 };
            places.insert((*part, flat(here)), vec![place]);
        }
        for part in Part::ALL {
            let own: Vec<&(Part, String, Shape)> = tensors.iter().filter(|t| t.0 == part).collect();
            let names: Vec<&str> = own.iter().map(|t| t.1.as_str()).collect();
            for spelling in others(part, &names) {
                let shapes: HashMap<&str, Shape> = own.iter().map(|t| (t.1.as_str(), t.2)).collect();
                for here in &names {
                    let files = spelling.file(here);
                    for file in &files {
                        let made = spelling.here(file).into_iter().filter_map(|(here, form)| {
                            let shape = *shapes.get(here.as_str())?;
                            Some(Place { part, here, shape, form, of: files.len() })
                        });
                        places.entry((part, flat(file))).or_insert_with(|| made.collect());
                    }
                }
            }
        }
        // XLabs' files have queries, keys and values of the layer that is joined with more.
        for (part, here, shape) in &tensors {
            if let Some(module) = here.strip_suffix(".linear1.weight").filter(|m| m.starts_with("single_blocks.")) {
                let place = Place { part: *part, here: here.clone(), shape: *shape, form: Form::Part(0), of: 2 };
                places.entry((*part, flat(&format!("{module}.linear1_qkv.weight")))).or_insert_with(|| vec![place]);
            }
        }
        Modules { places, own: tensors }
    }

    /// The model's own tensors.
    pub(super) fn own(&self) -> &[(Part, String, Shape)] {
        &self.own
    }

    /// Where the tensor `name` of the module `module` belongs; nowhere if the model has no such module.
    pub(super) fn find(&self, module: &str, name: &str) -> &[Place] {
        let module = flat(module);
        for outer in OUTER {
            let Some(rest) = module.strip_prefix(outer) else { continue };
            for (prefix, parts) in PREFIXES {
                let Some(path) = rest.strip_prefix(prefix) else { continue };
                for part in *parts {
                    // Processors of old files name the list, not its element.
                    for element in ["", "_0"] {
                        let key = (*part, join(path, element, name));
                        if let Some(found) = self.places.get(&key).filter(|p| !p.is_empty()) {
                            return found;
                        }
                    }
                }
            }
        }
        &[]
    }
}

fn join(path: &str, element: &str, name: &str) -> String {
    let path = format!("{path}{element}");
    match (path.as_str(), name) {
        (_, "") => path,
        ("", n) => n.to_owned(),
        (p, n) => format!("{p}_{n}"),
    }
}

fn flat(name: &str) -> String {
    name.replace('.', "_")
}

/// Other conventions' names for the tensors of a part. The tables want to see names of the convention, so a few are made
/// that show how many blocks there are.
fn others(part: Part, names: &[&str]) -> Vec<Spelling> {
    let hints = match part {
        Part::Diffusion => {
            let mut hints = unet_hints(names);
            for (here, there) in
                [("double_blocks", "transformer_blocks"), ("single_blocks", "single_transformer_blocks")]
            {
                hints.extend((0..count(names, here)).map(|i| format!("{there}.{i}.norm.linear.weight")));
            }
            let joint = count(names, "joint_blocks");
            hints.extend((joint > 0).then(|| "pos_embed.proj.weight".to_owned()));
            hints.extend((0..joint).map(|i| format!("transformer_blocks.{i}.attn.to_q.weight")));
            vec![hints]
        }
        Part::ClipL | Part::ClipG => {
            let layers = count(names, "text_model.encoder.layers");
            let open_clip = (0..layers).map(|i| format!("transformer.resblocks.{i}.ln_1.weight")).collect();
            vec![open_clip, vec!["embeddings.token_embedding.weight".to_owned()]]
        }
        Part::Autoencoder | Part::T5 => Vec::new(),
    };
    let hints = hints.into_iter().filter(|h| !h.is_empty());
    hints.map(|h| Spelling::detect(part, "", &h.iter().map(String::as_str).collect::<Vec<_>>())).collect()
}

/// Names that show the shape of a UNet to the table of diffusers' names.
fn unet_hints(names: &[&str]) -> Vec<String> {
    let inputs = count(names, "input_blocks");
    let has = |start: &str| names.iter().any(|n| n.starts_with(start));
    let levels = 1 + (0..inputs).filter(|i| has(&format!("input_blocks.{i}.0.op."))).count();
    let layers = inputs.saturating_sub(levels) / levels;
    if layers == 0 {
        return Vec::new();
    }
    let mut hints = Vec::new();
    for level in 0..levels {
        hints.extend((0..layers).map(|i| format!("down_blocks.{level}.resnets.{i}.conv1.weight")));
        let up = (0..=layers).map(|i| level * (layers + 1) + i);
        if up.into_iter().any(|i| has(&format!("output_blocks.{i}.1.transformer_blocks."))) {
            hints.push(format!("up_blocks.{level}.attentions.0.norm.weight"));
        }
    }
    hints
}

/// One more than the largest number directly below `list`.
fn count(names: &[&str], list: &str) -> usize {
    let number = |n: &&str| n.strip_prefix(list)?.strip_prefix('.')?.split('.').next()?.parse::<usize>().ok();
    names.iter().filter_map(number).max().map_or(0, |n| n.saturating_add(1).min(names.len()))
}
