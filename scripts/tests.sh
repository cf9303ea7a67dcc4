#!/bin/sh
# Runs the tests of a tier (tests/helpers/tiers.py), each once: no failure is run again. Arguments:
#   core            what `make test` takes (the default)
#   drawn MINUTES   processor minutes of the other tests, drawn by the seed of the day; the rest is named
#   all             every test with every case
# Tests that launch no ranks, then those that do, share the cores in two processes, file by file, the dearest first (tests/conftest.py); then
# come those marked `alone`, which measure rates and shares of a core: each says why.
set -u
cd "$(dirname "$0")/.."
case "${1:-core}" in
core) tier="--tier core" ;;
drawn) tier="--tier drawn --minutes ${2:-12}" ;;
all) tier="--tier all" PHALANX_TESTS=all && export PHALANX_TESTS ;;
*) echo "$0: '$1' is not a tier; give core, drawn or all" >&2 && exit 2 ;;
esac
PHALANX_SEED=${PHALANX_SEED:-$(date -u +%Y%m%d)} && export PHALANX_SEED # one seed for all processes, past midnight too
unset PYTHONDONTWRITEBYTECODE # each `phalanx train` would compile the whole package again
failed=0
tests() { # NAME WORDS...
    name=$1 && shift
    # shellcheck disable=SC2086  # a tier is several words
    .venv/bin/python -m pytest -q -o cache_dir=.pytest_cache/"$name" $tier "$@"
}
beside() { tests "$@" -n 2 --dist loadfile --no-loadscope-reorder; } # in two processes
if [ "${1:-core}" = drawn ]; then # one draw over everything
    beside drawn -m "not alone" || failed=$?
    [ "$failed" != 5 ] || failed=0 # few minutes may be too few for any test; the other tiers always have some
else
    echo "---- tests in one process"
    beside unit -m "not alone and not ranks and not testbed" || failed=$?
    echo "---- tests that launch ranks, runs and emulated hosts"
    beside ranks -m "not alone and (ranks or testbed)" tests/ranks tests/runs tests/lab || failed=$?
    echo "---- tests that run alone"
    alone=$(grep -rl --include='test_*.py' '@pytest\.mark\.alone(' tests) # to collect all takes longer than they do
    # shellcheck disable=SC2086  # a list of files
    tests alone -m alone $alone || failed=$?
fi
exit "$failed"
