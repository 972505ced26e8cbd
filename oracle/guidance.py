"""Guidance: what predictions under several conditions are combined to, over three steps.

References, in f64: diffusers' ClassifierFreeGuidance, SkipLayerGuidance and AdaptiveProjectedGuidance in their original formulation, where the scale is one
less; ComfyUI's APG (COMFYUI names a checkout, see comfyui.py) agrees with the last. `three_way` is InstructPix2Pix's equation 3 as
StableDiffusionInstructPix2PixPipeline writes it.
"""

import types

import torch
from diffusers.guiders import AdaptiveProjectedGuidance, ClassifierFreeGuidance, SkipLayerGuidance

import comfyui
import fixture

SCALE, IMAGE, SKIP, STEPS = 7.5, 1.5, 2.8, 3
APG = {
    "apg_eta=0": {"eta": 0.0},
    "apg_momentum=-0.75": {"momentum": -0.75},
    "apg_norm_threshold=2.5": {"threshold": 2.5},
    "apg_norm_threshold=1e6": {"threshold": 1e6},
    "apg_eta=0.3,apg_momentum=0.5,apg_norm_threshold=4": {"eta": 0.3, "momentum": 0.5, "threshold": 4.0},
}


def main():
    cond, uncond, image_uncond, skipped = (fixture.randn(seed, STEPS, 1, 4, 4, 4) for seed in (1, 2, 3, 4))
    outputs = {}

    def each(name, guider, *predictions, first=0):
        rows = []
        for i in range(STEPS):
            guider.set_state(step=i + first, num_inference_steps=STEPS + 2 * first, timestep=torch.tensor(1.0))
            if hasattr(guider, "momentum_buffer") and i == 0:
                guider.prepare_inputs({})
            rows.append(guider.forward(*(p[i] for p in predictions)).pred)
        outputs[name] = torch.stack(rows).reshape(STEPS, -1)

    each("cfg", ClassifierFreeGuidance(SCALE), cond, uncond)
    slg = SkipLayerGuidance(SCALE, skip_layer_guidance_scale=SKIP, skip_layer_guidance_start=0.0, skip_layer_guidance_stop=1.0, skip_layer_guidance_layers=[0])
    each("slg", slg, cond, uncond, skipped, first=1)
    outputs["three_way"] = (image_uncond + SCALE * (cond - uncond) + IMAGE * (uncond - image_uncond)).reshape(STEPS, -1)
    scope = comfyui.run_part(comfyui.checkout() / "comfy_extras" / "nodes_apg.py", "def project", "class APG", {"torch": torch})
    for name, extra in APG.items():
        momentum, threshold, eta = extra.get("momentum"), extra.get("threshold", 0.0), extra.get("eta", 1.0)
        guider = AdaptiveProjectedGuidance(SCALE - 1, momentum, threshold, None, eta, use_original_formulation=True)
        guider.prepare_inputs = types.MethodType(lambda self, _data: AdaptiveProjectedGuidance.prepare_inputs(self, {"x": ("a", "b")}), guider)
        guider._prepare_batch = lambda *_: None
        each(name, guider, cond, uncond)
        # ComfyUI projects in the same way: its parallel part is what eta scales.
        if threshold == 0.0 and momentum is None:
            parallel, orthogonal = scope["project"](cond[0] - uncond[0], cond[0])
            assert torch.allclose(outputs[name][0].reshape(cond[0].shape), cond[0] + (SCALE - 1) * (orthogonal + eta * parallel))
    fixture.save(
        "guidance", "guidance.py", f"diffusers {fixture.version('diffusers')} guiders", {"scale": SCALE, "image": IMAGE, "skip": SKIP, "steps": STEPS, "apg": list(APG)},
        inputs={"cond": cond.float(), "uncond": uncond.float(), "image_uncond": image_uncond.float(), "skipped": skipped.float()}, outputs=outputs,
        notes="[steps, 64]; every run's state starts fresh",
    )


if __name__ == "__main__":
    main()
