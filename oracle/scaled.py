"""Matrices in low-precision storage with the tensors that scale them, in every spelling, and what they mean in f32.

The scaled FP8 forms are products in f32 by torch; the quantised ones are what ComfyUI's kernels (comfy-kitchen) decode.
"""

import json

import torch
from comfy_kitchen.backends.eager import quantization as eager
from safetensors.torch import save_file

import fixture


def quant(**what):
    return torch.frombuffer(bytearray(json.dumps(what).encode()), dtype=torch.uint8).clone()


def fp8(w, scale, dtype):
    return (w / scale).clamp(-448, 448).to(dtype)


def main():
    torch.manual_seed(11)
    file = {}

    def case(name, weight, want, **companions):
        file[f"{name}.weight"] = weight
        for key, tensor in companions.items():
            file[f"{name}.{key}"] = tensor
        file[f"output.{name}"] = want.to(torch.float32).contiguous()

    w = torch.randn(24, 32) * 0.03
    e4, e5 = torch.float8_e4m3fn, torch.float8_e5m2
    scalar = torch.tensor(1.1e-3)
    q = fp8(w, scalar, e4)
    case("old", q, q.float() * scalar, scale_weight=scalar, scale_input=torch.tensor(0.5), bias=torch.randn(24))
    case("old_one", q, q.float() * scalar, scale_weight=scalar.reshape(1))
    q = fp8(w, scalar, e5)
    case("wide", q, q.float() * scalar, scale_weight=scalar)
    half = torch.tensor(1.1e-3, dtype=torch.bfloat16)
    q = fp8(w, half.float(), e4)
    case("new", q, q.float() * half.float(), weight_scale=half, input_scale=torch.tensor(0.5), comfy_quant=quant(format="float8_e4m3fn"))
    rows = w.abs().amax(1) / 448
    q = fp8(w, rows[:, None], e4)
    case("rows", q, q.float() * rows[:, None], weight_scale=rows)
    case("rows_2d", q, q.float() * rows[:, None], weight_scale=rows[:, None].contiguous())
    # Blocks of 8 by 16, then of 128 by 128 as DeepSeek has them, which are cut off at the edges.
    blocks = torch.rand(3, 2) * 1e-3 + 1e-4
    spread = blocks.repeat_interleave(8, 0).repeat_interleave(16, 1)
    q = fp8(w, spread, e4)
    case("blocks", q, q.float() * spread, weight_scale_inv=blocks)
    w = torch.randn(130, 140) * 0.03
    blocks = torch.rand(2, 2) * 1e-3 + 1e-4
    spread = blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)[:130, :140]
    q = fp8(w, spread, e4)
    case("edges", q, q.float() * spread, weight_scale_inv=blocks)
    conv = torch.randn(4, 3, 3, 3) * 0.1
    q = fp8(conv, scalar, e4)
    case("conv", q, q.float() * scalar, scale_weight=scalar)

    for name, group in (("int8", 0), ("turned", 16), ("turned_64", 64)):
        w = torch.randn(6, 128) * 0.05
        if group:
            q, scale = eager.quantize_int8_convrot_weight(w, group)
            want = eager.dequantize_int8_convrot_weight(q, scale, group)
        else:
            q, scale = eager.quantize_int8_rowwise(w)
            want = eager.dequantize_int8_simple(q, scale)
        note = dict(format="int8_tensorwise", convrot=bool(group), **({"convrot_groupsize": group} if group else {}))
        case(name, q, want, weight_scale=scale, comfy_quant=quant(**note))

    w = torch.randn(144, 96) * 0.05  # more than one tile of scales, and not whole ones
    whole = (w.abs().max() / (448 * 6)).float()
    q, scale = eager.quantize_nvfp4(w, whole)
    want = eager.dequantize_nvfp4(q, whole, scale, torch.float32)
    case("nvfp4", q, want, weight_scale=scale, weight_scale_2=whole, comfy_quant=quant(format="nvfp4"))
    q, scale = eager.quantize_mxfp8(w)
    want = eager.dequantize_mxfp8(q, scale, torch.float32)
    case("mxfp8", q, want, weight_scale=scale.view(torch.uint8), comfy_quant=quant(format="mxfp8"))

    # Rows long enough for blocks of 64.
    w = torch.randn(6, 128) * 0.03
    rows = w.abs().amax(1) / 448
    q = fp8(w, rows[:, None], e4)
    case("long_rows", q, q.float() * rows[:, None], weight_scale=rows)
    q = fp8(w, scalar, e5)
    case("long_wide", q, q.float() * scalar, scale_weight=scalar)
    w = torch.randn(130, 256) * 0.03
    blocks = torch.rand(2, 2) * 1e-3 + 1e-4
    spread = blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)[:130]
    q = fp8(w, spread, e4)
    case("long_blocks", q, q.float() * spread, weight_scale_inv=blocks)

    path = fixture.FIXTURES / "scaled.safetensors"
    metadata = {"source": f"torch {torch.__version__}, comfy-kitchen {fixture.version('comfy-kitchen')}", "script": "scaled.py"}
    save_file({k: v.clone() for k, v in file.items()}, path, metadata=metadata)
    print(path.name, path.stat().st_size)


if __name__ == "__main__":
    main()
