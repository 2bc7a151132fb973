#!/bin/sh
# Makes .venv with the newest interpreter that works, and installs what meshfit needs.
# Does nothing if .venv is complete, pyproject.toml has not changed since, and PYTHON does not ask for another interpreter;
# an unfinished one is made again.
set -u
cd "$(dirname "$0")/.."
# Some shells take an interrupted pip for a failed one, and would go on with the next interpreter.
trap 'exit 130' INT
trap 'exit 143' TERM
IFS='
' # interpreters come one a line; a path may have spaces

stamp=.venv/meshfit-installed
pythons=
if [ -n "${PYTHON:-}" ]; then pythons=$(tools/find_python.sh setup) || exit 2; fi

made_by_wanted() {
    [ -z "$pythons" ] || [ "$(sed -n 's/^executable = //p' .venv/pyvenv.cfg)" = \
        "$("$pythons" -c 'import os, sys; print(os.path.realpath(sys.executable))')" ]
}
if [ -f "$stamp" ] && cmp -s pyproject.toml "$stamp" && .venv/bin/python -c '' 2>/dev/null && made_by_wanted; then exit 0; fi

[ -n "$pythons" ] || pythons=$(tools/find_python.sh setup) || exit 2
for python in $pythons; do
    echo "Installing into .venv with $("$python" --version) ($python). This takes a minute or two."
    rm -rf .venv
    if "$python" -m venv .venv \
        && .venv/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip \
        && .venv/bin/python -m pip install --quiet --disable-pip-version-check '.[dev]' \
        && .venv/bin/python -c 'import flax, jax, sys; print(f"Ready: Python {sys.version.split()[0]}, jax {jax.__version__}, flax {flax.__version__}.")'; then
        cp pyproject.toml "$stamp" # last: what has no stamp is unfinished
        exit 0
    fi
    echo "That did not work with $python." >&2
done
echo "No interpreter could install meshfit's packages; the messages above say why." >&2
exit 1
