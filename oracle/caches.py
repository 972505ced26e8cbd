"""Step caches: what they decide and what they hand on, computed with numpy from their published formulas.

`caches.safetensors` has the caches of whole predictions on a made-up run: network inputs and outputs by step for two conditions, and estimates for
the forecast. EasyCache as in "Less is Enough: Training-Free Video Diffusion Acceleration via Runtime-Adaptive Caching" (Zhou et al. 2025), its UNet
variant as stable-diffusion.cpp documents it, and Chebyshev forecasts as in "Adaptive Spectral Feature Forecasting for Diffusion Sampling
Acceleration" (Han et al. 2026), whose fit numpy solves.

`flux_cache_pipeline.safetensors` and `sd3_cache_pipeline.safetensors` have whole runs of the tiny Flux and SD 3 in which the middle blocks of diffusers'
transformers are left out: the first blocks' change decides (DBCache of cache-dit), and what the middle added is repeated or forecast by a Taylor
expansion ("From Reusing to Forecasting: Accelerating Diffusion Models with TaylorSeers", Liu et al. 2025).
"""

import math
from functools import reduce

import numpy as np
import torch
from safetensors.torch import load_file

import clip_text
import fixture
import flux
import flux_pipeline
import pipeline
import schedules_flux
import sd3_pipeline
import t5_encoder
import vocab

STEPS, SIZE = 20, 24


def mean(x):
    return float(np.abs(x.astype(np.float64)).mean())


def easy(inputs, outputs, sigmas, threshold=0.2, window=(0.0, math.inf)):
    """`outputs` [step, condition, value]. Returns which steps are computed and what every step gives."""
    total = rate = 0.0
    before = computed = None
    rate = None
    flags, given = [], []
    for i, x in enumerate(inputs):
        x = x.astype(np.float64)
        skip = False
        if computed is not None and rate is not None and window[0] < sigmas[i] <= window[1]:
            total += rate * mean(x - before) / mean(computed[1][0])
            skip = total < threshold
        if skip:
            given.append([x + (y - computed[0]) for y in computed[1]])
        else:
            y = outputs[i].astype(np.float64)
            if computed is not None:
                rate = mean(y[0] - computed[1][0]) / mean(x - computed[0])
            total, computed = 0.0, (x, y)
            given.append(list(y))
        flags.append(not skip)
        before = x
    return flags, np.array(given)


def unet(inputs, outputs, threshold=1.0, start=0.15, end=0.95, decay=1.0, relative=True, reset=True):
    n = len(inputs)
    error, streak, count = 0.0, 0, 0
    before = computed = rate = average = None
    flags, given = [], []
    for i, x in enumerate(inputs):
        x = x.astype(np.float64)
        skip = False
        if computed is not None and rate is not None and math.floor(start * n) <= i < math.floor(end * n):
            e = rate * mean(x - before)
            if relative:
                e /= math.sqrt(mean(computed[1][0]) * max(1.6 * average, 1e-6))
            error = error * decay + e * (1 + 0.5 * streak)
            progress = count / n
            skip = error < threshold * (0.5 if progress < 0.2 else 1.5 if progress > 0.8 else 1.0)
        if skip:
            streak += 1
            given.append([x + (y - computed[0]) for y in computed[1]])
        else:
            y = outputs[i].astype(np.float64)
            if computed is not None:
                change = mean(y[0] - computed[1][0])
                rate = change / mean(x - computed[0])
                average = change if average is None else 0.8 * average + 0.2 * change
            streak, count = 0, count + 1
            error = 0.0 if reset else error
            computed = (x, y)
            given.append(list(y))
        flags.append(not skip)
        before = x
    return flags, np.array(given)


def spectrum(estimates, w=0.4, m=3, lam=1.0, window=2.0, flex=0.5, warmup=4, stop=0.9):
    n = len(estimates)
    kept, streak = [], 0
    flags, given = [], []

    def basis(step):
        return np.polynomial.chebyshev.chebvander(np.array([step / 50 * 2 - 1]), m)[0]

    for i, d in enumerate(estimates):
        forecast = i >= warmup and i < stop * n and len(kept) >= 2 and (streak + 1) % math.floor(window) != 0
        if forecast:
            rows = np.array([basis(step) for step, _ in kept])
            values = np.array([value for _, value in kept])
            # A ridge fit is a plain one with a row for each coefficient.
            fit = np.linalg.lstsq(np.vstack([rows, math.sqrt(lam) * np.eye(m + 1)]), np.vstack([values, np.zeros((m + 1, values.shape[1]))]), rcond=None)[0]
            line = values[-1] + 0.5 * (values[-1] - values[-2])
            given.append(w * (basis(i) @ fit) + (1 - w) * line)
            streak += 1
        else:
            d = d.astype(np.float64)
            kept = (kept + [(i, d)])[-max(m + 1, 6):]
            if i >= warmup:
                window += flex
            streak = 0
            given.append(d)
        flags.append(not forecast)
    return flags, np.array(given)


def whole():
    rng = np.random.default_rng(271)
    t = np.linspace(0, 1, STEPS)[:, None]
    speeds, phases = rng.uniform(0.5, 3, (3, SIZE)), rng.uniform(0, 6, (3, SIZE))
    curve = [np.cos(speeds[k] * t + phases[k]) + 0.02 * rng.standard_normal((STEPS, SIZE)) for k in range(3)]
    inputs = (2 * (1 - t) * curve[0] + t * curve[1]).astype(np.float32)
    outputs = np.stack([curve[1] + 0.3 * curve[0] ** 2, curve[2]], axis=1).astype(np.float32)
    estimates = (curve[2] + 0.5 * t * curve[1]).astype(np.float32)
    sigmas = np.linspace(1, 0.02, STEPS)
    cases = {
        "easy": ("easycache", "", easy(inputs, outputs, sigmas)),
        "easy.tight": ("easycache", "threshold=0.07", easy(inputs, outputs, sigmas, threshold=0.07)),
        "easy.window": ("easycache", "threshold=0.5", easy(inputs, outputs, sigmas, threshold=0.5, window=(0.2, 0.7))),
        "unet": ("ucache", "", unet(inputs, outputs)),
        "unet.plain": ("ucache", "threshold=0.2,relative=0,start=0,end=1", unet(inputs, outputs, threshold=0.2, relative=False, start=0.0, end=1.0)),
        "unet.decay": ("ucache", "threshold=0.6,reset=0,decay=0.7", unet(inputs, outputs, threshold=0.6, reset=False, decay=0.7)),
        "spectrum": ("spectrum", "", spectrum(estimates)),
        "spectrum.other": ("spectrum", "w=0.7,m=4,lam=0.1,window=3,flex=0.25,warmup=6,stop=0.8", spectrum(estimates, 0.7, 4, 0.1, 3.0, 0.25, 6, 0.8)),
    }
    config, results = {}, {}
    for name, (mode, option, (flags, given)) in cases.items():
        window = [0.2, 0.7] if name == "easy.window" else None
        config[name] = {"mode": mode, "option": option, "window": window, "computed": flags}
        results[name] = torch.from_numpy(given)
        print(f"{name}: {sum(flags)} of {STEPS} computed: {''.join('x' if f else '.' for f in flags)}")
        assert 3 < sum(flags) < STEPS
    tensors = {"inputs": inputs, "outputs": outputs, "estimates": estimates, "sigmas": sigmas}
    fixture.save("caches", "caches.py", f"numpy {np.__version__}", {"cases": config}, inputs={k: torch.from_numpy(v) for k, v in tensors.items()}, outputs=results)


class Blocks:
    """DBCache with residuals that are repeated (order 0) or forecast. One for a run."""

    def __init__(self, steps, threshold=0.08, warmup=8, max_cached=-1, max_continuous=-1, mask=None, static=False, order=0):
        self.mask = mask or [0] * steps
        self.threshold, self.warmup, self.limits, self.static, self.order = threshold, warmup, (max_cached, max_continuous), static, order
        self.step, self.flags, self.change, self.derivatives, self.last = 0, [], None, [], None

    def decide(self, change):
        """Whether the middle is computed in this step. `change` is of the first condition's picture tokens."""
        cached = self.flags.count(False)
        streak = 0
        while streak < len(self.flags) and not self.flags[-1 - streak]:
            streak += 1
        must = self.change is None or self.step < self.warmup or self.mask[self.step] == 1
        must |= 0 <= self.limits[0] <= cached or 0 <= self.limits[1] <= streak
        if not must and not self.static:
            diff = ((self.change - change).abs().mean() / self.change.abs().mean()).item()
            must = diff >= self.threshold
        self.flags.append(must)
        if must:
            self.change = change
        return must

    def computed(self, residual):
        derivatives = [residual]
        for i, before in enumerate(self.derivatives[:self.order]):
            derivatives.append((derivatives[i] - before) / (self.step - self.last))
        self.derivatives, self.last = derivatives, self.step

    def forecast(self):
        away = self.step - self.last
        return sum(away ** i / math.factorial(i) * d for i, d in enumerate(self.derivatives))


def in_parts(cache, state, tokens, blocks, front, back):
    """Runs `blocks` on `state` [b, n + t, c], the middle ones only if the cache says so. `tokens` is n."""
    start = state
    for block in blocks[:front]:
        state = block(state)
    if cache.decide((state - start)[:1, tokens:]):
        middle = state
        for block in blocks[front:len(blocks) - back]:
            middle = block(middle)
        cache.computed(middle - state)
        state = middle
    else:
        state = state + cache.forecast()
    for block in blocks[len(blocks) - back:]:
        state = block(state)
    cache.step += 1
    return state


def flux_velocity(model, cache, front, back):
    """diffusers' forward pass of Flux, block by block."""
    def forward(img, ids, text, pooled, sigma, guidance):
        strength = torch.full([img.shape[0]], guidance * 1000, dtype=torch.float64)
        temb = model.time_text_embed(torch.full([img.shape[0]], sigma * 1000, dtype=torch.float64), strength, pooled)
        rope = model.pos_embed(torch.cat([torch.zeros(text.shape[1], 3, dtype=torch.float64), ids]))
        n = text.shape[1]

        def double(block):
            def run(state):
                txt, x = block(hidden_states=state[:, n:], encoder_hidden_states=state[:, :n], temb=temb, image_rotary_emb=rope)
                return torch.cat([txt, x], dim=1)
            return run

        def single(block):
            def run(state):
                return torch.cat(block(hidden_states=state[:, n:], encoder_hidden_states=state[:, :n], temb=temb, image_rotary_emb=rope), dim=1)
            return run

        blocks = [double(b) for b in model.transformer_blocks] + [single(b) for b in model.single_transformer_blocks]
        state = torch.cat([model.context_embedder(text), model.x_embedder(img)], dim=1)
        state = in_parts(cache, state, n, blocks, front, back) if cache else reduce(lambda s, block: block(s), blocks, state)
        return model.proj_out(model.norm_out(state[:, n:], temb))

    return forward


FLUX_RUNS = {
    "dbcache": (1, 1, dict(threshold=0.7, warmup=2)),
    "limited": (1, 1, dict(threshold=9.0, warmup=1, max_cached=4, max_continuous=2)),
    "masked": (2, 0, dict(warmup=0, mask=[1, 0, 0, 1, 0, 0, 1, 0, 0, 1], static=True)),
    "taylor": (1, 1, dict(threshold=9.0, warmup=2, max_continuous=2, order=1)),
    "taylor2": (1, 0, dict(threshold=9.0, warmup=3, max_continuous=1, order=2)),
}


def option(front, back, settings):
    pairs = {"Fn": front, "Bn": back, "threshold": settings.get("threshold", 0.08)}
    pairs |= {key: settings[key] for key in ("warmup", "max_cached", "max_continuous") if key in settings}
    if settings.get("order"):
        pairs["order"] = settings["order"]
    return ",".join(f"{key}={value}" for key, value in pairs.items())


def described(front, back, settings, flags):
    mask = settings.get("mask")
    return {
        "mode": "taylorseer" if settings.get("order") else "dbcache", "option": option(front, back, settings), "mask": mask, "static": settings.get("static", False), "computed": flags,
    }


def flux_runs():
    steps = 10
    ids = load_file(fixture.FIXTURES / "flux_dev_pipeline.safetensors")
    clip_ids, t5_ids = ids["input.ids.clip"].long(), ids["input.ids.t5"].long()
    height, width = flux_pipeline.HEIGHT, flux_pipeline.WIDTH
    h, w = height // 8, width // 8
    noise, ids = pipeline.noise(16, height, width), flux.image_ids(h, w)
    clip, t5, transformer, vae_model, _, _ = flux_pipeline.build("dev")
    inputs, outputs, config = {}, {}, {}
    with torch.no_grad(), fixture.double_precision():
        text, pooled = t5_encoder.encode(t5, t5_ids), clip(clip_ids).pooler_output
        sigmas = schedules_flux.dev(steps, schedules_flux.tokens(width, height)).double()
        x = flux.pack(noise.double())
        whole = flux.forward(transformer, x, ids, text, pooled, 0.7, 3.5)
        assert torch.allclose(whole, flux_velocity(transformer, None, 0, 0)(x, ids, text, pooled, 0.7, 3.5), atol=1e-9)
        for key, (front, back, settings) in FLUX_RUNS.items():
            cache = Blocks(steps, **settings)
            run = flux_velocity(transformer, cache, front, back)

            def velocity(x, sigma):
                return flux.unpack(run(flux.pack(x), ids, text, pooled, sigma.item(), 3.5), h, w)

            pipeline.record(inputs, outputs, key, "euler", sigmas, pipeline.flow(velocity), noise.double() * sigmas[0], lambda z: vae_model.decode(z / flux_pipeline.SCALE + flux_pipeline.SHIFT).sample, full=False)
            config[key] = described(front, back, settings, cache.flags)
            print(key, "".join("x" if f else "." for f in cache.flags))
            assert 1 < sum(cache.flags) < steps
    fixture.save(
        "flux_cache_pipeline", "caches.py", f"{flux.VERSION} FluxTransformer2DModel, block by block", {"steps": steps, "runs": config}, inputs=inputs, outputs=outputs,
        notes="weights, prompt, size and seed of flux_dev_pipeline; guidance 3.5; latents are x after each step",
    )


def sd3_velocity(model, cache, front, back, condition):
    """diffusers' forward pass of SD 3, block by block, for a batch of the prompt and the negative prompt."""
    def forward(x, sigma):
        states, pooled = condition
        height, width = x.shape[-2:]
        x = torch.cat([x] * states.shape[0])
        temb = model.time_text_embed(torch.full([x.shape[0]], sigma * 1000, dtype=torch.float64), pooled)
        n = states.shape[1]
        last = len(model.transformer_blocks) - 1

        def joint(i, block):
            def run(state):
                txt, img = block(hidden_states=state[:, n:], encoder_hidden_states=state[:, :n], temb=temb)
                # The last block leaves the text as it is, for nobody reads it.
                return torch.cat([state[:, :n] if i == last else txt, img], dim=1)
            return run

        blocks = [joint(i, block) for i, block in enumerate(model.transformer_blocks)]
        state = torch.cat([model.context_embedder(states), model.pos_embed(x)], dim=1)
        state = in_parts(cache, state, n, blocks, front, back) if cache else reduce(lambda s, block: block(s), blocks, state)
        y = model.proj_out(model.norm_out(state[:, n:], temb))
        rows, columns, c = height // 2, width // 2, model.out_channels
        y = y.reshape(-1, rows, columns, 2, 2, c)
        return torch.einsum("nhwpqc->nchpwq", y).reshape(-1, c, height, width)

    return forward


SD3_RUNS = {"dbcache": (1, 1, dict(threshold=0.7, warmup=2)), "taylor": (1, 0, dict(threshold=9.0, warmup=2, max_continuous=2, order=1))}


def sd3_runs():
    steps = 8
    clip_tokenizer = vocab.clip_tokenizer()
    first, second, _, transformer, vae_model, _, _ = sd3_pipeline.build("no_t5")
    noise = pipeline.noise(16, sd3_pipeline.HEIGHT, sd3_pipeline.WIDTH)
    inputs, outputs, config = {}, {}, {}
    with torch.no_grad(), fixture.double_precision():
        def encode(prompt):
            one, two = pipeline.windows(clip_tokenizer, prompt), pipeline.windows(clip_tokenizer, prompt, pad=0)
            left, right = first(one, output_hidden_states=True), second(two, output_hidden_states=True)
            states = torch.cat([left.hidden_states[-2], right.hidden_states[-2]], dim=-1)
            more = torch.zeros(1, sd3_pipeline.TOKENS, transformer.config.joint_attention_dim)
            states = torch.nn.functional.pad(states, (0, more.shape[-1] - states.shape[-1]))
            return torch.cat([states, more], dim=1), torch.cat([left.pooler_output, right.text_embeds], dim=-1)

        condition = tuple(torch.cat(parts) for parts in zip(encode(pipeline.PROMPT), encode(pipeline.NEGATIVE)))
        levels = sd3_pipeline.scheduler()
        levels.set_timesteps(steps)
        sigmas = levels.sigmas.double()
        whole = transformer(torch.cat([noise.double()] * 2), condition[0], condition[1], torch.full([2], 700.0, dtype=torch.float64)).sample
        assert torch.allclose(whole, sd3_velocity(transformer, None, 0, 0, condition)(noise.double(), 0.7), atol=1e-9)
        for key, (front, back, settings) in SD3_RUNS.items():
            cache = Blocks(steps, **settings)
            run = sd3_velocity(transformer, cache, front, back, condition)

            def velocity(x, sigma):
                cond, uncond = run(x, sigma.item()).chunk(2)
                return uncond + pipeline.CFG * (cond - uncond)

            pipeline.record(inputs, outputs, key, "euler", sigmas, pipeline.flow(velocity), noise.double() * sigmas[0], lambda z: vae_model.decode(z / sd3_pipeline.SCALE + sd3_pipeline.SHIFT).sample, full=False)
            config[key] = described(front, back, settings, cache.flags)
            print(key, "".join("x" if f else "." for f in cache.flags))
            assert 1 < sum(cache.flags) < steps
    fixture.save(
        "sd3_cache_pipeline", "caches.py", "diffusers SD3Transformer2DModel, block by block", {"steps": steps, "runs": config}, inputs=inputs, outputs=outputs,
        notes="weights, prompts, size and seed of sd3_no_t5_pipeline's plain run; latents are x after each step",
    )


def main():
    whole()
    flux_runs()
    sd3_runs()


if __name__ == "__main__":
    main()
