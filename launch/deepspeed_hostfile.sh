#!/usr/bin/env bash
# Machines of a DeepSpeed hostfile: HOSTFILE=launch/hostfile.example launch/deepspeed_hostfile.sh A.yaml [key=value ...]
# On one of them, with pdsh and ssh to all; or without ssh, on each of them with its own NODE_RANK and the first one's MASTER_ADDR.
#   HOSTFILE          lines such as "node1 slots=4"
#   NODE_RANK         without ssh: the line of this machine, from 0
#   MASTER_ADDR       without ssh: the address of the first; with ssh: default: asked of it
#   MASTER_PORT       a free port on the first; default: 29500
#   DEEPSPEED_CONFIG  default: configs/deepspeed/stage0.json
#   GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME: which network, if there are several. With ssh, GLOO_... goes into the file .deepspeed_env
#   DRY_RUN=1         print the command, start nothing
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

check_configs "$@"
[ -n "${HOSTFILE:-}" ] || fail "HOSTFILE is not set; a file with lines such as 'node1 slots=4', see launch/hostfile.example"
settings=${DEEPSPEED_CONFIG:-configs/deepspeed/stage0.json}
for file in "$HOSTFILE" "$settings"; do
    [ -f "$file" ] || fail "$file: no such file"
done
grep -Eq '^[^#[:space:]]+[[:space:]]+slots=[0-9]+' "$HOSTFILE" || fail "$HOSTFILE: holds no line such as 'node1 slots=4'"

command=(deepspeed --hostfile "$HOSTFILE" --master_port "${MASTER_PORT:-29500}")
[ -z "${MASTER_ADDR:-}" ] || command+=(--master_addr "$MASTER_ADDR")
if [ -n "${NODE_RANK:-}" ]; then
    check_number NODE_RANK 0 "the line of this machine in $HOSTFILE, from 0"
    [ -n "${MASTER_ADDR:-}" ] || fail "MASTER_ADDR is not set; the address of the first machine in $HOSTFILE"
    command+=(--no_ssh --node_rank "$NODE_RANK")
fi
command+=(--module cocod_accel.train "$@" --deepspeed_config "$settings")
if is_dry_run "${command[@]}"; then exit; fi
exec "${command[@]}"
