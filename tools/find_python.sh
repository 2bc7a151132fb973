#!/bin/sh
# Prints the interpreters that can run meshfit, the newest first: on PATH, then pyenv's.
# With PYTHON set, only that one counts. Nothing found: a message, exit code 2.

check='
import os, sys
assert (3, 11) <= sys.version_info[:2] < (3, 15) and sys.maxsize > 2**32
import ensurepip, venv
python = sys.executable
if os.path.realpath(os.path.dirname(python)) == os.path.realpath(".venv/bin"):
    python = sys._base_executable  # .venv is activated: setup removes it, so name what it was made with
print("%d.%d.%d" % sys.version_info[:3], python)
'
IFS='
' # a path may have spaces
wanted="Python 3.11 to 3.14, 64 bit, with venv and ensurepip"

if [ -n "${PYTHON:-}" ]; then
    found=$("$PYTHON" -c "$check" 2>/dev/null) || {
        echo "PYTHON=$PYTHON does not work; it must be $wanted." >&2
        exit 2
    }
else
    candidates=$(
        for version in 3.14 3.13 3.12 3.11 3; do command -v "python$version"; done
        ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/python3 2>/dev/null
    )
    # A pyenv shim of a version that is not selected is on PATH, but does not run.
    found=$(for python in $candidates; do "$python" -c "$check" 2>/dev/null; done | sort -t. -k1,1nr -k2,2nr -k3,3nr -u)
    if [ -z "$found" ]; then
        echo "No usable Python found on PATH or in ${PYENV_ROOT:-$HOME/.pyenv}; meshfit needs $wanted." >&2
        echo "Install one, or name it: make PYTHON=/path/to/python3 $*" >&2
        exit 2
    fi
fi
echo "$found" | cut -d' ' -f2-
