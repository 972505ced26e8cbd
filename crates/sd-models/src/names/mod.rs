//! How files spell the names of tensors. Networks here use the original spelling (CompVis, OpenAI); every other
//! convention is a table.

mod diffusers;
mod ignored;
#[cfg_attr(not(test), expect(dead_code, reason = "no family has a T5 encoder yet"))]
mod t5;

use std::collections::HashMap;

pub(crate) use ignored::is_ignored;

/// A part of a model that a file of its own may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// The network that predicts noise.
    Diffusion,
    /// The autoencoder.
    Autoencoder,
    /// The first or only CLIP text encoder.
    Text,
}

impl Part {
    /// Every part.
    pub const ALL: [Part; 3] = [Part::Diffusion, Part::Autoencoder, Part::Text];

    /// What messages call it.
    pub fn name(self) -> &'static str {
        match self {
            Part::Diffusion => "diffusion network",
            Part::Autoencoder => "VAE",
            Part::Text => "CLIP text encoder",
        }
    }

    /// The option that gives it from a file of its own.
    pub fn option(self) -> &'static str {
        match self {
            Part::Diffusion => "--diffusion-model",
            Part::Autoencoder => "--vae",
            Part::Text => "--clip_l",
        }
    }

    /// What stands before its names in files that hold more than one part.
    fn prefixes(self) -> &'static [&'static str] {
        match self {
            Part::Diffusion => &["model.diffusion_model.", "diffusion_model.", "unet."],
            Part::Autoencoder => &["first_stage_model.", "vae."],
            Part::Text => &[
                "cond_stage_model.transformer.",
                "text_encoders.clip_l.transformer.",
                "text_encoder.",
                "clip_l.transformer.",
                "clip_l.",
                "te1.",
                "te.",
            ],
        }
    }

    /// First components of its names when nothing stands before them.
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
            ],
            Part::Autoencoder => &["encoder", "decoder", "quant_conv", "post_quant_conv"],
            Part::Text => &["text_model"],
        }
    }
}

/// The part that a tensor of a file belongs to, and what stands before its name. With `only`, names without a known
/// prefix belong to that part.
pub(crate) fn part_of(name: &str, only: Option<Part>) -> Option<(Part, &'static str)> {
    for part in Part::ALL {
        if let Some(prefix) = part.prefixes().iter().find(|p| name.starts_with(**p)) {
            return only.is_none_or(|o| o == part).then_some((part, prefix));
        }
    }
    if let Some(part) = only {
        return Some((part, ""));
    }
    let head = name.split('.').next()?;
    Part::ALL.into_iter().find(|p| p.heads().contains(&head)).map(|p| (p, ""))
}

/// One row of a table: the path of a module in the file and here, and the names that differ inside it.
pub(crate) struct Row {
    pub(crate) file: String,
    pub(crate) here: String,
    pub(crate) inside: &'static [(&'static str, &'static str)],
}

/// The spelling of one part in one file, both ways.
pub(crate) struct Spelling {
    prefix: &'static str,
    /// Empty if the file uses the names used here.
    rows: Vec<Row>,
    by_file: HashMap<String, usize>,
    by_here: HashMap<String, usize>,
}

impl Spelling {
    /// The spelling of `part` in a file whose names of it, without `prefix`, are `names`.
    pub(crate) fn detect(part: Part, prefix: &'static str, names: &[&str]) -> Spelling {
        let rows = match part {
            Part::Diffusion => diffusers::unet(names),
            Part::Autoencoder => diffusers::autoencoder(names),
            Part::Text => diffusers::text(names),
        };
        let by_file = rows.iter().enumerate().map(|(i, r)| (r.file.clone(), i)).collect();
        let by_here = rows.iter().enumerate().map(|(i, r)| (r.here.clone(), i)).collect();
        Spelling { prefix, rows, by_file, by_here }
    }

    /// The name used here for a name of the file.
    pub(crate) fn here(&self, file: &str) -> Option<String> {
        let name = file.strip_prefix(self.prefix)?;
        if self.rows.is_empty() {
            return Some(name.into());
        }
        let (row, rest) = self.find(&self.by_file, name)?;
        Some(join(&row.here, &swap(rest, row.inside.iter().copied())))
    }

    /// The name in the file for a name used here.
    pub(crate) fn file(&self, here: &str) -> String {
        let name = match self.find(&self.by_here, here) {
            Some((row, rest)) => join(&row.file, &swap(rest, row.inside.iter().map(|&(file, here)| (here, file)))),
            None => here.into(),
        };
        format!("{}{name}", self.prefix)
    }

    /// The row of the longest module path that `name` starts with, and the rest of the name.
    fn find<'a>(&self, index: &HashMap<String, usize>, name: &'a str) -> Option<(&Row, &'a str)> {
        let ends = name.match_indices('.').map(|(i, _)| i).chain([name.len()]).collect::<Vec<_>>();
        let found = ends.into_iter().rev().find_map(|end| {
            let (head, rest) = name.split_at_checked(end)?;
            Some((*index.get(head)?, rest.strip_prefix('.').unwrap_or(rest)))
        });
        let (i, rest) = found.or_else(|| Some((*index.get("")?, name)))?;
        Some((self.rows.get(i)?, rest))
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
        assert!(rows.len() > 1000);
        rows.iter().map(|r| (text(&r[0]), text(&r[2]))).collect()
    }

    #[test]
    fn diffusers_names_and_original_names_are_one_to_one() {
        let pairs = pairs();
        for part in Part::ALL {
            let of = |n: &str| part_of(n, None).filter(|p| p.0 == part).map(|p| p.1);
            let mine: Vec<_> = pairs.iter().filter_map(|(d, o)| Some((d, of(d)?, o, of(o)?))).collect();
            assert!(mine.len() > 20, "{part:?}");
            let (prefix, original) = (mine[0].1, mine[0].3);
            let bare: Vec<&str> = mine.iter().map(|m| m.0.strip_prefix(prefix).unwrap()).collect();
            let spelling = Spelling::detect(part, prefix, &bare);
            let plain = Spelling::detect(part, original, &[mine[0].2.strip_prefix(original).unwrap()]);
            for (diffusers, _, original, _) in &mine {
                let here = spelling.here(diffusers).unwrap_or_else(|| panic!("{diffusers}"));
                assert_eq!(&plain.file(&here), *original);
                assert_eq!(plain.here(original).as_ref(), Some(&here));
                assert_eq!(&spelling.file(&here), *diffusers);
            }
        }
    }

    #[test]
    fn a_file_of_one_part_needs_no_prefix() {
        assert_eq!(part_of("input_blocks.0.0.weight", None), Some((Part::Diffusion, "")));
        assert_eq!(part_of("decoder.conv_in.weight", None), Some((Part::Autoencoder, "")));
        assert_eq!(part_of("encoder.layers.0.weight", Some(Part::Text)), Some((Part::Text, "")));
        assert_eq!(part_of("first_stage_model.decoder.conv_in.weight", Some(Part::Text)), None);
        assert_eq!(part_of("lora_unet_x.alpha", None), None);
    }

    #[test]
    fn text_names_may_lack_their_root() {
        let s = Spelling::detect(Part::Text, "text_encoder.", &["embeddings.token_embedding.weight"]);
        let here = "text_model.embeddings.token_embedding.weight";
        assert_eq!(s.here("text_encoder.embeddings.token_embedding.weight").as_deref(), Some(here));
        assert_eq!(s.file(here), "text_encoder.embeddings.token_embedding.weight");
    }

    #[test]
    fn old_names_of_the_autoencoders_attention_are_known() {
        let names = ["decoder.mid_block.attentions.0.query.weight", "decoder.up_blocks.0.resnets.0.conv1.weight"];
        let s = Spelling::detect(Part::Autoencoder, "", &names);
        let here = |n| s.here(n).unwrap();
        assert_eq!(here("decoder.mid_block.attentions.0.query.weight"), "decoder.mid.attn_1.q.weight");
        assert_eq!(here("decoder.mid_block.attentions.0.proj_attn.bias"), "decoder.mid.attn_1.proj_out.bias");
    }
}
