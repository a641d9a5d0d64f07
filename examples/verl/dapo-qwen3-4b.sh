#!/usr/bin/env bash
# Qwen3-4B on DAPO-Math-17k, from its base model as DAPO starts, on one machine of eight GPUs.
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-4B-Base}
source "$(dirname "$0")/dapo.sh"
train "$@"
