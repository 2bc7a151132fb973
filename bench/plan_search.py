"""How long does the search for a plan take, compiles apart? A block of twelve names in a stack of a hundred layers.

    python bench/plan_search.py        seconds

Prints the time of the trace, of the policies' front and of the mixes, without and with offloading. Nothing is compiled.
"""

import dataclasses
import os
import pathlib
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import numpy as np

from configs import decoder_70b
from configs.schema import Mesh
from device_kinds import device_kind
from model import layers
from parallel.mesh import make_mesh
from program import Program
from remat.block import trace_block
from remat.graph import subsets
from remat.ledger import GIB, count_parts
from remat.memory_model import MemoryModel, work_bytes
from remat.offload import with_offload
from remat.solve import best_mix, pareto_front


def name_more() -> None:
    """Names five more tensors of the block: both norms, the rotated queries and keys, and the gate after its function."""
    norm, rotate, silu = layers.RMSNorm.__call__, layers.rotate, layers.nn.silu
    turned = iter(["q_rotated", "k_rotated"] * 100)
    axes = "batch", "length", "heads", "head_dim"
    layers.RMSNorm.__call__ = lambda self, x: layers.saveable(norm(self, x), str(self.name), "batch", "length", "embed")  # type: ignore[method-assign]
    layers.rotate = lambda x, *args: layers.saveable(rotate(x, *args), next(turned), *axes)
    layers.nn.silu = lambda x: layers.saveable(silu(x), "activated", "batch", "length", "mlp")


def main() -> None:
    name_more()
    config = decoder_70b.get_config()
    config = dataclasses.replace(
        config, global_batch_size=8, mesh=Mesh(), model=dataclasses.replace(config.model, num_layers=100)
    )
    program = Program(config, make_mesh(config))
    kind = device_kind("TPU v5p")
    assert kind
    began = time.perf_counter()
    graph = trace_block(program, kind)
    print(f"trace: {time.perf_counter() - began:.2f} s, {len(graph.useful_names)} names: {' '.join(graph.useful_names)}")
    for offload in (False, True):
        began = time.perf_counter()
        needs = [graph.need(names) for names in subsets(graph.useful_names)]
        needs += with_offload(graph, needs, kind, 1e12) if offload else []
        front = pareto_front(needs)
        print(f"offload {offload}: front of {len(front)} out of {len(needs)} policies: {time.perf_counter() - began:.2f} s")
        model = MemoryModel(front, 100, count_parts(program), work_bytes(program, graph))
        low, high = (float(model([i], [i], np.array([0]))[0]) for i in (0, -1))
        began = time.perf_counter()
        mixes = [best_mix(front, 100, model, low + share * (high - low)) for share in (0.2, 0.4, 0.6, 0.8)]
        took = time.perf_counter() - began
        print(f"  the best mix: {took / len(mixes):.2f} s each, with room for {(high - low) / GIB:.0f} GiB between the ends")


if __name__ == "__main__":
    main()
