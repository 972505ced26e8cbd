"""Writes every fixture."""

import caches
import canny
import clip_text
import clip_tokens
import controlnet
import embeddings
import family_names
import fixture
import flux
import flux_guided
import flux_pipeline
import guidance
import predictions
import lora_kinds
import lora_names
import lora_pipeline
import pictures
import prompts
import real_names
import resample
import rng
import rng_std
import samplers
import scaled
import schedules
import schedules_flux
import schedules_named
import schedules_sdxl
import sd1_pictures
import sd1_pipeline
import sd2_pipeline
import sd3
import sd3_pipeline
import sdxl_pipeline
import sdxl_refiner
import t5_encoder
import t5_tokens
import tiny_vae
import umt5_encoder
import unet
import unet_sdxl
import upscale
import vae

if __name__ == "__main__":
    fixture.save_examples()
    scripts = (
        rng, rng_std, clip_tokens, t5_tokens, schedules, schedules_sdxl, schedules_flux, schedules_named, samplers, predictions, guidance, prompts, clip_text, t5_encoder, umt5_encoder, unet, unet_sdxl, flux, sd3, vae,
        pictures, sd1_pipeline, sd1_pictures, sd2_pipeline, sdxl_pipeline, sdxl_refiner, controlnet, canny, flux_pipeline, flux_guided, sd3_pipeline, caches, real_names, family_names, embeddings, lora_kinds, lora_names, lora_pipeline, scaled, upscale, resample, tiny_vae,
    )
    for script in scripts:
        script.main()
