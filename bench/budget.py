"""Does the plan fit, does it use the memory, and what does it recompute less than fixed settings?

    python bench/budget.py [--only=GROUP,..] [--workdir=runs/budget]        hours on two cores: kept, and gone on with

Compiles real train steps for devices that are not here (extras tpu and cuda12). For each group (config, topology) the
limits stand on an even grid between what full recompute and what saving every useful name need. Each compiled step is
kept in the workdir: a run that was stopped goes on (after a change of the model, remove the workdir). Written for each
group: GROUP.json, of which `bench/budget_report.py` makes the page.
"""

import argparse
import dataclasses
import functools
import gzip
import hashlib
import json
import os
import pathlib
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import numpy as np

from bench.hlo_flops import kernel_calls, matmul_flops
from configs import decoder_8b, decoder_125m, decoder_750m
from configs.schema import Config, Mesh, Model
from device_kinds import device_kind
from model.stack import Segment
from parallel.mesh import make_mesh
from program import Program
from remat import measure
from remat.block import trace_block
from remat.ledger import GIB, count_parts
from remat.memory_model import MemoryModel, work_bytes
from remat.planner import Plan, Tried, decide, describe
from remat.solve import Mix
from remat.topologies import absent_devices

MODEL_250M = Model(num_layers=16, embed_dim=1024, mlp_dim=2816, num_heads=8, num_kv_heads=4, head_dim=128, vocab_size=32_000)


@dataclasses.dataclass(frozen=True)
class Group:
    config: Config
    topology: str
    num_limits: int


def groups() -> dict[str, Group]:
    """The models and the devices that they are planned for."""
    small = decoder_125m.get_config()
    small = dataclasses.replace(small, global_batch_size=128, mesh=Mesh(data=2, fsdp=2))
    return {
        "750m-v5e": Group(decoder_750m.get_config(), "v5e:2x4", 4),
        "125m-v6e": Group(small, "v6e:2x2", 3),
        "250m-v5p": Group(
            Config(global_batch_size=16, context_length=2048, model=MODEL_250M, mesh=Mesh(tensor=2)), "v5p:2x2x1", 3
        ),
        "750m-h100": Group(decoder_750m.get_config(), "h100:8", 7),
        "8b-h100": Group(decoder_8b.get_config(), "h100:8x8", 7),
    }


# What MaxText's presets save, in the names of this block (MaxText's query_proj, key_proj, value_proj are q, k, v; its
# context is attention, out_proj attention_out, mlpwi_0 and mlpwi_1 gate and up). mlpwo, mlp_out here, is what a block
# returns: nobody's backward pass asks for it, and save_dot_except_mlpwi is one program with save_dot_except_mlp.
PRESETS = {
    "full": (),
    "save_out_proj": ("attention_out",),
    "save_qkv_proj": ("q", "k", "v"),
    "save_dot_except_mlp": ("q", "k", "v", "attention_out"),
    "save_dot_except_mlpwi": ("q", "k", "v", "attention_out"),
    "save_dot_with_context_except_mlp": ("q", "k", "v", "attention", "attention_out"),
    "minimal": ("q", "k", "v", "attention_out", "up", "gate"),
    "minimal_with_context": ("q", "k", "v", "attention", "attention_out", "up", "gate"),
}


class Steps:
    """Compiled train steps of one group: their peaks and, compressed, their texts. Each is compiled once."""

    def __init__(self, group: Group, folder: pathlib.Path):
        self.config, self._folder = group.config, folder
        self.mesh = make_mesh(group.config, absent_devices(group.topology))
        self.platform = self.mesh.devices.flat[0].platform
        self.make = functools.partial(Program, self.config, self.mesh)
        program = self.make()
        kind = device_kind(self.mesh.devices.flat[0].device_kind)
        assert kind
        self.graph = trace_block(program, kind)
        self.work_bytes = work_bytes(program, self.graph)
        self.beside_bytes = count_parts(program).beside_bytes
        folder.mkdir(parents=True, exist_ok=True)

    def measure(self, program: Program) -> tuple[pathlib.Path, int]:
        """The compiled step's text (its file, empty if the compiler refused it) and its peak."""
        segments = [[s.first_layer, s.num_layers, s.save] for s in program.segments]
        about = json.dumps([segments, measure.versions()], sort_keys=True)
        path = self._folder / f"{hashlib.sha256(about.encode()).hexdigest()[:16]}.hlo.gz"
        record = path.with_suffix(".json")
        if not record.exists():
            began = time.perf_counter()
            compiled, peak = measure.compile_and_measure(program.compile_train_step, self.platform)
            with gzip.open(path, "wt") as file:
                file.write(compiled.as_text() if compiled else "")
            seconds = time.perf_counter() - began
            record.write_text(json.dumps({"peak_bytes": peak, "seconds": seconds, "segments": segments}))
            print(f"  compiled in {seconds:.0f} s: {segments}, peak {peak / 2**30:.3f} GiB", flush=True)
        return path, json.loads(record.read_text())["peak_bytes"]

    def preset(self, names: tuple[str, ...]) -> tuple[pathlib.Path, int]:
        return self.measure(self.make((Segment(0, self.config.model.num_layers, names),)))


class KeptCompiler(measure.Compiler):
    """One that asks `Steps`: what is compiled for one limit is not compiled again for the next."""

    def __init__(self, steps: Steps):
        super().__init__(steps.platform)
        self._steps, self._asked = steps, set()  # type: ignore[var-annotated]

    def peak(self, program: Program, what: str = "train_step") -> int:
        if what != "train_step":  # not what is measured here
            return 0
        self._asked.add(program.segments)
        self.num_compiles = len(self._asked)
        return self._steps.measure(program)[1]


class Recompute:
    """FLOPs that a compiled step does over again, on one device: products, and the forward kernel of attention."""

    def __init__(self, steps: Steps):
        everything = frozenset(steps.graph.useful_names)
        self._kernel_flops = steps.graph.need(everything - {"attention"}).flops
        self._layers = steps.config.model.num_layers
        self._least = matmul_flops(_text(steps.preset(PRESETS["minimal_with_context"])[0]))

    def __call__(self, path: pathlib.Path) -> float:
        text = _text(path)
        reruns = kernel_calls(text, r'splash_mha_fwd|fmhaScaleBiasSoftmax"') - self._layers
        return matmul_flops(text) - self._least + reruns * self._kernel_flops


def _text(path: pathlib.Path) -> str:
    with gzip.open(path, "rt") as file:
        return file.read()


def run_group(name: str, group: Group, workdir: pathlib.Path) -> dict:
    """All cells of a group, and its presets."""
    steps = Steps(group, workdir / name)
    recompute, beside = Recompute(steps), steps.beside_bytes
    presets = {}
    for preset, names in PRESETS.items():
        path, peak = steps.preset(names)
        presets[preset] = {"total_bytes": peak + beside, "recompute_flops": recompute(path)}
        print(
            f"{name} {preset}: {(peak + beside) / GIB:.3f} GiB, {presets[preset]['recompute_flops'] / 1e12:.2f} TFLOP",
            flush=True,
        )
    low, high = (presets[p]["total_bytes"] for p in ("full", "minimal_with_context"))
    cells = []
    for i in range(1, group.num_limits + 1):
        limit = low + (high - low) * i / (group.num_limits + 1)
        cells.append(run_cell(steps, recompute, presets, limit, beside) | {"group": name, "topology": group.topology})
        shown = {k: v for k, v in cells[-1].items() if k not in ("segments", "group", "topology")}
        print(
            f"{name} cell {i}: " + ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in shown.items())
        )
        print("  " + cells[-1]["segments"], flush=True)
    return {"presets": presets, "cells": cells, "layers": steps.config.model.num_layers}


def run_cell(steps: Steps, recompute: Recompute, presets: dict, limit: float, beside: int) -> dict:
    """One limit: what the planner picks, held against the budget, the prediction and the presets that fit."""
    memory = dataclasses.replace(steps.config.memory, limit_gib=limit / GIB, reserve_gib=0.0)
    config = dataclasses.replace(steps.config, memory=memory)
    make = functools.partial(Program, config, steps.mesh)
    plan, program, _ = decide(make, compiler=KeptCompiler(steps))
    path, peak = steps.measure(program)
    fitting = {name: p["recompute_flops"] for name, p in presets.items() if p["total_bytes"] <= limit}
    best = min(fitting, key=fitting.__getitem__)
    tried = {t.segments: t for t in plan.tried}
    chosen = tried.pop(plan.segments)
    model = MemoryModel(plan.front, config.model.num_layers, plan.parts, steps.work_bytes, min_segment=0)

    def formula(t):
        return float(model([plan.front.index(t.mix.first)], [plan.front.index(t.mix.second)], np.array([t.mix.num_second]))[0])

    # With one compile of another plan of this config: the first that the planner made, or else full recompute's.
    full = Mix(plan.front[0], plan.front[0], 0, config.model.num_layers)
    other = next(iter(tried.values()), None)
    shown = (
        other.compiled_bytes - formula(other) if other else presets["full"]["total_bytes"] - beside - formula(_as_tried(full))
    )
    return {
        "limit_bytes": limit,
        "total_bytes": peak + beside,
        "use": (peak + beside) / limit,
        "num_compiles": plan.num_compiles,
        "error_uncalibrated": formula(chosen) / peak - 1,
        "error": (formula(chosen) + shown) / peak - 1,
        "recompute_flops": recompute(path),
        "best_preset": best,
        "preset_flops": fitting[best],
        "seconds": plan.recompute_seconds,
        "bound_seconds": _fractional_bound(plan, model, limit - beside, peak - formula(chosen)),
        "layer_seconds": max(n.seconds for n in plan.front) - min(n.seconds for n in plan.front),
        "richer_exists": len(plan.segments) > 1 or set(plan.segments[0].save or ()) != set(PRESETS["minimal_with_context"]),
        "segments": describe(plan.segments),
    }


def _as_tried(mix: Mix) -> Tried:
    return Tried(mix, (), 0, 0)


def _fractional_bound(plan: Plan, model: MemoryModel, room: float, offset: float) -> float:
    """The least recompute, in modelled seconds, if layers could be cut into fiftieths: every pair, every share."""
    model.offset = offset
    layers, count = plan.segments[-1].first_layer + plan.segments[-1].num_layers, len(plan.front)
    seconds = np.array([need.seconds for need in plan.front])
    first, second = (a.ravel() for a in np.meshgrid(np.arange(count), np.arange(count), indexing="ij"))
    best = np.inf
    for n in np.arange(0, layers, 0.02):
        fits = model(first, second, np.full(len(first), n)) <= room
        total = np.where(fits, (layers - n) * seconds[first] + n * seconds[second], np.inf)
        best = min(best, float(total.min()))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="groups, joined by commas")
    parser.add_argument("--workdir", default="runs/budget", type=pathlib.Path)
    args = parser.parse_args()
    chosen = args.only.split(",") if args.only else list(groups())
    for name in chosen:
        result = run_group(name, groups()[name], args.workdir)
        (args.workdir / f"{name}.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
