#!/usr/bin/env bash
# Creates or reuses .venv in the checkout and installs the package with its development tools into it.
# Does nothing when a finished installation for this setup.py is there. Safe to interrupt and run again:
# the stamp that says "finished" is written last.
# EXTRAS=dev,te picks the optional dependencies (default dev); PYTHON names the interpreter.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
venv="$root/.venv"
python="$venv/bin/python"
stamp="$venv/.dsv41-setup"
extras=${EXTRAS:-dev}
# The checkout's path is in it because an environment that was moved does not work.
wanted="$(cksum <"$root/setup.py") $extras $root"

usable() {
    [ -x "$python" ] && "$python" -I -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && usable; then
    exit 0
fi

missing=""
if [ -z "${CXX:-}" ] && ! command -v g++ >/dev/null 2>&1 && ! command -v clang++ >/dev/null 2>&1; then
    missing+="  a C++ compiler (Debian, Ubuntu: apt-get install g++; or set CXX)"$'\n'
elif [ -n "${CXX:-}" ] && ! command -v "${CXX%% *}" >/dev/null 2>&1; then
    missing+="  CXX=$CXX is not a program"$'\n'
fi
command -v make >/dev/null 2>&1 || missing+="  make (Debian, Ubuntu: apt-get install make)"$'\n'
if [ -n "$missing" ]; then
    printf 'Missing:\n%s' "$missing" >&2
    exit 1
fi

started=$SECONDS
have_uv=""
command -v uv >/dev/null 2>&1 && have_uv=1
if ! usable || { [ -z "$have_uv" ] && ! "$python" -m pip --version >/dev/null 2>&1; }; then
    base=$(bash "$root/tools/find_python.sh")
    echo "==> Creating .venv with $base"
    if [ -e "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv")" ]; then
        echo "$venv exists and is not a Python environment: move it away" >&2
        exit 1
    fi
    rm -rf "$venv"
    if [ -n "$have_uv" ]; then
        uv venv --quiet --seed --python "$base" "$venv"
    else
        "$base" -m venv "$venv"
    fi
fi
rm -f "$stamp"

free_gb=$(($(df -Pk "$venv" | awk 'NR == 2 {print $4}') / 1048576))
[ "$free_gb" -ge 9 ] || echo "==> Warning: $free_gb GB are free here; PyTorch with its CUDA libraries needs about 8"

echo "==> Installing megatron-dsv41[$extras] into .venv (PyTorch is large: minutes on the first run)"
cd "$root"
if [ -n "$have_uv" ]; then
    uv pip install --python "$python" -e ".[$extras]"
else
    "$python" -m pip install --disable-pip-version-check -e ".[$extras]"
fi
"$python" -W ignore -c 'import torch, megatron.core, megatron_dsv41'
echo "$wanted" >"$stamp"
echo "==> .venv is ready ($((SECONDS - started)) s)"
