"""SD1's autoencoder: encoder and decoder, with taps at small sizes and without at larger ones; and Flux's, with 16 channels and no quant convolutions.

Reference: diffusers' `AutoencoderKL` in f64. Weights keep diffusers' names; taps carry the original (CompVis) module names.
"""

import torch
from diffusers import AutoencoderKL

import fixture
import names


def config(channels=(32, 32, 64, 64)):
    return dict(
        in_channels=3, out_channels=3, latent_channels=4, block_out_channels=list(channels), layers_per_block=2, norm_num_groups=32,
        down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4, act_fn="silu", scaling_factor=0.18215,
    )


def flux_config(channels=(32, 32, 64, 64)):
    return config(channels) | dict(latent_channels=16, use_quant_conv=False, use_post_quant_conv=False, scaling_factor=0.3611, shift_factor=0.1159)


def build(settings=None):
    settings = settings or config()
    return AutoencoderKL(**settings).double().eval(), settings


def side(table, part):
    quant = {"encoder": "quant_conv.", "decoder": "post_quant_conv."}[part]
    return {name: entry for name, entry in table.items() if name.startswith((part + ".", quant))}


def tapped(model, part):
    modules = dict(model.named_modules())
    return fixture.Taps({ldm: modules[ours] for ours, ldm in names.vae_modules().items() if ours in modules and (ours.startswith(part) or ours == "post_quant_conv")})


def flux():
    model, settings = build(flux_config())
    table = fixture.fill(model)
    source = f"diffusers {fixture.version('diffusers')} AutoencoderKL"
    image, latent = fixture.randn(35, 1, 3, 48, 32, scale=0.5), fixture.randn(36, 1, 16, 6, 4)
    with torch.no_grad():
        moments = model.encode(image).latent_dist
        fixture.save(
            "flux_vae_encoder", "vae.py", source, settings, procedural=side(table, "encoder"), inputs={"image": image.float()}, outputs={"mean": moments.mean, "logvar": moments.logvar},
            notes="mean and logvar are the halves of encoder.conv_out's output; logvar is clamped to [-30, 20]; no scaling factor and no shift",
        )
        fixture.save(
            "flux_vae_decoder", "vae.py", source, settings, procedural=side(table, "decoder"), inputs={"latent": latent.float()}, outputs={"image": model.decode(latent).sample},
            notes="the latent goes straight into decoder.conv_in: no scaling factor and no shift; the image is neither shifted nor clamped",
        )


def main():
    flux()
    model, settings = build()
    table = fixture.fill(model)
    source = f"diffusers {fixture.version('diffusers')} AutoencoderKL"
    with torch.no_grad():
        for name, image, with_taps in (
            ("vae_encoder", fixture.randn(31, 1, 3, 32, 24, scale=0.5), True),
            ("vae_encoder_large", fixture.randn(32, 2, 3, 64, 48, scale=0.5), False),
        ):
            taps = tapped(model, "encoder") if with_taps else None
            moments = model.encode(image).latent_dist
            taps = taps.close() if taps else {}
            fixture.save(
                name, "vae.py", source, settings, procedural=side(table, "encoder"), inputs={"image": image.float()}, taps=taps,
                outputs={"mean": moments.mean, "logvar": moments.logvar},
                notes="mean and logvar are the halves of quant_conv's output; logvar is clamped to [-30, 20]; no scaling factor; tap encoder.norm_out is before its SiLU",
            )
        for name, latent, with_taps in (
            ("vae_decoder", fixture.randn(33, 1, 4, 4, 3), True),
            ("vae_decoder_large", fixture.randn(34, 2, 4, 8, 6), False),
        ):
            taps = tapped(model, "decoder") if with_taps else None
            image = model.decode(latent).sample
            taps = taps.close() if taps else {}
            fixture.save(
                name, "vae.py", source, settings, procedural=side(table, "decoder"), inputs={"latent": latent.float()}, taps=taps, outputs={"image": image},
                notes="the latent goes straight into post_quant_conv; no scaling factor; the image is neither shifted nor clamped; tap decoder.norm_out is before its SiLU",
            )


if __name__ == "__main__":
    main()
