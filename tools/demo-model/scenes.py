"""Synthetic scenes for the demo model: simple shapes on a background.

A scene is a small dictionary (see `random_scene`).  `render` turns it into a
128x128 RGB picture, and `caption` words it as a prompt.  Several wordings have
the same meaning, so one scene can be shown with many captions.

Everything is driven by a `numpy.random.Generator`, so a seed fixes the data.
"""

import math

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

SIZE = 128
# Shapes are drawn this many times larger and then averaged down.
SUPERSAMPLE = 4

PALETTE = {
    "red": (220, 40, 40),
    "green": (40, 165, 70),
    "blue": (45, 85, 215),
    "yellow": (245, 215, 50),
    "orange": (245, 135, 30),
    "purple": (135, 55, 185),
    "pink": (245, 145, 190),
    "cyan": (60, 205, 225),
    "brown": (125, 75, 40),
    "white": (248, 248, 248),
    "black": (20, 20, 24),
    "gray": (130, 132, 136),
}
COLORS = list(PALETTE)

SHAPES = ["circle", "square", "triangle", "star", "heart", "diamond", "cross", "ring"]

# Soft colours for a background that the caption does not name.
SOFT_BACKGROUNDS = [
    (236, 231, 220),
    (222, 232, 240),
    (226, 238, 224),
    (240, 226, 232),
    (231, 226, 242),
    (176, 190, 202),
    (96, 108, 128),
]

# Direction of each position: -1, 0 or 1 along x (right) and y (down).
POSITIONS = {
    "center": (0, 0),
    "left": (-1, 0),
    "right": (1, 0),
    "top": (0, -1),
    "bottom": (0, 1),
    "top left": (-1, -1),
    "top right": (1, -1),
    "bottom left": (-1, 1),
    "bottom right": (1, 1),
}

PATTERNS = ["striped", "checkered", "dotted", "gradient"]

# Half the height of a shape, in pixels.
RADIUS = {"small": 15.0, "medium": 25.0, "large": 40.0}
LARGE_OFF_CENTER = 31.0
EDGE_MARGIN = 9.0

# (relation, caption words, direction from the second object to the first).
RELATIONS = {
    "and": (-1, 0),
    "left of": (-1, 0),
    "right of": (1, 0),
    "above": (0, -1),
    "below": (0, 1),
}


def color_distance(a, b):
    return math.dist(a, b)


def outline(shape, cx, cy, r):
    """Polygon of a shape whose half height is about `r`, centred at (cx, cy)."""
    if shape in ("circle", "ring"):
        angles = np.linspace(0, 2 * math.pi, 96, endpoint=False)
        pts = np.stack([np.cos(angles), np.sin(angles)], 1)
    elif shape == "square":
        pts = np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)]) * 0.92
    elif shape == "diamond":
        pts = np.array([(0, -1.08), (0.92, 0), (0, 1.08), (-0.92, 0)])
    elif shape == "triangle":
        pts = np.array([(0, -0.98), (1.08, 0.92), (-1.08, 0.92)])
    elif shape == "cross":
        w = 0.36
        pts = np.array([(-w, -1), (w, -1), (w, -w), (1, -w), (1, w), (w, w),
                        (w, 1), (-w, 1), (-w, w), (-1, w), (-1, -w), (-w, -w)])
    elif shape == "star":
        angles = -math.pi / 2 + np.arange(10) * math.pi / 5
        radii = np.where(np.arange(10) % 2 == 0, 1.14, 0.48)
        pts = np.stack([radii * np.cos(angles), radii * np.sin(angles) + 0.1], 1)
    elif shape == "heart":
        t = np.linspace(0, 2 * math.pi, 96, endpoint=False)
        x = 16 * np.sin(t) ** 3
        y = -(13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t))
        pts = np.stack([x / 15.5, (y - 2.5) / 14.5], 1)
    else:
        raise ValueError(f"unknown shape {shape!r}")
    return pts * r + np.array([cx, cy])


def shape_mask(obj):
    """Coverage of an object per pixel, 0..1, as a (SIZE, SIZE) array."""
    s = SUPERSAMPLE
    image = Image.new("L", (SIZE * s, SIZE * s), 0)
    draw = ImageDraw.Draw(image)
    cx, cy, r = obj["cx"] * s, obj["cy"] * s, obj["r"] * s
    draw.polygon([tuple(p) for p in outline(obj["shape"], cx, cy, r)], fill=255)
    if obj["shape"] == "ring":
        draw.polygon([tuple(p) for p in outline("circle", cx, cy, r * 0.55)], fill=0)
    return image.reduce(s)


def lighter(rgb):
    """The second tone of a patterned background."""
    rgb = np.asarray(rgb, np.float32)
    if rgb.mean() > 200:
        return rgb * 0.78
    return rgb + (255 - rgb) * 0.42


def background(scene):
    rgb = np.asarray(scene["bg_rgb"], np.float32)
    flat = np.broadcast_to(rgb, (SIZE, SIZE, 3)).copy()
    pattern = scene["pattern"]
    y, x = np.mgrid[0:SIZE, 0:SIZE]
    if pattern == "gradient":
        t = (y / (SIZE - 1.0))[..., None].astype(np.float32)
        return flat * t + lighter(rgb) * (1 - t)
    if pattern == "striped":
        second = (y // 16) % 2 == 1
    elif pattern == "checkered":
        second = ((x // 16) + (y // 16)) % 2 == 1
    elif pattern == "dotted":
        d = np.hypot((x % 16) - 7.5, (y % 16) - 7.5)
        cover = np.clip(4.6 - d, 0, 1)[..., None].astype(np.float32)
        return flat * (1 - cover) + lighter(rgb) * cover
    else:
        # A plain background still gets a faint light from above.
        shade = np.linspace(1.03, 0.95, SIZE, dtype=np.float32)[:, None, None]
        return np.clip(flat * shade, 0, 255)
    flat[second] = lighter(rgb)
    return flat


def render(scene):
    """Draw a scene as an uint8 array of shape (SIZE, SIZE, 3)."""
    canvas = background(scene)
    for obj in scene["objects"]:
        mask_image = shape_mask(obj)
        shadow = np.asarray(mask_image.filter(ImageFilter.GaussianBlur(3)), np.float32)
        shadow = np.roll(shadow, (3, 1), (0, 1))[..., None] / 255 * 0.22
        canvas = canvas * (1 - shadow)
        mask = np.asarray(mask_image, np.float32)[..., None] / 255
        rows = (np.arange(SIZE, dtype=np.float32) - obj["cy"]) / obj["r"]
        shade = (1.0 - 0.06 * np.clip(rows, -1, 1))[:, None, None]
        fill = np.clip(np.asarray(obj["rgb"], np.float32) * shade, 0, 255)
        canvas = canvas * (1 - mask) + fill * mask
    return np.clip(canvas + 0.5, 0, 255).astype(np.uint8)


def jitter(rng, rgb, amount=5):
    return tuple(int(v) for v in np.clip(np.asarray(rgb) + rng.integers(-amount, amount + 1, 3), 0, 255))


def pick(rng, items, weights=None):
    if weights is not None:
        weights = np.asarray(weights, np.float64) / np.sum(weights)
    return items[int(rng.choice(len(items), p=weights))]


def random_scene(rng, two_objects=0.12):
    """Draw the contents of a scene.

    Keys: `objects` (shape, color, size, position, centre, radius, rgb),
    `relation` (None for one object), `bg` (a colour name or None), `bg_rgb`,
    `pattern` ("plain" or one of PATTERNS).
    """
    bg = pick(rng, COLORS) if rng.random() < 0.72 else None
    pattern = "plain"
    if bg is not None and rng.random() < 0.09:
        pattern = pick(rng, PATTERNS)
    two = rng.random() < two_objects
    choices = [c for c in COLORS if c != bg]
    colors = [str(c) for c in rng.choice(choices, 2 if two else 1, replace=False)]
    if bg is not None:
        bg_rgb = jitter(rng, PALETTE[bg])
    else:
        far = [s for s in SOFT_BACKGROUNDS
               if all(color_distance(s, PALETTE[c]) > 60 for c in colors)]
        bg_rgb = jitter(rng, pick(rng, far, [0.5 if sum(s) < 400 else 1.0 for s in far]))
    objects = []
    relation = None
    if two:
        relation = pick(rng, list(RELATIONS), [4, 1, 1, 1, 1])
        dx, dy = RELATIONS[relation]
        for i, color in enumerate(colors):
            sign = 1 if i == 0 else -1
            shape = pick(rng, SHAPES)
            objects.append({
                "shape": shape, "color": color, "size": "medium", "position": None,
                "cx": 64 + sign * dx * 30 + rng.uniform(-2, 2),
                "cy": 64 + sign * dy * 30 + rng.uniform(-2, 2),
                "r": 22 * rng.uniform(0.95, 1.05), "rgb": jitter(rng, PALETTE[color]),
            })
    else:
        size = pick(rng, ["small", "medium", "large"], [1, 2, 1])
        position = pick(rng, list(POSITIONS), [8, 3, 3, 3, 3, 1.5, 1.5, 1.5, 1.5])
        dx, dy = POSITIONS[position]
        r = RADIUS[size]
        if position != "center" and size == "large":
            r = LARGE_OFF_CENTER
        r *= rng.uniform(0.95, 1.05)
        offset = min(34.0, SIZE / 2 - EDGE_MARGIN - r)
        objects.append({
            "shape": pick(rng, SHAPES), "color": colors[0], "size": size, "position": position,
            "cx": 64 + dx * offset + rng.uniform(-2, 2),
            "cy": 64 + dy * offset + rng.uniform(-2, 2),
            "r": r, "rgb": jitter(rng, PALETTE[colors[0]]),
        })
    return {"objects": objects, "relation": relation, "bg": bg, "bg_rgb": bg_rgb, "pattern": pattern}


def article(words):
    return ("an " if words[0] in "aeiou" else "a ") + words


def caption(scene, rng):
    """Word a scene as a prompt; `rng` picks among wordings of one meaning."""
    short = rng.random() < 0.3  # "red circle, blue background"
    names = []
    for obj in scene["objects"]:
        color = obj["color"]
        if color == "gray" and rng.random() < 0.3:
            color = "grey"
        words = f"{color} {obj['shape']}"
        if obj["size"] == "large":
            words = pick(rng, ["large ", "big "], [2, 1]) + words
        elif obj["size"] == "small":
            words = "small " + words
        names.append(words if short else article(words))
    if scene["relation"] is None:
        text = names[0]
        position = scene["objects"][0]["position"]
        where = ""
        if position == "center":
            if rng.random() < 0.25:
                where = pick(rng, [" in the center", " in the middle"])
        elif position in ("left", "right"):
            where = pick(rng, [f" on the {position}", f" on the {position} side", f" at the {position}"], [4, 1, 1])
        elif position in ("top", "bottom"):
            where = pick(rng, [f" at the {position}", f" on the {position}"], [4, 1])
        else:
            where = pick(rng, [f" in the {position}", f" in the {position} corner", f" at the {position}"], [2, 2, 1])
        text += where
    else:
        link = scene["relation"]
        if link == "left of" or link == "right of":
            link = pick(rng, [link, f"to the {link}"])
        text = f"{names[0]} {link} {names[1]}"
    if scene["bg"] is not None:
        color = scene["bg"]
        if color == "gray" and rng.random() < 0.3:
            color = "grey"
        words = f"{color} background"
        if scene["pattern"] != "plain":
            words = f"{scene['pattern']} {words}"
            if scene["pattern"] == "gradient" and rng.random() < 0.5:
                words = f"{color} gradient background"
        if short:
            text += ", " + words
        else:
            text += pick(rng, [f" on {article(words)}", f" with {article(words)}", f", {words}"], [5, 1, 1])
    if rng.random() < 0.15:
        text = pick(rng, ["a picture of ", "an image of ", "a drawing of ", "a photo of "]) + text
    return text


def captions_vocabulary():
    """Every word and sign that `caption` can emit, for the token table."""
    words = set("a an the of on in at with to and picture image drawing photo , . "
                "left right top bottom center middle corner side above below "
                "small large big background grey".split())
    words.update(COLORS)
    words.update(SHAPES)
    words.update(PATTERNS)
    return sorted(words)


def dataset(count, seed):
    """`count` scenes with pictures, as (list of scenes, uint8 array)."""
    rng = np.random.default_rng(seed)
    scenes = [random_scene(rng) for _ in range(count)]
    return scenes, np.stack([render(s) for s in scenes])


def contact_sheet(images, columns):
    """Tile equal-sized uint8 pictures with a small gap."""
    h, w, _ = images[0].shape
    rows = -(-len(images) // columns)
    sheet = np.full((rows * (h + 4) + 4, columns * (w + 4) + 4, 3), 255, np.uint8)
    for i, image in enumerate(images):
        y, x = 4 + (i // columns) * (h + 4), 4 + (i % columns) * (w + 4)
        sheet[y:y + h, x:x + w] = image
    return Image.fromarray(sheet)


if __name__ == "__main__":
    import sys

    demo_rng = np.random.default_rng(0)
    demo = [random_scene(demo_rng) for _ in range(48)]
    for item in demo:
        print(caption(item, demo_rng))
    contact_sheet([render(s) for s in demo], 8).save(sys.argv[1] if len(sys.argv) > 1 else "scenes.png")
