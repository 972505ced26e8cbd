"""Sampler trajectories on a denoiser with a closed form.

Reference: k-diffusion's `sample_*` in f64 with D(x, sigma) = (x + sigma^2 mu) / (1 + sigma^2), the best denoiser for data
distributed as N(mu, 1). `output.<sampler>.<schedule>.<steps>` is x after every step, [steps, 1, 4, 8, 8].
Ancestral samplers take noise i of `input.noise` at step i, and none at the last step.
"""

import torch
from k_diffusion import sampling

import fixture
import schedules

SAMPLERS = {
    "euler": sampling.sample_euler,
    "euler_a": sampling.sample_euler_ancestral,
    "heun": sampling.sample_heun,
    "dpm2": sampling.sample_dpm_2,
    "dpm++2s_a": sampling.sample_dpmpp_2s_ancestral,
    "dpm++2m": sampling.sample_dpmpp_2m,
}
STEPS = [1, 5, 20]


def trajectory(name, denoise, x, sigmas, noise, **extra):
    """x after each step. `noise` is a sequence of tensors for the ancestral samplers."""
    before = []
    draws = iter(noise)
    if name.endswith("_a"):
        extra["noise_sampler"] = lambda _sigma, _next: next(draws)
    last = SAMPLERS[name](denoise, x, sigmas, callback=lambda info: before.append(info["x"].clone()), disable=True, **extra)
    return torch.stack(before[1:] + [last])


def main():
    shape = (1, 4, 8, 8)
    mu = fixture.randn(1, *shape, scale=0.7)
    start = fixture.randn(2, *shape)
    noise = fixture.randn(3, max(STEPS), *shape)
    outputs, inputs = {}, {"mu": mu.float(), "x": start.float(), "noise": noise.float()}
    with fixture.double_precision(), torch.no_grad():
        def denoise(x, sigma):
            s2 = sigma.reshape(-1, 1, 1, 1) ** 2
            return (x + s2 * mu) / (1.0 + s2)

        for schedule in ("discrete", "karras"):
            for steps in STEPS:
                sigmas = schedules.sigmas(schedule, steps)
                inputs[f"sigmas.{schedule}.{steps}"] = sigmas
                for name in SAMPLERS:
                    outputs[f"{name}.{schedule}.{steps}"] = trajectory(name, denoise, start * sigmas[0], sigmas, noise)
    fixture.save(
        "samplers", "samplers.py", f"k-diffusion {fixture.version('k-diffusion')} sample_*", {"samplers": list(SAMPLERS), "steps": STEPS, "eta": 1.0},
        inputs=inputs, outputs=outputs,
        notes="denoised = (x + sigma^2 mu) / (1 + sigma^2); the run starts at input.x * sigmas[0]; outputs hold x after each step; "
        "ancestral step i adds input.noise[i], except the last step",
    )


if __name__ == "__main__":
    main()
