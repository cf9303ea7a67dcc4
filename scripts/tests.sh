#!/bin/sh
# Runs the tests in three processes, one after the other: those that launch no ranks, those that do, and those that measure short times or shares of a core (`alone`).
# Every subject with some of its cases; with `all`, every case and the tests marked `slow` (tests/tiers.py): three times as long.
# `sh scripts/tests.sh beside` runs the first two beside each other: a third less time on two cores, and tests with limits of time have less of a machine to themselves.
# Each process ends with its 40 dearest tests; all come to their end, and the exit status says whether one has failed.
set -u
cd "$(dirname "$0")/.."
beside=no fast="and not slow"
for word in "$@"; do
    case "$word" in
    beside) beside=yes ;;
    all) fast="" PHALANX_TESTS=all && export PHALANX_TESTS ;;
    *) echo "$0: $word is no word of it; all and beside are" >&2 && exit 2 ;;
    esac
done
others() { .venv/bin/python -m pytest -q --durations=40 -m "not ranks and not alone $fast"; }
failed=0
if [ "$beside" = yes ]; then
    said=$(mktemp)
    others >"$said" 2>&1 &
    beside=$!
    trap 'kill "$beside" 2>/dev/null; rm -f "$said"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
else
    others || failed=$?
fi
echo "---- tests that launch ranks"
.venv/bin/python -m pytest -q --durations=40 -m "ranks and not alone $fast" || failed=$?
if [ "$beside" != no ]; then
    wait "$beside" || failed=$?
    trap 'rm -f "$said"' EXIT
    echo "---- tests that launch no ranks"
    cat "$said"
fi
echo "---- tests that run alone"
.venv/bin/python -m pytest -q --durations=10 -m "alone $fast" || failed=$?
exit "$failed"
