"""Writes fixtures: what a public reference implementation computed on a tiny seeded configuration.

Tensors are named `weight.*`, `input.*`, `tap.*` and `output.*`. Weights are either stored, or described by a rule
that any language can evaluate exactly (`procedural` below), so that a whole network costs a few kilobytes.
"""

import contextlib
import importlib.metadata
import json
import math
import os
import pathlib

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch

FIXTURES = pathlib.Path(__file__).resolve().parent / "fixtures"
DTYPES = {
    torch.float16: "F16", torch.float32: "F32", torch.float64: "F64",
    torch.int32: "I32", torch.int64: "I64", torch.uint8: "U8",
}
RULE = (
    "m = (k-th output of SplitMix64 whose state starts at FNV-1a-64 of the tensor name, k from 1, row-major order) >> 53, "
    "minus 1024; value = shift + m * 2^exponent; entries are name: [shape, exponent, shift]"
)

torch.use_deterministic_algorithms(True)
torch.set_num_threads(1)


def version(package):
    return importlib.metadata.version(package)


def write_safetensors(path, tensors, metadata):
    """Writes the header in the order given, so that the same run gives the same bytes."""
    header, blobs, offset = {"__metadata__": {k: str(v) for k, v in metadata.items()}}, [], 0
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous()
        blob = tensor.numpy().tobytes()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, offset + len(blob)]}
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    pathlib.Path(path).write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


def f32(tensor):
    return tensor.to(torch.float32) if tensor.is_floating_point() else tensor


def save(name, script, source, config, *, weights=None, procedural=None, inputs=(), taps=(), outputs=(), notes="", dtype=torch.float32):
    """Writes `fixtures/<name>.safetensors`. `inputs`, `taps`, `outputs` map bare names to tensors."""
    tensors = {}
    for key, value in (weights or {}).items():
        tensors[f"weight.{key}"] = value.to(dtype)
    for kind, group in (("input", inputs), ("tap", taps), ("output", outputs)):
        for key, value in dict(group).items():
            tensors[f"{kind}.{key}"] = value if value.dtype == torch.float64 and kind == "input" else f32(value)
    metadata = {"source": source, "torch": torch.__version__.split("+")[0], "script": f"oracle/{script}", "config": json.dumps(config, separators=(",", ":"))}
    if notes:
        metadata["notes"] = notes
    if procedural:
        metadata["rule"] = RULE
        metadata["procedural"] = json.dumps(procedural, separators=(",", ":"))
    path = FIXTURES / f"{name}.safetensors"
    write_safetensors(path, tensors, metadata)
    print(f"{path.name}: {len(tensors)} tensors, {path.stat().st_size} bytes")


def save_json(name, value):
    """Writes `fixtures/<name>.json`, one line per top-level entry of each list, so that differences can be read."""
    def compact(v):
        return json.dumps(v, separators=(",", ":"), ensure_ascii=True)

    parts = []
    for key, item in value.items():
        if isinstance(item, list) and item and isinstance(item[0], (list, dict)):
            body = "[\n" + ",\n".join(compact(x) for x in item) + "\n]"
        else:
            body = compact(item)
        parts.append(f"{compact(key)}:{body}")
    path = FIXTURES / f"{name}.json"
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    print(f"{path.name}: {path.stat().st_size} bytes")


def grid(name, count):
    """The integers of the procedural rule: `count` values in [-1024, 1023]."""
    state = 0xCBF29CE484222325
    for byte in name.encode():
        state = ((state ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    with np.errstate(over="ignore"):
        z = np.uint64(state) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(53)).astype(np.int64) - 1024


def procedural(name, shape, exponent, shift):
    values = shift + grid(name, math.prod(shape)).astype(np.float64) * 2.0**exponent
    return torch.from_numpy(values.reshape(shape))


def recipe(name, shape):
    """Exponent and shift that keep activations near unit scale: norms near 1, biases small, matrices by fan-in."""
    if len(shape) == 1:
        return (-12, 1.0) if name.endswith("weight") else (-13, 0.0)
    if "embedding" in name and "time_embedding" not in name and "add_embedding" not in name:
        return -12, 0.0
    fan_in = math.prod(shape[1:])
    return round(math.log2(math.sqrt(3.0 / fan_in))) - 10, 0.0


def fill(module, prefix="", adjust=None):
    """Sets every parameter of `module` by the rule and returns the table for the metadata. `adjust` adds to exponents by name."""
    table = {}
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            shape = list(parameter.shape)
            exponent, shift = recipe(prefix + name, shape)
            exponent += (adjust or {}).get(name, 0)
            table[prefix + name] = [shape, exponent, shift]
            parameter.copy_(procedural(prefix + name, shape, exponent, shift))
    return table


def save_examples():
    """Values of the procedural rule, for tests of other implementations of it."""
    names = ["a", "conv_in.weight", "unet.mid_block.attentions.0.norm.bias"]
    save_json("procedural", {"rule": RULE, "m": {name: grid(name, 12).tolist() for name in names}})


def randn(seed, *shape, scale=1.0):
    """Seeded inputs, exact in f32, returned as f64 for the reference to compute with."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).double()


class Taps:
    """Records module outputs under given names while a reference runs. The first call of a module is kept."""

    def __init__(self, named_modules):
        self.values, self.handles = {}, []
        for name, module in named_modules.items():
            self.handles.append(module.register_forward_hook(self.hook(name)))

    def hook(self, name):
        def record(_module, _inputs, output):
            if not isinstance(output, torch.Tensor):
                output = output[0]
            self.values.setdefault(name, output.detach().clone())
        return record

    def close(self):
        for handle in self.handles:
            handle.remove()
        for name, value in self.values.items():
            assert 0.02 < value.std() < 20, f"{name} has an unhelpful scale: {value.std()}"
        return self.values


@contextlib.contextmanager
def double_precision():
    """Runs references that ask for `.float()` or the default dtype in f64."""
    plain_float = torch.Tensor.float
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.Tensor.float = plain_float
        torch.set_default_dtype(torch.float32)


if __name__ == "__main__":
    save_examples()
