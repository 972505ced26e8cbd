"""The tiny SDXL of `sdxl_pipeline.py`, finished by a tiny refiner.

References as there. The refiner takes over as with `denoising_end=0.8` of StableDiffusionXLPipeline and `denoising_start=0.8` of
StableDiffusionXLImg2ImgPipeline: both have one schedule, and a step is the refiner's if its timestep is below 200. It reads the second text encoder
alone: the state before the last layer, without the final norm, and the projected vector; then height, width, top, left, and the aesthetic score, 6 for
the prompt and 2.5 for the negative one.
"""

import torch

import fixture
import pipeline
import schedules
import sdxl_pipeline
import unet_sdxl
import vocab

WIDTH, HEIGHT, SWITCH = 64, 64, 0.8


def build():
    """The refiner with what it shares with the base: the second encoder and the autoencoder."""
    base = sdxl_pipeline.build()
    settings = unet_sdxl.refiner()
    refiner, rows = unet_sdxl.build(settings, "unet.")
    shared = {name: row for name, row in base[4].items() if name.startswith(("text_encoder_2.", "vae."))}
    return base, refiner, shared | rows, settings


def main():
    tokenizer = vocab.clip_tokenizer()
    (first, second, unet, vae_model, _, config), refiner, table, settings = build()
    width, height, steps = WIDTH, HEIGHT, sdxl_pipeline.STEPS
    noise = pipeline.noise(4, height, width)
    inputs, outputs = {"noise": noise}, {}
    with torch.no_grad(), fixture.double_precision():
        def states(prompt):
            one, two = pipeline.windows(tokenizer, prompt), pipeline.windows(tokenizer, prompt, pad=0)
            result = second(two, output_hidden_states=True)
            return first(one, output_hidden_states=True).hidden_states[-2], result.hidden_states[-2], result.text_embeds

        def arguments(context, pooled, numbers):
            return {"encoder_hidden_states": context, "added_cond_kwargs": {"text_embeds": pooled, "time_ids": torch.tensor([numbers], dtype=torch.float64)}}

        def base_of(prompt):
            one, two, pooled = states(prompt)
            return arguments(torch.cat([one, two], dim=-1), pooled, [height, width, 0.0, 0.0, height, width])

        def refiner_of(prompt, score):
            _, two, pooled = states(prompt)
            return arguments(two, pooled, [height, width, 0.0, 0.0, score])

        base = pipeline.denoiser("eps", pipeline.guided(unet, base_of(pipeline.NEGATIVE), base_of(pipeline.PROMPT)))
        finish = pipeline.denoiser("eps", pipeline.guided(refiner, refiner_of(pipeline.NEGATIVE, 2.5), refiner_of(pipeline.PROMPT, 6.0)))
        cutoff = int(round(1000 - SWITCH * 1000))
        by = []

        def denoise(x, sigma):
            refines = base.sigma_to_t(sigma).item() < cutoff
            by.append(refines)
            return (finish if refines else base)(x, sigma)

        sigmas = schedules.sigmas("discrete", steps)
        pipeline.record(inputs, outputs, "refined", "euler", sigmas, denoise, noise.double() * sigmas[0], lambda z: vae_model.decode(z / sdxl_pipeline.SCALE).sample, full=False)
        print("steps of the refiner:", by)
        assert by == sorted(by) and 0 < sum(by) < steps
    fixture.save(
        "sdxl_refiner_pipeline", "sdxl_refiner.py", f"{unet_sdxl.VERSION} UNet2DConditionModel, the rest as in sdxl_pipeline",
        {"prompt": pipeline.PROMPT, "negative_prompt": pipeline.NEGATIVE, "seed": pipeline.SEED, "steps": steps, "cfg": pipeline.CFG, "width": width, "height": height, "switch": SWITCH, "unet": settings}
        | {key: config[key] for key in ("vae", "text_encoder_2")},
        procedural=table, inputs=inputs, outputs=outputs,
        notes="procedural has the refiner's tensors; the base is sdxl_pipeline's; steps whose timestep is below 200 are the refiner's",
    )


if __name__ == "__main__":
    main()
