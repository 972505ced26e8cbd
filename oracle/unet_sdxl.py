"""The UNets of SD2, SDXL, SDXL's refiner, SSD-1B and Vega, small.

Reference: diffusers' `UNet2DConditionModel` in f64. Heads are 64 channels wide as in the real networks, so widths are multiples of 64, and
the size and crop numbers get sinusoids of 256 values as there. Arrangements follow the published configurations with fewer levels' channels
and smaller depths. Every block of `unet_sd2` and `unet_sdxl` is tapped under its original name, the others hold outputs only.
"""

import re

import diffusers.loaders.single_file_utils as single_file
import torch
from diffusers import UNet2DConditionModel

import fixture
import names

VERSION = f"diffusers {fixture.version('diffusers')}"
PLAIN, CROSS = "DownBlock2D", "CrossAttnDownBlock2D"


def config(channels, context, down, depth, pooled=0, numbers=6, in_channels=4, heads_of=64, **extra):
    """`pooled` and `numbers` describe SDXL's vector: the pooled text, and how many numbers are embedded beside it."""
    settings = dict(
        sample_size=16, in_channels=in_channels, out_channels=4, block_out_channels=list(channels), layers_per_block=2, cross_attention_dim=context,
        down_block_types=list(down), up_block_types=[kind.replace("Down", "Up") for kind in reversed(down)], transformer_layers_per_block=depth,
        attention_head_dim=[width // heads_of for width in channels], use_linear_projection=True,
        norm_num_groups=32, norm_eps=1e-5, act_fn="silu", flip_sin_to_cos=True, freq_shift=0, downsample_padding=1,
    )
    if pooled:
        settings |= dict(addition_embed_type="text_time", addition_time_embed_dim=256, projection_class_embeddings_input_dim=pooled + 256 * numbers)
    return settings | extra


def sd2(channels=(64, 64, 128, 128), context=128, **extra):
    return config(channels, context, [CROSS] * 3 + [PLAIN], 1, **extra)


def sdxl(channels=(64, 64, 128), context=192, depth=(1, 2, 3), pooled=128, **extra):
    return config(channels, context, [PLAIN, CROSS, CROSS], list(depth), pooled, **extra)


def refiner(channels=(64, 64, 128, 128), context=128, depth=4, pooled=128, **extra):
    return config(channels, context, [PLAIN, CROSS, CROSS, PLAIN], depth, pooled, numbers=5, **extra)


def ssd1b(depth=(1, 2, 3), up=((3, 3, 4), (2, 1, 1), 1), **rest):
    """No attention and one residual block in the middle, uneven depths on the way up. Real: (1, 2, 4), ((4, 4, 10), (2, 1, 1), 1)."""
    return sdxl(depth=depth, mid_block_type="UNetMidBlock2D", reverse_transformer_layers_per_block=[list(d) if isinstance(d, tuple) else d for d in up], **rest)


def vega(depth=(1, 1, 2), **rest):
    return sdxl(depth=depth, mid_block_type="UNetMidBlock2D", **rest)


def build(settings, prefix="", precise=True):
    model = UNet2DConditionModel(**settings).eval()
    model = model.double() if precise else model
    return model, fixture.fill(model, prefix)


def check_names(model):
    """diffusers' converter takes our single-file names back to its own."""
    state = dict(model.state_dict())
    back = single_file.convert_ldm_unet_checkpoint(names.assemble(names.unet_rows(state), state), dict(model.config))
    assert back.keys() == state.keys(), set(back) ^ set(state)
    assert all(torch.equal(back[name], value) for name, value in state.items())


def run(name, settings, seed, size, times, tokens=20, numbers=(), tapped=(), notes=""):
    """`tapped` names the blocks to tap whole, module by module; of the others the last module is tapped. Empty: no taps."""
    model, table = build(settings)
    check_names(model)
    batch = len(times)
    sample = fixture.randn(seed, batch, settings["in_channels"], *size)
    context = fixture.randn(seed + 1, batch, tokens, settings["cross_attention_dim"])
    inputs = {"sample": sample.float(), "timestep": torch.tensor(times), "context": context.float()}
    added = None
    if numbers:
        pooled = fixture.randn(seed + 2, batch, settings["projection_class_embeddings_input_dim"] - 256 * len(numbers[0]))
        time_ids = torch.tensor(numbers, dtype=torch.float64)
        inputs |= {"pooled": pooled.float(), "time_ids": time_ids.float()}
        added = {"text_embeds": pooled, "time_ids": time_ids}
    taps = {}
    if tapped:
        modules = dict(model.named_modules())
        skip = {"time_embedding.linear_1", "time_embedding.linear_2", "add_embedding.linear_1", "add_embedding.linear_2", "conv_norm_out", "conv_out"}
        found = {ldm: modules[ours] for ours, ldm in names.unet_modules_of(model.state_dict()).items() if ours in modules and ours not in skip}
        block = {ldm: re.match(r"(input_blocks|output_blocks)\.\d+|middle_block|.*", ldm)[0] for ldm in found}
        last = {group: max(ldm for ldm in found if block[ldm] == group) for group in block.values()}
        taps = fixture.Taps({ldm: module for ldm, module in found.items() if ldm == last[block[ldm]] or block[ldm] in tapped})
    y = model(sample, torch.tensor(times, dtype=torch.float64), encoder_hidden_states=context, added_cond_kwargs=added).sample
    assert 0.02 < y.std() < 20, y.std()
    fixture.save(
        name, "unet_sdxl.py", f"{VERSION} UNet2DConditionModel", settings, procedural=table, inputs=inputs, taps=taps.close() if taps else {}, outputs={"sample": y},
        notes=notes + "attention_head_dim in this class is the number of heads per level, 64 channels each; tap out.1 is the state before the last convolution; "
        + ("tap label_emb is the vector's embedding before it is added to time_embed; the vector is pooled, then cos and sin of each of time_ids; " if numbers else "")
        + "sinusoids are computed in f32 by the reference",
    )


def main():
    base = [[1024.0, 768.0, 8.0, 16.0, 1024.0, 1024.0]]
    with torch.no_grad():
        run("unet_sd2", sd2(), 121, (8, 16), [981.0], tokens=77, tapped=["input_blocks.4"])
        run("unet_sdxl", sdxl(), 131, (8, 12), [731.5], numbers=base, tokens=77, tapped=["input_blocks.4", "middle_block", "output_blocks.2"])
        run("unet_sdxl_batch", sdxl(), 141, (12, 8), [999.0, 3.25], tokens=30, numbers=base + [[512.0, 640.0, 0.0, 0.0, 512.0, 640.0]])
        run("unet_sdxl_refiner", refiner(), 151, (8, 16), [200.0], numbers=[[1024.0, 768.0, 0.0, 0.0, 6.0]], notes="time_ids are height, width, top, left, aesthetic score; ")
        run("unet_ssd1b", ssd1b(), 161, (8, 8), [500.0], numbers=base)
        run("unet_vega", vega(), 171, (8, 8), [500.0], numbers=base)
        run("unet_sdxl_inpaint", sdxl(in_channels=9), 181, (8, 8), [500.0], numbers=base)
        run("unet_sd2_inpaint", sd2(in_channels=9), 191, (8, 8), [500.0])


if __name__ == "__main__":
    main()
