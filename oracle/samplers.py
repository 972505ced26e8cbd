"""Trajectories of every sampler on denoisers with a closed form, along every schedule.

References, in f64: k-diffusion's `sample_*`, ComfyUI's for what k-diffusion lacks and for flows (COMFYUI names a checkout, see comfyui.py), diffusers'
DDIMScheduler, TCDScheduler and UniPCMultistepScheduler, torchsde's BrownianTree through k-diffusion. `dpm++2mv2` is the formula of k-diffusion's issue 56, with the mean of both
step lengths; `res_2s` that of Zhang et al. 2023 with two stages and c2 = 1/2.

`sd`: x = x0 + s n, `flow`: x = (1 - s) x0 + s n; the estimate is the mean of x0 given x, where x0 is distributed as N(mu, 1). CFG++ takes `mu_base` for its
unguided estimate. `output.<table>.<sampler>[.<args>].<schedule>.<steps>` is x after every step, [steps, 16]. Noise i of `input.noise` is the i-th draw;
samplers with a Brownian path have seed 3.
"""

import math

import torch
from diffusers import DDIMScheduler, TCDScheduler, UniPCMultistepScheduler
from k_diffusion import sampling

import comfyui
import fixture
import schedules
import schedules_named

SHAPE = (1, 4, 2, 2)
SEED = 3
SD = ["discrete", "karras", "exponential", "ays", "gits", "sgm_uniform", "simple", "smoothstep", "kl_optimal", "lcm", "bong_tangent", "beta"]
FLOW = ["discrete", "karras", "exponential", "sgm_uniform", "simple", "smoothstep", "kl_optimal", "lcm", "bong_tangent", "beta", "flux", "flux2", "ltx2", "logit_normal"]
LONG = {"sd": ["discrete", "karras"], "flow": ["simple", "flux"]}
NOISE = fixture.randn(3, 64, *SHAPE)


def brownian(sigmas):
    """k-diffusion's noise of a path, which its tree draws in f32."""
    tree = sampling.BrownianTreeNoiseSampler(torch.zeros(SHAPE, dtype=torch.float32), sigmas[sigmas > 0].min().float(), sigmas.max().float(), seed=SEED)
    return lambda a, b: tree(a.to(torch.float32), b.to(torch.float32)).double()


def reference(function, *, noisy=False, path=False, **extra):
    """A `sample_*` function of k-diffusion or ComfyUI."""
    def run(model, x, sigmas):
        before, kwargs = [], dict(extra)
        if noisy:
            draws = iter(NOISE)
            kwargs["noise_sampler"] = lambda _a, _b: next(draws)
        if path:
            kwargs["noise_sampler"] = brownian(sigmas)
        last = function(model, x, sigmas, extra_args={}, callback=lambda info: before.append(info["x"].clone()), disable=True, **kwargs)
        return torch.stack(before[1:] + [last])
    return run


def stepped(function):
    """Every step ends a shorter run: for references that do not say where they are."""
    def run(model, x, sigmas):
        states = [x]
        for i in range(len(sigmas) - 1):
            states.append(function(model, states[-1], sigmas, i))
        return torch.stack(states[1:])
    return run


def every_end(function, **extra):
    """As `reference`, for functions whose callback shows the start alone: x after each step is the end of a run that stops there."""
    def run(model, x, sigmas):
        return torch.stack([reference(function, **extra)(model, x, sigmas[:n + 1])[-1] for n in range(1, len(sigmas))])
    return run


def dpmpp_2m_v2(model, x, sigmas):
    states, old, last = [], None, None
    for s, t in zip(sigmas[:-1], sigmas[1:]):
        d = model(x, s.reshape(1))
        h = torch.log(s / t)
        if old is None or t == 0:
            x = (t / s) * x - torch.expm1(-h) * d
        else:
            r, mean = torch.maximum(h, last) / torch.minimum(h, last), (h + last) / 2
            x = (t / s) * x - torch.expm1(-mean) * ((1 + 1 / (2 * r)) * d - 1 / (2 * r) * old)
        old, last = d, h
        states.append(x)
    return torch.stack(states)


def res_2s(model, x, sigmas):
    def phi1(z):
        return torch.expm1(z) / z

    def step(model, x, sigmas, i):
        s, t = sigmas[i], sigmas[i + 1]
        d = model(x, s.reshape(1))
        if t == 0:
            return d
        h, c2 = torch.log(s / t), 0.5
        half = torch.exp(-c2 * h) * x + c2 * h * phi1(-c2 * h) * d
        ahead = model(half, (s * torch.exp(-c2 * h)).reshape(1))
        b2 = (phi1(-h) - 1) / -h / c2
        return torch.exp(-h) * x + h * ((phi1(-h) - b2) * d + b2 * ahead)
    return stepped(step)(model, x, sigmas)


def diffusers_run(make, eta):
    """A diffusers scheduler over its own timesteps. Its latents are x / sqrt(1 + s^2)."""
    def run(model, x, sigmas, timesteps):
        scheduler = make(timesteps)
        bars = scheduler.alphas_cumprod.double()
        scheduler.alphas_cumprod, scheduler.final_alpha_cumprod = bars, torch.tensor(1.0)
        y, states, draws = x / torch.sqrt(1 + sigmas[0] ** 2), [], iter(NOISE)
        for i, t in enumerate(timesteps):
            scale = torch.sqrt(bars[t])
            eps = (y / scale - model(y / scale, sigmas[i].reshape(1))) / sigmas[i]
            if isinstance(scheduler, TCDScheduler):
                import diffusers.schedulers.scheduling_tcd as tcd
                tcd.randn_tensor = lambda *_a, **_k: next(draws)
                y = scheduler.step(eps, t, y, eta=eta).prev_sample
            else:
                y = scheduler.step(eps, t, y, eta=eta, variance_noise=next(draws) if eta > 0 and i + 1 < len(timesteps) else torch.zeros(SHAPE)).prev_sample
            states.append(y * torch.sqrt(1 + sigmas[i + 1] ** 2))
        return torch.stack(states)
    return run


def uni_pc(flow):
    """diffusers' UniPC along given levels; outside flows its latents are x / sqrt(1 + s^2)."""
    def run(model, x, sigmas):
        scheduler = UniPCMultistepScheduler(prediction_type="sample", use_flow_sigmas=flow)
        scheduler.set_timesteps(len(sigmas) - 1)
        levels = sigmas.clone()
        if flow and levels[0] >= 1:
            levels[0] -= 1e-6  # As its set_timesteps does it.
        scheduler.sigmas, scheduler.timesteps = levels, torch.arange(len(sigmas) - 1, 0, -1)
        states = []
        scheduler._step_index = 0
        for i in range(len(levels) - 1):
            scale, after = (1.0, 1.0) if flow else (torch.sqrt(1 + levels[i] ** 2), torch.sqrt(1 + levels[i + 1] ** 2))
            x = scheduler.step(model(x, levels[i].reshape(1)), 0, x / scale).prev_sample * after
            states.append(x)
        return torch.stack(states)
    return run


def ddim(timesteps):
    scheduler = DDIMScheduler(1000, 0.00085, 0.012, "scaled_linear", clip_sample=False, timestep_spacing="trailing", set_alpha_to_one=True)
    scheduler.set_timesteps(len(timesteps))
    assert scheduler.timesteps.tolist() == timesteps, (scheduler.timesteps, timesteps)
    return scheduler


def tcd(timesteps):
    scheduler = TCDScheduler(1000, 0.00085, 0.012, "scaled_linear", clip_sample=False)
    scheduler.set_timesteps(timesteps=timesteps)
    return scheduler


def table():
    """Sampler and arguments to its reference, by table of levels."""
    c = comfyui.no_progress()
    k = sampling
    both = {
        "ipndm": ("ComfyUI sample_ipndm", every_end(c.sample_ipndm)),
        "ipndm_v": ("ComfyUI sample_ipndm_v", every_end(c.sample_ipndm_v)),
        "heunpp2": ("ComfyUI sample_heunpp2", reference(c.sample_heunpp2)),
        "lcm": ("ComfyUI sample_lcm", reference(c.sample_lcm, noisy=True)),
        "res_multistep": ("ComfyUI res_multistep", reference(c.sample_res_multistep, noisy=True)),
        "res_2s": ("the formula of Zhang et al. 2023", res_2s),
        "er_sde": ("ComfyUI sample_er_sde", reference(c.sample_er_sde, noisy=True)),
        "er_sde.eta=0": ("ComfyUI sample_er_sde", reference(c.sample_er_sde, noisy=True, s_noise=0.0)),
        "euler_cfg_pp": ("ComfyUI sample_euler_cfg_pp", reference(c.sample_euler_cfg_pp)),
        "euler_a_cfg_pp": ("ComfyUI sample_euler_ancestral_cfg_pp", reference(c.sample_euler_ancestral_cfg_pp, noisy=True)),
        "euler_ge": ("ComfyUI sample_gradient_estimation", reference(c.sample_gradient_estimation)),
        "euler_ge.gamma=1.4": ("ComfyUI sample_gradient_estimation", reference(c.sample_gradient_estimation, ge_gamma=1.4)),
        "dpm++2mv2": ("the formula of k-diffusion's issue 56", dpmpp_2m_v2),
    }
    return {
        "sd": both | {
            "uni_pc": ("diffusers UniPCMultistepScheduler", uni_pc(False)),
            "euler": ("k-diffusion sample_euler", reference(k.sample_euler)),
            "euler_a": ("k-diffusion sample_euler_ancestral", reference(k.sample_euler_ancestral, noisy=True)),
            "euler_a.eta=0.5": ("k-diffusion sample_euler_ancestral", reference(k.sample_euler_ancestral, noisy=True, eta=0.5)),
            "heun": ("k-diffusion sample_heun", reference(k.sample_heun)),
            "dpm2": ("k-diffusion sample_dpm_2", reference(k.sample_dpm_2)),
            "dpm2_a": ("k-diffusion sample_dpm_2_ancestral", reference(k.sample_dpm_2_ancestral, noisy=True)),
            "dpm++2s_a": ("k-diffusion sample_dpmpp_2s_ancestral", reference(k.sample_dpmpp_2s_ancestral, noisy=True)),
            "dpm++2s_a.eta=0.4": ("k-diffusion sample_dpmpp_2s_ancestral", reference(k.sample_dpmpp_2s_ancestral, noisy=True, eta=0.4)),
            "dpm++2m": ("k-diffusion sample_dpmpp_2m", reference(k.sample_dpmpp_2m)),
            "dpm++2m_sde": ("k-diffusion sample_dpmpp_2m_sde", reference(k.sample_dpmpp_2m_sde, noisy=True)),
            "dpm++2m_sde.eta=0.6": ("k-diffusion sample_dpmpp_2m_sde", reference(k.sample_dpmpp_2m_sde, noisy=True, eta=0.6)),
            "dpm++2m_sde_bt": ("k-diffusion sample_dpmpp_2m_sde, torchsde BrownianTree", reference(k.sample_dpmpp_2m_sde, path=True)),
            "dpm++3m_sde": ("k-diffusion sample_dpmpp_3m_sde, torchsde BrownianTree", reference(k.sample_dpmpp_3m_sde, path=True)),
            "dpm++sde": ("k-diffusion sample_dpmpp_sde, torchsde BrownianTree", reference(k.sample_dpmpp_sde, path=True)),
            "lms": ("ComfyUI sample_lms", reference(c.sample_lms)),
            "lms.lms_max_order=2": ("ComfyUI sample_lms", reference(c.sample_lms, order=2)),
        },
        "flow": both | {
            "uni_pc": ("diffusers UniPCMultistepScheduler", uni_pc(True)),
            "euler": ("ComfyUI sample_euler", reference(c.sample_euler)),
            "euler_a": ("ComfyUI sample_euler_ancestral_RF", reference(c.sample_euler_ancestral, noisy=True)),
            "euler_a.eta=0.5": ("ComfyUI sample_euler_ancestral_RF", reference(c.sample_euler_ancestral, noisy=True, eta=0.5)),
            "heun": ("ComfyUI sample_heun", reference(c.sample_heun)),
            "dpm2": ("ComfyUI sample_dpm_2", reference(c.sample_dpm_2)),
            "dpm2_a": ("ComfyUI sample_dpm_2_ancestral_RF", reference(c.sample_dpm_2_ancestral, noisy=True)),
            "dpm++2s_a": ("ComfyUI sample_dpmpp_2s_ancestral_RF", reference(c.sample_dpmpp_2s_ancestral, noisy=True)),
            "dpm++2m": ("ComfyUI sample_dpmpp_2m", reference(c.sample_dpmpp_2m)),
            "dpm++2m_sde": ("ComfyUI sample_dpmpp_2m_sde", reference(c.sample_dpmpp_2m_sde, noisy=True)),
            "dpm++2m_sde_bt": ("ComfyUI sample_dpmpp_2m_sde, torchsde BrownianTree", reference(c.sample_dpmpp_2m_sde, path=True)),
            "dpm++3m_sde": ("ComfyUI sample_dpmpp_3m_sde, torchsde BrownianTree", reference(c.sample_dpmpp_3m_sde, path=True)),
            "dpm++sde": ("ComfyUI sample_dpmpp_sde, torchsde BrownianTree", reference(c.sample_dpmpp_sde, path=True)),
            "lms": ("ComfyUI sample_lms", reference(c.sample_lms)),
        },
    }


def main():
    mu, mu_base, start = fixture.randn(1, *SHAPE, scale=0.7), fixture.randn(4, *SHAPE, scale=0.7), fixture.randn(2, *SHAPE)
    inputs = {"mu": mu.float(), "mu_base": mu_base.float(), "x": start.float(), "noise": NOISE.float()}
    outputs, references = {}, {}

    def model(flow):
        def denoise(x, s):
            a = 1 - s if flow else torch.ones_like(s)
            return tuple((s**2 * m + a * x) / (s**2 + a**2) for m in (mu, mu_base))
        return comfyui.Model(comfyui.model_sampling(flow), denoise)

    with torch.no_grad():
        lists = {}
        for domain, names in (("sd", SD), ("flow", FLOW)):
            for name in names:
                for steps in [1, 5, 20] if name in LONG[domain] else [5]:
                    lists[domain, name, steps] = schedules_named.sigmas(domain, name, steps)
        with fixture.double_precision():
            for (domain, name, steps), sigmas in lists.items():
                inputs[f"sigmas.{domain}.{name}.{steps}"] = sigmas
                for key, (source, run) in table()[domain].items():
                    if steps == 1 and key.startswith(("heunpp2", "dpm++2m_sde", "dpm++3m_sde")):
                        continue  # Where the references do not run with one step.
                    references[f"{domain}.{key}"] = source
                    outputs[f"{domain}.{key}.{name}.{steps}"] = run(model(domain == "flow"), start * sigmas[0], sigmas).reshape(steps, -1)
            bars = schedules.alphas_cumprod()
            for steps in (1, 5, 20):
                for key, source, make, spaced in (("ddim_trailing", "diffusers DDIMScheduler", ddim, True), ("tcd", "diffusers TCDScheduler", tcd, False)):
                    times = [int(round(1000 - i * 1000 / steps)) - 1 for i in range(steps)]
                    sigmas = torch.tensor([math.sqrt((1 - bars[t]) / bars[t]) for t in times] + [0.0])
                    inputs[f"sigmas.sd.trailing.{steps}"] = sigmas
                    for eta in (0.0, 0.3, 1.0):
                        references[f"sd.{key}.eta={eta}"] = source
                        outputs[f"sd.{key}.eta={eta}.trailing.{steps}"] = diffusers_run(make, eta)(model(False), start * sigmas[0], sigmas, times).reshape(steps, -1)
    fixture.save(
        "samplers", "samplers.py",
        f"k-diffusion {fixture.version('k-diffusion')}, ComfyUI {comfyui.REVISION}, diffusers {fixture.version('diffusers')}, torchsde {fixture.version('torchsde')}",
        {"references": references, "seed": SEED}, inputs=inputs, outputs=outputs,
        notes="runs start at input.x * sigmas[0]; outputs hold x after each step; TCD's last step ends at its first timestep, not at 0",
    )


if __name__ == "__main__":
    main()
