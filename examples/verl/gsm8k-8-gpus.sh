#!/usr/bin/env bash
# Qwen3-8B on the eight GPUs of one machine. METHOD=clip for verl's own loss.
set -euo pipefail
export MODEL=${MODEL:-Qwen/Qwen3-8B} GPUS=8 NODES=1
exec bash "$(dirname "$0")/gsm8k.sh" \
  actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
  "$@"
