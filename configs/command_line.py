"""The command line: absl flags, `--config=FILE`, and `--config.FIELD=VALUE` for any field.

Whatever is wrong with them ends in one message and exit code 2, before JAX is started.
"""

import dataclasses
import difflib
import logging
import operator
import os
import pathlib
import re
import sys
import traceback
import types
from typing import NoReturn

from absl import flags
from ml_collections import config_flags

from configs import schema
from configs.schema import Config, InputError, field_names
from configs.validation import check_types, validate

FLAGS = flags.FLAGS
NOT_CONFIGS = ("__init__", "command_line", "schema", "validation")  # files of this folder
_OVERRIDE = re.compile(r"--?(no)?config\.([^=]*)")
# What Python says of a field that the dataclass does not have: given to its constructor, or set later.
_NO_FIELD = re.compile(
    r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'|'(\w+)' object has no attribute '(\w+)'"
)


def define_config():
    """Defines --config; its value is a validated `Config` once `parse` has run."""
    try:  # reads the command line already, for --flagfile
        holder = config_flags.DEFINE_config_file("config", None, "A config file, such as configs/tiny.py.", flag_values=FLAGS)
    except flags.Error as error:
        _refuse(InputError(_explain(error)))
    FLAGS["config"].parser = _ConfigFile()
    return holder


def parse(argv: list[str]) -> list[str]:
    """Parses and checks the flags; on bad input prints what is wrong and exits with 2."""
    if {"--help", "-h", "-help", "--helpfull", "--helpshort"} & set(argv):
        print(_help())
        sys.exit(0)
    try:
        return _parse(argv)
    except InputError as error:
        _refuse(error)


def _refuse(error: InputError) -> NoReturn:
    print(f"meshfit: {error}", file=sys.stderr)
    sys.exit(2)


def _parse(argv: list[str]) -> list[str]:
    logging.getLogger("absl").setLevel(logging.ERROR)
    try:
        argv = FLAGS.read_flags_from_files(argv, force_gnu=False)
        _check_config_given(argv)
        _check_fields(argv)
        rest = FLAGS(argv)
    except flags.Error as error:
        raise InputError(_explain(error)) from error
    if len(rest) > 1:
        raise InputError(f"{rest[1]!r} is not a flag; flags look like --config.steps=100.")
    if not FLAGS.workdir:
        raise InputError("--workdir is missing; give the folder to write to, such as --workdir=runs/first.")
    there = os.path.abspath(FLAGS.workdir)
    while not os.path.exists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        raise InputError(f"--workdir={FLAGS.workdir} cannot be a folder: {there} is a file.")
    if FLAGS.prompt is not None and FLAGS.mode != "generate":
        raise InputError(
            f"--prompt is for --mode=generate, but --mode is {FLAGS.mode}; a run's own sample has config.sample.prompt."
        )
    if FLAGS.topology and FLAGS.mode != "plan":
        raise InputError(f"--topology is for --mode=plan, but --mode is {FLAGS.mode}; devices that are not here run nothing.")
    validate(FLAGS.config)
    return rest


def _check_config_given(argv: list[str]) -> None:
    """Checks that there is one --config, with a value that is a file, before all overrides."""
    at = [i for i, arg in enumerate(argv) if arg.partition("=")[0] in ("--config", "-config")]
    if len(at) > 1:
        raise InputError(f"--config is given {len(at)} times: {', '.join(argv[i] for i in at)}. Give one.")
    folder = os.path.dirname(__file__)
    ours = sorted(name for name in os.listdir(folder) if name.endswith(".py") and name.removesuffix(".py") not in NOT_CONFIGS)
    folder = os.path.relpath(folder)
    there = f"{folder}/ has {', '.join(ours)}."
    if not at:
        raise InputError(f"--config is missing; give a config file, as in --config={folder}/NAME.py. {there}")
    _, equals, path = argv[at[0]].partition("=")
    if not equals:
        path = "".join(argv[at[0] + 1 : at[0] + 2])
    if not path or path.startswith("-"):
        raise InputError(f"--config has no value; give a config file, as in --config={folder}/NAME.py. {there}")
    if not os.path.isfile(path):
        close = difflib.get_close_matches(os.path.basename(path).removesuffix(".py") + ".py", ours, 1)
        hint = f" Did you mean --config={folder}/{close[0]}?" if close else ""
        raise InputError(f"--config={path} is not a file, seen from {os.getcwd()}.{hint} {there}")
    early = next((arg for arg in argv[: at[0]] if _OVERRIDE.match(arg)), None)
    if early:
        raise InputError(f"{early} stands before --config={path}; put it after, so that it can change what the file sets.")


def _check_fields(argv: list[str]) -> None:
    """Checks that every `--config.FIELD` is a field."""
    known = field_names(Config())
    for arg in argv:
        match = _OVERRIDE.match(arg)
        if not match:
            continue
        no, name = match.groups()
        if any(k.startswith(name + ".") for k in known):
            raise InputError(f"config.{name} is a group of fields; set one of {_inside(name, known)}.")
        if name not in known:
            raise InputError(f"config.{name} does not exist.{_hint(name, known)}")
        default = operator.attrgetter(name)(Config())
        if no and not isinstance(default, bool):
            raise InputError(
                f"{arg}: only a bool is switched off by 'no'; config.{name} is of type {type(default).__name__}: "
                f"--config.{name}={default}."
            )


def _inside(group: str, known: list[str]) -> str:
    """The fields of a group for people; of the topmost one also its groups, as `model.*`."""
    prefix = f"{group}." if group else ""
    parts = (k.removeprefix(prefix).partition(".") for k in known if k.startswith(prefix))
    return ", ".join(dict.fromkeys(prefix + head + (".*" if dot else "") for head, dot, _ in parts))


def _hint(name: str, known: list[str]) -> str:
    """What may have been meant by a field that does not exist, and what there is in its group."""
    group, _, leaf = name.rpartition(".")
    groups = {k.rpartition(".")[0] for k in known}
    if group not in groups:
        group = next(iter(difflib.get_close_matches(group.lower(), groups, 1)), "")
    inside = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == group}
    close = [inside[c] for c in difflib.get_close_matches(leaf, inside, 1, cutoff=0.65)]
    meant = list(dict.fromkeys(close + [k for k in known if k.rpartition(".")[2] == leaf]))
    did_you_mean = f" Did you mean {' or '.join(f'config.{m}' for m in meant)}?" if meant else ""
    return f"{did_you_mean} There are {_inside(group, known)}."


def _explain(error: flags.Error) -> str:
    """What absl says, in the words of meshfit where its own would not help."""
    override = re.match(r"flag --config\.([\w.]+)=(.*?): ", str(error), re.DOTALL)
    if override and override[1] in field_names(Config()):
        default = operator.attrgetter(override[1])(Config())
        return f"config.{override[1]} is {override[2]!r}; it must be of type {type(default).__name__}, as in {default!r}."
    if isinstance(error, flags.UnrecognizedFlagError):
        name, known = error.flagname, [f.name for f in _our_flags()]
        fields = field_names(Config())
        meant = [f"config.{k}" for k in fields if name == k] or [f"config.{k}" for k in fields if name == k.rpartition(".")[2]]
        meant = meant or difflib.get_close_matches(name, known, 1)
        hint = f" Did you mean {' or '.join(f'--{m}' for m in meant)}?" if meant else ""
        flag_names = ", ".join(f"--{k}" for k in known)
        return f"--{name} is not a flag.{hint} There are {flag_names}, and --config.FIELD=VALUE for each field of the config."
    return str(error).removeprefix("ERROR:: ")


class _ConfigFile(flags.ArgumentParser):
    """Runs a config file. Whatever goes wrong in it becomes an `InputError` that names file and line."""

    def parse(self, argument: str) -> Config:
        try:
            module = sys.modules["config_file"] = types.ModuleType("config_file")
            module.__file__ = argument
            # From its source: an import would write bytecode beside it, and take a stale one for a file just rewritten.
            exec(compile(pathlib.Path(argument).read_bytes(), argument, "exec", dont_inherit=True), module.__dict__)
            get_config = getattr(module, "get_config", None)
            config = get_config() if callable(get_config) else None
        except (Exception, SystemExit) as error:
            raise InputError(_describe(error, argument)) from error
        if not callable(get_config):
            raise InputError(f"{argument} has no function get_config(); it must have one that returns a configs.schema.Config.")
        if not isinstance(config, Config):
            what = f"the class {config.__name__}" if isinstance(config, type) else f"a {type(config).__name__}"
            raise InputError(f"{argument}: get_config() returned {what}; it must return a configs.schema.Config.")
        try:
            check_types(config)
        except InputError as error:
            raise InputError(f"{argument}: {error}") from error
        return config


def _describe(error: BaseException, path: str) -> str:
    """`error`, which a config file gave rise to, with the line of that file, and the line elsewhere that raised it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<") and f.filename != __file__]
    here = [f for f in frames if f.filename == path]
    line = here[-1].lineno if here else None
    elsewhere = f" (raised in {frames[-1].filename}, line {frames[-1].lineno})" if here and frames[-1] is not here[-1] else ""
    text = str(error) or (frames[-1].line if frames else "")
    if isinstance(error, SyntaxError) and error.filename == path:
        line, text = error.lineno, error.msg
    if match := _NO_FIELD.search(text or ""):
        text = _no_field(match[1] or match[3], match[2] or match[4]) or text
    return f"{path}{f', line {line}' if line else ''}: {type(error).__name__}: {text}{elsewhere}"


def _no_field(group: str, name: str) -> str | None:
    """The same in the words of meshfit, if `group` is a class of the schema."""
    kind = getattr(schema, group, None)
    if not dataclasses.is_dataclass(kind):
        return None
    known = [f.name for f in dataclasses.fields(kind)]
    close = difflib.get_close_matches(name, known, 1, cutoff=0.65)
    hint = f" Did you mean {close[0]}?" if close else ""
    return f"{group} has no field {name!r}.{hint} There are {', '.join(known)}."


def _our_flags() -> list[flags.Flag]:
    """The flags that main.py and this module define; absl has more of its own."""
    found = [f for name, fs in FLAGS.flags_by_module_dict().items() if not name.startswith("absl") for f in fs]
    return sorted((f for f in found if "." not in f.name), key=lambda f: f.name)


def _help() -> str:
    lines = [sys.modules["__main__"].__doc__ or "", "Flags:"]
    lines += [f"  --{f.name}: {f.help} (default: {f.default!r})" for f in _our_flags()]
    lines.append("Fields of the config, with the defaults that a config file may change (configs/schema.py explains them):")
    lines += [f"  --config.{name}={operator.attrgetter(name)(Config())!r}" for name in field_names(Config())]
    return "\n".join(lines)
