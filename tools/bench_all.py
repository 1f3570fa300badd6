"""Run the measurements behind docs/benchmarks.md on this machine's GPUs, each alone on its card.

    python tools/bench_all.py OUT                       # everything, in the order of --list
    python tools/bench_all.py OUT attention fused       # some of it
    python tools/bench_all.py --list

A step has one GPU to itself, or all of them: steps of one GPU run side by side on different cards, and a step of all
GPUs runs when nothing else does. A step's output is OUT/STEP.log; numbers of tools that write JSON are OUT/STEP.json,
those of the layouts OUT/layouts/. A step that fails or runs past its limit is reported and the rest go on;
OUT/steps.json says what ran, of which commit, on which cards, for how long. Exits with 1 unless every step ended well.
Ctrl-C or SIGTERM ends the steps that run, with all they started.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from megatron_dsv41.experiments.collect import git_commit
from megatron_dsv41.testing.bench import visible_gpus

ROOT = Path(__file__).resolve().parents[1]
OPS = "python tools/bench_ops.py --json {out}.json"
PYTEST = "python -m pytest -q -s -m gpu"
GRACE_S = 15.0  # between asking a step to end and ending it
POLL_S = 0.1


@dataclasses.dataclass(frozen=True)
class Step:
    """command: {out} becomes the step's path in OUT without suffix, {gpus} the number of GPUs. everything: all GPUs."""

    command: str
    everything: bool = False
    limit_s: float = 600.0


STEPS = {
    "tests": Step("python -m pytest -q -n 8 -m gpu", everything=True),
    "layouts": Step("python tools/bench_layouts.py {gpus} --out {out}", everything=True),
    "parity": Step("python tools/verify_parity.py {gpus}", everything=True),
    "training": Step("python tools/verify_training.py {gpus} --jobs 10", everything=True, limit_s=1200.0),
    "engram-overlap": Step(f"{PYTEST} tests/backends/megatron/test_engram_cuda.py", everything=True),
    "attention": Step(f"{OPS} --ops attend --tokens 4096 16384 65536"),
    "attention-16-heads": Step(f"{OPS} --ops attend --tokens 4096 16384 --heads 16"),
    "indexer": Step(f"{OPS} --ops select divergence --tokens 4096 16384 65536"),
    "fused": Step("python tools/bench_fused.py"),
    "engram": Step("python tools/bench_engram.py --json {out}.json"),
    "optimizer": Step("python tools/bench_optim.py --json {out}.json"),
    "step-4096": Step("python tools/bench_step.py --tokens 4096 --json {out}.json"),
    "step-16384": Step("python tools/bench_step.py --tokens 16384 --json {out}.json"),
    "precision": Step("python tools/bench_precision.py --tokens 4096 16384 --json {out}.json"),
    "precision-curves": Step("python tools/compare_precision.py --json {out}.json --plot {out}.png"),
    "learning": Step(f"{PYTEST} tests/modules/test_learning_cuda.py"),
    "sanitizer": Step(
        "compute-sanitizer --tool memcheck --error-exitcode 1 "
        f"{PYTEST} tests/ops/csa2/test_triton_attend.py tests/ops/mhc/test_triton_site.py "
        "-k 'hopper and (odd_token_counts or packed_documents or window_only or site)'",
        limit_s=900.0,
    ),
}


class Bench:
    """Runs steps; every card has one at a time."""

    def __init__(self, out: Path, cards: list[str], steps: dict[str, Step] | None = None):
        self.out, self.cards, self.steps = out, cards, STEPS if steps is None else steps
        self.results: dict[str, dict[str, Any]] = {}
        self._lock, self._begin, self._stop = threading.Lock(), time.monotonic(), threading.Event()

    def run(self, names: list[str]) -> bool:
        """Run steps of `names`, those of all cards first; whether all ended well. What interrupts it ends the steps."""
        self.out.mkdir(parents=True, exist_ok=True)
        self._count = len(names)
        for name in (name for name in names if self.steps[name].everything):
            self._one(name, self.cards)
        waiting = [name for name in names if not self.steps[name].everything]
        with ThreadPoolExecutor(len(self.cards)) as lanes:
            try:
                for lane in [lanes.submit(self._lane, waiting, card) for card in self.cards]:
                    lane.result()
            except BaseException:  # KeyboardInterrupt and SystemExit, too
                self._stop.set()
                raise
        return all(result["status"] == "ok" for result in self.results.values())

    def _lane(self, waiting: list[str], card: str) -> None:
        while True:
            with self._lock:
                if not waiting or self._stop.is_set():
                    return
                name = waiting.pop(0)
            self._one(name, [card])

    def _one(self, name: str, cards: list[str]) -> None:
        step = self.steps[name]
        places = {"out": shlex.quote(str(self.out / name)), "gpus": str(len(cards))}
        words = shlex.split(step.command.format_map(places))
        words = [sys.executable if word == "python" else word for word in words]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(cards), "PYTHONUNBUFFERED": "1"}
        print(f"{self._clock()} {name} starts on {'GPU' if len(cards) == 1 else 'GPUs'} {', '.join(cards)}", flush=True)
        begin = time.monotonic()
        status = _watch(words, environment, self.out / f"{name}.log", step.limit_s, self._stop)
        seconds = round(time.monotonic() - begin, 1)
        with self._lock:
            self.results[name] = {"command": shlex.join(words), "gpus": cards, "seconds": seconds, "status": status}
            self._write()
            done = f"{len(self.results)} of {self._count} done"
            print(f"{self._clock()} {name}: {status} after {seconds:.0f} s; {done}", flush=True)

    def _clock(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self._begin), 60)
        return f"[{minutes:3d}:{seconds:02d}]"

    def _write(self) -> None:
        found = {"commit": git_commit(ROOT), "torch": torch.__version__, "steps": self.results}
        partial = self.out / "steps.json.tmp"
        partial.write_text(json.dumps(found, indent=1) + "\n")
        partial.replace(self.out / "steps.json")


def _watch(words: list[str], environment: dict[str, str], log: Path, limit_s: float, stop: threading.Event) -> str:
    """Run a command with its output in `log`: "ok", or how it ended. What it started ends with it, or with `stop`."""
    try:
        with log.open("w") as output:
            process = subprocess.Popen(
                words, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
            )
    except OSError as error:
        return f"cannot be started: {error}"
    try:
        deadline = time.monotonic() + limit_s
        while process.poll() is None and time.monotonic() < deadline and not stop.is_set():
            time.sleep(POLL_S)
        code = process.poll()
    finally:
        _end(process)
    if code is None:
        return "interrupted" if stop.is_set() else f"ran past {limit_s:.0f} s"
    return "ok" if code == 0 else f"exit {code}, see {log}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started."""
    for stop in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, stop)
            process.wait(GRACE_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    process.wait()


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="OUT", type=Path, nargs="?", help="folder for logs and numbers")
    parser.add_argument("steps", metavar="STEP", nargs="*", help="some of them (default all)")
    parser.add_argument("--list", action="store_true", help="print the steps and their commands, and run nothing")
    args = parser.parse_args()
    if args.list:
        for name, step in STEPS.items():
            print(f"{name:20s} {'all GPUs' if step.everything else 'one GPU ':8s} {step.command}")
        return 0
    if args.out is None:
        parser.error("OUT is missing: a folder for logs and numbers")
    unknown = [name for name in args.steps if name not in STEPS]
    if unknown:
        parser.error(f"no step {', '.join(unknown)}; there are {', '.join(STEPS)}")
    cards = visible_gpus()
    if not cards:
        parser.error("there is no GPU: every step needs one")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # steps end before this process does
    return 0 if Bench(args.out.resolve(), cards).run(args.steps or list(STEPS)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
