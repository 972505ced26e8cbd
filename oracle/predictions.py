"""What raw predictions mean: the network's input, the estimate, and a noised latent, by noise level.

References, in f64: ComfyUI's EPS, V_PREDICTION and CONST (COMFYUI names a checkout, see comfyui.py); k-diffusion's wrappers agree with the first two.
"""

import types

import torch
from k_diffusion import external

import comfyui
import fixture

LEVELS = {"eps": [0.03, 0.5, 1.0, 3.7, 14.6, 120.0], "v": [0.002, 0.03, 0.5, 1.0, 3.7, 14.6, 120.0], "flow": [0.001, 0.1, 0.5, 0.93, 1.0]}


def main():
    sampling = comfyui.module("comfy.model_sampling")
    kinds = {"eps": sampling.EPS, "v": sampling.V_PREDICTION, "flow": sampling.CONST}
    x, f, noise = (fixture.randn(seed, 1, 4) for seed in (1, 2, 3))
    rows = []
    with fixture.double_precision(), torch.no_grad():
        for name, kind in kinds.items():
            reference = kind()
            reference.sigma_data = 1.0
            for level in LEVELS[name]:
                sigma = torch.tensor([level])
                row = {
                    "input": reference.calculate_input(sigma, x * level),
                    "denoised": reference.calculate_denoised(sigma, f, x * level),
                    "noised": reference.noise_scaling(sigma, noise.clone(), x),
                }
                wrapper = {"eps": external.DiscreteEpsDDPMDenoiser, "v": external.DiscreteVDDPMDenoiser}.get(name)
                if wrapper:
                    scalings = [s.item() for s in wrapper.get_scalings(types.SimpleNamespace(sigma_data=1.0), sigma)]
                    c_skip, c_out, c_in = scalings if name == "v" else (1.0, *scalings)
                    assert torch.allclose(row["denoised"], c_skip * x * level + c_out * f) and torch.allclose(row["input"], c_in * x * level)
                rows.append({"prediction": name, "sigma": level} | {k: v.flatten().tolist() for k, v in row.items()})
    fixture.save_json("predictions", {
        "source": f"ComfyUI {comfyui.REVISION} EPS, V_PREDICTION, CONST; k-diffusion {fixture.version('k-diffusion')}", "script": "oracle/predictions.py",
        "notes": "the latent is sigma * x, the raw prediction f; noised is of the clean latent x", "x": x.flatten().tolist(), "f": f.flatten().tolist(), "noise": noise.flatten().tolist(), "rows": rows,
    })


if __name__ == "__main__":
    main()
