"""Train the text encoder and the UNet of the demo model on latents.

    python train_diffusion.py --merges clip_merges.txt.xz --out WORK --minutes 75

`WORK/vae.pt` is read; `WORK/diffusion.pt` is rewritten every few minutes and a
new run continues from it.  Every worker keeps a pool of encoded scenes, of
which a few are redrawn at each step; captions are worded anew every time a
scene is used.  The learning rate follows a cosine over `--minutes`.
"""

import argparse
import copy
import math
import os
import pathlib
import time

import numpy as np
import torch
import torch.nn.functional as F

import scenes
from diffusion import STEPS, alphas_cumprod, sample
from model import LATENT_SCALE, TEXT_WIDTH, Autoencoder, TextEncoder, UNet
from tokenizer import BOS, EOS, Tokenizer
from train_vae import set_bypass
from workers import launch

SHEET_PROMPTS = [
    "a red circle on a blue background",
    "a green square on a white background",
    "a yellow star on a black background",
    "a pink heart",
    "a purple triangle on the left on a yellow background",
    "an orange ring at the top on a gray background",
    "a small white diamond in the bottom right on a red background",
    "a large cyan cross on a brown background",
    "a red circle and a green square",
    "a blue star above a yellow ring on a white background",
    "black heart, pink background",
    "a blue square on a checkered white background",
]


class Captions:
    """Turns captions into rows of the compact token table.

    Row 0 stands for every token outside the captions' vocabulary.
    """

    def __init__(self, merges):
        self.tokenizer = Tokenizer(merges)
        used = {BOS, EOS}
        for word in scenes.captions_vocabulary():
            used.update(self.tokenizer.encode(word))
        self.token_ids = [-1] + sorted(used)
        self.rows = {t: i for i, t in enumerate(self.token_ids)}
        self.rows.pop(-1)

    def encode(self, text, rng=None):
        ids = self.tokenizer.padded(text)
        rows = [self.rows.get(i, 0) for i in ids]
        if rng is not None and rng.random() < 0.06:
            # An unknown word somewhere, so that unknown words do no harm.
            at = int(rng.integers(1, ids.index(EOS) + 1))
            rows = rows[:at] + [0] + rows[at:-1]
        return rows


def build(merges):
    captions = Captions(merges)
    return captions, TextEncoder(len(captions.token_ids)), UNet()


def load_vae(out):
    """The trained autoencoder, its latents scaled as SD 1.x expects them."""
    state = torch.load(pathlib.Path(out) / "vae.pt")
    vae = Autoencoder()
    vae.load_state_dict(state["average"])
    set_bypass(vae, state["bypass"])
    vae.fold_scale(state["latent_mean"], state["latent_std"])
    vae.requires_grad_(False)
    return vae.to(memory_format=torch.channels_last)


QUESTIONS = {
    "shape": scenes.SHAPES,
    "color": scenes.COLORS,
    "size": list(scenes.RADIUS),
    "place": list(scenes.POSITIONS) + list(scenes.RELATIONS),
    "other shape": [None] + scenes.SHAPES,
    "other color": [None] + scenes.COLORS,
    "background": [None] + scenes.COLORS,
    "pattern": ["plain"] + scenes.PATTERNS,
}


def answers(scene):
    """What a caption says about its scene, as one index per question."""
    first, *rest = scene["objects"]
    other = rest[0] if rest else {"shape": None, "color": None}
    said = [first["shape"], first["color"], first["size"], scene["relation"] or first["position"],
            other["shape"], other["color"], scene["bg"], scene["pattern"]]
    return [choices.index(a) for choices, a in zip(QUESTIONS.values(), said)]


class Reader(torch.nn.Module):
    """Reads the contents of a scene off the last token, during training only.

    It gives the text encoder a direct reason to understand captions, long
    before the UNet would ask for every detail.
    """

    def __init__(self, width):
        super().__init__()
        self.heads = torch.nn.ModuleList([torch.nn.Linear(width, len(c)) for c in QUESTIONS.values()])

    def forward(self, context, said):
        """Mean cross entropy, and the share of questions answered right."""
        logits = [head(context[:, -1]) for head in self.heads]
        loss = sum(F.cross_entropy(z, said[:, i]) for i, z in enumerate(logits)) / len(logits)
        right = sum((z.argmax(1) == said[:, i]).float().mean() for i, z in enumerate(logits)) / len(logits)
        return loss, right.item()


def focus_map(scene):
    """Weights of a scene's latent cells, with mean 1 and more of it on the objects.

    Weighing cells differently leaves the best prediction as it is, but shapes
    would otherwise be a small part of the error next to the background.
    """
    weights = np.full((16, 16), 1.0, np.float32)
    for obj in scene["objects"]:
        reach = obj["r"] * 1.15 + 6
        low_x, high_x = (np.clip(round((obj["cx"] + d) / 8), 0, 16) for d in (-reach, reach))
        low_y, high_y = (np.clip(round((obj["cy"] + d) / 8), 0, 16) for d in (-reach, reach))
        weights[low_y:high_y, low_x:high_x] = 5.0
    return weights / weights.mean()


class Latents:
    """A pool of encoded scenes."""

    def __init__(self, vae, rng, size, report):
        self.vae, self.rng = vae, rng
        self.scenes, self.mean, self.std = [], [], []
        begin = time.time()
        for i in range(-(-size // 8)):
            items, mean, std = self.draw(8)
            self.scenes += items
            self.mean.append(mean)
            self.std.append(std)
            if report and i % 25 == 0:
                print(f"pool {i * 8}/{size} {time.time() - begin:.0f}s", flush=True)
        self.mean, self.std = torch.cat(self.mean), torch.cat(self.std)

    @torch.no_grad()
    def draw(self, count):
        items = [scenes.random_scene(self.rng) for _ in range(count)]
        x = torch.from_numpy(np.stack([scenes.render(s) for s in items]).astype(np.float32) / 127.5 - 1)
        mean, logvar = self.vae.moments(x.permute(0, 3, 1, 2))
        return items, mean * LATENT_SCALE, torch.exp(0.5 * logvar) * LATENT_SCALE

    def refresh(self, count):
        items, mean, std = self.draw(count)
        for i, item in enumerate(items):
            at = int(self.rng.integers(len(self.scenes)))
            self.scenes[at], self.mean[at], self.std[at] = item, mean[i], std[i]

    def batch(self, count):
        at = self.rng.integers(len(self.scenes), size=count)
        z = self.mean[at] + self.std[at] * torch.randn(count, *self.mean.shape[1:])
        return [self.scenes[i] for i in at], z, torch.from_numpy(np.stack([focus_map(self.scenes[i]) for i in at]))


def disturbance(z, a):
    """Extra terms of the noise that make captions count and guidance safe.

    Even the noisiest step shows the mean of a flat picture, and the network
    would take the background from there.  A random constant per channel hides
    the mean, which leaves only the caption to tell it.  The other term makes
    latents look too contrasty for their step, as strong guidance does, and the
    network learns to lead them back.
    """
    count = len(z)
    level = torch.randn(count, z.shape[1], 1, 1) * 0.3 * (torch.rand(count, 1, 1, 1) < 0.4)
    excess = 2.0 * torch.rand(count, 1, 1, 1) * (torch.rand(count, 1, 1, 1) < 0.25)
    return level + z * (excess * (a / (1 - a)).sqrt()).clamp(max=0.7)


class Softened:
    """Targets under which strong guidance acts like weak guidance.

    With a caption the target is `share` of the way from the teacher's answer
    without caption to its answer with it; without caption it is the teacher's
    answer.  Guidance at scale s then acts like guidance at s * share.
    """

    def __init__(self, text, unet, empty, share):
        self.text, self.unet = copy.deepcopy(text), copy.deepcopy(unet)
        self.empty, self.share = torch.tensor([empty]), share

    @torch.no_grad()
    def __call__(self, x, t, rows):
        context = self.text(torch.cat([rows, self.empty]))
        without = context[-1:].expand(len(x), -1, -1)
        cond, uncond = self.unet(torch.cat([x, x]), torch.cat([t, t]), torch.cat([context[:-1], without])).chunk(2)
        # Rows without caption have cond == uncond.
        return uncond + self.share * (cond - uncond)


def train(rank, shared, args):
    rng = np.random.default_rng([args.seed, rank, args.start_round])
    torch.manual_seed(args.seed * 1000 + args.start_round * 10 + rank)
    out = pathlib.Path(args.out)
    captions = Captions(args.merges)
    text, unet = shared["text"], shared["unet"]
    vae = load_vae(out)
    pool = Latents(vae, rng, args.pool, rank == 0)
    if rank == 0:
        print(f"latent std {pool.mean.std():.3f} noise {pool.std.mean():.3f}", flush=True)

    ac = alphas_cumprod().float()
    # Errors are weighed as if the network predicted v, up to a limit; on the
    # noise alone the early sampling steps would count for almost nothing.
    weight = (1 / ac).clamp(max=args.weight_limit)
    weight = weight / weight.mean()
    parameters = list(text.parameters()) + list(unet.parameters())
    reader_parameters = list(shared["reader"].parameters())
    averages = list(shared["text_average"].parameters()) + list(shared["unet_average"].parameters())
    optimizer = torch.optim.AdamW(parameters + reader_parameters, lr=args.lr, betas=(0.9, 0.98), weight_decay=1e-3,
                                  fused=True)
    teacher = None
    if args.soften > 0:
        teacher = Softened(shared["text_average"], shared["unet_average"], captions.encode(""), args.soften)
    begin = last_log = last_save = last_sheet = time.time()
    step = 0
    total = args.minutes * 60
    bands = np.zeros((5, 2))
    while (done := (time.time() - begin) / total) < 1.0:
        rate = min(1.0, (step + 1) / args.warmup) * (0.5 + 0.5 * math.cos(math.pi * done)) + 0.005
        for group in optimizer.param_groups:
            group["lr"] = args.lr * rate
        pool.refresh(args.refresh)
        items, z, focus = pool.batch(args.batch)
        told = np.sort(rng.permutation(args.batch)[: round(args.batch * 0.9)])
        rows = [captions.encode(scenes.caption(s, rng) if i in told else "", rng) for i, s in enumerate(items)]
        rows = torch.tensor(rows)
        context = text(rows)
        # One step per slice of the schedule keeps the loss steady; the nearly
        # clean end, where little is left to decide, gets fewer.
        u = (torch.randperm(args.batch) + torch.rand(args.batch)) / args.batch
        t = (u**0.75 * STEPS).long().clamp(max=STEPS - 1)
        a = ac[t][:, None, None, None]
        noise = torch.randn_like(z) + disturbance(z, a)
        x = a.sqrt() * z + (1 - a).sqrt() * noise
        x = x.contiguous(memory_format=torch.channels_last)
        target = noise if teacher is None else teacher(x, t, rows)
        eps = unet(x, t, context)
        each = ((eps - target).square().mean(1) * focus).mean((1, 2))
        said = torch.tensor([answers(items[i]) for i in told])
        reading, understood = shared["reader"](context[told], said)
        loss = (each * weight[t]).mean() + args.reading * reading
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        if rank == 0:
            with torch.no_grad():
                decay = min(args.ema, (step + args.warm_average) / (step + args.warm_average + 10))
                torch._foreach_lerp_(averages, parameters, 1 - decay)
        band = (t // 200).numpy()
        np.add.at(bands[:, 0], band, (each.detach() / ac[t]).numpy())
        np.add.at(bands[:, 1], band, 1)
        now = time.time()
        if rank == 0 and (now - last_log > 30 or step <= 2):
            last_log = now
            shown = " ".join(f"{a / max(b, 1):.4f}" for a, b in bands)
            bands[:] = 0
            print(f"{now - begin:6.0f}s step {step} done {done:.3f} v-loss by fifths {shown} "
                  f"read {understood:.2f}", flush=True)
        if rank == 0 and now - last_save > args.save_every:
            last_save = now
            save(out / "diffusion.pt", shared, captions)
        if rank == 0 and now - last_sheet > args.sheet_every:
            last_sheet = now
            sheet(out / "progress.png", captions, shared["text_average"], shared["unet_average"], vae)
    if rank == 0:
        save(out / "diffusion.pt", shared, captions)
        sheet(out / "progress.png", captions, shared["text_average"], shared["unet_average"], vae)


def save(path, shared, captions):
    state = {name: net.state_dict() for name, net in shared.items()}
    state["token_ids"] = captions.token_ids
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


@torch.no_grad()
def sheet(path, captions, text, unet, vae):
    context = text(torch.tensor([captions.encode(p) for p in SHEET_PROMPTS]))
    empty = text(torch.tensor([captions.encode("")]))
    pictures = []
    for scale in (1.0, 3.0, 7.0):
        pictures += sample(unet, vae, context, empty, scale)
    scenes.contact_sheet(pictures, len(SHEET_PROMPTS)).save(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--merges", required=True, help="merge list of the CLIP tokenizer")
    parser.add_argument("--out", default="work")
    parser.add_argument("--minutes", type=float, default=75)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--batch", type=int, default=16, help="scenes per worker and step")
    parser.add_argument("--pool", type=int, default=1000, help="encoded scenes per worker")
    parser.add_argument("--refresh", type=int, default=1, help="scenes redrawn per worker and step")
    parser.add_argument("--ema", type=float, default=0.998)
    parser.add_argument("--warmup", type=int, default=300, help="steps of rising learning rate")
    parser.add_argument("--warm-average", type=int, default=0, help="treat the average as this many steps old")
    parser.add_argument("--reading", type=float, default=0.1, help="weight of the reader's loss")
    parser.add_argument("--weight-limit", type=float, default=60.0)
    parser.add_argument("--soften", type=float, default=0.0,
                        help="learn from the saved average, with this share of the caption's effect")
    parser.add_argument("--save-every", type=float, default=180)
    parser.add_argument("--sheet-every", type=float, default=800)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--start-round", type=int, default=0, help="change it to draw other scenes when resuming")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a run of 20 seconds, to try the recipe")
    args = parser.parse_args()
    if args.quick:
        args.minutes, args.pool = 1 / 3, 64
    torch.manual_seed(args.seed)
    captions, text, unet = build(args.merges)
    _, text_average, unet_average = build(args.merges)
    text_average.load_state_dict(text.state_dict())
    unet_average.load_state_dict(unet.state_dict())
    shared = {"text": text, "unet": unet, "text_average": text_average, "unet_average": unet_average,
              "reader": Reader(TEXT_WIDTH)}
    saved = pathlib.Path(args.out) / "diffusion.pt"
    if saved.exists():
        state = torch.load(saved)
        for name, net in shared.items():
            net.load_state_dict(state.get(name, net.state_dict()))
        if args.soften > 0:
            text.load_state_dict(state["text_average"])
            unet.load_state_dict(state["unet_average"])
    for name in ("unet", "unet_average"):
        shared[name].to(memory_format=torch.channels_last)
    launch(train, args.workers, shared, args)


if __name__ == "__main__":
    main()
