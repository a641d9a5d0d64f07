# shellcheck shell=bash
# Shared by the scripts of this folder. A script sets its own defaults, sources a task (gsm8k.sh or dapo.sh), which
# sources this, and calls `train` with its further settings. Names in capitals come from the environment, and are those
# of verl's own examples where verl has one:
#
#   METHOD=cispo MODEL_PATH=... NNODES=... LOGGER=console,wandb bash examples/verl/dapo-qwen3-4b.sh [settings of verl ...]
#
# Settings at the end of the command line win.
set -euo pipefail

METHOD=${METHOD:-troll}
ANCHOR=${ANCHOR:-old}             # the old policy, for every method: the network that scored the rollout; or `rollout`
ENGINE=${ENGINE:-fsdp}            # or megatron
INFER_BACKEND=${INFER_BACKEND:-vllm}
NNODES=${NNODES:-1}
NGPUS_PER_NODE=${NGPUS_PER_NODE:-8}
LOGGER=${LOGGER:-console,file}    # also wandb, trackio, tensorboard, ...: what `trainer.logger` takes, with commas
OFFLOAD=${OFFLOAD:-False}         # weights and optimizer in host memory while they are not used
KL_TARGET=${KL_TARGET:-}          # a completion's KL, which the rate follows, such as 5; empty for a constant rate
EXPERIMENT_NAME=${EXPERIMENT_NAME:-$TASK-$(basename "$MODEL_PATH")-$METHOD-$ANCHOR${KL_TARGET:+-kl$KL_TARGET}}

case $METHOD in
  # kl_bound is the one to tune; docs/verl.md lists the others. The penalty is a KL to the old policy at every token, and
  # no ball.
  troll|penalty) if [[ $METHOD == troll ]]; then region=(pull=projection kl_bound="${KL_BOUND:-0.05}")
                 else region=(pull=proximal kl_bound=inf); fi
                 region+=(regression_weight=1.0 top_k=64 mass_threshold=1e-5 anchor="$ANCHOR"
                          ${KL_TARGET:+kl_target="$KL_TARGET"})
                 SURROGATE=("+troll=$ENGINE" "${region[@]/#/actor_rollout_ref.actor.policy_loss.}") ;;
  # PPO's clip with DAPO's higher upper bound (arXiv 2503.14476). verl's default is 0.2 on both sides.
  clip) SURROGATE=(actor_rollout_ref.actor.policy_loss.loss_mode=vanilla
                   actor_rollout_ref.actor.clip_ratio_low=0.2
                   actor_rollout_ref.actor.clip_ratio_high=0.28) ;;
  # A binary KL divergence (arXiv 2602.04879) with the bound and the cap of the ratio of verl's examples/dppo_trainer,
  # which also has norm_adv_by_std_in_grpo=False and loss_agg_mode=seq-mean-token-sum-norm.
  dppo_kl) SURROGATE=(actor_rollout_ref.actor.policy_loss.loss_mode=dppo_kl
                      actor_rollout_ref.actor.clip_ratio_low=0.05
                      actor_rollout_ref.actor.clip_ratio_high=0.05
                      actor_rollout_ref.actor.clip_ratio_c=10000.0) ;;
  # The ratio of a sequence (arXiv 2507.18071), with the bounds and the aggregation of verl's examples/gspo_trainer.
  gspo) SURROGATE=(actor_rollout_ref.actor.policy_loss.loss_mode=gspo
                   actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean
                   actor_rollout_ref.actor.clip_ratio_low=3e-4
                   actor_rollout_ref.actor.clip_ratio_high=4e-4) ;;
  # A clipped weight that has no gradient (MiniMax-M1, arXiv 2506.13585), with the bounds of verl's
  # examples/cispo_trainer: none below, since 1 - 10 is negative.
  cispo) SURROGATE=(actor_rollout_ref.actor.policy_loss.loss_mode=cispo
                    actor_rollout_ref.actor.clip_ratio_low=10
                    actor_rollout_ref.actor.clip_ratio_high=0.2) ;;
  *) echo "METHOD must be troll, penalty, clip, dppo_kl, gspo or cispo, got $METHOD" >&2; exit 2 ;;
esac
if [[ $KL_TARGET && $METHOD != troll && $METHOD != penalty ]]; then
  echo "KL_TARGET goes with METHOD=troll or penalty: $METHOD is verl's own loss, which measures no KL" >&2
  exit 2
fi

case $ANCHOR in
  old) bypass=False ;;
  rollout) bypass=True ;;  # verl leaves the old-policy pass out, and takes the engine's log-probabilities
  *) echo "ANCHOR must be old or rollout, got $ANCHOR" >&2; exit 2 ;;
esac

case $ENGINE in
  fsdp) TRAINING=(actor_rollout_ref.actor.strategy=fsdp2
                  actor_rollout_ref.model.enable_gradient_checkpointing=True
                  actor_rollout_ref.actor.ulysses_sequence_parallel_size="${SP_SIZE:-1}"
                  actor_rollout_ref.actor.fsdp_config.param_offload="$OFFLOAD"
                  actor_rollout_ref.actor.fsdp_config.optimizer_offload="$OFFLOAD") ;;
  megatron) TRAINING=(model_engine=megatron
                      actor_rollout_ref.actor.megatron.param_offload="$OFFLOAD"
                      actor_rollout_ref.actor.megatron.optimizer_offload="$OFFLOAD"
                      actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full
                      actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform
                      actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1) ;;
  *) echo "ENGINE must be fsdp or megatron, got $ENGINE" >&2; exit 2 ;;
esac

# A storage unit of verl's queue is one process: two for each machine, and no fewer than verl's 8.
units=$((2 * NNODES > 8 ? 2 * NNODES : 8))

COMMON=(
  algorithm.adv_estimator=grpo
  algorithm.rollout_correction.bypass_mode="$bypass"
  data.train_files="$TRAIN_FILE"
  data.val_files="$TEST_FILE"
  data.train_batch_size="$TRAIN_BATCH_SIZE"
  data.max_prompt_length="$MAX_PROMPT_LENGTH"
  data.max_response_length="$MAX_RESPONSE_LENGTH"
  actor_rollout_ref.model.path="$MODEL_PATH"
  actor_rollout_ref.model.use_remove_padding=True
  actor_rollout_ref.actor.optim.lr="${ACTOR_LR:-1e-6}"
  actor_rollout_ref.actor.ppo_mini_batch_size="$PPO_MINI_BATCH_SIZE"
  actor_rollout_ref.actor.use_dynamic_bsz=True
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$PPO_MAX_TOKEN_LEN_PER_GPU"
  actor_rollout_ref.rollout.name="$INFER_BACKEND"
  actor_rollout_ref.rollout.tensor_model_parallel_size="${ROLLOUT_TP:-1}"
  actor_rollout_ref.rollout.gpu_memory_utilization="${ROLLOUT_GPU_MEM_UTIL:-0.5}"
  actor_rollout_ref.rollout.n="$ROLLOUT_N"
  transfer_queue.backend.SimpleStorage.num_data_storage_units="$units"
  trainer.n_gpus_per_node="$NGPUS_PER_NODE"
  trainer.nnodes="$NNODES"
  trainer.project_name="${PROJECT_NAME:-troll}"
  trainer.experiment_name="$EXPERIMENT_NAME"
  trainer.logger="[$LOGGER]"
  trainer.val_before_train=True
  trainer.save_freq="${SAVE_FREQ:-20}"
  trainer.test_freq="${TEST_FREQ:-10}"
)

# Takes settings of verl: the script's own, and then the command line's.
train() {
  local file
  for file in "$TRAIN_FILE" "$TEST_FILE"; do
    [[ -e $file || $file == *://* ]] || { echo "$file is missing: $HOW_TO_GET_FILES" >&2; exit 2; }
  done
  exec python -m verl.trainer.main_ppo \
    "${SURROGATE[@]}" "${TRAINING[@]}" "${COMMON[@]}" "${TASK_SETTINGS[@]}" "$@"
}
