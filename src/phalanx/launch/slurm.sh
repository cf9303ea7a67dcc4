#!/bin/bash
# An elastic run under SLURM: one `phalanx train` on each node, which supervises the ranks of that node.
#
#   sbatch --nodes=4 slurm.sh recipes/laptop.toml                      a run on 4 nodes
#   PHALANX_SERVICE=node17:29400 sbatch --nodes=2 slurm.sh SAME.toml   2 more nodes for a run that is under way
#
# Hosts of the run know each other by a file of mode 0600 that only you can read, on a file system that all nodes see; the first job writes it.
#
# The run shrinks when a node dies (--no-kill keeps the job, --kill-on-bad-exit=0 the step) and grows when another job brings nodes. Preemption sends SIGTERM
# first: the node's ranks then hand over what only they hold, and leave. All nodes need the same run.folder (a shared file system).
# Exit code 75: fewer ranks than RANKS_MINIMUM were left for too long; what they held is saved, and the job is queued again to go on.

#SBATCH --job-name=phalanx
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -u
RECIPE=${1:?usage: sbatch slurm.sh RECIPE.toml [--section.key VALUE ...]}
shift
RANKS=${RANKS:-4}                                   # of each node
WANTED=${WANTED:-$((RANKS * SLURM_JOB_NUM_NODES))}  # of the whole run when it begins: the same number for all jobs of one run
RANKS_MINIMUM=${RANKS_MINIMUM:-$RANKS}              # with fewer the run waits
MODE=${MODE:-fast}                                  # or exact: the bits of an undisturbed run
PORT=${PORT:-29400}
export PHALANX_CREDENTIALS="${PHALANX_CREDENTIALS:-$HOME/.phalanx-credentials.pem}"

service_pid=
if [ -z "${PHALANX_SERVICE:-}" ]; then
    # Beside the ranks, not inside one of them. It lives as long as this script, which SLURM ends with the first node.
    PHALANX_SERVICE=$(hostname -s):$PORT
    [ -e "$PHALANX_CREDENTIALS" ] || phalanx service --new-credentials "$PHALANX_CREDENTIALS"
    phalanx service "$PHALANX_SERVICE" &
    service_pid=$!
fi
trap '[ -n "$service_pid" ] && kill "$service_pid"' EXIT
echo "membership service at $PHALANX_SERVICE"

# Nodes below one switch fail together, where SLURM knows its switches (topology/tree: SLURM_TOPOLOGY_ADDR is then "switch.switch.node"): each node names those above it as its rack.
# Each node starts its supervisor again where that was lost although the node was not, or where the others removed its ranks and no new ones were started (69); it ends by itself when the run is over (0), when the recipe or the
# folder is wrong (2), when too few ranks are left (75) and after SIGTERM.
supervise='
    trap "kill -TERM \$pid; wait \$pid; exit" TERM
    rack=
    case "${SLURM_TOPOLOGY_ADDR_PATTERN:-}" in *switch.node) rack=${SLURM_TOPOLOGY_ADDR%.*} ;; esac
    case "$rack" in *[!A-Za-z0-9_.-]*) rack= ;; esac  # a node below several switches
    while true; do
        phalanx train "$@" --launch.host "$(hostname -s)" ${rack:+--launch.rack "$rack"} &
        pid=$!
        wait $pid
        code=$?
        case $code in 0 | 2 | 75) exit $code ;; esac
        sleep 5
    done'

srun --kill-on-bad-exit=0 --wait=0 bash -c "$supervise" supervise "$RECIPE" \
    --resilience.heal true \
    --resilience.mode "$MODE" \
    --resilience.service "$PHALANX_SERVICE" \
    --resilience.wanted "$WANTED" \
    --resilience.minimum "$RANKS_MINIMUM" \
    --resilience.wait_s 1800 \
    --launch.ranks "$RANKS" \
    --observe.console plain \
    "$@"
code=$?

if [ "$code" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
