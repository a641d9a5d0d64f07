# shellcheck shell=bash
# DAPO-Math-17k with AIME 2024 to evaluate on, for the scripts that source it: files, reward, lengths and optimizer of
# verl's DAPO recipe. Its dynamic sampling is algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc.
TASK=dapo
TRAIN_FILE=${TRAIN_FILE:-$HOME/verl/data/dapo-math-17k.parquet}
TEST_FILE=${TEST_FILE:-$HOME/verl/data/aime-2024.parquet}
hub=https://huggingface.co/datasets/BytedTsinghua-SIA
HOW_TO_GET_FILES="set TRAIN_FILE and TEST_FILE, or run verl's prepare_dapo_data.sh, or
  wget -P ~/verl/data $hub/DAPO-Math-17k/resolve/main/data/dapo-math-17k.parquet
  wget -P ~/verl/data $hub/AIME-2024/resolve/main/data/aime-2024.parquet"

# Eight updates for each rollout (both sizes are in prompts).
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-256}
PPO_MINI_BATCH_SIZE=${PPO_MINI_BATCH_SIZE:-32}
ROLLOUT_N=${ROLLOUT_N:-16}
MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-2048}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-8192}
PPO_MAX_TOKEN_LEN_PER_GPU=${PPO_MAX_TOKEN_LEN_PER_GPU:-20480}
ROLLOUT_GPU_MEM_UTIL=${ROLLOUT_GPU_MEM_UTIL:-0.6}

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

TASK_SETTINGS=(
  data.truncation=left
  actor_rollout_ref.actor.optim.lr_warmup_steps=10
  actor_rollout_ref.actor.optim.weight_decay=0.1
  actor_rollout_ref.rollout.max_num_batched_tokens=$((MAX_PROMPT_LENGTH + MAX_RESPONSE_LENGTH))
  actor_rollout_ref.rollout.val_kwargs.do_sample=True
  actor_rollout_ref.rollout.val_kwargs.temperature=1.0
  actor_rollout_ref.rollout.val_kwargs.top_p=0.7
  actor_rollout_ref.rollout.val_kwargs.n=1
  reward.reward_manager.name=dapo
  # The last half of the length is punished, more and more.
  +reward.reward_kwargs.max_resp_len="$MAX_RESPONSE_LENGTH"
  +reward.reward_kwargs.overlong_buffer_cfg.enable=True
  +reward.reward_kwargs.overlong_buffer_cfg.len=$((MAX_RESPONSE_LENGTH / 2))
  +reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0
  +reward.reward_kwargs.overlong_buffer_cfg.log=False
  trainer.total_training_steps="${TOTAL_TRAINING_STEPS:-300}"
)
