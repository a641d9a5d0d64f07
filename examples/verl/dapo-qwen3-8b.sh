#!/usr/bin/env bash
# Qwen3-8B on DAPO-Math-17k, from its base model, on one machine of eight GPUs.
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B-Base}
ROLLOUT_TP=${ROLLOUT_TP:-2}
OFFLOAD=${OFFLOAD:-True}
source "$(dirname "$0")/dapo.sh"
train "$@"
