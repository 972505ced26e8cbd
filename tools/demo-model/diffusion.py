"""Noise schedule and sampling of the demo model, shared by training and evaluation."""

import math

import numpy as np
import torch

STEPS = 1000


def alphas_cumprod():
    """The SD 1.x schedule: the square roots of the betas are evenly spaced."""
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, STEPS, dtype=torch.float64) ** 2
    return torch.cumprod(1 - betas, 0)


class Guided:
    """The noise-free estimate of a latent at noise level sigma, with guidance."""

    def __init__(self, unet, context, empty, scale):
        self.unet, self.scale = unet, scale
        self.context = context if scale == 1.0 else torch.cat([context, empty.expand_as(context)])
        ac = alphas_cumprod()
        self.log_sigmas = (0.5 * ((1 - ac) / ac).log()).numpy()

    def step_of(self, sigma):
        return float(np.interp(math.log(sigma), self.log_sigmas, np.arange(STEPS)))

    def __call__(self, x, sigma):
        t = torch.full((x.shape[0],), self.step_of(sigma))
        scaled = x / math.sqrt(sigma**2 + 1)
        if self.scale == 1.0:
            eps = self.unet(scaled, t, self.context)
        else:
            both = self.unet(torch.cat([scaled, scaled]), torch.cat([t, t]), self.context)
            cond, uncond = both.chunk(2)
            eps = uncond + self.scale * (cond - uncond)
        return x - sigma * eps


def sigmas_for(steps):
    """Noise levels at evenly spaced training steps, from the highest to zero."""
    ac = alphas_cumprod()
    log_sigmas = (0.5 * ((1 - ac) / ac).log()).numpy()
    t = np.linspace(STEPS - 1, 0, steps)
    return [float(v) for v in np.exp(np.interp(t, np.arange(STEPS), log_sigmas))] + [0.0]


@torch.no_grad()
def euler_ancestral(denoise, noise, steps, generator):
    """Euler steps that put back part of the noise they remove."""
    sigmas = sigmas_for(steps)
    x = noise * math.sqrt(sigmas[0] ** 2 + 1)
    for now, after in zip(sigmas, sigmas[1:]):
        clean = denoise(x, now)
        up = min(after, math.sqrt(after**2 * (now**2 - after**2) / now**2))
        down = math.sqrt(after**2 - up**2)
        x = x + (x - clean) / now * (down - now)
        if after > 0:
            x = x + torch.randn(x.shape, generator=generator) * up
    return x


@torch.no_grad()
def sample(unet, vae, context, empty, scale=7.0, steps=20, seed=0, size=16):
    """Pictures (uint8, height x width x 3) for a batch of encoded prompts."""
    from model import LATENT_SCALE

    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(context.shape[0], 4, size, size, generator=generator)
    latent = euler_ancestral(Guided(unet, context, empty, scale), noise, steps, generator)
    pictures = []
    for z in latent:
        y = vae.decode(z[None] / LATENT_SCALE)[0].permute(1, 2, 0)
        pictures.append(((y.clamp(-1, 1) + 1) * 127.5).round().numpy().astype(np.uint8))
    return pictures
