//! Tensors that checkpoints carry and no network reads: noise tables that training code saves, averages of weights,
//! positions that are counted anyway.

use super::Part;

const PREFIXES: &[&str] = &[
    "alphas_cumprod_prev",
    "betas",
    "denoiser.sigmas",
    "edm_vpred.sigma_min",
    "embedding_manager",
    "log_one_minus_alphas_cumprod",
    "loss.",
    "model_ema.",
    "posterior_",
    "sqrt_",
    "ztsnr",
];
const SUFFIXES: &[&str] =
    &["embeddings.position_ids", "logit_scale", "spiece_model", "time_embedding.cond_proj.weight"];
/// Of T5: its decoder, in the names of transformers and of llama.cpp.
const DECODER: &[&str] = &["decoder.", "lm_head.", "dec.", "output."];
/// The encoder's copy of T5's token table.
const COPY: &str = "encoder.embed_tokens.weight";
/// Read by the family, not by a network.
const FLAGS: &[&str] = &["alphas_cumprod", "edm_vpred.sigma_max", "v_pred"];

/// Whether a tensor, by its name in the file, is left out without a word.
pub(crate) fn is_ignored(name: &str) -> bool {
    FLAGS.contains(&name)
        || PREFIXES.iter().any(|p| name.starts_with(p))
        || SUFFIXES.iter().any(|s| name.ends_with(s))
}

/// Whether nothing reads a tensor `name` of a part whose names, without what stands before them, are `all`.
pub(crate) fn is_left_out(part: Part, name: &str, all: &[&str]) -> bool {
    part == Part::T5
        && (DECODER.iter().any(|p| name.starts_with(p)) || name == COPY && all.contains(&"shared.weight"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t5_is_read_without_its_decoder_and_without_a_second_token_table() {
        let (shared, copy) = ("shared.weight", "encoder.embed_tokens.weight");
        let out = |part, name, all: &[&str]| is_left_out(part, name, all);
        assert!(out(Part::T5, copy, &[shared, copy]) && !out(Part::T5, copy, &[copy]));
        assert!(!out(Part::T5, shared, &[shared, copy]));
        assert!(out(Part::T5, "decoder.block.0.layer.0.layer_norm.weight", &[]));
        assert!(!out(Part::Autoencoder, "decoder.conv_in.weight", &[]));
    }

    #[test]
    fn tables_of_training_code_are_ignored_and_weights_are_not() {
        for name in [
            "betas",
            "sqrt_recipm1_alphas_cumprod",
            "posterior_mean_coef2",
            "model_ema.decay",
            "cond_stage_model.transformer.text_model.embeddings.position_ids",
        ] {
            assert!(is_ignored(name), "{name}");
        }
        for name in
            ["model.diffusion_model.out.2.bias", "text_model.final_layer_norm.weight", "decoder.conv_in.bias"]
        {
            assert!(!is_ignored(name), "{name}");
        }
    }
}
