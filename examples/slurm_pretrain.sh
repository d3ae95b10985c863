#!/usr/bin/env bash
# Runs a pretrain example on several nodes under Slurm, one torchrun per node:
#     sbatch --nodes=4 examples/slurm_pretrain.sh --num-layers 32 --hidden-size 4096 ...
# Submit from the root of the checkout. SCRIPT names another example than the swap one; NPROC, TP, PP, DEVICE and
# TRAIN_ITERS reach it through the environment; all arguments are passed on.
#SBATCH --job-name=pretrain-gpt-swap
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
set -euo pipefail

# Slurm runs a copy of this file from its spool folder, so the checkout is where sbatch was called.
cd "${SLURM_SUBMIT_DIR:?start this file with sbatch or inside salloc}"
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

export SCRIPT=${SCRIPT:-examples/pretrain_gpt_swap.sh}
export DEVICE=${DEVICE:-cuda}
export NPROC=${NPROC:-${SLURM_GPUS_ON_NODE:-8}}
export NNODES=$SLURM_JOB_NUM_NODES
export MASTER_ADDR=${hosts[0]:?scontrol named no host}
# The port follows from the job, so that two jobs that share a node do not meet.
export MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}

# NODE_RANK differs between nodes, so it is set inside the task. One rank that dies ends the job on every node.
# shellcheck disable=SC2016
exec srun --ntasks="$NNODES" --ntasks-per-node=1 --kill-on-bad-exit=1 \
    bash -c 'NODE_RANK=$SLURM_NODEID exec "$SCRIPT" "$@"' "$SCRIPT" "$@"
