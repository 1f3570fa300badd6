"""Train a small model in every layout of N GPUs and compare its losses with those of one GPU.

    python tools/verify_training.py N [--steps 30] [--ops '*=hopper, triton, grouped, blocked, split'] [--jobs 3]

bf16 weights and the given kernels; on CPUs with --precision fp32 and --ops '*=ref', the same over gloo. The noise band
(testing/noise.py) is that of four runs of one GPU: the weights as drawn, and with every weight moved by one ulp of its
dtype (3 seeds). A layout passes where it stays inside twice the band. Then each layout's checkpoint is
taken up by one GPU, and that of one GPU by each layout, for FURTHER steps. Exits with 1 where a layout does not pass.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from megatron_dsv41.backends.megatron import launch
from megatron_dsv41.experiments.tracking import read_metrics
from megatron_dsv41.run_config import Run
from megatron_dsv41.testing.noise import noise_band, nudge
from megatron_dsv41.testing.tiny_run import tiny_run, write_corpus

FASTEST = "*=hopper, triton, grouped, blocked, split"
FURTHER = 3
SEEDS = 3
SEQUENCE = 512
# The tiny model, as wide as the kernels need it: heads of 512 channels, index heads of 128, a window of 128.
WIDE = {
    "hidden_size": 512,
    "moe_intermediate_size": 256,
    "num_attention_heads": 16,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,
    "o_lora_rank": 64,
    "o_groups": 4,
    "sliding_window": 128,
    "n_routed_experts": 8,
    "index_n_heads": 16,
    "index_head_dim": 128,
    "index_topk": 64,
    "candidate_topk_blocks": 16,
    "engram_head_dim": 64,
    "initializer_range": 0.02,
}


def layouts(gpus: int) -> dict[str, tuple[str, ...]]:
    """What the run file says, by name."""
    found = {
        f"dp={gpus}": (),
        f"tp={gpus},sp": (f"parallel.tp={gpus}", "parallel.sp=true"),
        f"pp={gpus}": (f"parallel.pp={gpus}",),
        f"pp={gpus},vpp=2": (f"parallel.pp={gpus}", "parallel.vpp=2"),
        f"cp={gpus}": (f"parallel.cp={gpus}",),
        f"ep={gpus}": (f"parallel.ep={gpus}",),
        f"engram={gpus}": (f"parallel.engram={gpus}",),
    }
    if gpus >= 4:
        half = gpus // 2
        found[f"tp=2,pp={half}"] = ("parallel.tp=2", f"parallel.pp={half}")
        found[f"cp=2,ep={half}"] = ("parallel.cp=2", f"parallel.ep={half}")
    return found


def main() -> int:
    """Run everything and print one line per layout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gpus", type=int, metavar="N")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--ops", default=FASTEST, metavar="OP=PROVIDERS", help=f"(default '{FASTEST}')")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--jobs", type=int, default=3, help="runs at a time; they share the GPUs (default 3)")
    parser.add_argument("--logs", type=Path, help="where the runs' output goes (default: with the runs, then deleted)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="verify-training-") as folder:
        return Verification(Path(folder), args).run()


class Verification:
    """Runs in subfolders of `folder`, on data that all of them share."""

    def __init__(self, folder: Path, args: argparse.Namespace):
        self.folder, self.args = folder, args
        self.logs = args.logs or folder
        self.logs.mkdir(parents=True, exist_ok=True)
        for seed, name in enumerate(("train", "valid")):
            write_corpus(folder / "data" / name, documents=600, seed=seed, lengths=(50, 400))
        tiny_run(folder)

    def run(self) -> int:
        """0 where every layout passes."""
        wanted = layouts(self.args.gpus)
        jobs = [("one", 1, (), None), *((f"ulp{seed}", 1, (), seed) for seed in range(SEEDS))]
        jobs += [(name, self.args.gpus, changes, None) for name, changes in wanted.items()]
        with ThreadPoolExecutor(self.args.jobs) as pool:
            curves = dict(zip([job[0] for job in jobs], pool.map(lambda job: self.train(*job), jobs), strict=True))
        started = {name: curve for name, curve in curves.items() if len(curve) == self.args.steps}
        single = [started.get("one"), *(started.get(f"ulp{seed}") for seed in range(SEEDS))]
        if any(curve is None for curve in single):
            print(f"a run of one GPU failed: see {self.logs}", file=sys.stderr)
            return 1
        band = noise_band([curve for curve in single if curve is not None])
        crossings = [(name, changes) for name, changes in wanted.items() if name in started]
        with ThreadPoolExecutor(self.args.jobs) as pool:
            crossed = dict(zip([name for name, _ in crossings], pool.map(self.cross, crossings), strict=True))
        return report(wanted, curves, band, crossed)

    def cross(self, job: tuple[str, tuple[str, ...]]) -> tuple[bool, bool]:
        """Whether one GPU goes on from this layout's checkpoint, and this layout from one GPU's, with losses alike."""
        name, changes = job
        found = []
        for source, target, world, overrides in (
            (name, f"{name}-to-one", 1, ()),
            ("one", f"one-to-{name}", self.args.gpus, changes),
        ):
            shutil.copytree(self.folder / source, self.folder / target)
            longer = (f"train.steps={self.args.steps + FURTHER}", f"schedule.stable={self.args.steps + FURTHER}")
            curve = self.train(target, world, (*overrides, *longer), None)
            found.append(len(curve) == self.args.steps + FURTHER and bool(np.isfinite(curve).all()))
        return found[0], found[1]

    def train(self, name: str, world: int, changes: tuple[str, ...], seed: int | None) -> np.ndarray:
        """The losses of one run, as many as it reached."""
        operation, providers = self.args.ops.split("=", 1)
        overrides = [
            *(f"model.overrides.{key}={value}" for key, value in WIDE.items()),
            f"data.seq_length={SEQUENCE}",
            f"train.steps={self.args.steps}",
            f"schedule.stable={self.args.steps}",
            "schedule.cosine=0",
            f"train.precision={self.args.precision}",
            f'ops={{"{operation}": "{providers}"}}',
            "phase.index_loss=sparse",
            f"checkpoint.folder={self.folder / name}",
            *changes,
        ]
        command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
        command += [f"--nproc-per-node={world}"]
        command += [__file__, "--worker", str(self.folder), "none" if seed is None else str(seed), *overrides]
        with open(self.logs / f"{name}.log", "w") as log:
            subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False, timeout=600)
        rows = read_metrics(self.folder / name) if (self.folder / name).exists() else []
        return np.array([row["loss"] for row in rows if "loss" in row])


def report(wanted: dict, curves: dict, band: np.ndarray, crossed: dict[str, tuple[bool, bool]]) -> int:
    """Print the table; 1 where something is wrong."""
    rows = Table("layout", "steps", "first step apart", "largest share of the band", "to one GPU", "from one GPU", "")
    wrong = 0
    for name in wanted:
        apart = np.abs(curves[name] - curves["one"]) if len(curves[name]) == len(band) else None
        share = None if apart is None else float((apart / band).max())
        good = share is not None and share <= 2 and all(crossed[name])
        wrong += not good
        shown = ("", "") if apart is None else (f"{apart[0]:.1e}", f"{share:.2f}")
        moved = ["ok" if ok else "no" for ok in crossed.get(name, (False, False))]
        rows.add_row(name, str(len(curves[name])), *shown, *moved, "ok" if good else "FAILED")
    Console(width=140).print(rows)
    steps = sorted({1, 2, 5, 10, 20, len(band)} & set(range(1, len(band) + 1)))
    print("band of one ulp by step:", ", ".join(f"{step}: {band[step - 1]:.1e}" for step in steps))
    return int(wrong > 0)


def work(folder: str, seed: str, overrides: list[str]) -> int:
    """On a rank: train."""
    from megatron_dsv41.backends.megatron.train import quiet

    def move(stages: list) -> list:
        nudge((p for stage in stages for p in stage.parameters()), int(seed))
        return stages

    run: Run = tiny_run(folder, *overrides)
    with quiet(False):
        launch.prepare_process()
        with launch.world():
            from megatron_dsv41.backends.megatron import trainer

            created = trainer.create(run)
            if seed != "none":
                created.model_config.pre_wrap_hooks.append(move)
            return created.pretrain()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(work(sys.argv[2], sys.argv[3], sys.argv[4:]) if sys.argv[1:2] == ["--worker"] else main())
