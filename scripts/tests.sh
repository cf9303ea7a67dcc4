#!/bin/sh
# Runs the tests as two processes beside each other: those that launch ranks, which wait for each other much of the time, and all others, most of which keep one core busy.
# Then, one after the other, those that measure short times or shares of a core (`alone`). Each process ends with its 40 dearest tests; all come to their end, and the exit status says
# whether one has failed.
set -u
cd "$(dirname "$0")/.."
said=$(mktemp)
.venv/bin/python -m pytest -q --durations=40 -m "not ranks and not alone" >"$said" 2>&1 &
others=$!
trap 'kill "$others" 2>/dev/null; rm -f "$said"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
.venv/bin/python -m pytest -q --durations=40 -m "ranks and not alone"
status=$?
wait "$others"
other_status=$?
trap 'rm -f "$said"' EXIT
echo "---- tests that launch no ranks"
cat "$said"
[ "$status" -ne 0 ] || status=$other_status
echo "---- tests that run alone"
.venv/bin/python -m pytest -q --durations=10 -m alone || status=$?
exit "$status"
