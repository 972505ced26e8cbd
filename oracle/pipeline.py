"""What the whole-pipeline scripts share: prompts, windows of ids, runs, names of a checkpoint's tensors."""

import gzip
import json

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from k_diffusion import sampling
from k_diffusion.external import DiscreteEpsDDPMDenoiser, DiscreteVDDPMDenoiser

import fixture
import prompts
import schedules

PROMPT = "a photo of a red cat sitting on a blue sofa"
NEGATIVE = "blurry, low quality"
SEED, CFG = 42, 7.0


def windows(tokenizer, text, pad=None):
    """Ids [windows, 77] of an unweighted prompt. `pad` replaces what follows a window's first end token."""
    rows = []
    for window in prompts.windows(tokenizer, [[text, 1]]):
        ids = [token for token, _ in window]
        if pad is not None:
            end = ids.index(tokenizer.eos_token_id) + 1
            ids[end:] = [pad] * (77 - end)
        rows.append(ids)
    return torch.tensor(rows)


def noise(channels, height, width, seed=SEED):
    """What torch's CPU generator draws first for a picture of `height` x `width` pixels."""
    return torch.randn(1, channels, height // 8, width // 8, generator=torch.Generator().manual_seed(seed))


def denoiser(kind, model):
    """`eps` or `v` on SD1's table, which SD2 and SDXL share."""
    return {"eps": DiscreteEpsDDPMDenoiser, "v": DiscreteVDDPMDenoiser}[kind](model, schedules.alphas_cumprod(), quantize=False)


def guided(unet, uncond, cond, cfg=CFG):
    """A model for the denoisers. `uncond` and `cond` are keyword arguments of the UNet, without the batch doubled."""
    def merge(a, b):
        return {key: merge(a[key], b[key]) for key in a} if isinstance(a, dict) else torch.cat([a, b])

    both = merge(uncond, cond)

    def model(x, t):
        without, with_prompt = unet(torch.cat([x, x]), torch.cat([t, t]), **both).sample.chunk(2)
        return without + cfg * (with_prompt - without)

    return model


def flow(velocity):
    """The denoised picture of a flow model whose network is given sigma."""
    return lambda x, sigma: x - sigma.reshape(-1, 1, 1, 1) * velocity(x, sigma)


def check_flow(latents, start, sigmas, velocity):
    """diffusers' flow scheduler takes the same steps, up to its f32."""
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(sigmas=[1.0] * (len(sigmas) - 1))
    scheduler.sigmas, scheduler.timesteps = sigmas.clone(), sigmas[:-1] * 1000
    x = start
    for i in range(len(sigmas) - 1):
        x = scheduler.step(velocity(x, sigmas[i][None]), scheduler.timesteps[i], x).prev_sample
        assert torch.allclose(x.double(), latents[i], atol=1e-4)


def trajectory(sampler, denoise, x, sigmas):
    """x after each step."""
    before = []
    function = {"euler": sampling.sample_euler, "dpm++2m": sampling.sample_dpmpp_2m}[sampler]
    last = function(denoise, x, sigmas, callback=lambda info: before.append(info["x"].clone()), disable=True)
    return torch.stack(before[1:] + [last])


def record(inputs, outputs, key, sampler, sigmas, denoise, start, decode, full=True, most=0.03):
    """Runs a sampler, decodes its last state, and stores sigmas, states and picture under `key`."""
    latents = trajectory(sampler, denoise, start, sigmas)
    unit = (decode(latents[-1]) / 2 + 0.5).clamp(0, 1)
    inputs[f"sigmas.{key}"] = sigmas
    outputs[f"{key}.latents"] = latents
    if full:
        outputs[f"{key}.image"] = unit
    outputs[f"{key}.image_u8"] = (unit * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
    clamped = ((unit == 0) | (unit == 1)).double().mean().item()
    print(f"{key}: latents {latents[-1].std().item():.3f}, picture {unit.mean().item():.3f} +- {unit.std().item():.3f}, {clamped:.1%} clamped")
    assert clamped < most, "the picture is mostly clamped"
    return latents


def save_names(name, value):
    """Writes `fixtures/<name>.json.gz`, the same bytes for the same value."""
    text = json.dumps(value, separators=(",", ":")).encode()
    path = fixture.FIXTURES / f"{name}.json.gz"
    path.write_bytes(gzip.compress(text, compresslevel=9, mtime=0))
    print(f"{path.name}: {path.stat().st_size} bytes, {len(text)} unpacked")


def prefixed(component, rows):
    """Rows whose reference names carry the component, as the procedural rule's names do."""
    return [(name, op, [component + source for source in sources]) for name, op, sources in rows]
