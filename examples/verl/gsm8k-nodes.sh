#!/usr/bin/env bash
# Qwen3-32B on several machines of eight GPUs. METHOD=clip for verl's own loss.
#
# On the first machine:   ray start --head --port=6379
# On every other one:     ray start --address=FIRST:6379
# Then, on the first:     NODES=4 bash examples/verl/gsm8k-nodes.sh
#
# The model, the data and this project's environment must be at the same paths on all of them; runs are written to
# trainer.default_local_dir, which should be on a shared file system.
set -euo pipefail
export MODEL=${MODEL:-Qwen/Qwen3-32B} GPUS=8 NODES=${NODES:?how many machines}
exec bash "$(dirname "$0")/gsm8k.sh" \
  actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
  "$@"
