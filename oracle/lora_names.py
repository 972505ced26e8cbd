"""The names that trainers and programs give to one LoRA of the tiny SD1 of `sd1_names.json`.

`files` maps a spelling to rows `[name in the file, shape, canonical name]`; the canonical name is diffusers' module with `down`, `up` or
`alpha`. Where a package writes the spelling, its own functions make the names: peft (`get_peft_model_state_dict`), diffusers
(`save_lora_weights`, `convert_state_dict_to_diffusers`, `convert_state_dict_to_kohya`), lycoris (`create_lycoris`). Names of the original
modules come from `sd1_names.json`, which diffusers' converter confirms.
"""

import json
import pathlib
import tempfile

import lycoris
import peft
import torch
from diffusers import StableDiffusionPipeline
from diffusers.utils import state_dict_utils
from safetensors.torch import load_file
from transformers import CLIPTextConfig, CLIPTextModel

import fixture
import unet

RANK = 2
UNET = ["attn1.to_q", "attn2.to_k", "attn2.to_out.0", "ff.net.0.proj", "ff.net.2", "proj_in", "resnets.0.conv1", "time_emb_proj"]
TEXT = ["q_proj", "out_proj", "fc1"]


def trained(model, targets):
    """{module: (down, up)} of a model with a fresh LoRA, and its state dict with the adapter's name."""
    modules = [n for n, _ in model.named_modules() if n.endswith(tuple("." + t for t in targets))]
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules=modules))
    full = {k: v for k, v in wrapped.state_dict().items() if "lora_" in k}
    plain = {k.removeprefix("base_model.model."): v for k, v in peft.get_peft_model_state_dict(wrapped).items()}
    return plain, full


def text_root(key):
    """Recent transformers have no `text_model.`; files keep it."""
    return key if key.startswith("text_model.") else f"text_model.{key}"


def canonical(component, key):
    module, _, kind = key.partition(".lora_")
    return f"{component}.{module}.{'down' if kind.startswith('A') else 'up'}"


def old_processors(key):
    """The names of attention processors, which diffusers' own table takes back to today's."""
    for today, old in (("to_q.lora_A", "processor.to_q_lora.down"), ("to_k.lora_A", "processor.to_k_lora.down"), ("to_v.lora_A", "processor.to_v_lora.down"), ("to_out.0.lora_A", "processor.to_out_lora.down")):
        for t, o in ((today, old), (today.replace("_A", "_B"), old.replace("down", "up"))):
            if t in key:
                return key.replace(t, o)
    return key.replace(".lora_A.", ".lora.down.").replace(".lora_B.", ".lora.up.")


def main():
    torch.manual_seed(0)
    unet_model, _ = unet.build(context=64)
    text_model = CLIPTextModel(CLIPTextConfig(hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=1, vocab_size=100))
    pairs = json.loads((fixture.FIXTURES / "sd1_names.json").read_text())["names"]
    original = {d.removesuffix(".weight"): o.removesuffix(".weight") for d, _, o, _ in pairs}

    lycoris.LycorisNetwork.apply_preset({"target_module": [type(m).__name__ for m in (unet_model,)], "enable_conv": True})
    network = lycoris.create_lycoris(unet_model, 1.0, linear_dim=RANK, linear_alpha=1, conv_dim=RANK, conv_alpha=1, algo="lora")
    lycoris_names = {m.lora_name for m in network.loras}

    unet_plain, unet_full = trained(unet_model, UNET)
    text_plain, text_full = trained(text_model, TEXT)
    text_plain = {text_root(k): v for k, v in text_plain.items()}
    text_full = {"base_model.model." + text_root(k.removeprefix("base_model.model.")): v for k, v in text_full.items()}
    parts = [("unet", k, v) for k, v in unet_plain.items()] + [("text_encoder", k, v) for k, v in text_plain.items()]

    with tempfile.TemporaryDirectory() as folder:
        StableDiffusionPipeline.save_lora_weights(folder, unet_lora_layers=unet_plain, text_encoder_lora_layers=text_plain)
        saved = load_file(next(pathlib.Path(folder).glob("*.safetensors")))
    files = {}
    assert set(saved) == {f"{c}.{k}" for c, k, _ in parts}
    files["diffusers"] = [[f"{c}.{k}", list(v.shape), canonical(c, k)] for c, k, v in parts]
    files["PEFT with the adapter's name"] = [[k, list(v.shape), canonical(c, k.removeprefix("base_model.model."))] for c, full in (("unet", unet_full), ("text_encoder", text_full)) for k, v in full.items()]

    def converted(function):
        rows = []
        for c, k, v in parts:
            for name, value in function({f"{c}.{k}": v}).items():
                whole = canonical(c, k)
                rows.append([name, list(value.shape), whole.rsplit(".", 1)[0] + ".alpha" if name.endswith(".alpha") else whole])
        return rows

    to_kohya = lambda d: state_dict_utils.convert_state_dict_to_kohya(d, original_type=state_dict_utils.StateDictType.PEFT)
    files["kohya"] = converted(to_kohya)
    files["older diffusers"] = [[f"{c}.{old_processors(k)}", list(v.shape), canonical(c, k)] for c, k, v in parts]
    for name, _, c in files["older diffusers"]:
        if ".processor." in name:
            (today,) = state_dict_utils.convert_unet_state_dict_to_peft({name.removeprefix("unet."): torch.zeros(1)})
            assert canonical("unet", today.replace(".processor", "")) == c, (name, today, c)
    to_diffusers = lambda d: state_dict_utils.convert_state_dict_to_diffusers(d, original_type=state_dict_utils.StateDictType.PEFT)
    files["diffusers with lora.down"] = converted(to_diffusers)

    def spelled(title, module, down, up):
        files[title] = [[module(c, k.partition(".lora_")[0]) + (down if ".lora_A." in k else up), list(v.shape), canonical(c, k)] for c, k, v in parts]

    here = lambda c, m: original[f"{c}.{m}"]
    flat = lambda m: m.replace(".", "_")
    te = lambda m: m.replace("cond_stage_model.transformer.", "")
    spelled("kohya, original modules", lambda c, m: ("lora_unet_" if c == "unet" else "lora_te_") + flat(te(here(c, m)).removeprefix("model.diffusion_model.")), ".lora_down.weight", ".lora_up.weight")
    spelled("ComfyUI", lambda c, m: te(here(c, m)).replace("model.diffusion_model.", "diffusion_model.") if c == "unet" else "text_encoders.clip_l.transformer." + te(here(c, m)), ".lora_A.weight", ".lora_B.weight")
    spelled("DiffSynth", lambda c, m: m, ".lora_A.default.weight", ".lora_B.default.weight")
    spelled("OneTrainer", lambda c, m: ("unet." if c == "unet" else "text_encoder.") + m, ".lora_down.weight", ".lora_up.weight")
    spelled("bare", lambda c, m: m, ".lora_down.weight", ".lora_up.weight")
    spelled("original checkpoint", lambda c, m: here(c, m), ".lora_A.weight", ".lora_B.weight")
    spelled("llama.cpp", lambda c, m: here(c, m), ".weight.lora_a", ".weight.lora_b")
    spelled("LyCORIS", lambda c, m: "lycoris_" + flat(m), ".lora_down.weight", ".lora_up.weight")
    missing = {"lycoris_" + flat(k.partition(".lora_")[0]) for k in unet_plain} - lycoris_names
    assert not missing, sorted(missing)[:5]

    versions = ", ".join(f"{p} {fixture.version(p)}" for p in ("peft", "diffusers", "lycoris-lora"))
    fixture.save_json("lora_names", {"source": versions, "script": "oracle/lora_names.py", "rank": RANK, "files": files})


if __name__ == "__main__":
    main()
