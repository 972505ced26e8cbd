"""Writes the files in this folder: small checkpoints and pictures made by other programs.

    pip install gguf==0.19.0 pillow==13.0.0 numpy==1.26.4 && python make.py
"""

import io
from pathlib import Path

import gguf
import numpy as np
from PIL import Image, PngImagePlugin

HERE = Path(__file__).parent


def checkpoint():
    w = gguf.GGUFWriter(HERE / "public.gguf", "sd1")
    w.add_uint32("answer", 42)
    w.add_array("tokenizer.ggml.tokens", ["<s>", "é"])
    w.add_array("tokenizer.ggml.scores", [0.5, -1.5])
    w.add_tensor("a.weight", np.arange(6, dtype=np.float32).reshape(2, 3))
    w.add_tensor("b.weight", np.array([[1.5, -2.0]], dtype=np.float16))
    q = gguf.quants.quantize(np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32), gguf.GGMLQuantizationType.Q8_0)
    w.add_tensor("q.weight", q, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def pictures():
    # Left half and right half of one colour each; CMYK cyan and yellow.
    im = Image.new("CMYK", (16, 8), (255, 0, 0, 0))
    im.paste((0, 0, 255, 0), (8, 0, 16, 8))
    im.save(HERE / "cmyk.jpg", quality=90, subsampling=0)

    # Red above blue, stored turned so that EXIF orientation 6 (turn right to view) puts it upright.
    im = Image.new("RGB", (8, 16), (255, 0, 0))
    im.paste((0, 0, 255), (0, 8, 8, 16))
    exif = Image.Exif()
    exif[0x0112] = 6
    im.transpose(Image.Transpose.ROTATE_90).save(HERE / "turned.jpg", quality=95, subsampling=0, exif=exif)

    im.save(HERE / "lossless.webp", lossless=True)
    im.save(HERE / "lossy.webp", quality=95)
    im.save(HERE / "palette.gif")
    im.save(HERE / "plain.tga")
    im.save(HERE / "packed.tga", compression="tga_rle")
    im.save(HERE / "plain.bmp")
    im.save(HERE / "plain.ppm")
    im.quantize(4).save(HERE / "palette.png")

    grey = np.array([[0, 0x80FF, 0xFFFF]], dtype=np.uint16)
    Image.fromarray(grey).save(HERE / "grey16.png")
    Image.fromarray(np.array([[[10, 20, 30, 0], [40, 50, 60, 255]]], dtype=np.uint8)).save(HERE / "alpha.png")

    for name, text in [("ascii", "a cat\nSteps: 20"), ("latin", "café\nSteps: 20"), ("wide", "猫 🐈\nSteps: 20")]:
        info = PngImagePlugin.PngInfo()
        info.add_text("parameters", text)
        Image.new("RGB", (1, 1)).save(HERE / f"text-{name}.png", pnginfo=info)
    info = PngImagePlugin.PngInfo()
    info.add_text("parameters", "a cat " * 50, zip=True)
    Image.new("RGB", (1, 1)).save(HERE / "text-packed.png", pnginfo=info)
    info = PngImagePlugin.PngInfo()
    info.add_itxt("parameters", "猫 " * 50, lang="ja", tkey="設定", zip=True)
    Image.new("RGB", (1, 1)).save(HERE / "text-packed-wide.png", pnginfo=info)


if __name__ == "__main__":
    checkpoint()
    pictures()
