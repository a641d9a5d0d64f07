#!/usr/bin/env bash
# Qwen3-0.6B on one GPU: what `troll train gsm8k-qwen3-80gb` does, in verl. METHOD=clip for verl's own loss.
set -euo pipefail
export MODEL=${MODEL:-Qwen/Qwen3-0.6B} GPUS=1 NODES=1
exec bash "$(dirname "$0")/gsm8k.sh" \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  "$@"
