"""`dsv41 plan`: what a run will be, before anything starts."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_dsv41.backends.megatron.layouts import crossing_planner, stage_layers
from megatron_dsv41.backends.megatron.settings import check_settings
from megatron_dsv41.cli.tables import make_table, open_console
from megatron_dsv41.experiments.communication import Stage
from megatron_dsv41.experiments.memory import Layout
from megatron_dsv41.experiments.planning import (
    describe_cut,
    describe_memory,
    describe_model,
    describe_optimizer,
    describe_precision,
    describe_traffic,
)
from megatron_dsv41.experiments.run_flops import RunFlops, training_flops_per_token
from megatron_dsv41.optim.groups import ENGRAM_TABLE, group_parameters
from megatron_dsv41.presets import PRESETS
from megatron_dsv41.recipes import RECIPES
from megatron_dsv41.run_config import Batch, Leg, Parallel, Run, load_run, run_from_dict

HELP = "show layers, parameters, memory per rank, tokens and learning rate of a run, without starting it"
TAKES_OVERRIDES = True
BARS = "▁▂▃▄▅▆▇█"
SHORT = {"compressed_kv": "kv", "index_keys": "keys", "topk_indices": "top-k", "candidates": "pool"}
SHORT |= {"topk_query": "top-k query", "pool_query": "pool query"}
TRAFFIC = ("tensor", "context", "expert", "pipeline")
CURVE_WIDTH = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `dsv41 plan`."""
    parser.add_argument("run", nargs="?", help="run file (YAML); without it, give --preset or --recipe")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the run file")
    parser.add_argument("--preset", choices=sorted(PRESETS), help="plan this model shape alone")
    parser.add_argument("--recipe", choices=sorted(RECIPES), help="plan this recipe (on the flash shape, or --preset)")
    parser.add_argument("--ranks", type=int, help="number of processes (default: the fewest the layout allows)")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the learning-rate curve")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    """Print the plan; 0."""
    if args.ranks is not None and args.ranks < 1:
        raise ValueError(f"--ranks must be at least 1, got {args.ranks}")
    planned = _planned_run(args)
    report = plan_report(planned, args.ranks, with_schedule=args.preset is None or args.recipe is not None)
    if args.plot:
        from megatron_dsv41.experiments.plots import plot_learning_rate

        plot_learning_rate(planned.learning_rate, planned.steps, Path(args.plot))
    if args.json:
        print(json.dumps(report))
    else:
        _print(report)
    return 0


def plan_report(planned: Run, ranks: int | None, *, with_schedule: bool = True) -> dict[str, Any]:
    """Everything that `dsv41 plan` shows, as plain values. Raises ValueError for a layout that cannot be."""
    config, first = planned.architecture(), planned.legs[0].run
    ranks = ranks or max(_fewest_ranks(leg.run) for leg in planned.legs)
    for leg in planned.legs:
        _check(leg.run, ranks)
    report = describe_model(config, first.phase, first.data.seq_length)
    groups = _describe_updates(planned)
    if groups is not None:
        report["optimizer"] = groups
    report["memory"] = describe_memory(config, _layout(first, ranks, groups))
    if first.precision.name is not None:
        report["precision"] = describe_precision(config, first.precision, first.parallel.tp)
    if planned.phases:
        report["phases"] = [_describe_leg(leg, ranks, groups) for leg in planned.legs]
    report |= _describe_communication(first)
    if with_schedule:
        warmup, stable, cosine = planned.lr_steps
        ends = {end for leg in planned.legs for end in (leg.start, leg.end)}
        corners = sorted({0, 1, warmup, warmup + stable, warmup + stable + cosine, planned.steps} | ends)
        report["schedule"] = {
            "steps": planned.steps,
            "tokens_per_step": planned.tokens_per_step,
            "tokens": planned.steps * planned.tokens_per_step,
            "flops": RunFlops.of(planned).until(planned.steps),
            "learning_rate": [[step, planned.learning_rate(step)] for step in corners if step <= planned.steps],
            "curve": [planned.learning_rate(step) for step in _evenly(planned.steps)],
        }
    return report


def layout_of(run: Run, ranks: int) -> Layout:
    """The layout of a run on so many ranks, with the state that its optimizer keeps per parameter."""
    return _layout(run, ranks, _describe_updates(run))


def _layout(run: Run, ranks: int, groups: list[dict[str, Any]] | None) -> Layout:
    """groups: as `_describe_updates` gives them; None: AdamW's one."""
    layout = Layout.of(run, ranks)
    if groups is None:
        return layout
    return dataclasses.replace(layout, state_bytes=_mean_state(groups, layout.tables is not None))


def _describe_leg(leg: Leg, ranks: int, groups: list[dict[str, Any]] | None) -> dict[str, Any]:
    run = leg.run
    memory = describe_memory(run.architecture(), _layout(run, ranks, groups))
    phase = next(phase for phase in leg.whole.phases if phase.name == leg.name)
    return {
        "name": leg.name,
        "steps": [leg.start + 1, leg.end],
        "tokens": leg.steps * run.tokens_per_step,
        "seq_length": run.data.seq_length,
        "sequences": run.sequences_per_step,
        "learning_rate": [leg.whole.learning_rate(leg.start), leg.whole.learning_rate(leg.end - 1)],
        "layout": memory["layout"],
        "gigabytes": memory["largest"] / 1e9,
        "flops": leg.steps * run.tokens_per_step * training_flops_per_token(run),
        "changes": phase.changes(),
    }


def _describe_communication(planned: Run) -> dict[str, Any]:
    """Cuts of the pipeline, and what a rank of every stage sends per micro-batch."""
    config, phase, parallel = planned.architecture(), planned.phase, planned.parallel
    planner = crossing_planner(config, phase, parallel, planned.batch.micro, planned.data.seq_length)
    stages, plans = stage_layers(config, parallel), planner.plans
    cuts = planner.choose([stage.start for stage in stages[1:]], parallel.shadows)
    rows, known = [], ()
    for stage, cut in zip(stages, cuts, strict=False):
        rows.append(describe_cut(cut, planner.alternatives(cut.boundary, stage.start, known), planner.lengths))
        known = cut.shadows
    hop_bytes = max(cut.forward_bytes for cut in cuts) if parallel.vpp > 1 else None
    described = [
        Stage([plans[layer] for layer in layers], before, after, hop_bytes)
        for layers, before, after in zip(stages, [None, *cuts], [*cuts, None], strict=True)
    ]
    return {"cuts": rows, "traffic": describe_traffic(config, phase, parallel, planner.lengths, described)}


def _mean_state(groups: list[dict[str, Any]], owned: bool) -> float:
    """Bytes of optimizer state per parameter, on average; owned tables are counted on their own."""
    counted = [group for group in groups if not (owned and group["role"] == ENGRAM_TABLE)]
    state = sum(group["state_bytes"] * group["parameters"] for group in counted)
    return state / sum(group["parameters"] for group in counted)


def _describe_updates(planned: Run) -> list[dict[str, Any]] | None:
    """One row per parameter group; None: AdamW's one."""
    if planned.optimizer.name == "adamw":
        return None
    from megatron_dsv41.checkpoint.mapping import parameter_bindings

    config = planned.architecture()
    bindings = parameter_bindings(config)
    groups = group_parameters({b.native: b.shape for b in bindings}, config, planned.phase, planned.optimizer)
    short = config.dtype != "float32"
    return describe_optimizer(groups, planned.optimizer, {b.native for b in bindings if short and not b.is_float32})


def _planned_run(args: argparse.Namespace) -> Run:
    if args.preset is None and args.recipe is None:
        if args.run is None:
            raise ValueError(f"name a run file or give --preset ({', '.join(sorted(PRESETS))}) or --recipe")
        return load_run(args.run, args.overrides)
    # The first positional, if any, is then an override too.
    overrides = ([args.run] if args.run else []) + args.overrides
    if args.recipe is not None:
        shape = {"preset": args.preset or "flash"}
        named = {"recipe": args.recipe, "model": shape, "data": {"train": "none"}, "checkpoint": {"folder": "none"}}
        return run_from_dict(named, overrides)
    bare = {
        "model": {"preset": args.preset},
        "data": {"train": "none", "seq_length": 4096},
        "batch": {"sequences": 1},
        "train": {"steps": 1},
        "checkpoint": {"folder": "none"},
    }
    planned = run_from_dict(bare, overrides)
    if any(override.startswith("batch") for override in overrides):
        return planned
    data = (args.ranks or _fewest_ranks(planned)) // _model_ranks(planned.parallel)
    turns = planned.parallel.pp if planned.parallel.vpp > 1 else 1
    return dataclasses.replace(planned, batch=Batch(sequences=max(1, data) * turns))  # the fewest for each


def _check(run: Run, ranks: int) -> None:
    """ValueError for what the start of a run on so many ranks would refuse, files apart."""
    check_settings(run, ranks)
    if run.megatron:  # the only part that needs Megatron, and with it torch
        from megatron_dsv41.backends.megatron.config import check_megatron_settings

        check_megatron_settings(run)


def _fewest_ranks(planned: Run) -> int:
    parallel = planned.parallel
    return math.lcm(_model_ranks(parallel), parallel.pp * parallel.ep * parallel.expert_tp, parallel.engram or 1)


def _model_ranks(parallel: Parallel) -> int:
    """Ranks that hold one copy of everything but the experts."""
    return parallel.tp * parallel.pp * parallel.cp


def _evenly(steps: int) -> list[int]:
    return sorted({max(1, round(steps * i / (CURVE_WIDTH - 1))) for i in range(CURVE_WIDTH)})


def _print(report: dict[str, Any]) -> None:
    console = open_console()
    for title, rows in (
        ("Layers", _layer_table(report["layers"])),
        ("Parameters", _parameter_table(report)),
        (_memory_title(report["memory"]), _memory_table(report["memory"])),
    ):
        console.print(f"[bold]{title}[/bold]")
        console.print(rows)
        console.print()
    if "precision" in report:
        console.print(f"[bold]Linears in {report['precision']['recipe']}[/bold] ({report['precision']['needs']})")
        console.print(_precision_table(report["precision"]["linears"]))
        console.print()
    if report["cuts"]:
        interleaved = report["memory"]["layout"]["virtual"] > 1
        title = "Pipeline cuts, bytes per token" + (" (every hop is filled up to the longest)" if interleaved else "")
        console.print(f"[bold]{title}[/bold]")
        console.print(_cut_table(report["cuts"], interleaved))
        console.print()
    if any(stage[axis] is None or any(stage[axis].values()) for stage in report["traffic"] for axis in TRAFFIC):
        console.print("[bold]MB that a rank sends per micro-batch, forward / backward, by group[/bold]")
        console.print(_traffic_table(report["traffic"]))
        console.print()
    if report["memory"]["tables"]:
        console.print("[bold]Engram tables: GB on a rank that owns rows and runs the layer (counted above)[/bold]")
        console.print(_owner_table(report["memory"]["tables"]))
        console.print()
    if "optimizer" in report:
        console.print("[bold]Updates[/bold]")
        console.print(_update_table(report["optimizer"]))
        console.print()
    if "phases" in report:
        console.print("[bold]Phases[/bold]")
        console.print(_phase_table(report["phases"]))
        console.print()
    if "schedule" in report:
        _print_schedule(console, report["schedule"])


def _layer_table(layers: list[dict[str, Any]]) -> Any:
    """One row per run of equal layers."""
    rows: list[list[object]] = []
    previous: tuple[object, ...] | None = None
    for layer in layers:
        facts = (
            layer["kind"].upper(),
            layer["ratio"],
            layer["kv_source"],
            layer["topk_source"],
            "yes" if layer["engram"] else "",
            layer["candidates"],
            " ".join(SHORT[field] for field in layer["live"]) or "-",
            f"{layer['boundary_bytes']:,.0f}",
        )
        if facts == previous:
            rows[-1][0] = f"{str(rows[-1][0]).split('-')[0]}-{layer['layer']}"
        else:
            rows.append([layer["layer"], *facts])
        previous = facts
    columns = ("layer", "kind", "ratio", "KV of", "top-k of", "Engram", "pool", "crosses a cut before it", "B/token")
    return make_table(columns, rows, left=(0, 1, 5, 6, 7))


def _precision_table(linears: list[dict[str, Any]]) -> Any:
    rows = [(row["role"], row["multiplies_in"], row["inputs"], row["outputs"], row["reason"]) for row in linears]
    return make_table(("role", "multiplies in", "inputs", "outputs of a rank", "because"), rows, left=(0, 1, 4))


def _cut_table(cuts: list[dict[str, Any]], interleaved: bool) -> Any:
    longest = max(cut["forward"] for cut in cuts)
    rows = []
    for cut in cuts:
        alternative = ""
        if cut["alternative"]:
            alternative = f"{_crossing(cut['alternative'])}: {cut['alternative']['forward']:,.0f}"
        padding = f"{longest - cut['forward']:,.0f}" if interleaved else ""
        numbers = (f"{cut['forward']:,.0f}", f"{cut['backward']:,.0f}", padding)
        rows.append((cut["layer"], _crossing(cut), *numbers, alternative))
    columns = ("before layer", "crosses", "forward", "backward", "padding", "alternative, forward")
    return make_table(columns, rows, left=(0, 1, 5))


def _crossing(cut: dict[str, Any]) -> str:
    names = " ".join(SHORT[field] for field in SHORT if field in cut["fields"]) or "streams alone"
    sources = " and ".join(map(str, cut["shadows"]))
    return f"{names}, shadow of {sources}" if sources else names


def _traffic_table(stages: list[dict[str, Any]]) -> Any:
    rows = [
        (
            number,
            _ranges(stage["layers"]),
            *(_sent(stage[axis]) for axis in TRAFFIC),
        )
        for number, stage in enumerate(stages)
    ]
    return make_table(("stage", "layers", *TRAFFIC), rows, left=(0, 1))


def _sent(traffic: dict[str, float] | None) -> str:
    if traffic is None:
        return "by the routing"
    return f"{traffic['forward'] / 1e6:.4g} / {traffic['backward'] / 1e6:.4g}"


def _parameter_table(report: dict[str, Any]) -> Any:
    parameters = report["parameters"]
    rows = [(kind, f"{number:,}") for kind, number in parameters["by_kind"].items()]
    rows.append(("backbone", f"{parameters['backbone']:,}"))
    rows.append(("total", f"{parameters['total']:,}"))
    rows.append(("active, reading a prompt", f"{parameters['active_prefill']:,}"))
    rows.append(("active, generating", f"{parameters['active_decode']:,}"))
    rows.append(("global KV per token", f"{report['kv_bytes_per_token']:,g} B"))
    flops = report["flops_per_token"]
    forward, training = sum(flops["forward"].values()), sum(flops["training"].values())
    rows.append((f"FLOPs per token at {report['seq_length']}: forward", _short(forward)))
    rows.append(("forward and backward", _short(training)))
    return make_table(("kind", ""), rows)


def _update_table(groups: list[dict[str, Any]]) -> Any:
    rows = [
        (
            group["role"],
            group["update"],
            f"{group['decay']:g}",
            f"{group['lr_multiplier']:g}",
            group["tensors"],
            f"{group['matrices']} x {group['matrix']}" if group["update"] == "muon" else str(group["matrix"]),
            _short(group["parameters"]),
            group["state_bytes"],
        )
        for group in groups
    ]
    columns = ("parameter", "update", "decay", "lr x", "tensors", "of each, matrices", "elements", "state B/element")
    return make_table(columns, rows, left=(0, 1, 5))


def _phase_table(phases: list[dict[str, Any]]) -> Any:
    axes = {"tensor": "tp", "pipeline": "pp", "context": "cp", "expert": "ep"}
    rows = [
        (
            phase["name"],
            "{:,} to {:,}".format(*phase["steps"]),
            _short(phase["tokens"]),
            f"{phase['seq_length']:,} x {phase['sequences']:,}",
            "{:.3g} to {:.3g}".format(*phase["learning_rate"]),
            " ".join(f"{short}{phase['layout'][axis]}" for axis, short in axes.items() if phase["layout"][axis] > 1)
            or "-",
            _gigabytes(phase["gigabytes"] * 1e9),
            " ".join(
                f"{section}.{key}={value}" for section, keys in phase["changes"].items() for key, value in keys.items()
            ),
        )
        for phase in phases
    ]
    columns = ("phase", "steps", "tokens", "sequence x batch", "rate", "layout", "GB/rank", "changes")
    return make_table(columns, rows, left=(0, 1, 7))


def _memory_title(memory: dict[str, Any]) -> str:
    layout, largest = memory["layout"], _gigabytes(memory["largest"])
    axes = {"tensor": "tp", "pipeline": "pp", "virtual": "vpp", "context": "cp", "expert": "ep", "data": "dp"}
    split = " ".join(f"{short}={layout[axis]}" for axis, short in axes.items())
    ranks = "1 rank" if layout["world"] == 1 else f"{layout['world']} ranks"
    return (
        f"Estimated GB per rank on {ranks}: at most {largest}; {split}, micro-batch {layout['micro_batch']} x "
        f"{layout['seq_length']}, recompute {layout['recompute']}"
    )


def _memory_table(memory: dict[str, Any]) -> Any:
    parts = {"weights": "weights", "gradients": "grads", "optimizer": "optimizer", "activations": "activations"}
    if memory["tables"]:
        parts |= {"rows": "Engram rows", "exchange": "exchange"}
    parts["total"] = "total"
    if any(stage["host"] for stage in memory["stages"]):
        parts["host"] = "in host memory"
    rows = []
    for number, stage in enumerate(memory["stages"]):
        found = stage | {part: stage["engram"][part] for part in ("rows", "exchange")}
        numbers = (_gigabytes(found[part]) for part in parts)
        rows.append((number, _ranges(stage["layers"]), _short(stage["parameters"]), *numbers))
    return make_table(("stage", "layers", "parameters", *parts.values()), rows, left=(0, 1))


def _owner_table(tables: list[dict[str, Any]]) -> Any:
    rows = [
        (
            table["layer"],
            table["copies"],
            f"{table['rows']:,}",
            f"{table['updated']:,}",
            *(_gigabytes(table[part]) for part in ("served", "master", "state", "step", "total")),
        )
        for table in tables
    ]
    columns = ("layer", "copies", "rows", "updated", "served", "master", "state", "of a step, at most", "total")
    return make_table(columns, rows)


def _gigabytes(number: float) -> str:
    """Bytes as GB: three digits, and all of them before the point."""
    return f"{number / 1e9:,.0f}" if number >= 1e11 else f"{number / 1e9:.3g}"


def _short(number: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number:g}"


def _ranges(layers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0-2 5"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][1] == layer - 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return " ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


def _print_schedule(console: Any, schedule: dict[str, Any]) -> None:
    rows = [(f"{step:,}", f"{rate:.4g}") for step, rate in schedule["learning_rate"]]
    console.print(
        f"[bold]Run[/bold]: {schedule['steps']:,} steps x {schedule['tokens_per_step']:,} tokens "
        f"= {schedule['tokens']:,} tokens, {schedule['flops']:.3g} FLOPs"
    )
    console.print("\n[bold]Learning rate[/bold]")
    console.print(make_table(("steps done", "next rate"), rows, left=()))
    peak = max(schedule["curve"]) or 1.0
    bars = "".join(BARS[min(int(rate / peak * len(BARS)), len(BARS) - 1)] for rate in schedule["curve"])
    console.print(f"  {bars}")
