#!/usr/bin/env bash
# Four methods, and what a KL target changes: Qwen3-4B on DAPO-Math-17k, on one machine of eight GPUs, one run after the
# other. docs/study/scaling.md says what this would answer, what it needs, and where to send the results.
#
#   bash examples/verl/compare.sh                          # six runs of 100 steps
#   RUNS="troll troll:5" bash examples/verl/compare.sh     # a method, or a method and its KL target
#   bash examples/verl/compare.sh --cfg job                # a trial: prints the configurations; needs the data
#
# Everything else is as in dapo-qwen3-4b.sh, which makes the runs, in the environment and at the end of the command line.
# The same command resumes. A run that fails does not stop the others.
set -uo pipefail
trap 'exit 130' INT

# In bfloat16 the rounding of four thousand tokens would hide a much smaller target.
RUNS=${RUNS:-troll:5 troll penalty:5 penalty clip cispo}
export TOTAL_TRAINING_STEPS=${TOTAL_TRAINING_STEPS:-100}
unset EXPERIMENT_NAME  # each run has its own

failed=()
for run in $RUNS; do
  target=${run#"${run%%:*}"}
  METHOD=${run%%:*} KL_TARGET=${target#:} bash "$(dirname "$0")/dapo-qwen3-4b.sh" \
    trainer.max_actor_ckpt_to_keep=2 "$@" || failed+=("$run")
done
if [[ ${failed[*]:-} ]]; then
  echo "failed: ${failed[*]}" >&2
  exit 1
fi
