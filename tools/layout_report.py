"""The tables that `tools/bench_layouts.py` writes."""

from __future__ import annotations

from typing import Any

from megatron_dsv41.testing.bench import table

# What scaling the proxy model shall reach, by axis (the first of a layout's name).
WANTED = {"dp": 0.95, "ep": 0.90, "pp": 0.80, "cp": 0.85, "tp": 0.70}


def wanted_share(name: str) -> float | None:
    """The efficiency that a layout shall reach."""
    return WANTED.get(name.split("=")[0])


def report(results: dict[str, Any], failed: dict[str, str], head: dict[str, str]) -> str:
    """Tables for docs/benchmarks.md."""
    speed, kinds, wire = [], [], []
    for name, found in results.items():
        wanted, share = wanted_share(name), found.get("efficiency")
        worst = max(found["memory"], key=lambda rank: abs(apart(rank)))
        speed.append(
            (
                name,
                f"{found['tokens_per_gpu']:,.0f}",
                f"{found['ms']:.1f} ({found['ms_least']:.1f}-{found['ms_largest']:.1f})",
                f"{found['tokens_per_second_per_gpu']:,.0f}",
                "" if share is None else f"{share:.3f}",
                "" if wanted is None or share is None else f"{wanted:.2f} {'ok' if share >= wanted else 'missed'}",
                f"{max(a['exposed'] for a in found['profile']):.2f}",
                f"{worst['measured'] / 2**30:.2f}" if worst["measured"] else "",  # processors are not measured
                f"{worst['planned'] / 2**30:.2f}",
                f"{apart(worst):+.1%}" if worst["measured"] else "",
            )
        )
        for kind in sorted({kind for step in found["profile"] for kind in (*step["kinds"], *step["sent"])}):
            kinds.append((name, kind, *_largest(found["profile"], kind)))
        for axis, sent in found["traffic"].items():
            if sent["measured"] or sent["planned"]:
                equal = "equal" if abs(sent["measured"] - sent["planned"]) <= 1e-9 * sent["planned"] else "differ"
                wire.append((name, axis, f"{sent['measured']:,.0f}", f"{sent['planned']:,.0f}", equal))
    columns = ("layout", "tokens/GPU", "ms (range)", "tokens/s/GPU", "efficiency", "wanted", "exposed ms")
    parts = [
        f"{head['device']}, torch {head['torch']}, {head['date']}, commit {head['commit']}: `{head['command']}`",
        table((*columns, "peak GiB", "planned", "apart"), speed),
        "Communication of one profiled step, the largest of the ranks (waiting: another rank had not come yet):",
        table(("layout", "kind", "ms", "exposed ms", "of it waiting", "share of step", "MB sent"), kinds),
        "Bytes of all ranks per step:",
        table(("layout", "groups", "sent", "planned", ""), wire),
    ]
    for name, found in results.items():
        if found["engram"]:
            parts.append(f"{name}: " + ", ".join(f"{key} {value:.3f}" for key, value in found["engram"].items()))
    return "\n\n".join([*parts, *(f"FAILED {name}: {why.strip()}" for name, why in failed.items())]) + "\n"


def apart(rank: dict[str, float]) -> float:
    """Measured memory beside planned."""
    return rank["measured"] / rank["planned"] - 1


def _largest(steps: list[dict[str, Any]], kind: str) -> tuple[str, ...]:
    costs = [step["kinds"].get(kind, {"total": 0.0, "exposed": 0.0, "waiting": 0.0}) for step in steps]
    total, exposed, waiting = (max(cost[part] for cost in costs) for part in ("total", "exposed", "waiting"))
    share = max(cost["exposed"] / step["length"] for cost, step in zip(costs, steps, strict=True))
    sent = max(step["sent"].get(kind, 0.0) for step in steps)
    return f"{total:.2f}", f"{exposed:.2f}", f"{waiting:.2f}", f"{share:.2%}", f"{sent / 1e6:,.3f}"
