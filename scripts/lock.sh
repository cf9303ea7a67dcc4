#!/bin/sh
# Writes requirements/*.txt anew: exact versions, with the hashes of all published files, of whatever `make env` installs but torch, which comes in several builds.
# From pyproject.toml and constraints.txt, with pip's own index where one is configured. For whoever changes a dependency.
set -eu
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check uv==0.13.9
index=${PIP_INDEX_URL:-$("$folder/venv/bin/pip" config get global.index-url 2>/dev/null || true)}

compile() { # a file, and the extras: writes the whole lock to it, or ends this script
    file=$1 && shift
    "$folder/venv/bin/uv" pip compile --quiet --universal --python-version 3.11 --constraint constraints.txt --generate-hashes \
        --no-annotate --no-header --no-emit-package torch ${index:+--index-url "$index"} "$@" pyproject.toml >"$file.all" || exit
    sed '/^#/d;/^$/d' "$file.all" >"$file"
}
# What torch's builds for CUDA need on top, a machine without a GPU does without.
pick() { # "only" or "but", and a file
    awk -v only="$1" '/^[^ ]/ { keep = (/^(cuda|nvidia)-/ ? "only" : "but") == only } keep' "$2"
}
without() { # two locks: the second, but what the first has
    awk '/^[^ ]/ { split($0, p, "=="); if (NR == FNR) there[p[1]]; keep = NR > FNR && !(p[1] in there) } keep' "$1" "$2"
}
write() { # a file of requirements/, from standard input
    { echo "# Made by \`make lock\`. Do not edit."; cat; } >"requirements/$1.txt"
}
compile "$folder/dev" --extra dev --extra bench --extra gpu --extra prometheus --extra service
compile "$folder/docs" --extra dev --extra docs --constraint "$folder/dev"
pick but "$folder/dev" | write dev
pick only "$folder/dev" | write cuda
pick but "$folder/docs" >"$folder/rest"
without "$folder/dev" "$folder/rest" | write docs
