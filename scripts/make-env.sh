#!/bin/sh
# Makes .venv with the pinned versions of constraints.txt. Arguments: the extras to install (default: dev).
# Needs Python 3.11 or later with the venv module; on Debian as root, a missing venv package is installed.
set -eu
cd "$(dirname "$0")/.."
extras=${1:-dev}

python=
for candidate in python3.13 python3.12 python3.11 python3; do
    if command -v "$candidate" >/dev/null 2>&1 &&
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        # The pinned torch wheel must exist for this Python; 3.11 is what CI runs.
        python=$candidate
        [ "$candidate" = python3.11 ] && break
    fi
done
if [ -z "$python" ]; then
    echo "make-env: no Python 3.11 or later found; install one (Debian: apt-get install python3 python3-venv)" >&2
    exit 1
fi
if [ ! -x .venv/bin/python ]; then
    if ! "$python" -m venv .venv 2>/dev/null; then
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
pip="$PWD/.venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt"
# torch first and by its exact version: with it in place nothing else can ask for another build.
$pip "torch==$(sed -n 's/^torch==//p' constraints.txt)"
$pip --editable ".[$extras]"
# The lab needs nothing that is not there by now.
$pip --no-deps --editable lab
