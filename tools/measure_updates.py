"""Print the root mean square of the published optimizer's updates on real gradients, for every logical matrix.

    dsv41 prep --input python-stdlib --train-tokenizer 2048 --tokenizer tok --output data/stdlib
    python tools/measure_updates.py data/stdlib [--steps 20]

Trains the `tiny` preset for some steps in one process and measures the last one. A full-rank matrix moves by 0.18 of
the learning rate; a gradient of lower rank, or rows without gradient, move by less.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from megatron_dsv41 import presets
from megatron_dsv41.data.check import check_prepared, open_tokens
from megatron_dsv41.data.packing import pack
from megatron_dsv41.data.prepared import prepared_paths, read_sidecar
from megatron_dsv41.data.token_map import load_token_map
from megatron_dsv41.modules.transformer import Transformer, next_token_loss
from megatron_dsv41.optim.groups import ParameterGroup, group_parameters
from megatron_dsv41.optim.measure import update_rms
from megatron_dsv41.optim.optimizer import whole_optimizer
from megatron_dsv41.optim.settings import Optimizer
from megatron_dsv41.phase import Phase
from megatron_dsv41.testing.bench import table


def main() -> None:
    """Train, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="prefix that `dsv41 prep` wrote")
    parser.add_argument("--steps", type=int, default=20, help="steps before the measured one (default 20)")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--sequence", type=int, default=256, help="tokens of the one sequence of a step (default 256)")
    args = parser.parse_args()
    groups, moved = train_and_measure(args.data, args.steps, Optimizer(name="published", lr=args.lr), args.sequence)
    rows = [
        (
            name,
            group.algorithm,
            group.matrices,
            *(f"{float(value):.4f}" for value in (rms.min(), rms.median(), rms.max())),
        )
        for group in groups
        for name, rms in ((name, moved[name]) for name in group.shapes if name in moved)
    ]
    print(table(("parameter", "update", "matrices", "least RMS", "median", "largest"), rows))


def train_and_measure(
    prefix: str, steps: int, settings: Optimizer, sequence: int
) -> tuple[tuple[ParameterGroup, ...], dict[str, torch.Tensor]]:
    """The table of groups, and the RMS per logical matrix of the step after `steps` others."""
    sidecar = read_sidecar(prefix)
    config = presets.tiny().with_overrides(
        {"vocab_size": sidecar.vocab_size, "engram_compressed_vocab_size": sidecar.num_classes}
    )
    check_prepared(prefix, config, min_tokens=sequence + 1)
    tokens, phase = open_tokens(prefix).tokens, Phase(index_loss="sparse")
    torch.manual_seed(0)
    model = Transformer(config, load_token_map(prepared_paths(prefix).token_map, config).ids, phase=phase)
    parameters = {name: p.data for name, p in model.named_parameters()}
    groups = group_parameters({name: tuple(p.shape) for name, p in parameters.items()}, config, phase, settings)
    optimizer = whole_optimizer(parameters, groups, settings)
    draw, before = np.random.default_rng(0), dict[str, torch.Tensor]()
    for _ in range(steps + 1):
        start = int(draw.integers(0, len(tokens) - sequence))
        row = torch.from_numpy(np.asarray(tokens[start : start + sequence + 1], dtype=np.int64))[None]
        packed = pack(row[:, :-1], row[:, 1:], eod_id=sidecar.eod_id, image_token_id=config.image_token_id)
        output = model(row[:, :-1], packed.documents)
        model.zero_grad()
        (next_token_loss(output.logits, packed.labels_BS, packed.weight_BS) + output.aux.loss.sum()).backward()
        for name, parameter in model.named_parameters():
            parameters[name].grad = parameter.grad
        before = {name: tensor.clone() for name, tensor in parameters.items()}
        optimizer.step()
    return groups, update_rms(before, parameters, groups, settings.lr)


if __name__ == "__main__":
    main()
