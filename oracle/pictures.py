"""Pictures that requests bring along: resizing to cover a size and cropping the middle, stretching, masks.

Reference: diffusers' VaeImageProcessor, which resizes with Pillow's Lanczos filter: columns first, then rows, as every Pillow before 13 does it. Later
ones choose the order by size; each axis apart is the same in all.
"""

import numpy as np
import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image

import fixture

SOURCES = {"wide": (53, 37), "tall": (24, 61), "large": (150, 130), "dot": (1, 1)}
SIZES = [(64, 64), (16, 40), (53, 37), (24, 8)]


def picture(name, channels):
    width, height = SOURCES[name]
    values = (fixture.grid(f"picture.{name}.{channels}", width * height * channels) + 1024) // 8
    x = np.arange(width)[None, :, None]
    # Noise on one half, flat areas with edges on the other, so that overshoot is clipped.
    values = values.reshape(height, width, channels)
    values = np.where(x < width // 2, values, np.where((x // 5) % 2 == 0, 255, 3))
    return torch.from_numpy(np.ascontiguousarray(values).astype(np.uint8))


def columns_first(resize):
    """`Image.resize` in two calls, which fixes the order."""
    def wrapper(self, size, resample=None, **rest):
        return resize(resize(self, (size[0], self.height), resample, **rest), size, resample, **rest)
    return wrapper


def main():
    Image.Image.resize = columns_first(Image.Image.resize)
    processor = VaeImageProcessor(resample="lanczos")
    masks = VaeImageProcessor(resample="lanczos", do_normalize=False, do_binarize=True, do_convert_grayscale=True)
    inputs, outputs = {}, {}
    for name in SOURCES:
        pixels, grey = picture(name, 3), picture(name, 1)
        inputs[f"{name}.rgb"], inputs[f"{name}.grey"] = pixels, grey
        for width, height in SIZES:
            for key, mode in (("crop", "crop"), ("stretch", "default")):
                image = processor.resize(Image.fromarray(pixels.numpy()), height, width, mode)
                outputs[f"{name}.{width}x{height}.{key}"] = torch.from_numpy(np.array(image))
            mask = masks.resize(Image.fromarray(grey.numpy()[..., 0]), height, width, "crop").convert("L")
            binary = masks.binarize(masks.pil_to_numpy(mask))
            outputs[f"{name}.{width}x{height}.mask"] = torch.from_numpy(binary.reshape(height, width).astype(np.uint8))
    fixture.save(
        "pictures", "pictures.py", f"diffusers {fixture.version('diffusers')} VaeImageProcessor, pillow {fixture.version('pillow')}",
        {"sources": SOURCES, "sizes": SIZES}, inputs=inputs, outputs=outputs,
        notes="pictures are [height, width, channels] of bytes; output.<source>.<width>x<height>.crop covers the size and keeps the middle, .stretch is resized to it, "
        ".mask is .crop of the grey picture, then 1 from half on",
    )


if __name__ == "__main__":
    main()
