#!/usr/bin/env bash
# Check every layout of N GPUs over NCCL: outputs and gradients against recorded ones, then training against one GPU.
#
#   tools/verify_gpus.sh N [FOLDER]     FOLDER: a parity folder (default tests/data/parity/text_fp32)
#
# First `dsv41 parity` in fp32 with the definition of every op, one line per layout; then tools/verify_training.py in
# bf16 with our kernels, checkpoints to and from one GPU included. Exits with 1 if anything is out of tolerance.
# Environment: PYTHON, the interpreter (default .venv/bin/python); JOBS, layouts at a time (default 3: they share the
# GPUs); STEPS of training (default 30); LOGS, a folder for the output of every run.
set -uo pipefail

gpus=${1:?usage: tools/verify_gpus.sh N [FOLDER]}
root=$(cd "$(dirname "$0")/.." && pwd)
export folder=${2:-$root/tests/data/parity/text_fp32}
export python=${PYTHON:-$root/.venv/bin/python}
jobs=${JOBS:-3}
temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT
export logs=${LOGS:-$temporary}
mkdir -p "$logs"
cd "$root"

layouts=("dp=$gpus" "tp=$gpus" "tp=$gpus,sp" "pp=$gpus" "pp=$gpus,vpp=2" "cp=$gpus" "ep=$gpus" "engram=$gpus"
    "tp=$gpus,recompute")
if [ "$gpus" -ge 4 ]; then
    half=$((gpus / 2))
    layouts+=("tp=2,pp=$half" "tp=2,sp,cp=$half" "pp=2,ep=$half" "cp=2,pp=$half" "tp=2,ep=$half")
fi

parity() {
    local result errors
    errors="$logs/parity-$1.log"
    result=$("$python" -m megatron_dsv41 parity "$folder" --layout "$1" --device cuda --json 2>"$errors" | tail -n 1)
    if [[ "$result" == *'"ok": true'* ]]; then
        echo "ok      $1  $result"
    else
        echo "FAILED  $1  ${result:-$(tail -n 3 "$errors")}"
        return 1
    fi
}
export -f parity

failed=0
printf '%s\n' "${layouts[@]}" | xargs -P "$jobs" -I{} bash -c 'parity {}' || failed=1
"$python" tools/verify_training.py "$gpus" --steps "${STEPS:-30}" --jobs "$jobs" --logs "$logs" || failed=1
exit $failed
