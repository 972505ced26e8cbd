//! CLIP's text encoder (Radford et al. 2021; `CLIPTextModel` of transformers). Golden values: `oracle/clip_text.py`.
//! `b` prompts, `t` tokens, `c` channels, `h` heads.

use sd_core::scope::Role;
use sd_core::{AttentionOptions, Error, Graph, Result, Scope, Tensor, Var};

/// Channels per head in every published CLIP text encoder.
const HEAD: usize = 64;
const EPS: f32 = 1e-5;

/// The function between the two layers of an MLP. No tensor tells which one it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// OpenAI's models.
    QuickGelu,
    /// OpenCLIP's models.
    Gelu,
}

/// Sizes, read off the weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// `c`.
    pub width: usize,
    /// How many transformer layers there are.
    pub layers: usize,
    /// Rows of the token table.
    pub vocabulary: usize,
    /// The longest run of tokens.
    pub positions: usize,
    /// Given by the family.
    pub activation: Activation,
}

impl Config {
    /// The sizes of the encoder at `w`, the scope that holds `text_model`.
    ///
    /// # Errors
    /// A table is missing, or the width is not whole heads of 64.
    pub fn detect(w: &Scope, activation: Activation) -> Result<Config> {
        let w = w.sub("text_model");
        let [vocabulary, width] = w.sub("embeddings").dims("token_embedding.weight")?;
        let [positions, _] = w.sub("embeddings").dims("position_embedding.weight")?;
        if width == 0 || !width.is_multiple_of(HEAD) {
            return Err(Error::shape(format!("text encoder of width {width}: want a multiple of {HEAD}")));
        }
        let layers = w.count("encoder.layers")?;
        Ok(Config { width, layers, vocabulary, positions, activation })
    }
}

/// Token states `[b, t, c]` of `ids [b, t]`: those after the last layer for a `clip_skip` of 1, after the one before
/// it for 2, and so on; then the final norm.
///
/// # Errors
/// `clip_skip` is 0 or skips every layer, there are more tokens than positions, or weights do not fit.
pub fn build(g: &Graph, w: &Scope, cfg: &Config, ids: Var, clip_skip: usize) -> Result<Var> {
    let layers = (cfg.layers + 1).checked_sub(clip_skip).filter(|n| (1..=cfg.layers).contains(n));
    let layers = layers.ok_or_else(|| {
        Error::request(format!("clip skip {clip_skip}: the text encoder has {} layers", cfg.layers))
            .hint(format!("choose 1 to {}", cfg.layers))
    })?;
    let w = w.sub("text_model");
    let mut x = embed(g, &w.sub("embeddings"), cfg, ids)?; // [b, t, c]
    for i in 0..layers {
        let w = w.at("encoder.layers", i);
        x = layer(g, &w, cfg, x)?;
        g.cut(&w, &[x]);
    }
    g.layer_norm(&w.norm("final_layer_norm")?, x, EPS)
}

fn embed(g: &Graph, w: &Scope, cfg: &Config, ids: Var) -> Result<Var> {
    let [_, t] = g.dims(ids)?;
    if t > cfg.positions {
        return Err(Error::shape(format!("{t} tokens, the text encoder has {} positions", cfg.positions)));
    }
    let positions = g.constant(Tensor::i32(&[t], (0..t as i32).collect())?);
    let tokens = g.embedding(&w.weight("token_embedding.weight", Role::Table)?, ids)?;
    let places = g.embedding(&w.weight("position_embedding.weight", Role::Vector)?, positions)?;
    let x = g.add(tokens, places)?;
    g.label(x, w.path());
    Ok(x)
}

fn layer(g: &Graph, w: &Scope, cfg: &Config, x: Var) -> Result<Var> {
    let y = g.layer_norm(&w.norm("layer_norm1")?, x, EPS)?;
    let x = g.add(x, attend(g, &w.sub("self_attn"), cfg, y)?)?;
    let y = g.layer_norm(&w.norm("layer_norm2")?, x, EPS)?;
    let x = g.add(x, mlp(g, &w.sub("mlp"), cfg, y)?)?;
    g.label(x, w.path());
    Ok(x)
}

fn attend(g: &Graph, w: &Scope, cfg: &Config, x: Var) -> Result<Var> {
    let heads = cfg.width / HEAD;
    let q = g.split_heads(g.linear(&w.linear("q_proj")?, x)?, heads)?; // [b, t, h, 64]
    let k = g.split_heads(g.linear(&w.linear("k_proj")?, x)?, heads)?;
    let v = g.split_heads(g.linear(&w.linear("v_proj")?, x)?, heads)?;
    let y = g.attention(q, k, v, AttentionOptions { causal: true, ..AttentionOptions::default() })?;
    let y = g.linear(&w.linear("out_proj")?, g.merge_heads(y)?)?;
    g.label(y, w.path());
    Ok(y)
}

fn mlp(g: &Graph, w: &Scope, cfg: &Config, x: Var) -> Result<Var> {
    let y = g.linear(&w.linear("fc1")?, x)?;
    let y = match cfg.activation {
        Activation::QuickGelu => g.quick_gelu(y)?,
        Activation::Gelu => g.gelu(y)?,
    };
    let y = g.linear(&w.linear("fc2")?, y)?;
    g.label(y, w.path());
    Ok(y)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::component::Component;
    use crate::names::Part;
    use crate::testing::{Case, Fixture, check, check_cuts};

    fn case(fixture: &str, run: fn(&Case)) {
        let weights = Fixture::open(fixture).weights(str::to_owned);
        let [part] = Component::split(&weights.shared(), Some(Part::Text)).try_into().ok().unwrap();
        let build = |g: &Graph, w: &Scope, inputs: &[Var]| {
            let cfg = Config::detect(w, Activation::QuickGelu)?;
            let last = build(g, w, &cfg, inputs[0], 1)?;
            Ok(vec![("last_hidden_state", last), ("clip_skip_2", build(g, w, &cfg, inputs[0], 2)?)])
        };
        run(&Case { fixture, source: part.source(), prefix: "", build: &build });
    }

    #[test]
    fn states_agree_with_transformers() {
        case("clip_text", check);
        case("clip_text_2heads", check);
    }

    #[test]
    fn cuts_change_nothing() {
        case("clip_text_2heads", check_cuts);
    }

    #[test]
    fn layers_cannot_all_be_skipped() {
        let weights = Fixture::open("clip_text").weights(str::to_owned);
        let w = Scope::root(weights.shared());
        let cfg = Config::detect(&w, Activation::QuickGelu).unwrap();
        assert_eq!((cfg.width, cfg.layers, cfg.vocabulary, cfg.positions), (64, 3, 1000, 77));
        let g = Graph::new();
        let ids = g.input("ids", &[1, 77], sd_core::DType::I32).unwrap();
        for skip in [0, 4, usize::MAX] {
            let e = build(&g, &w, &cfg, ids, skip).unwrap_err();
            assert!(e.is_request() && e.to_string().contains("has 3 layers"), "{e}");
        }
    }
}
