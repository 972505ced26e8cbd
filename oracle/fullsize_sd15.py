"""One UNet evaluation, one decode and one text encoding with a checkpoint of SD1.5's real size.

    python oracle/fullsize_sd15.py CHECKPOINT OUT [--threads N]

CHECKPOINT is a single-file SD1.5 checkpoint in original (CompVis) names, safetensors, any float type; random weights do. References
are diffusers' UNet2DConditionModel and AutoencoderKL and transformers' CLIPTextModel, in f32 and, as `bf16.*`, in bf16. OUT is written in
the fixture format, inputs and outputs only.
"""

import argparse

import fixture
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from safetensors import safe_open
from transformers import CLIPTextConfig, CLIPTextModel

import names
import unet
import vae


class Checkpoint:
    """Tensors of a file by name, read when asked for, as f32."""

    def __init__(self, path):
        self.file = safe_open(path, framework="pt")
        self.keys = set(self.file.keys())

    def __contains__(self, name):
        return name in self.keys

    def __getitem__(self, name):
        return self.file.get_tensor(name).float()


def load(make, checkpoint, prefix, to_ldm):
    """Builds the module without memory, then gives it the checkpoint's tensors."""
    with torch.device("meta"):
        module = make()
    wanted = {name: value.shape for name, value in module.state_dict().items()}
    module.load_state_dict(names.from_checkpoint(checkpoint, prefix, to_ldm, wanted), strict=True, assign=True)
    return module.eval()


def in_both(name, run):
    """What `run` gives in f32, and as `bf16.*` in bf16."""
    return {name: run(torch.float32), f"bf16.{name}": run(torch.bfloat16)}


def run_unet(checkpoint):
    config = unet.config(channels=(320, 640, 1280, 1280), context=768)
    module = load(lambda: UNet2DConditionModel(**config), checkpoint, names.UNET_PREFIX, names.unet_to_ldm)
    sample, context, time = fixture.randn(101, 1, 4, 64, 64).float(), fixture.randn(102, 1, 77, 768).float(), torch.tensor([500.0])
    run = lambda t: module.to(t)(sample.to(t), time.to(t), encoder_hidden_states=context.to(t)).sample.float()
    return {"sample": sample, "timestep": time, "context": context}, in_both("sample", run)


def run_decoder(checkpoint):
    config = vae.config(channels=(128, 256, 512, 512))
    module = load(lambda: AutoencoderKL(**config), checkpoint, names.VAE_PREFIX, names.vae_to_ldm)
    latent = fixture.randn(103, 1, 4, 32, 32).float()
    return {"latent": latent}, in_both("image", lambda t: module.to(t).decode(latent.to(t)).sample.float())


def run_text(checkpoint):
    config = CLIPTextConfig(vocab_size=49408, hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, hidden_act="quick_gelu", bos_token_id=49406, eos_token_id=49407, attn_implementation="eager")
    module = CLIPTextModel(config)  # holds position ids outside its state dict, so it is built with memory
    wanted = {name: value.shape for name, value in module.state_dict().items()}
    module.load_state_dict(names.from_checkpoint(checkpoint, names.TEXT_PREFIX + "text_model.", lambda name: name, wanted))
    ids = torch.tensor([[49406, 320, 1125, 539, 320, 2368] + [49407] * 71])
    return {"ids": ids.int()}, in_both("text", lambda t: module.eval().to(t)(ids).last_hidden_state.float())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("out")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    checkpoint, tensors = Checkpoint(args.checkpoint), {}
    with torch.no_grad():
        for run in (run_text, run_unet, run_decoder):
            inputs, outputs = run(checkpoint)
            tensors |= {f"input.{name}": value for name, value in inputs.items()}
            tensors |= {f"output.{name}": value for name, value in outputs.items()}
            print(run.__name__, {name: (list(value.shape), round(value.std().item(), 4)) for name, value in outputs.items()})
    fixture.write_safetensors(args.out, tensors, {
        "source": f"diffusers {fixture.version('diffusers')} UNet2DConditionModel, AutoencoderKL; transformers {fixture.version('transformers')} CLIPTextModel",
        "torch": torch.__version__.split("+")[0], "script": "oracle/fullsize_sd15.py", "notes": "the latent goes straight into post_quant_conv; the image is neither shifted nor clamped",
    })


if __name__ == "__main__":
    main()
