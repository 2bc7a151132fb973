"""Runs meshfit: `python main.py --config=configs/tiny.py --workdir=runs/tiny`, with `--config.FIELD=VALUE` on top."""

import functools
import logging
import os
import pathlib
import sys
from collections.abc import Callable

from absl import app, flags
from absl import logging as absl_logging

from configs import command_line
from configs.schema import InputError

CONFIG = command_line.define_config()
WORKDIR = flags.DEFINE_string("workdir", None, "Folder that everything a run writes goes under.")
MODE = flags.DEFINE_enum("mode", "train", ["train", "plan", "evaluate", "generate"], "What to do.")
PROMPT = flags.DEFINE_string("prompt", None, "With --mode=generate: the text to go on from, instead of config.sample.prompt.")
TOPOLOGY = flags.DEFINE_string("topology", "", "With --mode=plan: devices that are not here, such as v5e:2x4, h100:8.")
COORDINATOR = flags.DEFINE_string("coordinator_address", "", "host:port of process 0, where several processes run together.")
NUM_PROCESSES = flags.DEFINE_integer("num_processes", 0, "How many processes run together.")
PROCESS_ID = flags.DEFINE_integer("process_id", -1, "Which of them this is, counted from 0.")


def main(_) -> int:
    try:
        run()
    except InputError as error:
        print(f"meshfit: {error}", file=sys.stderr)
        return 2
    return 0


def run() -> None:
    absl_logging.set_verbosity(absl_logging.WARNING)
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax logs every file; what goes wrong, it raises
    if TOPOLOGY.value:
        os.environ["JAX_PLATFORMS"] = "cpu"  # nothing runs, and devices that are here are left alone
    # Imported once the flags are known to be good: JAX takes seconds.
    from parallel import mesh as meshes

    config = CONFIG.value
    if PROMPT.value is not None:
        config.sample.prompt = PROMPT.value
    meshes.start(config, COORDINATOR.value, NUM_PROCESSES.value, PROCESS_ID.value)
    import evaluate
    import generate
    import planning
    import train
    from remat.topologies import absent_devices

    mesh = meshes.make_mesh(config, absent_devices(TOPOLOGY.value) if TOPOLOGY.value else None)
    modes: dict[str, Callable] = {
        "train": train.train,
        "plan": functools.partial(planning.plan, topology=TOPOLOGY.value),
        "evaluate": evaluate.evaluate_newest,
        "generate": generate.generate_newest,
    }
    modes[MODE.value](config, mesh, pathlib.Path(WORKDIR.value or "").absolute())


if __name__ == "__main__":
    app.run(main, flags_parser=command_line.parse)
