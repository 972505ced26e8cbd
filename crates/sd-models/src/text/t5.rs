//! The encoder of T5 v1.1 and UMT5 (Raffel et al. 2020, `T5EncoderModel` of transformers). Golden values:
//! `oracle/t5_encoder.py`. `b` texts, `t` tokens, `c` channels, `h` heads.

use sd_core::scope::Role;
use sd_core::{AttentionOptions, Error, Graph, Result, Scope, Tensor, Var};

const EPS: f32 = 1e-6;
/// Classes of distances between tokens in each direction, in every published model.
const ONE_WAY: usize = 16;
/// Added to the scores of keys that are not read: their weights vanish, and f16 can hold it.
const UNREAD: f32 = -3e4;

/// Sizes, read off the weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// `c`.
    pub width: usize,
    /// `h`.
    pub heads: usize,
    /// How many blocks there are.
    pub blocks: usize,
    /// Rows of the token table.
    pub vocabulary: usize,
}

impl Config {
    /// The sizes of the encoder at `w`, the scope that holds `encoder`.
    ///
    /// # Errors
    /// A table is missing, or sizes do not go together.
    pub fn detect(w: &Scope) -> Result<Config> {
        let [vocabulary, width] = w.dims(tokens(w))?;
        let attention = w.sub("encoder.block.0.layer.0.SelfAttention");
        let [buckets, heads] = attention.dims("relative_attention_bias.weight")?;
        let [inner, _] = attention.dims("q.weight")?;
        if heads == 0 || inner == 0 || !inner.is_multiple_of(heads) {
            return Err(Error::shape(format!("T5 encoder of {heads} heads: q makes {inner} channels")));
        }
        if buckets != 2 * ONE_WAY {
            return Err(Error::shape(format!(
                "T5 encoder with {buckets} classes of distances, want {}",
                2 * ONE_WAY
            )));
        }
        Ok(Config { width, heads, blocks: w.count("encoder.block")?, vocabulary })
    }
}

/// Token states `[b, t, c]` of `ids [b, t]` after the last block and the final norm. `read [b, t]` is 1 where a token is
/// read by others and 0 where it is padding; without it all are read.
///
/// # Errors
/// Weights do not fit, or `read` has not the shape of `ids`.
pub fn build(g: &Graph, w: &Scope, cfg: &Config, ids: Var, read: Option<Var>) -> Result<Var> {
    let [_, t] = g.dims(ids)?;
    let mut x = g.embedding(&w.weight(tokens(w), Role::Table)?, ids)?; // [b, t, c]
    g.label(x, "shared");
    let unread = read.map(|read| unread(g, read)).transpose()?;
    let classes = g.constant(Tensor::i32(&[t, t], classes(t))?);
    let mut bias = None;
    let w = w.sub("encoder");
    for i in 0..cfg.blocks {
        let w = w.at("block", i);
        // T5 shares the first block's bias; in UMT5 every block has its own.
        let own = w.sub("layer.0.SelfAttention.relative_attention_bias");
        let bias = match bias {
            Some(bias) if !own.has("weight") => bias,
            _ => *bias.insert(position_bias(g, &own, cfg, classes, unread)?),
        };
        x = block(g, &w, cfg, x, bias)?;
        g.cut(&w, &[x]);
    }
    g.rms_norm(&w.norm_no_bias("final_layer_norm", "weight")?, x, EPS)
}

/// The name of the token table. Some files only have the encoder's copy.
fn tokens(w: &Scope) -> &'static str {
    if w.has("shared.weight") || !w.has(EMBED_TOKENS) { "shared.weight" } else { EMBED_TOKENS }
}

const EMBED_TOKENS: &str = "encoder.embed_tokens.weight";

/// What is added to the scores of each key, `[b, 1, 1, t]`. It stays live across cuts.
fn unread(g: &Graph, read: Var) -> Result<Var> {
    let [b, t] = g.dims(read)?;
    let unread = g.reshape(g.affine(read, -UNREAD, UNREAD)?, &[b, 1, 1, t])?;
    g.keep(&[unread]);
    Ok(unread)
}

/// What is added to attention scores, `[1 or b, h, t, t]`. It stays live across cuts.
fn position_bias(g: &Graph, w: &Scope, cfg: &Config, classes: Var, unread: Option<Var>) -> Result<Var> {
    let [t, _] = g.dims(classes)?;
    let table = w.weight("weight", Role::Vector)?;
    let bias = g.embedding(&table, classes)?; // [t, t, h]
    let bias = g.reshape(g.permute(bias, &[2, 0, 1])?, &[1, cfg.heads, t, t])?;
    let bias = match unread {
        Some(unread) => g.add(bias, unread)?,
        None => bias,
    };
    g.keep(&[bias]);
    Ok(bias)
}

fn block(g: &Graph, w: &Scope, cfg: &Config, x: Var, bias: Var) -> Result<Var> {
    let attention = w.sub("layer.0");
    let y = g.rms_norm(&attention.norm_no_bias("layer_norm", "weight")?, x, EPS)?;
    let x = g.add(x, attend(g, &attention.sub("SelfAttention"), cfg, y, bias)?)?;
    g.label(x, attention.path());

    let ff = w.sub("layer.1");
    let y = g.rms_norm(&ff.norm_no_bias("layer_norm", "weight")?, x, EPS)?;
    let x = g.add(x, feed_forward(g, &ff.sub("DenseReluDense"), y)?)?;
    g.label(x, w.path());
    Ok(x)
}

fn attend(g: &Graph, w: &Scope, cfg: &Config, x: Var, bias: Var) -> Result<Var> {
    let q = g.split_heads(g.linear(&w.linear_no_bias("q")?, x)?, cfg.heads)?; // [b, t, h, d]
    let k = g.split_heads(g.linear(&w.linear_no_bias("k")?, x)?, cfg.heads)?;
    let v = g.split_heads(g.linear(&w.linear_no_bias("v")?, x)?, cfg.heads)?;
    let options = AttentionOptions { scale: Some(1.0), mask: Some(bias), ..AttentionOptions::default() };
    let y = g.merge_heads(g.attention(q, k, v, options)?)?;
    let y = g.linear(&w.linear_no_bias("o")?, y)?;
    g.label(y, w.path());
    Ok(y)
}

fn feed_forward(g: &Graph, w: &Scope, x: Var) -> Result<Var> {
    let gate = g.gelu_tanh(g.linear(&w.linear_no_bias("wi_0")?, x)?)?;
    let y = g.mul(gate, g.linear(&w.linear_no_bias("wi_1")?, x)?)?;
    // In the large models the gated values and their products are beyond f16.
    let y = g.linear(&w.linear_no_bias("wo")?.wide(), y)?;
    g.label(y, w.path());
    Ok(y)
}

/// The class of the distance from each of `t` queries to each of `t` keys, row by row (`_relative_position_bucket` of
/// transformers, both directions).
fn classes(t: usize) -> Vec<i32> {
    let of = |q: usize, k: usize| class(q.abs_diff(k)) + if k > q { ONE_WAY } else { 0 };
    (0..t).flat_map(|q| (0..t).map(move |k| of(q, k) as i32)).collect()
}

/// The class of a distance in either direction: one for each up to 8, then two for each doubling up to 128.
fn class(distance: usize) -> usize {
    match distance {
        0..8 => distance,
        // 8 (128 / 8)^(i / 8) are the distances where classes start, so i = 2 log2(distance / 8).
        8..128 => 8 + (distance * distance / 64).ilog2() as usize,
        _ => ONE_WAY - 1,
    }
}

#[cfg(test)]
mod tests {
    use sd_core::Data;

    use super::*;
    use crate::testing::{Case, Fixture, Tensors, check, check_cuts};

    fn case(fixture: &str, run: fn(&Case)) {
        let file = Fixture::open(fixture);
        let mask = file.tensor("input.mask.short");
        let Data::I32(read) = mask.data() else { panic!("the mask is {}", mask.dtype()) };
        let read = Tensor::f32(mask.dims(), read.iter().map(|&m| m as f32).collect()).unwrap();
        let build = |g: &Graph, w: &Scope, inputs: &[Var]| {
            let cfg = Config::detect(w)?;
            let (full, short, read) = (inputs[0], inputs[1], g.constant(read.clone()));
            let cases = [("padded", short, None), ("masked", short, Some(read)), ("full", full, None)];
            let states = cases.into_iter().map(|(name, ids, read)| {
                let x = build(g, w, &cfg, ids, read)?;
                // A fixture may hold every eighth token only.
                Ok((name, every(g, x, file.tensor(&format!("output.{name}")).dims()[1])?))
            });
            states.collect()
        };
        let source = file.weights(str::to_owned).shared();
        run(&Case { fixture, source, prefix: "", build: &build });
    }

    /// `n` tokens of `x [b, t, c]` at equal distances.
    fn every(g: &Graph, x: Var, n: usize) -> Result<Var> {
        let [b, t, c] = g.dims(x)?;
        let x = g.reshape(x, &[b * n, t / n, c])?;
        g.reshape(g.slice(x, 1, 0, 1)?, &[b, n, c])
    }

    #[test]
    fn states_agree_with_transformers() {
        case("t5_encoder", check);
        case("t5_encoder_256", check);
        case("umt5_encoder", check);
    }

    #[test]
    fn cuts_change_nothing() {
        case("t5_encoder", check_cuts);
        case("umt5_encoder", check_cuts);
    }

    #[test]
    fn classes_start_where_transformers_starts_them() {
        let starts: Vec<usize> = (1..2000).filter(|&d| class(d) != class(d - 1)).collect();
        assert_eq!(starts, [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]);
        assert_eq!((class(91), class(1999)), (15, 15));
    }

    #[test]
    fn sizes_are_read_off_the_weights() {
        let at = |name: &str| format!("encoder.block.0.layer.0.SelfAttention.{name}.weight");
        let (q, table) = (at("q"), at("relative_attention_bias"));
        let sizes = |token: &str, q_dims: &[usize], table_dims: &[usize]| {
            let shapes = Tensors::shapes(&[(token, &[1000, 32]), (&q, q_dims), (&table, table_dims)]);
            Config::detect(&Scope::root(shapes.shared()))
        };
        let want = Config { width: 32, heads: 2, blocks: 1, vocabulary: 1000 };
        assert_eq!(sizes("shared.weight", &[128, 32], &[32, 2]).unwrap(), want);
        assert_eq!(sizes("encoder.embed_tokens.weight", &[128, 32], &[32, 2]).unwrap(), want);
        let message = |r: Result<Config>| r.unwrap_err().to_string();
        assert_eq!(message(sizes("x", &[128, 32], &[32, 2])), "shared.weight: missing from heron.safetensors");
        assert!(message(sizes("shared.weight", &[128, 32], &[32, 3])).contains("3 heads"));
        assert!(message(sizes("shared.weight", &[128, 32], &[16, 2])).contains("want 32"));
    }
}
