"""LoRAs on the whole tiny SDXL, Flux.1 and SD 3.5 of the other pipeline scripts: two files in two spellings, alone and together.

Reference: diffusers' `lora_state_dict` reads the spelling, its `load_lora_into_*` and peft apply it, in f64; runs are those of the other scripts.
Names that diffusers does not read, SD 3's and Flux's joined ones of kohya, are taken apart here: each part has the rows of `lora_up` that belong to
it and the whole of `lora_down`. Values follow the procedural rule under `<family>.<file>.<tensor>`; an alpha has its value in the table.
"""

import peft
import torch
from diffusers import FluxPipeline, StableDiffusion3Pipeline, StableDiffusionXLPipeline
from diffusers.utils import state_dict_utils
from peft.tuners.tuners_utils import BaseTunerLayer

import fixture
import flux
import flux_pipeline
import pipeline
import schedules
import schedules_flux
import sd3_pipeline
import sdxl_pipeline
import t5_encoder
import vocab

RANK, ALPHA, UP, STEPS = 4, 3.0, -12, 3
RUNS = {"a": [["a", 0.75]], "b": [["b", 1.0]], "both": [["a", 0.75], ["b", -0.5]]}
KOHYA, PEFT = (".lora_down.weight", ".lora_up.weight"), (".lora_A.weight", ".lora_B.weight")

# File: layer in the file, module of the reference, and the rows of its parts if the file has joined them.
SDXL = {
    "a": [
        ("lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q", "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"),
        ("lora_unet_input_blocks_8_1_transformer_blocks_2_attn2_to_k", "unet.down_blocks.2.attentions.1.transformer_blocks.2.attn2.to_k"),
        ("lora_unet_middle_block_1_transformer_blocks_1_ff_net_0_proj", "unet.mid_block.attentions.0.transformer_blocks.1.ff.net.0.proj"),
        ("lora_unet_output_blocks_0_1_transformer_blocks_0_attn2_to_out_0", "unet.up_blocks.0.attentions.0.transformer_blocks.0.attn2.to_out.0"),
        ("lora_unet_output_blocks_5_1_proj_in", "unet.up_blocks.1.attentions.2.proj_in"),
        ("lora_te1_text_model_encoder_layers_0_self_attn_q_proj", "text_encoder.text_model.encoder.layers.0.self_attn.q_proj"),
        ("lora_te1_text_model_encoder_layers_1_mlp_fc1", "text_encoder.text_model.encoder.layers.1.mlp.fc1"),
        ("lora_te2_text_model_encoder_layers_0_self_attn_k_proj", "text_encoder_2.text_model.encoder.layers.0.self_attn.k_proj"),
        ("lora_te2_text_model_encoder_layers_2_mlp_fc2", "text_encoder_2.text_model.encoder.layers.2.mlp.fc2"),
    ],
    "b": [
        *((name, name) for name in (
            "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q", "unet.down_blocks.0.resnets.1.conv1", "unet.up_blocks.2.resnets.0.time_emb_proj",
            "text_encoder.text_model.encoder.layers.0.self_attn.v_proj", "text_encoder_2.text_model.encoder.layers.1.self_attn.out_proj",
        )),
    ],
}
FLUX = {
    "a": [
        ("lora_unet_double_blocks_0_img_attn_qkv", ["transformer.transformer_blocks.0.attn.to_q", "transformer.transformer_blocks.0.attn.to_k", "transformer.transformer_blocks.0.attn.to_v"]),
        ("lora_unet_double_blocks_1_txt_attn_qkv", ["transformer.transformer_blocks.1.attn.add_q_proj", "transformer.transformer_blocks.1.attn.add_k_proj", "transformer.transformer_blocks.1.attn.add_v_proj"]),
        ("lora_unet_double_blocks_0_img_mod_lin", "transformer.transformer_blocks.0.norm1.linear"),
        ("lora_unet_single_blocks_0_linear1", [f"transformer.single_transformer_blocks.0.{name}" for name in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")]),
        ("lora_unet_single_blocks_1_linear2", "transformer.single_transformer_blocks.1.proj_out"),
        ("lora_te1_text_model_encoder_layers_0_self_attn_q_proj", "text_encoder.text_model.encoder.layers.0.self_attn.q_proj"),
    ],
    "b": [
        *((name, name) for name in (
            "transformer.transformer_blocks.0.attn.to_k", "transformer.transformer_blocks.0.attn.add_v_proj", "transformer.transformer_blocks.1.ff.net.0.proj",
            "transformer.single_transformer_blocks.0.attn.to_v", "transformer.single_transformer_blocks.0.proj_mlp", "transformer.single_transformer_blocks.1.attn.to_q",
            "transformer.norm_out.linear", "transformer.x_embedder", "text_encoder.text_model.encoder.layers.1.mlp.fc2",
        )),
    ],
}
SD3 = {
    "a": [
        ("lora_unet_joint_blocks_0_x_block_attn_qkv", ["transformer.transformer_blocks.0.attn.to_q", "transformer.transformer_blocks.0.attn.to_k", "transformer.transformer_blocks.0.attn.to_v"]),
        ("lora_unet_joint_blocks_1_x_block_attn2_qkv", ["transformer.transformer_blocks.1.attn2.to_q", "transformer.transformer_blocks.1.attn2.to_k", "transformer.transformer_blocks.1.attn2.to_v"]),
        ("lora_unet_joint_blocks_1_context_block_attn_qkv", ["transformer.transformer_blocks.1.attn.add_q_proj", "transformer.transformer_blocks.1.attn.add_k_proj", "transformer.transformer_blocks.1.attn.add_v_proj"]),
        ("lora_unet_joint_blocks_2_x_block_mlp_fc1", "transformer.transformer_blocks.2.ff.net.0.proj"),
        ("lora_te1_text_model_encoder_layers_0_mlp_fc1", "text_encoder.text_model.encoder.layers.0.mlp.fc1"),
        ("lora_te2_text_model_encoder_layers_0_self_attn_q_proj", "text_encoder_2.text_model.encoder.layers.0.self_attn.q_proj"),
    ],
    "b": [
        *((name, name) for name in (
            "transformer.transformer_blocks.0.attn.to_q", "transformer.transformer_blocks.0.attn.add_k_proj", "transformer.transformer_blocks.1.attn2.to_v", "transformer.transformer_blocks.2.attn.to_out.0",
            "transformer.transformer_blocks.1.ff_context.net.2", "transformer.norm_out.linear", "text_encoder.text_model.encoder.layers.1.self_attn.k_proj", "text_encoder_2.text_model.encoder.layers.0.self_attn.v_proj",
        )),
    ],
}


class Loras:
    """The files of a family: rows `[tensor, shape, exponent]`, or `[tensor, [], alpha]`, and their layers in the reference."""

    def __init__(self, family, table, models, pipe):
        self.models, self.rows = models, {}
        for file, layers in table.items():
            down, up = KOHYA if file == "a" else PEFT
            parts, read, known = {}, {}, {}
            self.rows[file] = rows = []
            for layer, there in layers:
                there = [there] if isinstance(there, str) else there
                weights = [self.models[c].get_submodule(m).weight for c, m in map(self.place, there)]
                kernel, sizes = list(weights[0].shape[1:]), [w.shape[0] for w in weights]
                own = {}
                for end, shape in ((down, [RANK, *kernel]), (up, [sum(sizes), RANK] + [1] * (len(kernel) - 1))):
                    # What comes out of `down` is near unit scale.
                    exponent = fixture.recipe("", shape)[0] if end == down else UP
                    rows.append([layer + end, shape, exponent])
                    own[layer + end] = fixture.procedural(f"{family}.{file}.{layer}{end}", shape, exponent, 0.0)
                if file == "a":
                    rows.append([layer + ".alpha", [], ALPHA])
                    own[layer + ".alpha"] = torch.tensor(ALPHA, dtype=torch.float64)
                pairs = {name: (own[layer + down], up_rows) for name, up_rows in zip(there, own[layer + up].split(sizes))}
                parts |= pairs
                # diffusers takes joined rows apart by the sizes of the real Flux, unless they are equal.
                if len(set(sizes)) == 1:
                    read, known = read | own, known | pairs
            scale = ALPHA / RANK if file == "a" else 1.0
            if file == "b" or family != "sd3":
                confirm(pipe, models, read, known, scale)
            self.add(file, parts, scale)

    def place(self, name):
        """Component and module. Recent transformers have no `text_model.` in CLIPTextModel."""
        component, module = name.split(".", 1)
        return component, module if hasattr(self.models[component], "text_model") else module.removeprefix("text_model.")

    def add(self, file, parts, scale):
        """peft's layers in place of the models' own."""
        for component, model in self.models.items():
            own = {module: tensors for (c, module), tensors in ((self.place(name), tensors) for name, tensors in parts.items()) if c == component}
            if not own:
                continue
            peft.inject_adapter_in_model(peft.LoraConfig(r=RANK, lora_alpha=scale * RANK, target_modules=list(own)), model, adapter_name=file)
            for module, (down, up) in own.items():
                layer = model.get_submodule(module)
                layer.lora_A[file].weight.data, layer.lora_B[file].weight.data = down.clone(), up.clone()

    def choose(self, run):
        """Switches on the files of a run, each at its strength."""
        strengths = dict(run)
        for model in self.models.values():
            for module in model.modules():
                if isinstance(module, BaseTunerLayer):
                    module.set_adapter([file for file in strengths if file in module.scaling])
                    for file, strength in strengths.items():
                        module.set_scale(file, strength)


def today(name):
    """The name that peft has for a tensor, by diffusers' tables."""
    if ".lora_A." in name or ".lora_B." in name:
        return name
    if name.startswith("unet."):
        (new,) = state_dict_utils.convert_unet_state_dict_to_peft({name: 0})
    else:
        kinds = state_dict_utils.StateDictType
        (new,) = state_dict_utils.convert_state_dict_to_peft({name: 0}, original_type=kinds.DIFFUSERS if "lora_linear_layer" in name else kinds.DIFFUSERS_OLD)
    return new.replace(".processor.", ".")


def confirm(pipe, models, file, parts, scale):
    """diffusers finds the same layers in a file, with the same changes."""
    extra = {"unet_config": models["unet"].config} if "unet" in models else {}
    result = pipe.lora_state_dict({name: value.clone() for name, value in file.items()}, **extra)
    state, alphas = result if isinstance(result, tuple) else (result, None)
    found = {}
    for name, value in state.items():
        module, end = today(name).removesuffix(".weight").rsplit(".", 1)
        found.setdefault(module, [None, None])[["lora_A", "lora_B"].index(end)] = value
    matrix = lambda pair: pair[1].flatten(1) @ pair[0].flatten(1)
    for module, pair in found.items():
        # Without alphas beside them they are in the factors.
        assert torch.equal(matrix(pair) * (scale if alphas else 1.0), matrix(parts[module]) * scale), module
    assert found.keys() == parts.keys(), found.keys() ^ parts.keys()


def sdxl(noise):
    tokenizer = vocab.clip_tokenizer()
    first, second, unet, vae_model, _, _ = sdxl_pipeline.build()
    height, width = sdxl_pipeline.HEIGHT, sdxl_pipeline.WIDTH
    time_ids = torch.tensor([[height, width, 0, 0, height, width]], dtype=torch.float64)
    loras = Loras("sdxl", SDXL, {"unet": unet, "text_encoder": first, "text_encoder_2": second}, StableDiffusionXLPipeline)

    def condition(prompt):
        one, two = pipeline.windows(tokenizer, prompt), pipeline.windows(tokenizer, prompt, pad=0)
        result = second(two, output_hidden_states=True)
        states = torch.cat([first(one, output_hidden_states=True).hidden_states[-2], result.hidden_states[-2]], dim=-1)
        return {"encoder_hidden_states": states, "added_cond_kwargs": {"text_embeds": result.text_embeds, "time_ids": time_ids}}

    def run():
        model = pipeline.guided(unet, condition(pipeline.NEGATIVE), condition(pipeline.PROMPT))
        sigmas = schedules.sigmas("discrete", STEPS)
        return "euler", sigmas, pipeline.denoiser("eps", model), noise.double() * sigmas[0], lambda z: vae_model.decode(z / sdxl_pipeline.SCALE).sample

    settings = {"negative_prompt": pipeline.NEGATIVE, "cfg": pipeline.CFG, "width": width, "height": height}
    record("sdxl", loras, run, settings)


def flux_dev(noise):
    clip_tokenizer, t5_tokenizer = vocab.clip_tokenizer(), vocab.t5_tokenizer()
    clip, t5, transformer, vae_model, _, _ = flux_pipeline.build("dev")
    height, width = flux_pipeline.HEIGHT, flux_pipeline.WIDTH
    h, w = height // 8, width // 8
    loras = Loras("flux", FLUX, {"transformer": transformer, "text_encoder": clip}, FluxPipeline)
    tokens = t5_tokenizer.encode(pipeline.PROMPT, add_special_tokens=False).ids + [t5_encoder.EOS]
    text = t5_encoder.encode(t5, torch.tensor([tokens + [t5_encoder.PAD] * (512 - len(tokens))]))
    clip_ids = pipeline.windows(clip_tokenizer, pipeline.PROMPT)
    sigmas = schedules_flux.dev(STEPS, schedules_flux.tokens(width, height)).double()

    def run():
        pooled = clip(clip_ids).pooler_output

        def velocity(x, sigma):
            return flux.unpack(flux.forward(transformer, flux.pack(x), flux.image_ids(h, w), text, pooled, sigma.item(), flux_pipeline.GUIDANCE), h, w)

        return "euler", sigmas, pipeline.flow(velocity), noise.double() * sigmas[0], lambda z: vae_model.decode(z / flux_pipeline.SCALE + flux_pipeline.SHIFT).sample

    record("flux", loras, run, {"negative_prompt": "", "cfg": 1.0, "guidance": flux_pipeline.GUIDANCE, "width": width, "height": height})


def sd35(noise):
    clip_tokenizer, t5_tokenizer = vocab.clip_tokenizer(), vocab.t5_tokenizer()
    first, second, t5, transformer, vae_model, _, _ = sd3_pipeline.build("medium")
    height, width = sd3_pipeline.HEIGHT, sd3_pipeline.WIDTH
    models = {"transformer": transformer, "text_encoder": first, "text_encoder_2": second}
    loras = Loras("sd3", SD3, models, StableDiffusion3Pipeline)
    levels = sd3_pipeline.scheduler()
    levels.set_timesteps(STEPS)
    sigmas = levels.sigmas.double()

    def condition(prompt):
        one, two = pipeline.windows(clip_tokenizer, prompt), pipeline.windows(clip_tokenizer, prompt, pad=0)
        left, right = first(one, output_hidden_states=True), second(two, output_hidden_states=True)
        states = torch.cat([left.hidden_states[-2], right.hidden_states[-2]], dim=-1)
        tokens = t5_tokenizer.encode(prompt, add_special_tokens=False).ids + [t5_encoder.EOS]
        more = t5_encoder.encode(t5, torch.tensor([tokens + [t5_encoder.PAD] * (sd3_pipeline.TOKENS - len(tokens))]))
        states = torch.nn.functional.pad(states, (0, more.shape[-1] - states.shape[-1]))
        return torch.cat([states, more], dim=1), torch.cat([left.pooler_output, right.text_embeds], dim=-1)

    def run():
        (cond, pooled), (uncond, unpooled) = condition(pipeline.PROMPT), condition(pipeline.NEGATIVE)
        states, vectors = torch.cat([uncond, cond]), torch.cat([unpooled, pooled])

        def velocity(x, sigma):
            without, with_prompt = transformer(torch.cat([x, x]), states, vectors, torch.full([2], 1000 * sigma.item(), dtype=torch.float64)).sample.chunk(2)
            return without + pipeline.CFG * (with_prompt - without)

        return "euler", sigmas, pipeline.flow(velocity), noise.double(), lambda z: vae_model.decode(z / sd3_pipeline.SCALE + sd3_pipeline.SHIFT).sample

    record("sd3", loras, run, {"negative_prompt": pipeline.NEGATIVE, "cfg": pipeline.CFG, "width": width, "height": height})


def record(family, loras, run, settings):
    inputs, outputs = {}, {}
    for key, chosen in {"none": [], **RUNS}.items():
        loras.choose(chosen)
        sampler, sigmas, denoise, start, decode = run()
        pipeline.record(inputs, outputs, key, sampler, sigmas, denoise, start, decode, full=False, most=0.1)
    for key in RUNS:
        moved = (outputs[f"{key}.latents"][-1] - outputs["none.latents"][-1]).norm() / outputs["none.latents"][-1].norm()
        print(f"{family} {key}: moves the latent by {moved:.3f}")
        assert moved > 0.02
    outputs = {key: value for key, value in outputs.items() if not key.startswith("none.")}
    inputs = {key: value for key, value in inputs.items() if key != "sigmas.none"}
    versions = ", ".join(f"{name} {fixture.version(name)}" for name in ("diffusers", "peft", "transformers", "k-diffusion"))
    config = {"prompt": pipeline.PROMPT, "seed": pipeline.SEED, "steps": STEPS, "files": loras.rows, "runs": RUNS, **settings}
    fixture.save(
        f"{family}_lora_pipeline", "lora_pipeline.py", versions, config, inputs=inputs, outputs=outputs,
        notes="the model is that of the family's other pipeline; files: tensor, shape and exponent of the rule under <family>.<file>.<tensor>, an alpha's value in its place; runs: file and strength",
    )


def main():
    # Drawn in f32, as the pipelines do.
    sizes = ((4, sdxl_pipeline), (16, flux_pipeline), (16, sd3_pipeline))
    noises = [pipeline.noise(channels, size.HEIGHT, size.WIDTH) for channels, size in sizes]
    with torch.no_grad(), fixture.double_precision():
        for family, noise in zip((sdxl, flux_dev, sd35), noises):
            family(noise)


if __name__ == "__main__":
    main()
