"""SD1's UNet, whole and in parts.

Reference: diffusers' `UNet2DConditionModel` and its blocks in f64. Weights keep diffusers' names; taps carry the original (CompVis) module
names through `names.py`. `unet_sd1` has every tap; `unet_sd1_batch` and `unet_sd1_odd` have the same weights and other shapes.
"""

import torch
from diffusers import UNet2DConditionModel
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.upsampling import Upsample2D

import fixture
import names

CONTEXT = 64
VERSION = f"diffusers {fixture.version('diffusers')}"


def config(channels=(32, 64, 128, 128), context=CONTEXT):
    return dict(
        sample_size=16, in_channels=4, out_channels=4, block_out_channels=list(channels), layers_per_block=2, cross_attention_dim=context,
        down_block_types=["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"], up_block_types=["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3,
        attention_head_dim=8, norm_num_groups=32, norm_eps=1e-5, act_fn="silu", flip_sin_to_cos=True, freq_shift=0, downsample_padding=1,
    )


def build(context=CONTEXT):
    settings = config(context=context)
    return UNet2DConditionModel(**settings).double().eval(), settings


def stored(module, seed):
    """Seeded random weights, small enough to be stored. Norm weights lie near 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                value = 1.0 + 0.1 * noise if name.endswith("weight") else 0.1 * noise
            else:
                value = noise / (parameter[0].numel() ** 0.5)
            parameter.copy_(value.half())
    return {name: value for name, value in module.state_dict().items()}


def blocks():
    x = fixture.randn(11, 2, 32, 6, 5)
    time = fixture.randn(12, 2, 128)

    for name, width in (("unet_block_resnet", 64), ("unet_block_resnet_same", 32)):
        settings = dict(in_channels=32, out_channels=width, temb_channels=128, groups=32, eps=1e-5, non_linearity="swish")
        module = ResnetBlock2D(**settings).double().eval()
        weights = stored(module, 13)
        taps = fixture.Taps({names.UNET_RESNET[part]: getattr(module, part) for part in ("norm1", "conv1", "time_emb_proj", "norm2", "conv2", "conv_shortcut") if getattr(module, part, None) is not None})
        y = module(x, time)
        fixture.save(
            name, "unet.py", f"{VERSION} ResnetBlock2D", settings, weights=weights, inputs={"x": x.float(), "time": time.float()}, taps=taps.close(), outputs={"y": y},
            notes="input.time is the time embedding before its SiLU; tap emb_layers.1 is [b, c], before it is added to out of in_layers.2",
        )

    x = fixture.randn(14, 1, 64, 6, 8)
    context = fixture.randn(15, 1, 77, CONTEXT)
    settings = dict(num_attention_heads=8, attention_head_dim=8, in_channels=64, num_layers=1, cross_attention_dim=CONTEXT, norm_num_groups=32)
    module = Transformer2DModel(**settings).double().eval()
    weights = stored(module, 16)
    inner = module.transformer_blocks[0]
    parts = {"norm": module.norm, "proj_in": module.proj_in, "proj_out": module.proj_out, "transformer_blocks.0": inner}
    parts |= {f"transformer_blocks.0.{part}": getattr(inner, part) for part in ("norm1", "attn1", "norm2", "attn2", "norm3", "ff")}
    taps = fixture.Taps(parts)
    y = module(x, encoder_hidden_states=context).sample
    fixture.save(
        "unet_block_transformer", "unet.py", f"{VERSION} Transformer2DModel", settings, weights=weights, inputs={"x": x.float(), "context": context.float()}, taps=taps.close(), outputs={"y": y},
        notes="8 heads of 8; attn1, attn2, ff and proj_out are tapped before their residual is added",
    )

    x = fixture.randn(17, 1, 32, 6, 10)
    for name, module, settings in (
        ("unet_block_downsample", Downsample2D(32, use_conv=True, padding=1, name="op"), dict(channels=32, use_conv=True, padding=1)),
        ("unet_block_upsample", Upsample2D(32, use_conv=True), dict(channels=32, use_conv=True)),
    ):
        module = module.double().eval()
        weights = {key.replace("Conv2d_0", "conv"): value for key, value in stored(module, 18).items()}
        weights = {"conv.weight": weights["conv.weight"], "conv.bias": weights["conv.bias"]}
        fixture.save(name, "unet.py", f"{VERSION} {type(module).__name__}", settings, weights=weights, inputs={"x": x.float()}, outputs={"y": module(x)})


def whole():
    model, settings = build()
    table = fixture.fill(model)
    source = f"{VERSION} UNet2DConditionModel"
    runs = {
        "unet_sd1": (fixture.randn(21, 1, 4, 16, 16), [999.0], fixture.randn(22, 1, 77, CONTEXT)),
        "unet_sd1_batch": (fixture.randn(23, 2, 4, 16, 16), [999.0, 17.5], fixture.randn(24, 2, 77, CONTEXT)),
        "unet_sd1_odd": (fixture.randn(25, 1, 4, 8, 24), [500.25], fixture.randn(26, 1, 154, CONTEXT)),
    }
    for name, (sample, times, context) in runs.items():
        taps = {}
        if name == "unet_sd1":
            modules = dict(model.named_modules())
            skip = {"time_embedding.linear_1", "time_embedding.linear_2", "conv_norm_out", "conv_out"}
            taps = fixture.Taps({ldm: modules[ours] for ours, ldm in names.unet_modules().items() if ours in modules and ours not in skip})
        y = model(sample, torch.tensor(times, dtype=torch.float64), encoder_hidden_states=context).sample
        if taps:
            taps = taps.close()
        fixture.save(
            name, "unet.py", source, settings, procedural=table,
            inputs={"sample": sample.float(), "timestep": torch.tensor(times), "context": context.float()}, taps=taps, outputs={"sample": y},
            notes="attention_head_dim 8 in this class means 8 heads; tap out.1 is the state before the last convolution; "
            "the sinusoid of the time embedding is computed in f32 by the reference",
        )


def main():
    with torch.no_grad():
        blocks()
        whole()


if __name__ == "__main__":
    main()
