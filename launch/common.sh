# shellcheck shell=bash
# Sourced by the launchers: one line for what is wrong, and a dry run. No launcher has hyper-parameters: those are in the YAML files.

fail() {
    echo "error: $*" >&2
    exit 2
}

# Files that are there, and key=value.
check_configs() {
    [ $# -gt 0 ] || fail "no configuration; give YAML files and key=value, e.g. configs/quickstart.yaml"
    local argument
    for argument in "$@"; do
        case $argument in
            -*) fail "$argument: is no YAML file and no key=value; settings of a launcher are environment variables" ;;
            *=*) ;;
            *) [ -f "$argument" ] || fail "$argument: no such file; give YAML files and key=value" ;;
        esac
    done
}

# NAME LEAST WHAT: the variable NAME is a whole number of at least LEAST.
check_number() {
    [ -n "${!1:-}" ] || fail "$1 is not set; $3"
    [[ ${!1} =~ ^[0-9]+$ ]] && [ "${!1}" -ge "$2" ] || fail "$1=${!1}: must be a whole number of at least $2; $3"
}

# With DRY_RUN=1: print the command, with what it takes from the environment, and succeed.
is_dry_run() {
    [ "${DRY_RUN:-0}" = 1 ] || return 1
    local name line
    for name in GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME; do
        [ -z "${!name:-}" ] || printf '%s=%q ' "$name" "${!name}"
    done
    printf -v line ' %q' "$@"
    echo "${line:1}"
}
