"""Upscalers: ESRGAN's RRDBNet with scales 1, 2 and 4, and Real-ESRGAN's compact network.

Reference: spandrel's architectures in f64. It loads RRDBNets under three spellings; `upscale_names.json` has one file in each, and spandrel
makes the same network of all.
"""

import os
import pathlib
import re

import torch
from spandrel import ModelLoader
from spandrel.architectures.Compact import Compact
from spandrel.architectures.ESRGAN import ESRGAN

import fixture


def real_esrgan(name, upsamplers):
    """The name of Real-ESRGAN's code for one of the original ESRGAN."""
    m = re.fullmatch(r"model\.1\.sub\.(\d+)\.RDB(\d)\.conv(\d)\.0\.(.*)", name)
    if m:
        return f"body.{m[1]}.rdb{m[2]}.conv{m[3]}.{m[4]}"
    m = re.fullmatch(r"model\.1\.sub\.\d+\.(.*)", name)
    if m:
        return f"conv_body.{m[1]}"
    place, rest = re.fullmatch(r"model\.(\d+)\.(.*)", name).groups()
    modules = {0: "conv_first", 3 * upsamplers + 2: "conv_hr", 3 * upsamplers + 4: "conv_last"} | {3 * i: f"conv_up{i}" for i in range(1, upsamplers + 1)}
    return f"{modules[int(place)]}.{rest}"


def bsrgan(name):
    """The name of BSRGAN's code for one of Real-ESRGAN's."""
    for ours, theirs in (("conv_body", "trunk_conv"), ("body.", "RRDB_trunk."), (".rdb", ".RDB"), ("conv_up", "upconv"), ("conv_hr", "HRconv")):
        name = name.replace(ours, theirs)
    return name


def rrdb(name, seed, scale, shuffle, size):
    settings = dict(in_nc=3 * (shuffle or 1) ** 2, out_nc=3, num_filters=16, num_blocks=2, scale=scale, shuffle_factor=shuffle)
    model = ESRGAN(**settings).double().eval()
    table = fixture.fill(model)
    upsamplers = scale.bit_length() - 1
    names = [[real_esrgan(n, upsamplers), n, bsrgan(real_esrgan(n, upsamplers))] for n in model.state_dict()]
    image = fixture.randn(seed, 1, 3, *size, scale=0.25) + 0.5
    with torch.no_grad():
        result = model(image)
        for spelling in range(3):
            state = {row[spelling]: model.state_dict()[row[1]] for row in names}
            loaded = ModelLoader().load_from_state_dict(state)
            assert loaded.scale == scale // (shuffle or 1), loaded.scale
            assert torch.equal(loaded.model.double()(image), result)
    # The rule goes by names, so the table keeps those the weights were made under.
    fixture.save(
        name, "upscale.py", f"spandrel {fixture.version('spandrel')} ESRGAN", settings, procedural=table, inputs={"image": image.float()}, outputs={"image": result},
        notes="values are from 0 to 1 and not clamped; sides are multiples of the shuffle factor",
    )
    return names


def compact(name, seed, scale, size):
    settings = dict(num_in_ch=3, num_out_ch=3, num_feat=16, num_conv=3, upscale=scale)
    model = Compact(**settings).double().eval()
    table = fixture.fill(model)
    with torch.no_grad():
        for i in range(1, 8, 2):  # slopes of the activations, near 1 by the rule, where files have them near 0.2
            key = f"body.{i}.weight"
            table[key] = [[16], -12, 0.25]
            model.state_dict()[key].copy_(fixture.procedural(key, [16], -12, 0.25))
        image = fixture.randn(seed, 1, 3, *size, scale=0.25) + 0.5
        result = model(image)
        loaded = ModelLoader().load_from_state_dict(dict(model.state_dict()))
        assert loaded.scale == scale and torch.equal(loaded.model.double()(image), result)
    fixture.save(
        name, "upscale.py", f"spandrel {fixture.version('spandrel')} Compact", settings, procedural=table, inputs={"image": image.float()}, outputs={"image": result},
        notes="values are from 0 to 1 and not clamped",
    )


def photo(path):
    """A part of a photo (NASA, public domain) through a published network."""
    from skimage.data import astronaut

    loaded = ModelLoader().load_from_file(path)
    picture = torch.from_numpy(astronaut()[60:108, 190:254].copy())
    with torch.no_grad():
        result = loaded.model.float().eval()(picture.permute(2, 0, 1)[None].float() / 255)
    result = (result[0].permute(1, 2, 0).clamp(0, 1) * 255).round().to(torch.uint8)
    fixture.save(
        "upscale_photo", "upscale.py", f"spandrel {fixture.version('spandrel')} ESRGAN", dict(weights=pathlib.Path(path).name), inputs={"rgb": picture}, outputs={"rgb": result},
        notes="rows of RGB bytes; values are held to 0..1 and rounded to the nearest byte",
    )


def main():
    if "REALESRGAN" in os.environ:
        photo(os.environ["REALESRGAN"])
    names = {
        "x4": rrdb("upscale_rrdb_x4", 401, 4, None, (12, 9)),
        "x2": rrdb("upscale_rrdb_x2", 402, 4, 2, (14, 10)),
        "x1": rrdb("upscale_rrdb_x1", 403, 4, 4, (16, 12)),
        "one_upsampler": rrdb("upscale_rrdb_once", 404, 2, None, (7, 11)),
    }
    compact("upscale_compact_x4", 405, 4, (9, 7))
    compact("upscale_compact_x2", 406, 2, (6, 11))
    fixture.save_json("upscale_names", names)


if __name__ == "__main__":
    main()
