"""Names and shapes of every tensor at real size, for checks that read headers only; and of the tiny pipelines' checkpoints.

References: diffusers' and transformers' classes with the published configurations, on the meta device; single-file names come from `names.py`
and diffusers' converters take them back. Both files map sets of tensors, as rows [name in the file, shape, operation, [[reference name, shape],
...]] (operations as in `names.py`), and list per checkpoint the sets it holds with the prefix in front of the names. Reference names are those of
the folder layout (`unet/`, `vae/`, `text_encoder/`, ...), without the folder.
"""

import diffusers.loaders.single_file_utils as single_file
import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel, SD3Transformer2DModel, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

import clip_text
import fixture
import flux
import flux_pipeline
import names
import pipeline
import sd2_pipeline
import sd3
import sd3_pipeline
import sdxl_pipeline
import sdxl_refiner
import unet
import unet_sdxl
import vae

UNETS = {
    "sd1": unet.config(channels=(320, 640, 1280, 1280), context=768),
    "sd2": unet_sdxl.sd2((320, 640, 1280, 1280), 1024),
    "sd2_inpaint": unet_sdxl.sd2((320, 640, 1280, 1280), 1024, in_channels=9),
    "sdxl": unet_sdxl.sdxl((320, 640, 1280), 2048, (1, 2, 10), 1280),
    "sdxl_inpaint": unet_sdxl.sdxl((320, 640, 1280), 2048, (1, 2, 10), 1280, in_channels=9),
    "sdxl_refiner": unet_sdxl.refiner((384, 768, 1536, 1536), 1280, 4, 1280),
    "ssd1b": unet_sdxl.ssd1b((1, 2, 4), ((4, 4, 10), (2, 1, 1), 1), channels=(320, 640, 1280), context=2048, pooled=1280),
    "vega": unet_sdxl.vega((1, 1, 2), channels=(320, 640, 1280), context=2048, pooled=1280),
}
TRANSFORMERS = {
    "flux_dev": {}, "flux_schnell": {"guidance": False}, "flux_fill": {"in_channels": 384}, "flux_control": {"in_channels": 128},
}
# Parameters in millions as the model cards or the papers' tables give them.
SIZES = {"sd1": 860, "sd2": 866, "sdxl": 2567, "ssd1b": 1300, "vega": 745, "flux_dev": 11901, "flux_schnell": 11891, "sd35_medium": 2500, "sd35_large": 8100}
# What published files hold beyond the reference's tensors, none of it used in generation. These come from file listings, not from a reference.
UNUSED = {
    "sd2": [["cond_stage_model.model.logit_scale", []], ["betas", [1000]], ["alphas_cumprod", [1000]], ["alphas_cumprod_prev", [1000]], ["sqrt_alphas_cumprod", [1000]], ["posterior_variance", [1000]], ["model_ema.decay", []], ["model_ema.num_updates", []]],
    "sdxl": [["conditioner.embedders.0.transformer.text_model.embeddings.position_ids", [1, 77]], ["conditioner.embedders.1.model.logit_scale", []], ["denoiser.sigmas", [1000]]],
    "sdxl_refiner": [["conditioner.embedders.0.model.logit_scale", []], ["denoiser.sigmas", [1000]]],
}
LDM, VAE, FIRST, SECOND = names.UNET_PREFIX, names.VAE_PREFIX, "conditioner.embedders.0.", "conditioner.embedders.1.model."
SDXL_REST = [[VAE, "vae_sd"], [FIRST + "transformer.", "clip_l"], [SECOND, "open_clip_bigg"]]
FLUX_REST = [["vae.", "vae_flux"], ["text_encoders.clip_l.transformer.", "clip_l"], ["text_encoders.t5xxl.transformer.", "t5xxl"]]

SD3_REST = [[VAE, "vae_flux"], [FLUX_REST[1][0], "clip_l"], ["text_encoders.clip_g.transformer.", "clip_g"], FLUX_REST[2]]


def meta(make):
    with torch.device("meta"):
        return make()


def rows_with_shapes(rows, state):
    names.assemble(rows, state)
    return [[name, list(names.apply(op, [state[s] for s in sources]).shape), op, [[s, list(state[s].shape)] for s in sources]] for name, op, sources in rows]


def same(state, prefix=""):
    return [(prefix + name, "same", [prefix + name]) for name in state], {prefix + name: value for name, value in state.items()}


def agree(back, state):
    assert back.keys() == state.keys() and all(back[name].numel() == value.numel() for name, value in state.items())


def unet_set(config):
    model = meta(lambda: UNet2DConditionModel(**config))
    state, rows = dict(model.state_dict()), names.unet_rows(model.state_dict(), "")
    agree(single_file.convert_ldm_unet_checkpoint({LDM + name: value for name, value in names.assemble(rows, state).items()}, dict(model.config)), state)
    return rows_with_shapes(rows, state), count(state)


def vae_set(config):
    model = meta(lambda: AutoencoderKL(**config))
    state, rows = dict(model.state_dict()), names.vae_rows(model.state_dict())
    agree(single_file.convert_ldm_vae_checkpoint({VAE + name: value for name, value in names.assemble(rows, state).items()}, dict(model.config)), state)
    return rows_with_shapes(rows, state)


def flux_set(**options):
    model = meta(lambda: FluxTransformer2DModel(**flux.config(layers=19, single_layers=38, heads=24, context=4096, pooled=768, **options)))
    state, rows = dict(model.state_dict()), names.flux_rows(model.state_dict())
    agree(single_file.convert_flux_transformer_checkpoint_to_diffusers(names.assemble(rows, state)), state)
    return rows_with_shapes(rows, state), count(state)


def sd3_set(options):
    model = meta(lambda: SD3Transformer2DModel(**sd3.config(**options)))
    state, rows = dict(model.state_dict()), names.sd3_rows(model.state_dict())
    agree(single_file.convert_sd3_transformer_checkpoint_to_diffusers(names.assemble(rows, state)), state)
    return rows_with_shapes(rows, state), count(state)


def clip_model(width, layers, heads, act):
    config = CLIPTextConfig(hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=heads, hidden_act=act, projection_dim=width, bos_token_id=0, eos_token_id=1)
    model = meta(lambda: CLIPTextModelWithProjection(config))
    return model, dict(model.named_parameters())


def open_clip_set(width, layers, heads):
    model, state = clip_model(width, layers, heads, "gelu")
    rows = names.open_clip_rows(state)
    agree(single_file.convert_open_clip_checkpoint(model, {SECOND + name: value for name, value in names.assemble(rows, state).items()}, prefix=SECOND), state)
    return rows_with_shapes(rows, state)


def clip_g_set():
    """bigG in the names of the reference, as files of SD3 have it."""
    return rows_with_shapes(*same(clip_model(1280, 32, 20, "gelu")[1]))


def clip_l_set():
    _, state = clip_model(768, 12, 12, "quick_gelu")
    del state["text_projection.weight"]
    return rows_with_shapes(*same(state))


def t5_set():
    model = meta(lambda: T5EncoderModel(T5Config(vocab_size=32128, d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64, feed_forward_proj="gated-gelu")))
    return rows_with_shapes(*same(dict(model.named_parameters())))


def count(state):
    return sum(value.numel() for value in state.values()) / 1e6


def real():
    sets = {
        "vae_sd": vae_set(vae.config((128, 256, 512, 512))), "vae_flux": vae_set(vae.flux_config((128, 256, 512, 512))),
        "clip_l": clip_l_set(), "open_clip_h": open_clip_set(1024, 24, 16), "open_clip_bigg": open_clip_set(1280, 32, 20), "clip_g": clip_g_set(), "t5xxl": t5_set(),
    }
    assert len(sets["t5xxl"]) == 219
    for name, config in UNETS.items():
        sets[f"unet_{name}"], size = unet_set(config)
        print(f"{name}: {len(sets[f'unet_{name}'])} tensors, {size:.1f} million")
        assert abs(size / SIZES.get(name, size) - 1) < 0.03
    for name, options in TRANSFORMERS.items():
        sets[name], size = flux_set(**options)
        print(f"{name}: {len(sets[name])} tensors, {size:.1f} million")
        assert abs(size / SIZES.get(name, size) - 1) < 0.001
    for name, options in sd3.REAL.items():
        sets[name], size = sd3_set(options)
        print(f"{name}: {len(sets[name])} tensors, {size:.1f} million")
        assert abs(size / SIZES.get(name, size) - 1) < 0.03
    checkpoints = {"sd1": [[LDM, "unet_sd1"], [VAE, "vae_sd"], [names.TEXT_PREFIX, "clip_l"]]}
    checkpoints |= {name: [[LDM, f"unet_{name}"], [VAE, "vae_sd"], ["cond_stage_model.model.", "open_clip_h"]] for name in ("sd2", "sd2_inpaint")}
    checkpoints |= {name: [[LDM, f"unet_{name}"], *SDXL_REST] for name in ("sdxl", "sdxl_inpaint", "ssd1b", "vega")}
    checkpoints["sdxl_refiner"] = [[LDM, "unet_sdxl_refiner"], [VAE, "vae_sd"], [FIRST + "model.", "open_clip_bigg"]]
    checkpoints |= {name: [["", name]] for name in TRANSFORMERS}
    checkpoints |= {f"{name}_all_in_one": [[LDM, name], *FLUX_REST] for name in TRANSFORMERS}
    checkpoints |= {name: [["", name]] for name in sd3.REAL} | {f"{name}_all_in_one": [[LDM, name], *SD3_REST] for name in sd3.REAL}
    checkpoints |= {name: [["", name]] for name in ("vae_flux", "clip_l", "clip_g", "t5xxl")}
    pipeline.save_names("real_names", {
        "source": f"{flux.VERSION}, transformers {fixture.version('transformers')}, meta device", "script": "oracle/real_names.py",
        "notes": "rows: [name in file, shape, operation, [[reference name, shape], ...]]; checkpoints: [[prefix, set], ...]; SD2 folders hold 23 of open_clip_h's 24 layers and no text_projection; unused: seen in published files, from listings, not from a reference",
        "checkpoints": checkpoints, "unused": UNUSED, "sets": sets,
    })


def tiny():
    """Places of the procedural weights of the pipelines. Reference names carry the component, as in the fixtures' `procedural`."""
    sets = {}

    def add(name, component, rows, state, table):
        assert {component + key for key in state} == {key for key in table if key.startswith(component)}
        sets[name] = rows_with_shapes(pipeline.prefixed(component, rows), {component + key: value for key, value in state.items()})

    text, network, vae_model, table, _ = sd2_pipeline.build()
    add("sd2_unet", "unet.", names.unet_rows(network.state_dict(), ""), network.state_dict(), table)
    add("sd_vae", "vae.", names.vae_rows(vae_model.state_dict()), vae_model.state_dict(), table)
    add("sd2_text", "text_encoder.", names.open_clip_rows(text.state_dict()), text.state_dict(), table)
    first, second, network, _, table, _ = sdxl_pipeline.build()
    add("sdxl_unet", "unet.", names.unet_rows(network.state_dict(), ""), network.state_dict(), table)
    add("sdxl_text_1", "text_encoder.", *same(first.state_dict(), "text_model."), table)
    add("sdxl_text_2", "text_encoder_2.", names.open_clip_rows(second.state_dict()), second.state_dict(), table)
    _, network, table, _ = sdxl_refiner.build()
    add("sdxl_refiner_unet", "unet.", names.unet_rows(network.state_dict(), ""), network.state_dict(), table)
    for name in flux_pipeline.TRANSFORMERS:
        clip, t5, transformer, vae_model, table, _ = flux_pipeline.build(name)
        add(f"flux_{name}", "transformer.", names.flux_rows(transformer.state_dict()), transformer.state_dict(), table)
    add("flux_vae", "vae.", names.vae_rows(vae_model.state_dict()), vae_model.state_dict(), table)
    add("flux_clip", "text_encoder.", *same(clip.state_dict(), "text_model."), table)
    add("flux_t5", "text_encoder_2.", *same(dict(t5.named_parameters())), table)
    for name in sd3_pipeline.TRANSFORMERS:
        first, second, t5, transformer, vae_model, table, _ = sd3_pipeline.build(name)
        add(f"sd3_{name}", "transformer.", names.sd3_rows(transformer.state_dict()), transformer.state_dict(), table)
        add("sd3_vae", "vae.", names.vae_rows(vae_model.state_dict()), vae_model.state_dict(), table)
        add("sd3_clip_l", "text_encoder.", *same(first.state_dict(), "text_model."), table)
        add("sd3_clip_g", "text_encoder_2.", *same(second.state_dict()), table)
        if t5:
            add("sd3_t5", "text_encoder_3.", *same(dict(t5.named_parameters())), table)
    rest = [["vae.", "flux_vae"], ["text_encoders.clip_l.transformer.", "flux_clip"], ["text_encoders.t5xxl.transformer.", "flux_t5"]]
    checkpoints = {
        "sd2_pipeline": [[LDM, "sd2_unet"], [VAE, "sd_vae"], ["cond_stage_model.model.", "sd2_text"]],
        "sdxl_refiner_pipeline": [[LDM, "sdxl_refiner_unet"], [VAE, "sd_vae"], ["conditioner.embedders.0.model.", "sdxl_text_2"]],
        "sdxl_pipeline": [[LDM, "sdxl_unet"], [VAE, "sd_vae"], [FIRST + "transformer.", "sdxl_text_1"], [SECOND, "sdxl_text_2"]],
    } | {f"flux_{name}_pipeline": [[LDM, f"flux_{name}"], *rest] for name in flux_pipeline.TRANSFORMERS}
    sd3_rest = [[VAE, "sd3_vae"], ["text_encoders.clip_l.transformer.", "sd3_clip_l"], ["text_encoders.clip_g.transformer.", "sd3_clip_g"], ["text_encoders.t5xxl.transformer.", "sd3_t5"]]
    checkpoints |= {"sd3_medium_pipeline": [[LDM, "sd3_medium"], *sd3_rest], "sd3_no_t5_pipeline": [[LDM, "sd3_no_t5"], *sd3_rest[:3]]}
    pipeline.save_names("pipeline_names", {
        "source": f"{flux.VERSION}", "script": "oracle/real_names.py", "notes": "as real_names; a Flux set alone, without prefix, is the separate file of that component", "checkpoints": checkpoints, "sets": sets,
    })


def main():
    real()
    tiny()


if __name__ == "__main__":
    main()
