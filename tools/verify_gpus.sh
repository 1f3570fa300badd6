#!/usr/bin/env bash
# Compare every layout of N GPUs with recorded outputs, over NCCL, in fp32 with the definition of every op.
#
#   tools/verify_gpus.sh N [FOLDER]     FOLDER: a parity folder (default tests/data/parity/text_fp32)
#
# Prints one line per layout and exits with 1 if one is out of tolerance. The interpreter is $PYTHON, default .venv/bin/python.
set -uo pipefail

gpus=${1:?usage: tools/verify_gpus.sh N [FOLDER]}
root=$(cd "$(dirname "$0")/.." && pwd)
folder=${2:-$root/tests/data/parity/text_fp32}
python=${PYTHON:-$root/.venv/bin/python}
cd "$root"

layouts=("dp=$gpus" "tp=$gpus" "tp=$gpus,sp" "pp=$gpus" "pp=$gpus,vpp=2" "cp=$gpus" "ep=$gpus" "tp=$gpus,recompute")
if [ "$gpus" -ge 4 ]; then
    half=$((gpus / 2))
    layouts+=("tp=2,pp=$half" "tp=2,sp,cp=$half" "pp=2,ep=$half" "cp=2,pp=$half" "tp=2,ep=$half")
fi

errors=$(mktemp)
trap 'rm -f "$errors"' EXIT
failed=0
for layout in "${layouts[@]}"; do
    result=$("$python" -m megatron_dsv41 parity "$folder" --layout "$layout" --device cuda --json 2>"$errors" | tail -n 1)
    if [[ "$result" == *'"ok": true'* ]]; then
        echo "ok      $layout  $result"
    else
        failed=1
        echo "FAILED  $layout  ${result:-$(tail -n 3 "$errors")}"
    fi
done
exit $failed
