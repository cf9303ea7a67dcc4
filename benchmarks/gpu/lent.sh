#!/bin/bash
# All of `phalanx gpu-check` but D1 in about seven minutes of a lent GPU: what is timed first and alone, the rest side by side. Recovery from killed ranks runs twice: with the
# allocator as a run has it, and with segments of fixed sizes.
#
#     bash benchmarks/gpu/lent.sh FOLDER        FOLDER/lines.json, FOLDER/logs.tgz: anew after each group of parts, and few files, for a machine that is lent may give back few
#
# Each part has a limit, and what it leaves behind is killed before the next one.
set -u
out=$1
cd "$(dirname "$0")/../.." || exit
mkdir -p "$out"
parts=$(mktemp -d)
export PYTHONPATH=src:lab PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2

part() {  # name, seconds, checks
    name=$1 limit=$2
    shift 2
    timeout -k 2 $((limit + 4)) python3 -m phalanx gpu-check --limit-s "$limit" --only "$@" --json "$parts/$name.json" > "$parts/$name.log" 2>&1
    echo "$SECONDS s: $name ended with $?"
}
keep() {
    pkill -9 -f '^[^ ]*python3 -m phalanx gpu-check'
    sleep 0.3
    cat "$parts"/*.json > "$out/lines.json"
    tar -czf "$out/logs.tgz" -C "$parts" .
}

part timed 130 A1 A7 B D2
keep
part heal 150 C3 & part alone 110 A3 A4 & part counted 110 A5 A6
wait
keep
PYTORCH_ALLOC_CONF=expandable_segments:False part fixed 150 C3 & part order 120 C2 & part two 120 C1.two C1.four & part layers 120 C4 A2
wait
keep
cut -c 1-3000 "$parts/heal.json"
