#!/usr/bin/env bash
# Qwen3-0.6B on GSM8K, on one GPU: what `troll train gsm8k-qwen3-80gb` does, in verl. METHOD=clip for verl's own loss.
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-0.6B}
NGPUS_PER_NODE=${NGPUS_PER_NODE:-1}
source "$(dirname "$0")/gsm8k.sh"
train "$@"
