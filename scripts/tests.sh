#!/bin/sh
# Runs the tests: those that launch no ranks, in two processes beside each other (whatever uses emulated hosts is in the first); then those that launch ranks; then those
# that measure short times or shares of a core (`alone`), when nothing else runs.
# Every subject with some of its cases; with `all`, every case and the tests marked `slow` (tests/tiers.py), which takes much longer.
# Each process ends with its dearest tests; all come to their end. What has failed is run once more, by itself, and the exit status says whether something failed twice: ranks, links and
# disks of a busy machine have bad moments. What failed once stands in the output and is to be looked at.
set -u
cd "$(dirname "$0")/.."
fast="and not slow"
case "${1:-}" in
"") ;;
all) fast="" PHALANX_TESTS=all && export PHALANX_TESTS ;;
*) echo "$0: $1 is no word of it; all is" >&2 && exit 2 ;;
esac
tests() { # NAME MARKERS [FILE...]
    name=$1 && shift
    .venv/bin/python -m pytest -q --durations=25 -o cache_dir=.pytest_cache/"$name" --cache-clear -m "$@"
    status=$?
    [ "$status" = 1 ] || return "$status"
    echo "---- what has failed, once more"
    .venv/bin/python -m pytest -q -x -o cache_dir=.pytest_cache/"$name" --last-failed --last-failed-no-failures none -m "$@"
}
first="" second=""
for file in tests/*/test_*.py; do
    case "${file##*/}" in
    test_[a-o]*) first="$first $file" ;;
    *) if grep -qE 'testbed|emulated' "$file"; then first="$first $file"; else second="$second $file"; fi ;;
    esac
done
failed=0
said=$(mktemp)
tests second "not ranks and not alone $fast" $second >"$said" 2>&1 &
beside=$!
trap 'kill "$beside" 2>/dev/null; rm -f "$said"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
tests first "not ranks and not alone $fast" $first || failed=$?
wait "$beside" || failed=$?
cat "$said"
trap 'rm -f "$said"' EXIT
echo "---- tests that launch ranks"
tests ranks "ranks and not alone $fast" || failed=$?
echo "---- tests that run alone"
tests alone "alone $fast" || failed=$?
exit "$failed"
