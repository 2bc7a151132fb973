"""Does compile time grow with depth? Compiles the train step at 4 and at 64 layers, in turn, and prints the ratio.

    make bench        (or: python bench/compile_time.py [--rounds=9])

Tracing, lowering and compiling are all counted. Every round compiles both depths, so that a machine that slows
down does not change the ratio. One round on a shared machine can be off by 40%: read the median of many. Expected: a
median ratio below 1.15, and, without any noise, programs of the same number of instructions.
"""

import argparse
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import jax

from configs.schema import Config, Mesh, Model
from parallel.mesh import make_mesh
from program import Program

DEPTHS = (4, 64)


def measure(layers: int) -> tuple[float, int]:
    """Seconds from a config to a compiled step, with nothing cached from before, and the step's instructions."""
    jax.clear_caches()
    config = Config(model=Model(num_layers=layers, compute_dtype="float32"), mesh=Mesh(data=2, fsdp=2, tensor=2))
    program = Program(config, make_mesh(config))
    began = time.perf_counter()
    compiled = program.compile_train_step()
    took = time.perf_counter() - began
    return took, sum(" = " in line for line in compiled.as_text().splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    jax.config.update("jax_num_cpu_devices", 8)
    measure(2)  # what is loaded once
    ratios, sizes = [], {}
    for i in range(rounds):
        measured = {layers: measure(layers) for layers in (DEPTHS if i % 2 == 0 else DEPTHS[::-1])}
        (few, sizes[DEPTHS[0]]), (many, sizes[DEPTHS[1]]) = (measured[layers] for layers in DEPTHS)
        ratios.append(many / few)
        print(
            f"round {i + 1}/{rounds}: {DEPTHS[0]} layers {few:.2f} s, {DEPTHS[1]} layers {many:.2f} s, ratio {ratios[-1]:.3f}"
        )
    print("instructions: " + ", ".join(f"{layers} layers {size:,}" for layers, size in sizes.items()))
    print(f"ratio: median {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main()
