#!/usr/bin/env bash
# Qwen3-30B-A3B on DAPO-Math-17k by Megatron, on one machine of eight GPUs, spread as verl's examples/dppo_trainer does.
# The experts that the rollout chose are chosen again in training: a trust region sees a change of routing as a change
# of policy.
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-30B-A3B-Base}
ENGINE=megatron
ROLLOUT_TP=${ROLLOUT_TP:-4}
OFFLOAD=${OFFLOAD:-True}
ROUTING_REPLAY_MODE=${ROUTING_REPLAY_MODE:-R3}  # or R2, those of the old-policy pass; or disabled
export CUDA_DEVICE_MAX_CONNECTIONS=1
source "$(dirname "$0")/dapo.sh"
train \
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size="${ACTOR_TP:-2}" \
  actor_rollout_ref.actor.megatron.pipeline_model_parallel_size="${ACTOR_PP:-1}" \
  actor_rollout_ref.actor.megatron.expert_model_parallel_size="${ACTOR_EP:-8}" \
  actor_rollout_ref.actor.megatron.expert_tensor_parallel_size="${ACTOR_ETP:-1}" \
  actor_rollout_ref.actor.megatron.router_replay.mode="$ROUTING_REPLAY_MODE" \
  actor_rollout_ref.rollout.enable_rollout_routing_replay="$([[ $ROUTING_REPLAY_MODE == R3 ]] && echo True || echo False)" \
  +actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype=fp32 \
  +actor_rollout_ref.actor.megatron.override_transformer_config.moe_permute_fusion=True \
  "$@"
