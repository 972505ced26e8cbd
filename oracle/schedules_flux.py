"""Flux's sigma schedules: shifted by picture size (dev) and unshifted (schnell), and the constant shift of other flow models.

Reference: diffusers' `FlowMatchEulerDiscreteScheduler`, with `calculate_shift` and the evenly spaced sigmas 1, 1 - 1/n, ... that `FluxPipeline`
passes. The scheduler keeps f32, so its numbers are exact to about 1e-7. `shift` is its `time_shift` in f64.
"""

import numpy as np
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift

import fixture

STEPS = [1, 4, 20, 28]
SIZES = [(64, 96), (256, 256), (512, 512), (832, 1216), (1024, 1024), (1536, 1536)]  # width, height in pixels


def tokens(width, height):
    """Tokens of a picture: one for each 16 x 16 pixels, a 2x2 patch of latents."""
    return (width // 16) * (height // 16)


def dev(steps, count, **config):
    """The n + 1 sigmas of Flux dev for a picture of `count` tokens."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True, **config)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=calculate_shift(count, 256, 4096, 0.5, 1.15))
    return scheduler.sigmas


def constant(steps, shift=1.0):
    """The n + 1 sigmas with one shift for all sizes; 1 is Flux schnell."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps))
    return scheduler.sigmas


def main():
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    times = [1.0, 0.999, 0.95, 0.75, 0.5, 0.25, 0.1, 0.04, 0.001]
    rows = []
    for width, height in SIZES:
        count = tokens(width, height)
        for steps in STEPS:
            rows.append({"width": width, "height": height, "tokens": count, "mu": calculate_shift(count, 256, 4096, 0.5, 1.15), "steps": steps, "sigmas": dev(steps, count).tolist()})
    fixture.save_json("schedules_flux", {
        "source": f"diffusers {fixture.version('diffusers')} FlowMatchEulerDiscreteScheduler, calculate_shift", "script": "oracle/schedules_flux.py",
        "notes": "dev: mu is linear in the number of 2x2-packed tokens, 0.5 at 256 and 1.15 at 4096, not clamped; shift: sigma = e^mu / (e^mu + 1/u - 1); constant: sigma = s u / (1 + (s - 1) u), 1 for schnell",
        "dev": rows,
        "constant": [{"shift": shift, "steps": steps, "sigmas": constant(steps, shift).tolist()} for shift in (1.0, 3.0) for steps in STEPS],
        "shift": [{"mu": mu, "u": times, "sigma": scheduler.time_shift(mu, 1.0, np.array(times)).tolist()} for mu in (0.5, 1.0, 1.15, 1.8)],
    })


if __name__ == "__main__":
    main()
