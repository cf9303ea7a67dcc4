#!/bin/sh
# Writes requirements/*.txt anew: exact versions, with the hashes of all published files, of whatever `make env` installs but torch, which comes in several builds.
# From pyproject.toml and constraints.txt, with the package index that pip is configured for. For whoever changes a dependency.
set -eu
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
.venv/bin/python -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check uv

compile() { # the extras; prints the whole lock
    "$folder/venv/bin/uv" pip compile --quiet --universal --python-version 3.11 --constraint constraints.txt --generate-hashes \
        --no-annotate --no-header --no-emit-package torch "$@" pyproject.toml | sed '/^#/d;/^$/d'
}
# What torch's builds for CUDA need on top, a machine without a GPU does without.
pick() { # "only" or "but", and a file
    awk -v only="$1" '/^[^ ]/ { keep = (/^(cuda|nvidia)-/ ? "only" : "but") == only } keep' "$2"
}
write() { # a file of requirements/, from standard input
    { echo "# Made by \`make lock\`. Do not edit."; cat; } >"requirements/$1.txt"
}
compile --extra dev --extra bench --extra gpu --extra prometheus --extra service >"$folder/dev"
compile --extra dev --extra docs >"$folder/docs"
pick but "$folder/dev" | write dev
pick only "$folder/dev" | write cuda
pick but "$folder/docs" | write docs
