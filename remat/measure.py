"""What compiled programs need, and a record of it, so that a plan asked for again compiles nothing."""

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pathlib
import re
import tempfile
from typing import Any

import jax

from configs.schema import Config
from parallel import agree

ROOT = pathlib.Path(__file__).parent.parent
# What a compiled step depends on besides the config: anyone may change these files.
_SOURCES = ("model/*.py", "parallel/*.py", "program.py", "losses.py", "optimizer.py", "remat/plan.py")
# Fields of the config that no compiled step depends on.
_IRRELEVANT = ("remat", "memory", "checkpoint", "sample", "profile", "init_from", "log_every_steps", "data")
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


def peak_bytes(compiled, platform: str) -> int:
    """The peak of a compiled program's memory on one device, arguments included.

    On TPU the compiler's own peak: programs whose arguments and temporaries sum up to more than the chip has do
    compile while that fits. Elsewhere that figure is the sum (GPU) or leaves the temporaries out (CPU): the sum is taken.
    """
    stats = compiled.memory_analysis()
    if platform == "tpu":
        return int(stats.peak_memory_in_bytes)
    sizes = stats.argument_size_in_bytes, stats.output_size_in_bytes, -stats.alias_size_in_bytes, stats.temp_size_in_bytes
    return int(sum(sizes))


class Compiler:
    """Compiles the programs of a plan, each at most once, and knows their peaks.

    Where several processes run together, a peak is the highest that any of them has seen, so that all decide alike.

    Args:
      records: peaks of earlier plans, to be used instead of compiling.
    """

    def __init__(self, platform: str, records: "Records | None" = None):
        self._platform, self._records = platform, records or Records(None)
        self._made: dict[str, tuple[Any, int]] = {}
        self.num_compiles = 0  # of train steps

    def peak(self, program, what: str = "train_step") -> int:
        """Bytes that a program of `Program` (`train_step`, `evaluation_step`, `init_program`) needs on a device."""
        name = fingerprint(program, what)
        if name in self._made:
            return self._made[name][1]
        recorded = agree.gathered_bytes([self._records.read(name) or 0])[:, 0]
        return int(max(recorded)) if min(recorded) else self._compile(program, what, name)[1]

    def compiled(self, program, what: str = "train_step") -> Any:
        """The compiled program; None if the compiler refuses it for its memory."""
        name = fingerprint(program, what)
        return self._made[name][0] if name in self._made else self._compile(program, what, name)[0]

    def _compile(self, program, what: str, name: str) -> tuple[Any, int]:
        make = program.compile_train_step if what == "train_step" else lambda: getattr(program, what)
        compiled, peak = compile_and_measure(make, self._platform)
        self.num_compiles += what == "train_step"
        self._made[name] = compiled, int(max(agree.gathered_bytes([peak])[:, 0]))
        self._records.write(name, self._made[name][1])
        return self._made[name]


def compile_and_measure(compile_program, platform: str) -> tuple[Any, int]:
    """What `compile_program()` returns and its peak; None and what it would need where the compiler refuses it for that."""
    try:
        compiled = compile_program()
    except jax.errors.JaxRuntimeError as error:
        needed = out_of_memory_bytes(str(error))
        if needed is None:
            raise
        return None, needed
    return compiled, peak_bytes(compiled, platform)


def out_of_memory_bytes(message: str) -> int | None:
    """What a program would have needed, from the message with which the TPU compiler refuses it; None for another one."""
    match = re.search(r"Used ([\d.]+)([KMGT]) of", message) or re.search(r"\(([\d.]+)([KMGT])\) exceeds", message)
    return int(float(match[1]) * {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}[match[2]]) if match else None


def versions() -> dict[str, str]:
    """Of all that has a say in what is compiled; "" for what is not installed."""
    found = {"jax": jax.__version__, "jaxlib": jax.lib.__version__}
    for package in ("flax", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = ""
    return found


def compiler_flags() -> dict[str, str]:
    """Flags from the environment that change what the compiler makes."""
    return {name: os.environ.get(name, "") for name in _FLAGS}


def fingerprint(program, what: str = "train_step") -> str:
    """A hash of all that decides what one program of a `Program` compiles to: config, plan, mesh, versions, flags, sources."""
    device = program.mesh.devices.flat[0]
    about = {
        "what": what,
        "config": {k: v for k, v in dataclasses.asdict(program.config).items() if k not in _IRRELEVANT},
        "segments": [dataclasses.asdict(s) for s in program.segments] if what == "train_step" else "all the same",
        "mesh": [dict(program.mesh.shape), device.device_kind, device.platform],
        "devices": [str(d) for d in program.mesh.devices.flat],
        "versions": versions(),
        "flags": compiler_flags(),
        "x64": str(jax.numpy.result_type(float)),
    }
    digest = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode())
    for path in sorted(p for pattern in _SOURCES for p in ROOT.glob(pattern)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


class Records:
    """Peaks of programs that were compiled before, by fingerprint: a small JSON file for each, in one folder.

    Args:
      folder: where; None keeps no record. By default `meshfit/peaks` in the user's cache folder.
    """

    def __init__(self, folder: pathlib.Path | None):
        self._folder = folder

    @classmethod
    def of(cls, config: Config) -> "Records":
        """Those of the user, or none where `memory.plan_cache` is off."""
        if not config.memory.plan_cache:
            return cls(None)
        return cls(pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "meshfit" / "peaks")

    def read(self, fingerprint: str) -> int | None:
        """The peak in bytes, None if it is not known. A damaged record counts as none."""
        if self._folder is None:
            return None
        try:
            return int(json.loads((self._folder / f"{fingerprint}.json").read_text())["peak_bytes"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, fingerprint: str, peak: int) -> None:
        """Keeps a peak. That it cannot be kept costs the next plan a compile, and nothing else."""
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._folder, delete=False) as file:
                json.dump({"peak_bytes": peak}, file)
            os.replace(file.name, self._folder / f"{fingerprint}.json")
        except OSError:
            return
