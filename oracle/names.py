"""Names of modules and tensors: diffusers on the left, the original single-file names (CompVis, OpenCLIP) on the right.

Where one stored tensor is made of several, a row is (name in the file, operation, names in the reference). Operations:
`same`; `rows` (the sources one after the other along axis 0); `transpose`; `swap` (the two halves along axis 0 change places);
`conv` (a matrix stored as a 1x1 convolution).
"""

import re

import torch

UNET_PREFIX = "model.diffusion_model."
VAE_PREFIX = "first_stage_model."
TEXT_PREFIX = "cond_stage_model.transformer."

UNET_RESNET = {"norm1": "in_layers.0", "conv1": "in_layers.2", "time_emb_proj": "emb_layers.1", "norm2": "out_layers.0", "conv2": "out_layers.3", "conv_shortcut": "skip_connection"}
VAE_RESNET = {"conv_shortcut": "nin_shortcut"}
VAE_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}


def unet_modules(levels=4, layers=2, attention_up=(1, 2, 3)):
    """Module prefixes of the UNet, blocks only. `attention_up` are the up levels that have attention."""
    table = {
        "add_embedding.linear_1": "label_emb.0.0", "add_embedding.linear_2": "label_emb.0.2", "add_embedding": "label_emb",
        "conv_in": "input_blocks.0.0", "time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2", "time_embedding": "time_embed",
        "conv_norm_out": "out.0", "conv_act": "out.1", "conv_out": "out.2",
        "mid_block.resnets.0": "middle_block.0", "mid_block.attentions.0": "middle_block.1", "mid_block.resnets.1": "middle_block.2",
    }
    for level in range(levels):
        for i in range(layers):
            block = 1 + level * (layers + 1) + i
            table[f"down_blocks.{level}.resnets.{i}"] = f"input_blocks.{block}.0"
            table[f"down_blocks.{level}.attentions.{i}"] = f"input_blocks.{block}.1"
        table[f"down_blocks.{level}.downsamplers.0"] = f"input_blocks.{(level + 1) * (layers + 1)}.0"
        for i in range(layers + 1):
            block = level * (layers + 1) + i
            table[f"up_blocks.{level}.resnets.{i}"] = f"output_blocks.{block}.0"
            table[f"up_blocks.{level}.attentions.{i}"] = f"output_blocks.{block}.1"
        # The upsampler is the last module of its block: the second where the level has no attention.
        table[f"up_blocks.{level}.upsamplers.0"] = f"output_blocks.{level * (layers + 1) + layers}.{2 if level in attention_up else 1}"
    return table


def unet_modules_of(state):
    """`unet_modules` for a state dict of any arrangement."""
    def numbers(pattern):
        return {int(match[1]) for name in state for match in [re.match(pattern, name)] if match}

    return unet_modules(len(numbers(r"down_blocks\.(\d+)\.")), len(numbers(r"down_blocks\.0\.resnets\.(\d+)\.")), numbers(r"up_blocks\.(\d+)\.attentions\."))


def vae_modules(levels=4, layers=2):
    """Module prefixes of the autoencoder. The decoder counts its levels from the image side."""
    table = {"quant_conv": "quant_conv", "post_quant_conv": "post_quant_conv"}
    for side in ("encoder", "decoder"):
        table |= {f"{side}.conv_in": f"{side}.conv_in", f"{side}.conv_out": f"{side}.conv_out", f"{side}.conv_norm_out": f"{side}.norm_out"}
        table |= {f"{side}.mid_block.resnets.{i}": f"{side}.mid.block_{i + 1}" for i in range(2)}
        table[f"{side}.mid_block.attentions.0"] = f"{side}.mid.attn_1"
    for level in range(levels):
        for i in range(layers):
            table[f"encoder.down_blocks.{level}.resnets.{i}"] = f"encoder.down.{level}.block.{i}"
        table[f"encoder.down_blocks.{level}.downsamplers.0"] = f"encoder.down.{level}.downsample"
        for i in range(layers + 1):
            table[f"decoder.up_blocks.{level}.resnets.{i}"] = f"decoder.up.{levels - 1 - level}.block.{i}"
        table[f"decoder.up_blocks.{level}.upsamplers.0"] = f"decoder.up.{levels - 1 - level}.upsample"
    return table


def split(name, modules):
    """The longest known module prefix of `name`, and the rest."""
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        head = ".".join(parts[:n])
        if head in modules:
            return head, ".".join(parts[n:])
    raise KeyError(name)


def replace_head(rest, table):
    for old, new in table.items():
        if rest == old or rest.startswith(old + "."):
            return new + rest[len(old):]
    return rest


def join(*parts):
    return ".".join(part for part in parts if part)


def unet_to_ldm(name, modules=None):
    modules = modules or unet_modules()
    head, rest = split(name, modules)
    if "resnets" in head:
        rest = replace_head(rest, UNET_RESNET)
    if "downsamplers" in head:
        rest = replace_head(rest, {"conv": "op"})
    return join(modules[head], rest)


def vae_to_ldm(name, layers=2):
    modules = vae_modules(layers=layers)
    head, rest = split(name, modules)
    if "resnets" in head:
        rest = replace_head(rest, VAE_RESNET)
    if "attentions" in head:
        rest = replace_head(rest, VAE_ATTENTION)
    return join(modules[head], rest)


def checkpoint(unet=(), vae=(), text=()):
    """A single-file SD1 checkpoint from diffusers and transformers state dicts. The autoencoder's attention becomes 1x1 convolutions."""
    tensors = {}
    for name, value in dict(unet).items():
        tensors[UNET_PREFIX + unet_to_ldm(name)] = value
    for name, value in dict(vae).items():
        new = vae_to_ldm(name)
        if re.search(r"mid\.attn_1\.(q|k|v|proj_out)\.weight$", new):
            value = value[:, :, None, None]
        tensors[VAE_PREFIX + new] = value
    for name, value in dict(text).items():
        if not name.startswith("text_model."):
            name = "text_model." + name
        tensors[TEXT_PREFIX + name] = value
    return tensors


def from_checkpoint(tensors, prefix, to_ldm, wanted):
    """The state dict of a diffusers module: `wanted` maps its names to shapes."""
    state, missing = {}, []
    for name, shape in wanted.items():
        source = prefix + to_ldm(name)
        if source not in tensors:
            missing.append(source)
            continue
        state[name] = tensors[source].reshape(shape)
    if missing:
        raise KeyError(f"{len(missing)} tensors missing, first {missing[:3]}")
    return state


def apply(op, parts):
    if op == "rows":
        return torch.cat(parts)
    part, = parts
    if op == "transpose":
        return part.T.contiguous()
    if op == "swap":
        return torch.cat(part.chunk(2)[::-1])
    if op == "conv":
        return part[:, :, None, None]
    return part


def assemble(rows, state):
    """The file's tensors from the reference's state dict. Every source is used exactly once."""
    used = [source for _, _, sources in rows for source in sources]
    assert sorted(used) == sorted(state), set(used) ^ set(state)
    return {name: apply(op, [state[source] for source in sources]) for name, op, sources in rows}


def described(rows, state):
    """Rows for a JSON fixture: [name in the file, shape, operation, [name in the reference, ...]]."""
    return [[name, list(apply(op, [state[source] for source in sources]).shape), op, sources] for name, op, sources in rows]


def unet_rows(state, prefix=UNET_PREFIX):
    modules = unet_modules_of(state)
    return [(prefix + unet_to_ldm(name, modules), "same", [name]) for name in state]


OPEN_CLIP_LAYER = {"layer_norm1": "ln_1", "layer_norm2": "ln_2", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj", "self_attn.out_proj": "attn.out_proj"}
OPEN_CLIP = {
    "text_model.embeddings.token_embedding.weight": "token_embedding.weight", "text_model.embeddings.position_embedding.weight": "positional_embedding",
    "text_model.final_layer_norm.weight": "ln_final.weight", "text_model.final_layer_norm.bias": "ln_final.bias",
}


def open_clip_rows(state):
    """OpenCLIP's text tower from a `CLIPTextModelWithProjection`, without prefix."""
    rows = []
    for name in state:
        match = re.match(r"text_model\.encoder\.layers\.(\d+)\.(.+)", name)
        if name == "text_projection.weight":
            rows.append(("text_projection", "transpose", [name]))
        elif not match:
            rows.append((OPEN_CLIP[name], "same", [name]))
        else:
            block = f"transformer.resblocks.{match[1]}."
            fused = re.match(r"self_attn\.q_proj\.(weight|bias)", match[2])
            if fused:
                rows.append((f"{block}attn.in_proj_{fused[1]}", "rows", [name.replace("q_proj", part) for part in ("q_proj", "k_proj", "v_proj")]))
            elif not re.match(r"self_attn\.[kv]_proj", match[2]):
                rows.append((block + replace_head(match[2], OPEN_CLIP_LAYER), "same", [name]))
    return rows


FLUX_TOP = {
    "time_text_embed.timestep_embedder.linear_1": "time_in.in_layer", "time_text_embed.timestep_embedder.linear_2": "time_in.out_layer", "time_text_embed.timestep_embedder": "time_in",
    "time_text_embed.guidance_embedder.linear_1": "guidance_in.in_layer", "time_text_embed.guidance_embedder.linear_2": "guidance_in.out_layer", "time_text_embed.guidance_embedder": "guidance_in",
    "time_text_embed.text_embedder.linear_1": "vector_in.in_layer", "time_text_embed.text_embedder.linear_2": "vector_in.out_layer", "time_text_embed.text_embedder": "vector_in",
    "context_embedder": "txt_in", "x_embedder": "img_in", "proj_out": "final_layer.linear", "norm_out.linear": "final_layer.adaLN_modulation.1",
}
FLUX_DOUBLE = {
    "norm1.linear": "img_mod.lin", "norm1_context.linear": "txt_mod.lin", "attn.to_out.0": "img_attn.proj", "attn.to_add_out": "txt_attn.proj",
    "attn.norm_q.weight": "img_attn.norm.query_norm.scale", "attn.norm_k.weight": "img_attn.norm.key_norm.scale",
    "attn.norm_added_q.weight": "txt_attn.norm.query_norm.scale", "attn.norm_added_k.weight": "txt_attn.norm.key_norm.scale",
    "ff.net.0.proj": "img_mlp.0", "ff.net.2": "img_mlp.2", "ff_context.net.0.proj": "txt_mlp.0", "ff_context.net.2": "txt_mlp.2",
}
FLUX_SINGLE = {"norm.linear": "modulation.lin", "proj_out": "linear2", "attn.norm_q.weight": "norm.query_norm.scale", "attn.norm_k.weight": "norm.key_norm.scale"}
# Fused matrices, named by their first part.
FLUX_FUSED = {
    "transformer_blocks": {"attn.to_q": ("img_attn.qkv", ["attn.to_q", "attn.to_k", "attn.to_v"]), "attn.add_q_proj": ("txt_attn.qkv", ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"])},
    "single_transformer_blocks": {"attn.to_q": ("linear1", ["attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"])},
}


def flux_rows(state, prefix=""):
    """Flux in the original (Black Forest Labs) names from diffusers' `FluxTransformer2DModel`."""
    rows = []
    for name in state:
        match = re.match(r"(transformer_blocks|single_transformer_blocks)\.(\d+)\.(.+)\.(weight|bias)$", name)
        if not match:
            rows.append((prefix + replace_head(name, FLUX_TOP), "swap" if name.startswith("norm_out.") else "same", [name]))
            continue
        kind, index, part, leaf = match.groups()
        block, source = f"{prefix}{'double' if kind == 'transformer_blocks' else 'single'}_blocks.{index}.", f"{kind}.{index}."
        fused = FLUX_FUSED[kind]
        if part in fused:
            new, parts = fused[part]
            rows.append((f"{block}{new}.{leaf}", "rows", [f"{source}{p}.{leaf}" for p in parts]))
        elif not any(part in parts for _, parts in fused.values()):
            rows.append((block + replace_head(f"{part}.{leaf}", FLUX_DOUBLE if kind == "transformer_blocks" else FLUX_SINGLE), "same", [name]))
    return rows


SD3_TOP = {
    "pos_embed.pos_embed": "pos_embed", "pos_embed.proj": "x_embedder.proj", "context_embedder": "context_embedder", "proj_out": "final_layer.linear", "norm_out.linear": "final_layer.adaLN_modulation.1",
    "time_text_embed.timestep_embedder.linear_1": "t_embedder.mlp.0", "time_text_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "time_text_embed.text_embedder.linear_1": "y_embedder.mlp.0", "time_text_embed.text_embedder.linear_2": "y_embedder.mlp.2",
}
SD3_BLOCK = {
    "norm1.linear": "x_block.adaLN_modulation.1", "norm1_context.linear": "context_block.adaLN_modulation.1",
    "attn.norm_q": "x_block.attn.ln_q", "attn.norm_k": "x_block.attn.ln_k", "attn.norm_added_q": "context_block.attn.ln_q", "attn.norm_added_k": "context_block.attn.ln_k",
    "attn.to_out.0": "x_block.attn.proj", "attn.to_add_out": "context_block.attn.proj",
    "attn2.norm_q": "x_block.attn2.ln_q", "attn2.norm_k": "x_block.attn2.ln_k", "attn2.to_out.0": "x_block.attn2.proj",
    "ff.net.0.proj": "x_block.mlp.fc1", "ff.net.2": "x_block.mlp.fc2", "ff_context.net.0.proj": "context_block.mlp.fc1", "ff_context.net.2": "context_block.mlp.fc2",
}
# Fused matrices, named by their first part.
SD3_FUSED = {
    "attn.to_q": ("x_block.attn.qkv", ["attn.to_q", "attn.to_k", "attn.to_v"]), "attn2.to_q": ("x_block.attn2.qkv", ["attn2.to_q", "attn2.to_k", "attn2.to_v"]),
    "attn.add_q_proj": ("context_block.attn.qkv", ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"]),
}


def sd3_rows(state, prefix=""):
    """SD3 in the original (Stability AI) names from diffusers' `SD3Transformer2DModel`. Both have scale and shift in the last context modulation, in another order."""
    rows, last = [], max(int(name.split(".")[1]) for name in state if name.startswith("transformer_blocks."))
    for name in state:
        match = re.match(r"transformer_blocks\.(\d+)\.(.+)\.(weight|bias)$", name)
        if not match:
            rows.append((prefix + replace_head(name, SD3_TOP), "swap" if name.startswith("norm_out.") else "same", [name]))
            continue
        index, part, leaf = match.groups()
        block, source = f"{prefix}joint_blocks.{index}.", f"transformer_blocks.{index}."
        if part in SD3_FUSED:
            new, parts = SD3_FUSED[part]
            rows.append((f"{block}{new}.{leaf}", "rows", [f"{source}{p}.{leaf}" for p in parts]))
        elif not any(part in parts for _, parts in SD3_FUSED.values()):
            swapped = part == "norm1_context.linear" and int(index) == last
            rows.append((f"{block}{SD3_BLOCK[part]}.{leaf}", "swap" if swapped else "same", [name]))
    return rows


def vae_rows(state, prefix=""):
    """The autoencoder's attention is stored as 1x1 convolutions."""
    rows = []
    for name in state:
        new = vae_to_ldm(name)
        rows.append((prefix + new, "conv" if re.search(r"mid\.attn_1\.(q|k|v|proj_out)\.weight$", new) else "same", [name]))
    return rows
