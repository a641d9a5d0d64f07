#!/usr/bin/env bash
# Qwen3-8B on GSM8K, on one machine of eight GPUs.
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B}
ROLLOUT_TP=${ROLLOUT_TP:-2}
source "$(dirname "$0")/gsm8k.sh"
train "$@"
