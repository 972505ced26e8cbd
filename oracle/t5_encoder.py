"""T5's encoder (v1.1: gated tanh-GELU, no biases, relative positions learned by the first block).

Reference: transformers' `T5EncoderModel` in f64. Two heads of 64, so that the inner width 128 differs from the model's width 64. Cases: all
positions used (`full`), and a prompt of 9 ids followed by padding with the attention mask (`masked`) and without it (`padded`).
"""

import torch
from transformers import T5Config, T5EncoderModel

import fixture

EOS, PAD = 1, 0


def build(width=64, heads=2, layers=2, vocab_size=1000, prefix=""):
    config = T5Config(
        vocab_size=vocab_size, d_model=width, d_kv=64, d_ff=2 * width, num_layers=layers, num_heads=heads, relative_attention_num_buckets=32, relative_attention_max_distance=128,
        feed_forward_proj="gated-gelu", layer_norm_epsilon=1e-6, dropout_rate=0.0, is_encoder_decoder=False, use_cache=False, tie_word_embeddings=False, attn_implementation="eager",
    )
    model = T5EncoderModel(config).double().eval()
    return model, fill(model, prefix), config


def fill(model, prefix=""):
    """T5 does not scale its scores, so queries are small; its embedding is large and its relative bias spans a few units."""
    adjust = {}
    for name, parameter in model.named_parameters():
        if name.endswith("SelfAttention.q.weight"):
            adjust[name] = -3
        elif "relative_attention_bias" in name:
            adjust[name] = 2
        elif "shared" in name or "embed_tokens" in name:
            adjust[name] = 2
    return fixture.fill(model, prefix, adjust)


def settings(config):
    return {k: getattr(config, k) for k in ("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads", "relative_attention_num_buckets", "relative_attention_max_distance", "feed_forward_proj", "layer_norm_epsilon")}


def encode(model, ids, mask=None):
    """Token states [b, tokens, width]. Without a mask every position is attended to, padding too."""
    return model(input_ids=ids, attention_mask=torch.ones_like(ids) if mask is None else mask).last_hidden_state


def main():
    model, table, config = build()
    print({name: entry for name, entry in table.items() if "block.1" not in name})
    for name, tokens in (("t5_encoder", 77), ("t5_encoder_256", 256)):
        generator = torch.Generator().manual_seed(51 + tokens)
        full = torch.randint(3, 1000, (1, tokens), generator=generator)
        full[:, -1] = EOS
        short = full.clone()
        short[:, 8] = EOS
        short[:, 9:] = PAD
        mask = (torch.arange(tokens)[None] < 9).long()
        taps = {}
        if name == "t5_encoder":
            first = model.encoder.block[0]
            modules = {"shared": model.shared}
            modules |= {f"encoder.block.{i}": block for i, block in enumerate(model.encoder.block)}
            modules |= {"encoder.block.0.layer.0.layer_norm": first.layer[0].layer_norm, "encoder.block.0.layer.0.SelfAttention": first.layer[0].SelfAttention, "encoder.block.0.layer.0": first.layer[0], "encoder.block.0.layer.1.DenseReluDense": first.layer[1].DenseReluDense}
            taps = fixture.Taps(modules)
        with torch.no_grad(), fixture.double_precision():
            states = {"full": encode(model, full)}
            if taps:
                taps = taps.close()
            states["masked"] = encode(model, short, mask)
            states["padded"] = encode(model, short)
            assert not torch.allclose(states["masked"], states["padded"], atol=1e-2)
            assert torch.equal(states["padded"], model(input_ids=short).last_hidden_state)
        if tokens == 256:  # every 8th position is enough, and keeps the file small
            states = {key: value[:, ::8] for key, value in states.items()}
        fixture.save(
            name, "t5_encoder.py", f"transformers {fixture.version('transformers')} T5EncoderModel", settings(config), procedural=table,
            inputs={"ids.full": full.int(), "ids.short": short.int(), "mask.short": mask.int()}, taps=taps, outputs=states,
            notes="output.full is of input.ids.full; output.masked and output.padded are of input.ids.short with and without input.mask.short (1 = attend); "
            + ("outputs hold positions 0, 8, 16, ...; " if tokens == 256 else "taps are of the full case; ")
            + "encoder.embed_tokens.weight in files equals shared.weight; attention scores are not scaled by 1/sqrt(d_kv)",
        )


if __name__ == "__main__":
    main()
