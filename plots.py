"""Pictures of a run."""

import logging
import pathlib

import numpy as np

from metrics import read_rows

_SMOOTHED_STEPS = 0.02  # of all steps, the width of the running mean


def loss_picture(workdir: pathlib.Path) -> pathlib.Path | None:
    """Draws WORKDIR/loss.png from WORKDIR/metrics.jsonl: losses of training and of held-out data by step.

    Returns its path, or None where there is nothing to draw.
    """
    rows = read_rows(workdir / "metrics.jsonl")
    steps, losses = _column(rows, "loss")
    eval_steps, eval_losses = _column(rows, "eval_loss")
    if not len(steps):
        return None
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it tells of its font cache
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    width = max(1, round(_SMOOTHED_STEPS * len(losses)))
    axes.plot(steps, losses, color="tab:blue", alpha=0.35 if width > 1 else 1, linewidth=1, label="training, each step")
    if width > 1:
        mean = np.convolve(losses, np.ones(width) / width, mode="valid")
        axes.plot(steps[width - 1 :], mean, color="tab:blue", label=f"training, mean of {width} steps")
    if len(eval_steps):
        axes.plot(eval_steps, eval_losses, "o-", color="tab:orange", label="held-out")
        axes.annotate(
            f"{eval_losses[-1]:.3f}", (eval_steps[-1], eval_losses[-1]), textcoords="offset points", xytext=(0, 8),
            ha="right", color="tab:orange",
        )  # fmt: skip
    # The first steps fall from far above; scaled to them, the rest would be a flat line.
    shown = np.concatenate([losses[len(losses) // 20 :], eval_losses])
    low, high = shown.min(), shown.max()
    axes.set_ylim(low - 0.05 * (high - low) - 1e-6, high + 0.15 * (high - low) + 1e-6)
    axes.set_xlim(0, steps[-1] * 1.02)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=f"Loss of {workdir.name}")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    path = workdir / "loss.png"
    figure.savefig(path)
    return path


def _column(rows: list[dict], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the rows that have a number of this name."""
    pairs = [(row["step"], row[name]) for row in rows if isinstance(row.get(name), float)]
    steps, values = zip(*pairs, strict=True) if pairs else ((), ())
    return np.array(steps), np.array(values)
