#!/bin/bash
# An elastic run under SLURM: one `phalanx train` on each node, which supervises the ranks of that node. `phalanx launch slurm` fills in the lines marked <-.
#
#   sbatch slurm.sh                                                  the recipe below
#   sbatch --nodes=4 slurm.sh recipes/laptop.toml --train.steps 500   another one, with settings
#   JOIN=4711 sbatch --nodes=2 slurm.sh                              2 more nodes for the run of job 4711
#
# All nodes need the same run.folder (a shared file system). Hosts of the run know each other by a file of mode 0600 that only you can read; the first job writes it.
#
#   a node dies, or is set DOWN   the others go on (--no-kill of the job and of the step, --kill-on-bad-exit=0)
#   preemption, scancel, requeue  SIGTERM reaches every process of the job: ranks hand over what only they hold, the last ones save, and the service ends after them
#   exit code 75                  fewer ranks than RANKS_MINIMUM were left for too long; what they held is saved, and the job is queued again
#   the first node dies           it has this script: SLURM ends the job and queues it again, and the run resumes from its newest sound checkpoint
#
# With GPUs a node's memory also holds the copies from which checkpoints are written, as large as the state of its ranks: --mem=0 asks for all that a node has, where a job gets less by itself.

#SBATCH --job-name=phalanx
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
##SBATCH --gpus-per-node=8
##SBATCH --partition=NAME
##SBATCH --account=NAME
##SBATCH --time=24:00:00
##SBATCH --mem=0
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -u
RECIPE=recipe.toml                                  # <-
PYTHON=${PYTHON:-python3}                           # <- of the environment that has Phalanx
DEVICE=${DEVICE:-cpu}                               # <- or cuda
RANKS=${RANKS:-4}                                   # <- of each node
first=${JOIN:-$SLURM_JOB_ID}
WANTED=${WANTED:-$((RANKS * $(squeue --noheader --jobs="$first" --format=%D)))}  # of the whole run when it begins
RANKS_MINIMUM=${RANKS_MINIMUM:-$RANKS}              # with fewer the run waits
MODE=${MODE:-fast}                                  # <- or exact: the bits of an undisturbed run
SETTINGS=()                                         # <- further settings of the recipe
if [ $# -gt 0 ]; then
    RECIPE=$1
    shift
fi
export PHALANX_CREDENTIALS="${PHALANX_CREDENTIALS:-$HOME/.phalanx-credentials.pem}"

# InfiniBand locks memory, and the limit may come from the node that the job was submitted on. Without it NCCL fails, or uses TCP and says so with NCCL_DEBUG=INFO alone (NET/Socket in the place of NET/IB).
[ "$DEVICE" = cpu ] || ulimit -l unlimited 2> /dev/null || echo "locked memory is limited to $(ulimit -l) KiB, which InfiniBand may not do with" >&2

address_of() { # of a node: its name where that resolves, else what SLURM calls it by, of IPv6 in brackets
    if getent hosts "$1" > /dev/null; then echo "$1"; else scontrol show node "$1" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p' | sed 's/.*:.*/[&]/'; fi
}

# The membership service lies beside the ranks, not inside one of them, on the first node of the run's first job, at a port of that job's.
SERVICE=$(address_of "$(squeue --noheader --jobs="$first" --format=%B)"):${PORT:-$((20000 + first % 10000))}
service=
if [ -z "${JOIN:-}" ]; then
    [ -e "$PHALANX_CREDENTIALS" ] || "$PYTHON" -m phalanx service --new-credentials "$PHALANX_CREDENTIALS"
    "$PYTHON" -m phalanx service "$SERVICE" --until-over &
    service=$!
fi
echo "job $SLURM_JOB_ID, start ${SLURM_RESTART_COUNT:-0}: membership service at $SERVICE"

# Nodes below one switch fail together, where SLURM knows its switches (topology/tree: SLURM_TOPOLOGY_ADDR is then "switch.switch.node"): each node names those above it as its rack.
# Each node starts its supervisor again where that was lost although the node was not, or where the others removed its ranks and no new ones were started (69); it ends by itself when the run is over (0), when the recipe or the
# folder is wrong (2), when too few ranks are left (75) and after SIGTERM.
supervise='
    told= pid=
    trap "told=1; kill -TERM \$pid 2> /dev/null" TERM
    rack=
    case "${SLURM_TOPOLOGY_ADDR_PATTERN:-}" in *switch.node) rack=${SLURM_TOPOLOGY_ADDR%.*} ;; esac
    case "$rack" in *[!A-Za-z0-9_.-]*) rack= ;; esac  # a node below several switches
    while [ -z "$told" ]; do
        "$PYTHON" -m phalanx train "$@" --launch.host "${SLURMD_NODENAME:-$(hostname -s)}" ${rack:+--launch.rack "$rack"} &
        pid=$!
        while kill -0 $pid 2> /dev/null; do sleep 1; done
        wait $pid
        code=$?
        case $code in
            0 | 2) exit $code ;;
            75) [ -n "${JOIN:-}" ] || scontrol requeue "$SLURM_JOB_ID"; exit $code ;;
        esac
        [ -n "$told" ] || sleep 5
    done
    exit $code'

export PYTHON
trap : TERM
srun --no-kill --kill-on-bad-exit=0 --wait=0 --cpus-per-task="$SLURM_CPUS_PER_TASK" bash -c "$supervise" supervise "$RECIPE" \
    --resilience.heal true \
    --resilience.mode "$MODE" \
    --resilience.service "$SERVICE" \
    --resilience.wanted "$WANTED" \
    --resilience.minimum "$RANKS_MINIMUM" \
    --resilience.wait_s 1800 \
    --checkpoint.fall_back true \
    --launch.ranks "$RANKS" \
    --launch.device "$DEVICE" \
    --observe.console plain \
    ${SETTINGS[@]+"${SETTINGS[@]}"} "$@" &
step=$!

# The service ends when the run is over. A node that SLURM has not missed yet (SlurmdTimeout) keeps the step: it is waited for 10 s at most.
left=10
while kill -0 $step 2> /dev/null && [ $left -gt 0 ]; do
    if [ -n "$service" ] && ! kill -0 "$service" 2> /dev/null; then left=$((left - 1)); fi
    sleep 1
done
if [ -n "$service" ]; then
    kill "$service" 2> /dev/null
    wait "$service" && exit 0 # all steps are done, whatever became of single nodes
fi
if scontrol show job "$SLURM_JOB_ID" | grep -q "PreemptTime=[0-9]"; then scontrol requeue "$SLURM_JOB_ID"; fi # it has left before SLURM took its nodes
[ $left -gt 0 ] || exit 1
wait $step
