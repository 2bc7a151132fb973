"""`--mode=plan`: will it fit, what will it cost, what would more memory buy; for devices that are here or not."""

import functools
import pathlib
import time

from jax.sharding import Mesh

import metrics
from configs.schema import Config
from program import Program
from remat.planner import decide
from remat.report import picture, table, write


def plan(config: Config, mesh: Mesh, workdir: pathlib.Path, topology: str = "") -> None:
    """Plans for the devices of the mesh; prints a table, writes WORKDIR/plan.json and plan.png. Trains nothing."""
    metrics.say("tracing a block, then compiling the train step: seconds on a CPU, a minute or two each for accelerators")
    began = time.perf_counter()
    decided, program, compiler = decide(functools.partial(Program, config, mesh), metrics.say)
    metrics.say(f"planned in {time.perf_counter() - began:.1f} s")
    metrics.say(table(decided, program, topology))
    write(decided, program, lambda: compiler.compiled(program), topology, workdir)
    picture(decided, program, topology, workdir / "plan.png")
    metrics.say(f"written to {workdir / 'plan.json'} and {workdir / 'plan.png'}")
