#!/bin/bash
# All of `phalanx gpu-check` but D1 in about seven minutes of a lent GPU: what is timed first and alone, the rest side by side.
#
#     bash benchmarks/gpu/lent.sh FOLDER        lines of JSON per part in FOLDER, as they come
#
# Each part has a limit, and what it leaves behind is killed before the next one.
set -u
out=$1
cd "$(dirname "$0")/../.." || exit
mkdir -p "$out"
export PYTHONPATH=src:lab PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2

part() {  # name, seconds, checks
    name=$1 limit=$2
    shift 2
    timeout -k 2 $((limit + 4)) python3 -m phalanx gpu-check --limit-s "$limit" --only "$@" --json "$out/$name.json" > "$out/$name.log" 2>&1
    echo "$SECONDS s: $name ended with $?"
}
clean() { pkill -9 -f 'phalanx gpu-check'; sleep 0.3; }

part timed 110 A1 B D2
clean
part heal 110 C3 & part alone 110 A3 A4 & part counted 110 A5 A6 A7
wait
clean
part order 120 C2 & part two 120 C1.two C1.four & part layers 120 C4 A2
wait
clean
