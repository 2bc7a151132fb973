"""Imports go one way, and the part that a forker reads first stays short."""

import ast
import pathlib

import pytest

from configs.command_line import NOT_CONFIGS

ROOT = pathlib.Path(__file__).parent.parent
FOLDERS = ("configs", "model", "input_pipeline", "parallel", "remat")
FILES = [*ROOT.glob("*.py"), *(path for folder in FOLDERS for path in (ROOT / folder).glob("*.py"))]
OURS = {path.stem for path in ROOT.glob("*.py")} | set(FOLDERS)

# What each may import of ours. A line further down may not import one further up.
BASE = {"parallel", "configs"}
PARTS = {"model", "remat", "optimizer", "losses"}
AROUND = BASE | {"program", "input_pipeline", "checkpointing", "metrics"}
ALLOWED = {
    "main": BASE | {"train", "planning", "evaluate", "generate", "remat"},
    "planning": AROUND | {"remat"},
    "train": AROUND | {"remat", "evaluate", "generate", "plots", "profiling"},
    "evaluate": AROUND,
    "generate": AROUND,
    "program": BASE | PARTS,
    "remat": BASE | {"remat", "model", "device_kinds"},
    "model": BASE | {"model"},
    "input_pipeline": BASE | {"input_pipeline"},
    "checkpointing": BASE,
    "optimizer": BASE,
    "losses": BASE,
    "device_kinds": set(),
    "metrics": BASE | {"device_kinds"},
    "plots": BASE | {"metrics"},
    "profiling": BASE,
    "parallel": BASE,
    "configs": {"configs"},
}


def _imports(path):
    """Names that a file imports: of `from a import b` both a and a.b, as b may be a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = path.relative_to(ROOT).parts[: -node.level] if node.level else ()
            module = ".".join([*parent, *([node.module] if node.module else [])])
            yield from (module, *(f"{module}.{alias.name}" for alias in node.names))


def _name(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path):
    ours = {name for name in _imports(path) if name.split(".")[0] in OURS}
    assert {name.split(".")[0] for name in ours} <= ALLOWED[_name(path)]
    if _name(path) == "configs":
        assert all(name == "configs" or name.startswith(("configs.schema", "configs.validation")) for name in ours)


def test_flags_are_the_business_of_main_alone():
    users = {
        _name(p) for p in FILES for name in _imports(p) if name.startswith(("absl.flags", "absl.app", "configs.command_line"))
    }
    assert users == {"main", "configs"}


def test_a_config_file_imports_the_schema_and_nothing_else():
    for path in (p for p in (ROOT / "configs").glob("*.py") if p.stem not in NOT_CONFIGS):
        assert {name.split(".")[0] for name in _imports(path)} == {"configs"}, path


def test_the_schema_and_the_command_line_do_not_import_jax():
    for path in (ROOT / "configs").glob("*.py"):
        assert not {"jax", "flax", "numpy", "optax"} & {name.split(".")[0] for name in _imports(path)}, path


def test_training_needs_no_heavy_package():
    heavy = {"torch", "transformers", "tensorflow", "wandb", "libtpu"}
    assert not heavy & {name.split(".")[0] for path in FILES for name in _imports(path)}


def test_the_core_can_be_read_in_one_sitting():
    lines = {p: len(p.read_text().splitlines()) for p in FILES}
    core = ("main", "train", "program", "model", "parallel")
    assert sum(n for p, n in lines.items() if _name(p) in core or p.name == "schema.py") <= 1400
    assert {str(p): n for p, n in lines.items() if n > 300} == {}
