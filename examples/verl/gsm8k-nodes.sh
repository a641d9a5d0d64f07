#!/usr/bin/env bash
# Qwen3-32B on GSM8K, on several machines of eight GPUs. With Slurm: slurm.sh. Without:
#
# On the first machine:   ray start --head --port=6379
# On every other one:     ray start --address=FIRST:6379
# Then, on the first:     NNODES=4 bash examples/verl/gsm8k-nodes.sh
#
# The model, the data and this project's environment must be at the same paths on all of them; runs are written to
# trainer.default_local_dir, which should be on a shared file system.
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-32B}
NNODES=${NNODES:?how many machines}
SP_SIZE=${SP_SIZE:-2}
ROLLOUT_TP=${ROLLOUT_TP:-4}
source "$(dirname "$0")/gsm8k.sh"
train "$@"
