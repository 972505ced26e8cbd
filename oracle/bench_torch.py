"""Seconds of the reference classes on an SD1 checkpoint of real size, for `cargo xtask bench --torch`.

    python oracle/bench_torch.py CHECKPOINT [--size 512] [--runs 5] [--threads N]

Prints one line of JSON: {"torch f32": {network: seconds, ...}, "torch bf16": {...}}; medians after one run to warm up. Networks and batches are
those of xtask's bench; convolutions have channels last.
"""

import argparse
import json
import statistics
import time

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel

import fullsize_sd15
import names
import unet
import vae


def seconds(run, runs):
    times = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def text_encoder(checkpoint):
    module = CLIPTextModel(CLIPTextConfig(vocab_size=49408, hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, hidden_act="quick_gelu", bos_token_id=49406, eos_token_id=49407))
    wanted = {name: value.shape for name, value in module.state_dict().items()}
    module.load_state_dict(names.from_checkpoint(checkpoint, names.TEXT_PREFIX + "text_model.", lambda name: name, wanted))
    return module.eval()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    checkpoint, side, out = fullsize_sd15.Checkpoint(args.checkpoint), args.size // 8, {}
    load = fullsize_sd15.load
    makers = {
        "CLIP text encoder": (lambda: text_encoder(checkpoint), lambda m, t: m(torch.full((2, 77), 320))),
        "step with guidance": (
            lambda: load(lambda: UNet2DConditionModel(**unet.config(channels=(320, 640, 1280, 1280), context=768)), checkpoint, names.UNET_PREFIX, names.unet_to_ldm),
            lambda m, t: m(torch.randn(2, 4, side, side, dtype=t).to(memory_format=torch.channels_last), torch.tensor([500.0, 500.0]), encoder_hidden_states=torch.randn(2, 77, 768, dtype=t)),
        ),
        "decode": (
            lambda: load(lambda: AutoencoderKL(**vae.config(channels=(128, 256, 512, 512))), checkpoint, names.VAE_PREFIX, names.vae_to_ldm),
            lambda m, t: m.decode(torch.randn(1, 4, side, side, dtype=t).to(memory_format=torch.channels_last)),
        ),
    }
    with torch.inference_mode():
        for what, (make, call) in makers.items():
            for dtype in (torch.float32, torch.bfloat16):
                module = make().to(dtype).to(memory_format=torch.channels_last)
                column = f"torch {torch.__version__.split('+')[0]} {'f32' if dtype == torch.float32 else 'bf16'}"
                out.setdefault(column, {})[what] = seconds(lambda: call(module, dtype), args.runs)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
