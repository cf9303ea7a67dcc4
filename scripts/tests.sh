#!/bin/sh
# Runs the tests as two processes beside each other: those that launch ranks, which wait for each other much of the time, and all others, most of which keep one core busy.
# Each ends with its 40 dearest tests. The exit status is that of whichever failed; both come to their end.
set -u
cd "$(dirname "$0")/.."
said=$(mktemp)
.venv/bin/python -m pytest -q --durations=40 -m "not ranks" >"$said" 2>&1 &
others=$!
trap 'kill "$others" 2>/dev/null; rm -f "$said"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
.venv/bin/python -m pytest -q --durations=40 -m ranks
status=$?
wait "$others"
other_status=$?
echo "---- tests that launch no ranks"
cat "$said"
[ "$status" -ne 0 ] || status=$other_status
exit "$status"
