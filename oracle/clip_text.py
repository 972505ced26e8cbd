"""CLIP's text encoder: one head of 64, and two heads of 64; and OpenCLIP's, whose activation is the exact GELU and whose filler is id 0.

References: transformers' `CLIPTextModel` and `CLIPTextModelWithProjection` in f64, eager attention. `output.clip_skip_2` is the state after
the last layer but one, put through the final norm, as A1111 and stable-diffusion.cpp define clip skip 2. SDXL takes the same state without
that norm (`output.penultimate`).
"""

import diffusers.loaders.single_file_utils as single_file
import torch
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

import fixture
import names

PREFIX = "text_model."  # as in the files of the hub and inside SD1 checkpoints


def build(width, layers, vocab_size, prefix=PREFIX, openclip=False, projection=False):
    """With `projection`, `prefix` stands before `text_model.`; without, it includes it."""
    config = CLIPTextConfig(
        vocab_size=vocab_size, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=width // 64,
        max_position_embeddings=77, hidden_act="gelu" if openclip else "quick_gelu", bos_token_id=vocab_size - 2, eos_token_id=vocab_size - 1,
        pad_token_id=0 if openclip else vocab_size - 1, projection_dim=width, attn_implementation="eager",
    )
    model = (CLIPTextModelWithProjection if projection else CLIPTextModel)(config).double().eval()
    return model, fixture.fill(model, prefix), config


def encode(model, ids, clip_skip=1):
    """Token states [b, 77, c]. `clip_skip` 1 is the last layer."""
    result = model(ids, output_hidden_states=True)
    if clip_skip == 1:
        return result.last_hidden_state
    return getattr(model, "text_model", model).final_layer_norm(result.hidden_states[-clip_skip])


def settings(config):
    return {k: getattr(config, k) for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "hidden_act", "layer_norm_eps", "bos_token_id", "eos_token_id")}


def openai():
    for name, width, batch in (("clip_text", 64, 2), ("clip_text_2heads", 128, 1)):
        model, table, config = build(width, layers=3, vocab_size=1000)
        generator = torch.Generator().manual_seed(5)
        ids = torch.randint(0, 998, (batch, 77), generator=generator)
        ids[:, 0] = 998
        ids[:, -1] = 999
        ids[0, 9:] = 999  # a short prompt: end and fillers are one id
        modules = {PREFIX + "embeddings": model.embeddings}
        for i, layer in enumerate(model.encoder.layers):
            modules[f"{PREFIX}encoder.layers.{i}"] = layer
        first = model.encoder.layers[0]
        modules |= {f"{PREFIX}encoder.layers.0.{part}": getattr(first, part) for part in ("layer_norm1", "self_attn", "mlp")}
        taps = fixture.Taps(modules)
        with torch.no_grad():
            result = model(ids, output_hidden_states=True)
            skipped = encode(model, ids, clip_skip=2)
        taps = taps.close()
        assert torch.equal(result.hidden_states[-2], taps[f"{PREFIX}encoder.layers.1"])
        assert torch.equal(result.last_hidden_state, model.final_layer_norm(taps[f"{PREFIX}encoder.layers.2"]))
        fixture.save(
            name, "clip_text.py", f"transformers {fixture.version('transformers')} CLIPTextModel",
            settings(config),
            procedural=table, inputs={"ids": ids.int()}, taps=taps,
            outputs={"last_hidden_state": result.last_hidden_state, "clip_skip_2": skipped, "pooled": result.pooler_output},
            notes="pooled is the last state at the first end token; clip_skip_2 is the state after layer 1 of 0..2, then the final norm",
        )


def openclip():
    """SDXL's second encoder (bigG) with projection, and SD2's (H)."""
    generator = torch.Generator().manual_seed(6)
    ids = torch.randint(1, 998, (2, 77), generator=generator)
    ids[:, 0] = 998
    ids[1, -1] = 999
    ids[0, 9] = 999
    ids[0, 10:] = 0
    for name, projection, ids in (("clip_text_bigg", True, ids), ("clip_text_h", False, ids[:1])):
        # Two layers carry every step of the H case: SD2 files hold 24 layers, diffusers' SD2 folders only 23, and both use the state after 23.
        model, table, config = build(128, layers=3, vocab_size=1000, prefix="" if projection else PREFIX, openclip=True, projection=projection)
        inner = getattr(model, "text_model", model)
        first = inner.encoder.layers[0]
        taps = fixture.Taps({f"{PREFIX}encoder.layers.0": first, f"{PREFIX}encoder.layers.0.mlp": first.mlp} if projection else {})
        with torch.no_grad():
            result = model(ids, output_hidden_states=True)
        taps = taps.close()
        penultimate = result.hidden_states[-2]
        if projection:
            ends = inner.final_layer_norm(result.hidden_states[-1])[[0, 1], [9, 76]]
            assert torch.allclose(result.text_embeds, ends @ model.text_projection.weight.T)
            outputs = {"penultimate": penultimate, "last_hidden_state": result.last_hidden_state, "pooled": ends, "text_embeds": result.text_embeds}
            notes = (
                "penultimate is the state after layer 1 of 0..2 with no final norm, as SDXL uses it; last_hidden_state has the final norm; pooled is its row at the end token (positions 9, 76); "
                "text_embeds is text_projection.weight . pooled, SDXL's pooled vector; in OpenCLIP's own files text_projection is the transpose"
            )
        else:
            short, _, _ = build(128, layers=2, vocab_size=1000, openclip=True)
            states = inner.final_layer_norm(penultimate)
            with torch.no_grad():
                assert torch.equal(states, short(ids).last_hidden_state), "one layer less is the same"
            outputs = {"clip_skip_2": states, "last_hidden_state": result.last_hidden_state}
            notes = (
                "clip_skip_2 is the state after layer 1 of 0..2, then the final norm, as SD2 uses it; it equals last_hidden_state of the same model without its last layer, "
                "which is how diffusers' SD2 folders store it (23 layers instead of 24)"
            )
        fixture.save(
            name, "clip_text.py", f"transformers {fixture.version('transformers')} {type(model).__name__}", settings(config),
            procedural=table, inputs={"ids": ids.int()}, taps=taps, outputs=outputs, notes=notes,
        )
        if projection:
            save_open_clip_names(model)


def save_open_clip_names(model):
    prefix = "conditioner.embedders.1.model."
    state = dict(model.state_dict())
    rows = [(prefix + name, op, sources) for name, op, sources in names.open_clip_rows(state)]
    back = single_file.convert_open_clip_checkpoint(model, names.assemble(rows, state), prefix=prefix)
    assert back.keys() == state.keys() and all(torch.equal(back[name], value) for name, value in state.items())
    fixture.save_json("open_clip_names", {
        "source": f"diffusers {fixture.version('diffusers')} convert_open_clip_checkpoint", "script": "oracle/clip_text.py", "names": names.described(rows, state),
    })


def main():
    openai()
    openclip()


if __name__ == "__main__":
    main()
