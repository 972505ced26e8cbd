"""ComfyUI's samplers and schedules, from a checkout that the environment variable COMFYUI names.

Only its modules of formulas are imported, on the CPU; what they ask of the program around them is answered here.
"""

import importlib
import os
import pathlib
import sys
import textwrap
import types

REVISION = "a125cd84b054a57729b5eecab930ca9408719832"


def checkout(variable="COMFYUI"):
    """The folder that an environment variable names."""
    if variable not in os.environ:
        raise SystemExit(f"set {variable} to a checkout of it" + (f" at {REVISION}" if variable == "COMFYUI" else ""))
    return pathlib.Path(os.environ[variable])


def run_part(path, start, end, scope, after=None):
    """Runs the lines of a file from `start` up to `end` or its end, searched `after` a text, where the file as a whole needs the program around it."""
    source = path.read_text()
    begin = source.index(start, source.index(after) if after else 0)
    begin = source.rindex("\n", 0, begin) + 1
    exec(textwrap.dedent(source[begin:source.index(end, begin) if end else None]), scope)
    return scope


def module(name):
    """`comfy.<name>` or another module of the checkout."""
    root = str(checkout())
    if root not in sys.path:
        sys.path.insert(0, root)
        patcher = types.ModuleType("comfy.model_patcher")
        patcher.set_model_options_post_cfg_function = lambda options, function, **_: {**options, "post": function}
        sys.modules["comfy.model_patcher"] = patcher
        importlib.import_module("comfy.cli_args").args.cpu = True
        importlib.import_module("comfy").model_patcher = patcher
    return importlib.import_module(name)


def model_sampling(flow, shift=3.0):
    """The noise levels of Stable Diffusion, or of SD3 and its kin."""
    sampling = module("comfy.model_sampling")
    kinds = (sampling.ModelSamplingDiscreteFlow, sampling.CONST) if flow else (sampling.ModelSamplingDiscrete, sampling.EPS)
    levels = type("Levels", kinds, {})()
    if flow:
        levels.set_parameters(shift=shift)
    return levels


def flux_sampling(mu):
    """The noise levels of Flux."""
    sampling = module("comfy.model_sampling")
    levels = type("Levels", (sampling.ModelSamplingFlux, sampling.CONST), {})()
    levels.set_parameters(shift=mu)
    return levels


class Model:
    """A model as ComfyUI's samplers call it. `denoise(x, sigma)` gives the guided and the unguided estimate."""

    def __init__(self, levels, denoise):
        self.denoise, self.model_sampling = denoise, levels
        self.inner_model = types.SimpleNamespace(
            inner_model=types.SimpleNamespace(model_sampling=levels),
            model_patcher=types.SimpleNamespace(get_model_object=lambda _name: levels),
        )

    def __call__(self, x, sigma, model_options=None, **_):
        guided, base = self.denoise(x, sigma.reshape(-1, 1, 1, 1))
        if model_options and "post" in model_options:
            guided = model_options["post"]({"denoised": guided, "uncond_denoised": base})
        return guided


def no_progress():
    """Keeps ComfyUI's samplers from printing."""
    sampling = module("comfy.k_diffusion.sampling")
    sampling.trange = lambda n, **_: range(n)
    return sampling


