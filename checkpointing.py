"""Saving and restoring with Orbax, with every mismatch refused in words before any array is read.

A checkpoint is a folder WORKDIR/checkpoints/STEP with two items: `state`, the arrays, and `meta`, a JSON
object that says what the state is of (config, plan) and which data it has seen.
"""

import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp

from configs.schema import Checkpoint, InputError

_SHOWN = 8  # differences named in an error


class Checkpointer:
    """The checkpoints of a workdir. A context manager: leaving it waits for saves under way.

    Args:
      workdir: an absolute path.
      read_only: write, make and delete nothing.
    """

    def __init__(self, workdir: pathlib.Path, settings: Checkpoint, *, read_only: bool = False):
        self._settings = settings
        self._folder = pathlib.Path(workdir) / "checkpoints"
        self._manager: Any = None
        if not read_only:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InputError(f"--workdir={workdir} cannot be written to: {error.strerror}. Give another one.") from error
        if self._folder.exists():
            self._manager = _open(self._folder, settings, read_only)

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *_) -> None:
        if self._manager:
            self._manager.close()

    def latest_step(self) -> int | None:
        """The newest step that was saved whole, or None."""
        return self._manager.latest_step() if self._manager else None

    def should_save(self, step: int) -> bool:
        """Whether `checkpoint.every_steps` asks for this step."""
        return step % self._settings.every_steps == 0

    def save(self, step: int, state: Any, meta: dict) -> None:
        """Starts to save; the state may be donated as soon as this returns. A step that is there is left alone."""
        if step not in self._manager.all_steps():
            items = ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta))
            self._manager.save(step, args=items, force=True)

    def read_meta(self, step: int) -> dict:
        """What was stored beside the state. Raises InputError if it cannot be read."""
        with _Readable(self._folder / str(step)):
            return self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]

    def restore(self, step: int, abstract_state: Any) -> Any:
        """The state, on the shardings of `abstract_state`, whatever mesh it was saved from.

        Raises:
          InputError: it is of another model, dtype or optimizer, or cannot be read.
        """
        path = self._folder / str(step)
        with _Readable(path):
            stored = _leaves(self._manager.item_metadata(step)["state"].tree)
        target = _check(path, stored, abstract_state, self._settings.convert_dtype, "--workdir")
        with _Readable(path):
            items = ocp.args.Composite(state=ocp.args.StandardRestore(target))
            state = self._manager.restore(step, args=items)["state"]
        return _convert(state, abstract_state)


def load_parameters(path: str, abstract_params: Any, *, convert_dtype: bool = False) -> Any:
    """The parameters alone of an existing checkpoint, on the shardings of `abstract_params`.

    Args:
      path: a workdir, its `checkpoints` folder (the newest step is taken), or the folder of one step.
    Raises:
      InputError: there is no checkpoint, or it is of another model.
    """
    folder = _step_folder(pathlib.Path(path).absolute())
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        with _Readable(folder):
            tree = reader.metadata(folder / "state").item_metadata.tree
            stored = _leaves(tree["params"], "params/")
        target = {"params": _check(folder, stored, {"params": abstract_params}, convert_dtype, "checkpoint")["params"]}
        with _Readable(folder):
            restore_args = ocp.checkpoint_utils.construct_restore_args(target)
            args = ocp.args.PyTreeRestore(target, restore_args=restore_args, partial_restore=True)
            params = reader.restore(folder / "state", args=args)["params"]
    return _convert(params, abstract_params)


def check_same_data(step: int, stored: dict, now: dict) -> None:
    """Raises InputError if the data of a checkpoint, as stored, is not the data that is there now."""
    differ = [f"{k} was {stored.get(k)!r}, is {now.get(k)!r}" for k in stored | now if stored.get(k) != now.get(k)]
    if differ:
        raise InputError(
            f"The checkpoint of step {step} was trained on other data: {'; '.join(differ)}. Going on would repeat or "
            "lose examples. Restore those settings, or take another --workdir and start from this one's parameters "
            "with --config.init_from."
        )


def _open(folder: pathlib.Path, settings: Checkpoint, read_only: bool) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(
        max_to_keep=settings.keep_last,
        keep_period=settings.keep_every_steps or None,
        cleanup_tmp_directories=not read_only,
        create=False,
    )
    handlers = {"state": ocp.StandardCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()}
    return ocp.CheckpointManager(folder, options=options, item_handlers=handlers)


def _step_folder(path: pathlib.Path) -> pathlib.Path:
    if (path / "state").is_dir():
        return path
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    steps = [int(p.name) for p in folder.iterdir() if p.name.isdigit()] if folder.is_dir() else []
    if not steps:
        raise InputError(
            f"There is no checkpoint in {path}; give a workdir of meshfit, its checkpoints folder, or one step's folder."
        )
    return folder / str(max(steps))


class _Readable:
    """Turns whatever Orbax raises inside it into one sentence."""

    def __init__(self, path: pathlib.Path):
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, _, error, __) -> None:
        if isinstance(error, Exception) and not isinstance(error, InputError):
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
            raise InputError(
                f"The checkpoint {self._path} cannot be read: {reason}. If it is damaged, move that folder away; "
                "the step before it is taken then."
            ) from error


def _leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves by path; the same path whether containers are dicts and lists or dataclasses and tuples."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return {prefix + jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in paths}


def _show(leaf: Any) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _check(path: pathlib.Path, stored: dict[str, Any], abstract: Any, convert_dtype: bool, flag: str) -> Any:
    """`abstract` with the stored dtypes. Raises InputError if anything differs that must not."""
    wanted = _leaves(abstract)
    problems, only_dtypes = [], True
    for name in dict.fromkeys([*wanted, *stored]):
        if name not in stored or name not in wanted:
            where = "this model" if name in wanted else "the checkpoint"
            problems.append(f"{name}: only in {where}, {_show(wanted.get(name, stored.get(name)))}")
            only_dtypes = False
        elif stored[name].shape != wanted[name].shape:
            problems.append(f"{name}: stored {_show(stored[name])}, this model {_show(wanted[name])}")
            only_dtypes = False
        elif stored[name].dtype != wanted[name].dtype and not convert_dtype:
            problems.append(f"{name}: stored {_show(stored[name])}, this model {_show(wanted[name])}")
    if problems:
        shown = problems[:_SHOWN] + ([f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else [])
        change = (
            "Set config.model.param_dtype to what was stored, or convert with --config.checkpoint.convert_dtype=True."
            if only_dtypes
            else f"Set config.model (and config.optimizer) to what was stored, or give another {flag}."
        )
        raise InputError(f"The checkpoint {path} is of another model:\n  " + "\n  ".join(shown) + f"\n{change}")
    as_stored = lambda name, leaf: jax.ShapeDtypeStruct(leaf.shape, stored[name].dtype, sharding=leaf.sharding)  # noqa: E731
    leaves = [as_stored(name, leaf) for name, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def _convert(tree: Any, abstract: Any) -> Any:
    """`tree` in the dtypes of `abstract`, on its shardings."""
    if jax.tree.map(lambda a: a.dtype, tree) == jax.tree.map(lambda a: a.dtype, abstract):
        return tree
    cast = lambda tree: jax.tree.map(lambda a, b: a.astype(b.dtype), tree, abstract)  # noqa: E731
    return jax.jit(cast, out_shardings=jax.tree.map(lambda a: a.sharding, abstract))(tree)


def newest_parameters(program, workdir: pathlib.Path) -> tuple[int, Any]:
    """The step and the parameters of the newest checkpoint. Raises InputError if there is none."""
    with Checkpointer(workdir, program.config.checkpoint, read_only=True) as checkpoints:
        step = checkpoints.latest_step()
    if step is None:
        raise InputError(f"There is no checkpoint in {workdir}: train first, or give another --workdir.")
    folder, convert = workdir / "checkpoints" / str(step), program.config.checkpoint.convert_dtype
    return step, load_parameters(str(folder), program.abstract_state.params, convert_dtype=convert)
