"""A plan for people and for other tools: `plan.json`, a table, a picture."""

import io
import json
import pathlib
from collections.abc import Callable
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from device_kinds import NOMINAL, device_kind
from remat.ledger import GIB, ranges
from remat.measure import compiler_flags, fingerprint, versions
from remat.planner import Plan, describe, same_memory


def ledger(plan: Plan) -> list[dict[str, int]]:
    """A row for each device; its parts add up to the predicted peak, or for a given plan to the compiled one."""
    parts = plan.parts
    peak = plan.predicted_peak_bytes if plan.predicted_peak_bytes is not None else plan.compiled_peak_bytes or 0
    known = parts.params_bytes + parts.optimizer_bytes + parts.gradient_bytes + parts.batch_bytes + plan.saved_bytes
    return [
        {
            "id": d.id,
            "process": d.process,
            "limit_bytes": d.limit_bytes,
            "reserved_bytes": d.reserved_bytes + parts.beside_bytes,
            "params_bytes": parts.params_bytes,
            "optimizer_bytes": parts.optimizer_bytes,
            "gradient_bytes": parts.gradient_bytes,
            "batch_bytes": parts.batch_bytes,
            "saved_activation_bytes": plan.saved_bytes,
            "offloaded_bytes": plan.offloaded_bytes,
            "workspace_bytes": peak - known,
            "predicted_peak_bytes": peak,
            "headroom_bytes": d.budget - parts.beside_bytes - peak,
        }
        for d in plan.limits.devices
    ]


def as_json(plan: Plan, program, topology: str) -> dict:
    """The object of plan.json; bytes are per device."""
    mesh, names = program.mesh, plan.useful_names
    device = mesh.devices.flat[0]
    return {
        "topology": topology,
        "device_kind": device.device_kind,
        "num_devices": mesh.size,
        "num_processes": len({d.process_index for d in mesh.devices.flat}),
        "versions": versions(),
        "compiler_flags": compiler_flags(),
        "fingerprint": fingerprint(program),
        "devices": ledger(plan),
        "binding_device": plan.limits.binding.id,
        "segments": [
            {
                "first_layer": s.first_layer,
                "num_layers": s.num_layers,
                "save": None if s.save is None else list(s.save),
                "offload": list(s.offload),
                "recompute": [] if s.save is None else [n for n in names if n not in (*s.save, *s.offload)],
            }
            for s in plan.segments
        ],
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "compiled_peak_bytes": plan.compiled_peak_bytes,
        "num_compiles": plan.num_compiles,
        "verified": plan.verified,
        "model_flops": plan.model_flops,
        "recompute_flops": plan.recompute_flops,
        "modelled_step_seconds": step_seconds(plan, program),
        "next_better": plan.next_better,
        "rejected": plan.rejected,
        "peaks_beside_the_step": plan.beside_step,
        "tried": [
            {
                "segments": [{"num_layers": s.num_layers, "save": list(s.save or ())} for s in t.segments],
                "predicted_bytes": t.predicted_bytes,
                "compiled_bytes": t.compiled_bytes,
            }
            for t in plan.tried
        ],
        "same_memory": [[describe(t.segments) for t in pair] for pair in same_memory(plan.tried)],
    }


def step_seconds(plan: Plan, program) -> float:
    """Modelled: the model's products at the devices' peak, and the recompute."""
    kind = device_kind(program.mesh.devices.flat[0].device_kind) or NOMINAL
    return plan.model_flops / program.mesh.size / kind.peak_flops + plan.recompute_seconds


def write(plan: Plan, program, compiled: Callable[[], Any], topology: str, workdir: pathlib.Path) -> None:
    """Writes WORKDIR/plan.json, and where `memory.save_hlo` asks for it the text of the step that `compiled()` gives."""
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "plan.json").write_text(json.dumps(as_json(plan, program, topology), indent=2) + "\n")
    if program.config.memory.save_hlo:
        (workdir / "train_step.hlo.txt").write_text(compiled().as_text())


def summary(plan: Plan) -> str:
    """The plan in a line."""
    used = (plan.compiled_peak_bytes or 0) + plan.parts.beside_bytes
    return f"plan: {describe(plan.segments)}; {used / GIB:.3f} of {plan.limits.budget / GIB:.3f} GiB a device"


def table(plan: Plan, program, topology: str) -> str:
    """The plan in at most 100 columns: what binds, what is saved where, what more memory would buy."""
    found, budget = as_json(plan, program, topology), plan.limits.budget
    rows, binding = found["devices"], plan.limits.binding
    used = (plan.compiled_peak_bytes or 0) + plan.parts.beside_bytes
    where = f"{topology}: " if topology else ""
    lines = [
        f"Plan for {where}{found['num_devices']} {found['device_kind']} device(s), limits from {plan.limits.source}.",
        f"The compiled step fits: it takes {used / GIB:.3f} of the {budget / GIB:.3f} GiB of device {binding.id}, the "
        f"tightest ({used / budget:.1%})."
        if plan.verified
        else "NOT proved to fit.",
    ]
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=False, highlight=False)
    layers = Table(title="What each layer saves for its backward pass", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("layers", "saved", "recomputed"):
        layers.add_column(column, overflow="fold")
    for s in found["segments"]:
        saved = "everything (no nn.checkpoint)" if s["save"] is None else " ".join(s["save"]) or "nothing but its input"
        saved += f"; on the host {' '.join(s['offload'])}" if s["offload"] else ""
        layers.add_row(f"{s['first_layer']} to {s['first_layer'] + s['num_layers'] - 1}", saved, " ".join(s["recompute"]))
    console.print(layers)
    console.print(_ledger_table(rows))
    recompute = plan.recompute_flops / plan.model_flops if plan.model_flops else 0.0
    seconds = found["modelled_step_seconds"]
    lines_after = [
        f"Recompute: {_flops(plan.recompute_flops)} a step over all devices, {recompute:.1%} of the model's "
        f"{_flops(plan.model_flops)}.",
        f"Modelled time of a step: {_time(seconds)}, of which recompute {_time(plan.recompute_seconds)}. Nothing was timed.",
        f"Compiles of the train step: {plan.num_compiles}."
        + (
            f" Peak predicted before the chosen plan was compiled: {plan.predicted_peak_bytes / GIB:.3f} GiB, compiled: "
            f"{(plan.compiled_peak_bytes or 0) / GIB:.3f} GiB."
            if plan.predicted_peak_bytes
            else ""
        ),
    ]
    if plan.next_better:
        lines_after.append(
            f"{plan.next_better['extra_bytes'] / GIB:.0f} GiB more on every device would save "
            f"{_time(plan.next_better['modelled_seconds_saved'])} a step (modelled)."
        )
    between = ", ".join(f"{what} {peak / GIB:.3f}" for what, peak in plan.beside_step.items())
    lines_after.append(f"Peaks beside the step, in GiB: {between} (restore, sampling: by formula).")
    if plan.no_offload:
        lines_after.append(f"Nothing waits on the host: {plan.no_offload}.")
    for poorer, richer in same_memory(plan.tried):
        lines_after.append(
            f"NOT accepted, for it compiles to the same memory to the byte as a plan that saves less: "
            f"{describe(richer.segments)} (like {describe(poorer.segments)})."
        )
    lines_after += [f"  {r['name']} is not saved: {r['reason']}" for r in plan.rejected]
    return "\n".join([*lines, out.getvalue().rstrip(), *lines_after])


def _time(seconds: float) -> str:
    unit, name = next(((u, n) for u, n in ((1, "s"), (1e-3, "ms")) if seconds >= u), (1e-6, "us"))
    return f"{seconds / unit:.3g} {name}"


def _flops(flops: float) -> str:
    unit, name = next(((u, n) for u, n in ((1e18, "EFLOP"), (1e15, "PFLOP"), (1e12, "TFLOP")) if flops >= u), (1e9, "GFLOP"))
    return f"{flops / unit:.3g} {name}"


def _ledger_table(rows: list[dict[str, int]]) -> Table:
    """Devices with the same figures share a line."""
    result = Table(title="Memory of each device, in GiB", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    columns = {
        "device": "",
        "limit": "limit_bytes",
        "kept": "reserved_bytes",
        "params": "params_bytes",
        "optim": "optimizer_bytes",
        "grads": "gradient_bytes",
        "batch": "batch_bytes",
        "saved": "saved_activation_bytes",
        "host": "offloaded_bytes",
        "work": "workspace_bytes",
        "peak": "predicted_peak_bytes",
        "left": "headroom_bytes",
    }
    for name in columns:
        result.add_column(name, justify="right", no_wrap=True)
    groups: dict[tuple, list[int]] = {}
    for row in rows:
        groups.setdefault(tuple(row[c] for c in list(columns.values())[1:]), []).append(row["id"])
    for figures, ids in groups.items():
        label = ranges(ids).replace(" ", "")
        label = label if len(label) <= 12 else f"{label[:11]}…"
        result.add_row(label, *(f"{f / GIB:.3f}" if f < 100 * GIB else f"{f / GIB:.1f}" for f in figures))
    return result


def picture(plan: Plan, program, topology: str, path: pathlib.Path) -> None:
    """Draws the parts of each device's memory against its limit, and the front of policies with the chosen mix."""
    from matplotlib.figure import Figure

    rows = ledger(plan)
    figure = Figure(figsize=(12, 4.8), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    shown = rows if len(rows) <= 16 else sorted(rows, key=lambda r: r["headroom_bytes"])[:16]
    parts = ["reserved", "params", "optimizer", "gradient", "batch", "saved_activation", "workspace"]
    bottom = [0.0] * len(shown)
    labels = [str(r["id"]) for r in shown]
    for part in parts:
        sizes = [r[f"{part}_bytes"] / GIB for r in shown]
        left.bar(labels, sizes, bottom=bottom, label=part.replace("_", " "), width=0.7)
        bottom = [b + s for b, s in zip(bottom, sizes, strict=True)]
    for i, r in enumerate(shown):
        binding = r["limit_bytes"] - r["reserved_bytes"] == min(q["limit_bytes"] - q["reserved_bytes"] for q in rows)
        left.hlines(r["limit_bytes"] / GIB, i - 0.42, i + 0.42, colors="red" if binding else "black", linewidth=2)
    note = "" if len(rows) == len(shown) else f" (the 16 tightest of {len(rows)})"
    left.set(xlabel=f"device{note}", ylabel="GiB", title="Memory of each device; line: limit, red: the tightest")
    left.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    layers = program.config.model.num_layers
    if plan.front:
        right.plot(
            [n.saved_bytes * layers / GIB for n in plan.front], [n.seconds * layers * 1e3 for n in plan.front], ".",
            color="gray", label="one policy in all layers",
        )  # fmt: skip
    right.plot(
        [plan.saved_bytes / GIB], [plan.recompute_seconds / program.config.gradient_accumulation * 1e3], "*", color="red",
        markersize=14, label="chosen",
    )  # fmt: skip
    right.set(xlabel="saved activations, GiB a device", ylabel="recompute, modelled ms a step", title="What memory buys")
    right.grid(alpha=0.3)
    right.legend(frameon=False)
    figure.suptitle(f"{topology or program.mesh.devices.flat[0].device_kind}: {len(rows)} devices")
    figure.savefig(path)
