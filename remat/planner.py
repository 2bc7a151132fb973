"""`remat.plan=auto`: what every block saves, from a budget of bytes, proved by compiling the real train step.

1. Trace a block (`remat.graph`); 2. keep the policies that no other beats; 3. mix two of them over the layers
(`remat.solve`) under what the tightest device has left; 4. compile, compare, correct the model by what was seen and
step down or up, at most `MAX_COMPILES` times.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from configs.schema import Config, InputError
from device_kinds import DeviceKind, device_kind
from model.stack import Segment
from remat.graph import BlockGraph, Need, subsets, trace_block
from remat.ledger import GIB, Limits, Parts, count_parts, find_limits
from remat.solve import Mix, best_mix, pareto_front

MAX_COMPILES = 4
# Where the device is in no table, as the CPU: only ratios matter, and these are those of a usual accelerator.
NOMINAL = DeviceKind(200e12, 16 * GIB, 1e12, 200e9, 8e9)
# A saved tensor is held by every layer, but no longer made again by the layer whose backward pass runs; of the
# second, about this share is seen in compiled programs (docs/planning.md).
RELIEF = 0.5
# A second segment costs copies of the blocks' parameters: this many of them, in float32, split as they are.
SECOND_SEGMENT = 1.15


@dataclasses.dataclass
class Plan:
    """What was decided and what is known of it. Bytes are per device."""

    segments: tuple[Segment, ...]
    parts: Parts
    limits: Limits
    saved_bytes: int = 0
    predicted_peak_bytes: int | None = None
    compiled_peak_bytes: int | None = None
    num_compiles: int = 0
    model_flops: float = 0.0
    recompute_flops: float = 0.0
    recompute_seconds: float = 0.0
    next_better: dict[str, float] | None = None
    front: list[Need] = dataclasses.field(default_factory=list)
    rejected: list[dict[str, str]] = dataclasses.field(default_factory=list)
    tried: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def verified(self) -> bool:
        """Whether the compiled step's peak is known and within the budget."""
        peak = self.compiled_peak_bytes
        return peak is not None and peak + self.parts.beside_bytes <= self.limits.budget


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


class _Model:
    """Bytes that a mix of policies needs: counted parts, saved activations, and what compiled programs have shown."""

    def __init__(self, front: list[Need], num_layers: int, parts: Parts):
        self._saved = np.array([need.saved_bytes for need in front], float)
        self._layers, self._parts, self.offset = num_layers, parts, 0.0

    def __call__(self, first, second, n):
        saved = (self._layers - n) * self._saved[first] + n * self._saved[second]
        richest = np.where(n > 0, self._saved[second], self._saved[first])
        second_segment = SECOND_SEGMENT * self._parts.block_params_bytes * ((n > 0) & (n < self._layers))
        return self._parts.fixed_bytes + saved - RELIEF * richest + second_segment + self.offset


def decide(make_program: Callable[..., Any], say: Callable[[str], None] = lambda _: None) -> tuple[Plan, Any, Any]:
    """Decides what blocks save, compiles the train step and proves that it fits.

    Args:
      make_program: a `program.Program` for the config's own plan, or for the segments that it is given.
      say: is told what is being compiled, and what came of it.
    Returns:
      The plan, the program under it and its compiled train step.
    Raises:
      InputError: the plan of the config, or for 'auto' every plan, needs more memory than the tightest device has.
    """
    program = make_program()
    devices = list(program.mesh.devices.flat)
    graph = trace_block(program, device_kind(devices[0].device_kind) or NOMINAL)
    limits = find_limits(program.config, devices)
    if program.config.remat.plan == "auto":
        return _decide_auto(make_program, program, graph, limits, say)
    return _check_given(program, graph, limits)


def _check_given(program, graph: BlockGraph, limits: Limits) -> tuple[Plan, Any, Any]:
    """The config's own plan, compiled and held against the budget."""
    if program.segments[0].save is not None:
        check_plan(graph, program.segments)
    parts = count_parts(program)
    compiled, peak = _compile(program, limits.platform)
    if peak + parts.beside_bytes > limits.budget:
        raise InputError(
            f"config.remat.plan={program.config.remat.plan} needs {(peak + parts.beside_bytes) / GIB:.2f} GiB on each device, "
            f"and device {limits.binding.id} has {limits.budget / GIB:.2f} GiB for it ({limits.source}). "
            "remat.plan='auto' finds what fits."
        )
    none = any(s.save is None for s in program.segments)
    needs = [] if none else [(s.num_layers, graph.need(frozenset(s.save))) for s in program.segments]
    plan = Plan(
        segments=program.segments,
        parts=parts,
        limits=limits,
        saved_bytes=sum(n * need.saved_bytes for n, need in needs),
        compiled_peak_bytes=peak,
        num_compiles=1,
        model_flops=program.model_flops,
        recompute_flops=sum(n * need.flops for n, need in needs) * _times(program),
        recompute_seconds=sum(n * need.seconds for n, need in needs) * program.config.gradient_accumulation,
    )
    return plan, program, compiled


def _times(program) -> int:
    """From one device and microbatch to a step on all."""
    return program.mesh.size * program.config.gradient_accumulation


def _decide_auto(make_program, program, graph: BlockGraph, limits: Limits, say: Callable[[str], None]) -> tuple[Plan, Any, Any]:
    """Picks, compiles, corrects the model, and again, until the pick is the one that was compiled last."""
    config, layers = program.config, program.config.model.num_layers
    front = pareto_front([graph.need(names) for names in subsets(graph.useful_names)])
    parts = count_parts(program)
    model = _Model(front, layers, parts)
    room = limits.budget - parts.beside_bytes
    tried: dict[tuple, tuple[Mix, float, int, Any, Any]] = {}
    while len(tried) < MAX_COMPILES:
        mix = best_mix(front, layers, model, room)
        if mix is None or (len(tried) == MAX_COMPILES - 1 and not any(t[2] <= room for t in tried.values())):
            mix = Mix(front[0], front[0], 0, layers)  # the least there is: if that does not fit, nothing does
        segments = mix.segments(graph.names)
        if segments in tried:
            break
        index = [front.index(mix.first)], [front.index(mix.second)], np.array([mix.num_second])
        predicted = float(model(*index)[0])
        program = make_program(segments)
        say(f"compile {len(tried) + 1} of at most {MAX_COMPILES}: {describe(segments)}; predicted {predicted / GIB:.3f} GiB")
        compiled, peak = _compile(program, limits.platform)
        tried[segments] = mix, predicted, peak, program, compiled
        say(f"  compiled peak {peak / GIB:.3f} GiB, {'fits' if peak <= room else 'too much for'} {room / GIB:.3f} GiB")
        model.offset += peak - predicted
    fitting = [t for t in tried.values() if t[2] <= room]
    if not fitting:
        raise InputError(_nothing_fits(config, limits, parts.beside_bytes + min(t[2] for t in tried.values())))
    mix, predicted, peak, program, compiled = min(fitting, key=lambda t: t[0].seconds)
    plan = Plan(
        segments=mix.segments(graph.names),
        parts=parts,
        limits=limits,
        saved_bytes=mix.saved_bytes,
        predicted_peak_bytes=round(predicted),
        compiled_peak_bytes=peak,
        num_compiles=len(tried),
        model_flops=program.model_flops,
        recompute_flops=mix.flops * _times(program),
        recompute_seconds=mix.seconds * config.gradient_accumulation,
        next_better=_next_better(front, layers, model, room, mix),
        front=front,
        rejected=_rejected(graph, mix),
        tried=[{"segments": s, "predicted_bytes": round(t[1]), "compiled_bytes": t[2]} for s, t in tried.items()],
    )
    return plan, program, compiled


def describe(segments: tuple[Segment, ...]) -> str:
    """Segments in words."""

    def saved(segment):
        return "everything" if segment.save is None else " ".join(segment.save) or "nothing but their input"

    return "; ".join(f"layers {s.first_layer} to {s.first_layer + s.num_layers - 1} save {saved(s)}" for s in segments)


def _compile(program, platform: str) -> tuple[Any, int]:
    """The compiled train step and its peak; no step, but the peak, where the compiler refuses it for its memory."""
    try:
        compiled = program.compile_train_step()
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


def _next_better(front: list[Need], layers: int, model: _Model, budget: float, mix: Mix) -> dict[str, float] | None:
    """What one more GiB would buy, or the least beyond it that buys anything."""
    if mix.seconds <= min(need.seconds for need in front) * layers * (1 + 1e-9):
        return None
    for extra in [GIB * 2**i for i in range(12)]:
        better = best_mix(front, layers, model, budget + extra)
        if better and better.seconds < mix.seconds * (1 - 1e-9):
            return {"extra_bytes": extra, "modelled_seconds_saved": mix.seconds - better.seconds}
    return None


def _rejected(graph: BlockGraph, mix: Mix) -> list[dict[str, str]]:
    """Every name that no segment saves, and why."""
    saved = mix.first.saved | mix.second.saved if mix.num_second else mix.first.saved
    useless = {n: graph.why_useless(n) for n in graph.names if n not in graph.useful_names}
    rest = "there is no room for it, or another tensor saves more time for its bytes"
    return [{"name": n, "reason": useless.get(n, rest)} for n in graph.names if n not in saved]


def _nothing_fits(config: Config, limits: Limits, least: int) -> str:
    missing = least - limits.budget
    return (
        f"No plan fits: with everything recomputed the train step needs {least / GIB:.2f} GiB on each device, and device "
        f"{limits.binding.id} has {limits.budget / GIB:.2f} GiB for it: {missing / GIB:.2f} GiB are missing. What would help: "
        f"config.gradient_accumulation (now {config.gradient_accumulation}), a smaller global_batch_size (now "
        f"{config.global_batch_size}) or context_length (now {config.context_length}), more devices on config.mesh.fsdp or "
        "tensor, optimizer.name='adafactor'."
    )


def check_plan(graph: BlockGraph, segments: tuple[Segment, ...]) -> None:
    """Raises InputError for a segment that saves a name in vain."""
    for segment in segments:
        for name in segment.save or ():
            if name not in graph.names:
                raise InputError(
                    f"config.remat.plan saves {name!r}, which no tensor of the block is called. There are "
                    f"{', '.join(graph.names)}."
                )
            if name not in graph.useful_names:
                raise InputError(
                    f"config.remat.plan saves {name!r} in vain: {graph.why_useless(name)}. Names that save something: "
                    f"{', '.join(graph.useful_names)}."
                )
        saved = frozenset(segment.save or ())
        if vain := saved - graph.need(saved).saved:
            raise InputError(
                f"config.remat.plan saves {', '.join(map(repr, sorted(vain)))} in vain: beside the other names nobody asks "
                "for it any more. Leave it out."
            )
