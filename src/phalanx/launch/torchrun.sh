#!/bin/bash
# A run on machines that you log in to, by torchrun, with any mapping. `phalanx launch torchrun` fills in the lines marked <-. Start it on every machine, the same file:
#
#   NODE=0 HEAD=host0 bash torchrun.sh      on host0
#   NODE=1 HEAD=host0 bash torchrun.sh      on the next one, and so on
#
# All machines need the same run.folder and data.cache (a shared file system), and PORT of HEAD open to each other. A rank that dies ends the others; the same
# command resumes from the newest sound checkpoint. SIGTERM and Ctrl-C: the step under way is finished and saved.

set -u
RECIPE=recipe.toml           # <-
PYTHON=${PYTHON:-python3}    # <- of the environment that has Phalanx
DEVICE=${DEVICE:-cpu}        # <- or cuda
NODES=${NODES:-2}            # <-
RANKS=${RANKS:-4}            # <- of each machine
PORT=${PORT:-29500}
HEAD=${HEAD:-127.0.0.1}      # by which all machines reach the first one
NODE=${NODE:-0}              # number of this machine
SETTINGS=()                  # <- further settings of the recipe
# export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0      where the wrong network interface is chosen

exec "$PYTHON" -m torch.distributed.run --nnodes "$NODES" --node-rank "$NODE" --nproc-per-node "$RANKS" \
    --master-addr "$HEAD" --master-port "$PORT" -m phalanx train "$RECIPE" \
    --checkpoint.fall_back true \
    --launch.device "$DEVICE" \
    --observe.console plain \
    ${SETTINGS[@]+"${SETTINGS[@]}"} "$@"
