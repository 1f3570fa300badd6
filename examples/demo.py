"""`make demo`: from text to a trained, resumed and exported model, each step a `dsv41` command that can be run by hand.

Everything it makes lies in demo/. The second half of training starts after a SIGKILL of the first.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
DEMO = Path("demo")
CONFIG = "examples/demo.yaml"
RUN, TOKENIZER, CORPUS = DEMO / "run", DEMO / "tokenizer", DEMO / "data" / "stdlib"
EXPORT, PICTURE = DEMO / "hf", DEMO / "loss.png"
VOCABULARY = 2048
SEQUENCES = 8  # of one step, divided among 1, 2, 4 or 8 processes
DSV41 = [sys.executable, "-m", "megatron_dsv41"]


def main() -> None:
    """Run every step; exits non-zero at the first that fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to examples/demo.yaml")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    began = time.monotonic()
    shutil.rmtree(DEMO, ignore_errors=True)

    say("1/6  Prepare: train a tokenizer on the Python standard library and encode it")
    command("prep", "--input", "python-stdlib", "--train-tokenizer", VOCABULARY, "--tokenizer", TOKENIZER,
            "--output", CORPUS, "--validation-documents", 20)  # fmt: skip
    sidecar = json.loads(Path(f"{CORPUS}.json").read_text())
    processes = process_count()
    overrides = [
        f"model.overrides.engram_compressed_vocab_size={sidecar['num_classes']}",
        f"batch.sequences={SEQUENCES}",
        f"batch.micro={SEQUENCES // processes}",
        *arguments.overrides,
    ]

    say("2/6  Plan: what is going to run")
    command("plan", CONFIG, *overrides, "--ranks", processes, "--plot", DEMO / "learning_rate.png")

    say(f"3/6  Train on {processes} processes, and kill them with SIGKILL on the way")
    killed_at = train_until_killed(processes, overrides)

    say("4/6  Resume from the last complete checkpoint")
    before = read_losses()
    step(train_command(processes, overrides))
    after = read_losses()

    say("5/6  Export as a Hugging Face folder")
    command("convert", "export", RUN, EXPORT)

    say("6/6  Plot")
    repeated = sorted(set(before) & set(after))
    plot(before, after, killed_at)
    last = max(after)
    print(f"\nloss {after[min(after)]:.3f} at step {min(after)} -> {after[last]:.3f} at step {last}")
    difference = max((abs(before[step] - after[step]) for step in repeated), default=0.0)
    print(f"steps that ran before the kill and again after it differ by at most {difference:g}")
    print(f"\nIn {DEMO}/ after {time.monotonic() - began:.0f} s:")
    for path in (TOKENIZER, CORPUS.parent, RUN, EXPORT, PICTURE, DEMO / "learning_rate.png"):
        print(f"  {path!s:<24} {size(path) / 1e6:8.1f} MB")
    if after[last] >= after[min(after)]:
        sys.exit("the loss did not fall")


def command(*arguments: object) -> None:
    """One `dsv41` command."""
    print(f"$ dsv41 {' '.join(map(str, arguments))}", flush=True)
    step([*DSV41, *map(str, arguments)])


def step(words: list[str]) -> None:
    """Run a process that says itself what is wrong; ends the demo where it fails."""
    if status := subprocess.run(words).returncode:
        sys.exit(f"make demo: the step above ended with status {status}; what is there so far lies in {DEMO}/")


def process_count() -> int:
    """All GPUs, else two CPU processes."""
    import torch

    available = torch.cuda.device_count() or 2
    return max(n for n in (1, 2, 4, SEQUENCES) if n <= available)


def train_command(processes: int, overrides: list[str]) -> list[str]:
    """`torchrun ... dsv41 train`, printed as well."""
    torchrun = ["torchrun", "--standalone", f"--nproc-per-node={processes}", "-m", "megatron_dsv41"]
    arguments = ["train", "--config", CONFIG, *overrides]
    print(f"$ {' '.join([*torchrun, *arguments])}", flush=True)
    return [sys.executable, "-m", "torch.distributed.run", *torchrun[1:], *arguments]


def train_until_killed(processes: int, overrides: list[str]) -> int:
    """Start training; kill every process once steps after the first checkpoint are logged. The last logged step."""
    from megatron_dsv41.run_config import load_run

    planned = load_run(CONFIG, overrides)
    assert planned.checkpoint.interval is not None
    target = min(planned.checkpoint.interval + 2 * planned.logging.interval, planned.steps - 1)
    trainer = subprocess.Popen(train_command(processes, overrides))
    while trainer.poll() is None:
        step = max(read_losses(), default=0)
        if step >= target:
            kill_tree(trainer.pid)
            trainer.wait()
            print(f"killed after step {step}", flush=True)
            return step
        time.sleep(0.1)
    sys.exit(f"training ended by itself with status {trainer.returncode} before step {target}")


def kill_tree(pid: int) -> None:
    """SIGKILL to the workers first, so that the launcher cannot ask them to save."""
    launcher = psutil.Process(pid)
    for process in [*launcher.children(recursive=True), launcher]:
        process.send_signal(signal.SIGKILL)


def read_losses() -> dict[int, float]:
    """Logged training loss by step."""
    from megatron_dsv41.experiments.tracking import read_metrics

    return {row["step"]: row["loss"] for row in read_metrics(RUN) if "loss" in row}


def plot(before: dict[int, float], after: dict[int, float], killed_at: int) -> None:
    """Draw training loss before the kill and of the whole run, and validation loss."""
    from megatron_dsv41.experiments.plots import plot_loss, series
    from megatron_dsv41.experiments.tracking import read_metrics

    curves = {
        "train": (list(after), list(after.values())),
        "validation": series(read_metrics(RUN), "step", "valid_loss"),
        f"train, until killed at step {killed_at}": (list(before), list(before.values())),
    }
    plot_loss(curves, PICTURE, title="make demo: a tiny DeepSeek-V4.1 on Python's standard library")


def size(path: Path) -> int:
    """Bytes of a file or folder."""
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return sum(p.stat().st_size for p in files)


def say(text: str) -> None:
    """A heading."""
    print(f"\n==> {text}", flush=True)


if __name__ == "__main__":
    main()
