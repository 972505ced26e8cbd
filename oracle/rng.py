"""Noise streams: torch's CPU generator (MT19937), and torch's CUDA generator (Philox4x32-10) computed on the CPU.

No CUDA device is needed: the Philox counter function is written here from the Random123 paper (Salmon et al., SC'11) and checked
against the paper's published known answers and, when a C++ compiler is present, against the `Philox4_32` engine in torch's own headers.
Key = the 64-bit seed (low, high); counter = (call, 0, element, 0). The normal transform is cuRAND's Box-Muller, in f64.
"""

import pathlib
import shutil
import subprocess
import tempfile

import numpy as np
import torch

import fixture

SEEDS = [0, 42, 1234567890123, 2**63 - 1]
SIZES = [1, 3, 15, 16, 17, 31, 32, 100]
SEQUENCES = [[4 * 16 * 16, 4 * 16 * 16], [3, 3, 5, 17, 3, 1, 16, 1, 20]]
KNOWN_ANSWERS = [  # counter, key, output; Random123 kat_vectors, philox4x32 with 10 rounds
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0], [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
]


def philox(counter, key):
    """`counter` [4, n] and `key` [2] of 32-bit words give [4, n]."""
    c = [np.asarray(word, dtype=np.uint64) for word in counter]
    k = [int(word) for word in key]
    mask = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(b >> np.uint64(32)) ^ c[1] ^ np.uint64(k[0]), b & mask, (a >> np.uint64(32)) ^ c[3] ^ np.uint64(k[1]), a & mask]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.stack(c)


def philox_words(seed, call, n):
    element, zero = np.arange(n, dtype=np.uint64), np.zeros(n, dtype=np.uint64)
    return philox([zero + np.uint64(call), zero, element, zero], [seed & 0xFFFFFFFF, seed >> 32])


def philox_randn(seed, call, n):
    words = philox_words(seed, call, n).astype(np.float64)
    u, v = (words[0] + 0.5) / 2.0**32, (words[1] + 0.5) * 2.0 * np.pi / 2.0**32
    return torch.from_numpy(np.sqrt(-2.0 * np.log(u)) * np.sin(v))


def check_philox():
    for counter, key, answer in KNOWN_ANSWERS:
        assert philox([[word] for word in counter], key)[:, 0].tolist() == answer
    # The first values that a CUDA torch gives for seed 0, as published in the documentation of A1111's webui.
    known = torch.tensor([-0.92466259, -0.42534415, -2.64384580, 0.14518388, -0.12086648])
    assert torch.allclose(philox_randn(0, 0, 5).float(), known, atol=1e-6)
    compiler = shutil.which("g++")
    if compiler is None:
        print("no C++ compiler: Philox is checked against known answers only")
        return
    source = """
        #include <ATen/core/PhiloxRNGEngine.h>
        #include <cstdio>
        int main() {
          unsigned long long seeds[] = {%s};
          for (auto seed : seeds) for (int call = 0; call < 3; call++) for (int i = 0; i < 7; i++) {
            at::Philox4_32 engine(seed, i, call);
            for (int j = 0; j < 4; j++) printf("%%u\\n", engine());
          }
        }""" % ",".join(f"{seed}ull" for seed in SEEDS)
    include = pathlib.Path(torch.__file__).parent / "include"
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "engine.cpp").write_text(source)
        subprocess.run([compiler, "-std=c++20", "-w", f"-I{include}", "-o", folder / "engine", folder / "engine.cpp"], check=True)
        printed = subprocess.run([folder / "engine"], check=True, capture_output=True, text=True).stdout
    ours = np.concatenate([philox_words(seed, call, 7).T.reshape(-1) for seed in SEEDS for call in range(3)])
    assert [int(line) for line in printed.split()] == ours.tolist()


def subset(values):
    return {"first": values[:64], "last": values[-64:], "every_61": values[::61]}


def main():
    check_philox()
    cpu, cuda = {}, {}
    for seed in SEEDS:
        for n in SIZES:
            cpu[f"cpu.{seed}.{n}"] = torch.randn(n, generator=torch.Generator().manual_seed(seed))
        for part, values in subset(torch.randn(4096, generator=torch.Generator().manual_seed(seed))).items():
            cpu[f"cpu.{seed}.4096.{part}"] = values
    for seed in (0, 42):
        for sizes in SEQUENCES:
            generator = torch.Generator().manual_seed(seed)
            name = "_".join(str(n) for n in sizes)
            for i, n in enumerate(sizes):
                cpu[f"cpu.{seed}.sequence.{name}.{i}"] = torch.randn(n, generator=generator)
    # A generator's shape argument does not matter: values fill memory in row-major order.
    image = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(42))
    assert torch.equal(image.flatten(), cpu["cpu.42.sequence.1024_1024.0"])
    for seed in SEEDS:
        for call in range(3):
            cuda[f"cuda.{seed}.{call}.100"] = philox_randn(seed, call, 100)
        for part, values in subset(philox_randn(seed, 0, 4096)).items():
            cuda[f"cuda.{seed}.0.4096.{part}"] = values
        cuda[f"cuda_words.{seed}.1.16"] = torch.from_numpy(philox_words(seed, 1, 16).T.astype(np.int64))
    fixture.save(
        "rng", "rng.py", f"torch {fixture.version('torch')} randn on the CPU; Philox4x32-10 with Box-Muller as cuRAND", {"seeds": SEEDS, "sizes": SIZES, "sequences": SEQUENCES},
        outputs=cpu | cuda,
        notes="cpu.SEED.N: one randn call on a fresh generator. cpu.SEED.sequence.SIZES.I: call I of calls made one after another on one generator. "
        "cuda.SEED.CALL.N: randn number CALL (from 0) after seeding. cuda_words.SEED.CALL.N: the four 32-bit words per element, [N, 4]. "
        "4096.first, .last hold 64 values, .every_61 holds values 0, 61, 122 and so on.",
    )


if __name__ == "__main__":
    main()
