"""A whole tiny Stable Diffusion 3: CLIP-L, CLIP-G, T5, transformer, autoencoder; 3.5 medium's kind with every encoder, SD3's kind without T5.

References: diffusers' `StableDiffusion3Pipeline` takes the steps, guidance and skipped blocks included, with its own scheduler, from states that are
put together as its `encode_prompt` does; CLIPTokenizer, CLIPTextModel, CLIPTextModelWithProjection and T5EncoderModel of transformers, Hugging Face
`tokenizers` with T5's tokenizer.json, in f64. CLIP-L's pooled state is not projected: diffusers gives it the identity for a projection when it reads
a published file (`create_diffusers_clip_model_from_ldm`).
"""

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

import clip_text
import fixture
import pipeline
import sd3
import t5_encoder
import vae
import vocab

WIDTH, HEIGHT, STEPS = 64, 96, 6
TOKENS = 256  # `max_sequence_length` of the pipeline
SCALE, SHIFT = 1.5305, 0.0609
FLOW_SHIFT = 3.0
TRANSFORMERS = {
    "medium": dict(context=192, pooled=128, qk_norm="rms_norm", dual=(0, 1)),
    "no_t5": dict(context=4096, pooled=128),
}
SKIP = {"layers": [1], "scale": 2.8, "start": 0.01, "stop": 0.6}
RUNS = {
    "medium": {"plain": {"negative_prompt": pipeline.NEGATIVE, "cfg": pipeline.CFG}, "slg": {"negative_prompt": "", "cfg": 4.5, "skip": SKIP}},
    "no_t5": {"plain": {"negative_prompt": pipeline.NEGATIVE, "cfg": pipeline.CFG}, "cfg1": {"negative_prompt": "", "cfg": 1.0}},
}
SCHEDULES = [1, 2, 4, 20, 28, 40]


def build(name):
    """One transformer with the encoders and the autoencoder, which both share."""
    first = clip_text.build(64, layers=2, vocab_size=49408, prefix="text_encoder.text_model.")
    second = clip_text.build(64, layers=2, vocab_size=49408, prefix="text_encoder_2.", openclip=True, projection=True)
    t5 = t5_encoder.build(width=192, vocab_size=32128, prefix="text_encoder_3.") if name == "medium" else None
    settings = sd3.config(**TRANSFORMERS[name])
    transformer = sd3.build(settings, "transformer.", {"proj_out.weight": -1})
    vae_config = vae.flux_config() | dict(scaling_factor=SCALE, shift_factor=SHIFT)
    vae_model, _ = vae.build(vae_config)
    table = first[1] | second[1] | transformer[1] | fixture.fill(vae_model, "vae.", {"decoder.conv_out.weight": -1})
    configs = {"transformer": settings, "vae": vae_config, "text_encoder": clip_text.settings(first[2]), "text_encoder_2": clip_text.settings(second[2])}
    if t5:
        table, configs = table | t5[1], configs | {"text_encoder_3": t5_encoder.settings(t5[2])}
    return first[0], second[0], t5 and t5[0], transformer[0], vae_model, table, configs


def scheduler():
    return FlowMatchEulerDiscreteScheduler(shift=FLOW_SHIFT)


def main():
    clip_tokenizer, t5_tokenizer = vocab.clip_tokenizer(), vocab.t5_tokenizer()
    noise = pipeline.noise(16, HEIGHT, WIDTH)
    rows = []
    for steps in SCHEDULES:
        levels = scheduler()
        levels.set_timesteps(steps)
        rows.append({"steps": steps, "sigmas": levels.sigmas.tolist(), "timesteps": levels.timesteps.tolist()})
    fixture.save_json("schedules_sd3", {
        "source": f"{sd3.VERSION} FlowMatchEulerDiscreteScheduler", "script": "oracle/sd3_pipeline.py",
        "notes": "shift 3, as SD3 and 3.5 have it; evenly spaced from the shifted 1 to the shifted 0.001, then shifted again; f32", "rows": rows,
    })
    for name in TRANSFORMERS:
        first, second, t5, transformer, vae_model, table, configs = build(name)
        inputs, outputs = {"noise": noise}, {}
        with torch.no_grad(), fixture.double_precision():
            def condition(prompt):
                one, two = pipeline.windows(clip_tokenizer, prompt), pipeline.windows(clip_tokenizer, prompt, pad=0)
                left, right = first(one, output_hidden_states=True), second(two, output_hidden_states=True)
                states = torch.cat([left.hidden_states[-2], right.hidden_states[-2]], dim=-1)
                if t5:
                    tokens = t5_tokenizer.encode(prompt, add_special_tokens=False).ids + [t5_encoder.EOS]
                    more = t5_encoder.encode(t5, torch.tensor([tokens + [t5_encoder.PAD] * (TOKENS - len(tokens))]))
                else:
                    more = torch.zeros(1, TOKENS, transformer.config.joint_attention_dim)
                states = torch.nn.functional.pad(states, (0, more.shape[-1] - states.shape[-1]))
                return torch.cat([states, more], dim=1), torch.cat([left.pooler_output, right.text_embeds], dim=-1)

            cond = condition(pipeline.PROMPT)
            outputs |= {"context": cond[0][:, ::7, ::4], "pooled": cond[1]}
            pipe = StableDiffusion3Pipeline(
                transformer=transformer, scheduler=scheduler(), vae=vae_model, text_encoder=None, tokenizer=None, text_encoder_2=None, tokenizer_2=None, text_encoder_3=None, tokenizer_3=None,
            )
            pipe.set_progress_bar_config(disable=True)
            for key, run in RUNS[name].items():
                uncond, skip, states = condition(run["negative_prompt"]), run.get("skip"), []

                def after(_pipe, _step, _t, values):
                    states.append(values["latents"].clone())
                    return {}

                more = dict(skip_guidance_layers=skip["layers"], skip_layer_guidance_scale=skip["scale"], skip_layer_guidance_start=skip["start"], skip_layer_guidance_stop=skip["stop"]) if skip else {}
                pipe(
                    prompt_embeds=cond[0], negative_prompt_embeds=uncond[0], pooled_prompt_embeds=cond[1], negative_pooled_prompt_embeds=uncond[1], latents=noise.double(),
                    width=WIDTH, height=HEIGHT, num_inference_steps=STEPS, guidance_scale=run["cfg"], output_type="latent", callback_on_step_end=after, **more,
                )
                inputs[f"sigmas.{key}"], outputs[f"{key}.latents"] = pipe.scheduler.sigmas.double(), torch.stack(states)
                unit = (vae_model.decode(states[-1] / SCALE + SHIFT).sample / 2 + 0.5).clamp(0, 1)
                outputs[f"{key}.image_u8"] = (unit * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
                clamped = ((unit == 0) | (unit == 1)).double().mean().item()
                print(f"{name} {key}: latents {states[-1].std().item():.3f}, picture {unit.mean().item():.3f} +- {unit.std().item():.3f}, {clamped:.1%} clamped")
                assert clamped < 0.03, "the picture is mostly clamped"
        fixture.save(
            f"sd3_{name}_pipeline", "sd3_pipeline.py",
            f"transformers {fixture.version('transformers')} CLIPTextModel, CLIPTextModelWithProjection and T5EncoderModel, {sd3.VERSION} StableDiffusion3Pipeline, tokenizers {fixture.version('tokenizers')}",
            {"prompt": pipeline.PROMPT, "seed": pipeline.SEED, "width": WIDTH, "height": HEIGHT, "steps": STEPS, "vae_scale": SCALE, "vae_shift": SHIFT, "t5_tokens": TOKENS, **RUNS[name]} | configs,
            procedural=table, inputs=inputs, outputs=outputs,
            notes="start = input.noise; latents are x after each step; context is [CLIP-L | CLIP-G | zeros] of 77 tokens, before the last layers and without final norms, then T5's 256 tokens, or zeros; "
            "output.context holds every 7th token and every 4th channel of the prompt's; pooled is CLIP-L's state at the end token after the final norm, then CLIP-G's projected one; "
            "an empty negative prompt is encoded; image_u8 = 255 (decode(x / 1.5305 + 0.0609) / 2 + 0.5), rounded, [1, H, W, 3]",
        )


if __name__ == "__main__":
    main()
