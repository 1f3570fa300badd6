"""Sequence shards: halos, gathers, and a whole model on shards against the model on one process."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_dsv41.modules.block import Aux
from megatron_dsv41.modules.hyper_connection import open_streams
from megatron_dsv41.modules.primitives import TorchPrimitives
from megatron_dsv41.modules.shared_state import SharedState
from megatron_dsv41.modules.transformer import SequenceShard, Transformer, make_batch
from megatron_dsv41.ops.documents import documents_from_lengths
from megatron_dsv41.ops.registry import Ops
from megatron_dsv41.parallel.sequence import gather_shards, left_halo, sum_shards
from megatron_dsv41.phase import Phase
from megatron_dsv41.testing.distributed import run_ranks
from megatron_dsv41.testing.tiny import identity_map, tiny_config, tiny_model


def check_halo_and_gather(rows):
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    whole = torch.arange(size * 4 * 3, dtype=torch.float64).view(-1, 3)
    mine = whole[rank * 4 : (rank + 1) * 4].clone().requires_grad_()
    haloed = left_halo(mine, rows, group)
    padded = torch.cat([torch.zeros(rows, 3, dtype=torch.float64), whole])
    assert torch.equal(haloed, padded[rank * 4 : rank * 4 + 4 + rows])
    weight = torch.arange(haloed.numel(), dtype=torch.float64).view_as(haloed) + 100 * rank
    (haloed * weight).sum().backward()
    # A row's gradient is its own shard's weight plus, for the last rows, the right neighbour's halo weight.
    expected = weight[rows:].clone()
    if rank + 1 < size and rows:
        right = torch.arange(haloed.numel(), dtype=torch.float64).view_as(haloed) + 100 * (rank + 1)
        expected[-rows:] += right[:rows]
    assert torch.equal(mine.grad, expected)

    mine.grad = None
    gathered = gather_shards(mine, group)
    assert torch.equal(gathered, whole)
    (gathered * (rank + 1)).sum().backward()
    assert (mine.grad == sum(range(1, size + 1))).all()
    assert sum_shards(torch.tensor([1.0 + rank]), group).item() == sum(range(1, size + 1))


@pytest.mark.parametrize("rows", [0, 1, 4])
def test_halo_and_gather(rows):
    run_ranks(check_halo_and_gather, 3, rows)


def check_short_shard():
    with pytest.raises(ValueError, match="a sequence shard of 2 tokens cannot give a halo of 3"):
        left_halo(torch.zeros(2, 1), 3, dist.group.WORLD)


def test_halo_longer_than_a_shard_is_refused():
    run_ranks(check_short_shard, 2)


class Sharded(TorchPrimitives):
    """Sequence shards over the default group."""

    def left_halo(self, x_TD, rows):
        return left_halo(x_TD, rows, dist.group.WORLD)

    def gather_groups(self, x_CD, groups):
        return gather_shards(x_CD, dist.group.WORLD)[groups.slot_C]

    def sum_sequence(self, x):
        return sum_shards(x, dist.group.WORLD)


PHASE = Phase(index_loss="sparse", balance_loss_weight=0.1)


def forward_shard(model, ids, documents, shard):
    """Logits of this shard's tokens [1, s, V] and the auxiliary losses' share."""
    batch = make_batch(model.config, model.engram_hash, ids, documents, shard=shard)
    size = ids.shape[1] // shard.count
    mine = ids[:, shard.index * size : (shard.index + 1) * size]
    streams, pre_mix = open_streams(model.embed(mine).transpose(0, 1), model.config.hc_mult)
    state, aux = SharedState(), []
    for block in model.layers:
        streams, pre_mix, state, layer_aux = block(streams, pre_mix, state, batch)
        aux.append(layer_aux)
    hidden = model.norm(model.ops["mhc.collapse"](streams, pre_mix))
    return model.head(hidden).transpose(0, 1), Aux.stack(aux)


def inputs(config, lengths):
    total = sum(lengths)
    ids = torch.randint(0, config.vocab_size, (1, total), generator=torch.Generator().manual_seed(1))
    return ids, documents_from_lengths([lengths], total)


def objective(logits, aux, labels):
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss / 48 + aux.balance_loss.sum() + aux.index_loss.sum()


def check_model(lengths):
    rank, size = dist.get_rank(), dist.get_world_size()
    config = tiny_config()
    # In fp64: in fp32 another number of rows can move a value over a boundary of the fake quantization.
    whole = tiny_model(config, phase=PHASE).double()
    ids, documents = inputs(config, lengths)
    output = whole(ids, documents)
    objective(output.logits, output.aux, ids.roll(-1, 1)).backward()

    model = Transformer(config, identity_map(config), phase=PHASE, primitives=Sharded(config, Ops())).double()
    model.load_state_dict(whole.state_dict())
    logits, aux = forward_shard(model, ids, documents, SequenceShard(rank, size))
    mine = slice(rank * ids.shape[1] // size, (rank + 1) * ids.shape[1] // size)
    torch.testing.assert_close(logits, output.logits[:, mine], rtol=0, atol=1e-12)
    objective(logits, aux, ids.roll(-1, 1)[:, mine]).backward()
    for (name, parameter), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in (parameter, expected)]
        dist.all_reduce(grads[0])
        torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("lengths", [[48], [13, 21, 14], [7, 1, 5, 35]])
def test_model_on_shards_equals_the_model(lengths, size):
    run_ranks(check_model, size, lengths)


def test_shards_that_cannot_work_are_refused():
    config = tiny_config()
    model = tiny_model(config)
    ids, documents = inputs(config, [48])
    two_rows = torch.zeros(2, 24, dtype=torch.int64)
    with pytest.raises(ValueError, match="needs micro-batches of one row, got 2"):
        make_batch(config, model.engram_hash, two_rows, documents, shard=SequenceShard(0, 2))
    with pytest.raises(ValueError, match="sequence length 48 must be a multiple of 5 shards"):
        make_batch(config, model.engram_hash, ids, documents, shard=SequenceShard(0, 5))
    wide = dataclasses.replace(config, sliding_window=14)
    with pytest.raises(ValueError, match="4 shards of at least 13 tokens"):
        make_batch(wide, model.engram_hash, ids, documents, shard=SequenceShard(0, 4))
