"""Train a small model in every layout of N GPUs and compare its losses with those of one GPU.

    python tools/verify_training.py N [--steps 30] [--runs 3] [--ops '*=hopper, triton, grouped, blocked, split']

bf16 weights and the given kernels; on CPUs over gloo with --precision fp32 --ops '*=ref' --width tiny. The noise band
(testing/noise.py) is that of four runs of one GPU: the weights as drawn, and with every weight moved by one ulp of its
dtype (3 seeds). A layout passes where all of its runs end and stay inside twice the band. Each layout's checkpoint is
taken up by one GPU, and that of one GPU by each layout, for FURTHER steps. Prints a table for docs/benchmarks.md;
exits with 1 where a layout does not pass. The runs of a layout share their processes, so that kernels load once. With
NCCL_MULTI_RANK_GPU_ENABLE=1 the N ranks may share fewer GPUs.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from megatron_dsv41.backends.megatron import launch
from megatron_dsv41.experiments.tracking import read_metrics
from megatron_dsv41.parallel.environment import missing_gpus
from megatron_dsv41.testing.bench import FASTEST, table, visible_gpus
from megatron_dsv41.testing.noise import noise_band, nudge
from megatron_dsv41.testing.tiny import KERNEL_WIDTHS
from megatron_dsv41.testing.tiny_run import tiny_run, write_corpus

FUSED = "parallel.gradient_accumulation_fusion=true"
OWNED, OWNER = "one that owns all rows", ("parallel.engram=1",)
FURTHER = 3
SEEDS = 3
SEQUENCE = 512


def layouts(gpus: int) -> dict[str, tuple[str, ...]]:
    """What the run file says, by name."""
    found = {
        f"dp={gpus}": (),
        f"tp={gpus},sp": (f"parallel.tp={gpus}", "parallel.sp=true"),
        f"pp={gpus}": (f"parallel.pp={gpus}",),
        f"pp={gpus},vpp=2": (f"parallel.pp={gpus}", "parallel.vpp=2"),
        f"cp={gpus}": (f"parallel.cp={gpus}",),
        f"ep={gpus}": (f"parallel.ep={gpus}",),
        f"ep={gpus},alltoall": (f"parallel.ep={gpus}", "parallel.dispatcher=alltoall"),
        f"engram={gpus}": (f"parallel.engram={gpus}",),
        f"dp={gpus},fused gradients": (FUSED,),
        f"tp={gpus},sp,fused gradients": (f"parallel.tp={gpus}", "parallel.sp=true", FUSED),
    }
    if gpus >= 4:
        half = gpus // 2
        found[f"tp=2,pp={half}"] = ("parallel.tp=2", f"parallel.pp={half}")
        found[f"cp=2,ep={half}"] = ("parallel.cp=2", f"parallel.ep={half}")
    return found


def owns_rows(changes: tuple[str, ...]) -> bool:
    """Whether Engram rows have owners: their optimizer state is another, which one GPU has as the owner of all rows."""
    return any(change.startswith("parallel.engram=") for change in changes)


@dataclasses.dataclass(frozen=True)
class Job:
    """A run. source: whose folder it goes on from. seed: of the weights' nudge."""

    name: str
    changes: tuple[str, ...] = ()
    seed: int | None = None
    source: str | None = None


def main() -> int:
    """Run everything and print one row per layout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gpus", type=int, metavar="N")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--runs", type=int, default=3, help="of each layout (default 3)")
    parser.add_argument("--ops", default=FASTEST, metavar="OP=PROVIDERS", help=f"(default '{FASTEST}')")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument(
        "--width", choices=("kernels", "tiny"), default="kernels", help="tiny: sizes for processors (default kernels)"
    )
    parser.add_argument("--jobs", type=int, default=3, help="layouts at a time; they share the GPUs (default 3)")
    parser.add_argument("--layouts", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for the runs of a layout (default 600)")
    parser.add_argument("--logs", type=Path, help="where the runs' output goes (default: with the runs, then deleted)")
    args = parser.parse_args()
    if torch.cuda.is_available() and (missing := missing_gpus(args.gpus, torch.cuda.device_count())):
        raise SystemExit(f"verify_training.py {args.gpus} {missing}")
    with tempfile.TemporaryDirectory(prefix="verify-training-") as folder:
        return Verification(Path(folder), args).run()


class Verification:
    """Runs in subfolders of `folder`, on data that all of them share."""

    def __init__(self, folder: Path, args: argparse.Namespace):
        self.folder, self.args = folder, args
        self.logs = args.logs or folder
        self.logs.mkdir(parents=True, exist_ok=True)
        self.late: set[str] = set()
        for seed, name in enumerate(("train", "valid")):
            write_corpus(folder / "data" / name, documents=600, seed=seed, lengths=(50, 400))
        tiny_run(folder)

    def run(self) -> int:
        """0 where every layout passes."""
        args = self.args
        wanted = {name: c for name, c in layouts(args.gpus).items() if name in (args.layouts or layouts(args.gpus))}
        nudged = [Job(f"ulp{seed}", seed=seed) for seed in range(SEEDS)]
        owned = [Job(OWNED, OWNER)] if any(map(owns_rows, wanted.values())) else []
        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(self.alone, [Job("one"), *nudged, *owned], itertools.count()))
            single = [self.curve(name) for name in ("one", *(f"ulp{seed}" for seed in range(SEEDS)))]
            if any(len(curve) != args.steps for curve in single):
                print(f"a run of one GPU failed: see {self.logs}", file=sys.stderr)
                return 1
            list(pool.map(lambda layout: self.layout(*layout), wanted.items()))
            ended = [name for name in wanted if len(self.curve(f"{name} 1")) == args.steps]
            kept = {name: OWNER if owns_rows(wanted[name]) else () for name in ended}
            back = [Job(f"{name} to one", (*kept[name], *self.longer()), source=f"{name} 1") for name in ended]
            list(pool.map(self.alone, back, itertools.count()))
        return self.report(list(wanted), noise_band(single), single[0])

    def alone(self, job: Job, number: int) -> None:
        """A run of one GPU, the `number`-th: they take turns on the GPUs."""
        gpus = visible_gpus()
        self.start(job.name, 1, [job], {"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]} if gpus else None)

    def layout(self, name: str, changes: tuple[str, ...]) -> None:
        """All runs of a layout, then one that goes on from one GPU."""
        jobs = [Job(f"{name} {number}", changes) for number in range(1, self.args.runs + 1)]
        source = OWNED if owns_rows(changes) else "one"
        self.start(name, self.args.gpus, [*jobs, Job(f"one to {name}", (*changes, *self.longer()), source=source)])

    def longer(self) -> tuple[str, ...]:
        """Settings of a run that goes on."""
        return (f"train.steps={self.args.steps + FURTHER}", f"schedule.stable={self.args.steps + FURTHER}")

    def start(self, name: str, world: int, jobs: list[Job], environment: dict[str, str] | None = None) -> None:
        """Jobs one after the other on `world` processes, which end when their time is over."""
        operation, providers = self.args.ops.split("=", 1)
        wide = self.args.width == "kernels"
        settings = [
            *(f"model.overrides.{key}={value}" for key, value in (KERNEL_WIDTHS if wide else {}).items()),
            f"data.seq_length={SEQUENCE if wide else 32}",
            f"train.steps={self.args.steps}",
            f"schedule.stable={self.args.steps}",
            "schedule.cosine=0",
            f"train.precision={self.args.precision}",
            f'ops={{"{operation}": "{providers}"}}',
            "phase.index_loss=sparse",
        ]
        listed = self.folder / f"{name}.json"
        listed.write_text(json.dumps({"settings": settings, "jobs": [dataclasses.asdict(job) for job in jobs]}))
        command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
        command += [f"--nproc-per-node={world}", __file__, "--worker", str(self.folder), str(listed)]
        with open(self.logs / f"{name}.log", "w") as log:
            where = os.environ | (environment or {})
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=where)
            try:
                process.wait(self.args.limit)
            except subprocess.TimeoutExpired:
                self.late.add(name)
                process.terminate()  # torchrun then ends its processes, after 30 s by force
                process.wait()

    def curve(self, name: str) -> np.ndarray:
        """The losses of one run, as many as it reached."""
        rows = read_metrics(self.folder / name) if (self.folder / name).exists() else []
        return np.array([row["loss"] for row in rows if "loss" in row])

    def crossed(self, name: str) -> bool:
        """Whether a run that went on from another's checkpoint reached its end with finite losses."""
        curve = self.curve(name)
        return len(curve) == self.args.steps + FURTHER and bool(np.isfinite(curve).all())

    def report(self, names: list[str], band: np.ndarray, one: np.ndarray) -> int:
        """Print the table; 1 where something is wrong."""
        rows, wrong = [], 0
        for name in names:
            curves = [self.curve(f"{name} {number}") for number in range(1, self.args.runs + 1)]
            apart = [np.abs(curve - one) for curve in curves if len(curve) == len(band)]
            share = max((float((part / band).max()) for part in apart), default=np.inf)
            moved = self.crossed(f"{name} to one"), self.crossed(f"one to {name}")
            good = len(apart) == self.args.runs and share <= 2 and all(moved) and name not in self.late
            wrong += not good
            steps = " ".join(str(len(curve)) for curve in curves) + (", hangs" if name in self.late else "")
            first = f"{max(part[0] for part in apart):.1e}" if apart else ""
            verdict = "ok" if good else "FAILED"
            rows.append((name, steps, first, f"{share:.2f}", *("ok" if ok else "no" for ok in moved), verdict))
        print(
            f"{_device()}, torch {torch.__version__}, {datetime.date.today().isoformat()}, {self.args.precision}, ",
            end="",
        )
        print(
            f"ops {self.args.ops}: {self.args.runs} runs of {self.args.steps} steps per layout, against one process\n"
        )
        columns = ("layout", "steps of the runs", "first step apart", "largest share of the band")
        print(table((*columns, "to one", "from one", ""), rows))
        steps = sorted({1, 2, 5, 10, 20, len(band)} & set(range(1, len(band) + 1)))
        print("\nBand of one ulp by step:", ", ".join(f"{step}: {band[step - 1]:.1e}" for step in steps))
        return int(wrong > 0)


def work(folder: str, listed: str) -> int:
    """On a rank: train the jobs of a file."""
    from megatron_dsv41.backends.megatron.train import quiet

    found = json.loads(Path(listed).read_text())
    with quiet(False):
        launch.prepare_process()
        with launch.world():
            for job in (Job(**values) for values in found["jobs"]):
                try:
                    train(Path(folder), job, found["settings"])
                except ValueError:  # of settings and files, alike on every rank: the table shows what is missing
                    traceback.print_exc()
                launch.release()
                launch.destroy_groups()
    return 0


def train(folder: Path, job: Job, settings: list[str]) -> None:
    """On a rank: one job."""
    from megatron_dsv41.backends.megatron import trainer

    def move(stages: list) -> list:
        assert job.seed is not None
        nudge((p for stage in stages for p in stage.parameters()), job.seed)
        return stages

    if job.source is not None and torch.distributed.get_rank() == 0:
        shutil.copytree(folder / job.source, folder / job.name)
    torch.distributed.barrier()
    run = tiny_run(folder, *settings, *job.changes, f"checkpoint.folder={folder / job.name}")
    created = trainer.create(run)
    if job.seed is not None:
        created.model_config.pre_wrap_hooks.append(move)
    created.pretrain()


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(work(sys.argv[2], sys.argv[3]) if sys.argv[1:2] == ["--worker"] else main())
