"""A whole tiny SD1: text encoder, UNet, autoencoder, and two txt2img runs.

References: transformers' CLIPTokenizer and CLIPTextModel, diffusers' UNet2DConditionModel and AutoencoderKL, and k-diffusion's
DiscreteEpsDDPMDenoiser and samplers, in f64. All weights follow the procedural rule under diffusers names with the component in front
(`unet.`, `vae.`, `text_encoder.`). `sd1_names.json` lists every tensor with its name and shape in a single-file checkpoint; diffusers' own
converter confirms the UNet's and the autoencoder's.
"""

import diffusers.loaders.single_file_utils as single_file
import torch

import clip_text
import fixture
import names
import pipeline
import prompts
import schedules
import unet
import vae
import vocab

PROMPT = "a photo of a red cat sitting on a blue sofa"
NEGATIVE = "blurry, low quality"
WEIGHTED = [["a photo of a ", 1], ["red cat sitting on a blue sofa with two yellow cushions, next to a tall window", 1.6], [" at dusk", 1], [", blurry", 1 / 1.1]]
SEED, STEPS, CFG, WIDTH, HEIGHT = 42, 8, 7.0, 64, 64
SCALE = 0.18215


def weighted(states, weights):
    """A1111's rule: scale each token's state by its weight, then restore the mean of the whole window."""
    scaled = states * torch.tensor(weights, dtype=states.dtype)[:, :, None]
    print("restoring the mean multiplies by", (states.mean() / scaled.mean()).item())
    return scaled * (states.mean() / scaled.mean())


def check_names(unet_model, vae_model, ldm):
    back = single_file.convert_ldm_unet_checkpoint(dict(ldm), dict(unet_model.config))
    back |= single_file.convert_ldm_vae_checkpoint(dict(ldm), dict(vae_model.config))
    expected = dict(unet_model.state_dict()) | dict(vae_model.state_dict())
    assert back.keys() == expected.keys()
    assert all(torch.equal(back[name].reshape(value.shape), value) for name, value in expected.items())


def save_names(parts):
    """Pairs of names and shapes, [diffusers, shape, single file, shape]."""
    rows = []
    for component, state in parts.items():
        for name, value in state.items():
            (single, stored), = names.checkpoint(**{component: {name: value}}).items()
            title = {"unet": "unet.", "vae": "vae.", "text": "text_encoder.text_model."}[component] + name
            rows.append([title, list(value.shape), single, list(stored.shape)])
    fixture.save_json("sd1_names", {
        "source": f"diffusers {fixture.version('diffusers')} convert_ldm_unet_checkpoint, convert_ldm_vae_checkpoint", "script": "oracle/sd1_pipeline.py", "names": rows,
    })


def main():
    tokenizer = vocab.clip_tokenizer()
    text_model, text_table, text_config = clip_text.build(64, layers=2, vocab_size=49408, prefix="text_encoder.text_model.")
    unet_model, unet_config = unet.build(context=64)
    vae_model, vae_config = vae.build()
    table = text_table | fixture.fill(unet_model, "unet.") | fixture.fill(vae_model, "vae.", {"decoder.conv_out.weight": -1})
    check_names(unet_model, vae_model, names.checkpoint(unet_model.state_dict(), vae_model.state_dict()))
    save_names({"unet": unet_model.state_dict(), "vae": vae_model.state_dict(), "text": text_model.state_dict()})

    def condition(pieces):
        window, = prompts.windows(tokenizer, pieces)
        ids, weights = [token for token, _ in window], [weight for _, weight in window]
        return torch.tensor([ids]), torch.tensor([weights])

    inputs, outputs = {}, {}
    noise = torch.randn(1, 4, HEIGHT // 8, WIDTH // 8, generator=torch.Generator().manual_seed(SEED))
    inputs["noise"] = noise
    with torch.no_grad(), fixture.double_precision():
        contexts = {}
        for key, pieces in (("cond", [[PROMPT, 1]]), ("uncond", [[NEGATIVE, 1]]), ("weighted", WEIGHTED)):
            ids, weights = condition(pieces)
            states = clip_text.encode(text_model, ids)
            if key == "weighted":
                states = weighted(states, weights.tolist())
                inputs["weights.weighted"] = fixture.f32(weights)
            inputs[f"ids.{key}"] = ids.int()
            contexts[key] = outputs[f"context.{key}"] = states
        both = torch.cat([contexts["uncond"], contexts["cond"]])

        def eps(x, t):
            without, with_prompt = unet_model(torch.cat([x, x]), torch.cat([t, t]), encoder_hidden_states=both).sample.chunk(2)
            return without + CFG * (with_prompt - without)

        denoise = schedules.denoiser(eps)
        for sampler, schedule in (("euler", "discrete"), ("dpm++2m", "karras")):
            sigmas = schedules.sigmas(schedule, STEPS)
            latents = pipeline.trajectory(sampler, denoise, noise.double() * sigmas[0], sigmas)
            image = vae_model.decode(latents[-1] / SCALE).sample
            unit = (image / 2 + 0.5).clamp(0, 1)
            key = f"{sampler}.{schedule}"
            inputs[f"sigmas.{key}"] = sigmas
            outputs[f"{key}.latents"] = latents
            outputs[f"{key}.image"] = unit
            outputs[f"{key}.image_u8"] = (unit * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
            assert ((unit == 0) | (unit == 1)).double().mean() < 0.03, "the picture is mostly clamped"

    fixture.save(
        "sd1_pipeline", "sd1_pipeline.py",
        f"transformers {fixture.version('transformers')} CLIPTextModel, diffusers {fixture.version('diffusers')} UNet2DConditionModel and AutoencoderKL, k-diffusion {fixture.version('k-diffusion')}",
        {
            "prompt": PROMPT, "negative_prompt": NEGATIVE, "weighted_pieces": WEIGHTED, "seed": SEED, "steps": STEPS, "cfg": CFG, "width": WIDTH, "height": HEIGHT, "vae_scale": SCALE,
            "unet": unet_config, "vae": vae_config,
            "text_encoder": {"hidden_size": text_config.hidden_size, "num_hidden_layers": text_config.num_hidden_layers, "num_attention_heads": 1, "intermediate_size": text_config.intermediate_size, "vocab_size": 49408},
        },
        procedural=table, inputs=inputs, outputs=outputs,
        notes="start = input.noise (torch CPU generator, seed 42) * sigmas[0]; latents are x after each step; image = decode(x / 0.18215) / 2 + 0.5 clamped to [0, 1], [1, 3, 64, 64]; "
        "image_u8 is round(255 * image), [1, 64, 64, 3]; context.weighted scales token states by weights.weighted and restores the window's mean",
    )


if __name__ == "__main__":
    main()
