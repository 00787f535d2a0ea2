#!/usr/bin/env bash
# One task of launch/slurm.sbatch: what Slurm calls a task, torch calls a rank.
set -euo pipefail
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
export LOCAL_WORLD_SIZE=${SLURM_STEP_TASKS_PER_NODE%%[(,]*}
exec "${PYTHON:-python}" -m cocod_accel.train "$@"
