"""SD1's noise table, the map between timestep and sigma, and sigma schedules.

Reference: k-diffusion's `DiscreteEpsDDPMDenoiser`, `get_sigmas_karras` and `get_sigmas_exponential`, run in f64.
"""

import torch
from k_diffusion import sampling
from k_diffusion.external import DiscreteEpsDDPMDenoiser

import fixture

STEPS = [1, 2, 5, 10, 20, 50]


def alphas_cumprod():
    """SD1: 1000 betas whose square roots are evenly spaced from sqrt(0.00085) to sqrt(0.012)."""
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    return torch.cumprod(1.0 - betas, dim=0)


def denoiser(model=None):
    return DiscreteEpsDDPMDenoiser(model, alphas_cumprod(), quantize=False)


def sigmas(name, steps):
    """Call inside `fixture.double_precision()`."""
    table = denoiser()
    low, high = table.sigma_min.item(), table.sigma_max.item()
    if name == "discrete":
        return table.get_sigmas(steps)
    if name == "karras":
        return sampling.get_sigmas_karras(steps, low, high, rho=7.0)
    return sampling.get_sigmas_exponential(steps, low, high)


def main():
    with fixture.double_precision():
        table = denoiser()
        bars = alphas_cumprod()
        indices = [0, 1, 2, 3, 10, 50, 100, 250, 499, 500, 501, 750, 900, 997, 998, 999]
        times = [0.0, 0.25, 0.5, 1.0, 17.5, 100.125, 333.3, 499.5, 500.0, 777.77, 950.9, 998.0, 998.5, 998.999, 999.0]
        sigma_of_t = table.t_to_sigma(torch.tensor(times))
        levels = [0.001, table.sigma_min.item(), 0.03, 0.05, 0.1, 0.5, 1.0, 2.0, 3.14159, 7.0, 10.0, 14.0, 14.6, table.sigma_max.item(), 20.0]
        t_of_sigma = table.sigma_to_t(torch.tensor(levels), quantize=False)
        # The mapping is its own inverse inside the table.
        assert torch.allclose(table.sigma_to_t(sigma_of_t), torch.tensor(times), atol=1e-9)
        fixture.save_json("schedules", {
            "source": f"k-diffusion {fixture.version('k-diffusion')} DiscreteEpsDDPMDenoiser, get_sigmas_karras, get_sigmas_exponential",
            "script": "oracle/schedules.py",
            "sigma_min": table.sigma_min.item(),
            "sigma_max": table.sigma_max.item(),
            "table": [{"i": i, "alpha_bar": bars[i].item(), "sigma": table.sigmas[i].item()} for i in indices],
            "sigma_of_t": [[t, s] for t, s in zip(times, sigma_of_t.tolist())],
            "t_of_sigma": [[s, t] for s, t in zip(levels, t_of_sigma.tolist())],
            "schedules": [{"name": name, "steps": n, "sigmas": sigmas(name, n).tolist()} for name in ("discrete", "karras", "exponential") for n in STEPS],
        })


if __name__ == "__main__":
    main()
