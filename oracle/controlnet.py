"""ControlNets of SD1, SD2 and SDXL, small: the networks, a UNet with their residuals, and whole runs.

References: diffusers' `ControlNetModel` and `UNet2DConditionModel` in f64; `StableDiffusionControlNetPipeline` with two networks at once and
`StableDiffusionXLControlNetPipeline` take the same steps in f32, which `check` holds them to. diffusers' converter confirms the original names
(`control_model.`) of SD1's.
"""

import diffusers.loaders.single_file_utils as single_file
import torch
from diffusers import (
    AutoencoderKL, ControlNetModel, MultiControlNetModel, StableDiffusionControlNetPipeline, StableDiffusionXLControlNetPipeline,
)

import clip_text
import fixture
import names
import pipeline
import schedules
import sd1_pictures
import sdxl_pipeline
import unet
import unet_sdxl
import vae
import vocab

VERSION = f"diffusers {fixture.version('diffusers')}"
# Strength, and the shares of the steps between which a network is followed.
TWO = {"a": (0.8, 0.0, 0.6), "b": (0.5, 0.3, 1.0)}
ONE = (0.9, 0.0, 1.0)
STEPS = 8


def build(settings, prefix=""):
    shared = (
        "in_channels", "block_out_channels", "layers_per_block", "cross_attention_dim", "down_block_types", "transformer_layers_per_block", "attention_head_dim",
        "use_linear_projection", "norm_num_groups", "norm_eps", "act_fn", "flip_sin_to_cos", "freq_shift", "downsample_padding", "addition_embed_type",
        "addition_time_embed_dim", "projection_class_embeddings_input_dim",
    )
    config = {key: settings[key] for key in shared if key in settings}
    model = ControlNetModel(**config).double().eval()
    # `fixture.recipe` takes the hint's convolutions for tables by their names.
    adjust = {}
    for name, parameter in model.named_parameters():
        if name.startswith("controlnet_cond_embedding.") and parameter.ndim > 1:
            exponent = fixture.recipe(name.replace("embedding", "hint"), list(parameter.shape))[0] + 1
            adjust[name] = exponent - fixture.recipe(prefix + name, list(parameter.shape))[0]
    return model, fixture.fill(model, prefix, adjust), config


def original(state):
    """Original names, as in lllyasviel's files."""
    modules = names.unet_modules_of(state) | {"controlnet_mid_block": "middle_block_out.0"}
    for name in state:
        head, rest = name.rsplit(".", 1)
        if head.startswith("controlnet_down_blocks."):
            modules[head] = f"zero_convs.{head.split('.')[1]}.0"
        elif head.startswith("controlnet_cond_embedding."):
            part = head.split(".")[1:]
            place = {"conv_in": 0, "conv_out": 14}.get(part[0], 2 + 2 * int(part[-1]) if part[-1].isdigit() else None)
            modules[head] = f"input_hint_block.{place}"
    return [("control_model." + names.unet_to_ldm(name, modules), "same", [name]) for name in state]


def check_names(model, config):
    state = dict(model.state_dict())
    back = single_file.convert_controlnet_checkpoint(names.assemble(original(state), state), config)
    assert back.keys() == state.keys(), set(back) ^ set(state)
    assert all(torch.equal(back[name], value) for name, value in state.items())


def hint(seed, batch, height, width):
    return torch.rand(batch, 3, height, width, generator=torch.Generator().manual_seed(seed)).double()


def network(name, settings, seed, size, times, tokens=20, numbers=(), tapped=False):
    model, table, config = build(settings)
    if not numbers:
        check_names(model, config)
    batch = len(times)
    sample = fixture.randn(seed, batch, 4, *size)
    context = fixture.randn(seed + 1, batch, tokens, settings["cross_attention_dim"])
    image = hint(seed + 2, batch, 8 * size[0], 8 * size[1])
    inputs = {"sample": sample.float(), "timestep": torch.tensor(times), "context": context.float(), "hint": image.float()}
    added = None
    if numbers:
        pooled = fixture.randn(seed + 3, batch, settings["projection_class_embeddings_input_dim"] - 256 * len(numbers[0]))
        time_ids = torch.tensor(numbers, dtype=torch.float64)
        inputs |= {"pooled": pooled.float(), "time_ids": time_ids.float()}
        added = {"text_embeds": pooled, "time_ids": time_ids}
    taps = {}
    if tapped:
        modules = dict(model.named_modules())
        wanted = {ldm: modules[ours] for ours, ldm in names.unet_modules_of(model.state_dict()).items() if ours in modules and "linear" not in ours}
        taps = fixture.Taps(wanted | {"input_hint_block": model.controlnet_cond_embedding})
    down, mid = model(sample, torch.tensor(times, dtype=torch.float64), context, image.float().double(), added_cond_kwargs=added, return_dict=False)
    outputs = {f"control.{i}": value for i, value in enumerate((*down, mid))}
    assert all(0.02 < value.std() < 20 for value in outputs.values()), [value.std() for value in outputs.values()]
    fixture.save(
        name, "controlnet.py", f"{VERSION} ControlNetModel", config, procedural=table, inputs=inputs, taps=taps.close() if taps else {}, outputs=outputs,
        notes="hint is a picture with values from 0 to 1; control.N are the residuals of the UNet's input blocks, the last that of its middle; tap input_blocks.0.0 is the state before the hint is added",
    )
    return outputs


def with_residuals():
    model, settings = unet.build()
    table = fixture.fill(model)
    sample, context = fixture.randn(231, 1, 4, 8, 8), fixture.randn(232, 1, 20, settings["cross_attention_dim"])
    times = torch.tensor([250.5], dtype=torch.float64)
    shapes = [[32, 8], [32, 8], [32, 8], [32, 4], [64, 4], [64, 4], [64, 2], [128, 2], [128, 2], [128, 1], [128, 1], [128, 1], [128, 1]]
    residuals = [fixture.randn(240 + i, 1, c, side, side) for i, (c, side) in enumerate(shapes)]
    y = model(sample, times, encoder_hidden_states=context, down_block_additional_residuals=tuple(residuals[:-1]), mid_block_additional_residual=residuals[-1]).sample
    inputs = {"sample": sample.float(), "timestep": times.float(), "context": context.float()}
    inputs |= {f"control.{i:02}": value.float() for i, value in enumerate(residuals)}
    fixture.save(
        "unet_sd1_control", "controlnet.py", f"{VERSION} UNet2DConditionModel", settings, procedural=table, inputs=inputs, outputs={"sample": y},
        notes="weights of unet_sd1; control.NN are added to what the input blocks hand on and to the middle block",
    )


def followed(step, steps, start, end):
    """diffusers' rule for the steps that a ControlNet is followed in."""
    return not (step / steps < start or (step + 1) / steps > end)


def controlled(unet_model, nets, image, branches, cfg, steps):
    """Guided noise. `nets` are (network, strength, start, end); `branches` are keyword arguments, the prompt's first."""
    count = [0]

    def model(x, t):
        step, out = count[0], []
        count[0] += 1
        for arguments in branches:
            total = None
            for net, strength, start, end in nets:
                if not followed(step, steps, start, end):
                    continue
                down, mid = net(x, t, controlnet_cond=image, conditioning_scale=strength, return_dict=False, **arguments)
                parts = [*down, mid]
                total = parts if total is None else [a + b for a, b in zip(total, parts)]
            more = {} if total is None else dict(down_block_additional_residuals=tuple(total[:-1]), mid_block_additional_residual=total[-1])
            out.append(unet_model(x, t, **arguments, **more).sample)
        return out[1] + cfg * (out[0] - out[1])

    return model


def near(got, want, what):
    off = ((got.double() - want).norm() / want.norm()).item()
    print(f"{what}: off by {off:.1e}")
    assert off < 1e-2, off


def sd1():
    tokenizer = vocab.clip_tokenizer()
    text_model, text_table, _ = clip_text.build(64, layers=2, vocab_size=49408, prefix="text_encoder.text_model.")
    unet_model, settings = unet.build()
    vae_model, _ = vae.build()
    table = text_table | fixture.fill(unet_model, "unet.") | fixture.fill(vae_model, "vae.", {"decoder.conv_out.weight": -1})
    nets = {}
    control_table = {}
    for key in TWO:
        nets[key], rows, config = build(settings, f"control_{key}.")
        control_table |= rows
    pixels = sd1_pictures.picture()
    image = pixels.double().permute(2, 0, 1)[None] / 255
    inputs, outputs = {"picture": pixels}, {}
    noise = pipeline.noise(4, 64, 64)
    with fixture.double_precision():
        sigmas = schedules.sigmas("discrete", STEPS)
        contexts = [clip_text.encode(text_model, pipeline.windows(tokenizer, text)) for text in (pipeline.PROMPT, pipeline.NEGATIVE)]
        branches = [{"encoder_hidden_states": context} for context in contexts]
        for key, used in (("one", ["a"]), ("two", ["a", "b"])):
            spans = {"a": ONE} if key == "one" else TWO
            model = controlled(unet_model, [(nets[k], *spans[k]) for k in used], image, branches, pipeline.CFG, STEPS)
            latents = pipeline.record(
                inputs, outputs, key, "euler", sigmas, schedules.denoiser(model), noise.double() * sigmas[0], lambda z: vae_model.decode(z / 0.18215).sample, full=False, most=0.05,
            )
    multi = MultiControlNetModel([net.float() for net in nets.values()])
    pipe = StableDiffusionControlNetPipeline(vae_model.float(), None, None, unet_model.float(), multi, sd1_pictures.scheduler(sigmas), None, None, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    pil = sd1_pictures.torch_to_pil(pixels)
    got = pipe(
        prompt_embeds=contexts[0].float(), negative_prompt_embeds=contexts[1].float(), image=[pil, pil], num_inference_steps=STEPS, guidance_scale=pipeline.CFG,
        controlnet_conditioning_scale=[TWO[k][0] for k in TWO], control_guidance_start=[TWO[k][1] for k in TWO], control_guidance_end=[TWO[k][2] for k in TWO],
        generator=torch.Generator().manual_seed(pipeline.SEED), output_type="latent",
    ).images
    near(got, latents[-1], "StableDiffusionControlNetPipeline")
    fixture.save(
        "sd1_control_pipeline", "controlnet.py", f"{VERSION} ControlNetModel, UNet2DConditionModel, AutoencoderKL and StableDiffusionControlNetPipeline",
        {"prompt": pipeline.PROMPT, "negative_prompt": pipeline.NEGATIVE, "seed": pipeline.SEED, "steps": STEPS, "cfg": pipeline.CFG, "width": 64, "height": 64, "one": ONE, "two": TWO, "control": config},
        procedural=control_table, inputs=inputs, outputs=outputs,
        notes="weights of the model are those of sd1_pipeline, of the ControlNets here; one and two are strength, start and end; latents are x after each step",
    )


def sdxl():
    """The tiny SDXL of `sdxl_pipeline.py` with one ControlNet."""
    first, second, unet_model, vae_model, _, model_config = sdxl_pipeline.build()
    net, table, config = build(model_config["unet"], "control.")
    width, height, steps = sdxl_pipeline.WIDTH, sdxl_pipeline.HEIGHT, sdxl_pipeline.STEPS
    pixels = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(251), dtype=torch.uint8)
    image = pixels.double().permute(2, 0, 1)[None] / 255
    tokenizer = vocab.clip_tokenizer()
    inputs, outputs = {"picture": pixels}, {}
    noise = pipeline.noise(4, height, width)
    with fixture.double_precision():
        time_ids = torch.tensor([[height, width, 0, 0, height, width]], dtype=torch.float64)
        branches, embeds = [], []
        for prompt in (pipeline.PROMPT, pipeline.NEGATIVE):
            one, two = pipeline.windows(tokenizer, prompt), pipeline.windows(tokenizer, prompt, pad=0)
            result = second(two, output_hidden_states=True)
            states = torch.cat([first(one, output_hidden_states=True).hidden_states[-2], result.hidden_states[-2]], dim=-1)
            embeds.append((states, result.text_embeds[:1]))
            branches.append({"encoder_hidden_states": states, "added_cond_kwargs": {"text_embeds": result.text_embeds[:1], "time_ids": time_ids}})
        sigmas = schedules.sigmas("discrete", steps)
        model = controlled(unet_model, [(net, *ONE)], image, branches, pipeline.CFG, steps)
        latents = pipeline.record(
            inputs, outputs, "one", "euler", sigmas, pipeline.denoiser("eps", model), noise.double() * sigmas[0], lambda z: vae_model.decode(z / sdxl_pipeline.SCALE).sample, full=False,
        )
    pipe = StableDiffusionXLControlNetPipeline(vae_model.float(), None, None, None, None, unet_model.float(), net.float(), sd1_pictures.scheduler(sigmas), add_watermarker=False)
    pipe.set_progress_bar_config(disable=True)
    pipe.text_encoder_2 = second.float()
    got = pipe(
        prompt_embeds=embeds[0][0].float(), pooled_prompt_embeds=embeds[0][1].float(), negative_prompt_embeds=embeds[1][0].float(), negative_pooled_prompt_embeds=embeds[1][1].float(),
        image=sd1_pictures.torch_to_pil(pixels), num_inference_steps=steps, guidance_scale=pipeline.CFG, controlnet_conditioning_scale=ONE[0], height=height, width=width,
        generator=torch.Generator().manual_seed(pipeline.SEED), output_type="latent",
    ).images
    near(got, latents[-1], "StableDiffusionXLControlNetPipeline")
    fixture.save(
        "sdxl_control_pipeline", "controlnet.py", f"{VERSION} ControlNetModel, UNet2DConditionModel, AutoencoderKL and StableDiffusionXLControlNetPipeline",
        {"prompt": pipeline.PROMPT, "negative_prompt": pipeline.NEGATIVE, "seed": pipeline.SEED, "steps": steps, "cfg": pipeline.CFG, "width": width, "height": height, "one": ONE, "control": config},
        procedural=table, inputs=inputs, outputs=outputs, notes="as sd1_control_pipeline, with the weights of sdxl_pipeline",
    )


def save_names():
    """[diffusers name, original name] of every tensor of SD1's tiny ControlNet."""
    state = dict(build(unet.config())[0].state_dict())
    rows = [[source, name, list(state[source].shape)] for name, _, (source,) in original(state)]
    fixture.save_json("controlnet_names", {"source": f"{VERSION} convert_controlnet_checkpoint", "script": "oracle/controlnet.py", "names": rows})


def main():
    numbers = [[1024.0, 768.0, 8.0, 16.0, 1024.0, 1024.0], [512.0, 640.0, 0.0, 0.0, 512.0, 640.0]]
    with torch.no_grad():
        network("controlnet_sd1", unet.config(), 201, (8, 8), [999.0], tokens=77, tapped=True)
        network("controlnet_sd2", unet_sdxl.sd2(), 211, (8, 16), [981.0])
        network("controlnet_sdxl", unet_sdxl.sdxl(), 221, (4, 8), [731.5, 3.25], numbers=numbers)
        with_residuals()
        save_names()
        sd1()
        sdxl()


if __name__ == "__main__":
    main()
