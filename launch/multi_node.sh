#!/usr/bin/env bash
# Trains on the hosts of a hostfile, from the first of them, over ssh and pdsh: launch/multi_node.sh HOSTFILE [FLAGS...]
# Checkout, data and run directory have to stand under the same paths on all hosts; see docs/launching.md.
. "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

hostfile="${1:-}"
[ -n "$hostfile" ] || fail 2 "usage: launch/multi_node.sh HOSTFILE [FLAGS...]; hostfile.example shows the format"
if [ ! -f "$hostfile" ] || [ ! -r "$hostfile" ]; then fail 5 "no readable hostfile at $hostfile: nothing was started"; fi
check_hostfile "$hostfile"
hostfile="$(realpath "$hostfile")"
shift
command -v pdsh >/dev/null || fail 5 "pdsh is not installed (Debian: apt-get install pdsh)"
setup

# Variables reach the other hosts through this file alone, and DeepSpeed trips over a blank or a comment line in it.
mkdir -p runs
CODES="$(mktemp -d "$ROOT/runs/.exit-codes.XXXXXX")"
export DS_ENV_FILE="$CODES.env"
trap 'rm -rf -- "$CODES" "$DS_ENV_FILE"' EXIT
{
    grep -shE '^[A-Za-z_][A-Za-z0-9_]*=' "$HOME/.deepspeed_env" .deepspeed_env || true
    echo "CLAP_ZERO_EXIT_CODES=$CODES"
} >"$DS_ENV_FILE"

JOB_KIND=remote run_job deepspeed --hostfile "$hostfile" --force_multi --master_port "${MASTER_PORT:-29500}" \
    ${MASTER_ADDR:+--master_addr "$MASTER_ADDR"} \
    -m clap_zero.train --ds_config "${DS_CONFIG:-ds_configs/zero2.json}" "$@"
