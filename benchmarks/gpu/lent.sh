#!/bin/bash
# All of `phalanx gpu-check` but D1 in about eight minutes of a lent GPU: what is timed alone, the rest side by side. Recovery from killed ranks comes first, and runs twice: with the
# allocator as a run has it, and with segments of fixed sizes. What its members recorded, and what NCCL said to them, is in the logs.
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

part() {  # name, seconds, checks: no check begins or runs on after so many seconds of the first one, which begins after the imports
    name=$1 limit=$2
    shift 2
    timeout -k 2 $((limit + 30)) python3 -m phalanx gpu-check --limit-s "$limit" --only "$@" --json "$parts/$name.json" > "$parts/$name.log" 2>&1
    echo "$SECONDS s: $name ended with $?"
}
recovery() {  # name
    NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,NET NCCL_DEBUG_FILE="$parts/$1.nccl.%p" part "$1" 150 C3 --keep "$parts/$1.kept"
}
keep() {
    pkill -9 -f '^[^ ]*python3 -m phalanx gpu-check'
    sleep 0.3
    cat "$parts"/*.json > "$out/lines.json"
    tar -czf "$out/logs.tgz" -C "$parts" .
}

recovery heal & part alone 150 A3 A4 & part counted 110 A5 A6
wait
keep
part timed 130 A1 A7 B D2
keep
PYTORCH_ALLOC_CONF=expandable_segments:False recovery fixed & part layers 120 C4 A2
wait
keep
part order 120 C2 & part two 120 C1.two C1.four
wait
keep
cut -c 1-150 "$out/lines.json"
cut -c 1-4000 "$parts/fixed.json" "$parts/heal.json"
