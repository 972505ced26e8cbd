"""A whole tiny Flux.1: CLIP-L, T5, transformer, autoencoder; dev, schnell, Kontext, Fill and Control (Depth, Canny) runs.

References: transformers' CLIPTokenizer, CLIPTextModel and T5EncoderModel, Hugging Face `tokenizers` with T5's tokenizer.json, diffusers'
FluxTransformer2DModel, AutoencoderKL and FlowMatchEulerDiscreteScheduler, in f64; packing, ids and masks as in FluxPipeline, FluxKontextPipeline,
FluxFillPipeline and FluxControlPipeline. Encoded pictures are the mean of the autoencoder's distribution, as Kontext's pipeline takes it; `fill_sampled` draws from it, as
Fill's pipeline does.
"""

import torch

import clip_text
import fixture
import flux
import pipeline
import schedules_flux
import t5_encoder
import vae
import vocab

WIDTH, HEIGHT, STEPS = 64, 96, 6
# `max_sequence_length` of the pipelines, and 256 as schnell's model card has it.
TOKENS = {"dev": 512, "schnell": 256, "fill": 512, "control": 512}
SCALE, SHIFT = 0.3611, 0.1159
GUIDANCE = 3.5
TRANSFORMERS = {"dev": {}, "schnell": {"guidance": False}, "fill": {"in_channels": 384}, "control": {"in_channels": 128}}
RUNS = {
    "dev": {"dev": {"steps": STEPS, "guidance": GUIDANCE}, "kontext": {"steps": STEPS, "guidance": 2.5}},
    "schnell": {"schnell": {"steps": 4}},
    "fill": {"fill": {"steps": STEPS, "guidance": 30.0}},
    "control": {"control": {"steps": STEPS, "guidance": 10.0}},
}
NOTES = {
    "dev": "; kontext.reference is the mean of the encoding of input.kontext.picture, (mean - 0.1159) * 0.3611; its tokens follow the picture's with index 1",
    "fill": "; mask 1 is repainted; the picture is (pixels / 127.5 - 1) * (1 - mask) before it is encoded; masked_latent is the mean, (mean - 0.1159) * 0.3611; fill_sampled adds std * noise, the same first draw of the seed as input.noise; latents are not pasted over",
    "control": "; control.encoded is the mean of the encoding of input.control.picture, (mean - 0.1159) * 0.3611, whose tokens are joined to the latent's",
}


def build(name):
    """One transformer with the encoders and the autoencoder, which all share. Their names tell transformers apart only by shape."""
    clip = clip_text.build(64, layers=2, vocab_size=49408, prefix="text_encoder.text_model.")
    t5 = t5_encoder.build(vocab_size=32128, prefix="text_encoder_2.")
    config = flux.config(**TRANSFORMERS[name])
    transformer = flux.build(config, "transformer.", {"proj_out.weight": -1})
    vae_config = vae.flux_config()
    vae_model, _ = vae.build(vae_config)
    vae_table = fixture.fill(vae_model, "vae.", {"decoder.conv_out.weight": -1})
    shared = clip[1] | t5[1] | vae_table
    configs = {"transformer": config, "vae": vae_config, "text_encoder": clip_text.settings(clip[2]), "text_encoder_2": t5_encoder.settings(t5[2])}
    return clip[0], t5[0], transformer[0], vae_model, shared | transformer[1], configs


def picture(seed):
    """An 8-bit picture [1, H, W, 3]: soft colours with hard edges."""
    y, x = torch.meshgrid(torch.arange(HEIGHT), torch.arange(WIDTH), indexing="ij")
    channels = [(x * (3 + c) + y * (5 - c) + seed * 40) % 256 for c in range(3)]
    return torch.stack(channels, dim=-1)[None].to(torch.uint8)


def to_model(pixels):
    """Pixels [1, H, W, 3] as the autoencoder reads them, [1, 3, H, W] from -1 to 1."""
    return pixels.double().permute(0, 3, 1, 2) / 127.5 - 1


def main():
    clip_tokenizer, t5_tokenizer = vocab.clip_tokenizer(), vocab.t5_tokenizer()
    h, w = HEIGHT // 8, WIDTH // 8
    count = schedules_flux.tokens(WIDTH, HEIGHT)
    noise = pipeline.noise(16, HEIGHT, WIDTH)
    ids = flux.image_ids(h, w)
    for name in TRANSFORMERS:
        clip, t5, transformer, vae_model, table, config = build(name)
        inputs, outputs = {"noise": noise}, {}

        def encode(image, epsilon=None):
            moments = vae_model.encode(image).latent_dist
            z = moments.mean if epsilon is None else moments.mean + moments.std * epsilon
            return (z - SHIFT) * SCALE

        def decode(z):
            return vae_model.decode(z / SCALE + SHIFT).sample

        with torch.no_grad(), fixture.double_precision():
            clip_ids = pipeline.windows(clip_tokenizer, pipeline.PROMPT)
            tokens = t5_tokenizer.encode(pipeline.PROMPT, add_special_tokens=False).ids + [t5_encoder.EOS]
            t5_ids = torch.tensor([tokens + [t5_encoder.PAD] * (TOKENS[name] - len(tokens))])
            pooled = clip(clip_ids).pooler_output
            text = t5_encoder.encode(t5, t5_ids)
            inputs |= {"ids.clip": clip_ids.int(), "ids.t5": t5_ids.int()}
            outputs["pooled"] = pooled
            if name == "dev":
                outputs["context"] = text
            start = noise.double()
            dev_sigmas = schedules_flux.dev(STEPS, count).double()

            def run(key, sigmas, guidance, extra=None, reference=None):
                """`extra` tokens are joined along the channels, `reference` = (tokens, ids) along the sequence."""
                def velocity(x, sigma):
                    img, positions = flux.pack(x), ids
                    if extra is not None:
                        img = torch.cat([img, extra], dim=2)
                    if reference is not None:
                        img, positions = torch.cat([img, reference[0]], dim=1), torch.cat([ids, reference[1]])
                    y = flux.forward(transformer, img, positions, text, pooled, sigma.item(), guidance)
                    return flux.unpack(y[:, :h * w // 4], h, w)

                latents = pipeline.record(inputs, outputs, key, "euler", sigmas, pipeline.flow(velocity), start * sigmas[0], decode, full=key == "dev")
                pipeline.check_flow(latents, start, sigmas, velocity)

            if name == "schnell":
                run("schnell", schedules_flux.constant(4).double(), None)
            elif name == "dev":
                run("dev", dev_sigmas, GUIDANCE)
                pixels = picture(1)
                reference = encode(to_model(pixels))
                inputs["kontext.picture"], outputs["kontext.reference"] = pixels, reference
                run("kontext", dev_sigmas, 2.5, reference=(flux.pack(reference), flux.image_ids(h, w, 1)))
            elif name == "control":
                pixels = picture(3)
                control = encode(to_model(pixels))
                inputs["control.picture"], outputs["control.encoded"] = pixels, control
                run("control", dev_sigmas, 10.0, extra=flux.pack(control))
            else:
                pixels = picture(2)
                mask = torch.zeros(1, 1, HEIGHT, WIDTH, dtype=torch.float64)
                mask[:, :, 20:75, 13:50] = 1
                mask[:, :, 40:44] = 1
                epsilon = pipeline.noise(16, HEIGHT, WIDTH).double()
                inputs["fill.picture"], inputs["fill.mask"] = pixels, mask.to(torch.uint8)
                for key, eps in (("fill", None), ("fill_sampled", epsilon)):
                    masked = encode(to_model(pixels) * (1 - mask), eps)
                    outputs[f"{key}.masked_latent"] = masked
                    mask_tokens, masked_tokens = flux.fill_tokens(mask, masked)
                    run(key, dev_sigmas, 30.0, extra=torch.cat([masked_tokens, mask_tokens], dim=2))
        fixture.save(
            f"flux_{name}_pipeline", "flux_pipeline.py",
            f"transformers {fixture.version('transformers')} CLIPTextModel and T5EncoderModel, {flux.VERSION} FluxTransformer2DModel, AutoencoderKL and FlowMatchEulerDiscreteScheduler, tokenizers {fixture.version('tokenizers')}",
            {"prompt": pipeline.PROMPT, "seed": pipeline.SEED, "width": WIDTH, "height": HEIGHT, "vae_scale": SCALE, "vae_shift": SHIFT, "t5_tokens": TOKENS[name], **RUNS[name]} | config,
            procedural=table, inputs=inputs, outputs=outputs,
            notes="start = input.noise, drawn as [1, 16, h, w] before packing; latents are x after each step, unpacked; sigmas as in schedules_flux.json for 24 tokens; no negative pass and no T5 mask; "
            "pooled is CLIP's state at the end token after the final norm; image = decode(x / 0.3611 + 0.1159) / 2 + 0.5, clamped; image_u8 rounds 255 times it, [1, H, W, 3]" + NOTES.get(name, ""),
        )


if __name__ == "__main__":
    main()
