"""Compare an exported file with the reference implementations of its networks.

    python check_layout.py --model demo.safetensors

The UNet and the autoencoder are loaded into diffusers classes with the
library's own renaming of original checkpoints, the text encoder into the
transformers class.  Their outputs must agree with the modules of `model.py`.
"""

import argparse

import torch
from diffusers import UNet2DConditionModel
from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint, convert_ldm_vae_checkpoint
from diffusers.models.autoencoders.vae import Decoder, Encoder
from safetensors.torch import load_file
from transformers import CLIPTextConfig, CLIPTextModel

import model
from evaluate import load


def reference_unet(tensors):
    channels, attention = model.UNET_CHANNELS, model.UNET_ATTENTION
    down = ["CrossAttnDownBlock2D" if a else "DownBlock2D" for a in attention]
    up = ["CrossAttnUpBlock2D" if a else "UpBlock2D" for a in reversed(attention)]
    config = {
        "sample_size": 16, "in_channels": 4, "out_channels": 4, "block_out_channels": channels,
        "layers_per_block": model.UNET_RES_BLOCKS, "cross_attention_dim": model.TEXT_WIDTH,
        "attention_head_dim": model.UNET_HEADS, "down_block_types": tuple(down), "up_block_types": tuple(up),
    }
    net = UNet2DConditionModel(**config)
    net.load_state_dict(convert_ldm_unet_checkpoint(dict(tensors), dict(net.config)))
    return net


def reference_vae(tensors):
    channels = model.DECODER_CHANNELS
    encoder = Encoder(out_channels=4, block_out_channels=model.ENCODER_CHANNELS, layers_per_block=1,
                      down_block_types=("DownEncoderBlock2D",) * 4)
    decoder = Decoder(in_channels=4, out_channels=3, block_out_channels=channels, layers_per_block=1,
                      up_block_types=("UpDecoderBlock2D",) * 4)
    names = convert_ldm_vae_checkpoint(dict(tensors), {"down_block_types": ("",) * 4, "up_block_types": ("",) * 4})
    for net, prefix in ((encoder, "encoder."), (decoder, "decoder.")):
        own = {k[len(prefix):]: v for k, v in names.items() if k.startswith(prefix)}
        # Original checkpoints keep the attention as 1x1 convolutions.
        shapes = {k: v.shape for k, v in net.state_dict().items()}
        net.load_state_dict({k: v.reshape(shapes[k]) for k, v in own.items()})
    return encoder, decoder


def reference_text(tensors):
    prefix = model.PREFIXES["text"]
    own = {k[len(prefix):]: v for k, v in tensors.items() if k.startswith(prefix)}
    net = CLIPTextModel(CLIPTextConfig(
        vocab_size=model.VOCABULARY, hidden_size=model.TEXT_WIDTH, intermediate_size=4 * model.TEXT_WIDTH,
        num_hidden_layers=model.TEXT_LAYERS, num_attention_heads=model.TEXT_WIDTH // 64,
        hidden_act="quick_gelu", bos_token_id=49406, eos_token_id=49407, pad_token_id=49407))
    expected = set(net.state_dict())
    if not any(k.startswith("text_model.") for k in expected):
        own = {k.removeprefix("text_model."): v for k, v in own.items()}
    missing, unexpected = net.load_state_dict(own, strict=False)
    assert not unexpected and all("position_ids" in k for k in missing), (missing, unexpected)
    return net


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo.safetensors")
    args = parser.parse_args()
    torch.manual_seed(0)
    text, unet, vae = load(args.model)
    tensors = {k: v.float() for k, v in load_file(args.model).items()}
    ids = torch.randint(0, 49406, (2, 77))
    ids[:, 0], ids[:, 20:] = 49406, 49407
    context = text(ids)
    x, t = torch.randn(2, 4, 16, 16), torch.tensor([17, 903])
    encoder, decoder = reference_vae(tensors)
    picture = torch.rand(1, 3, 128, 128) * 2 - 1
    pairs = {
        "text encoder": (context, reference_text(tensors).eval()(ids).last_hidden_state),
        "unet": (unet(x, t, context), reference_unet(tensors).eval()(x, t, context).sample),
        "encoder": (vae.encoder(picture), encoder.eval()(picture)),
        "decoder": (vae.decoder(x), decoder.eval()(x)),
    }
    for name, (ours, theirs) in pairs.items():
        error = float((ours - theirs).abs().max())
        print(f"{name}: largest difference {error:.2e}, largest value {float(theirs.abs().max()):.2f}")
        assert error < 1e-3 * max(1.0, float(theirs.abs().max()))


if __name__ == "__main__":
    main()
