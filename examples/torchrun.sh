#!/bin/bash
# On every machine, with the same MASTER (a name that all of them resolve) and NODES, and its own NODE from 0 on:
#   NODES=2 NODE=0 MASTER=host0 bash examples/torchrun.sh examples/pretrain.yaml [section.key=value ...]
# When one machine is lost, stop the others and start all again: the run goes on from its last complete checkpoint.
# checkpoint.folder and the prepared data must lie on storage that every machine sees.
set -euo pipefail
cd "$(dirname "$0")/.."
run=${1:?name a run file}
shift

exec .venv/bin/torchrun --nnodes "${NODES:?how many machines}" --node-rank "${NODE:?which of them this is, from 0}" \
    --nproc-per-node "${PROCESSES:-gpu}" --master-addr "${MASTER:?the first machine}" --master-port "${PORT:-29500}" \
    -m megatron_dsv41 train --config "$run" "$@"
