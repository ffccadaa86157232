#!/usr/bin/env bash
# Trains on the hosts of a hostfile, from the first of them, over ssh and pdsh: launch/multi_node.sh HOSTFILE [FLAGS...]
# Checkout, data and run directory have to stand under the same paths on all hosts; see docs/launching.md.
. "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

hostfile="${1:-}"
[ -n "$hostfile" ] || fail 2 "usage: launch/multi_node.sh HOSTFILE [FLAGS...]; hostfile.example shows the format"
shift
check_hostfile "$hostfile"
hostfile="$(realpath "$hostfile")"
command -v pdsh >/dev/null || fail 5 "pdsh is not installed (Debian: apt-get install pdsh)"
setup

mkdir -p runs
CODES="$(mktemp -d "$ROOT/runs/.exit-codes.XXXXXX")"
trap 'rm -rf -- "$CODES"' EXIT
JOB_KIND=remote run_job deepspeed --hostfile "$hostfile" --force_multi ${MASTER_PORT:+--master_port "$MASTER_PORT"} \
    ${MASTER_ADDR:+--master_addr "$MASTER_ADDR"} \
    -m clap_zero.train --ds_config "${DS_CONFIG:-ds_configs/zero2.json}" "$@"
