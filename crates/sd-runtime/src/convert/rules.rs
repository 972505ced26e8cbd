//! Which type a tensor gets: the value of `--type`, and `--tensor-type-rules` over it.

use regex_lite::{Regex, RegexBuilder};
use sd_core::{DType, Error, Result, TensorMeta};

/// Names of layers that lose more to quantisation than it saves: where a network takes in times, sizes and positions,
/// and its first and last layer. A name counts where it contains one of these.
const KEPT: &[&str] = &[
    "img_in.",
    "txt_in.",
    "time_in.",
    "vector_in.",
    "guidance_in.",
    "final_layer.",
    "x_embedder.",
    "t_embedder.",
    "y_embedder.",
    "pos_embed",
    "context_embedder.",
    "time_embed.",
    "label_emb.",
    "embedding",
];
/// Ends of names that are never quantised.
const KEPT_ENDS: &[&str] = &[".bias", "_bias", ".scale", ".weight_scale"];

/// Types by names of tensors.
#[derive(Debug, Clone, Default)]
pub struct TypeRules {
    default: Option<DType>,
    rules: Vec<(Regex, DType)>,
}

/// What the rules say about a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// This type; its own if no rule is about it.
    Type(DType),
    /// Its own type, because of what is said here.
    Kept(&'static str),
}

impl TypeRules {
    /// `default` for every tensor that no rule is about; without it such tensors keep their types. `rules` are
    /// separated by commas, each `regex=type`; a tensor gets the type of the first whose expression is found in its name.
    ///
    /// # Errors
    /// A rule has no `=`, its expression is malformed, or its type cannot be written.
    pub fn new(default: Option<DType>, rules: &str) -> Result<TypeRules> {
        let parsed = rules.split(',').map(str::trim).filter(|r| !r.is_empty()).map(rule);
        if let Some(dtype) = default.filter(|d| !is_written(*d)) {
            return Err(Error::request(format!("--type {dtype}: not a type that weights are written in")));
        }
        Ok(TypeRules { default, rules: parsed.collect::<Result<_>>()? })
    }

    /// The expressions that are found in none of `names`.
    pub fn unmatched(&self, names: &[&str]) -> Vec<&str> {
        let found = |regex: &Regex| names.iter().any(|name| regex.is_match(name));
        self.rules.iter().filter(|(regex, _)| !found(regex)).map(|(regex, _)| regex.as_str()).collect()
    }

    /// What becomes of the tensor `name`. Only floats and quantised tensors are converted, and only matrices whose rows
    /// are whole blocks are quantised; `--type` leaves some layers alone besides, unless a rule is about them.
    pub fn choose(&self, name: &str, meta: &TensorMeta) -> Choice {
        let ruled = self.rules.iter().find(|(regex, _)| regex.is_match(name)).map(|(_, dtype)| *dtype);
        let Some(wanted) = ruled.or(self.default).filter(|wanted| *wanted != meta.dtype) else {
            return Choice::Type(meta.dtype);
        };
        let shape = &meta.shape;
        if !is_float(meta.dtype) {
            return Choice::Kept("integers");
        }
        if wanted.block_bytes() > 1 && !wanted.is_quantised() {
            return Choice::Type(wanted);
        }
        if shape.rank() < 2 {
            Choice::Kept("vectors")
        } else if wanted.bytes(shape.elements(), shape.last()).is_none() {
            Choice::Kept("rows that are not whole blocks")
        } else if ruled.is_none()
            && (KEPT.iter().any(|part| name.contains(part)) || KEPT_ENDS.iter().any(|end| name.ends_with(end)))
        {
            Choice::Kept("embeddings, first and last layers")
        } else {
            Choice::Type(wanted)
        }
    }
}

fn rule(text: &str) -> Result<(Regex, DType)> {
    let bad = |what: String| Error::request(format!("--tensor-type-rules: {text:?}: {what}"));
    let (regex, dtype) = text.split_once('=').ok_or_else(|| bad("want regex=type".to_owned()))?;
    let dtype = DType::parse(dtype.trim()).filter(|d| is_written(*d));
    let dtype = dtype.ok_or_else(|| {
        let names: Vec<&str> = DType::all().filter(|d| is_written(*d)).map(DType::name).collect();
        bad(format!("want one of the types {}", names.join(", ")))
    })?;
    let regex = RegexBuilder::new(regex.trim()).size_limit(1 << 20).build().map_err(|e| bad(e.to_string()))?;
    Ok((regex, dtype))
}

/// Types that weights can be written in.
fn is_written(dtype: DType) -> bool {
    dtype.is_weight_type() || matches!(dtype, DType::F8E4M3 | DType::F8E5M2)
}

fn is_float(dtype: DType) -> bool {
    is_written(dtype) || dtype == DType::F64
}

#[cfg(test)]
mod tests {
    use super::*;
    use sd_core::Shape;

    fn choose(rules: &TypeRules, name: &str, dims: &[usize], dtype: DType) -> Choice {
        rules.choose(name, &TensorMeta { shape: Shape::new(dims).unwrap(), dtype })
    }

    #[test]
    fn a_type_is_for_matrices_that_can_have_it() {
        let q8 = TypeRules::new(Some(DType::Q8_0), "").unwrap();
        let matrix = "double_blocks.0.img_attn.qkv.weight";
        assert_eq!(choose(&q8, matrix, &[96, 64], DType::F16), Choice::Type(DType::Q8_0));
        assert_eq!(choose(&q8, matrix, &[96, 64], DType::Q8_0), Choice::Type(DType::Q8_0));
        for (name, dims, dtype) in [
            (matrix, &[96, 63][..], DType::F16),
            ("norm.weight", &[64], DType::F16),
            ("img_in.weight", &[96, 64], DType::F16),
            ("text_model.embeddings.token_embedding.weight", &[96, 64], DType::F16),
            ("position_ids", &[1, 64], DType::I64),
            ("conv.weight", &[64, 64, 3, 3], DType::F32),
            ("a.bias", &[1, 64], DType::F32),
        ] {
            assert!(matches!(choose(&q8, name, dims, dtype), Choice::Kept(_)), "{name}");
        }
        let f16 = TypeRules::new(Some(DType::F16), "").unwrap();
        assert_eq!(choose(&f16, "norm.weight", &[64], DType::F32), Choice::Type(DType::F16));
        assert_eq!(choose(&f16, "conv.weight", &[64, 64, 3, 3], DType::F32), Choice::Type(DType::F16));
        let none = TypeRules::default();
        assert_eq!(choose(&none, matrix, &[96, 64], DType::Q4K), Choice::Type(DType::Q4K));
    }

    #[test]
    fn the_first_rule_that_is_found_in_the_name_counts() {
        let rules = TypeRules::new(Some(DType::Q8_0), r"attn\.to_[qk]=q4_0, ^img_in=F16,attn=f32,").unwrap();
        for (name, want) in [
            ("a.attn.to_q.weight", DType::Q4_0),
            ("a.attn.to_v.weight", DType::F32),
            ("img_in.weight", DType::F16),
            ("b.img_inner.weight", DType::Q8_0),
        ] {
            assert_eq!(choose(&rules, name, &[32, 32], DType::BF16), Choice::Type(want), "{name}");
        }
        let named = TypeRules::new(Some(DType::Q8_0), "embedding=q4_0").unwrap();
        assert_eq!(choose(&named, "token_embedding.weight", &[32, 32], DType::F16), Choice::Type(DType::Q4_0));
    }

    #[test]
    fn rules_about_nothing_are_known() {
        let rules = TypeRules::new(None, "attn=f16,atn=q8_0,^b=f32").unwrap();
        assert_eq!(rules.unmatched(&["a.attn", "ab"]), ["atn", "^b"]);
        assert!(rules.unmatched(&["batn.attn"]).is_empty());
    }

    #[test]
    fn wrong_rules_are_named() {
        for (rules, want) in [
            ("abc", "--tensor-type-rules: \"abc\": want regex=type"),
            ("a=q9", "--tensor-type-rules: \"a=q9\": want one of the types f32,"),
            ("a=q8_K", "--tensor-type-rules: \"a=q8_K\": want one of the types f32,"),
            ("(=f16", "--tensor-type-rules: \"(=f16\": "),
        ] {
            let e = TypeRules::new(None, rules).unwrap_err();
            assert!(e.is_request() && e.to_string().starts_with(want), "{e}");
        }
        assert!(TypeRules::new(Some(DType::I32), "").is_err());
    }
}
