"""`remat.plan=auto`: what every block saves, from a budget of bytes, proved by compiling the real train step.

1. Trace a block (`remat.graph`); 2. keep the policies that no other beats; 3. mix two of them over the layers
(`remat.solve`) under what the tightest device has left; 4. compile, compare, correct the model by what was seen and
step down or up, at most `MAX_COMPILES` times.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from configs.schema import Config, InputError
from device_kinds import NOMINAL, device_kind
from model.stack import Segment
from remat.block import trace_block
from remat.graph import BlockGraph, Need
from remat.ledger import GIB, Limits, Parts, bytes_on_a_device, count_parts, find_limits
from remat.measure import Compiler, Records
from remat.memory_model import MemoryModel, work_bytes
from remat.offload import why_not as why_not_offload
from remat.plan import check_plan
from remat.policies import MAX_NAMES, policies, searched_names
from remat.solve import Mix, best_mix

MAX_COMPILES = 4
# A plan that fits and uses this share of the room is good enough: the next one would buy little for a compile.
GOOD_USE = 0.98
# The compiler unrolls a loop of one turn, and on TPU that took far more memory than a loop (docs/planning.md).
MIN_SEGMENT = {"tpu": 2}


@dataclasses.dataclass
class Plan:
    """What was decided and what is known of it. Bytes are per device."""

    segments: tuple[Segment, ...]
    parts: Parts
    limits: Limits
    saved_bytes: int = 0
    offloaded_bytes: int = 0
    predicted_peak_bytes: int | None = None
    compiled_peak_bytes: int | None = None
    num_compiles: int = 0
    model_flops: float = 0.0
    recompute_flops: float = 0.0
    recompute_seconds: float = 0.0
    next_better: dict[str, float] | None = None
    front: list[Need] = dataclasses.field(default_factory=list)
    useful_names: list[str] = dataclasses.field(default_factory=list)  # those whose tensors can be computed again
    rejected: list[dict[str, str]] = dataclasses.field(default_factory=list)
    no_offload: str = ""  # why nothing may wait on the host
    tried: list["Tried"] = dataclasses.field(default_factory=list)
    beside_step: dict[str, int] = dataclasses.field(default_factory=dict)  # peaks of what runs between steps

    @property
    def verified(self) -> bool:
        """Whether the compiled step's peak is known and within the budget."""
        peak = self.compiled_peak_bytes
        return peak is not None and peak + self.parts.beside_bytes <= self.limits.budget

    @property
    def expected_peaks(self) -> tuple[int, int]:
        """Between which bytes a device's peak of the whole run should be."""
        step = (self.compiled_peak_bytes or 0) + self.parts.beside_bytes
        return max(step, self.beside_step.get("initialisation", 0)), max(step, *self.beside_step.values(), 0)


@dataclasses.dataclass(frozen=True)
class Tried:
    """A plan that was compiled (or whose peak was on record), in bytes a device."""

    mix: Mix
    segments: tuple[Segment, ...]
    predicted_bytes: int
    compiled_bytes: int


def decide(
    make_program: Callable[..., Any], say: Callable[[str], None] = lambda _: None, compiler: Compiler | None = None
) -> tuple[Plan, Any, Compiler]:
    """Decides what blocks save, and proves that it fits by what the train step compiles to.

    Args:
      make_program: a `program.Program` for the config's own plan, or for the segments that it is given.
      say: is told what is being compiled, and what came of it.
      compiler: of the programs; by default one that goes by what the user's earlier plans have shown.
    Returns:
      The plan, the program under it, and the compiler, which has the train step or makes it: `compiler.compiled(program)`.
    Raises:
      InputError: the plan of the config, or for 'auto' every plan, needs more memory than the tightest device has.
    """
    program = make_program()
    devices = list(program.mesh.devices.flat)
    graph = trace_block(program, device_kind(devices[0].device_kind) or NOMINAL)
    limits = find_limits(program.config, devices)
    compiler = compiler or Compiler(limits.platform, Records.of(program.config))
    if program.config.remat.plan == "auto":
        plan, program = _decide_auto(make_program, program, graph, limits, compiler, say)
    else:
        plan = _check_given(program, graph, limits, compiler)
    say("initialisation and evaluation are held against the budget, too")
    plan.useful_names = graph.useful_names
    plan.beside_step = check_beside_step(program, plan.parts, limits, compiler)
    return plan, program, compiler


def decide_and_compile(make_program: Callable[..., Any], say: Callable[[str], None] = lambda _: None) -> tuple[Plan, Any, Any]:
    """As `decide`; returns the plan, the program and the compiled train step, whose peak is proved, not on record only."""
    plan, program, compiler = decide(make_program, say)
    step = compiler.compiled(program)
    if compiler.peak(program) != plan.compiled_peak_bytes:  # the record is of another compiler, whatever it says
        plan, program, compiler = decide(make_program, say, Compiler(plan.limits.platform))
        step = compiler.compiled(program)
    return dataclasses.replace(plan, num_compiles=compiler.num_compiles), program, step


def _check_given(program, graph: BlockGraph, limits: Limits, compiler: Compiler) -> Plan:
    """The config's own plan, compiled and held against the budget."""
    check_plan(graph, program.segments)
    if any(s.offload for s in program.segments) and (why := why_not_offload(program.mesh, program.config.memory.offload)):
        raise InputError(f"config.remat.plan={program.config.remat.plan} offloads tensors to the host, but {why}.")
    parts = count_parts(program)
    peak = compiler.peak(program)
    if peak + parts.beside_bytes > limits.budget:
        raise InputError(
            f"config.remat.plan={program.config.remat.plan} needs {(peak + parts.beside_bytes) / GIB:.2f} GiB on each device, "
            f"and device {limits.binding.id} has {limits.budget / GIB:.2f} GiB for it ({limits.source}). "
            "remat.plan='auto' finds what fits."
        )
    none = any(s.save is None for s in program.segments)
    needs = [] if none else [(s.num_layers, graph.need(frozenset((*s.save, *s.offload)))) for s in program.segments]
    offloaded = sum(s.num_layers * sum(map(graph.bytes_of, s.offload)) for s in program.segments)
    return Plan(
        segments=program.segments,
        parts=parts,
        limits=limits,
        saved_bytes=sum(n * need.saved_bytes for n, need in needs) - offloaded,
        offloaded_bytes=offloaded,
        compiled_peak_bytes=peak,
        num_compiles=compiler.num_compiles,
        model_flops=program.model_flops,
        recompute_flops=sum(n * need.flops for n, need in needs) * _times(program),
        recompute_seconds=sum(n * need.seconds for n, need in needs) * program.config.gradient_accumulation,
    )


def _times(program) -> int:
    """From one device and microbatch to a step on all."""
    return program.mesh.size * program.config.gradient_accumulation


def _decide_auto(make_program, program, graph: BlockGraph, limits: Limits, compiler: Compiler, say) -> tuple[Plan, Any]:
    """Picks, compiles, corrects the model, and again, until the pick is the one that was compiled last."""
    config, layers = program.config, program.config.model.num_layers
    front, no_offload = policies(program, graph)
    parts = count_parts(program)
    model = MemoryModel(front, layers, parts, work_bytes(program, graph), MIN_SEGMENT.get(limits.platform, 1))
    room = limits.budget - parts.beside_bytes
    tried: dict[tuple[Segment, ...], Tried] = {}
    while len(tried) < MAX_COMPILES:
        mix = best_mix(front, layers, model, room)
        if mix is None or (len(tried) == MAX_COMPILES - 1 and not any(t.compiled_bytes <= room for t in tried.values())):
            mix = Mix(front[0], front[0], 0, layers)  # the least there is: if that does not fit, nothing does
        segments = mix.segments(graph.names)
        if segments in tried:
            break
        predicted = float(model([front.index(mix.first)], [front.index(mix.second)], np.array([mix.num_second]))[0])
        say(f"compile {len(tried) + 1} of at most {MAX_COMPILES}: {describe(segments)}; predicted {predicted / GIB:.3f} GiB")
        compiles = compiler.num_compiles
        peak = compiler.peak(make_program(segments))
        tried[segments] = Tried(mix, segments, round(predicted), peak)
        record = "" if compiler.num_compiles > compiles else " (on record, not compiled again)"
        say(f"  compiled peak {peak / GIB:.3f} GiB{record}, {'fits' if peak <= room else 'too much for'} {room / GIB:.3f} GiB")
        if GOOD_USE * room <= peak <= room:
            break
        model.offset += peak - predicted
    chosen = _choose(list(tried.values()), room)
    if chosen is None:
        least = min(t.compiled_bytes for t in tried.values())
        raise InputError(_nothing_fits(config, limits, parts.beside_bytes + least, no_offload))
    mix = chosen.mix
    plan = Plan(
        segments=chosen.segments,
        parts=parts,
        limits=limits,
        saved_bytes=mix.saved_bytes,
        predicted_peak_bytes=chosen.predicted_bytes,
        compiled_peak_bytes=chosen.compiled_bytes,
        num_compiles=compiler.num_compiles,
        model_flops=program.model_flops,
        recompute_flops=mix.flops * _times(program),
        recompute_seconds=mix.seconds * config.gradient_accumulation,
        next_better=_next_better(front, layers, model, room, mix),
        front=front,
        rejected=_rejected(graph, mix),
        no_offload=no_offload,
        offloaded_bytes=mix.offloaded_bytes,
        tried=list(tried.values()),
    )
    return plan, make_program(chosen.segments)


def _choose(tried: list[Tried], room: float) -> Tried | None:
    """Of those that fit the one with the least recompute; at equal memory the one that promises less, see `same_memory`."""
    fitting = [t for t in tried if t.compiled_bytes <= room]
    vain = {richer.segments for _, richer in same_memory(tried)}
    return min((t for t in fitting if t.segments not in vain), key=lambda t: t.mix.seconds, default=None)


def same_memory(tried: list[Tried]) -> list[tuple[Tried, Tried]]:
    """Pairs that compile to the same memory to the byte although the second saves more: that it does was in vain."""
    pairs = [(a, b) for a in tried for b in tried if a.mix.saved_bytes < b.mix.saved_bytes]
    return [(a, b) for a, b in pairs if a.compiled_bytes == b.compiled_bytes]


def check_beside_step(program, parts: Parts, limits: Limits, compiler: Compiler) -> dict[str, int]:
    """Bytes on a device at the peak of what runs before and between train steps.

    Raises InputError for one that needs more than the tightest device has.
    """
    state = parts.params_bytes + parts.optimizer_bytes
    prefetch = 1 + program.config.data.prefetch_batches
    evaluation = compiler.peak(program, "evaluation_step") + parts.optimizer_bytes
    evaluation += prefetch * bytes_on_a_device(program.abstract_evaluation_batch()) + parts.beside_bytes
    peaks = {"initialisation": compiler.peak(program, "init_program"), "restore": state, "evaluation": evaluation}
    if program.config.sample.length:
        peaks["sampling"] = state + sampling_bytes(program.config)
    helps = {"evaluation": "config.evaluation.batch_size", "sampling": "config.sample.count"}
    for what, peak in peaks.items():
        if peak > limits.budget:
            help_ = f"a smaller {helps[what]}" if what in helps else "more devices on config.mesh.fsdp or tensor"
            raise InputError(
                f"The train step fits, but {what} needs {peak / GIB:.2f} GiB on each device, and device "
                f"{limits.binding.id} has {limits.budget / GIB:.2f} GiB for it: {(peak - limits.budget) / GIB:.2f} GiB are "
                f"missing. What would help: {help_}."
            )
    return peaks


def sampling_bytes(config: Config) -> int:
    """A bound for sampling beside the state, modelled: one layer's tensors and scores, and the logits, whole on a device."""
    m, length = config.model, config.context_length
    layer = length * (4 * m.embed_dim + 3 * m.mlp_dim) + 2 * m.num_heads * length**2
    return 4 * config.sample.count * (layer + 4 * m.vocab_size)


def describe(segments: tuple[Segment, ...]) -> str:
    """Segments in words."""

    def saved(segment):
        kept = "everything" if segment.save is None else " ".join(segment.save) or "nothing but their input"
        return f"{kept}, and on the host {' '.join(segment.offload)}" if segment.offload else kept

    return "; ".join(f"layers {s.first_layer} to {s.first_layer + s.num_layers - 1} save {saved(s)}" for s in segments)


def _next_better(front: list[Need], layers: int, model: MemoryModel, budget: float, mix: Mix) -> dict[str, float] | None:
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
    saved = mix.first.saved | mix.first.offloaded
    saved |= mix.second.saved | mix.second.offloaded if mix.num_second else frozenset()
    useless = {n: graph.why_useless(n) for n in graph.names if n not in graph.useful_names}
    useless |= dict.fromkeys(
        set(graph.useful_names) - set(searched_names(graph)),
        f"a block has more names than can be searched, and {MAX_NAMES} others save more time for their bytes",
    )
    rest = "there is no room for it, or another tensor saves more time for its bytes"
    return [{"name": n, "reason": useless.get(n, rest)} for n in graph.names if n not in saved]


def _nothing_fits(config: Config, limits: Limits, least: int, no_offload: str) -> str:
    missing = least - limits.budget
    return (
        f"No plan fits: with everything recomputed the train step needs {least / GIB:.2f} GiB on each device, and device "
        f"{limits.binding.id} has {limits.budget / GIB:.2f} GiB for it: {missing / GIB:.2f} GiB are missing. What would help: "
        f"config.gradient_accumulation (now {config.gradient_accumulation}), a smaller global_batch_size (now "
        f"{config.global_batch_size}) or context_length (now {config.context_length}), more devices on config.mesh.fsdp or "
        "tensor, optimizer.name='adafactor'"
        + (f". Nothing may wait on the host, which could help, too: {no_offload}." if no_offload else ".")
    )
