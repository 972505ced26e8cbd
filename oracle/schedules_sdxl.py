"""SDXL's other noise tables: zero terminal signal-to-noise ratio, and CosXL's continuous EDM.

References: diffusers' `rescale_zero_terminal_snr` (its EulerDiscreteScheduler then replaces the last, infinite sigma by that of an alpha_bar of
2^-24, which is 4096), `EDMEulerScheduler` and k-diffusion's `get_sigmas_exponential`, in f64.
"""

import torch
from diffusers import EDMEulerScheduler, EulerDiscreteScheduler
from diffusers.schedulers.scheduling_euler_discrete import rescale_zero_terminal_snr
from k_diffusion import sampling

import fixture

STEPS = [1, 2, 5, 10, 20]


def zsnr_alphas():
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    bars = torch.cumprod(1 - rescale_zero_terminal_snr(betas), dim=0)
    assert bars[-1] == 0
    bars[-1] = 2**-24
    plain = EulerDiscreteScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, rescale_betas_zero_snr=True)
    assert torch.allclose(plain.alphas_cumprod.double(), bars, rtol=1e-3, atol=1e-7)
    return bars


def main():
    with fixture.double_precision():
        bars = zsnr_alphas()
        indices = [0, 1, 10, 100, 250, 500, 750, 900, 990, 997, 998, 999]
        scheduler = EDMEulerScheduler(sigma_min=0.002, sigma_max=120.0, sigma_data=1.0, prediction_type="v_prediction")
        levels = [0.002, 0.05, 0.5, 1.0, 3.0, 14.6, 120.0]
        edm = []
        for level in levels:
            sigma, one, zero = torch.tensor(level), torch.tensor(1.0), torch.tensor(0.0)
            edm.append({
                "sigma": level, "t": scheduler.precondition_noise(sigma).item(), "c_in": scheduler.precondition_inputs(one, sigma).item(),
                "c_skip": scheduler.precondition_outputs(one, zero, sigma).item(), "c_out": scheduler.precondition_outputs(zero, one, sigma).item(),
            })
        fixture.save_json("schedules_sdxl", {
            "source": f"diffusers {fixture.version('diffusers')} rescale_zero_terminal_snr, EulerDiscreteScheduler, EDMEulerScheduler; k-diffusion {fixture.version('k-diffusion')} get_sigmas_exponential",
            "script": "oracle/schedules_sdxl.py",
            "zsnr": [{"i": i, "alpha_bar": bars[i].item(), "sigma": ((1 - bars[i]) / bars[i]).sqrt().item()} for i in indices],
            "edm_v": edm,
            "edm_v_exponential": [{"steps": n, "sigmas": sampling.get_sigmas_exponential(n, 0.002, 120.0).tolist()} for n in STEPS],
        })


if __name__ == "__main__":
    main()
