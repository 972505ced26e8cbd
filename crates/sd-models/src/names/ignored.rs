//! Tensors that checkpoints carry and no network reads: noise tables that training code saves, averages of weights,
//! positions that are counted anyway.

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
const SUFFIXES: &[&str] = &["embeddings.position_ids", "logit_scale", "time_embedding.cond_proj.weight"];
/// Read by the family, not by a network.
const FLAGS: &[&str] = &["alphas_cumprod", "edm_vpred.sigma_max", "v_pred"];

/// Whether a tensor, by its name in the file, is left out without a word.
pub(crate) fn is_ignored(name: &str) -> bool {
    FLAGS.contains(&name)
        || PREFIXES.iter().any(|p| name.starts_with(p))
        || SUFFIXES.iter().any(|s| name.ends_with(s))
}

#[cfg(test)]
mod tests {
    use super::*;

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
