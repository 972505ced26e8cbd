"""Latents resized as a second, larger pass begins with them, and masks blurred.

References: `torch.nn.functional.interpolate` in f64; `scipy.ndimage.gaussian_filter` with the kernel of OpenCV's `GaussianBlur` for the
sizes that A1111's web UI asks it for, and its edges.
"""

import numpy as np
import scipy
import torch
from scipy.ndimage import gaussian_filter

import fixture

MODES = {
    "latent": dict(mode="bilinear"),
    "latent_nearest": dict(mode="nearest"),
    "latent_nearest_exact": dict(mode="nearest-exact"),
    "latent_antialiased": dict(mode="bilinear", antialias=True),
    "latent_bicubic": dict(mode="bicubic"),
    "latent_bicubic_antialiased": dict(mode="bicubic", antialias=True),
}
SIZES = [(12, 18), (9, 14), (7, 7), (4, 5)]


def main():
    latent = fixture.randn(501, 1, 4, 6, 9)
    outputs = {}
    for name, how in MODES.items():
        for h, w in SIZES:
            outputs[f"{name}.{h}x{w}"] = torch.nn.functional.interpolate(latent, (h, w), **how)
    fixture.save(
        "resample", "resample.py", f"torch {torch.__version__.split('+')[0]} interpolate", dict(sizes=SIZES, modes=MODES), inputs={"latent": latent.float()}, outputs=outputs,
    )
    mask = np.zeros((20, 31))
    mask[4:11, 3:9], mask[15, 25], mask[:, 30] = 255, 255, 255
    blurred = {}
    for sigma in (1, 4, 9):
        radius = int(2.5 * sigma + 0.5)
        # `mirror` repeats no edge value, as OpenCV's default does.
        blurred[f"blur.{sigma}"] = torch.from_numpy(gaussian_filter(mask, sigma, mode="mirror", radius=radius)).float()
    fixture.save(
        "mask_blur", "resample.py", f"scipy {scipy.__version__} gaussian_filter", dict(sigmas=[1, 4, 9], width=31, height=20), inputs={"mask": torch.from_numpy(mask).to(torch.uint8)}, outputs=blurred,
    )


if __name__ == "__main__":
    main()
