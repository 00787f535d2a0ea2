#!/usr/bin/env bash
# Pods of an indexed Job: IMAGE=my/image:1 NNODES=4 NPROC_PER_NODE=4 CLAIM=runs launch/kubernetes/submit.sh A.yaml [key=value ...]
#   IMAGE           a container image with this package in it
#   NNODES          how many pods
#   NPROC_PER_NODE  workers, and GPUs, of each
#   CLAIM           a PersistentVolumeClaim that all pods can write to; run folders and your own YAML and data are there
#   JOB             its name; default: cocod
#   IFNAME          the pods' network; default: eth0
#   DRY_RUN=1       print the manifest, start nothing
# YAML files are looked for in the volume; configs/... come with the package.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=launch/common.sh
source "$here/../common.sh"

[ $# -gt 0 ] || fail "no configuration; give YAML files and key=value, e.g. configs/homogeneous_16gpu.yaml"
[ -n "${IMAGE:-}" ] || fail "IMAGE is not set; a container image with this package in it"
[ -n "${CLAIM:-}" ] || fail "CLAIM is not set; a PersistentVolumeClaim that all pods can write to"
check_number NNODES 2 "how many pods"
check_number NPROC_PER_NODE 1 "workers, and GPUs, of each pod"

ARGUMENTS=
for argument in "$@"; do
    argument=${argument//\\/\\\\}
    ARGUMENTS+="${ARGUMENTS:+, }\"${argument//\"/\\\"}\""
done
# shellcheck disable=SC2034  # by name, below
JOB=${JOB:-cocod} IFNAME=${IFNAME:-eth0}
text=$(<"$here/job.yaml")
for name in ARGUMENTS CLAIM IFNAME IMAGE JOB NNODES NPROC_PER_NODE; do
    text=${text//"\${$name}"/"${!name}"}
done
if [ "${DRY_RUN:-0}" = 1 ]; then
    echo "$text"
else
    kubectl apply -f - <<<"$text"
fi
