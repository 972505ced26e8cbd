"""UMT5's encoder: T5's, but every block has relative positions of its own.

Reference: transformers' `UMT5EncoderModel` in f64, sizes and cases as in `t5_encoder.py`.
"""

import torch
from transformers import UMT5Config, UMT5EncoderModel

import fixture
import t5_encoder


def build(width=64, heads=2, layers=2, vocab_size=1000):
    config = UMT5Config(
        vocab_size=vocab_size, d_model=width, d_kv=64, d_ff=2 * width, num_layers=layers, num_heads=heads, relative_attention_num_buckets=32, relative_attention_max_distance=128,
        feed_forward_proj="gated-gelu", layer_norm_epsilon=1e-6, dropout_rate=0.0, is_encoder_decoder=False, use_cache=False, attn_implementation="eager",
    )
    model = UMT5EncoderModel(config).double().eval()
    return model, t5_encoder.fill(model), config


def main():
    model, table, config = build()
    generator = torch.Generator().manual_seed(53)
    full = torch.randint(3, 1000, (1, 77), generator=generator)
    full[:, -1] = t5_encoder.EOS
    short = full.clone()
    short[:, 8] = t5_encoder.EOS
    short[:, 9:] = t5_encoder.PAD
    mask = (torch.arange(77)[None] < 9).long()
    taps = fixture.Taps({f"encoder.block.{i}": block for i, block in enumerate(model.encoder.block)})
    with torch.no_grad(), fixture.double_precision():
        states = {"full": t5_encoder.encode(model, full)}
        taps = taps.close()
        states["masked"] = t5_encoder.encode(model, short, mask)
        states["padded"] = t5_encoder.encode(model, short)
    fixture.save(
        "umt5_encoder", "umt5_encoder.py", f"transformers {fixture.version('transformers')} UMT5EncoderModel", t5_encoder.settings(config), procedural=table,
        inputs={"ids.full": full.int(), "ids.short": short.int(), "mask.short": mask.int()}, taps=taps, outputs=states,
        notes="output.full is of input.ids.full; output.masked and output.padded are of input.ids.short with and without input.mask.short (1 = attend); taps are of the full case",
    )


if __name__ == "__main__":
    main()
