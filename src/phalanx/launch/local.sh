#!/bin/bash
# A run on this machine that goes on when you log out. `phalanx launch local` fills in the lines marked <-.
#
#   bash local.sh                       here, with a screen
#   nohup bash local.sh > run.log &     beside what you do; kill PID finishes the step and saves
#
# Where the mapping allows it (the line "recovery" of `phalanx launch`), a rank that dies is replaced while the others go on; else the same command resumes from
# the newest sound checkpoint.

set -u
RECIPE=recipe.toml           # <-
PYTHON=${PYTHON:-python3}    # <- of the environment that has Phalanx
DEVICE=${DEVICE:-cpu}        # <- or cuda
RANKS=${RANKS:-4}            # <-
SETTINGS=()                  # <- further settings of the recipe

exec "$PYTHON" -m phalanx train "$RECIPE" \
    --checkpoint.fall_back true \
    --launch.ranks "$RANKS" \
    --launch.device "$DEVICE" \
    ${SETTINGS[@]+"${SETTINGS[@]}"} "$@"
