"""What each block saves for the backward pass: from `config.remat.plan` to the segments that the model takes."""

import json
import pathlib

from configs.schema import Config, InputError
from model.stack import Segment
from remat.graph import BlockGraph
from remat.trace import check_names


def plan_segments(config: Config) -> tuple[Segment, ...]:
    """The segments of `config.remat.plan`; of 'auto' those of 'full', until `remat.planner` has decided.

    Raises InputError for a name that the block does not have, and for a file that holds no plan for this model.
    """
    plan, layers = config.remat.plan, config.model.num_layers
    if plan == "none":
        return (Segment(0, layers, None),)
    if plan in ("auto", "full"):
        return (Segment(0, layers, ()),)
    if plan.startswith("names:"):
        save = tuple(plan.removeprefix("names:").split(","))
        check_names(config, save)
        return (Segment(0, layers, save),)
    segments = _read(plan)
    check_names(config, tuple(name for s in segments for name in (*(s.save or ()), *s.offload)))
    ends = [0, *(s.first_layer + s.num_layers for s in segments)]
    if [s.first_layer for s in segments] != ends[:-1] or ends[-1] != layers or any(s.num_layers < 1 for s in segments):
        spans = ", ".join(f"{s.first_layer} to {s.first_layer + s.num_layers - 1}" for s in segments)
        raise InputError(
            f"config.remat.plan={plan} has segments for layers {spans}; config.model.num_layers is {layers}, and every layer "
            "must be in one segment. Make a new plan with --mode=plan."
        )
    return segments


def _read(path: str) -> tuple[Segment, ...]:
    try:
        stored = json.loads(pathlib.Path(path).read_text())["segments"]
        return tuple(
            Segment(
                int(s["first_layer"]),
                int(s["num_layers"]),
                None if s["save"] is None else tuple(map(str, s["save"])),
                tuple(map(str, s.get("offload", ()))),
            )
            for s in stored
        )
    except OSError as error:
        raise InputError(f"config.remat.plan={path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"config.remat.plan={path} is no plan ({type(error).__name__}: {error}). --mode=plan writes one, WORKDIR/plan.json."
        ) from error


def check_plan(graph: BlockGraph, segments: tuple[Segment, ...]) -> None:
    """Raises InputError for a segment that saves or offloads a name in vain."""
    for segment in segments:
        if segment.save is None and segment.offload:
            raise InputError(
                f"config.remat.plan offloads {', '.join(segment.offload)} in a segment whose save is null, which keeps "
                "everything on the device without nn.checkpoint. Give it a list to save, or nothing to offload."
            )
        named = (*(segment.save or ()), *segment.offload)
        for name in named:
            if name not in graph.names:
                raise InputError(
                    f"config.remat.plan saves {name!r}, which no tensor of the block is called. There are "
                    f"{', '.join(graph.names)}."
                )
            if name not in graph.useful_names and not (name == graph.input_name and name in segment.offload):
                raise InputError(
                    f"config.remat.plan saves {name!r} in vain: {graph.why_useless(name)}. Names that save something: "
                    f"{', '.join(graph.useful_names)}."
                )
        if twice := [name for name in dict.fromkeys(named) if named.count(name) > 1]:
            raise InputError(f"config.remat.plan names {twice[0]!r} twice in one segment. Save it or offload it, once.")
        if vain := frozenset(named) - graph.need(frozenset(named)).saved:
            raise InputError(
                f"config.remat.plan saves {', '.join(map(repr, sorted(vain)))} in vain: beside the other names nobody asks "
                "for it any more. Leave it out."
            )
