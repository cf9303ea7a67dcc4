#!/bin/sh
# Runs the tests of numbers on the paths that other processors take: kernels, optimizer, models against transformers, sums that have to be the same bits.
# Arguments: which (default: plain avx2).
#   plain    no vector instructions beyond SSE: torch's and numpy's own plain kernels, oneDNN, and the compiled kernels for any x86-64
#   avx2     a processor without AVX-512
#   avx512   one with AVX-512 and without its bf16 instructions or AMX; only where this processor has AVX-512
# They run beside each other, one on each of two cores. Tests of the compiling itself are left to `make test`: they are the same on every path.
# A processor can only be told to do less than it can, so on a machine with AVX2 alone `avx2` is what `make test` runs anyway.
set -eu
cd "$(dirname "$0")/.."
PY=.venv/bin/python
names="test_kernels_*.py test_optim.py test_optim_step.py test_model_decoder.py test_families_parity.py test_latent.py test_router.py test_exact_parts.py test_context_parallel_kernels.py"
files=""
for name in $names; do
    found=$(find tests -name "$name")
    [ -n "$found" ] || { echo "$0: no file below tests/ is named $name" >&2 && exit 2; }
    files="$files $found"
done
numpy_paths() { # names of what numpy has chosen for this processor
    $PY -c 'from numpy._core._multiarray_umath import __cpu_dispatch__ as names, __cpu_features__ as has; print(*(n for n in names if has.get(n)))'
}
compiler() { # FOLDER ARCHITECTURE: a c++ that compiles for that architecture and not for this processor; kept, so that the kernels are compiled once
    mkdir -p "$1"
    [ -x "$1/c++" ] && return
    real=$(command -v c++ || command -v g++ || command -v clang++) || return 0
    cat >"$1/c++" <<EOF
#!/bin/sh
for word; do
    shift
    case "\$word" in -march=native) word=-march=$2 ;; esac
    set -- "\$@" "\$word"
done
exec $real "\$@"
EOF
    chmod +x "$1/c++"
}
on() { # NAME TORCH ONEDNN MKL ARCHITECTURE NUMPY-WITHOUT
    compiler ".venv/processors/$1" "$5"
    # shellcheck disable=SC2086  # a list of files; exec, so that who ends this process ends pytest
    exec env PATH="$PWD/.venv/processors/$1:$PATH" ATEN_CPU_CAPABILITY="$2" ONEDNN_MAX_CPU_ISA="$3" MKL_ENABLE_INSTRUCTIONS="$4" NPY_DISABLE_CPU_FEATURES="$6" \
        $PY -m pytest -p no:cacheprovider --durations=5 -m "not slow and not ranks and not alone" \
        -k "not start_together and not without_a_home and not cannot_be_made and not found_again" $files
}
[ $# -gt 0 ] || set -- plain avx2
for which; do # the arguments are looked at before anything runs
    case "$which" in
    plain | avx2) ;;
    avx512) grep -qw avx512f /proc/cpuinfo || { echo "$0: this processor has no AVX-512, so that path cannot be run here; leave avx512 out" >&2 && exit 2; } ;;
    *) echo "$0: unknown processor '$which'; give plain, avx2 or avx512" >&2 && exit 2 ;;
    esac
done
said=$(mktemp -d)
trap 'for process in $running; do kill "$process" 2>/dev/null && wait "$process" || true; done; rm -rf "$said"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
running="" failed=0
for which; do
    case "$which" in
    plain) on plain default SSE41 SSE4_2 x86-64 "$(numpy_paths)" ;;
    avx2) on avx2 avx2 AVX2 AVX2 x86-64-v3 "$(numpy_paths | tr ' ' '\n' | grep -E '512|V4' | tr '\n' ' ')" ;;
    avx512) on avx512 avx512 AVX512_CORE AVX512 x86-64-v4 "" ;;
    esac >"$said/$which" 2>&1 &
    running="$running $!"
done
for process in $running; do
    status=0
    wait "$process" || status=$?
    echo "---- as a processor with $1"
    cat "$said/$1"
    [ "$status" = 0 ] || failed=$status
    for file in $files; do # pytest has a line for each that it runs anything of
        [ "$status" != 0 ] || grep -q "^$file " "$said/$1" || { echo "$0: no test of $file was selected" && failed=2; }
    done
    shift
done
running=""
exit "$failed"
