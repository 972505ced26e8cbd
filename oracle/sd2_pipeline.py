"""A whole tiny SD2: OpenCLIP text encoder, UNet, autoencoder, and txt2img runs with both predictions.

References: transformers' CLIPTokenizer and CLIPTextModelWithProjection, diffusers' UNet2DConditionModel and AutoencoderKL, k-diffusion's
DiscreteEpsDDPMDenoiser, DiscreteVDDPMDenoiser and samplers, in f64. All weights follow the procedural rule under diffusers names with the
component in front (`unet.`, `vae.`, `text_encoder.`); `pipeline_names.json.gz` gives their places in a single file.
"""

import torch

import clip_text
import fixture
import pipeline
import schedules
import unet_sdxl
import vae
import vocab

WIDTH, HEIGHT, STEPS, SCALE = 64, 64, 6, 0.18215


def build():
    text = clip_text.build(128, layers=3, vocab_size=49408, prefix="text_encoder.", openclip=True, projection=True)
    unet_config = unet_sdxl.sd2()
    unet = unet_sdxl.build(unet_config, "unet.")
    vae_model, vae_config = vae.build()
    table = text[1] | unet[1] | fixture.fill(vae_model, "vae.", {"decoder.conv_out.weight": -1})
    return text[0], unet[0], vae_model, table, {"unet": unet_config, "vae": vae_config, "text_encoder": clip_text.settings(text[2])}


def main():
    tokenizer = vocab.clip_tokenizer()
    text, unet, vae_model, table, config = build()
    noise = pipeline.noise(4, HEIGHT, WIDTH)
    inputs, outputs = {"noise": noise}, {}
    with torch.no_grad(), fixture.double_precision():
        contexts = {}
        for key, prompt in (("cond", pipeline.PROMPT), ("uncond", pipeline.NEGATIVE)):
            ids = pipeline.windows(tokenizer, prompt, pad=0)
            contexts[key] = outputs[f"context.{key}"] = text.text_model.final_layer_norm(text(ids, output_hidden_states=True).hidden_states[-2])
            inputs[f"ids.{key}"] = ids.int()
        model = pipeline.guided(unet, *({"encoder_hidden_states": contexts[key]} for key in ("uncond", "cond")))
        sigmas = schedules.sigmas("discrete", STEPS)
        for kind in ("v", "eps"):
            pipeline.record(inputs, outputs, f"{kind}.euler.discrete", "euler", sigmas, pipeline.denoiser(kind, model), noise.double() * sigmas[0], lambda z: vae_model.decode(z / SCALE).sample)
    fixture.save(
        "sd2_pipeline", "sd2_pipeline.py", f"transformers {fixture.version('transformers')} CLIPTextModelWithProjection, {unet_sdxl.VERSION} UNet2DConditionModel and AutoencoderKL, k-diffusion {fixture.version('k-diffusion')}",
        {"prompt": pipeline.PROMPT, "negative_prompt": pipeline.NEGATIVE, "seed": pipeline.SEED, "steps": STEPS, "cfg": pipeline.CFG, "width": WIDTH, "height": HEIGHT, "vae_scale": SCALE} | config,
        procedural=table, inputs=inputs, outputs=outputs,
        notes="start = input.noise * sigmas[0]; latents are x after each step; the context is the state before the last text layer, then the final norm; fillers are id 0; v and eps are two readings of the same network; image as in sd1_pipeline",
    )


if __name__ == "__main__":
    main()
