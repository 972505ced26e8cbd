"""Generate pictures with an exported file and measure whether they show the prompt.

    python evaluate.py --model demo.safetensors --merges clip_merges.txt.xz --scales 3 5 7

Rules, for a 128x128 picture (all colours are RGB, 0..255):

1. Background colour: per channel, the median over the border frame 6 pixels wide.
2. d(p) is the Euclidean RGB distance of pixel p to the background colour.
   P is the 99th percentile of d.  If P < 40 there is no object.
3. Fill colour: per channel, the median over the pixels with d > 0.75 * P.
4. s(p) = <p - background, fill - background> / |fill - background|^2.
   The mask is s > 0.5; the object is its largest 4-connected component.
5. Colour names: the nearest palette entry, for fill and background.
6. Position: the centre of the object's bounding box.  More than 12 pixels left
   (right) of x = 64 is "left" ("right"), more than 12 above (below) y = 64 is
   "top" ("bottom"), neither is "center", both make a corner.
7. Shape: the mask inside the bounding box is compared with the outline of each
   shape, scaled to the same bounding box.  Both are read at the centres of a
   32x32 grid over the box; the shape with the highest intersection over union
   wins, and it must reach 0.60.

The outlines of rule 7, x to the right and y down, are `scenes.outline` at
radius 1.  Simple numbers tell the shapes apart as well.  "extent" is the share
of the bounding box that the object covers, holes not counted as covered;
"hole" is the enclosed background as a share of object plus hole; w(f) is the
covered share of the box width in the grid row at fraction f of the height.

    shape      extent        further rule
    ring       0.42 - 0.68   hole > 0.15 (all others: hole < 0.05)
    square     > 0.86
    circle     0.70 - 0.86   |w(.15) - w(.85)| < 0.25
    heart      0.58 - 0.76   w(.15) > 0.47 and w(.25) - w(.85) > 0.35
    cross      0.44 - 0.68   w(.5) > 0.90 and w(.25) + w(.75) < 0.88
    diamond    0.42 - 0.68   w(.5) > 0.90, w(.25) + w(.75) > 0.88, both w(.15) and w(.85) < 0.50
    triangle   0.42 - 0.66   w(.85) - w(.15) > 0.50 and w(.9) > 0.80
    star       < 0.56        w(.25) < 0.45, w(.4) > 0.50, w(.9) < 0.75

A picture is right when shape, fill, background and position are all right.
"""

import argparse
import math

import numpy as np
import torch
from PIL import Image, ImageDraw
from safetensors import safe_open
from scipy import ndimage

import scenes
from diffusion import sample
from model import PREFIXES, VOCABULARY, Autoencoder, TextEncoder, UNet
from tokenizer import Tokenizer

GRID = 32


def load(path):
    """The three networks of an exported file, in float32."""
    text, unet, vae = TextEncoder(VOCABULARY), UNet(), Autoencoder()
    with safe_open(path, framework="pt") as f:
        tensors = {k: f.get_tensor(k).float() for k in f.keys()}
    for part, net in (("text", text), ("unet", unet), ("vae", vae)):
        prefix = PREFIXES[part]
        own = {k[len(prefix):]: tensors.pop(k) for k in list(tensors) if k.startswith(prefix)}
        net.load_state_dict(own)
        net.requires_grad_(False)
    assert not tensors, f"unexpected tensors: {list(tensors)[:3]}"
    return text, unet, vae


def template(shape):
    """A shape's outline scaled to fill the grid, read at the cell centres."""
    fine = 16
    parts = [np.asarray(scenes.outline(shape, 0, 0, 1))]
    low, high = parts[0].min(0), parts[0].max(0)
    if shape == "ring":
        parts.append(np.asarray(scenes.outline("circle", 0, 0, 0.55)))
    image = Image.new("L", (GRID * fine, GRID * fine), 0)
    draw = ImageDraw.Draw(image)
    for i, polygon in enumerate(parts):
        points = (polygon - low) / (high - low) * GRID * fine
        draw.polygon([tuple(p) for p in points], fill=255 if i == 0 else 0)
    return np.asarray(image)[fine // 2::fine, fine // 2::fine] > 127


TEMPLATES = {shape: template(shape) for shape in scenes.SHAPES}


def nearest_color(rgb):
    return min(scenes.PALETTE, key=lambda name: math.dist(scenes.PALETTE[name], rgb))


def measure(picture):
    """What a picture shows, as a dictionary, or None without an object."""
    image = picture.astype(np.float64)
    frame = np.ones(image.shape[:2], bool)
    frame[6:-6, 6:-6] = False
    bg = np.median(image[frame], axis=0)
    d = np.sqrt(((image - bg) ** 2).sum(-1))
    peak = np.percentile(d, 99)
    if peak < 40:
        return None
    fill = np.median(image[d > 0.75 * peak], axis=0)
    axis = fill - bg
    mask = ((image - bg) @ axis) / (axis @ axis) > 0.5
    labels, count = ndimage.label(mask)
    if count == 0:
        return None
    sizes = ndimage.sum(mask, labels, range(1, count + 1))
    largest = labels == 1 + int(np.argmax(sizes))
    ys, xs = np.nonzero(largest)
    x0, x1, y0, y1 = xs.min(), xs.max() + 1, ys.min(), ys.max() + 1
    area = int(largest.sum())
    hole = int(ndimage.binary_fill_holes(largest).sum()) - area
    centers = (np.arange(GRID) + 0.5) / GRID
    rows = np.minimum((y0 + centers * (y1 - y0)).astype(int), y1 - 1)
    cols = np.minimum((x0 + centers * (x1 - x0)).astype(int), x1 - 1)
    grid = largest[rows][:, cols]
    scores = {s: (grid & t).sum() / (grid | t).sum() for s, t in TEMPLATES.items()}
    shape = max(scores, key=scores.get)
    dx, dy = (x0 + x1) / 2 - 64, (y0 + y1) / 2 - 64
    vertical = "top" if dy < -12 else "bottom" if dy > 12 else ""
    horizontal = "left" if dx < -12 else "right" if dx > 12 else ""
    width = {f: float(grid[min(int(f * GRID), GRID - 1)].mean()) for f in (0.15, 0.25, 0.4, 0.5, 0.75, 0.85, 0.9)}
    return {
        "shape": shape if scores[shape] >= 0.60 else "unclear", "score": float(scores[shape]),
        "color": nearest_color(fill), "background": nearest_color(bg),
        "position": f"{vertical} {horizontal}".strip() or "center",
        "extent": area / ((x1 - x0) * (y1 - y0)), "hole": hole / (area + hole), "width": width,
        "size": max(x1 - x0, y1 - y0),
    }


def shape_by_numbers(m):
    """The table of the module description; the first row that holds wins."""
    e, w = m["extent"], m["width"]
    if m["hole"] > 0.15:
        return "ring" if 0.42 <= e <= 0.68 else "unclear"
    if m["hole"] >= 0.05:
        return "unclear"
    if e > 0.86:
        return "square"
    if 0.70 <= e and abs(w[0.15] - w[0.85]) < 0.25:
        return "circle"
    if 0.58 <= e <= 0.76 and w[0.15] > 0.47 and w[0.25] - w[0.85] > 0.35:
        return "heart"
    if 0.44 <= e <= 0.68 and w[0.5] > 0.9 and w[0.25] + w[0.75] < 0.88:
        return "cross"
    if 0.42 <= e <= 0.68 and w[0.5] > 0.9 and w[0.25] + w[0.75] > 0.88 and max(w[0.15], w[0.85]) < 0.5:
        return "diamond"
    if 0.42 <= e <= 0.66 and w[0.85] - w[0.15] > 0.5 and w[0.9] > 0.8:
        return "triangle"
    if e < 0.56 and w[0.25] < 0.45 and w[0.4] > 0.5 and w[0.9] < 0.75:
        return "star"
    return "unclear"


def prompts(count):
    """Test prompts with what they ask for: shapes, colours and positions in turn."""
    rng = np.random.default_rng(2024)
    out = []
    positions = ["center", "left", "center", "right", "center", "top", "center", "bottom",
                 "top left", "center", "bottom right", "center", "top right", "bottom left"]
    for i in range(count):
        shape = scenes.SHAPES[i % len(scenes.SHAPES)]
        color = scenes.COLORS[(i * 5 + i // 12) % len(scenes.COLORS)]
        others = [c for c in scenes.COLORS if scenes.color_distance(scenes.PALETTE[c], scenes.PALETTE[color]) > 100]
        bg = others[int(rng.integers(len(others)))]
        position = positions[i % len(positions)]
        words = f"{scenes.article(color)} {shape}"
        if position in ("left", "right"):
            words += f" on the {position}"
        elif position in ("top", "bottom"):
            words += f" at the {position}"
        elif position != "center":
            words += f" in the {position}"
        words += f" on {scenes.article(bg)} background"
        out.append((words, {"shape": shape, "color": color, "background": bg, "position": position}))
    return out


def score(pictures, wanted, verbose=False):
    """Shares of right answers per question, and of pictures with all of them right."""
    keys = ["shape", "color", "background", "position"]
    right = {k: 0 for k in keys + ["all", "shape by numbers"]}
    for picture, (words, want) in zip(pictures, wanted):
        m = measure(picture)
        if m is None:
            if verbose:
                print(f"  nothing found: {words}")
            continue
        wrong = [k for k in keys if m[k] != want[k]]
        for k in keys:
            right[k] += k not in wrong
        right["all"] += not wrong
        right["shape by numbers"] += shape_by_numbers(m) == want["shape"]
        if wrong and verbose:
            print(f"  {words}: got " + ", ".join(f"{k} {m[k]}" for k in wrong) + f" (score {m['score']:.2f})")
    return {k: v / len(wanted) for k, v in right.items()}


def check_rules(count=800):
    """The rules must hold on drawn scenes before they may judge generated ones."""
    rng = np.random.default_rng(99)
    pictures, wanted = [], []
    while len(pictures) < count:
        scene = scenes.random_scene(rng, two_objects=0.0)
        obj = scene["objects"][0]
        if scene["bg"] is None or scene["pattern"] != "plain":
            continue
        pictures.append(scenes.render(scene))
        wanted.append((scenes.caption(scene, rng), {"shape": obj["shape"], "color": obj["color"],
                                                    "background": scene["bg"], "position": obj["position"]}))
    return score(pictures, wanted, verbose=True)


@torch.no_grad()
def encode(text, tokenizer, words):
    return text(torch.tensor([tokenizer.padded(w) for w in words]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo.safetensors")
    parser.add_argument("--merges", help="merge list of the CLIP tokenizer")
    parser.add_argument("--scales", type=float, nargs="+", default=[7.0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--count", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sheet", help="where to save the pictures, as one PNG per scale (the name takes a %%s)")
    parser.add_argument("--rules", action="store_true", help="only try the rules on drawn scenes")
    args = parser.parse_args()
    torch.set_num_threads(2)
    if args.rules:
        print(check_rules())
        return
    text, unet, vae = load(args.model)
    # A silent block costs time and changes nothing.
    for block in list(vae.encoder.down[0].block) + list(vae.decoder.up[0].block):
        block.bypass = not block.conv2.weight.any()
    tokenizer = Tokenizer(args.merges)
    wanted = prompts(args.count)
    context = encode(text, tokenizer, [w for w, _ in wanted])
    empty = encode(text, tokenizer, [""])
    for scale in args.scales:
        pictures = sample(unet, vae, context, empty, scale, args.steps, args.seed)
        print(f"scale {scale:g}, {args.steps} steps:")
        result = score(pictures, wanted, verbose=True)
        print("  " + ", ".join(f"{k} {100 * v:.0f} %" for k, v in result.items()), flush=True)
        if args.sheet:
            scenes.contact_sheet(pictures, 12).save(args.sheet.replace("%s", f"{scale:g}"))


if __name__ == "__main__":
    main()
