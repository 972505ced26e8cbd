"""Flux.1: dev, schnell, Fill, Depth/Canny control and Kontext's reference images, small.

Reference: diffusers' `FluxTransformer2DModel` in f64; packing, position ids and Fill's mask come from its pipelines. Two heads of the real
width 128, so that the rotary axes are the real 16, 56, 56. Taps carry the original (Black Forest Labs) module names.
"""

import inspect
import math
import types

import diffusers.loaders.single_file_utils as single_file
import torch
from diffusers import FluxFillPipeline, FluxPipeline, FluxTransformer2DModel

import fixture
import names

VERSION = f"diffusers {fixture.version('diffusers')}"
HEIGHT, WIDTH, TEXT = 16, 12, 16  # latent size and text tokens
NOTES = (
    "img is the latent in 2x2 patches, [channel, row, column] within a token, row-major tokens; ids are (index, row, column); text ids are 0; timestep is sigma and is multiplied by 1000 inside, as guidance is; "
    "sample is the velocity, packed, velocity is the same unpacked; "
)


def config(in_channels=64, layers=2, single_layers=2, heads=2, context=64, pooled=64, guidance=True):
    return dict(
        patch_size=1, in_channels=in_channels, out_channels=64, num_layers=layers, num_single_layers=single_layers, attention_head_dim=128, num_attention_heads=heads,
        joint_attention_dim=context, pooled_projection_dim=pooled, guidance_embeds=guidance, axes_dims_rope=[16, 56, 56],
    )


class SingleAngles(torch.nn.Module):
    """The sinusoids of time and guidance with angles in f32, as pipelines have them: guidance 30 is an angle of 30,000, whose f32 is 1e-3 off.

    Computed here as diffusers does, except that `exp` is rounded correctly; torch's is a unit in the last place off on some CPUs.
    """

    def __init__(self, sinusoid):
        super().__init__()
        self.sinusoid = sinusoid

    def forward(self, t):
        half = self.sinusoid.num_channels // 2
        exponent = -math.log(10000) * torch.arange(half, dtype=torch.float32) / half
        angles = t.to(torch.float32)[:, None] * exponent.double().exp().to(torch.float32)
        y = torch.cat([angles.double().cos(), angles.double().sin()], dim=-1)
        assert (y - self.sinusoid(t)).abs().max() < 3e-3
        return y


def build(settings, prefix="", adjust=None):
    model = FluxTransformer2DModel(**settings).double().eval()
    model.time_text_embed.time_proj = SingleAngles(model.time_text_embed.time_proj)
    return model, fixture.fill(model, prefix, adjust)


def pack(latent):
    return FluxPipeline._pack_latents(latent, *latent.shape)


def unpack(tokens, height, width):
    """`height` and `width` of the latent."""
    return FluxPipeline._unpack_latents(tokens, 8 * height, 8 * width, 8)


def fill_tokens(mask, masked):
    """Tokens of Fill's mask [1, 1, H, W] and of its masked latent, which is scaled already."""
    neutral = types.SimpleNamespace(shift_factor=0.0, scaling_factor=1.0)
    pipeline = types.SimpleNamespace(vae_scale_factor=8, vae=types.SimpleNamespace(config=neutral), _pack_latents=FluxPipeline._pack_latents)
    return FluxFillPipeline.prepare_mask_latents(pipeline, mask, masked, 1, 16, 1, *mask.shape[2:], torch.float64, "cpu", None)


def image_ids(height, width, index=0, top=0, left=0):
    """Position ids of a latent of `height` x `width`."""
    ids = FluxPipeline._prepare_latent_image_ids(1, height // 2, width // 2, "cpu", torch.float64)
    return ids + torch.tensor([index, top, left], dtype=torch.float64)


def reference_ids(sizes, mode):
    """Ids of several reference latents. `fixed` lays them out in one plane, `increase` and `decrease` count planes."""
    ids = []
    bottom = right = 0
    for k, (h, w) in enumerate(sizes):
        if mode == "increase":
            ids.append(image_ids(h, w, k + 1))
        elif mode == "decrease":
            ids.append(image_ids(h, w, -(k + 1)))
        else:
            top, left = (bottom, 0) if h + bottom <= w + right else (0, right)
            ids.append(image_ids(h, w, 1, top // 2, left // 2))
            bottom, right = max(bottom, top + h), max(right, left + w)
    return torch.cat(ids)


def forward(model, img, ids, text, pooled, sigma, guidance=None):
    text_ids = torch.zeros(text.shape[1], 3, dtype=torch.float64)
    strength = None if guidance is None else torch.full([img.shape[0]], guidance, dtype=torch.float64)
    return model(img, text, pooled, torch.full([img.shape[0]], sigma, dtype=torch.float64), ids, text_ids, strength).sample


def save(name, settings, table, inputs, outputs, notes="", taps=(), source="FluxTransformer2DModel"):
    inputs = {key: fixture.f32(value) for key, value in inputs.items()}
    fixture.save(name, "flux.py", f"{VERSION} {source}", settings, procedural=table, inputs=inputs, taps=taps, outputs=outputs, notes=notes)


def tapped(model):
    modules = {"img_in": model.x_embedder, "txt_in": model.context_embedder, "time_in": model.time_text_embed.timestep_embedder, "vector_in": model.time_text_embed.text_embedder, "guidance_in": model.time_text_embed.guidance_embedder}
    taps = fixture.Taps(modules)

    def double(i):
        def record(_module, _inputs, output):
            taps.values.setdefault(f"double_blocks.{i}.txt", output[0].clone())
            taps.values.setdefault(f"double_blocks.{i}.img", output[1].clone())
        return record

    def single(i):
        def record(_module, _inputs, output):
            taps.values.setdefault(f"single_blocks.{i}", torch.cat(output, dim=1))
        return record

    for i, block in enumerate(model.transformer_blocks):
        taps.handles.append(block.register_forward_hook(double(i)))
    for i, block in enumerate(model.single_transformer_blocks):
        taps.handles.append(block.register_forward_hook(single(i)))
    return taps


def inputs_for(seed, batch=1):
    return fixture.randn(seed, batch, 16, HEIGHT, WIDTH), fixture.randn(seed + 1, batch, TEXT, 64), fixture.randn(seed + 2, batch, 64)


def without(model, skip):
    """The network without one block. Blocks are counted double first, then single."""
    kept = [list(model.transformer_blocks), list(model.single_transformer_blocks)]
    n = len(kept[0])
    if skip < n:
        del kept[0][skip]
    else:
        del kept[1][skip - n]
    other = FluxTransformer2DModel(**(dict(model.config) | dict(num_layers=0, num_single_layers=0)))
    other.load_state_dict({k: v for k, v in model.state_dict().items() if "transformer_blocks" not in k})
    other.time_text_embed.time_proj = model.time_text_embed.time_proj
    other.double().eval()
    other.transformer_blocks.extend(kept[0])
    other.single_transformer_blocks.extend(kept[1])
    return other


def check_names(model, width):
    """diffusers' converter, with its fixed width replaced by ours, takes our original names back to its own."""
    source = inspect.getsource(single_file.convert_flux_transformer_checkpoint_to_diffusers)
    assert "inner_dim = 3072" in source
    scope = dict(vars(single_file))
    exec(source.replace("inner_dim = 3072", f"inner_dim = {width}"), scope)
    state = dict(model.state_dict())
    rows = names.flux_rows(state)
    back = scope["convert_flux_transformer_checkpoint_to_diffusers"](names.assemble(rows, state))
    assert back.keys() == state.keys() and all(torch.equal(back[name], value) for name, value in state.items())
    return names.described(rows, state)


def dev():
    settings = config()
    model, table = build(settings)
    fixture.save_json("flux_names", {
        "source": f"{VERSION} convert_flux_transformer_checkpoint_to_diffusers", "script": "oracle/flux.py",
        "operations": "same; rows: sources one after the other along axis 0; swap: the two halves along axis 0 change places", "names": check_names(model, 256),
    })
    latent, text, pooled = inputs_for(201)
    ids = image_ids(HEIGHT, WIDTH)
    taps = tapped(model)
    y = forward(model, pack(latent), ids, text, pooled, 0.625, 3.5)
    skipped = {f"sample.skip_{skip}": forward(without(model, skip), pack(latent), ids, text, pooled, 0.625, 3.5) for skip in (1, 2)}
    save(
        "flux", settings, table,
        inputs={"latent": latent, "img": pack(latent), "img_ids": ids.int(), "text": text, "pooled": pooled, "timestep": torch.tensor([0.625]), "guidance": torch.tensor([3.5])},
        taps=taps.close(), outputs={"sample": y, "velocity": unpack(y, HEIGHT, WIDTH)} | skipped,
        notes="single_blocks taps hold text then image tokens; final_layer is output.sample; sample.skip_1 and sample.skip_2 are without double block 1 and without single block 0",
    )
    latent, text, pooled = inputs_for(211, batch=2)
    y = forward(model, pack(latent), ids, text, pooled, 0.03125, 1.0)
    save(
        "flux_batch", settings, table,
        inputs={"latent": latent, "text": text, "pooled": pooled, "timestep": torch.full([2], 0.03125), "guidance": torch.ones(2)},
        outputs={"sample": y, "velocity": unpack(y, HEIGHT, WIDTH)},
    )


def variants():
    settings = config(guidance=False)
    model, table = build(settings)
    check_names(model, 256)
    latent, text, pooled = inputs_for(221)
    y = forward(model, pack(latent), image_ids(HEIGHT, WIDTH), text, pooled, 1.0)
    common = {"text": text, "pooled": pooled}
    save(
        "flux_schnell", settings, table,
        inputs={"latent": latent, **common, "timestep": torch.tensor([1.0])},
        outputs={"sample": y, "velocity": unpack(y, HEIGHT, WIDTH)}, notes="no guidance embedding",
    )

    settings = config(in_channels=384)
    model, table = build(settings)
    masked = fixture.randn(224, 1, 16, HEIGHT, WIDTH)
    mask = (fixture.randn(225, 1, 1, 8 * HEIGHT, 8 * WIDTH) > 0.3).double()
    mask_tokens, masked_tokens = fill_tokens(mask, masked)
    img = torch.cat([pack(latent), masked_tokens, mask_tokens], dim=2)
    y = forward(model, img, image_ids(HEIGHT, WIDTH), text, pooled, 0.75, 30.0)
    save(
        "flux_fill", settings, table, source="FluxTransformer2DModel, FluxFillPipeline.prepare_mask_latents",
        inputs={"latent": latent, "masked_latent": masked, "mask": mask.to(torch.uint8), "img": img, **common, "timestep": torch.tensor([0.75]), "guidance": torch.tensor([30.0])},
        outputs={"sample": y, "velocity": unpack(y, HEIGHT, WIDTH)},
        notes="img joins latent, masked_latent (already scaled and shifted) and mask along the channels, 64 + 64 + 256; mask [1, 1, 8h, 8w] becomes 64 channels of the latent's size, row of the 8x8 cell then column, then patches as latents do; 1 is repainted",
    )

    settings = config(in_channels=128)
    model, table = build(settings)
    control = fixture.randn(226, 1, 16, HEIGHT, WIDTH)
    y = forward(model, torch.cat([pack(latent), pack(control)], dim=2), image_ids(HEIGHT, WIDTH), text, pooled, 0.75, 10.0)
    save(
        "flux_control", settings, table,
        inputs={"latent": latent, "control": control, **common, "timestep": torch.tensor([0.75]), "guidance": torch.tensor([10.0])},
        outputs={"sample": y, "velocity": unpack(y, HEIGHT, WIDTH)}, notes="patches of latent and control are joined along the channels, 64 + 64",
    )


def kontext():
    """Reference tokens follow the picture's and are cut off the output."""
    settings = config()
    model, table = build(settings)
    latent, text, pooled = inputs_for(231)
    sizes = [(10, 8), (6, 8), (12, 6)]
    references = [fixture.randn(234 + k, 1, 16, *size) for k, size in enumerate(sizes)]
    inputs = {"latent": latent} | {f"reference.{k}": value for k, value in enumerate(references)} | {"text": text, "pooled": pooled, "timestep": torch.tensor([0.5]), "guidance": torch.tensor([2.5])}
    outputs = {}
    cases = {"one": (1, "fixed"), "fixed": (3, "fixed"), "increase": (3, "increase"), "decrease": (3, "decrease")}
    for key, (count, mode) in cases.items():
        ids = torch.cat([image_ids(HEIGHT, WIDTH), reference_ids(sizes[:count], mode)])
        img = torch.cat([pack(latent)] + [pack(reference) for reference in references[:count]], dim=1)
        y = forward(model, img, ids, text, pooled, 0.5, 2.5)[:, :HEIGHT * WIDTH // 4]
        inputs[f"img_ids.{key}"] = ids.int()
        outputs[f"velocity.{key}"] = unpack(y, HEIGHT, WIDTH)
    save(
        "flux_kontext", settings, table,
        inputs=inputs, outputs=outputs,
        notes="case one has reference.0 alone, with the ids of FluxKontextPipeline; the others have all three. fixed, as in ComfyUI: all at index 1, each further one below those before, "
        "or right of them if that ends nearer to the corner; increase: index 1, 2, 3; decrease: -1, -2, -3",
    )


def main():
    with torch.no_grad(), fixture.double_precision():
        dev()
        variants()
        kontext()


if __name__ == "__main__":
    main()
