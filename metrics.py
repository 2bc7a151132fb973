"""What a run shows and keeps: lines and a progress bar on the terminal, `metrics.jsonl` and TensorBoard events in the
workdir.

Only process 0 writes and prints.
"""

import collections
import contextlib
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Iterator

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tensorboardX import SummaryWriter

from configs.schema import Sample
from device_kinds import device_kind

# Wide where the output is no terminal: nobody gains from lines folded in a log file.
console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)


def say(text: str) -> None:
    """Prints a line, from process 0 only."""
    if jax.process_index() == 0:
        console.print(text)


class MetricsFile:
    """WORKDIR/metrics.jsonl: one JSON object a line, each with its `step`.

    Opening it drops the rows after `last_step` (those of steps that are about to be done again) and a last
    line that was cut off, so that the file never has a step twice. Nothing is written by other processes.
    """

    def __init__(self, workdir: pathlib.Path, last_step: int):
        self._file = None
        if jax.process_index() != 0:
            return
        path = workdir / "metrics.jsonl"
        kept = [row for row in read_rows(path) if row["step"] <= last_step]
        fresh = path.with_suffix(".jsonl.tmp")
        fresh.write_text("".join(json.dumps(row) + "\n" for row in kept))
        os.replace(fresh, path)
        self._file = path.open("a")

    def write(self, row: dict) -> None:
        if self._file:
            # NaN and infinity are no JSON: they become null.
            finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
            self._file.write(json.dumps(finite, allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        if self._file:
            self._file.close()


def read_rows(path: pathlib.Path) -> list[dict]:
    """The rows of a metrics file, none if there is no file. Lines that are no rows are left out, as one cut off is."""
    rows = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict) and "step" in row]


class Reporter:
    """A context manager that turns the metrics of steps into rows, TensorBoard events and a live progress line.

    On a terminal the progress is a bar; elsewhere it is a line every `log_every_steps`.

    Args:
      expected_peaks: between which bytes the peak of a device's memory should come to be; where the devices report
        theirs, a warning is given if it is more than 5% off.
    """

    def __init__(self, workdir: pathlib.Path, first_step: int, program, expected_peaks: tuple[int, int] | None = None):
        config, devices = program.config, program.mesh.devices.flat
        self._file = MetricsFile(workdir, first_step)
        self._events = None
        if jax.process_index() == 0:
            # Events of steps that are about to be done again are hidden by those of `purge_step`.
            self._events = SummaryWriter(str(workdir / "tensorboard"), purge_step=first_step + 1, flush_secs=30)
        self._steps, self._every, self._model_flops = config.steps, config.log_every_steps, program.model_flops
        kind = device_kind(devices[0].device_kind)
        self._peak_flops = kind.peak_flops * program.mesh.size if kind else None
        self._expected_peaks, self._first_step = expected_peaks, first_step
        self._local = [d for d in devices if d.process_index == jax.process_index()]
        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
        )
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal or jax.process_index() != 0)
        self._task = self._bar.add_task("", total=config.steps, completed=first_step, text="")
        self._waits: collections.deque[float] = collections.deque()
        self._time = time.perf_counter()

    def __enter__(self) -> "Reporter":
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()
        self._file.close()
        if self._events:
            self._events.close()

    def next_batch(self, batches: Iterator):
        """The next batch; how long it was waited for goes into the row of its step."""
        began = time.perf_counter()
        batch = next(batches)
        self._waits.append(time.perf_counter() - began)
        return batch

    def step(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Records step `step`. Waits until its metrics are there, so call it once the next step is under way."""
        row = {"step": step} | {name: float(value) for name, value in metrics.items()}
        now = time.perf_counter()
        seconds, self._time = now - self._time, now
        row |= {"step_seconds": seconds, "data_wait_seconds": self._waits.popleft() if self._waits else 0.0}
        row |= {"tokens_per_second": row["tokens"] / seconds, "model_flops_per_second": self._model_flops / seconds}
        if self._peak_flops:
            row["mfu"] = self._model_flops / seconds / self._peak_flops
        row |= memory_in_use(self._local)
        self._compare_peak(row)
        self._write(row, "train")
        text = f"loss {row['loss']:.3f}  {row['tokens_per_second']:,.0f} tokens/s"
        text += f"  MFU {row['mfu']:.1%}" if "mfu" in row else ""
        waiting = row["data_wait_seconds"] / seconds
        text += f"  waiting for data {waiting:.0%}" if waiting >= 0.01 else ""
        self._bar.update(self._task, completed=step, text=text)
        if not console.is_terminal and (step % self._every == 0 or step == self._steps):
            say(f"step {step:>{len(str(self._steps))}}/{self._steps}  {text}  learning rate {row['learning_rate']:.2e}")

    def _compare_peak(self, row: dict) -> None:
        """Puts the expected peak beside the one that a device reports, and warns once if they part."""
        if self._expected_peaks is None or "device_peak_bytes_in_use" not in row:
            return
        (low, high), peak = self._expected_peaks, row["device_peak_bytes_in_use"]
        row["expected_peak_bytes"] = low
        if row["step"] > self._first_step + 1 and not 0.95 * low <= peak <= 1.05 * high:
            self._expected_peaks = None
            say(
                f"WARNING: the fullest device has had {peak / 2**30:.3f} GiB in use, where the plan expects "
                f"{low / 2**30:.3f}{f' to {high / 2**30:.3f}' if high > low else ''} GiB. Is something else on the devices? "
                "If not, please plan with a larger config.memory.reserve_gib."
            )

    def evaluation(self, step: int, results: dict[str, float]) -> None:
        """Records an evaluation after `step` steps."""
        self._write({"step": step} | results, "eval")
        say(f"step {step}: {describe(results)}")

    def _write(self, row: dict, group: str) -> None:
        self._file.write(row)
        if self._events:
            for name, value in row.items():
                if name != "step":
                    self._events.add_scalar(f"{group}/{name.removeprefix('eval_')}", value, row["step"])

    def restart_clock(self) -> None:
        """Leaves out of the next step's time what came between (an evaluation, a save)."""
        self._time = time.perf_counter()


def memory_in_use(devices: list) -> dict[str, int]:
    """The most bytes in use on one of the devices, now and at any time so far; nothing where they do not tell."""
    found = []
    for device in devices:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            found.append(device.memory_stats() or {})
    names = {"device_bytes_in_use": "bytes_in_use", "device_peak_bytes_in_use": "peak_bytes_in_use"}
    values = {ours: [stats[theirs] for stats in found if theirs in stats] for ours, theirs in names.items()}
    return {name: max(of_devices) for name, of_devices in values.items() if of_devices}


def describe_run(program, data) -> str:
    """What is about to be trained, for people."""
    mesh, c = program.mesh, program.config
    parameters = sum(math.prod(p.shape) for p in jax.tree.leaves(program.abstract_state.params))
    axes = " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    documents = data.fingerprint["documents"]
    kind = mesh.devices.flat[0].device_kind
    kind = "simulated CPU" if kind == "cpu" and mesh.size > 1 else kind
    return (
        f"mesh {axes}: {mesh.size} {kind} device(s), {jax.process_count()} process(es)\n"
        f"model {parameters:,} parameters in {c.model.num_layers} layers, remat plan {c.remat.plan!r}, attention by "
        f"{program.model.config.attention_kernel}{f' ({program.kernel_note})' if program.kernel_note else ''}\n"
        f"data {documents:,} documents, {len(data.train):,} training and {len(data.heldout):,} held-out examples of "
        f"{c.context_length} tokens"
    )


def describe(results: dict[str, float]) -> str:
    """The results of an evaluation for people."""
    return (
        f"held-out loss {results['eval_loss']:.4f} nats a token, perplexity {results['eval_perplexity']:.3f}, "
        f"{results['eval_bits_per_byte']:.4f} bits per byte ({results['eval_tokens']:,.0f} tokens)"
    )


def say_samples(texts: list[str], sample: Sample) -> None:
    """Prints generated texts, each under a line that tells it from the others if there are several."""
    for i, text in enumerate(texts):
        if len(texts) > 1:
            say(f"--- sample {i + 1} of {len(texts)}, seed {sample.seed}, temperature {sample.temperature}")
        if jax.process_index() == 0:  # as it is: rich would make spaces of tabs, and a terminal may not know every character
            encoding = sys.stdout.encoding or "utf-8"
            print(text.rstrip().encode(encoding, errors="replace").decode(encoding), flush=True)
