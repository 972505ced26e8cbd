"""Seconds of processor that other programs take for an SD1 checkpoint of real size, for `cargo xtask bench --peers`.

    python oracle/bench_peers.py CHECKPOINT [--peers torch,openvino] [--size 512] [--runs 5] [--threads N]

Prints one line of JSON: {"torch 2.x f32": {network: seconds, ...}, "torch 2.x bf16": {...}, "openvino ...": {...}}; medians after one
run to warm up. Networks and batches are those of xtask's bench; torch's convolutions have channels last.
"""

import argparse
import json
import statistics
import sys
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
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return statistics.median(times[1:])


def text_encoder(checkpoint):
    module = CLIPTextModel(CLIPTextConfig(vocab_size=49408, hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, hidden_act="quick_gelu", bos_token_id=49406, eos_token_id=49407))
    wanted = {name: value.shape for name, value in module.state_dict().items()}
    module.load_state_dict(names.from_checkpoint(checkpoint, names.TEXT_PREFIX + "text_model.", lambda name: name, wanted))
    return module.eval()


class Part(torch.nn.Module):
    """A network as a function of tensors, which is what other programs convert."""

    def __init__(self, module, call):
        super().__init__()
        self.module, self.call = module, call

    def forward(self, *inputs):
        return self.call(self.module, *inputs)


def networks(checkpoint, side):
    """By name: what makes it, how it is called, and its inputs."""
    load = fullsize_sd15.load
    return {
        "CLIP text encoder": (lambda: text_encoder(checkpoint), lambda m, ids: m(ids)[0], (torch.full((2, 77), 320),)),
        "step with guidance": (
            lambda: load(lambda: UNet2DConditionModel(**unet.config(channels=(320, 640, 1280, 1280), context=768)), checkpoint, names.UNET_PREFIX, names.unet_to_ldm),
            lambda m, x, t, context: m(x, t, encoder_hidden_states=context, return_dict=False)[0],
            (torch.randn(2, 4, side, side), torch.tensor([500.0, 500.0]), torch.randn(2, 77, 768)),
        ),
        "decode": (
            lambda: load(lambda: AutoencoderKL(**vae.config(channels=(128, 256, 512, 512))), checkpoint, names.VAE_PREFIX, names.vae_to_ldm),
            lambda m, latent: m.decode(latent, return_dict=False)[0],
            (torch.randn(1, 4, side, side),),
        ),
    }


def in_torch(make, call, inputs, runs, threads):
    torch.set_num_threads(threads)
    for dtype in (torch.float32, torch.bfloat16):
        module = make().to(dtype).to(memory_format=torch.channels_last)
        given = [x.to(dtype) if x.is_floating_point() else x for x in inputs]
        given = [x.to(memory_format=torch.channels_last) if x.dim() == 4 else x for x in given]
        yield f"torch {torch.__version__.split('+')[0]} {'f32' if dtype == torch.float32 else 'bf16'}", seconds(lambda: call(module, *given), runs)


def in_openvino(make, call, inputs, runs, threads):
    import openvino

    core, model = openvino.Core(), openvino.convert_model(Part(make(), call), example_input=inputs)
    for precision in ("f32", "bf16"):
        compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1})
        given = [x.numpy() for x in inputs]
        yield f"openvino {openvino.__version__.split('-')[0]} {precision}", seconds(lambda: compiled(given), runs)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--peers", default="torch")
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    peers = {"torch": in_torch, "openvino": in_openvino}
    checkpoint, out = fullsize_sd15.Checkpoint(args.checkpoint), {}
    with torch.inference_mode():
        for what, (make, call, inputs) in networks(checkpoint, args.size // 8).items():
            for peer in args.peers.split(","):
                for column, taken in peers[peer](make, call, inputs, args.runs, args.threads):
                    out.setdefault(column, {})[what] = taken
                    print(f"{column}: {what} {taken:.3f}", file=sys.stderr, flush=True)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
