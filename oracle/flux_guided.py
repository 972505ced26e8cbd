"""The tiny Kontext of `flux_pipeline.py` with guidance by text and by the reference picture.

References: the networks of `flux_pipeline.py` in f64; the three predictions are combined as StableDiffusionInstructPix2PixPipeline of diffusers does it
(InstructPix2Pix, Brooks et al. 2023, equation 3): the prompt and the negative prompt with the reference, and the negative prompt without it.
Ids for T5 are those
of `t5_tokens.py`'s fixture. `two_way` leaves the reference's guidance at 1, where the last of them cancels out; `equal` has both scales equal, where the second does.
"""

import json

import torch

import fixture
import flux
import pipeline
import schedules_flux
import t5_encoder
import vocab
from flux_pipeline import GUIDANCE, HEIGHT, SCALE, SHIFT, STEPS, TOKENS, WIDTH, build, picture, to_model

PROMPT, NEGATIVE = "a photo of a cat", "trending on artstation"
RUNS = {"three_way": (4.0, 1.5), "two_way": (4.0, 1.0), "equal": (2.5, 2.5)}


def main():
    clip_tokenizer = vocab.clip_tokenizer()
    t5_ids = dict(json.loads((fixture.FIXTURES / "t5_tokens.json").read_text())["cases"])
    h, w = HEIGHT // 8, WIDTH // 8
    noise = pipeline.noise(16, HEIGHT, WIDTH)
    clip, t5, transformer, vae_model, _, _ = build("dev")
    pixels = picture(1)
    inputs, outputs = {"noise": noise, "kontext.picture": pixels}, {}

    def encoded(text):
        tokens = t5_ids[text] + [t5_encoder.EOS]
        ids = torch.tensor([tokens + [t5_encoder.PAD] * (TOKENS["dev"] - len(tokens))])
        return t5_encoder.encode(t5, ids), clip(pipeline.windows(clip_tokenizer, text)).pooler_output

    with torch.no_grad(), fixture.double_precision():
        prompt, negative = encoded(PROMPT), encoded(NEGATIVE)
        reference = (vae_model.encode(to_model(pixels)).latent_dist.mean - SHIFT) * SCALE
        tokens, ids = flux.pack(reference), flux.image_ids(h, w)
        beside = torch.cat([ids, flux.image_ids(h, w, 1)])
        sigmas = schedules_flux.dev(STEPS, schedules_flux.tokens(WIDTH, HEIGHT)).double()
        start = noise.double()

        def predict(x, sigma, text, looks):
            img, positions = (torch.cat([flux.pack(x), tokens], dim=1), beside) if looks else (flux.pack(x), ids)
            y = flux.forward(transformer, img, positions, *text, sigma.item(), GUIDANCE)
            return flux.unpack(y[:, :h * w // 4], h, w)

        for key, (text_scale, image_scale) in RUNS.items():
            def velocity(x, sigma):
                both, image, neither = predict(x, sigma, prompt, True), predict(x, sigma, negative, True), predict(x, sigma, negative, False)
                return neither + text_scale * (both - image) + image_scale * (image - neither)

            latents = pipeline.record(
                inputs, outputs, key, "euler", sigmas, pipeline.flow(velocity), start * sigmas[0], lambda z: vae_model.decode(z / SCALE + SHIFT).sample,
                full=False, most=0.05,
            )
            pipeline.check_flow(latents, start, sigmas, velocity)
    fixture.save(
        "flux_guided_pipeline", "flux_guided.py", f"{flux.VERSION} FluxTransformer2DModel and AutoencoderKL, transformers {fixture.version('transformers')}",
        {
            "prompt": PROMPT, "negative_prompt": NEGATIVE, "seed": pipeline.SEED, "width": WIDTH, "height": HEIGHT,
            **{key: {"steps": STEPS, "guidance": GUIDANCE, "cfg": text, "image_cfg": image} for key, (text, image) in RUNS.items()},
        },
        inputs=inputs, outputs=outputs, notes="weights are those of flux_dev_pipeline; else as there",
    )


if __name__ == "__main__":
    main()
