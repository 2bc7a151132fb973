#!/bin/sh
# Makes .venv with the newest interpreter that works, and installs what meshfit needs.
# Does nothing if .venv is complete and pyproject.toml has not changed since; an unfinished one is made again.
set -u
cd "$(dirname "$0")/.."

stamp=.venv/meshfit-installed
if [ -f "$stamp" ] && cmp -s pyproject.toml "$stamp" && .venv/bin/python -c '' 2>/dev/null; then exit 0; fi

pythons=$(tools/find_python.sh setup) || exit 2
for python in $pythons; do
    echo "Installing into .venv with $($python --version) ($python). This takes a minute or two."
    rm -rf .venv
    if "$python" -m venv .venv \
        && .venv/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip \
        && .venv/bin/python -m pip install --quiet --disable-pip-version-check '.[dev]'; then
        cp pyproject.toml "$stamp"
        .venv/bin/python -c 'import flax, jax, sys; print(f"Ready: Python {sys.version.split()[0]}, jax {jax.__version__}, flax {flax.__version__}.")'
        exit
    fi
    echo "That did not work with $python." >&2
done
echo "No interpreter could install meshfit's packages; the messages above say why." >&2
exit 1
