#!/usr/bin/env bash
# Qwen3-0.6B on one GPU. METHOD=clip for verl's own loss.
set -euo pipefail
export MODEL=${MODEL:-Qwen/Qwen3-0.6B} GPUS=1 NODES=1
exec bash "$(dirname "$0")/gsm8k.sh" \
  data.train_batch_size=256 \
  actor_rollout_ref.actor.ppo_mini_batch_size=32 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  "$@"
