#!/usr/bin/env bash
# Any script of this folder on several machines of a Slurm cluster: Ray on all of them, the script on the first.
#
#   METHOD=troll sbatch --nodes=4 examples/verl/slurm.sh examples/verl/gsm8k-nodes.sh [settings of verl ...]
#
# Submit it where `python` and `ray` (2.49 or later) are those of this project's environment. The folder, the model and
# the data must be at the same paths on all machines. NNODES is the number of machines unless it is set, as it must be
# for dapo-async.sh, which divides them: NNODES=2 NNODES_ROLLOUT=2 NGPUS_PER_NODE=8 N_GPUS_ROLLOUT=8.
#SBATCH --job-name=troll
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.out
set -euo pipefail
script=${1:?a script of this folder}

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# Not the name, which a machine may resolve to its loopback.
address=$(srun --nodes=1 --ntasks=1 --nodelist="$first" hostname -I | cut -d ' ' -f 1)
export NNODES=${NNODES:-$SLURM_NNODES} NGPUS_PER_NODE=${NGPUS_PER_NODE:-$SLURM_GPUS_ON_NODE}

# It runs what follows `--` on the first machine once the others are there, and stops Ray on all when that ends.
srun --ntasks-per-node=1 ray symmetric-run --address="$address:6379" --min-nodes="$SLURM_NNODES" \
  --num-gpus="$SLURM_GPUS_ON_NODE" -- bash "$script" "${@:2}"
