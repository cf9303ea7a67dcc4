#!/bin/sh
# Training speed of this tree over that of another commit: scripts/against.sh REV [PAIRS] [FILE.json]
# Makes a work tree of REV in .against/ with an environment of its own, and alternates whole `phalanx train` processes of both (scripts/against.py).
set -eu
cd "$(dirname "$0")/.."
rev=$(git rev-parse --verify --short=12 "${1:?usage: scripts/against.sh REV [PAIRS] [FILE.json]}^{commit}")
pairs=${2:-10}
other=.against/$rev
[ -d "$other" ] || git worktree add --detach "$other" "$rev"
# Both run with the versions that this tree pins, so that only our code differs.
cp constraints.txt "$other/constraints.txt"
[ -x "$other/.venv/bin/phalanx" ] || sh "$other/scripts/make-env.sh"
exec .venv/bin/python scripts/against.py "$other" --pairs "$pairs" --json "${3:-.against/$rev.json}"
