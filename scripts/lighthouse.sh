#!/bin/sh
# Puts torchft into .venv for the tests of its lighthouse, which are skipped by name without it. Without the packages that torchft asks for: only its compiled part is used.
# Does nothing where it is there. There are wheels for some systems and Pythons only.
set -eu
cd "$(dirname "$0")/.."
if .venv/bin/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torchft") is None)'; then
    exit 0
fi
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: "torchft==$(sed -n 's/^torchft==//p' constraints.txt)"
