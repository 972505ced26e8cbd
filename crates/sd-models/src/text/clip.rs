//! CLIP's text encoder (Radford et al. 2021; `CLIPTextModelWithProjection` of transformers), OpenAI's and OpenCLIP's.
//! Golden values: `oracle/clip_text.py`.
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
    /// How many more there were, after these, when the model was trained.
    pub cut: usize,
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
        Ok(Config { width, layers, cut: 0, vocabulary, positions, activation })
    }
}

/// Which states are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// 1 for the states after the last layer, 2 for those after the one before it, and so on.
    pub clip_skip: usize,
    /// Whether those go through the final norm.
    pub normed: bool,
    /// Which states are wanted to take the pooled one from.
    pub pooled: Pooled,
}

/// What is done to the states of the last layer for the pooled one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pooled {
    /// None is wanted.
    None,
    /// The final norm.
    Normed,
    /// The final norm and the projection.
    Projected,
}

/// Token states.
#[derive(Debug, Clone, Copy)]
pub struct States {
    /// `[b, t, c]`.
    pub tokens: Var,
    /// `[b, t, p]`, as wanted. The row of the first end token is the pooled state.
    pub pooled: Option<Var>,
}

/// The states of `ids [b, t]`.
///
/// # Errors
/// `clip_skip` is 0, skips every layer or ends at one that was cut off, there are more tokens than positions, or
/// weights do not fit.
pub fn build(g: &Graph, w: &Scope, cfg: &Config, ids: Var, wanted: Wanted) -> Result<States> {
    let (skip, all) = (wanted.clip_skip, cfg.layers.saturating_add(cfg.cut));
    let end = all.saturating_add(1).checked_sub(skip).filter(|n| (1..=cfg.layers).contains(n));
    let end = end.ok_or_else(|| {
        let cut = if cfg.cut > 0 { format!(" without the last {}", cfg.cut) } else { String::new() };
        Error::request(format!("clip skip {skip}: the text encoder has {all} layers{cut}"))
            .hint(format!("choose {} to {all}", cfg.cut + 1))
    })?;
    let root = w;
    let w = root.sub("text_model");
    let mut x = embed(g, &w.sub("embeddings"), cfg, ids)?; // [b, t, c]
    let mut tokens = x;
    for i in 0..if wanted.pooled == Pooled::None { end } else { cfg.layers } {
        let w = w.at("encoder.layers", i);
        x = layer(g, &w, cfg, x)?;
        if i < end {
            tokens = x;
        }
        g.cut(&w, &if i < end { vec![x] } else { vec![tokens, x] });
    }
    let norm = w.norm("final_layer_norm")?;
    if wanted.normed {
        tokens = g.layer_norm(&norm, tokens, EPS)?;
    }
    let last = |norm| g.layer_norm(norm, x, EPS);
    let pooled = match wanted.pooled {
        Pooled::None => None,
        Pooled::Normed => Some(last(&norm)?),
        Pooled::Projected => Some(g.linear(&root.linear_no_bias("text_projection")?, last(&norm)?)?),
    };
    Ok(States { tokens, pooled })
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

    const SKIP_1: Wanted = Wanted { clip_skip: 1, normed: true, pooled: Pooled::None };
    const SKIP_2: Wanted = Wanted { clip_skip: 2, ..SKIP_1 };

    type Outputs = fn(&Graph, &Scope, &Config, Var) -> Result<Vec<(&'static str, Var)>>;

    fn case(fixture: &str, activation: Activation, run: fn(&Case), outputs: Outputs) {
        let weights = Fixture::open(fixture).weights(str::to_owned);
        let [part] = Component::split(&weights.shared(), Some(Part::ClipL)).try_into().ok().unwrap();
        let build = |g: &Graph, w: &Scope, inputs: &[Var]| {
            let cfg = Config::detect(w, activation)?;
            outputs(g, w, &cfg, inputs[0])
        };
        run(&Case { fixture, source: part.source(), prefix: "", build: &build });
    }

    fn both(g: &Graph, w: &Scope, cfg: &Config, ids: Var) -> Result<Vec<(&'static str, Var)>> {
        let last = build(g, w, cfg, ids, SKIP_1)?.tokens;
        Ok(vec![("last_hidden_state", last), ("clip_skip_2", build(g, w, cfg, ids, SKIP_2)?.tokens)])
    }

    #[test]
    fn states_agree_with_transformers() {
        case("clip_text", Activation::QuickGelu, check, both);
        case("clip_text_2heads", Activation::QuickGelu, check, both);
        case("clip_text_h", Activation::Gelu, check, both);
    }

    #[test]
    fn projected_states_agree_with_transformers() {
        case("clip_text_bigg", Activation::Gelu, check, |g, w, cfg, ids| {
            let wanted = Wanted { clip_skip: 2, normed: false, pooled: Pooled::Projected };
            let States { tokens, pooled } = build(g, w, cfg, ids, wanted)?;
            // The end tokens of the two prompts, as the fixture's notes say.
            let [b, t, c] = g.dims(pooled.unwrap())?;
            let rows = g.reshape(pooled.unwrap(), &[b * t, c])?;
            let row = |i: usize| g.slice(rows, 0, i, 1);
            Ok(vec![("penultimate", tokens), ("text_embeds", g.concat(&[row(9)?, row(t + 76)?], 0)?)])
        });
    }

    #[test]
    fn cuts_change_nothing() {
        case("clip_text_2heads", Activation::QuickGelu, check_cuts, both);
        case("clip_text_bigg", Activation::Gelu, check_cuts, |g, w, cfg, ids| {
            let states = build(g, w, cfg, ids, Wanted { clip_skip: 3, normed: false, pooled: Pooled::Projected })?;
            Ok(vec![("tokens", states.tokens), ("projected", states.pooled.unwrap())])
        });
    }

    #[test]
    fn a_layer_that_was_cut_off_is_not_missed() {
        let weights = Fixture::open("clip_text").weights(str::to_owned);
        let w = Scope::root(weights.shared());
        let whole = Config::detect(&w, Activation::QuickGelu).unwrap();
        let cut = Config { layers: 2, cut: 1, ..whole.clone() };
        let signature = |cfg: &Config, wanted: Wanted| {
            let g = Graph::new();
            let ids = g.input("ids", &[1, 77], sd_core::DType::I32).unwrap();
            let states = build(&g, &w, cfg, ids, wanted)?;
            Ok::<u128, Error>(g.finish(&[states.tokens])?.signature())
        };
        assert_eq!(signature(&cut, SKIP_2).unwrap(), signature(&whole, SKIP_2).unwrap());
        let e = signature(&cut, SKIP_1).unwrap_err().to_string();
        assert!(e.contains("3 layers without the last 1") && e.contains("choose 2 to 3"), "{e}");
    }

    #[test]
    fn layers_cannot_all_be_skipped() {
        let weights = Fixture::open("clip_text").weights(str::to_owned);
        let w = Scope::root(weights.shared());
        let cfg = Config::detect(&w, Activation::QuickGelu).unwrap();
        assert_eq!((cfg.width, cfg.layers, cfg.vocabulary, cfg.positions), (64, 3, 1000, 77));
        let g = Graph::new();
        let ids = g.input("ids", &[1, 77], sd_core::DType::I32).unwrap();
        for clip_skip in [0, 4, usize::MAX] {
            let e = build(&g, &w, &cfg, ids, Wanted { clip_skip, ..SKIP_1 }).unwrap_err();
            assert!(e.is_request() && e.to_string().contains("has 3 layers"), "{e}");
        }
    }
}
