"""Write the trained networks as one Stable Diffusion 1.x safetensors file.

    python export.py --work WORK --out demo.safetensors

Everything is stored as float16 except the token table, which is float8 e4m3
(training rounds it the same way), and the convolutions of bypassed blocks,
whose outputs are multiplied by zero and which are stored as float8 zeros.
"""

import argparse
import json
import pathlib
import struct

import torch

from model import DECODER_CHANNELS, ENCODER_CHANNELS, PREFIXES, VOCABULARY
from train_diffusion import load_vae

KIND = {torch.float16: "F16", torch.float8_e4m3fn: "F8_E4M3"}
METADATA = {"title": "sd-rs demo", "license": "MIT", "recipe": "tools/demo-model", "sd-rs.default_size": "128x128"}


def full_table(rows, token_ids):
    """Spread the compact token rows over the whole vocabulary; the rest is zero."""
    table = torch.zeros(VOCABULARY, rows.shape[1])
    for row, token in enumerate(token_ids):
        if token >= 0:
            table[token] = rows[row]
    return table


def collect(work):
    """All tensors of the checkpoint under their original names."""
    work = pathlib.Path(work)
    state = torch.load(work / "diffusion.pt")
    vae = load_vae(work)
    tensors = {}
    networks = {"unet": state["unet_average"], "vae": vae.state_dict(), "text": state["text_average"]}
    for part, weights in networks.items():
        for name, value in weights.items():
            value = value.float()
            kind = torch.float16
            if name.endswith("token_embedding.weight"):
                value = full_table(value, state["token_ids"])
                kind = torch.float8_e4m3fn
            tensors[PREFIXES[part] + name] = value.to(kind).contiguous()
    silent = [f"encoder.down.0.block.{i}." for i in range(len(vae.encoder.down[0].block))]
    silent += [f"decoder.up.0.block.{i}." for i in range(len(vae.decoder.up[0].block))]
    if vae.decoder.up[0].block[0].bypass:
        for prefix in silent:
            for conv in ("conv1", "conv2"):
                key = PREFIXES["vae"] + prefix + conv + ".weight"
                tensors[key] = torch.zeros(tensors[key].shape, dtype=torch.float8_e4m3fn)
                key = PREFIXES["vae"] + prefix + conv + ".bias"
                tensors[key] = torch.zeros_like(tensors[key])
    return tensors


def write(path, tensors, metadata):
    """The safetensors format: header length, JSON header, then the raw values."""
    header, offset = {"__metadata__": metadata}, 0
    order = sorted(tensors)
    for name in order:
        t = tensors[name]
        size = t.numel() * t.element_size()
        header[name] = {"dtype": KIND[t.dtype], "shape": list(t.shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            f.write(tensors[name].view(torch.uint8).numpy().tobytes() if tensors[name].element_size() == 1
                    else tensors[name].numpy().tobytes())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", default="work")
    parser.add_argument("--out", default="demo.safetensors")
    args = parser.parse_args()
    tensors = collect(args.work)
    temporary = pathlib.Path(args.out).with_suffix(".part")
    write(temporary, tensors, METADATA)
    temporary.replace(args.out)
    size = pathlib.Path(args.out).stat().st_size
    print(f"{args.out}: {len(tensors)} tensors, {size} bytes ({size / 1e6:.2f} MB)")
    assert size <= 12_000_000, "the file is larger than 12 MB"


if __name__ == "__main__":
    main()
