"""The interpreter that `make setup` takes."""

import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parent.parent / "tools/find_python.sh"


def _find(path, **env):
    return subprocess.run(["/bin/sh", SCRIPT, "train"], text=True, capture_output=True, env={"PATH": path, **env})


def _fake(folder, name, version):
    """An interpreter that says it is of this version, but for that is the real one."""
    folder.mkdir(parents=True, exist_ok=True)
    lie = f"import sys; sys.version_info = {version}; sys.executable = '{folder / name}'; exec(sys.argv[1])"
    (folder / name).write_text(f'#!/bin/sh\nshift\nexec {sys.executable} -c "{lie}" "$1"\n')
    (folder / name).chmod(0o755)


def test_the_newest_that_works_comes_first(tmp_path):
    system = "/usr/bin:/bin"
    _fake(tmp_path / "bin", "python3.11", (3, 11, 9))
    _fake(tmp_path / "bin", "python3.14", (3, 14, 0))
    (tmp_path / "bin/python3.13").write_text("#!/bin/sh\nexit 127\n")  # as a shim of pyenv that is not selected
    (tmp_path / "bin/python3.13").chmod(0o755)
    _fake(tmp_path / "pyenv/versions/3.12.4/bin", "python3", (3, 12, 4))
    _fake(tmp_path / "pyenv/versions/3.15.0/bin", "python3", (3, 15, 0))
    _fake(tmp_path / "pyenv/versions/3.10.1/bin", "python3", (3, 10, 1))
    found = _find(f"{tmp_path}/bin:{system}", PYENV_ROOT=f"{tmp_path}/pyenv", HOME=str(tmp_path)).stdout.splitlines()
    ours = [line for line in found if line.startswith(str(tmp_path))]
    assert [line.removeprefix(f"{tmp_path}/") for line in ours] == [
        "bin/python3.14", "pyenv/versions/3.12.4/bin/python3", "bin/python3.11",
    ]  # fmt: skip


@pytest.mark.parametrize("python", ["/bin/false", "/nowhere/python3"])
def test_an_interpreter_that_was_asked_for_and_does_not_work_is_refused(python):
    run = _find(os.environ["PATH"], PYTHON=python)
    assert run.returncode == 2 and not run.stdout
    assert run.stderr == f"PYTHON={python} does not work; it must be Python 3.11 to 3.14, 64 bit, with venv and ensurepip.\n"


def test_none_found_says_what_to_do(tmp_path):
    for name in ("sort", "cut", "ls", "dirname"):
        (tmp_path / name).symlink_to(f"/usr/bin/{name}")
    run = _find(str(tmp_path), HOME=str(tmp_path))
    assert run.returncode == 2
    assert run.stderr.startswith("No usable Python found on PATH") and "make PYTHON=/path/to/python3 train" in run.stderr
