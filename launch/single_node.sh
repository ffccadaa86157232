#!/usr/bin/env bash
# Trains on the GPUs of this machine (two CPU ranks where there is none). Arguments go to the training:
#   DS_CONFIG=ds_configs/zero3.json NUM_GPUS=4 launch/single_node.sh --config my_run.yaml --run_dir runs/mine
# CUDA_VISIBLE_DEVICES is honoured; NUM_GPUS takes the first of them.
. "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
setup
if [ -z "${NUM_GPUS:-}" ] && [ "$(num_devices)" = 0 ]; then NUM_GPUS=2; fi
run_job deepspeed ${MASTER_PORT:+--master_port "$MASTER_PORT"} ${NUM_GPUS:+--num_gpus "$NUM_GPUS"} \
    -m clap_zero.train --ds_config "${DS_CONFIG:-ds_configs/zero2.json}" "$@"
