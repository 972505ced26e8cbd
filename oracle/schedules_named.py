"""Sigma schedules by name, for Stable Diffusion's table, SD3's flow (shift 3) and Flux's (mu 1.15).

References: ComfyUI (COMFYUI names a checkout, see comfyui.py), RES4LYF's bong_tangent (RES4LYF names a checkout), k-diffusion, diffusers' Flux2, Ideogram4
and LTX pipelines and LCMScheduler. ComfyUI keeps levels in f32. smoothstep is its formula alone: timestep round(999 s), s = u^2 (3 - 2u), u = 1 - i/n.
"""

import math

import numpy as np
import torch
from diffusers import LCMScheduler
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu
from diffusers.pipelines.ideogram4 import pipeline_ideogram4
from k_diffusion import sampling

import comfyui
import fixture
import schedules_flux

STEPS = [1, 2, 3, 4, 5, 8, 10, 15, 20, 28, 30, 50]
SHIFT, FLUX_MU = 3.0, 1.15
SIZES = {"flux": [64, 256, 1024, 4096, 16384], "flux2": [256, 1024, 4096, 4300, 4301, 16384], "ltx2": [1024, 4096, 20000], "logit_normal": [256, 1024, 4096]}
DOMAINS = {"sd": lambda: comfyui.model_sampling(False), "flow": lambda: comfyui.model_sampling(True, SHIFT), "flux": lambda: comfyui.flux_sampling(FLUX_MU)}


def levels_of(name, cls):
    """The table of optimised levels in a file of ComfyUI's nodes."""
    return comfyui.run_part(comfyui.checkout() / "comfy_extras" / f"{name}.py", "NOISE_LEVELS", f"class {cls}", {})["NOISE_LEVELS"]


def log_linear(levels, count):
    """As both nodes interpolate: evenly over the list, in the logarithm."""
    levels = np.array(levels)[::-1]
    return np.exp(np.interp(np.linspace(0, 1, count), np.linspace(0, 1, len(levels)), np.log(levels)))[::-1]


def bong_tangent(levels, steps):
    scope = {"torch": torch, "pi": math.pi, "atan": math.atan}
    comfyui.run_part(comfyui.checkout("RES4LYF") / "sigmas.py", "def get_bong_tangent_sigmas", None, scope)
    return scope["bong_tangent_scheduler"](levels, steps).double() * levels.sigma_max.double()


def lcm(levels, steps):
    scheduler = LCMScheduler(original_inference_steps=50)
    scheduler.set_timesteps(steps)
    return torch.cat([levels.sigmas[scheduler.timesteps].double(), torch.zeros(1)])


def smoothstep(levels, steps):
    u = 1 - np.arange(steps) / steps
    places = np.rint((len(levels.sigmas) - 1) * u * u * (3 - 2 * u)).astype(int)
    return torch.cat([levels.sigmas[places].double(), torch.zeros(1)])


def optimised(name, cls, pick):
    def schedule(_levels, steps):
        row = pick(levels_of(name, cls), steps)
        values = row if len(row) == steps + 1 else log_linear(row, steps + 1)
        return torch.tensor([*values[:-1], 0.0], dtype=torch.float64)
    return schedule


def by_range(function):
    return lambda levels, steps: function(steps, float(levels.sigma_min), float(levels.sigma_max))


def table():
    """Name to reference, domains, function and step counts it is asked for."""
    samplers = comfyui.module("comfy.samplers")
    sd, flows, every = ["sd"], ["flow", "flux"], ["sd", "flow", "flux"]
    some = [n for n in STEPS if n > 1]
    return {
        "discrete": ("ComfyUI normal_scheduler", every, lambda m, n: samplers.normal_scheduler(m, n), STEPS),
        "sgm_uniform": ("ComfyUI normal_scheduler sgm", every, lambda m, n: samplers.normal_scheduler(m, n, sgm=True), STEPS),
        "karras": ("k-diffusion get_sigmas_karras", every, by_range(sampling.get_sigmas_karras), STEPS),
        "exponential": ("k-diffusion get_sigmas_exponential", every, by_range(sampling.get_sigmas_exponential), STEPS),
        "simple": ("ComfyUI simple_scheduler", every, samplers.simple_scheduler, STEPS),
        "beta": ("ComfyUI beta_scheduler", every, samplers.beta_scheduler, STEPS),
        "kl_optimal": ("ComfyUI kl_optimal_scheduler", every, by_range(samplers.kl_optimal_scheduler), some),
        "ays": ("ComfyUI AlignYourStepsScheduler SD1", sd, optimised("nodes_align_your_steps", "AlignYourStepsScheduler", lambda t, _n: t["SD1"]), STEPS),
        "ays.sdxl": ("ComfyUI AlignYourStepsScheduler SDXL", sd, optimised("nodes_align_your_steps", "AlignYourStepsScheduler", lambda t, _n: t["SDXL"]), STEPS),
        "gits": ("ComfyUI GITSScheduler 1.20", sd, optimised("nodes_gits", "GITSScheduler", lambda t, n: t[1.20][min(n, 20) - 2]), some),
        "smoothstep": ("the formula", every, smoothstep, STEPS),
        "lcm": ("diffusers LCMScheduler", ["sd", "flow"], lcm, STEPS),
        "bong_tangent": ("RES4LYF bong_tangent_scheduler", every, bong_tangent, some),
    }


def flux2(steps, tokens):
    mu = compute_empirical_mu(tokens, steps)
    return [np.exp(mu) / (np.exp(mu) + (1 / u - 1)) for u in 1 - np.arange(steps) / steps] + [0.0]


def ltx2(steps, tokens):
    """ComfyUI's LTXVScheduler with its defaults, on a latent of that many positions."""
    scope = {"torch": torch, "math": math, "steps": steps, "tokens": tokens, "max_shift": 2.05, "base_shift": 0.95, "stretch": True, "terminal": 0.1}
    with fixture.double_precision():
        comfyui.run_part(comfyui.checkout() / "comfy_extras" / "nodes_lt.py", "sigmas = torch.linspace", "        return io.NodeOutput", scope, "class LTXVScheduler")
    return scope["sigmas"].tolist()


def logit_normal(steps, tokens):
    side = int(16 * tokens**0.5)
    mu = pipeline_ideogram4._resolution_aware_mu(side, side, 0.0)
    return pipeline_ideogram4._logit_normal_sigmas(steps, mu, 1.75).tolist() + [0.0]


SIZED = {
    "flux": ("diffusers FlowMatchEulerDiscreteScheduler, calculate_shift", lambda n, tokens: schedules_flux.dev(n, tokens).tolist()),
    "flux2": ("diffusers compute_empirical_mu", flux2),
    "ltx2": ("ComfyUI LTXVScheduler", ltx2),
    "logit_normal": ("diffusers _logit_normal_sigmas", logit_normal),
}


def sigmas(domain, name, steps):
    """The levels of one schedule, f64."""
    if name in SIZED:
        return torch.tensor(SIZED[name][1](steps, 4096), dtype=torch.float64)
    return torch.as_tensor(table()[name][2](DOMAINS[domain](), steps)).double()


def main():
    rows = [
        {"reference": reference, "table": domain, "name": name, "steps": n, "sigmas": torch.as_tensor(function(DOMAINS[domain](), n)).tolist()}
        for name, (reference, domains, function, steps) in table().items() for domain in domains for n in steps
    ]
    rows += [
        {"reference": reference, "table": "flow", "name": name, "steps": n, "tokens": tokens, "sigmas": function(n, tokens)}
        for name, (reference, function) in SIZED.items() for tokens in SIZES[name] for n in [2, 4, 10, 20, 28]
    ]
    beta = comfyui.module("comfy.samplers").beta_scheduler
    rows += [{"reference": "ComfyUI beta_scheduler", "table": "sd", "name": "beta", "steps": 12, "args": f"alpha={a},beta={b}", "sigmas": beta(DOMAINS["sd"](), 12, a, b).tolist()} for a, b in ((1.0, 1.3), (0.4, 1.2), (3.0, 0.5))]
    fixture.save_json("schedules_named", {
        "source": f"ComfyUI {comfyui.REVISION}, RES4LYF, k-diffusion {fixture.version('k-diffusion')}, diffusers {fixture.version('diffusers')}",
        "script": "oracle/schedules_named.py",
        "notes": f"table sd is Stable Diffusion's, flow has shift {SHIFT} and timesteps of 1000, flux mu {FLUX_MU}; bong_tangent is scaled by the largest level; tokens of the pictures",
        "rows": rows,
    })


if __name__ == "__main__":
    main()
