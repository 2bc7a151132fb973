"""What each block saves for the backward pass: from `config.remat.plan` to the segments that the model takes."""

from configs.schema import Config
from model.stack import Segment
from remat.trace import check_names


def plan_segments(config: Config) -> tuple[Segment, ...]:
    """The segments of `config.remat.plan`: 'full', 'none' or 'names:a,b,c'.

    Raises InputError for a name that the block does not have.
    """
    plan = config.remat.plan
    save: tuple[str, ...] | None
    if plan == "none":
        save = None
    elif plan == "full":
        save = ()
    else:
        save = tuple(plan.removeprefix("names:").split(","))
        check_names(config, save)
    return (Segment(0, config.model.num_layers, save),)
