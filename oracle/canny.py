"""Edges of pictures by Canny's method, computed with scipy in whole numbers.

Luma as Pillow's mode L has it, a 5x5 Gaussian of deviation 1.4 (the usual whole-number kernel, times 159), Sobel gradients, the greatest along the
nearest of four directions, and hysteresis: an edge begins at 0.08 of the strongest gradient and goes on with what has 0.08 of that. Beyond the
picture its edge goes on.
"""

import numpy as np
import torch
from PIL import Image
from scipy import ndimage

import fixture
import sd1_pictures

GAUSS = np.array([[2, 4, 5, 4, 2], [4, 9, 12, 9, 4], [5, 12, 15, 12, 5], [4, 9, 12, 9, 4], [2, 4, 5, 4, 2]], dtype=np.int64)
THRESHOLD = 0.08


def canny(rgb):
    grey = np.asarray(Image.fromarray(rgb).convert("L"), dtype=np.int64)
    smooth = ndimage.correlate(grey, GAUSS, mode="nearest")
    gx, gy = (ndimage.sobel(smooth, axis=axis, mode="nearest", output=np.int64) for axis in (1, 0))
    strength = gx * gx + gy * gy
    angle = np.degrees(np.arctan2(gy, gx)) % 180
    # 0: across, 1: down and across, 2: down, 3: down and back.
    direction = np.floor((angle + 22.5) / 45).astype(int) % 4
    padded = np.pad(strength, 1)
    greatest = strength > 0
    for d, (dy, dx) in enumerate([(0, 1), (1, 1), (1, 0), (1, -1)]):
        here = direction == d
        for sign in (1, -1):
            y, x = 1 + sign * dy, 1 + sign * dx
            beside = padded[y:y + strength.shape[0], x:x + strength.shape[1]]
            greatest &= ~here | (beside <= strength)
    begins = THRESHOLD * THRESHOLD * strength.max()
    goes_on = THRESHOLD * THRESHOLD * begins
    weak = greatest & (strength >= goes_on)
    labels, _ = ndimage.label(weak, structure=np.ones((3, 3)))
    strong = np.unique(labels[weak & (strength >= begins)])
    return np.where(np.isin(labels, strong) & weak, 255, 0).astype(np.uint8)


def main():
    rng = np.random.default_rng(261)
    y, x = np.mgrid[:56, :48]
    disc = np.where((x - 20) ** 2 + (y - 30) ** 2 < 190, 220, 40)
    soft = np.clip(disc + rng.integers(-3, 4, disc.shape), 0, 255)
    noise = rng.integers(0, 256, (17, 23, 3))
    pictures = {
        "shapes": sd1_pictures.picture().numpy(), "disc": np.stack([disc, soft, 255 - disc], axis=-1), "noise": noise, "line": np.tile(np.where(np.arange(9) == 4, 255, 0)[None, :, None], (1, 1, 3)),
    }
    inputs, outputs = {}, {}
    for name, rgb in pictures.items():
        rgb = np.ascontiguousarray(rgb.astype(np.uint8))
        inputs[name], outputs[name] = torch.from_numpy(rgb), torch.from_numpy(canny(rgb))
        print(name, f"{(outputs[name] > 0).double().mean().item():.1%} edges")
    sizes = {name: [value.shape[1], value.shape[0]] for name, value in inputs.items()}
    fixture.save("canny", "canny.py", f"scipy {fixture.version('scipy')} ndimage, Pillow {fixture.version('pillow')}", {"sizes": sizes}, inputs=inputs, outputs=outputs)


if __name__ == "__main__":
    main()
