"""Stable Diffusion 3 and 3.5 (MMDiT), small: without norms of queries and keys (SD3), with them (3.5 large), with second attentions too (3.5 medium).

Reference: diffusers' `SD3Transformer2DModel` in f64. Two heads of the real width 64, three blocks, the last of which gives no text. The positional
table is made by the rule, as a file would bring one. Taps carry the original (Stability AI) module names.
"""

import diffusers.loaders.single_file_utils as single_file
import torch
from diffusers import SD3Transformer2DModel

import fixture
import flux
import names

VERSION = f"diffusers {fixture.version('diffusers')}"
HEIGHT, WIDTH, TEXT = 16, 12, 10  # latent size and text tokens
TABLE = "pos_embed.pos_embed"
VARIANTS = {"sd3": {}, "sd35_medium": {"qk_norm": "rms_norm", "dual": (0, 1)}, "sd35_large": {"qk_norm": "rms_norm"}}
# Published sizes.
REAL = {
    "sd3": dict(layers=24, heads=24, context=4096, pooled=2048, side=192),
    "sd35_medium": dict(layers=24, heads=24, context=4096, pooled=2048, side=384, qk_norm="rms_norm", dual=tuple(range(13))),
    "sd35_large": dict(layers=38, heads=38, context=4096, pooled=2048, side=192, qk_norm="rms_norm"),
}
NOTES = "latent to velocity, both [b, 16, h, w]; timestep is 1000 sigma; the positional table is 11 x 11 patches, cropped from its middle"


def config(layers=3, heads=2, context=64, pooled=48, side=11, qk_norm=None, dual=()):
    return dict(
        sample_size=16, patch_size=2, in_channels=16, out_channels=16, num_layers=layers, attention_head_dim=64, num_attention_heads=heads, joint_attention_dim=context,
        caption_projection_dim=64 * heads, pooled_projection_dim=pooled, pos_embed_max_size=side, qk_norm=qk_norm, dual_attention_layers=dual,
    )


def build(settings, prefix="", adjust=None):
    model = SD3Transformer2DModel(**settings).double().eval()
    model.time_text_embed.time_proj = flux.SingleAngles(model.time_text_embed.time_proj)
    table = fixture.fill(model, prefix, adjust)
    # A buffer, which `fill` leaves alone; between -1 and 1 like sines.
    shape = list(model.pos_embed.pos_embed.shape)
    table[prefix + TABLE] = [shape, -10, 0.0]
    model.pos_embed.pos_embed = fixture.procedural(prefix + TABLE, shape, -10, 0.0)
    return model, table


def forward(model, latent, text, pooled, timestep, skip=None):
    return model(latent, text, pooled, torch.full([latent.shape[0]], timestep, dtype=torch.float64), skip_layers=skip).sample


def tapped(model):
    embed = model.time_text_embed
    taps = fixture.Taps({
        "x_embedder.proj": model.pos_embed.proj, "x_embedder": model.pos_embed, "t_embedder": embed.timestep_embedder, "y_embedder": embed.text_embedder,
        "context_embedder": model.context_embedder, "final_layer.linear": model.proj_out,
    })

    def joint(i):
        def record(_module, _inputs, output):
            for name, value in zip(("context_block", "x_block"), output):
                if value is not None:
                    taps.values.setdefault(f"joint_blocks.{i}.{name}", value.clone())
        return record

    for i, block in enumerate(model.transformer_blocks):
        taps.handles.append(block.register_forward_hook(joint(i)))
    return taps


def check_names(model):
    """diffusers' converter takes our original names back to its own."""
    state = dict(model.state_dict())
    rows = names.sd3_rows(state)
    back = single_file.convert_sd3_transformer_checkpoint_to_diffusers(names.assemble(rows, state))
    assert back.keys() == state.keys() and all(torch.equal(back[name], value) for name, value in state.items())
    return names.described(rows, state)


def save(name, settings, table, latent, text, pooled, timestep, outputs, taps=(), notes=""):
    fixture.save(
        name, "sd3.py", f"{VERSION} SD3Transformer2DModel", settings, procedural=table,
        inputs={"latent": latent.float(), "text": text.float(), "pooled": pooled.float(), "timestep": torch.full([latent.shape[0]], timestep)},
        taps=taps, outputs=outputs, notes=NOTES + notes,
    )


def inputs_for(seed, batch=1, height=HEIGHT, width=WIDTH):
    return fixture.randn(seed, batch, 16, height, width), fixture.randn(seed + 1, batch, TEXT, 64), fixture.randn(seed + 2, batch, 48)


def main():
    tables = {}
    with torch.no_grad(), fixture.double_precision():
        for k, (name, options) in enumerate(VARIANTS.items()):
            settings = config(**options)
            model, table = build(settings)
            tables[name] = check_names(model)
            inputs = inputs_for(301 + 10 * k)
            taps = tapped(model)
            outputs = {"velocity": forward(model, *inputs, 625.0)}
            taps = taps.close()
            outputs |= {f"velocity.skip_{i}": forward(model, *inputs, 625.0, [i]) for i in (1, 2)}
            save(name, settings, table, *inputs, 625.0, outputs, taps, "; velocity.skip_1 and velocity.skip_2 are without that block")
            if name != "sd3":
                continue
            # 5 by 7 patches in a table of 11: an odd number is left above and below.
            inputs = inputs_for(341, 2, 10, 14)
            save("sd3_batch", settings, table, *inputs, 1000.0, {"velocity": forward(model, *inputs, 1000.0)})
    fixture.save_json("sd3_names", {
        "source": f"{VERSION} convert_sd3_transformer_checkpoint_to_diffusers", "script": "oracle/sd3.py",
        "operations": "same; rows: sources one after the other along axis 0; swap: the two halves along axis 0 change places", **tables,
    })


if __name__ == "__main__":
    main()
