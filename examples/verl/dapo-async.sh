#!/usr/bin/env bash
# Qwen3-8B on DAPO-Math-17k, with rollouts that do not wait for updates: four GPUs generate and four train, by verl's
# separate_async trainer. A rollout may be some updates old when it is trained on, so the policy that sampled it is
# the anchor.
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B-Base}
ANCHOR=${ANCHOR:-rollout}
NNODES=${NNODES:-1}                    # machines that train
NGPUS_PER_NODE=${NGPUS_PER_NODE:-4}
NNODES_ROLLOUT=${NNODES_ROLLOUT:-1}    # machines that generate
N_GPUS_ROLLOUT=${N_GPUS_ROLLOUT:-4}    # on each of them
ROLLOUT_TP=${ROLLOUT_TP:-2}
OFFLOAD=${OFFLOAD:-True}
# verl takes a mini-batch at a time, and sends the weights to the rollout after so many.
PARAMETER_SYNC_STEP=${PARAMETER_SYNC_STEP:-4}
PPO_MINI_BATCH_SIZE=${PPO_MINI_BATCH_SIZE:-32}
TRAIN_BATCH_SIZE=$((PARAMETER_SYNC_STEP * PPO_MINI_BATCH_SIZE))
source "$(dirname "$0")/dapo.sh"
train \
  data.gen_batch_size=1 \
  trainer.v1.trainer_mode=separate_async \
  trainer.v1.separate_async.parameter_sync_step="$PARAMETER_SYNC_STEP" \
  trainer.v1.sampler.max_off_policy_threshold="${MAX_OFF_POLICY_THRESHOLD:-8}" \
  actor_rollout_ref.rollout.nnodes="$NNODES_ROLLOUT" \
  actor_rollout_ref.rollout.n_gpus_per_node="$N_GPUS_ROLLOUT" \
  actor_rollout_ref.rollout.checkpoint_engine.backend="${CHECKPOINT_ENGINE:-nccl}" \
  "$@"
