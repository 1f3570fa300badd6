"""The mixed optimizer: whole against plain steps, in parts against whole."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from megatron_dsv41 import presets
from megatron_dsv41.modules.transformer import Transformer
from megatron_dsv41.ops.row_blocks import row_sparse
from megatron_dsv41.optim.groups import Algorithm, group_parameters
from megatron_dsv41.optim.optimizer import MixedOptimizer, Place, optimizer_group, whole_optimizer
from megatron_dsv41.optim.settings import Optimizer
from megatron_dsv41.optim.shards import Shard, matrix_view
from megatron_dsv41.phase import Phase
from megatron_dsv41.testing.distributed import run_ranks

SETTINGS = Optimizer(name="published", lr=0.01)


def parameters():
    torch.manual_seed(0)
    config = presets.tiny()
    return dict(Transformer(config, torch.zeros(config.vocab_size, dtype=torch.int64)).named_parameters())


def stepped(steps=2, phase=None, settings=SETTINGS):
    """Parameters before and after some steps on random gradients; the optimizer."""
    found = {name: p.detach().float().clone() for name, p in parameters().items()}
    before = {name: p.clone() for name, p in found.items()}
    groups = group_parameters({n: tuple(p.shape) for n, p in found.items()}, presets.tiny(), phase or Phase(), settings)
    optimizer = whole_optimizer(found, groups, settings)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for tensor in found.values():
            tensor.grad = torch.randn(tensor.shape, generator=generator)
        optimizer.step()
    return before, found, optimizer


def test_everything_moves_but_what_is_frozen():
    before, after, _ = stepped()
    still = {name for name in before if torch.equal(before[name], after[name])}
    assert still == {name for name in before if ".indexer." in name}
    before, after, _ = stepped(phase=Phase(index_loss="sparse"))
    assert not any(torch.equal(before[name], after[name]) for name in before)


def test_adamw_is_torch_adamw():
    settings = dataclasses.replace(SETTINGS, name="adamw", eps=1e-8)
    before, after, optimizer = stepped(4, Phase(index_loss="sparse"), settings)
    decayed = {id(t): group["weight_decay"] for group in optimizer.param_groups for t in group["params"]}
    plain = {name: tensor.clone() for name, tensor in before.items()}
    torch_optimizer = torch.optim.AdamW(
        [{"params": [plain[name]], "weight_decay": decayed[id(after[name])]} for name in plain],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        for tensor in plain.values():
            tensor.grad = torch.randn(tensor.shape, generator=generator)
        torch_optimizer.step()
    for name in plain:
        torch.testing.assert_close(after[name], plain[name], rtol=1e-6, atol=1e-7)


def test_update_rms_of_matrices():
    settings = dataclasses.replace(SETTINGS, weight_decay=0.0)
    before, after, optimizer = stepped(1, settings=settings)
    for group in optimizer.param_groups:
        if group["algorithm"] is Algorithm.MUON and not group["frozen"]:
            name = next(n for n in after if after[n] is group["params"][0])
            rms = float((after[name] - before[name]).square().mean().sqrt()) / settings.lr
            assert rms == pytest.approx(0.18, rel=0.05), group["role"]


def test_a_gradient_that_is_zero_moves_no_table():
    table = torch.randn(12, 4)
    before = table.clone()
    optimizer = MixedOptimizer(
        [{"params": [table], "places": [Place()], "algorithm": Algorithm.SINKHORN, "frozen": False}], SETTINGS
    )
    table.grad = torch.zeros_like(table)
    optimizer.step()
    assert torch.equal(table, before)


def check_parts():
    """On a rank: matrices cut over rows or columns and tables over rows, three steps, against whole tensors."""
    world, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    generator = torch.Generator().manual_seed(3)
    shapes = {"rows": (8, 6), "cols": (6, 8), "heads": (16, 6), "experts": (4, 2, 6, 5), "table": (16, 4)}
    matrices = {"rows": 1, "cols": 1, "heads": 4, "experts": 8}
    dims = {"cols": 1}
    whole = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    cut = {name: t.chunk(world, dims.get(name, 0))[rank].clone() for name, t in whole.items()}

    def optimizer(tensors, sharded):
        groups = []
        for name, tensor in tensors.items():
            shards = [Shard(dims.get(name, 0), group)] if sharded else []
            muon = name in matrices
            view = matrix_view(tuple(tensor.shape), matrices[name], shards) if muon else None
            place = Place(view, total_rows=16, row_groups=(group,) if sharded else ())
            algorithm = Algorithm.MUON if muon else Algorithm.SINKHORN
            groups.append({"params": [tensor], "places": [place], "algorithm": algorithm, "weight_decay": 0.1})
        return MixedOptimizer(groups, SETTINGS)

    one, many = optimizer(whole, False), optimizer(cut, True)
    for _ in range(3):
        for name, tensor in whole.items():
            tensor.grad = torch.randn(tensor.shape, generator=generator)
            cut[name].grad = tensor.grad.chunk(world, dims.get(name, 0))[rank].contiguous()
        one.step()
        many.step()
    for name, tensor in whole.items():
        torch.testing.assert_close(cut[name], tensor.chunk(world, dims.get(name, 0))[rank], rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("world", [2, 4])
def test_parts_move_as_the_whole(world):
    run_ranks(check_parts, world)


@pytest.mark.parametrize("name", ["published", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_sparse_gradient_of_a_table(name, dtype, monkeypatch):
    """A table in blocks, from the rows that have a gradient, moves as the whole table from the whole gradient."""
    monkeypatch.setattr("megatron_dsv41.ops.row_blocks.BLOCK_ELEMENTS", 64)
    settings = dataclasses.replace(SETTINGS, name=name)
    (group,) = group_parameters({"layers.1.engram.embed.weight": (50, 8)}, presets.tiny(), Phase(), settings)
    start = torch.randn(50, 8).to(dtype)
    dense, sparse = start.float().clone(), start.clone()
    sparse.grad_dtype = None  # fp32 gradients of a table whose master is bf16
    optimizers = [
        MixedOptimizer([optimizer_group(group, [tensor], [Place()]) | {"lr": 0.01}], settings)
        for tensor in (dense, sparse)
    ]
    for step in range(2):
        ids = torch.arange(step, 50, 7)
        values = torch.randn(len(ids), 8)
        dense.grad = torch.zeros(50, 8).index_copy(0, ids, values)
        sparse.grad = row_sparse(ids, values, 50)
        for optimizer in optimizers:
            optimizer.step()
        if dtype is torch.bfloat16:  # one rounding per step is all that differs
            assert torch.equal(sparse, dense.bfloat16())
            dense.copy_(sparse)
    assert torch.equal(sparse.float(), dense) and not torch.equal(sparse, start)
    states = [optimizer.state[tensor] for optimizer, tensor in zip(optimizers, (dense, sparse), strict=True)]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
