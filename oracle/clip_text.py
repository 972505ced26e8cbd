"""CLIP's text encoder: one head of 64, and two heads of 64.

Reference: transformers' `CLIPTextModel` in f64, eager attention. `output.clip_skip_2` is the state after the last layer but one, put
through the final norm, as A1111 and stable-diffusion.cpp define clip skip 2.
"""

import torch
from transformers import CLIPTextConfig, CLIPTextModel

import fixture

PREFIX = "text_model."  # as in the files of the hub and inside SD1 checkpoints


def build(width, layers, vocab_size, prefix=PREFIX):
    config = CLIPTextConfig(
        vocab_size=vocab_size, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=width // 64,
        max_position_embeddings=77, hidden_act="quick_gelu", bos_token_id=vocab_size - 2, eos_token_id=vocab_size - 1,
        pad_token_id=vocab_size - 1, projection_dim=width, attn_implementation="eager",
    )
    model = CLIPTextModel(config).double().eval()
    return model, fixture.fill(model, prefix), config


def encode(model, ids, clip_skip=1):
    """Token states [b, 77, c]. `clip_skip` 1 is the last layer."""
    result = model(ids, output_hidden_states=True)
    if clip_skip == 1:
        return result.last_hidden_state
    return getattr(model, "text_model", model).final_layer_norm(result.hidden_states[-clip_skip])


def main():
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
            {k: getattr(config, k) for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "hidden_act", "layer_norm_eps", "bos_token_id", "eos_token_id")},
            procedural=table, inputs={"ids": ids.int()}, taps=taps,
            outputs={"last_hidden_state": result.last_hidden_state, "clip_skip_2": skipped, "pooled": result.pooler_output},
            notes="pooled is the last state at the first end token; clip_skip_2 is the state after layer 1 of 0..2, then the final norm",
        )


if __name__ == "__main__":
    main()
