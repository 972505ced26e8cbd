"""One linear layer or convolution for every kind of adapter, as peft and lycoris apply it.

`weight.<layer>.{weight,bias}` is the layer, `weight.<key>` are the tensors of one adapter file with the keys that the
package writes. `output.<layer>@<strength>` is the result for `input.<layer>`.
"""

import peft
import torch
from lycoris.modules.full import FullModule
from lycoris.modules.locon import LoConModule
from lycoris.modules.loha import LohaModule
from lycoris.modules.lokr import LokrModule
from lycoris.modules.norms import NormModule
from torch import nn

import fixture

STRENGTHS = (1.0, -0.625)
LYCORIS = {
    # name: (class, layer, arguments)
    "lora": (LoConModule, "linear", {}),
    "lora_rs": (LoConModule, "linear", {"rs_lora": True}),
    "dora": (LoConModule, "linear", {"weight_decompose": True}),
    "dora_in": (LoConModule, "linear", {"weight_decompose": True, "wd_on_out": False}),
    "loha": (LohaModule, "linear", {}),
    "loha_dora": (LohaModule, "linear", {"weight_decompose": True}),
    "lokr": (LokrModule, "linear", {"factor": 4, "lora_dim": 2}),
    "lokr_both": (LokrModule, "linear", {"factor": 8, "decompose_both": True, "lora_dim": 2}),
    "lokr_full": (LokrModule, "linear", {"full_matrix": True}),
    "lokr_dora": (LokrModule, "linear", {"factor": 4, "weight_decompose": True}),
    "diff": (FullModule, "linear", {}),
    "conv": (LoConModule, "conv", {}),
    "conv_tucker": (LoConModule, "conv", {"use_tucker": True}),
    "conv_dora": (LoConModule, "conv", {"weight_decompose": True}),
    "conv_dora_in": (LoConModule, "conv", {"weight_decompose": True, "wd_on_out": False}),
    "conv_loha": (LohaModule, "conv", {}),
    "conv_loha_tucker": (LohaModule, "conv", {"use_tucker": True}),
    "conv_lokr": (LokrModule, "conv", {"factor": 2, "lora_dim": 2}),
    "conv_lokr_tucker": (LokrModule, "conv", {"factor": 2, "lora_dim": 2, "use_tucker": True}),
    "conv_lokr_full": (LokrModule, "conv", {"factor": 2, "full_matrix": True}),
    "conv_diff": (FullModule, "conv", {}),
    "norm": (NormModule, "norm", {}),
}
PEFT = {
    "peft": ("linear", {"lora_alpha": 8}),
    "peft_rs": ("linear", {"lora_alpha": 8, "use_rslora": True}),
    "peft_dora": ("linear", {"lora_alpha": 2, "use_dora": True}),
    "peft_bias": ("linear", {"lora_alpha": 6, "lora_bias": True}),
    "peft_conv": ("conv", {"lora_alpha": 8}),
    "peft_conv_dora": ("conv", {"lora_alpha": 2, "use_dora": True}),
}


def layer(kind):
    if kind == "norm":
        return nn.LayerNorm(24)
    return nn.Linear(24, 32) if kind == "linear" else nn.Conv2d(8, 12, 3, stride=2, padding=1)


def randomise(parameters, g):
    """Values that are exact in f32."""
    for p in parameters:
        with torch.no_grad():
            p.copy_((torch.randn(p.shape, generator=g, dtype=torch.float64) * 0.3).float())


def main():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    g = torch.Generator().manual_seed(20240611)
    weights, inputs, outputs, layers = {}, {}, {}, {}

    def start(name, kind):
        base = layer(kind)
        randomise(base.parameters(), g)
        shape = (2, 8, 7, 6) if kind == "conv" else (3, 24)
        x = torch.randn(shape, generator=g).float().double()
        weights.update({f"{name}.{k}": v.clone() for k, v in base.state_dict().items()})
        inputs[name], layers[name] = x.float(), kind
        return base, x

    for name, (cls, kind, arguments) in LYCORIS.items():
        base, x = start(name, kind)
        extra = {} if kind == "norm" else {"lora_dim": 4, "alpha": 3}
        module = cls(f"lora_unet_{name}", base, 1.0, **{**extra, **arguments}).double()
        if cls is FullModule:
            module.apply_to()
        trained = [p for n, p in module.named_parameters() if not n.startswith("org_module") and "dora_scale" not in n]
        randomise(trained, g)
        if getattr(module, "wd", False):
            with torch.no_grad():
                module.dora_scale = nn.Parameter((module.dora_scale * (1 + torch.rand(module.dora_scale.shape, generator=g))).float().double())
        if cls is FullModule:
            # Its file holds differences; what is trained is the weight itself.
            original = {k: weights[f"{name}.{k}"] for k in ("weight", "bias")}
            file = {"diff": (module.weight - original["weight"]).float(), "diff_b": (module.bias - original["bias"]).float()}
            before, full = (original["weight"], original["bias"]), [original["weight"] + file["diff"].double(), original["bias"] + file["diff_b"].double()]
        elif cls is NormModule:
            file = module.custom_state_dict() if hasattr(module, "custom_state_dict") else {}
            file = {k: v.float() for k, v in (file or {"w_norm": module.w_norm, "b_norm": module.b_norm}).items()}
            before, full = (base.weight, base.bias), (base.weight + file["w_norm"].double(), base.bias + file["b_norm"].double())
        else:
            # What training sees. `get_merged_weight` of LoHa and LoKr multiplies by the scale twice.
            file = module.custom_state_dict()
            before, full = None, module.forward
        weights.update({f"lora_unet_{name}.{k}": torch.as_tensor(v).detach() for k, v in file.items()})
        for s in STRENGTHS:
            with torch.no_grad():
                if before is None:
                    plain = run(kind, x, base.weight, base.bias)
                    outputs[f"{name}@{s}"] = plain + s * (full(x) - plain)
                else:
                    w, b = (a.double() + s * (z.double() - a.double()) for a, z in zip(before, full))
                    outputs[f"{name}@{s}"] = run(kind, x, w, b)

    metadata = {}
    for name, (kind, arguments) in PEFT.items():
        base, x = start(name, kind)
        model = nn.Sequential()
        model.add_module(name, base)
        config = peft.LoraConfig(r=4, target_modules=[name], init_lora_weights=False, **arguments)
        model = peft.get_peft_model(model, config).double()
        randomise((p for n, p in model.named_parameters() if "lora_" in n and "magnitude" not in n), g)
        for n, p in model.named_parameters():
            if "magnitude" in n:
                with torch.no_grad():
                    p.copy_((p * (1 + torch.rand(p.shape, generator=g))).float())
        file = peft.get_peft_model_state_dict(model)
        weights.update({k: v.detach() for k, v in file.items()})
        metadata[name] = [4, arguments["lora_alpha"], arguments.get("use_rslora", False)]
        with torch.no_grad():
            plain, full = run(kind, x, base.weight if hasattr(base, "weight") else base, base.bias), model(x)
            for s in STRENGTHS:
                outputs[f"{name}@{s}"] = plain + s * (full - plain)

    torch.set_default_dtype(torch.float32)
    config = {"layers": layers, "strengths": STRENGTHS, "peft": metadata}
    source = f"peft {fixture.version('peft')}, lycoris-lora {fixture.version('lycoris-lora')}"
    notes = "Strength s means y + s (y' - y) with y' of the package at strength 1; for DoRA the packages disagree about other strengths."
    fixture.save("lora_kinds", "lora_kinds.py", source, config, weights=weights, inputs=inputs, outputs=outputs, notes=notes)


def run(kind, x, w, b):
    if kind == "norm":
        return nn.functional.layer_norm(x, (24,), w, b, 1e-5)
    return nn.functional.linear(x, w, b) if kind == "linear" else nn.functional.conv2d(x, w, b, stride=2, padding=1)


if __name__ == "__main__":
    main()
