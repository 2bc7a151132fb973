"""Is the planner's pick as good as compiling every policy? On a small block of six names, all 64 are compiled.

    python bench/exhaustive.py [--limits=9]        minutes on two cores

For each limit: the least recompute (modelled) among the policies that truly fit, against the plan's. A plan may mix two
policies and beat them all; it must not be more than 2% behind.
"""

import argparse
import dataclasses
import functools
import os
import pathlib
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import jax

from configs.schema import Config, Memory, Mesh, Model
from device_kinds import NOMINAL
from model.stack import Segment
from parallel.mesh import make_mesh
from program import Program
from remat.block import trace_block
from remat.graph import subsets
from remat.ledger import GIB, count_parts
from remat.measure import Compiler, Records
from remat.planner import decide, describe

MODEL = Model(
    num_layers=4, embed_dim=64, mlp_dim=256, num_heads=4, num_kv_heads=2, head_dim=16, activation="gelu", vocab_size=64
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limits", type=int, default=9)
    num_limits = parser.parse_args().limits
    jax.config.update("jax_num_cpu_devices", 1)
    config = Config(global_batch_size=16, context_length=128, model=MODEL, mesh=Mesh())
    mesh = make_mesh(config)
    program, compiler = Program(config, mesh), Compiler("cpu", Records(pathlib.Path("runs/exhaustive")))
    graph, beside = trace_block(program, NOMINAL), count_parts(program).beside_bytes
    found = []
    for number, names in enumerate(subsets(graph.useful_names), 1):
        need = graph.need(names)
        if need.saved == names:  # all that it names saves something
            segment = Segment(0, MODEL.num_layers, tuple(n for n in graph.names if n in names))
            total = compiler.peak(Program(config, mesh, (segment,))) + beside
            found.append((total, need.seconds * MODEL.num_layers, segment))
            if number % 8 == 0:
                print(f"policy {number} of {2 ** len(graph.useful_names)}", flush=True)
    low, high = found[0][0], max(f[0] for f in found)  # the first saves nothing
    print(f"{len(found)} policies of {', '.join(graph.useful_names)}: from {low / 2**20:.3f} to {high / 2**20:.3f} MiB")
    worst = 0.0
    for i in range(num_limits):
        limit = low + (high - low) * i / (num_limits - 1)
        memory = Memory(limit_gib=limit / GIB, reserve_gib=0.0)
        make = functools.partial(Program, dataclasses.replace(config, memory=memory), mesh)
        plan, _, _ = decide(make, compiler=compiler)
        best = min((f for f in found if f[0] <= limit), key=lambda f: f[1])
        behind = plan.recompute_seconds / best[1] - 1 if best[1] else 0.0
        worst = max(worst, behind)
        print(f"{limit / 2**20:.3f} MiB: recompute {behind:+.1%} of the best policy's ({describe((best[2],))}): "
              f"{describe(plan.segments)}")  # fmt: skip
    print(f"{'holds' if worst <= 0.02 else 'FAILS'}: within 2% of the best policy that fits: {worst:+.1%} at worst")
    raise SystemExit(0 if worst <= 0.02 else 1)


if __name__ == "__main__":
    main()
