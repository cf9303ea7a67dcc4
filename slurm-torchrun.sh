#!/bin/bash
# A run on a fixed set of nodes under SLURM: one torchrun on each node, with any mapping. `phalanx launch slurm --fixed` fills in the lines marked <-.
#
#   sbatch slurm-torchrun.sh                                                  the recipe below
#   sbatch --nodes=4 slurm-torchrun.sh recipes/laptop.toml --train.steps 500   another one, with settings
#
# All nodes need the same run.folder and data.cache (a shared file system).
#
#   a rank or a node dies         the step ends; the job is queued again (RESTARTS times at most) and resumes from its newest sound checkpoint
#   preemption, scancel, requeue  SIGTERM reaches every rank: the step under way is finished and saved
#
# With GPUs a node's memory also holds the copies from which checkpoints are written, as large as the state of its ranks: --mem=0 asks for all that a node has, where a job gets less by itself.

#SBATCH --job-name=qwen3-235b-a22b-128
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --gpus-per-node=8
##SBATCH --partition=NAME
##SBATCH --account=NAME
##SBATCH --time=24:00:00
##SBATCH --mem=0
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -u
RECIPE=qwen3-235b-a22b-128          # <-
PYTHON=${PYTHON:-/work/main/.venv/bin/python}   # <- of the environment that has Phalanx
DEVICE=${DEVICE:-cuda}       # <- or cuda
RANKS=${RANKS:-8}           # <- of each node
RESTARTS=${RESTARTS:-3}     # how often a job that failed is queued again
SETTINGS=()                 # <- further settings of the recipe
if [ $# -gt 0 ]; then
    RECIPE=$1
    shift
fi

# InfiniBand locks memory, and the limit may come from the node that the job was submitted on. Without it NCCL fails, or uses TCP and says so with NCCL_DEBUG=INFO alone (NET/Socket in the place of NET/IB).
[ "$DEVICE" = cpu ] || ulimit -l unlimited 2> /dev/null || echo "locked memory is limited to $(ulimit -l) KiB, which InfiniBand may not do with" >&2

address_of() { # of a node: its name where that resolves, else what SLURM calls it by
    if getent hosts "$1" > /dev/null; then echo "$1"; else scontrol show node "$1" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p'; fi
}

HEAD=$(address_of "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)")
PORT=${PORT:-$((20000 + SLURM_JOB_ID % 10000))}
echo "job $SLURM_JOB_ID, start ${SLURM_RESTART_COUNT:-0}: ranks meet at $HEAD:$PORT"

torchrun='exec "$PYTHON" -m torch.distributed.run --nnodes "$SLURM_JOB_NUM_NODES" --node-rank "$SLURM_NODEID" --nproc-per-node "$RANKS" \
    --master-addr "$HEAD" --master-port "$PORT" -m phalanx train "$@"'

export PYTHON RANKS HEAD PORT
told=
trap told=1 TERM
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" bash -c "$torchrun" torchrun "$RECIPE" \
    --checkpoint.fall_back true \
    --launch.device "$DEVICE" \
    --observe.console plain \
    ${SETTINGS[@]+"${SETTINGS[@]}"} "$@" &
step=$!
while kill -0 $step 2> /dev/null; do sleep 1; done
wait $step
code=$?
if scontrol show job "$SLURM_JOB_ID" | grep -q "PreemptTime=[0-9]"; then
    scontrol requeue "$SLURM_JOB_ID" # it has saved before SLURM took its nodes
elif [ "$code" -ne 0 ] && [ -z "$told" ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "$RESTARTS" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
