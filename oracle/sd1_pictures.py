"""The tiny SD1 of `sd1_pipeline.py` with pictures: img2img, inpainting by a plain network and by one of 9 channels, pix2pix.

References: k-diffusion's denoiser and Euler sampler over diffusers' networks in f64; StableDiffusionImg2ImgPipeline, StableDiffusionInpaintPipeline
and StableDiffusionInstructPix2PixPipeline of diffusers take the same steps in f32, which `check` holds them to. The networks that read more
than the latent differ from the plain one in `conv_in` alone.
"""

import torch
from diffusers import (
    EulerDiscreteScheduler, StableDiffusionImg2ImgPipeline, StableDiffusionInpaintPipeline, StableDiffusionInstructPix2PixPipeline, UNet2DConditionModel,
)
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

import clip_text
import fixture
import pipeline
import schedules
import unet
import vae
import vocab

WIDTH, HEIGHT, STEPS, STRENGTH, CFG, IMAGE_CFG, SCALE = 64, 64, 8, 0.7, 7.0, 1.5, 0.18215


def picture():
    """An 8-bit picture [H, W, 3]: soft colours with hard edges."""
    y, x = torch.meshgrid(torch.arange(HEIGHT), torch.arange(WIDTH), indexing="ij")
    return torch.stack([48 + (x * (2 + c) + y * (4 - c) + 60 * c) % 256 * 5 // 8 for c in range(3)], dim=-1).to(torch.uint8)


def kept_levels(sigmas):
    """A1111's rule: the last `min(int(s n), n - 1) + 1` steps."""
    return sigmas[len(sigmas) - 2 - min(int(STRENGTH * (len(sigmas) - 1)), len(sigmas) - 2):]


class Levels(EulerDiscreteScheduler):
    """Takes the given levels, whatever the number of steps."""

    levels = None

    def set_timesteps(self, num_inference_steps=None, device=None, **_):
        super().set_timesteps(sigmas=self.levels.tolist(), device=device)


def scheduler(sigmas):
    made = Levels(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    made.levels = sigmas[:-1]
    return made


def check(kind, network, vae_model, contexts, sigmas, want, mean=False, **arguments):
    """diffusers' pipeline ends at the same latent, up to its f32. With `mean`, encoded pictures are means."""
    sample = DiagonalGaussianDistribution.sample
    if mean:
        DiagonalGaussianDistribution.sample = lambda self, generator=None: self.mean
    try:
        pipe = kind(vae_model.float(), None, None, network.float(), scheduler(sigmas), None, None, requires_safety_checker=False)
        pipe.set_progress_bar_config(disable=True)
        got = pipe(
            prompt_embeds=contexts["cond"].float(), negative_prompt_embeds=contexts["uncond"].float(), num_inference_steps=len(sigmas) - 1, guidance_scale=CFG,
            generator=torch.Generator().manual_seed(pipeline.SEED), output_type="latent", **arguments,
        ).images
    finally:
        DiagonalGaussianDistribution.sample = sample
        vae_model.double(), network.double()
    off = ((got.double() - want).norm() / want.norm()).item()
    print(f"{kind.__name__}: off by {off:.1e}")
    assert off < 1e-2, off


def main():
    tokenizer = vocab.clip_tokenizer()
    text_model, text_table, text_config = clip_text.build(64, layers=2, vocab_size=49408, prefix="text_encoder.text_model.")
    settings = unet.config()
    networks, table = {}, dict(text_table)
    for key, channels in (("plain", 4), ("pix2pix", 8), ("inpaint", 9)):
        networks[key] = UNet2DConditionModel(**settings | dict(in_channels=channels)).double().eval()
        rows = fixture.fill(networks[key], "unet.")
        table |= rows if key == "plain" else {f"{key}.unet.conv_in.weight": rows["unet.conv_in.weight"]}
    vae_model, vae_config = vae.build()
    table |= fixture.fill(vae_model, "vae.", {"decoder.conv_out.weight": -1})
    pixels = picture()
    mask = torch.zeros(HEIGHT, WIDTH, dtype=torch.uint8)
    mask[16:48, 8:40] = 1
    inputs, outputs = {"picture": pixels, "mask": mask}, {}
    # What the generator of the seed draws first and then, for pictures that are sampled.
    generator = torch.Generator().manual_seed(pipeline.SEED)
    first, second = (torch.randn(1, 4, HEIGHT // 8, WIDTH // 8, generator=generator).double() for _ in range(2))
    image = pixels.double().permute(2, 0, 1)[None] / 127.5 - 1
    with torch.no_grad():
        with fixture.double_precision():
            contexts = {key: clip_text.encode(text_model, pipeline.windows(tokenizer, text)) for key, text in (("cond", pipeline.PROMPT), ("uncond", pipeline.NEGATIVE))}
            whole = schedules.sigmas("discrete", STEPS)
        sigmas = kept_levels(whole)
        pixel_mask = mask.double()[None, None]
        latent_mask = torch.nn.functional.max_pool2d(pixel_mask, 8)

        def encode(values):
            return vae_model.encode(values).latent_dist

        def model(network, branches, weights):
            """The guided noise: `branches` are (context, further channels)."""
            def eps(x, t):
                all_x = torch.cat([x if more is None else torch.cat([x, more], dim=1) for _, more in branches])
                states = torch.cat([context for context, _ in branches])
                out = network(all_x, torch.cat([t] * len(branches)), encoder_hidden_states=states).sample.chunk(len(branches))
                return sum(w * o for w, o in zip(weights, out))
            return schedules.denoiser(eps)

        def run(key, network, branches, weights, levels, start, blend=None):
            with fixture.double_precision():
                denoise = model(networks[network], branches, weights)
                def blended(x, sigma):
                    d = denoise(x, sigma)
                    return d if blend is None else d * latent_mask + blend * (1 - latent_mask)
                return pipeline.record(inputs, outputs, key, "euler", levels, blended, start, lambda z: vae_model.decode(z / SCALE).sample, full=False, most=0.05)[-1]

        cond, uncond = contexts["cond"], contexts["uncond"]
        guided = [CFG, 1 - CFG]
        with fixture.double_precision():
            sampled = (encode(image).mean + encode(image).std * first) * SCALE
        plain = [(cond, None), (uncond, None)]
        last = run("img2img", "plain", plain, guided, sigmas, sampled + sigmas[0] * second)
        pil = torch_to_pil(pixels)
        # All of the levels are given, so all of the strength is asked for.
        check(StableDiffusionImg2ImgPipeline, networks["plain"], vae_model, contexts, sigmas, last, image=pil, strength=1.0)

        last = run("inpaint", "plain", plain, guided, sigmas, sampled + sigmas[0] * second, blend=sampled)
        mask_pil = torch_to_pil(mask * 255)
        with fixture.double_precision():
            masked = encode(image * (1 - pixel_mask)).mean * SCALE
        more = torch.cat([latent_mask, masked], dim=1)
        last = run("inpaint9", "inpaint", [(cond, more), (uncond, more)], guided, whole, whole[0] * first)
        check(StableDiffusionInpaintPipeline, networks["inpaint"], vae_model, contexts, whole, last, mean=True, image=pil, mask_image=mask_pil, strength=1.0, height=HEIGHT, width=WIDTH)

        with fixture.double_precision():
            edited = encode(image).mean
        last = run(
            "pix2pix", "pix2pix", [(cond, edited), (uncond, edited), (uncond, torch.zeros_like(edited))], [CFG, IMAGE_CFG - CFG, 1 - IMAGE_CFG], whole, whole[0] * first,
        )
        check(StableDiffusionInstructPix2PixPipeline, networks["pix2pix"], vae_model, contexts, whole, last, image=pil, image_guidance_scale=IMAGE_CFG)
    fixture.save(
        "sd1_pictures", "sd1_pictures.py",
        f"diffusers {fixture.version('diffusers')} UNet2DConditionModel, AutoencoderKL and their pipelines, k-diffusion {fixture.version('k-diffusion')}",
        {
            "prompt": pipeline.PROMPT, "negative_prompt": pipeline.NEGATIVE, "seed": pipeline.SEED, "steps": STEPS, "cfg": CFG, "image_cfg": IMAGE_CFG, "strength": STRENGTH,
            "width": WIDTH, "height": HEIGHT, "vae_scale": SCALE, "unet": settings, "vae": vae_config,
        },
        procedural=table, inputs=inputs, outputs=outputs,
        notes="weights are those of sd1_pipeline, but for pix2pix.unet.conv_in.weight and inpaint.unet.conv_in.weight, made by the rule from the name unet.conv_in.weight; "
        "img2img and inpaint start from a sample of the encoded picture, whose noise is the generator's first draw, plus sigmas[0] times the second; they take the last 6 of 8 steps; "
        "inpaint puts the sample back into every denoised estimate where no pixel of the 8x8 is in the mask; inpaint9 joins that mask and the mean of the picture without the masked part, "
        "pix2pix the mean of the picture, not scaled, or zeros; both start from noise alone; nothing is pasted back",
    )


def torch_to_pil(values):
    from PIL import Image

    return Image.fromarray(values.numpy())


if __name__ == "__main__":
    main()
