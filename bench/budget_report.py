"""Tables and pictures of what `bench/budget.py` measured: reads its GROUP.json files, writes tables.md and pictures.

python bench/budget_report.py [--workdir=runs/budget] [--out=docs]
"""

import argparse
import json
import pathlib
import statistics

GIB = 2**30
INTRO = """# Is the budget met, and what is it worth?

Made by `python bench/budget.py` and `python bench/budget_report.py --out=docs`: nothing here was typed in by hand.

Real train steps were compiled for devices that are not here. In each group (a model on a topology) the limits stand on an
even grid between what full recompute and what saving every useful name need; no cell is left out. Peaks are the
compiler's, with the batches that wait beside the step. **Recompute** is counted in the compiled program's text, loops
multiplied out: matrix products beyond those of the program that saves every name, and runs of attention's forward kernel
beyond one a layer. The presets are MaxText's, as lists of this block's names: a fixed choice for all layers, and the best
one that fits is what somebody who tried them all would have. **Nothing was timed.**

![Recompute against memory](budget.png)

In the tables: `used` is the share of the limit; `error` that of the peak which was predicted for the plan before it was
compiled, once from the formula alone, once with one compile of another plan of the same config; `less` is the share that
the plan recomputes less than the best preset.

"""


def read(workdir: pathlib.Path) -> dict[str, dict]:
    """The finished groups, by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(workdir.glob("*.json")) if path.stem != "exhaustive"}


def saved_recompute(cell: dict) -> float:
    """By which share a plan recomputes less than the best preset that fits."""
    return 1 - cell["recompute_flops"] / cell["preset_flops"] if cell["preset_flops"] else 0.0


def tables(groups: dict[str, dict]) -> str:
    """All figures, in Markdown."""
    lines = []
    for name, group in groups.items():
        lines += [f"### {name} ({group['cells'][0]['topology']})", ""]
        lines += ["| preset | peak, GiB | recompute, TFLOP a device |", "|---|---|---|"]
        lines += [
            f"| {preset} | {p['total_bytes'] / GIB:.3f} | {p['recompute_flops'] / 1e12:.2f} |"
            for preset, p in group["presets"].items()
        ]
        columns = (
            "limit | peak | used | compiles | error, no compile | error, one | recompute | best preset that fits | its | less"
        )
        lines += ["", f"| {columns} |", "|---" * len(columns.split("|")) + "|"]
        lines += [
            f"| {c['limit_bytes'] / GIB:.3f} | {c['total_bytes'] / GIB:.3f} | {c['use']:.1%} | {c['num_compiles']} | "
            f"{c['error_uncalibrated']:+.1%} | {c['error']:+.1%} | {c['recompute_flops'] / 1e12:.2f} | {c['best_preset']} | "
            f"{c['preset_flops'] / 1e12:.2f} | {saved_recompute(c):.0%} |"
            for c in group["cells"]
        ]
        lines += ["", *(f"- {c['limit_bytes'] / GIB:.3f} GiB: {c['segments']}" for c in group["cells"]), ""]
    return "\n".join(lines)


def verdicts(groups: dict[str, dict]) -> dict[str, tuple[bool, str]]:
    """What must hold over all cells, whether it does, and the figures."""
    cells = [c for group in groups.values() for c in group["cells"]]
    use = statistics.median(c["use"] for c in cells if c["richer_exists"])
    errors, first = ([abs(c[k]) for c in cells] for k in ("error", "error_uncalibrated"))
    less = [saved_recompute(c) for c in cells]
    rises = [
        b["total_bytes"] / a["total_bytes"] for g in groups.values() for a, b in zip(g["cells"], g["cells"][1:], strict=False)
    ]
    excess = [(c["seconds"] - c["bound_seconds"]) / c["layer_seconds"] for c in cells]
    fitting = sum(c["total_bytes"] <= c["limit_bytes"] for c in cells)
    compiles = [c["num_compiles"] for c in cells]
    share = sum(v >= 0.4 for v in less) / len(less)
    return {
        "every plan fits its limit": (fitting == len(cells), f"{fitting} of {len(cells)}"),
        "median use of the budget at least 95%": (use >= 0.95, f"{use:.1%}"),
        "no higher peak from a smaller budget (1%)": (min(rises) >= 0.99, f"peaks grow by {min(rises) - 1:+.1%} or more"),
        "prediction with one compile: median within 3%": (
            statistics.median(errors) <= 0.03,
            f"{statistics.median(errors):.2%}",
        ),
        "prediction with one compile: worst within 6%": (max(errors) <= 0.06, f"{max(errors):.2%}"),
        "prediction with no compile (no promise)": (True, f"median {statistics.median(first):.2%}, worst {max(first):.2%}"),
        "never more recompute than a preset that fits": (min(less) >= 0, f"{min(less):.1%} less or better"),
        "median cell at least 20% less recompute": (statistics.median(less) >= 0.2, f"{statistics.median(less):.1%}"),
        "a third of the cells at least 40% less": (share >= 1 / 3, f"{share:.0%} of the cells"),
        "within one layer of the fractional bound": (max(excess) <= 1, f"at most {max(excess):.2f} layers above it"),
        "at most four compiles": (max(compiles) <= 4, f"mean {statistics.mean(compiles):.1f}, at most {max(compiles)}"),
    }


def picture(groups: dict[str, dict], path: pathlib.Path) -> None:
    """Recompute against memory, the plans' and the presets', one panel a group."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(groups), 3.8), dpi=110, layout="constrained")
    for axes, (name, group) in zip(figure.subplots(1, len(groups), squeeze=False)[0], groups.items(), strict=True):
        presets = sorted((p["total_bytes"] / GIB, p["recompute_flops"] / 1e12) for p in group["presets"].values())
        axes.step(*zip(*_best_so_far(presets), strict=True), where="post", color="gray", label="best preset that fits")
        axes.plot(*zip(*presets, strict=True), "x", color="gray", label="presets")
        plans = [(c["total_bytes"] / GIB, c["recompute_flops"] / 1e12) for c in group["cells"]]
        axes.plot(*zip(*plans, strict=True), "o-", color="tab:red", label="meshfit's plans")
        axes.set(title=f"{name} ({group['cells'][0]['topology']})", xlabel="compiled peak, GiB a device", ylim=(0, None))
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("recomputed, TFLOP a device and step")
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path)


def _best_so_far(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    best, found = float("inf"), []
    for x, y in points:
        best = min(best, y)
        found.append((x, best))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", default="runs/budget", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, help="folder of budget.md and budget.png; by default the workdir")
    args = parser.parse_args()
    out, groups = args.out or args.workdir, read(args.workdir)
    lines = [f"- {'holds' if good else 'FAILS'}: {what}: {figure}" for what, (good, figure) in verdicts(groups).items()]
    print("\n".join(lines))
    (out / "budget.md").write_text(INTRO + "\n".join(lines) + "\n\n" + tables(groups))
    picture(groups, out / "budget.png")
    raise SystemExit(0 if all(good for good, _ in verdicts(groups).values()) else 1)


if __name__ == "__main__":
    main()
