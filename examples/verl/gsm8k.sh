# shellcheck shell=bash
# GSM8K for the scripts that source it. With Qwen3-0.6B it is the experiment of `troll train gsm8k-qwen3-80gb`, in verl.
TASK=gsm8k
TRAIN_FILE=${TRAIN_FILE:-data/gsm8k/train.parquet}
TEST_FILE=${TEST_FILE:-data/gsm8k/test.parquet}
HOW_TO_GET_FILES="python examples/verl/prepare.py gsm8k data/gsm8k, or set TRAIN_FILE and TEST_FILE"

# Eight updates for each rollout (both sizes are in prompts): with one, old and new policy would be equal.
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-256}
PPO_MINI_BATCH_SIZE=${PPO_MINI_BATCH_SIZE:-32}
ROLLOUT_N=${ROLLOUT_N:-8}
MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-512}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-1024}
PPO_MAX_TOKEN_LEN_PER_GPU=${PPO_MAX_TOKEN_LEN_PER_GPU:-8192}

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

TASK_SETTINGS=(
  +data.apply_chat_template_kwargs.enable_thinking=False
  actor_rollout_ref.actor.optim.lr_scheduler_type=constant
  actor_rollout_ref.actor.optim.weight_decay=0.01
  actor_rollout_ref.rollout.val_kwargs.do_sample=False
  actor_rollout_ref.rollout.val_kwargs.temperature=0
  actor_rollout_ref.rollout.val_kwargs.n=1
  reward.custom_reward_function.path=pkg://troll_lab.rewards.mathematics
  reward.custom_reward_function.name=compute_score
  trainer.total_epochs="${TOTAL_EPOCHS:-5}"  # of 29 rollouts each
)
