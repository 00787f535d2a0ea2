#!/usr/bin/env bash
# Several machines, one line on each: NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 launch/torchrun_multinode.sh A.yaml [key=value ...]
#   NNODES          how many machines
#   NODE_RANK       which one this is, from 0
#   MASTER_ADDR     the address of machine 0, as the others reach it
#   MASTER_PORT     a free port on machine 0; default: 29500
#   NPROC_PER_NODE  workers on this machine; default: one per GPU, or per core where there is none
#   GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME: which network, if there are several
#   DRY_RUN=1       print the command, start nothing
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

check_configs "$@"
check_number NNODES 1 "how many machines, e.g. NNODES=2"
check_number NODE_RANK 0 "which machine this is, from 0"
[ "$NODE_RANK" -lt "$NNODES" ] || fail "NODE_RANK=$NODE_RANK: must be less than NNODES=$NNODES"
[ -n "${MASTER_ADDR:-}" ] || fail "MASTER_ADDR is not set; the address of machine 0, as the others reach it"

# At SIGTERM workers finish their round and save: more than torchrun's 30 s.
command=(torchrun --nnodes "$NNODES" --node_rank "$NODE_RANK" --nproc_per_node "${NPROC_PER_NODE:-auto}"
    --master_addr "$MASTER_ADDR" --master_port "${MASTER_PORT:-29500}" --shutdown_timeout 120
    -m cocod_accel.train "$@")
if is_dry_run "${command[@]}"; then exit; fi
exec "${command[@]}"
