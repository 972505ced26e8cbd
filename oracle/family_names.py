"""Names and shapes of networks by family, in the names of the reference, to tell families apart by.

References: diffusers' classes with their default configuration, or the one given here, on the meta device. Of lists of blocks only the first is
kept. The file maps a family, as `detect.rs` calls it, to the tensors of its network or of another file.
"""

import inspect
import re

import diffusers
import torch

import pipeline

UNET_TINY = {"block_out_channels": (320, 640, 1280), "layers_per_block": 1, "mid_block_type": None, "cross_attention_dim": 768}
PLAIN = ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D")
CROSS = ("CrossAttnDownBlock2D",) * 3, ("CrossAttnUpBlock2D",) * 3
WAN_I2V = {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}

# What `detect.rs` calls it, the class, and what differs from the class's own configuration.
NETWORKS = [
    ("AuraFlow", "AuraFlowTransformer2DModel", {}),
    ("Chroma", "ChromaTransformer2DModel", {}),
    ("CogVideoX", "CogVideoXTransformer3DModel", {}),
    ("CogView 4", "CogView4Transformer2DModel", {}),
    ("Cosmos", "CosmosTransformer3DModel", {}),
    ("ERNIE-Image", "ErnieImageTransformer2DModel", {}),
    ("FLUX.2 dev", "Flux2Transformer2DModel", {}),
    ("FLUX.2 klein", "Flux2Transformer2DModel", {"guidance_embeds": False, "num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "joint_attention_dim": 7680}),
    ("FLUX.3", "Flux3Transformer2DModel", {}),
    ("HiDream-I1", "HiDreamImageTransformer2DModel", {"patch_size": 2, "in_channels": 16, "out_channels": 16, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 128, "num_attention_heads": 20, "caption_channels": [4096, 4096], "text_emb_dim": 2048, "num_routed_experts": 4, "num_activated_experts": 2}),
    ("Hunyuan-DiT", "HunyuanDiT2DModel", {"in_channels": 4, "patch_size": 2, "num_layers": 2, "learn_sigma": True}),
    ("HunyuanImage 2.1", "HunyuanImageTransformer2DModel", {}),
    ("HunyuanVideo", "HunyuanVideoTransformer3DModel", {}),
    ("HunyuanVideo 1.5", "HunyuanVideo15Transformer3DModel", {}),
    ("Ideogram 4", "Ideogram4Transformer2DModel", {}),
    ("Kandinsky 5", "Kandinsky5Transformer3DModel", {}),
    ("Krea 2", "Krea2Transformer2DModel", {}),
    ("LTX-2", "LTX2VideoTransformer3DModel", {"num_layers": 1}),
    ("LTX-Video", "LTXVideoTransformer3DModel", {}),
    ("LongCat-Image", "LongCatImageTransformer2DModel", {}),
    ("Lumina Image 2.0", "Lumina2Transformer2DModel", {}),
    ("MiniMax-H3", "MiniMaxH3Transformer3DModel", {}),
    ("Mochi 1", "MochiTransformer3DModel", {}),
    ("Ovis-Image", "OvisImageTransformer2DModel", {}),
    ("PixArt", "PixArtTransformer2DModel", {}),
    ("Qwen-Image", "QwenImageTransformer2DModel", {}),
    ("Qwen-Image 2.1", "QwenImage21Transformer2DModel", {}),
    ("Qwen-Image Layered", "QwenImageTransformer2DModel", {"use_additional_t_cond": True}),
    ("Sana", "SanaTransformer2DModel", {}),
    ("Stable Audio", "StableAudioDiTModel", {}),
    ("Stable Cascade, stage B", "StableCascadeUNet", {"in_channels": 4, "out_channels": 4, "conditioning_dim": 1280, "block_out_channels": [320, 640], "down_num_layers_per_block": [1, 1], "up_num_layers_per_block": [1, 1], "down_blocks_repeat_mappers": [1, 1], "up_blocks_repeat_mappers": [1, 1], "num_attention_heads": [0, 10], "block_types_per_layer": [["SDCascadeResBlock", "SDCascadeTimestepBlock"], ["SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"]], "clip_text_pooled_in_channels": 1280, "effnet_in_channels": 16, "pixel_mapper_in_channels": 3, "kernel_size": 3, "dropout": 0.1, "self_attn": True, "timestep_conditioning_type": ["sca"], "switch_level": None, "patch_size": 2}),
    ("Stable Cascade, stage C", "StableCascadeUNet", {"in_channels": 16, "out_channels": 16, "conditioning_dim": 2048, "block_out_channels": [2048, 2048], "down_num_layers_per_block": [1, 1], "up_num_layers_per_block": [1, 1], "down_blocks_repeat_mappers": [1, 1], "up_blocks_repeat_mappers": [1, 1], "num_attention_heads": [32, 32], "clip_text_in_channels": 1280, "clip_text_pooled_in_channels": 1280, "clip_image_in_channels": 768, "kernel_size": 3, "dropout": 0.1, "self_attn": True, "timestep_conditioning_type": ["sca", "crp"], "switch_level": [False], "patch_size": 1, "block_types_per_layer": [["SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"]] * 2}),
    ("Stable Video Diffusion", "UNetSpatioTemporalConditionModel", {}),
    ("Wan 2.1 FLF2V", "WanTransformer3DModel", {**WAN_I2V, "pos_embed_seq_len": 514}),
    ("Wan 2.1 I2V", "WanTransformer3DModel", WAN_I2V),
    ("Wan 2.2 I2V", "WanTransformer3DModel", {"in_channels": 36}),
    ("Wan 2.2 TI2V", "WanTransformer3DModel", {"in_channels": 48, "out_channels": 48, "num_attention_heads": 24, "ffn_dim": 14336, "num_layers": 30}),
    ("Wan Animate", "WanAnimateTransformer3DModel", {}),
    ("Wan T2V, 2.1 or 2.2", "WanTransformer3DModel", {}),
    ("Wan VACE", "WanVACETransformer3DModel", {}),
    ("Z-Image", "ZImageTransformer2DModel", {}),
    ("a ControlNet", "ControlNetModel", {}),
    ("a ControlNet of FLUX.1", "FluxControlNetModel", {}),
    ("a ControlNet of Qwen-Image", "QwenImageControlNetModel", {}),
    ("a ControlNet of SD 3", "SD3ControlNetModel", {}),
    ("a VAE of FLUX.2", "AutoencoderKLFlux2", {}),
    ("a VAE of Qwen-Image", "AutoencoderKLQwenImage", {}),
    ("a VAE of Sana", "AutoencoderDC", {}),
    ("a VAE of Wan", "AutoencoderKLWan", {}),
    ("a motion module", "MotionAdapter", {}),
    ("a tiny autoencoder", "AutoencoderTiny", {}),
    # Those that can be run, by the name of the variant.
    ("SDXS-512-DreamShaper", "UNet2DConditionModel", {**UNET_TINY, "down_block_types": PLAIN[0], "up_block_types": PLAIN[1]}),
    ("bk-sdm-tiny", "UNet2DConditionModel", {**UNET_TINY, "down_block_types": CROSS[0], "up_block_types": CROSS[1]}),
    ("bk-sdm-v2-tiny", "UNet2DConditionModel", {**UNET_TINY, "down_block_types": CROSS[0], "up_block_types": CROSS[1], "cross_attention_dim": 1024, "use_linear_projection": True, "attention_head_dim": (5, 10, 20)}),
    ("SD 1.x inpainting", "UNet2DConditionModel", {"in_channels": 9, "cross_attention_dim": 768}),
    ("SD 1.x InstructPix2Pix", "UNet2DConditionModel", {"in_channels": 8, "cross_attention_dim": 768}),
]
LATER = re.compile(r"(?:blocks|layers|refiner|block|norms)\.[1-9]\d*\.")


def tensors(name, options):
    cls = getattr(diffusers, name)
    unknown = set(options) - set(inspect.signature(cls.__init__).parameters)
    assert not unknown, (name, unknown)
    with torch.device("meta"):
        state = cls(**options).state_dict()
    keep = (lambda n: True) if name == "UNet2DConditionModel" else (lambda n: not LATER.search(n))
    return {n: list(t.shape) for n, t in state.items() if keep(n)}


def main():
    sets = {label: tensors(name, options) for label, name, options in NETWORKS}
    assert len(sets) == len(NETWORKS)
    pipeline.save_names("family_names", {"source": f"diffusers {diffusers.__version__}", "script": "oracle/family_names.py", "sets": sets})


if __name__ == "__main__":
    main()
