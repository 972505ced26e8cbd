"""Train the autoencoder of the demo model on freshly drawn scenes.

    python train_vae.py --out WORK --minutes 15

Two worker processes of one thread each update the same weights.  The run is
cut by the clock: the learning rate follows a cosine over `--minutes`.  Until
`--full-from` (a fraction of the run) pictures are 64x64, cut out or shrunk;
after that they are whole 128x128 scenes.  `WORK/vae.pt` is rewritten every
minute or two, and a new run starts from it when it exists.
"""

import argparse
import math
import os
import pathlib
import time

import numpy as np
import torch
import torch.nn.functional as F

import scenes
from model import Autoencoder
from workers import launch


class Pool:
    """A store of scenes in which a few are redrawn at every step."""

    def __init__(self, rng, size):
        self.rng = rng
        self.images = np.stack([self.draw() for _ in range(size)])

    def draw(self):
        return scenes.render(scenes.random_scene(self.rng))

    def batch(self, count, crop, refresh=2):
        for _ in range(refresh):
            self.images[self.rng.integers(len(self.images))] = self.draw()
        out = []
        for i in self.rng.integers(len(self.images), size=count):
            image = self.images[i]
            if crop:
                kind = self.rng.random()
                if kind < 0.3:
                    # A whole scene at half size.
                    image = image.reshape(64, 2, 64, 2, 3).mean((1, 3))
                else:
                    y, x = self.rng.integers(0, 9, 2) * 8
                    image = image[y:y + 64, x:x + 64]
            out.append(image)
        batch = torch.from_numpy(np.stack(out).astype(np.float32) / 127.5 - 1)
        return batch.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)


def slopes(x):
    return x[:, :, 1:] - x[:, :, :-1], x[:, :, :, 1:] - x[:, :, :, :-1]


def losses(vae, x, kl_weight):
    """Loss, mean squared error and divergence of a batch of pictures."""
    mean, logvar = vae.moments(x)
    z = mean + torch.exp(0.5 * logvar) * torch.randn_like(mean)
    y = vae.decode(z)
    flat = (y - x).abs().mean() + 0.5 * (y - x).square().mean()
    edge = sum((a - b).abs().mean() for a, b in zip(slopes(y), slopes(x)))
    kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
    mse = (y - x).square().mean().detach()
    return flat + 0.5 * edge + kl_weight * kl, mse, kl.detach()


@torch.no_grad()
def psnr(vae, images):
    """Mean peak signal to noise ratio over uint8 pictures, in dB."""
    values, outs = [], []
    for image in images:
        x = torch.from_numpy(image.astype(np.float32) / 127.5 - 1).permute(2, 0, 1)[None]
        y = vae.decode(vae.moments(x)[0])[0].permute(1, 2, 0)
        y = ((y.clamp(-1, 1) + 1) * 127.5).round().numpy().astype(np.uint8)
        mse = ((y.astype(np.float32) - image) ** 2).mean()
        values.append(10 * math.log10(255**2 / max(mse, 1e-6)))
        outs.append(y)
    return float(np.mean(values)), outs


@torch.no_grad()
def latent_statistics(vae, count=64):
    """Mean and standard deviation of each latent channel over some scenes."""
    _, images = scenes.dataset(count, seed=777)
    z = torch.cat([vae.moments(torch.from_numpy(i.astype(np.float32) / 127.5 - 1).permute(2, 0, 1)[None])[0]
                   for i in images])
    return z.mean((0, 2, 3)), z.std((0, 2, 3))


def set_bypass(vae, on):
    """Leave the costly blocks at full resolution out of the computation."""
    for block in list(vae.encoder.down[0].block) + list(vae.decoder.up[0].block):
        block.bypass = on


def train(rank, shared, args):
    torch.manual_seed(args.seed * 100 + args.start_round * 10 + rank)
    rng = np.random.default_rng([args.seed, rank, args.start_round])
    out = pathlib.Path(args.out)
    vae, average = shared["vae"], shared["average"]
    for net in (vae, average):
        set_bypass(net, args.bypass)
    pool = Pool(rng, 64 if args.quick else 300)
    test_rng = np.random.default_rng(12345)
    test = [scenes.render(scenes.random_scene(test_rng)) for _ in range(16)]
    parameters = list(vae.parameters())
    averages = list(average.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, betas=(0.9, 0.99), weight_decay=1e-3)
    begin = last_save = last_log = time.time()
    total = args.minutes * 60
    step = 0
    recent = []
    while (done := (time.time() - begin) / total) < 1.0:
        rate = min(1.0, (step + 1) / 30) * (0.5 + 0.5 * math.cos(math.pi * done)) + 0.01
        for group in optimizer.param_groups:
            group["lr"] = args.lr * rate
        full = done >= args.full_from
        x = pool.batch(args.batch if not full else max(1, args.batch // 4), not full)
        loss, mse, kl = losses(vae, x, args.kl)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        if rank == 0:
            with torch.no_grad():
                decay = min(0.99, step / (step + 10))
                torch._foreach_lerp_(averages, parameters, 1 - decay)
        recent.append((loss.item(), mse.item(), kl.item()))
        now = time.time()
        if rank == 0 and (now - last_log > 20 or step <= 2):
            last_log = now
            loss, mse, kl = np.mean(recent, 0)
            recent.clear()
            print(f"{now - begin:6.0f}s step {step} done {done:.2f} loss {loss:.4f} "
                  f"psnr {-10 * math.log10(mse / 4):.2f} kl {kl:.2f}", flush=True)
        if rank == 0 and now - last_save > 120:
            last_save = now
            save(out, vae, average, test, args.bypass)
    if rank == 0:
        save(out, vae, average, test, args.bypass)


def save(out, vae, average, test, bypass):
    value, pictures = psnr(average, test)
    print(f"       test psnr {value:.2f} dB", flush=True)
    mean, std = latent_statistics(average)
    torch.save({"vae": vae.state_dict(), "average": average.state_dict(), "bypass": bypass,
                "latent_mean": mean, "latent_std": std}, out / "vae.tmp")
    os.replace(out / "vae.tmp", out / "vae.pt")
    pairs = [p for pair in zip(test, pictures) for p in pair]
    scenes.contact_sheet(pairs, 8).save(out / "vae.png")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="work")
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--batch", type=int, default=6, help="64x64 pictures per worker and step")
    parser.add_argument("--full-from", type=float, default=0.45, help="part of the run on 64x64 pictures")
    parser.add_argument("--kl", type=float, default=5e-5)
    parser.add_argument("--bypass", action=argparse.BooleanOptionalAction, default=True,
                        help="skip the residual blocks at full resolution")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--start-round", type=int, default=0, help="change it to draw other scenes when resuming")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a run of 20 seconds, to try the recipe")
    args = parser.parse_args()
    if args.quick:
        args.minutes = 1 / 3
    pathlib.Path(args.out).mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    vae, average = Autoencoder(), Autoencoder()
    average.load_state_dict(vae.state_dict())
    saved = pathlib.Path(args.out) / "vae.pt"
    if saved.exists():
        state = torch.load(saved)
        vae.load_state_dict(state["vae"])
        average.load_state_dict(state["average"])
    for net in (vae, average):
        net.to(memory_format=torch.channels_last)
    launch(train, args.workers, {"vae": vae, "average": average}, args)


if __name__ == "__main__":
    main()
