"""Writes the files in this folder: small checkpoints and pictures made by other programs.

    pip install gguf==0.19.0 pillow==13.0.0 numpy==1.26.4 torch==2.15.0 && python make.py
"""

import collections
import gzip
import io
import json
import pickle
import struct
import sys
import tarfile
import types
import zipfile
from pathlib import Path

import gguf
import numpy as np
import torch
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


def counting(shape, dtype, start=0):
    return torch.arange(start, start + int(np.prod(shape))).reshape(shape).to(dtype)


def tensors():
    """Every element counts up from 0 in row-major order of the tensor as it is seen."""
    base = counting((3, 4), torch.float32)
    return {
        "f32": counting((2, 3), torch.float32),
        "f16": counting((2, 3), torch.float16),
        "bf16": counting((2, 3), torch.bfloat16),
        "f64": counting((2, 3), torch.float64),
        "i64": counting((2, 3), torch.int64),
        "i32": counting((2, 3), torch.int32),
        "i16": counting((2, 3), torch.int16),
        "i8": counting((2, 3), torch.int8),
        "u8": counting((2, 3), torch.uint8),
        "bool": torch.tensor([[False, True, False], [True, True, False]]),
        "turned": counting((2, 3), torch.float32).t().contiguous().t(),  # stored by columns
        "rows": base[1:],  # [2, 4], counts from 4
        "columns": base[:, 1:3],  # [3, 2]: 1 2 5 6 9 10
        "shared": base,
        "scalar": torch.tensor(7.0),
        "empty": torch.zeros(0, 5),
        "parameter": torch.nn.Parameter(counting((2,), torch.float32)),
    }


def torch_zip(path, edit):
    """Writes a file of torch.save again with its members changed."""
    out = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as new:
        for name in old.namelist():
            new.writestr(zipfile.ZipInfo(name), edit(name, old.read(name)))
    path.write_bytes(out.getvalue())


def torch_tar(path):
    """The layout before PyTorch 0.4, which torch.load still reads and torch.save no longer writes."""
    storages = pickle.dumps(1, 2)
    storages += pickle.dumps((11, "cpu", torch.FloatStorage), 2)
    storages += struct.pack("<q", 6) + np.arange(6, dtype="<f4").tobytes()
    storages += pickle.dumps([(12, 11, 2, 4)], 2)
    members = pickle.dumps(2, 2)
    members += pickle.dumps((21, 11, torch.FloatTensor), 2)
    members += struct.pack("<iiqqqqq", 2, 0, 2, 3, 3, 1, 0)
    members += pickle.dumps((22, 12, torch.FloatTensor), 2)
    members += struct.pack("<iiqqqqq", 2, 0, 2, 2, 1, 2, 0)  # stored by columns

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj):
            return {"w": 21, "v": 22}.get(obj[1]) if isinstance(obj, tuple) and obj[:1] == ("tensor",) else None

    main = io.BytesIO()
    Pickler(main, 2).dump(collections.OrderedDict(w=("tensor", "w"), v=("tensor", "v")))
    with tarfile.open(path, "w:", format=tarfile.PAX_FORMAT) as tar:
        for name, data in [("storages", storages), ("tensors", members), ("pickle", main.getvalue())]:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    assert torch.load(path, weights_only=False)["v"].tolist() == [[2, 4], [3, 5]]


class Evil:
    def __reduce__(self):
        import os

        return os.system, ("echo this must never run",)


def pytorch():
    file = tensors()
    torch.save({**file, "f8": counting((2, 3), torch.float8_e4m3fn)}, HERE / "torch-zip.pt")
    torch.save(file, HERE / "torch-legacy.pt", _use_new_zipfile_serialization=False)
    torch_tar(HERE / "torch-tar.pt")
    torch.save(counting((2, 3), torch.float32), HERE / "torch-bare.pt")
    torch.save([counting((1,), torch.float32), counting((1,), torch.float32, 1)], HERE / "torch-list.pt")
    one, two = {"w": counting((2,), torch.float32)}, {"w": counting((2,), torch.float32, 2)}
    odd = collections.defaultdict(list, w=counting((2,), torch.float32))
    torch.save({"model": odd, "seen": collections.Counter("abc")}, HERE / "torch-odd.pt")
    torch.save({"params": one, "params_ema": two}, HERE / "torch-ema.pth")
    inversion = {"string_to_token": {"*": torch.tensor(265)}, "string_to_param": {"*": counting((2, 4), torch.float32)}}
    torch.save({**inversion, "name": "my cat", "step": 500, "sd_checkpoint": None}, HERE / "torch-inversion.pt")

    # As PyTorch Lightning leaves checkpoints: a class as a key, numbers, an optimizer with tensors of its own.
    module = types.ModuleType("pytorch_lightning.callbacks.model_checkpoint")
    module.ModelCheckpoint = type("ModelCheckpoint", (), {"__module__": module.__name__})
    sys.modules["pytorch_lightning"] = types.ModuleType("pytorch_lightning")
    sys.modules["pytorch_lightning.callbacks"] = types.ModuleType("pytorch_lightning.callbacks")
    sys.modules[module.__name__] = module
    lightning = {
        "epoch": 3,
        "global_step": 470000,
        "pytorch-lightning_version": "1.4.2",
        "state_dict": collections.OrderedDict({"model.diffusion_model.w": counting((2,), torch.float16)}),
        "callbacks": {module.ModelCheckpoint: {"best_model_score": np.float64(0.5), "current_score": torch.tensor(1.0)}},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.zeros(2)}}}],
    }
    torch.save(lightning, HERE / "torch-lightning.ckpt")
    torch.save(lightning, HERE / "torch-lightning-legacy.ckpt", _use_new_zipfile_serialization=False)

    big = HERE / "torch-big-endian.pt"
    torch.save({"w": counting((2, 3), torch.float32), "b": counting((4,), torch.uint8)}, big)

    def turn(name, data):
        if name.endswith("/byteorder"):
            return b"big"
        return np.frombuffer(data, "<f4").astype(">f4").tobytes() if name.endswith("/data/0") else data

    torch_zip(big, turn)
    assert torch.load(big)["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    torch.save({"w": torch.zeros(1), "x": Evil()}, HERE / "torch-evil.pt", pickle_protocol=4)
    torch.save({"w": torch.zeros(1), "x": Evil()}, HERE / "torch-evil-legacy.pt", _use_new_zipfile_serialization=False)
    torch.save(torch.nn.Linear(1, 1), HERE / "torch-module.pt")
    torch.jit.save(torch.jit.script(torch.nn.ReLU()), HERE / "torch-script.pt")


def big_endian_gguf():
    w = gguf.GGUFWriter(HERE / "big-endian.gguf", "sd1", endianess=gguf.GGUFEndian.BIG)
    w.add_uint32("answer", 42)
    w.add_array("tokenizer.ggml.tokens", ["<s>", "é"])
    w.add_array("tokenizer.ggml.scores", [0.5, -1.5])
    w.add_tensor("a.weight", np.arange(6, dtype=np.float32).reshape(2, 3))
    w.add_tensor("b.weight", np.array([[1.5, -2.0]], dtype=np.float16))
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

    generations()

    # Turned as EXIF orientation 6 says, in the chunks that PNG and WebP have for EXIF.
    im = Image.new("RGB", (8, 16), (255, 0, 0))
    im.paste((0, 0, 255), (0, 8, 8, 16))
    exif = Image.Exif()
    exif[0x0112] = 6
    im.transpose(Image.Transpose.ROTATE_90).save(HERE / "turned.png", exif=exif)
    im.transpose(Image.Transpose.ROTATE_90).save(HERE / "turned.webp", lossless=True, exif=exif)
    im.convert("L").save(HERE / "grey.jpg", quality=95)
    Image.fromarray(np.array([[[10, 200], [40, 7]]], dtype=np.uint8), "LA").save(HERE / "grey-alpha.png")


def hide(text, packed, alpha):
    """The lowest bits down the columns, as the A1111 extension stealth_pnginfo puts them."""
    data = text.encode()
    data = gzip.compress(data, mtime=0) if packed else data
    name = f"stealth_{'png' if alpha else 'rgb'}{'comp' if packed else 'info'}".encode()
    bits = np.unpackbits(np.frombuffer(name + struct.pack(">I", len(data) * 8) + data, np.uint8))
    pixels = np.full((24, 40, 4), 254, np.uint8)  # rows, columns
    columns = pixels.transpose(1, 0, 2).reshape(-1, 4).copy()
    if alpha:
        columns[: len(bits), 3] |= bits
    else:
        flat = columns[:, :3].reshape(-1)
        flat[: len(bits)] |= bits
        columns[:, :3] = flat.reshape(-1, 3)
    return Image.fromarray(columns.reshape(40, 24, 4).transpose(1, 0, 2).copy(), "RGBA")


def generations():
    text = "a fox, 狐\nSteps: 9, Sampler: Euler, Seed: 8"
    im = Image.new("RGB", (2, 2))
    comment = Image.Exif()
    comment.get_ifd(0x8769)[0x9286] = b"UNICODE\0" + text.encode("utf-16-be")
    im.save(HERE / "comment.webp", exif=comment)
    im.save(HERE / "comment.jpg", exif=comment)
    hide(text, False, True).save(HERE / "hidden-alpha.png")
    hide(text, True, True).save(HERE / "hidden-packed.png")
    hide(text, False, False).save(HERE / "hidden-rgb.png")

    # A text chunk behind the pixels.
    info = PngImagePlugin.PngInfo()
    info.add_itxt("parameters", text)
    out = io.BytesIO()
    im.save(out, "png", pnginfo=info)
    png = out.getvalue()
    at, n = png.index(b"iTXt") - 4, struct.unpack(">I", png[png.index(b"iTXt") - 4 : png.index(b"iTXt")])[0] + 12
    end = png.index(b"IEND") - 4
    (HERE / "after.png").write_bytes(png[:at] + png[at + n : end] + png[at : at + n] + png[end:])

    # ComfyUI keeps its graphs in fields of EXIF where there are no chunks.
    graph = {"1": {"class_type": "KSampler", "inputs": {"seed": 11, "steps": 4, "latent_image": ["2", 0], "positive": ["3", 0]}}}
    comfy = Image.Exif()
    comfy[0x010F] = "workflow:{}"
    comfy[0x0110] = "prompt:" + json.dumps(graph)
    im.save(HERE / "comfy.webp", exif=comfy)


if __name__ == "__main__":
    checkpoint()
    big_endian_gguf()
    pytorch()
    pictures()
