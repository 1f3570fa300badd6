"""Does the indexers' objective teach them? Trains one small model with it and with a frozen random indexer, and plots.

    dsv41 prep --input python-stdlib --train-tokenizer 2048 --tokenizer tok --output data/stdlib \\
        --validation-documents 40
    python tools/study_indexer.py data/stdlib --output study
    python tools/study_indexer.py --plot study docs/indexer.png

Runs go through seed by seed and append to OUTPUT/<variant>-<seed>.jsonl; a finished run is skipped, so the command may
be repeated. One process, one thread.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_dsv41 import presets
from megatron_dsv41.data.files import write_whole
from megatron_dsv41.data.packing import Packed, pack
from megatron_dsv41.data.prepared import prepared_paths, read_sidecar
from megatron_dsv41.data.token_map import load_token_map
from megatron_dsv41.layer_plan import plan_layers
from megatron_dsv41.modules.transformer import Transformer, next_token_loss
from megatron_dsv41.optim.groups import decays
from megatron_dsv41.phase import Phase

VARIANTS = {"trained": "sparse", "frozen": "off", "dense": "dense"}  # index_loss
ROWS, SEQ, TOPK = 2, 256, 8
WARMUP, PEAK = 30, 3e-3
PROBES = 128
VALID_BATCHES = 4


class Text:
    """The tokens of prepared files, cut into samples of SEQ + 1 at places drawn from a generator."""

    def __init__(self, prefix: str, image_token_id: int):
        self.tokens = np.memmap(prepared_paths(prefix).bin, dtype=read_sidecar(prefix).dtype, mode="r")
        self.eod, self.image = read_sidecar(prefix).eod_id, image_token_id

    def batch(self, generator: np.random.Generator) -> tuple[Tensor, Packed]:
        """(input ids [ROWS, SEQ], layout, labels and weights)."""
        starts = generator.integers(0, len(self.tokens) - SEQ - 1, ROWS)
        rows = torch.from_numpy(np.stack([self.tokens[s : s + SEQ + 1] for s in starts]).astype(np.int64))
        return rows[:, :-1], pack(rows[:, :-1], rows[:, 1:], eod_id=self.eod, image_token_id=self.image)


def train(prefix: str, variant: str, seed: int, steps: int, interval: int) -> list[dict[str, Any]]:
    """One run; a row per evaluation."""
    classes = read_sidecar(prefix).num_classes
    config = presets.tiny().with_overrides({"engram_compressed_vocab_size": classes, "index_topk": TOPK})
    text, held_out = (Text(name, config.image_token_id) for name in (prefix, f"{prefix}-valid"))
    token_map = load_token_map(prepared_paths(prefix).token_map, config).ids
    torch.manual_seed(seed)
    phase = Phase(hsi=False, main_kv_fp4=False, index_loss=VARIANTS[variant])  # type: ignore[arg-type]
    model = Transformer(config, token_map, phase=phase)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    kinds = [[p for name, p in parameters.items() if decays(name) is decayed] for decayed in (True, False)]
    groups: list[dict[str, Any]] = [
        {"params": kind, "weight_decay": decay} for kind, decay in zip(kinds, (0.1, 0.0), strict=True)
    ]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95), eps=1e-20)
    draw = np.random.default_rng(seed)
    rows = [evaluate(model, held_out, 0)]
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = PEAK * min(step / WARMUP, 0.55 + 0.45 * math.cos(math.pi * step / steps))
        ids, packed = text.batch(draw)
        output = model(ids, packed.documents)
        loss = next_token_loss(output.logits, packed.labels_BS, packed.weight_BS)
        optimizer.zero_grad()
        (loss + output.aux.loss.sum()).backward()
        torch.nn.utils.clip_grad_norm_(list(parameters.values()), 1.0)
        optimizer.step()
        if step % interval == 0 or step == steps:
            rows.append(evaluate(model, held_out, step) | {"loss": float(loss.detach())})
            print(variant, seed, rows[-1], flush=True)
    return rows


@torch.no_grad()
def evaluate(model: Transformer, held_out: Text, step: int) -> dict[str, Any]:
    """Validation loss, and per selecting layer recall, mass and overlap of its selections."""
    draw = np.random.default_rng(12345)
    losses, quality_L5 = [], torch.zeros(model.config.num_hidden_layers, 5)
    for _ in range(VALID_BATCHES):
        ids, packed = held_out.batch(draw)
        output = model(ids, packed.documents, probes=PROBES)
        losses.append(float(next_token_loss(output.logits, packed.labels_BS, packed.weight_BS)))
        quality_L5 += output.aux.index_quality
    row: dict[str, Any] = {"step": step, "valid_loss": sum(losses) / len(losses)}
    for plan in plan_layers(model.config):
        if plan.owns_selection:
            queries, recall, mass, compared, overlap = quality_L5[plan.layer].tolist()
            row |= {f"recall/{plan.layer}": recall / queries, f"mass/{plan.layer}": mass / queries}
            row |= {f"overlap/{plan.layer}": overlap / compared} if compared else {}
    return row


def plot(folder: Path, path: Path) -> None:
    """Mean over seeds with the range of the seeds: attention mass, recall and validation loss over steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from megatron_dsv41.experiments.plots import COLOURS

    figure = Figure(figsize=(12, 4), layout="constrained")
    FigureCanvasAgg(figure)
    panels: Any = figure.subplots(1, 3)
    titles = ("recall of the true Top-k", "attention mass of the selection / of the true Top-k", "validation loss")
    for colour, variant in zip(COLOURS, VARIANTS, strict=False):
        runs = [read(path) for path in sorted(folder.glob(f"{variant}-*.jsonl"))]
        if not runs:
            continue
        steps = [row["step"] for row in runs[0]]
        for panel, kind in zip(panels, ("recall", "mass", "valid_loss"), strict=True):
            values = np.array([[_layer_mean(row, kind) for row in run] for run in runs])
            name = f"{variant}, {len(runs)} seed{'s' if len(runs) > 1 else ''}"
            panel.plot(steps, values.mean(0), color=colour, label=name)
            panel.fill_between(steps, values.min(0), values.max(0), color=colour, alpha=0.2, linewidth=0)
    for panel, title in zip(panels, titles, strict=True):
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("step")
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False)
    figure.savefig(path, dpi=110)


def summary(folder: Path) -> str:
    """The last row of every run, as lines of a Markdown table."""
    lines = []
    for variant in VARIANTS:
        for path in sorted(folder.glob(f"{variant}-*.jsonl")):
            row = read(path)[-1]
            kinds = " | ".join(f"{_layer_mean(row, kind):.3f}" for kind in ("recall", "mass", "overlap"))
            lines.append(f"| {path.stem} | {row['step']} | {row['valid_loss']:.4f} | {kinds} |")
    return "\n".join(lines)


def read(path: Path) -> list[dict[str, Any]]:
    """Rows of one run."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def _layer_mean(row: dict[str, Any], kind: str) -> float:
    values = [value for key, value in row.items() if key == kind or key.startswith(f"{kind}/")]
    return sum(values) / len(values)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prefix", nargs="?", help="prepared files; PREFIX-valid is held out")
    parser.add_argument("--output", type=Path, default=Path("study"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--interval", type=int, default=50)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["trained", "frozen"])
    parser.add_argument("--plot", nargs=2, type=Path, metavar=("FOLDER", "PICTURE"), help="only draw what is there")
    arguments = parser.parse_args()
    if arguments.plot:
        plot(*arguments.plot)
        print(summary(arguments.plot[0]))
        return
    if arguments.prefix is None:
        parser.error("name the prefix of prepared files")
    torch.set_num_threads(1)
    for seed in arguments.seeds:
        for variant in arguments.variants:
            target = arguments.output / f"{variant}-{seed}.jsonl"
            if not target.exists():
                rows = train(arguments.prefix, variant, seed, arguments.steps, arguments.interval)
                target.parent.mkdir(parents=True, exist_ok=True)
                write_whole(target, "".join(json.dumps(row) + "\n" for row in rows).encode())


if __name__ == "__main__":
    main()
