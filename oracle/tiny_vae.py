"""The tiny autoencoder TAESD, which decodes and encodes latents in the scale of diffusion networks.

Reference: diffusers' `AutoencoderTiny` in f64. Weights keep diffusers' names; original files count the layers of the decoder from 1, those
of the encoder from 0, and have nothing before the number.
"""

import torch
from diffusers import AutoencoderTiny

import fixture


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


if __name__ == "__main__":
    main()
