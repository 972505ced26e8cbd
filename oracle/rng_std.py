"""C++'s default_random_engine with normal_distribution<float>, as libstdc++ has them.

The standard leaves both to the implementation; this is GCC's, on Linux. `g++` compiles the program below.
"""

import pathlib
import subprocess
import tempfile

import fixture

SEEDS, COUNTS = [0, 1, 42, 2147483646, 2147483647, 2147483648, 4294967295], [5, 16]
PROGRAM = """
#include <cstdio>
#include <cstdlib>
#include <random>
int main(int, char **argv) {
    std::default_random_engine engine(static_cast<unsigned>(std::strtoull(argv[1], nullptr, 10)));
    for (int call = 0; call < 2; ++call) {
        std::normal_distribution<float> normal(0.0f, 1.0f);
        for (int i = 0; i < std::atoi(argv[2]); ++i) std::printf("%.9g ", normal(engine));
    }
}
"""


def main():
    with tempfile.TemporaryDirectory() as folder:
        source, program = pathlib.Path(folder) / "normal.cpp", pathlib.Path(folder) / "normal"
        source.write_text(PROGRAM)
        subprocess.run(["g++", "-O1", "-o", program, source], check=True)
        version = subprocess.run(["g++", "-dumpfullversion"], check=True, capture_output=True, text=True).stdout.strip()

        def draw(seed, count):
            out = subprocess.run([program, str(seed), str(count)], check=True, capture_output=True, text=True).stdout
            return [float(v) for v in out.split()]
        fixture.save_json("rng_std", {
            "source": f"libstdc++ of GCC {version}", "script": "oracle/rng_std.py",
            "notes": "two calls of count values each; every call has a new distribution on the same engine",
            "rows": [{"seed": seed, "count": count, "values": draw(seed, count)} for seed in SEEDS for count in COUNTS],
        })


if __name__ == "__main__":
    main()
