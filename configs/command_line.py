"""The command line: absl flags, `--config=FILE`, and `--config.FIELD=VALUE` for any field.

Whatever is wrong with them ends in one message and exit code 2, before JAX is started.
"""

import difflib
import os
import re
import sys
import traceback

from absl import flags
from ml_collections import config_flags

from configs.schema import Config, InputError, field_names, validate

FLAGS = flags.FLAGS
_OVERRIDE = re.compile(r"--?(?:no)?config\.([^=]+)")


def define_config():
    """Defines --config; its value is a validated `Config` once `parse` has run."""
    return config_flags.DEFINE_config_file("config", None, "A file whose get_config() returns a configs.schema.Config.")


def parse(argv: list[str]) -> list[str]:
    """Parses and checks the flags; on bad input prints what is wrong and exits with 2."""
    if {"--help", "-h", "-help", "--helpfull", "--helpshort"} & set(argv):
        print(_help())
        sys.exit(0)
    try:
        return _parse(argv)
    except InputError as error:
        print(f"meshfit: {error}", file=sys.stderr)
        sys.exit(2)


def _parse(argv: list[str]) -> list[str]:
    path = _config_path(argv)
    _check_fields(argv)
    try:
        rest = FLAGS(argv)
    except Exception as error:
        raise InputError(_explain(error, path)) from error
    if len(rest) > 1:
        raise InputError(f"{rest[1]!r} is not a flag; flags look like --config.steps=100.")
    if not FLAGS.workdir:
        raise InputError("--workdir is missing; give the folder to write to, such as --workdir=runs/first.")
    if os.path.exists(FLAGS.workdir) and not os.path.isdir(FLAGS.workdir):
        raise InputError(f"--workdir={FLAGS.workdir} is a file; it must be a folder, which is made if there is none.")
    validate(FLAGS.config)
    return rest


def _config_path(argv: list[str]) -> str:
    """The value of --config, checked to be a file."""
    path = None
    for i, arg in enumerate(argv):
        name, equals, value = arg.partition("=")
        if name in ("--config", "-config"):
            path = value if equals else "".join(argv[i + 1 : i + 2])
    there = ", ".join(sorted(f"configs/{f}" for f in os.listdir(os.path.dirname(__file__)) if _is_config(f)))
    if path is None:
        raise InputError(f"--config is missing; give a config file, such as one of {there}.")
    if not os.path.isfile(path):
        raise InputError(f"--config={path} is not a file here ({os.getcwd()}). This repository has {there}.")
    return path


def _is_config(name: str) -> bool:
    return name.endswith(".py") and name not in ("__init__.py", "command_line.py", "schema.py")


def _check_fields(argv: list[str]) -> None:
    known = field_names(Config())
    for arg in argv:
        match = _OVERRIDE.match(arg)
        if match and match[1] not in known:
            name = match[1]
            fields = [k for k in known if k.startswith(name + ".")]
            if fields:
                raise InputError(f"config.{name} is a group of fields; set one of {', '.join(fields)}.")
            close = difflib.get_close_matches(name, known, 1) or [k for k in known if k.split(".")[-1] == name]
            group = name.rpartition(".")[0]
            siblings = [k for k in known if k.rpartition(".")[0] == group] or known
            hint = f" Did you mean config.{close[0]}?" if close else ""
            raise InputError(f"config.{name} does not exist.{hint} There are: {', '.join(siblings)}.")


def _explain(error: BaseException, path: str) -> str:
    """One message for whatever parsing the flags, or loading the config file, raised."""
    where = _line_in(error, path)
    if where:
        cause = where[1]
        text = cause.msg if isinstance(cause, SyntaxError) else str(cause)
        return f"{path}, line {where[0]}: {type(cause).__name__}: {text}"
    override = re.match(r"flag --config\.([\w.]+)=(.*?): ", str(error), re.DOTALL)
    if override and override[1] in field_names(Config()):
        node = Config()
        for part in override[1].split("."):
            node = getattr(node, part)
        return f"config.{override[1]} is {override[2]!r}; it must be of type {type(node).__name__}, as in {node!r}."
    if isinstance(error, AttributeError) and "get_config" in str(error):
        return f"{path} has no get_config(); a config file must define it, and it must return a configs.schema.Config."
    if "get_config()" in str(error):  # such as arguments that it does not take
        return f"{path}: {str(error).strip().splitlines()[-1]}"
    return str(error)


def _line_in(error: BaseException | None, path: str) -> tuple[int, BaseException] | None:
    """The line of the config file at which the first cause of `error` arose, if it arose there."""
    found: tuple[int, BaseException] | None = None
    while error is not None:
        if isinstance(error, SyntaxError) and error.filename and os.path.abspath(error.filename) == os.path.abspath(path):
            found = error.lineno or 0, error
        lines = [
            f.lineno for f in traceback.extract_tb(error.__traceback__) if os.path.abspath(f.filename) == os.path.abspath(path)
        ]
        if lines and lines[-1]:
            found = lines[-1], error
        error = error.__cause__ or error.__context__
    return found


def _help() -> str:
    lines = [sys.modules["__main__"].__doc__ or "", "Flags:"]
    for name, module_flag in sorted(FLAGS.flags_by_module_dict().items()):
        if name in ("main.py", sys.argv[0], "__main__", "main"):
            lines += [f"  --{f.name}: {f.help} (default: {f.default!r})" for f in module_flag]
    lines.append("Fields of the config, with the defaults that a config file may change (configs/schema.py explains them):")
    for name in field_names(Config()):
        node = Config()
        for part in name.split("."):
            node = getattr(node, part)
        lines.append(f"  --config.{name}={node!r}")
    return "\n".join(lines)
