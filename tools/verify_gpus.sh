#!/usr/bin/env bash
# Check every layout of N GPUs over NCCL: outputs and gradients against recorded ones, then training against one GPU.
#
#   tools/verify_gpus.sh N [FOLDER]     FOLDER: a parity folder (default tests/data/parity/text_fp32)
#
# First tools/verify_parity.py, in fp32 with the definition of every op; then tools/verify_training.py in bf16 with our
# kernels: three runs of each layout beside the noise band of one GPU, and checkpoints to and from one GPU. What it
# prints are tables for docs/benchmarks.md. Exits with 1 if anything is out of tolerance or hangs.
# Environment: PYTHON, the interpreter (default .venv/bin/python); JOBS, layouts at a time (default 3: they share the
# GPUs); STEPS of training (default 30); RUNS of each layout (default 3); LOGS, a folder for the output of every run;
# DEVICE=cpu, the same on this machine's processor over gloo; NCCL_MULTI_RANK_GPU_ENABLE=1, where there are fewer GPUs
# than N, lets the ranks share them (NCCL 2.30 or later; CONTRIBUTING.md says more).
set -uo pipefail

gpus=${1:?usage: tools/verify_gpus.sh N [FOLDER]}
root=$(cd "$(dirname "$0")/.." && pwd)
folder=${2:-$root/tests/data/parity/text_fp32}
python=${PYTHON:-$root/.venv/bin/python}
device=${DEVICE:-cuda}
training=(--steps "${STEPS:-30}" --runs "${RUNS:-3}" --jobs "${JOBS:-3}")
[ "$device" = cpu ] && training+=(--precision fp32 --ops "*=ref" --width tiny)
[ -n "${LOGS:-}" ] && training+=(--logs "$LOGS")
cd "$root"

failed=0
"$python" tools/verify_parity.py "$gpus" --folder "$folder" --device "$device" --jobs "${JOBS:-3}" || failed=1
echo
"$python" tools/verify_training.py "$gpus" "${training[@]}" || failed=1
exit $failed
