"""A whole tiny SDXL: both text encoders, UNet, autoencoder, and txt2img runs.

References: transformers' CLIPTokenizer, CLIPTextModel and CLIPTextModelWithProjection, diffusers' UNet2DConditionModel, AutoencoderKL and
EDMEulerScheduler, k-diffusion's denoisers and samplers, in f64. Prompt handling follows StableDiffusionXLPipeline: both states before the last
layer, without the final norm, side by side; the second encoder's projected vector; an empty negative prompt is all zeros, states and vector.
"""

import torch
from diffusers import EDMEulerScheduler
from k_diffusion import sampling

import clip_text
import fixture
import pipeline
import schedules
import unet_sdxl
import vae
import vocab

WIDTH, HEIGHT, STEPS, SCALE = 64, 96, 6, 0.13025
LONG = ", ".join([pipeline.PROMPT] * 12)


def build():
    first = clip_text.build(64, layers=3, vocab_size=49408, prefix="text_encoder.text_model.")
    second = clip_text.build(128, layers=3, vocab_size=49408, prefix="text_encoder_2.", openclip=True, projection=True)
    unet_config = unet_sdxl.sdxl()
    unet = unet_sdxl.build(unet_config, "unet.")
    vae_config = vae.config() | dict(scaling_factor=SCALE)
    vae_model, _ = vae.build(vae_config)
    table = first[1] | second[1] | unet[1] | fixture.fill(vae_model, "vae.", {"decoder.conv_out.weight": -1})
    config = {"unet": unet_config, "vae": vae_config, "text_encoder": clip_text.settings(first[2]), "text_encoder_2": clip_text.settings(second[2])}
    return first[0], second[0], unet[0], vae_model, table, config


def edm(model):
    """CosXL's reading of the network: v, data of deviation 1, told a quarter of the logarithm of sigma."""
    scheduler = EDMEulerScheduler(sigma_min=0.002, sigma_max=120.0, sigma_data=1.0, sigma_schedule="exponential", prediction_type="v_prediction")

    def denoise(x, sigma):
        sigma_ = sigma.reshape(-1, 1, 1, 1)
        output = model(scheduler.precondition_inputs(x, sigma_), scheduler.precondition_noise(sigma))
        return scheduler.precondition_outputs(x, output, sigma_)

    return denoise


def main():
    tokenizer = vocab.clip_tokenizer()
    first, second, unet, vae_model, table, config = build()
    noise = pipeline.noise(4, HEIGHT, WIDTH)
    inputs, outputs = {"noise": noise}, {}
    with torch.no_grad(), fixture.double_precision():
        time_ids = torch.tensor([[HEIGHT, WIDTH, 0, 0, HEIGHT, WIDTH]], dtype=torch.float64)
        inputs["time_ids"] = fixture.f32(time_ids)

        def condition(key, prompt):
            """States of all windows one after the other; the vector is the first window's."""
            one, two = pipeline.windows(tokenizer, prompt), pipeline.windows(tokenizer, prompt, pad=0)
            inputs[f"ids.{key}"], inputs[f"ids_2.{key}"] = one.int(), two.int()
            result = second(two, output_hidden_states=True)
            states = torch.cat([first(one, output_hidden_states=True).hidden_states[-2], result.hidden_states[-2]], dim=-1)
            return states.reshape(1, -1, states.shape[-1]), result.text_embeds[:1]

        def arguments(states, vector):
            return {"encoder_hidden_states": states, "added_cond_kwargs": {"text_embeds": vector, "time_ids": time_ids}}

        cond = condition("cond", pipeline.PROMPT)
        uncond = condition("uncond", pipeline.NEGATIVE)
        zeros = tuple(torch.zeros_like(value) for value in uncond)
        for key, (states, vector) in (("cond", cond), ("uncond", uncond)):
            outputs[f"context.{key}"], outputs[f"pooled.{key}"] = states, vector
        long_states, outputs["pooled.long"] = condition("long", LONG)
        outputs["context.long"] = long_states[:, ::7]
        model = pipeline.guided(unet, arguments(*uncond), arguments(*cond))
        sigmas = schedules.sigmas("discrete", STEPS)
        karras = schedules.sigmas("karras", STEPS)
        wide = sampling.get_sigmas_exponential(STEPS, 0.002, 120.0)
        runs = (
            ("eps.euler.discrete", "euler", sigmas, pipeline.denoiser("eps", model)),
            ("eps.dpm++2m.karras", "dpm++2m", karras, pipeline.denoiser("eps", model)),
            ("v.euler.discrete", "euler", sigmas, pipeline.denoiser("v", model)),
            ("edm_v.euler.exponential", "euler", wide, edm(model)),
            ("empty_negative.euler.discrete", "euler", sigmas, pipeline.denoiser("eps", pipeline.guided(unet, arguments(*zeros), arguments(*cond)))),
            ("cfg1.euler.discrete", "euler", sigmas, pipeline.denoiser("eps", lambda x, t: unet(x, t, **arguments(*cond)).sample)),
        )
        for key, sampler, schedule, denoise in runs:
            pipeline.record(inputs, outputs, key, sampler, schedule, denoise, noise.double() * schedule[0], lambda z: vae_model.decode(z / SCALE).sample, full=key == "eps.euler.discrete")
    fixture.save(
        "sdxl_pipeline", "sdxl_pipeline.py",
        f"transformers {fixture.version('transformers')} CLIPTextModel and CLIPTextModelWithProjection, {unet_sdxl.VERSION} UNet2DConditionModel, AutoencoderKL and EDMEulerScheduler, k-diffusion {fixture.version('k-diffusion')}",
        {"prompt": pipeline.PROMPT, "negative_prompt": pipeline.NEGATIVE, "long_prompt": LONG, "seed": pipeline.SEED, "steps": STEPS, "cfg": pipeline.CFG, "width": WIDTH, "height": HEIGHT, "vae_scale": SCALE} | config,
        procedural=table, inputs=inputs, outputs=outputs,
        notes="start = input.noise * sigmas[0]; latents are x after each step; context is [first encoder | second encoder], both before the last layer and without final norm; pooled is the second encoder's projected vector; "
        "empty_negative has zeros for the negative's context and pooled vector; context.long holds every 7th token of two windows (tokens 0, 7, ...), pooled.long is the first window's; "
        "edm_v: sigma 120 to 0.002, the network is told ln(sigma) / 4; cfg1 has no negative pass; image as in sd1_pipeline",
    )


if __name__ == "__main__":
    main()
