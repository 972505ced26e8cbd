"""Train what extends the demo model: a style LoRA, a ControlNet, a tiny autoencoder, an inpainting UNet.

    python extend.py style --model demo.safetensors --merges clip_merges.txt.xz --out demo-style.safetensors
    python extend.py edges --model demo.safetensors --merges clip_merges.txt.xz --out demo-edges.safetensors
    python extend.py tiny --model demo.safetensors --out demo-tiny.safetensors
    python extend.py inpaint --model demo.safetensors --merges clip_merges.txt.xz --out demo-inpaint.safetensors

`style` turns pictures into shades of gray.  `edges` draws objects where a
picture of edges has them: white lines on black, three channels from 0 to 1, of
the size of the picture.  `tiny` encodes and decodes the model's latents, times
0.18215, with the layers of TAESD.  `inpaint` is a UNet that also reads a mask
and the picture without what the mask covers.  Names are those of the usual
files: of kohya's scripts, of the original ControlNet repository, of TAESD as
diffusers publishes it, and of Stable Diffusion checkpoints.
"""

import argparse
import copy
import math
import time

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from scipy import ndimage
from torch import nn
from torch.nn.utils import parametrize

import scenes
from diffusion import STEPS, alphas_cumprod
from evaluate import load
from export import write
from model import (CENTER, LATENT_SCALE, SMOOTH, UNET_CHANNELS, Stage, Stem, pass_through, through_f8,
                   timestep_embedding, zero)
from tokenizer import Tokenizer
from train_diffusion import Latents, disturbance

LORA_RANK = 4
HINT_CHANNELS = (16, 16, 16, 16, 32, 32, 64)
TINY_WIDTH = 16
# As in the last training run of the demo model (`Softened` in train_diffusion.py).
SOFTEN = 0.45


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


def open_model(args):
    """The three networks of the demo model, frozen; the silent blocks of the autoencoder take no time."""
    text, unet, vae = load(args.model)
    for net in (text, unet, vae):
        net.requires_grad_(False)
    for block in list(vae.encoder.down[0].block) + list(vae.decoder.up[0].block):
        block.bypass = not block.conv2.weight.any()
    return text, unet, vae


class Text:
    """Captions as the states of the frozen text encoder."""

    def __init__(self, text, merges):
        self.text, self.tokenizer = text, Tokenizer(merges)

    @torch.no_grad()
    def __call__(self, words):
        return self.text(torch.tensor([self.tokenizer.padded(w) for w in words]))


def noised(z, schedule, disturbed=False):
    """A latent with noise at random steps: `x, t, noise` and what an error at `t` weighs."""
    count = len(z)
    u = (torch.randperm(count) + torch.rand(count)) / count
    t = (u**0.75 * STEPS).long().clamp(max=STEPS - 1)
    a = schedule[t][:, None, None, None]
    noise = torch.randn_like(z)
    if disturbed:
        noise = noise + disturbance(z, a)
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


def gray_map(vae, rng, count=200):
    """How the latent of a picture becomes that of its gray version: `z @ m[:4] + m[4]`, by least squares."""
    colored, shades = [], []
    for _ in range(count // 8):
        x = pictures([scenes.random_scene(rng) for _ in range(8)])
        for found, picture in ((colored, x), (shades, gray(x).contiguous())):
            found.append((vae.moments(picture)[0] * LATENT_SCALE).permute(0, 2, 3, 1).reshape(-1, 4))
    colored, shades = torch.cat(colored), torch.cat(shades)
    return torch.linalg.lstsq(F.pad(colored, (0, 1), value=1.0), shades).solution


def train_style(args, rng):
    """The LoRA answers as if the model's estimate of the picture had lost its colour."""
    text, unet, vae = open_model(args)
    teacher, captions, schedule = copy.deepcopy(unet), Text(text, args.merges), alphas_cumprod().float()
    layers = add_low_rank(unet)
    linear = gray_map(vae, rng)
    pool = Latents(vae, rng, 480, True)

    def without_color(z):
        return torch.einsum("bchw,cd->bdhw", z, linear[:4]) + linear[4][:, None, None]

    def loss_of():
        pool.refresh(1)
        items, z, _ = pool.batch(args.batch)
        words = [scenes.caption(s, rng) if rng.random() < 0.8 else "" for s in items]
        # Most of what the network sees while it draws with the LoRA has no colour.
        seen = torch.where(torch.rand(len(z), 1, 1, 1) < 0.75, without_color(z), z)
        x, t, _, weight = noised(seen, schedule, disturbed=True)
        context, a = captions(words), schedule[t][:, None, None, None]
        with torch.no_grad():
            clean = (x - (1 - a).sqrt() * teacher(x, t, context)) / a.sqrt()
            wanted = (x - a.sqrt() * without_color(clean)) / (1 - a).sqrt()
        return ((unet(x, t, context) - wanted).square().mean((1, 2, 3)) * weight).mean()

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
    text, unet, vae = open_model(args)
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
                                  zero(nn.Conv2d(c, c, 3, padding=1)))
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


@torch.no_grad()
def start_blurred(both, vae, rng, count=64):
    """Begin as what knows the mean colour of every 8x8 pixels: the first channels carry it, never below 0."""
    x = torch.cat([pictures([scenes.random_scene(rng) for _ in range(8)]) for _ in range(count // 8)])
    z = torch.cat([vae.moments(part)[0] for part in x.split(8)]) * LATENT_SCALE
    cells = F.avg_pool2d((x + 1) / 2, 8).permute(0, 2, 3, 1).reshape(-1, 3)
    z = z.permute(0, 2, 3, 1).reshape(-1, 4)

    def linear(conv, inputs, outputs):
        solution = torch.linalg.lstsq(F.pad(inputs, (0, 1), value=1.0), outputs).solution
        count = outputs.shape[1]
        conv.weight[:count] = 0
        conv.weight[:count, :inputs.shape[1], 1, 1] = solution[:-1].T
        conv.bias[:count] = solution[-1]

    # The decoder holds latents softly.
    linear(both["decoder"][1], both["decoder"][0](z), cells)
    linear(both["encoder"][-1], cells, z)
    pass_through(both["encoder"][0], 3, CENTER)
    last = both["decoder"][-1]
    last.weight.zero_()
    last.bias.zero_()
    last.weight[range(3), range(3), 1, 1] = 1
    # Layers that change the size have no bias.
    for layer in list(both["encoder"]) + list(both["decoder"]):
        if isinstance(layer, nn.Conv2d) and layer.bias is None:
            layer.weight[:3] = 0
            layer.weight[range(3), range(3)] = torch.tensor(SMOOTH)


def train_tiny(args, rng):
    """The decoder learns from the full one's pictures, the encoder from the full one's latents."""
    _, _, vae = open_model(args)
    both = nn.ModuleDict({"encoder": tiny_encoder(TINY_WIDTH), "decoder": tiny_decoder(TINY_WIDTH)})
    start_blurred(both, vae, rng)
    both.to(memory_format=torch.channels_last)

    def loss_of():
        x = pictures([scenes.random_scene(rng) for _ in range(args.batch)])
        with torch.no_grad():
            mean, log_variance = vae.moments(x)
            z = mean * LATENT_SCALE
            spread = torch.exp(0.5 * log_variance) * LATENT_SCALE + 0.1 * torch.rand(len(x), 1, 1, 1)
            noisy = z + torch.randn_like(z) * spread
            # TAESD's pictures are from 0 to 1.
            wanted = (vae.decode(noisy / LATENT_SCALE).clamp(-1, 1) + 1) / 2
        with torch.autocast("cpu", dtype=torch.bfloat16):
            decoded = both["decoder"](noisy.contiguous(memory_format=torch.channels_last))
            encoded = both["encoder"](((x + 1) / 2).contiguous(memory_format=torch.channels_last))
        decoded, encoded = decoded.float(), encoded.float()
        off = F.l1_loss(decoded, wanted) + 4 * F.mse_loss(decoded, wanted)
        return off + 0.2 * F.l1_loss(encoded, z) + 0.2 * F.mse_loss(encoded, z)

    run(both.parameters(), loss_of, args.minutes, 2e-3)
    # Layers are numbered as diffusers does it, without the decoder's first, which has no weights.
    tensors = {}
    for name, value in both.state_dict().items():
        side, number, rest = name.split(".", 2)
        tensors[f"{side}.layers.{int(number) - (side == 'decoder')}.{rest}"] = value
    return tensors


def random_mask(scene, rng):
    """What is painted anew, `[128, 128]`: about an object, anywhere, or everything."""
    kind, size = rng.random(), scenes.SIZE
    image = Image.new("L", (size, size), 0)
    draw = ImageDraw.Draw(image)
    if kind < 0.65:
        obj = scene["objects"][int(rng.integers(len(scene["objects"])))]
        reach = obj["r"] * 1.15
        low_x, low_y, high_x, high_y = rng.uniform(1, 26, 4)
        x, y = obj["cx"], obj["cy"]
        box = (x - reach - low_x, y - reach - low_y, x + reach + high_x, y + reach + high_y)
        draw.rectangle(box, fill=255) if kind < 0.45 else draw.ellipse(box, fill=255)
    elif kind < 0.85:
        (x0, x1), (y0, y1) = np.sort(rng.uniform(0, size, 2)), np.sort(rng.uniform(0, size, 2))
        draw.rectangle((x0, y0, x1, y1), fill=255)
        if kind < 0.75:
            for cx, cy, r in zip(rng.uniform(0, size, 3), rng.uniform(0, size, 3), rng.uniform(5, 30, 3)):
                draw.ellipse((cx - r, cy - r, cx + r, cy + r), fill=255)
    else:
        draw.rectangle((0, 0, size, size), fill=255)
    return np.asarray(image) > 127


class Masked:
    """A pool of encoded scenes, each with a mask: latent, mask and latent of what is not masked."""

    def __init__(self, vae, rng, size):
        self.vae, self.rng = vae, rng
        parts = [self.draw(8) for _ in range(-(-size // 8))]
        self.scenes = [s for items, _ in parts for s in items]
        self.tensors = [torch.cat(t) for t in zip(*(tensors for _, tensors in parts))]

    @torch.no_grad()
    def draw(self, count):
        items = [scenes.random_scene(self.rng) for _ in range(count)]
        x = pictures(items)
        anew = torch.from_numpy(np.stack([random_mask(s, self.rng) for s in items]))[:, None].float()
        mean, log_variance = self.vae.moments(x)
        kept = self.vae.moments(x * (1 - anew))[0]
        deviation = torch.exp(0.5 * log_variance)
        return items, [mean * LATENT_SCALE, deviation * LATENT_SCALE, F.max_pool2d(anew, 8), kept * LATENT_SCALE]

    def batch(self, count, redrawn):
        items, tensors = self.draw(redrawn)
        for i, item in enumerate(items):
            at = int(self.rng.integers(len(self.scenes)))
            self.scenes[at] = item
            for pool, new in zip(self.tensors, tensors):
                pool[at] = new[i]
        at = self.rng.integers(len(self.scenes), size=count)
        mean, deviation, mask, kept = (t[at] for t in self.tensors)
        return [self.scenes[i] for i in at], mean + deviation * torch.randn_like(mean), mask, kept


class ThroughF8(nn.Module):
    def forward(self, w):
        return through_f8(w)


def train_inpaint(args, rng):
    """The demo model's UNet with five more channels; kernels and matrices are stored as float8."""
    text, unet, vae = open_model(args)
    captions, schedule = Text(text, args.merges), alphas_cumprod().float()
    stem = unet.input_blocks[0][0]
    wider = Stem(9, stem.out_channels, 3, padding=1)
    wider.load_state_dict({"weight": F.pad(stem.weight, (0, 0, 0, 0, 0, 5)), "bias": stem.bias})
    unet.input_blocks[0][0] = wider
    unet.requires_grad_(True).to(memory_format=torch.channels_last)
    kernels = {n: m for n, m in unet.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))}
    rounded = {n: m for n, m in kernels.items() if m.weight.numel() > 4096}
    for module in rounded.values():
        parametrize.register_parametrization(module, "weight", ThroughF8())
    pool = Masked(vae, rng, 1200)
    empty = captions([""])

    def loss_of():
        items, z, mask, kept = pool.batch(args.batch, 2)
        told = torch.rand(len(z), 1, 1, 1) < 0.8
        words = [scenes.caption(s, rng) if said else "" for s, said in zip(items, told)]
        x, t, noise, weight = noised(z, schedule, disturbed=True)
        x = torch.cat([x, mask, kept], 1).contiguous(memory_format=torch.channels_last)
        # Guidance acts on this network as on the one it comes from: see `SOFTEN`.
        with torch.no_grad():
            without = unet(x, t, empty.expand(len(z), -1, -1))
            wanted = torch.where(told, without + SOFTEN * (noise - without), noise)
        focus = 1 + 3 * mask
        off = (unet(x, t, captions(words)) - wanted).square() * (focus / focus.mean((2, 3), keepdim=True))
        return (off.mean((1, 2, 3)) * weight).mean()

    run(unet.parameters(), loss_of, args.minutes, 6e-4)
    for module in rounded.values():
        parametrize.remove_parametrizations(module, "weight")
    tensors = {f"model.diffusion_model.{k}": v for k, v in unet.state_dict().items()}
    for name in rounded:
        key = f"model.diffusion_model.{name}.weight"
        tensors[key] = tensors[key].to(torch.float8_e4m3fn)
    return tensors


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["style", "edges", "tiny", "inpaint"])
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
    train = {"style": train_style, "edges": train_edges, "tiny": train_tiny, "inpaint": train_inpaint}[args.what]
    tensors = {}
    for name, value in train(args, rng).items():
        tensors[name] = (value.detach().half() if value.dtype == torch.float32 else value.detach()).contiguous()
    write(args.out, tensors, {"title": f"sd-rs demo {args.what}", "license": "MIT", "recipe": "tools/demo-model"})


if __name__ == "__main__":
    main()
