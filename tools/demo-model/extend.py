"""Train what extends the demo model: a style LoRA, a ControlNet, a tiny autoencoder.

    python extend.py style --model demo.safetensors --merges clip_merges.txt.xz --out demo-style.safetensors
    python extend.py edges --model demo.safetensors --merges clip_merges.txt.xz --out demo-edges.safetensors
    python extend.py tiny --model demo.safetensors --out demo-tiny.safetensors

`style` turns pictures into shades of gray.  `edges` draws objects where a
picture of edges has them: white lines on black, three channels from 0 to 1, of
the size of the picture.  `tiny` encodes and decodes the model's latents, times
0.18215, with the layers of TAESD.  Names are those of the usual files: of
kohya's scripts, of the original ControlNet repository, and of TAESD with
encoder and decoder in one file.
"""

import argparse
import math
import time

import numpy as np
import torch
import torch.nn.functional as F
from scipy import ndimage
from torch import nn

import scenes
from diffusion import STEPS, alphas_cumprod
from evaluate import load
from export import write
from model import LATENT_SCALE, UNET_CHANNELS, Stage, timestep_embedding, zero
from tokenizer import Tokenizer

LORA_RANK = 4
HINT_CHANNELS = (16, 16, 16, 16, 32, 32, 64)
TINY_WIDTH = 32


def pictures(items):
    """Rendered scenes, `[n, 3, 128, 128]` from -1 to 1."""
    x = np.stack([scenes.render(s) for s in items]).astype(np.float32) / 127.5 - 1
    return torch.from_numpy(x).permute(0, 3, 1, 2)


def gray(x):
    """The luma of a picture in all its channels."""
    return (x * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True).expand_as(x)


def edges(x, rng):
    """White lines where brightness changes, of one to three pixels."""
    luma = ndimage.gaussian_filter(gray(x)[:, 0].numpy(), (0, 1.2, 1.2))
    slope = np.hypot(ndimage.sobel(luma, 1), ndimage.sobel(luma, 2))
    high = slope / np.maximum(slope.max((1, 2), keepdims=True), 1e-6)
    thick = high > rng.uniform(0.25, 0.5)
    thin = (high >= ndimage.maximum_filter(high, (1, 3, 1))) | (high >= ndimage.maximum_filter(high, (1, 1, 3)))
    lines = thick & thin if rng.random() < 0.7 else thick
    return torch.from_numpy(lines.astype(np.float32))[:, None].expand(-1, 3, -1, -1).contiguous()


class Text:
    """Captions as the states of the frozen text encoder."""

    def __init__(self, text, merges):
        self.text, self.tokenizer = text, Tokenizer(merges)

    @torch.no_grad()
    def __call__(self, words):
        return self.text(torch.tensor([self.tokenizer.padded(w) for w in words]))


def noised(z, schedule):
    """A latent with noise at random steps: `x, t, noise` and what an error at `t` weighs."""
    count = len(z)
    u = (torch.randperm(count) + torch.rand(count)) / count
    t = (u**0.75 * STEPS).long().clamp(max=STEPS - 1)
    a = schedule[t][:, None, None, None]
    noise = torch.randn_like(z)
    weight = (1 / schedule).clamp(max=20.0)
    return a.sqrt() * z + (1 - a).sqrt() * noise, t, noise, (weight / weight.mean())[t]


def run(parameters, loss_of, minutes, lr, log=20.0):
    """Steps of AdamW under a cosine; the average of the parameters is what is left in them."""
    parameters = list(parameters)
    averages = [p.detach().clone() for p in parameters]
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.98), weight_decay=1e-4)
    begin = shown = time.time()
    step, mean = 0, 0.0
    while (done := (time.time() - begin) / (60 * minutes)) < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = lr * (min(1.0, (step + 1) / 50) * (0.5 + 0.5 * math.cos(math.pi * done)) + 0.01)
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        mean += (loss.item() - mean) / min(step, 50)
        decay = min(0.99, step / (step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(averages, [p.detach() for p in parameters], 1 - decay)
        if time.time() - shown > log:
            shown = time.time()
            print(f"{shown - begin:6.0f}s step {step} loss {mean:.4f}", flush=True)
    with torch.no_grad():
        for p, average in zip(parameters, averages):
            p.copy_(average)


class LowRank(nn.Module):
    """A linear layer or a convolution with the product of two smaller ones beside it."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        if isinstance(base, nn.Linear):
            self.down = nn.Linear(base.in_features, LORA_RANK, bias=False)
            self.up = zero(nn.Linear(LORA_RANK, base.out_features, bias=False))
        else:
            self.down = nn.Conv2d(base.in_channels, LORA_RANK, base.kernel_size, base.stride, base.padding, bias=False)
            self.up = zero(nn.Conv2d(LORA_RANK, base.out_channels, 1, bias=False))

    def forward(self, *x):
        return self.base(*x) + self.up(self.down(x[0]))


def add_low_rank(unet):
    """Puts a `LowRank` around every linear layer and convolution of the blocks; they are returned by name."""
    layers = {}
    for name, module in list(unet.named_modules()):
        inside = name.startswith(("input_blocks.", "middle_block.", "output_blocks.", "out."))
        if not inside or not isinstance(module, (nn.Linear, nn.Conv2d)):
            continue
        parent, _, leaf = name.rpartition(".")
        layers[name] = LowRank(module)
        setattr(unet.get_submodule(parent), leaf, layers[name])
    return layers


def train_style(args, rng):
    text, unet, vae = load(args.model)
    for net in (text, unet, vae):
        net.requires_grad_(False)
    captions, schedule = Text(text, args.merges), alphas_cumprod().float()
    layers = add_low_rank(unet)

    def loss_of():
        items = [scenes.random_scene(rng) for _ in range(args.batch)]
        with torch.no_grad():
            z = vae.moments(gray(pictures(items)))[0] * LATENT_SCALE
        words = [scenes.caption(s, rng) if rng.random() < 0.85 else "" for s in items]
        x, t, noise, weight = noised(z, schedule)
        return ((unet(x, t, captions(words)) - noise).square().mean((1, 2, 3)) * weight).mean()

    run([p for layer in layers.values() for p in (layer.down.weight, layer.up.weight)], loss_of, args.minutes, 2e-3)
    tensors = {}
    for name, layer in layers.items():
        key = "lora_unet_" + name.replace(".", "_")
        tensors[f"{key}.lora_down.weight"] = layer.down.weight.detach()
        tensors[f"{key}.lora_up.weight"] = layer.up.weight.detach()
        tensors[f"{key}.alpha"] = torch.tensor(float(LORA_RANK))
    return tensors


class Control(nn.Module):
    """The first half of the UNet, which also sees a picture, and silent convolutions behind its blocks."""

    def __init__(self, unet):
        super().__init__()
        import copy

        self.base = unet.base
        self.time_embed = copy.deepcopy(unet.time_embed)
        self.input_blocks = copy.deepcopy(unet.input_blocks)
        self.middle_block = copy.deepcopy(unet.middle_block)
        layers, c = [], 3
        for i, width in enumerate(HINT_CHANNELS):
            stride = 2 if i > 0 and i % 2 == 0 else 1
            layers += [nn.Conv2d(c, width, 3, stride, 1), nn.SiLU()]
            c = width
        self.input_hint_block = nn.Sequential(*layers, zero(nn.Conv2d(c, unet.base, 3, padding=1)))
        widths = [UNET_CHANNELS[0]]
        for i, width in enumerate(UNET_CHANNELS):
            widths.append(width)
            if i + 1 < len(UNET_CHANNELS):
                widths.append(width)
        self.zero_convs = nn.ModuleList([nn.Sequential(zero(nn.Conv2d(w, w, 1))) for w in widths])
        self.middle_block_out = nn.Sequential(zero(nn.Conv2d(widths[-1], widths[-1], 1)))

    def forward(self, x, t, context, hint):
        emb = self.time_embed(timestep_embedding(t, self.base))
        hint, out = self.input_hint_block(hint), []
        for i, (stage, silent) in enumerate(zip(self.input_blocks, self.zero_convs)):
            x = stage(x, emb, context)
            if i == 0:
                x = x + hint
            out.append(silent(x))
        return out, self.middle_block_out(self.middle_block(x, emb, context))


def controlled(unet, x, t, context, residuals, middle):
    """The UNet with what a ControlNet adds."""
    emb = unet.time_embed(timestep_embedding(t, unet.base))
    skips = []
    for stage in unet.input_blocks:
        x = stage(x, emb, context)
        skips.append(x)
    x = unet.middle_block(x, emb, context) + middle
    for stage in unet.output_blocks:
        x = stage(torch.cat([x, skips.pop() + residuals.pop()], 1), emb, context)
    return unet.out(x)


def unplaced(scene):
    """A caption of the scene that does not say where its objects are, nor how large."""
    said = dict(scene, objects=[dict(o, size="medium", position="center") for o in scene["objects"]])
    return said


def train_edges(args, rng):
    text, unet, vae = load(args.model)
    for net in (text, unet, vae):
        net.requires_grad_(False)
    captions, schedule = Text(text, args.merges), alphas_cumprod().float()
    control = Control(unet)
    control.requires_grad_(True)

    def loss_of():
        items = [scenes.random_scene(rng) for _ in range(args.batch)]
        x = pictures(items)
        with torch.no_grad():
            z = vae.moments(x)[0] * LATENT_SCALE
        words = [scenes.caption(unplaced(s), rng) if rng.random() < 0.85 else "" for s in items]
        hint = edges(x, rng)
        x, t, noise, weight = noised(z, schedule)
        context = captions(words)
        residuals, middle = control(x, t, context, hint)
        off = controlled(unet, x, t, context, residuals, middle) - noise
        return (off.square().mean((1, 2, 3)) * weight).mean()

    run(control.parameters(), loss_of, args.minutes, 1e-3)
    return {f"control_model.{k}": v for k, v in control.state_dict().items()}


class TinyBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(c, c, 3, padding=1), nn.ReLU(), nn.Conv2d(c, c, 3, padding=1), nn.ReLU(),
                                  nn.Conv2d(c, c, 3, padding=1))
        self.skip, self.fuse = nn.Identity(), nn.ReLU()

    def forward(self, x):
        return self.fuse(self.conv(x) + self.skip(x))


class Clamp(nn.Module):
    def forward(self, x):
        return torch.tanh(x / 3) * 3


def tiny_encoder(c):
    layers = [nn.Conv2d(3, c, 3, padding=1), TinyBlock(c)]
    for _ in range(3):
        layers += [nn.Conv2d(c, c, 3, 2, 1, bias=False), TinyBlock(c), TinyBlock(c), TinyBlock(c)]
    return nn.Sequential(*layers, nn.Conv2d(c, 4, 3, padding=1))


def tiny_decoder(c):
    layers = [Clamp(), nn.Conv2d(4, c, 3, padding=1), nn.ReLU()]
    for _ in range(3):
        layers += [TinyBlock(c), TinyBlock(c), TinyBlock(c), nn.Upsample(scale_factor=2),
                   nn.Conv2d(c, c, 3, padding=1, bias=False)]
    return nn.Sequential(*layers, TinyBlock(c), nn.Conv2d(c, 3, 3, padding=1))


def train_tiny(args, rng):
    _, _, vae = load(args.model)
    vae.requires_grad_(False)
    both = nn.ModuleDict({"encoder": tiny_encoder(TINY_WIDTH), "decoder": tiny_decoder(TINY_WIDTH)})

    def loss_of():
        x = pictures([scenes.random_scene(rng) for _ in range(args.batch)])
        with torch.no_grad():
            mean, log_variance = vae.moments(x)
            z = mean * LATENT_SCALE
            noisy = z + torch.randn_like(z) * (torch.exp(0.5 * log_variance) * LATENT_SCALE + 0.05)
        # TAESD's pictures are from 0 to 1.
        decoded = both["decoder"](noisy)
        encoded = both["encoder"]((x + 1) / 2)
        return F.l1_loss(decoded, (x + 1) / 2) + 4 * F.mse_loss(decoded, (x + 1) / 2) + 0.2 * F.mse_loss(encoded, z)

    run(both.parameters(), loss_of, args.minutes, 2e-3)
    return dict(both.state_dict())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["style", "edges", "tiny"])
    parser.add_argument("--model", default="demo.safetensors")
    parser.add_argument("--merges", help="merge list of the CLIP tokenizer")
    parser.add_argument("--out", required=True)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    train = {"style": train_style, "edges": train_edges, "tiny": train_tiny}[args.what]
    tensors = {name: value.detach().half().contiguous() for name, value in train(args, rng).items()}
    write(args.out, tensors, {"title": f"sd-rs demo {args.what}", "license": "MIT", "recipe": "tools/demo-model"})


if __name__ == "__main__":
    main()
