#!/usr/bin/env bash
# GRPO on GSM8K with verl, by TROLL or by the clip: what the other scripts of this folder have in common. With
# Qwen3-0.6B it is the experiment of `troll train gsm8k-qwen3-80gb`, in verl.
#
#   METHOD=troll|clip MODEL=... DATA=... GPUS=... NODES=... bash examples/verl/gsm8k.sh [settings of verl ...]
#
# Settings at the end of the command line win.
set -euo pipefail
METHOD=${METHOD:-troll}
MODEL=${MODEL:?a model on the Hugging Face hub, or a folder}
DATA=${DATA:-data/gsm8k}
GPUS=${GPUS:-1}
NODES=${NODES:-1}

case $METHOD in
  # The whole difference. kl_bound is the one to tune; docs/verl.md lists the others.
  troll) surrogate=('hydra.searchpath=[pkg://troll.verl.config]' +troll=fsdp
                    actor_rollout_ref.actor.policy_loss.kl_bound="${KL_BOUND:-0.05}"
                    actor_rollout_ref.actor.policy_loss.regression_weight=1.0
                    actor_rollout_ref.actor.policy_loss.top_k=64
                    actor_rollout_ref.actor.policy_loss.mass_threshold=1e-5) ;;
  clip)  surrogate=() ;;
  *) echo "METHOD must be troll or clip, got $METHOD" >&2; exit 2 ;;
esac

[ -e "$DATA/train.parquet" ] || { echo "$DATA/train.parquet is missing: python examples/verl/prepare.py gsm8k $DATA" >&2; exit 2; }

# Eight updates per rollout (train_batch_size / ppo_mini_batch_size, both in prompts): with one, old and new policy would
# be equal. Five epochs are 145 rollouts.
exec python -m verl.trainer.main_ppo "${surrogate[@]}" \
  algorithm.adv_estimator=grpo \
  data.train_files="$DATA/train.parquet" \
  data.val_files="$DATA/test.parquet" \
  data.train_batch_size=256 \
  data.max_prompt_length=512 \
  data.max_response_length=1024 \
  +data.apply_chat_template_kwargs.enable_thinking=False \
  actor_rollout_ref.model.path="$MODEL" \
  actor_rollout_ref.model.use_remove_padding=True \
  actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.actor.strategy=fsdp2 \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.optim.lr_scheduler_type=constant \
  actor_rollout_ref.actor.optim.weight_decay=0.01 \
  actor_rollout_ref.actor.ppo_mini_batch_size=32 \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192 \
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=8192 \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
  actor_rollout_ref.rollout.val_kwargs.do_sample=False \
  actor_rollout_ref.rollout.val_kwargs.temperature=0 \
  actor_rollout_ref.rollout.val_kwargs.n=1 \
  reward.custom_reward_function.path=pkg://troll.rewards.math \
  reward.custom_reward_function.name=compute_score \
  trainer.n_gpus_per_node="$GPUS" \
  trainer.nnodes="$NODES" \
  trainer.project_name=troll \
  trainer.experiment_name="gsm8k-$METHOD" \
  'trainer.logger=[console,file]' \
  trainer.val_before_train=True \
  trainer.test_freq=10 \
  trainer.save_freq=20 \
  trainer.total_epochs=5 \
  "$@"
