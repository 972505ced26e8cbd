"""The tiny autoencoder TAESD, which decodes and encodes latents in the scale of diffusion networks.

Reference: diffusers' `AutoencoderTiny` in f64. Weights keep diffusers' names; original files count the layers of the decoder from 1, those
of the encoder from 0, and have nothing before the number.

TAEF2 is the original code's, for latents of FLUX.2. `TAESD` names a checkout of it at the revision below; its formulas are imported, not copied.
With `TAEF2` naming a folder that holds `taef2_encoder.pth` and `taef2_decoder.pth`, the published weights run on a part of a photo.
"""

import importlib.util
import os
import pathlib
import subprocess

import skimage.data
import torch
from diffusers import AutoencoderTiny

import fixture


TAESD_REVISION = "5cccb12"
# Where the upscaler's part of the photo lies as well: eyes, hair and a smooth background.
PHOTO = (slice(60, 124), slice(190, 254))


def taesd():
    """The module `taesd` of the original repository."""
    folder = pathlib.Path(os.environ["TAESD"])
    revision = subprocess.check_output(["git", "-C", folder, "rev-parse", "HEAD"], text=True).strip()
    assert revision.startswith(TAESD_REVISION), revision
    spec = importlib.util.spec_from_file_location("taesd", folder / "taesd.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def taef2():
    code = taesd()
    source, folder = f"taesd {TAESD_REVISION}, use_midblock_gn", os.environ.get("TAEF2")
    latent, image = fixture.randn(603, 1, 32, 3, 5), fixture.randn(604, 1, 3, 24, 40, scale=0.5)
    encoder, decoder = (make(32, use_midblock_gn=True).double().eval() for make in (code.Encoder, code.Decoder))
    tables = {"encoder": fixture.fill(encoder, prefix="taesd_encoder."), "decoder": fixture.fill(decoder, prefix="taesd_decoder.")}

    def save(name, source, image, latent, tables, notes):
        with torch.no_grad():
            sides = {"encoder": ({"image": image.float()}, {"latent": encoder((image + 1) / 2)}), "decoder": ({"latent": latent.float()}, {"image": decoder(latent) * 2 - 1})}
        for side, (inputs, outputs) in sides.items():
            fixture.save(f"{name}_{side}", "tiny_vae.py", source, {}, procedural=tables.get(side), inputs=inputs, outputs=outputs, notes=notes)

    save("taef2", source, image, latent, tables, "pictures run from -1 to 1")
    if folder:
        for side, model in (("encoder", encoder), ("decoder", decoder)):
            model.load_state_dict(torch.load(pathlib.Path(folder) / f"taef2_{side}.pth", weights_only=True))
        photo = torch.from_numpy(skimage.data.astronaut()[PHOTO]).permute(2, 0, 1)[None].double() / 127.5 - 1
        photo = photo.float().double()
        with torch.no_grad():
            latent = encoder((photo + 1) / 2).float().double()
        save("taef2_photo", f"{source}, published weights", photo, latent, {}, "64 x 64 pixels of scikit-image's astronaut; pictures run from -1 to 1")


def main():
    settings = dict(
        encoder_block_out_channels=[16] * 4, decoder_block_out_channels=[16] * 4, num_encoder_blocks=[1, 1, 2, 1], num_decoder_blocks=[2, 1, 1, 1], latent_channels=4,
    )
    model = AutoencoderTiny(**settings).double().eval()
    table = fixture.fill(model)
    source = f"diffusers {fixture.version('diffusers')} AutoencoderTiny"
    latent, image = fixture.randn(601, 1, 4, 5, 7), fixture.randn(602, 1, 3, 40, 24, scale=0.5)
    with torch.no_grad():
        for side, inputs, outputs in (
            ("decoder", {"latent": latent.float()}, {"image": model.decode(latent).sample}),
            ("encoder", {"image": image.float()}, {"latent": model.encode(image).latents}),
        ):
            part = {name: entry for name, entry in table.items() if name.startswith(side + ".")}
            fixture.save(f"tiny_vae_{side}", "tiny_vae.py", source, settings, procedural=part, inputs=inputs, outputs=outputs, notes="pictures run from -1 to 1")
    taef2()


if __name__ == "__main__":
    main()
