"""Time layouts of a model on N GPUs against one GPU: speed, exposed communication, memory and bytes beside the plan.

    python tools/bench_layouts.py 2 --out bench             # dp=2, ep=2, tp=2, pp=2, cp=2; dp=2 with owned Engram rows
    python tools/bench_layouts.py 2 --layouts pp=2 --set parallel.layout='Ettttt|tttL' --set train.recompute=selective
    python tools/bench_layouts.py 2 --preset tiny --tokens 64 --context-tokens 128      # on CPUs over gloo, as a check

Megatron's own loop over random tokens (one document per sequence) in bf16. A step is forward, backward and the sums of
gradients, with what the trainer does around them; no optimizer step unless --updates. Per GPU and micro-batch --tokens
tokens: dp, ep and owned rows one sequence per GPU, tp N sequences together, pp --micro-batches micro-batches in flight,
cp one sequence of --context-tokens. Each layout is compared with one GPU that computes as many tokens a step in
micro-batches of the same length. Into --out: results.json, table.md, timelines.png, efficiency.png; with --traces the
profiler's files too. A layout that fails or hangs is reported, and the rest go on. Ranks that share GPUs
(NCCL_MULTI_RANK_GPU_ENABLE=1) show bytes and that a layout runs; their times mean nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from layout_report import report, wanted_share

from megatron_dsv41.backends.megatron.timing import Steps, time_runs
from megatron_dsv41.cli.plan import plan_report
from megatron_dsv41.config import DSV41Config
from megatron_dsv41.experiments import traces
from megatron_dsv41.experiments.overlap import Account, Interval, Span, account, split_waits
from megatron_dsv41.experiments.timelines import plot_efficiency, plot_timelines
from megatron_dsv41.parallel.environment import missing_gpus
from megatron_dsv41.presets import PRESETS
from megatron_dsv41.run_config import Run, run_from_dict
from megatron_dsv41.testing.bench import FASTEST
from megatron_dsv41.testing.distributed import Ranks

CORPUS_TOKENS = 1 << 20
MEASURED = "measured.jsonl"
AXES = {"tensor": (traces.TENSOR,), "context": (traces.GATHER, traces.HALO), "pipeline": (traces.PIPELINE,)}
AXES |= {"expert": (traces.EXPERT,)}  # planned where tokens are gathered


@dataclasses.dataclass(frozen=True)
class Case:
    """One layout: GPUs, tokens of a sequence, sequences of a step and of a micro-batch. base: the one-GPU case."""

    name: str
    gpus: int
    seq: int
    sequences: int
    micro: int = 1
    changes: tuple[str, ...] = ()
    base: str = ""

    @property
    def tokens_per_gpu(self) -> float:
        """Of a step."""
        return self.seq * self.sequences / self.gpus

    @property
    def file(self) -> str:
        """A name for files."""
        return self.name.replace(" ", "_").replace(",", "_").replace("=", "")


def plan_cases(gpus: int, tokens: int, context_tokens: int, micro_batches: int) -> list[Case]:
    """Every layout of `gpus`, after the one-GPU cases that they are compared with."""
    in_flight = -(-micro_batches // gpus) * gpus
    context = context_tokens // gpus * gpus
    reduces = ("megatron.overlap_grad_reduce=true",)
    plain, several, long = _alone(1, tokens), _alone(in_flight // gpus, tokens), _alone(1, context // gpus)
    scaled = [
        Case(f"dp={gpus}", gpus, tokens, gpus, 1, reduces, plain.name),
        Case(f"ep={gpus}", gpus, tokens, gpus, 1, (*reduces, f"parallel.ep={gpus}"), plain.name),
        Case(f"tp={gpus},sp", gpus, tokens, gpus, gpus, (f"parallel.tp={gpus}", "parallel.sp=true"), plain.name),
        Case(f"pp={gpus}", gpus, tokens, in_flight, 1, (f"parallel.pp={gpus}",), several.name),
        Case(f"cp={gpus}", gpus, context, 1, 1, (*reduces, f"parallel.cp={gpus}"), long.name),
        Case(f"dp={gpus},engram", gpus, tokens, gpus, 1, (*reduces, f"parallel.engram={gpus}"), plain.name),
    ]
    return [*dict.fromkeys((plain, several, long)), *scaled]


def _alone(sequences: int, seq: int) -> Case:
    return Case(f"one, {sequences} x {seq}", 1, seq, sequences)


def steps_of(args: argparse.Namespace) -> Steps:
    """Of every run."""
    return Steps(args.warm, args.steps, args.updates)


def run_of(case: Case, folder: Path, args: argparse.Namespace) -> Run:
    """The run file of a case. ValueError for a layout that cannot be."""
    operation, providers = (args.ops or (FASTEST if args.device == "cuda" else "*=ref")).split("=", 1)
    values = {
        "model": {"preset": args.preset},
        "data": {"train": str(folder / "random"), "seq_length": case.seq, "cache": str(folder / "cache")},
        "batch": {"sequences": case.sequences, "micro": case.micro},
        "train": {
            "steps": steps_of(args).total,
            "precision": "bf16" if args.device == "cuda" else "fp32",
        },
        "ops": {operation: providers},
        "checkpoint": {"folder": str(folder / case.file), "optimizer": False},
        "logging": {"interval": steps_of(args).total, "index_probes": 0},
    }
    return run_from_dict(values, (*case.changes, *args.set))


def main() -> int:
    """Run, write and print; 1 where a layout did not run."""
    args = parse()
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    (out / MEASURED).unlink(missing_ok=True)
    cases = plan_cases(args.gpus, args.tokens, args.context_tokens, args.micro_batches)
    if args.layouts:
        unknown = set(args.layouts) - {case.name for case in cases}
        if unknown:
            raise SystemExit(f"unknown layouts {sorted(unknown)}; there are {[case.name for case in cases]}")
        chosen = {*args.layouts, *(case.base for case in cases if case.name in args.layouts)}
        cases = [case for case in cases if case.name in chosen]
    with tempfile.TemporaryDirectory(prefix="bench-layouts-") as folder:
        bench = Bench(cases, Path(folder), args)
        bench.run()
        results, steps = bench.finish()
        if args.traces:
            args.traces.mkdir(parents=True, exist_ok=True)
            for file in Path(folder).glob("*.trace.json.gz"):
                shutil.copy(file, args.traces)
    head = {
        "device": _device(args),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
        "command": " ".join(sys.argv),
    }
    (out / MEASURED).unlink(missing_ok=True)
    (out / "results.json").write_text(json.dumps({**head, "layouts": results, "failed": bench.failed}, indent=1))
    text = report(results, bench.failed, head)
    (out / "table.md").write_text(text)
    print(text)
    scaled = {name: found["efficiency"] for name, found in results.items() if found.get("efficiency")}
    if scaled:
        wanted = {name: share for name in scaled if (share := wanted_share(name))}
        plot_efficiency(scaled, wanted, out / "efficiency.png", f"tokens/s per GPU, {head['device']}")
    shown = {name: step for name, step in steps.items() if name in scaled} or steps
    if shown:
        plot_timelines(shown, out / "timelines.png")
    return int(bool(bench.failed))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gpus", type=int, metavar="N")
    parser.add_argument("--layouts", nargs="+", metavar="NAME", help="some of them, such as dp=2 pp=2 (default all)")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="proxy")
    parser.add_argument("--tokens", type=int, default=8192, help="of a sequence (default 8192)")
    parser.add_argument("--context-tokens", type=int, default=32768, help="of a sequence with cp (default 32768)")
    parser.add_argument("--micro-batches", type=int, default=8, help="of a step with pp (default 8)")
    parser.add_argument("--steps", type=int, default=5, help="timed (default 5)")
    parser.add_argument("--warm", type=int, default=3, help="steps before them (default 3)")
    parser.add_argument("--updates", action="store_true", help="include the optimizer's step")
    parser.add_argument("--ops", metavar="OP=PROVIDERS", help=f"(default '{FASTEST}', on CPUs '*=ref')")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value", help="change every run")
    parser.add_argument("--draw", choices=("device", "stock"), default="device", help="where weights are drawn")
    parser.add_argument(
        "--limit", type=float, default=120.0, help="seconds for a layout, thrice for a first (default 120)"
    )
    parser.add_argument("--gib", type=float, default=139.0, help="memory of a GPU: what needs more is left out")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(default cuda)")
    parser.add_argument("--out", type=Path, default=Path("bench-layouts"))
    parser.add_argument("--traces", type=Path, help="keep the profiler's files here")
    args = parser.parse_args()
    if args.device == "cuda" and (missing := missing_gpus(args.gpus, torch.cuda.device_count())):
        raise SystemExit(f"bench_layouts.py {args.gpus} {missing}")
    return args


class Bench:
    """Runs the cases, those of one world in one set of processes, and reads each while the next runs."""

    def __init__(self, cases: list[Case], folder: Path, args: argparse.Namespace):
        self.cases, self.folder, self.args = cases, folder, args
        self.failed: dict[str, str] = {}
        self.read: dict[str, Future[Any]] = {}
        self.pool = ThreadPoolExecutor(1)
        random_corpus(folder / "random", PRESETS[args.preset](), CORPUS_TOKENS if args.device == "cuda" else 1 << 14)

    def run(self) -> None:
        """Everything that fits by the plan."""
        for world in sorted({case.gpus for case in self.cases}):
            waiting = [case for case in self.cases if case.gpus == world and self._fits(case)]
            while waiting:
                self._run_together(world, waiting)

    def _fits(self, case: Case) -> bool:
        try:
            planned = planned_memory(case, run_of(case, self.folder, self.args), self.args.updates)
        except ValueError as error:
            self.failed[case.name] = str(error)
            return False
        needed = max(planned) * ranks_per_gpu(case.gpus, self.args.device) / 2**30
        if needed <= self.args.gib:
            return True
        self.failed[case.name] = f"needs {needed:.1f} GiB by the plan: --set train.recompute=selective"
        return False

    def _run_together(self, world: int, waiting: list[Case]) -> None:
        """Until all of `waiting` are done, or one fails; it loses those that are over."""
        args = self.args
        jobs = [(case.file, run_of(case, self.folder, args).to_dict()) for case in waiting]
        rest = (str(self.folder), steps_of(args), args.draw == "device")
        backend = "nccl" if args.device == "cuda" else None
        try:
            with Ranks(time_runs, world, jobs, *rest, device=args.device, backend=backend) as ranks:
                limit = 3 * args.limit  # kernels are compiled
                while waiting:
                    done, wrong = (self.folder / f"{waiting[0].file}.{end}" for end in ("json", "error"))
                    ranks.wait_until(lambda done=done, wrong=wrong: done.exists() or wrong.exists(), limit)
                    if wrong.exists():
                        raise AssertionError(wrong.read_text())
                    case, limit = waiting.pop(0), args.limit
                    self.read[case.name] = self.pool.submit(self._read, case)
                ranks.results(60)
        except AssertionError as error:
            if waiting:
                self.failed[waiting.pop(0).name] = str(error)
            print(error, file=sys.stderr, flush=True)

    def _read(self, case: Case) -> tuple[dict[str, Any], tuple[Interval, list[list[Span]]]]:
        ranks = json.loads((self.folder / f"{case.file}.json").read_text())
        files = [self.folder / f"{case.file}.{rank}.trace.json.gz" for rank in range(case.gpus)]
        read = [traces.read_trace(file) for file in files]
        spans = split_waits([trace.spans for trace in read])
        accounts = [account(part, t.begin, t.end) for part, t in zip(spans, read, strict=True)]
        found = result(case, run_of(case, self.folder, self.args), ranks, read, accounts, self.args.updates)
        line = f"{case.name}: {found['ms']:.1f} ms, {found['tokens_per_second_per_gpu']:,.0f} tokens/s per GPU"
        print(line, file=sys.stderr, flush=True)
        with open(self.args.out / MEASURED, "a") as stream:  # what is left if this process is ended
            stream.write(json.dumps({case.name: found}) + "\n")
        return found, ((min(t.begin for t in read), max(t.end for t in read)), spans)

    def finish(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Results by name, and the profiled steps."""
        both = {}
        for name, future in self.read.items():
            try:
                both[name] = future.result()
            except Exception as error:  # what was measured elsewhere is worth keeping
                self.failed[name] = f"its profile could not be read: {error!r}"
        self.pool.shutdown()
        results = {name: found for name, (found, _) in both.items()}
        for case in self.cases:
            if case.name in results and case.base in results:
                speeds = [results[name]["tokens_per_second_per_gpu"] for name in (case.name, case.base)]
                results[case.name] |= {"base": case.base, "efficiency": speeds[0] / speeds[1]}
        return results, {name: step for name, (_, step) in both.items()}


def ranks_per_gpu(ranks: int, device: str) -> int:
    """The most ranks that compute on one GPU of this machine."""
    return -(-ranks // torch.cuda.device_count()) if device == "cuda" else 1


def result(
    case: Case, run: Run, ranks: list[dict[str, Any]], read: list[traces.Trace], accounts: list[Account], updates: bool
) -> dict[str, Any]:
    """What is written about a case. Milliseconds, bytes; a step takes as long as its slowest rank."""
    slowest = [max(times) * 1e3 for times in zip(*(rank["seconds"] for rank in ranks), strict=True)]
    ms = statistics.median(slowest)
    memory = planned_memory(case, run, updates)
    wire = planned_traffic(case, run)
    stages = [rank["stage"] for rank in ranks]
    return {
        "gpus": case.gpus,
        "changes": [*case.changes],
        "tokens_per_gpu": case.tokens_per_gpu,
        "ms": ms,
        "ms_least": min(slowest),
        "ms_largest": max(slowest),
        "tokens_per_second_per_gpu": case.tokens_per_gpu / ms * 1e3,
        "loss": next((rank["losses"][-1] for rank in ranks[::-1] if rank["losses"]), None),
        "memory": [
            {"rank": number, "measured": rank["peak"], "planned": memory[rank["stage"]]}
            for number, rank in enumerate(ranks)
        ],
        "traffic": {
            axis: {
                "measured": sum(trace.sent.get(kind, 0.0) for trace in read for kind in kinds),
                "planned": sum(wire[stage][axis] for stage in stages),
            }
            for axis, kinds in AXES.items()
            if all(axis in sent for sent in wire)
        },
        "engram": ranks[0]["engram"],
        "profile": [
            {**dataclasses.asdict(account), "sent": trace.sent} for account, trace in zip(accounts, read, strict=True)
        ],
    }


def planned_run(case: Case, run: Run) -> dict[str, Any]:
    """What `dsv41 plan` says, but for Megatron's own settings, whose check takes as long as a layout."""
    return plan_report(dataclasses.replace(run, megatron={}), case.gpus, with_schedule=False)


def planned_memory(case: Case, run: Run, updates: bool) -> list[float]:
    """Bytes of a rank of every pipeline stage, as `dsv41 plan` says; without optimizer state where nothing updates."""
    planned = planned_run(case, run)

    def without_updates(stage: dict[str, Any]) -> float:
        state = stage["engram"]["state"] if not stage["engram"]["in_host"] else 0.0
        return stage["total"] - stage["optimizer"] - state

    return [stage["total"] if updates else without_updates(stage) for stage in planned["memory"]["stages"]]


def planned_traffic(case: Case, run: Run) -> list[dict[str, float]]:
    """Bytes that a rank of every stage sends in a step, by axis; without those that the plan cannot know."""
    planned = planned_run(case, run)
    passes = planned["memory"]["layout"]["num_micro_batches"]
    return [
        {axis: passes * sum(sent.values()) for axis in AXES if (sent := stage[axis]) is not None}
        for stage in planned["traffic"]
    ]


def random_corpus(prefix: Path, config: DSV41Config, tokens: int) -> None:
    """One prepared document of random ids. Every id is its own class of the Engram token map, as far as there are."""
    from megatron_dsv41.testing.tiny_run import write_documents

    classes = np.arange(config.vocab_size) % config.engram_compressed_vocab_size
    ids = np.random.default_rng(0).integers(4, config.vocab_size, tokens)
    write_documents(prefix, [ids], classes, config.engram_compressed_vocab_size, seed=0)


def _device(args: argparse.Namespace) -> str:
    if args.device == "cpu":
        return "cpu"
    sharers = ranks_per_gpu(args.gpus, args.device)
    return torch.cuda.get_device_name() + (f" (shared by {sharers} ranks: no timing)" if sharers > 1 else "")


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "4" if torch.cuda.is_available() else "1")
    raise SystemExit(main())
