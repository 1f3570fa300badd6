"""`dsv41 parity` in every layout of N GPUs over NCCL, as a table: outputs and gradients against recorded ones.

    python tools/verify_parity.py N [--folder tests/data/parity/text_fp32] [--jobs 3]

In fp32 with the definition of every op; on CPUs with --device cpu the same over gloo. What this backend does not drive,
and what does not run on GPUs, must be refused by name. Exits with 1 where a layout is out of tolerance. With
NCCL_MULTI_RANK_GPU_ENABLE=1 the N ranks may share fewer GPUs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron_dsv41.testing.bench import table

ROOT = Path(__file__).resolve().parents[1]
MEASURES = {"loss_rel": "loss apart", "logits_cos": "cosine of logits", "grad_cos_min": "least cosine of gradients"}
MEASURES |= {"grad_norm_rel_max": "gradient norms apart"}


def layouts(gpus: int) -> list[str]:
    """What is compared, as `dsv41 parity --layout` takes it."""
    n = gpus
    found = [f"dp={n}", f"tp={n}", f"tp={n},sp", f"pp={n}", f"pp={n},vpp=2", f"cp={n}", f"ep={n}", f"engram={n}"]
    found += [
        f"ep={n},dispatcher=alltoall",
        f"tp={n},recompute",
        f"pp={n},recompute=full",
    ]
    found += [f"dp={n},gradient_accumulation_fusion", f"tp={n},sp,gradient_accumulation_fusion"]
    if n >= 4:
        half = n // 2
        found += [f"tp=2,pp={half}", f"tp=2,sp,cp={half}", f"pp=2,ep={half}", f"cp=2,pp={half}", f"tp=2,sp,ep={half}"]
    return found


def refused(gpus: int) -> dict[str, str]:
    """Layouts that must not run, and what the error names."""
    return {f"ep={gpus},dispatcher=flex": "parallel.dispatcher flex"}


def main() -> int:
    """Run everything and print one row per layout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gpus", type=int, metavar="N")
    parser.add_argument("--folder", type=Path, default=ROOT / "tests" / "data" / "parity" / "text_fp32")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--jobs", type=int, default=3, help="layouts at a time; they share the GPUs (default 3)")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for a layout (default 300)")
    parser.add_argument("--layouts", nargs="+", metavar="LAYOUT", help="only these")
    args = parser.parse_args()
    refusals = refused(args.gpus)
    wanted = args.layouts or [*layouts(args.gpus), *refusals]
    with ThreadPoolExecutor(args.jobs) as pool:
        found = dict(zip(wanted, pool.map(lambda text: compare(text, args), wanted), strict=True))
    rows, wrong = [], 0
    for text, report in found.items():
        name = refusals.get(text)
        good = report["ok"] if name is None else name in report.get("error", "")
        wrong += not good
        values = [f"{report[key]:.2e}" if report.get(key) is not None else "" for key in MEASURES]
        values = [
            f"{report[k]:.9f}" if "cos" in k and report.get(k) is not None else v
            for k, v in zip(MEASURES, values, strict=True)
        ]
        verdict = ("ok" if name is None else "refused, as it must be") if good else f"FAILED {report.get('error', '')}"
        rows.append((text, *values, verdict.strip()))
    print(table(("layout", *MEASURES.values(), ""), rows))
    return int(wrong > 0)


def compare(text: str, args: argparse.Namespace) -> dict[str, Any]:
    """The JSON that the command leaves, or an error in its place."""
    command = [sys.executable, "-m", "megatron_dsv41", "parity", str(args.folder), "--layout", text]
    command += ["--device", args.device, "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=args.limit, check=False)
    except subprocess.TimeoutExpired:
        return {"ok": False, "error": f"no end within {args.limit:.0f} s"}
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"ok": False, "error": done.stderr.strip()[-300:]}


if __name__ == "__main__":
    raise SystemExit(main())
