"""Breaks meshfit on purpose, one small change at a time, and checks that the test that must notice does.

    make mutate                       all of tests/mutations.py
    make mutate ARGS='dropout mask'   those with one of these words in their description

Works on a copy of the tree. Ends with 1 if a change goes unnoticed.
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.mutations import MUTATIONS, Mutation  # noqa: E402


def _run(tree: pathlib.Path, tests: list[str]) -> tuple[int, str]:
    """The exit code of pytest (0 all passed, 1 some failed), and its last line."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-p", "no:cacheprovider", *tests]
    run = subprocess.run(command, cwd=tree, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return run.returncode, (run.stdout.strip().splitlines() or ["no output"])[-1]


def _try(tree: pathlib.Path, mutation: Mutation) -> tuple[bool, str]:
    path = tree / mutation.file
    whole = path.read_text()
    path.write_text(whole.replace(mutation.old, mutation.new))
    try:
        code, line = _run(tree, [mutation.test])
    finally:
        path.write_text(whole)
    return code == 1, line


def main(words: list[str]) -> int:
    chosen = [m for m in MUTATIONS if not words or any(word in m.what for word in words)]
    if not chosen:
        print(f"mutate: no description has {' or '.join(map(repr, words))}; see tests/mutations.py.", file=sys.stderr)
        return 2
    missed, began = [], time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="meshfit-mutate-") as folder:
        tree = pathlib.Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", "runs", ".*_cache", "__pycache__"))
        jax_cache = ROOT / ".pytest_cache/jax"
        if jax_cache.exists():
            (tree / ".pytest_cache").mkdir()
            (tree / ".pytest_cache/jax").symlink_to(jax_cache)
        print(f"the tests without any change: {len({m.test for m in chosen})} to run", flush=True)
        code, line = _run(tree, sorted({m.test for m in chosen}))
        print(f"  {line}")
        if code != 0:
            print("mutate: they must pass before anything is broken.", file=sys.stderr)
            return 1
        for i, mutation in enumerate(chosen, 1):
            caught, line = _try(tree, mutation)
            verdict = "caught" if caught else "MISSED"
            print(f"[{i}/{len(chosen)}] {verdict}  {mutation.what}\n        by {mutation.test}  ({line})", flush=True)
            missed += [] if caught else [mutation]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} caught in {time.perf_counter() - began:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
