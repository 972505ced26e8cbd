//! How files spell the names of tensors. Networks here use the original spelling (CompVis, OpenAI); every other
//! convention is a table.

pub(crate) mod controlnet;
mod diffusers;
mod flux;
mod ignored;
mod mmdit;
mod open_clip;
mod t5;

use std::collections::{BTreeMap, HashMap};

pub(crate) use ignored::{is_ignored, is_left_out};

/// A part of a model that a file of its own may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// The network that predicts noise.
    Diffusion,
    /// The autoencoder.
    Autoencoder,
    /// The first or only CLIP text encoder.
    ClipL,
    /// The second CLIP text encoder, OpenCLIP's bigG.
    ClipG,
    /// T5's encoder, or UMT5's.
    T5,
}

impl Part {
    /// Every part.
    pub const ALL: [Part; 5] = [Part::Diffusion, Part::Autoencoder, Part::ClipL, Part::ClipG, Part::T5];

    /// What messages call it.
    pub fn name(self) -> &'static str {
        match self {
            Part::Diffusion => "diffusion network",
            Part::Autoencoder => "VAE",
            Part::ClipL => "CLIP text encoder",
            Part::ClipG => "second CLIP text encoder",
            Part::T5 => "T5 text encoder",
        }
    }

    /// The option that gives it from a file of its own.
    pub fn option(self) -> &'static str {
        match self {
            Part::Diffusion => "--diffusion-model",
            Part::Autoencoder => "--vae",
            Part::ClipL => "--clip_l",
            Part::ClipG => "--clip_g",
            Part::T5 => "--t5xxl",
        }
    }

    /// What stands before its names in files that hold more than one part.
    fn prefixes(self) -> &'static [&'static str] {
        match self {
            Part::Diffusion => &["model.diffusion_model.", "diffusion_model.", "unet."],
            Part::Autoencoder => &["first_stage_model.", "vae."],
            Part::ClipL => &[
                "cond_stage_model.transformer.",
                "cond_stage_model.model.",
                "conditioner.embedders.0.transformer.",
                "text_encoders.clip_l.transformer.",
                "text_encoders.clip_l.",
                "text_encoder.",
                "clip_l.transformer.",
                "clip_l.",
                "te1.",
                "te.",
            ],
            // SDXL's refiner has no other encoder.
            Part::ClipG => &[
                "conditioner.embedders.1.model.",
                "conditioner.embedders.0.model.",
                "text_encoders.clip_g.transformer.",
                "text_encoders.clip_g.",
                "text_encoder_2.",
                "clip_g.transformer.",
                "clip_g.",
                "te2.",
            ],
            Part::T5 => &[
                "text_encoders.t5xxl.transformer.",
                "text_encoders.t5xxl.",
                "t5xxl.transformer.",
                "t5xxl.",
                "te3.",
            ],
        }
    }

    /// Prefixes that other parts have too: they count only where a name of this part follows.
    fn shared_prefixes(self) -> &'static [&'static str] {
        match self {
            // The subfolder of a diffusion transformer, and OpenCLIP's text encoder.
            Part::Diffusion => &["transformer."],
            // In Flux it is the second text encoder, in SD 3 the third; SDXL's second is a CLIP.
            Part::T5 => &["text_encoder_2.", "text_encoder_3."],
            Part::Autoencoder | Part::ClipL | Part::ClipG => &[],
        }
    }

    /// How many bytes a name without prefix has in common with the starts of its names.
    fn starts(self, name: &str) -> Option<usize> {
        let starts = |head: &&&str| name.strip_prefix(**head).is_some_and(|r| r.is_empty() || r.starts_with('.'));
        self.heads().iter().filter(starts).map(|head| head.len()).max()
    }

    /// Starts of its names when nothing stands before them.
    fn heads(self) -> &'static [&'static str] {
        match self {
            Part::Diffusion => &[
                "input_blocks",
                "middle_block",
                "output_blocks",
                "time_embed",
                "label_emb",
                "out",
                "down_blocks",
                "mid_block",
                "up_blocks",
                "time_embedding",
                "add_embedding",
                "conv_in",
                "conv_norm_out",
                "conv_out",
                "double_blocks",
                "single_blocks",
                "img_in",
                "txt_in",
                "time_in",
                "vector_in",
                "guidance_in",
                "final_layer",
                "joint_blocks",
                "pos_embed",
                "t_embedder",
                "y_embedder",
                "transformer_blocks",
                "single_transformer_blocks",
                "x_embedder",
                "context_embedder",
                "time_text_embed",
                "norm_out",
                "proj_out",
            ],
            Part::Autoencoder => &["encoder", "decoder", "quant_conv", "post_quant_conv"],
            Part::ClipL => &["text_model"],
            Part::ClipG => &[],
            Part::T5 => &[
                "shared",
                "encoder.block",
                "encoder.final_layer_norm",
                "encoder.embed_tokens",
                "token_embd",
                "enc",
            ],
        }
    }
}

/// The part that a tensor of a file belongs to, and what stands before its name. With `only`, names without a known
/// prefix belong to that part.
pub(crate) fn part_of(name: &str, only: Option<Part>) -> Option<(Part, &'static str)> {
    let shared = Part::ALL.into_iter().find_map(|part| {
        let follows = |prefix: &&&str| name.strip_prefix(**prefix).is_some_and(|rest| part.starts(rest).is_some());
        Some((part, *part.shared_prefixes().iter().find(follows)?))
    });
    let own =
        || Part::ALL.into_iter().find_map(|p| Some((p, *p.prefixes().iter().find(|x| name.starts_with(**x))?)));
    if let Some((part, prefix)) = shared.or_else(own) {
        return only.is_none_or(|o| o == part).then_some((part, prefix));
    }
    if let Some(part) = only {
        return Some((part, ""));
    }
    let starts = Part::ALL.into_iter().filter_map(|p| Some((p.starts(name)?, p)));
    starts.max_by_key(|(bytes, _)| *bytes).map(|(_, p)| (p, ""))
}

/// How a tensor here follows from that of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Form {
    /// They are the same.
    Same,
    /// The file has it as several tensors, to be joined along the first axis; this is the one at that place.
    Part(usize),
    /// The file has `of` tensors as one, joined along the first axis; it is the one at place `part`.
    Slice {
        /// Counted from 0.
        part: usize,
        /// How many.
        of: usize,
    },
    /// The halves of the first axis change places.
    Swap,
    /// The two axes change places.
    Transpose,
}

impl Form {
    /// The form of the whole: one for all parts.
    pub(crate) fn whole(self) -> Form {
        if let Form::Part(_) = self { Form::Part(0) } else { self }
    }
}

/// One row of a table: the path of a module in the file and here, the names that differ inside it, and how its
/// tensors follow from those of the file. Several rows may share either path.
pub(crate) struct Row {
    file: String,
    here: String,
    inside: &'static [(&'static str, &'static str)],
    form: Form,
}

impl Row {
    /// A module whose tensors are the same here.
    pub(crate) fn new(
        file: impl Into<String>,
        here: impl Into<String>,
        inside: &'static [(&'static str, &'static str)],
    ) -> Row {
        Row { file: file.into(), here: here.into(), inside, form: Form::Same }
    }

    /// The same row with another form.
    pub(crate) fn form(mut self, form: Form) -> Row {
        self.form = form;
        self
    }
}

/// The spelling of one part in one file, both ways.
pub(crate) struct Spelling {
    prefix: &'static str,
    /// Empty if the file uses the names used here.
    rows: Vec<Row>,
    by_file: Index,
    by_here: Index,
}

/// Places in a table by module path.
type Index = HashMap<String, Vec<usize>>;

impl Spelling {
    /// The spelling of `part` in a file whose names of it, without `prefix`, are `names`.
    pub(crate) fn detect(part: Part, prefix: &'static str, names: &[&str]) -> Spelling {
        let rows = match part {
            Part::Diffusion => {
                let tables = [flux::transformer, mmdit::transformer, diffusers::unet];
                tables.iter().flat_map(|table| table(names)).collect()
            }
            Part::Autoencoder => diffusers::autoencoder(names),
            Part::ClipL | Part::ClipG => open_clip::encoder(names).unwrap_or_else(|| diffusers::text(names)),
            Part::T5 => t5::encoder(names),
        };
        Spelling::new(prefix, rows)
    }

    /// A spelling by its table; an empty one means that the file uses the names used here.
    pub(crate) fn new(prefix: &'static str, rows: Vec<Row>) -> Spelling {
        let (mut by_file, mut by_here) = (Index::new(), Index::new());
        for (i, row) in rows.iter().enumerate() {
            by_file.entry(row.file.clone()).or_default().push(i);
            by_here.entry(row.here.clone()).or_default().push(i);
        }
        Spelling { prefix, rows, by_file, by_here }
    }

    /// The names used here for a name of the file, and what each takes from its tensor.
    pub(crate) fn here(&self, file: &str) -> Vec<(String, Form)> {
        let Some(name) = file.strip_prefix(self.prefix) else { return Vec::new() };
        if self.rows.is_empty() {
            return vec![(name.into(), Form::Same)];
        }
        let (rows, rest) = self.find(&self.by_file, name);
        rows.into_iter().map(|r| (join(&r.here, &swap(rest, r.inside.iter().copied())), r.form)).collect()
    }

    /// The names in the file of what makes the tensor `here`, in order.
    pub(crate) fn file(&self, here: &str) -> Vec<String> {
        let (rows, rest) = self.find(&self.by_here, here);
        let mut parts = BTreeMap::new();
        for r in rows {
            let place = if let Form::Part(i) = r.form { i } else { 0 };
            let name = join(&r.file, &swap(rest, r.inside.iter().map(|&(file, here)| (here, file))));
            // Of rows that lead to one name, as where only some levels have attention, the last is right.
            parts.insert(place, format!("{}{name}", self.prefix));
        }
        if parts.is_empty() { vec![format!("{}{here}", self.prefix)] } else { parts.into_values().collect() }
    }

    /// The rows of the longest module path that `name` starts with, and the rest of the name.
    fn find<'s, 'a>(&'s self, index: &Index, name: &'a str) -> (Vec<&'s Row>, &'a str) {
        let ends = name.match_indices('.').map(|(i, _)| i).chain([name.len()]).collect::<Vec<_>>();
        let found = ends.into_iter().rev().find_map(|end| {
            let (head, rest) = name.split_at_checked(end)?;
            Some((index.get(head)?.as_slice(), rest.strip_prefix('.').unwrap_or(rest)))
        });
        let (rows, rest) = found.unwrap_or_else(|| (index.get("").map_or(&[], Vec::as_slice), name));
        (rows.iter().filter_map(|&i| self.rows.get(i)).collect(), rest)
    }
}

fn join(head: &str, rest: &str) -> String {
    match (head, rest) {
        ("", r) => r.into(),
        (h, "") => h.into(),
        (h, r) => format!("{h}.{r}"),
    }
}

/// Replaces the module path at the start of `name` by the first pair whose left side it is.
fn swap<'a>(name: &str, mut pairs: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    let found = pairs.find_map(|(from, to)| {
        let rest = name.strip_prefix(from)?;
        (rest.is_empty() || rest.starts_with('.')).then(|| format!("{to}{rest}"))
    });
    found.unwrap_or_else(|| name.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs() -> Vec<(String, String)> {
        let fixture: serde_json::Value =
            serde_json::from_str(include_str!("../../../../oracle/fixtures/sd1_names.json")).unwrap();
        let text = |v: &serde_json::Value| v.as_str().unwrap().to_owned();
        let rows = fixture["names"].as_array().unwrap();
        assert!(rows.len() > 900);
        rows.iter().map(|r| (text(&r[0]), text(&r[2]))).collect()
    }

    #[test]
    fn diffusers_names_and_original_names_are_one_to_one() {
        let pairs = pairs();
        for part in [Part::Diffusion, Part::Autoencoder, Part::ClipL] {
            let of = |n: &str| part_of(n, None).filter(|p| p.0 == part).map(|p| p.1);
            let mine: Vec<_> = pairs.iter().filter_map(|(d, o)| Some((d, of(d)?, o, of(o)?))).collect();
            assert!(mine.len() > 20, "{part:?}");
            let (prefix, original) = (mine[0].1, mine[0].3);
            let bare: Vec<&str> = mine.iter().map(|m| m.0.strip_prefix(prefix).unwrap()).collect();
            let spelling = Spelling::detect(part, prefix, &bare);
            let plain = Spelling::detect(part, original, &[mine[0].2.strip_prefix(original).unwrap()]);
            for (diffusers, _, original, _) in &mine {
                let [(here, Form::Same)] = &spelling.here(diffusers)[..] else { panic!("{diffusers}") };
                assert_eq!(plain.file(here), [original.as_str()]);
                assert_eq!(plain.here(original), [(here.clone(), Form::Same)]);
                assert_eq!(spelling.file(here), [diffusers.as_str()]);
            }
        }
    }

    #[test]
    fn a_file_of_one_part_needs_no_prefix() {
        assert_eq!(part_of("input_blocks.0.0.weight", None), Some((Part::Diffusion, "")));
        assert_eq!(part_of("decoder.conv_in.weight", None), Some((Part::Autoencoder, "")));
        assert_eq!(part_of("encoder.layers.0.weight", Some(Part::ClipL)), Some((Part::ClipL, "")));
        assert_eq!(part_of("first_stage_model.decoder.conv_in.weight", Some(Part::ClipL)), None);
        assert_eq!(part_of("lora_unet_x.alpha", None), None);
        let (folder, layer) = ("transformer.x_embedder.weight", "transformer.resblocks.0.ln_1.weight");
        assert_eq!(part_of(folder, None), Some((Part::Diffusion, "transformer.")));
        assert_eq!(part_of(layer, None), None);
        assert_eq!(part_of(layer, Some(Part::ClipL)), Some((Part::ClipL, "")));
    }

    #[test]
    fn the_second_text_encoder_is_told_by_its_names() {
        let part = |name: &str| part_of(name, None).map(|p| p.0);
        for (name, want) in [
            ("text_encoder_2.encoder.block.0.layer.0.SelfAttention.q.weight", Part::T5),
            ("text_encoder_2.shared.weight", Part::T5),
            ("text_encoder_3.encoder.final_layer_norm.weight", Part::T5),
            ("text_encoder_2.text_model.encoder.layers.0.mlp.fc1.weight", Part::ClipG),
            ("text_encoder_2.text_projection.weight", Part::ClipG),
            ("encoder.block.0.layer.0.layer_norm.weight", Part::T5),
            ("enc.blk.0.attn_q.weight", Part::T5),
            ("encoder.down.0.block.0.conv1.weight", Part::Autoencoder),
        ] {
            assert_eq!(part(name), Some(want), "{name}");
        }
    }

    #[test]
    fn text_names_may_lack_their_root() {
        let s = Spelling::detect(Part::ClipL, "text_encoder.", &["embeddings.token_embedding.weight"]);
        let here = "text_model.embeddings.token_embedding.weight";
        let file = "text_encoder.embeddings.token_embedding.weight";
        assert_eq!(s.here(file), [(here.to_owned(), Form::Same)]);
        assert_eq!(s.file(here), [file]);
    }

    #[test]
    fn old_names_of_the_autoencoders_attention_are_known() {
        let names = ["decoder.mid_block.attentions.0.query.weight", "decoder.up_blocks.0.resnets.0.conv1.weight"];
        let s = Spelling::detect(Part::Autoencoder, "", &names);
        let here = |n| s.here(n).remove(0).0;
        assert_eq!(here("decoder.mid_block.attentions.0.query.weight"), "decoder.mid.attn_1.q.weight");
        assert_eq!(here("decoder.mid_block.attentions.0.proj_attn.bias"), "decoder.mid.attn_1.proj_out.bias");
    }
}
