"""Writes every fixture."""

import clip_text
import clip_tokens
import fixture
import prompts
import rng
import samplers
import schedules
import sd1_pipeline
import unet
import vae

if __name__ == "__main__":
    fixture.save_examples()
    for script in (rng, clip_tokens, schedules, samplers, prompts, clip_text, unet, vae, sd1_pipeline):
        script.main()
