#!/bin/sh
# Makes .venv of what requirements/ locks, each file by its hash, and of torch by exact version. Argument: docs, for what builds the pages too.
# Needs Python 3.11 or later with the venv module; on Debian as root, a missing venv package is installed.
set -eu
cd "$(dirname "$0")/.."

python=
# The pinned torch wheel must exist for this Python; 3.11 is what CI runs.
for candidate in python3.11 python3.12 python3.13 python3.14 python3; do
    if command -v "$candidate" >/dev/null 2>&1 &&
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    echo "make-env: no Python 3.11 or later found; install one (Debian: apt-get install python3 python3-venv)" >&2
    exit 1
fi
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then # not there, or interrupted while it was made
    if ! "$python" -m venv --clear .venv 2>/dev/null; then
        rm -rf .venv
        if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
            apt-get update -q && apt-get install -y -q python3-venv
            "$python" -m venv .venv
        else
            echo "make-env: '$python -m venv' does not work; install the venv module (Debian: apt-get install python3-venv)" >&2
            exit 1
        fi
    fi
fi
pip=".venv/bin/python -m pip install --quiet --disable-pip-version-check"
# torch comes in several builds, so by its exact version; what it needs is locked like the rest.
$pip --no-deps "torch==$(sed -n 's/^torch==//p' constraints.txt)"
# The index's own build for CUDA needs what is locked beside it; a build of another index ("+cu128") asks for versions of its own.
case $(.venv/bin/python -c 'from importlib.metadata import requires, version; print(any("nvidia" in r for r in requires("torch")), version("torch"))') in
"True "*+*) echo "make-env: what this build of torch needs of CUDA is not locked" >&2 && $pip "torch==$(sed -n 's/^torch==//p' constraints.txt)" ;;
True*) $pip --no-deps --require-hashes --requirement requirements/cuda.txt ;;
esac
# All that is needed is in the lock (`pip check` below): nothing is looked for beside it.
for lock in dev "$@"; do
    $pip --no-deps --require-hashes --requirement "requirements/$lock.txt"
done
# This project and its lab, built by the locked setuptools.
$pip --no-deps --no-build-isolation --editable . --editable lab
# A wheel of NVIDIA for ARM says inside that it is for "sbsa", which pip, having installed it, does not know.
if ! found=$(.venv/bin/python -m pip check) && wrong=$(echo "$found" | grep -v '^nvidia-.* is not supported on this platform$'); then
    echo "$wrong" >&2
    exit 1
fi
echo "$found"
