"""The balanced update in Triton against the definition in fp64. On CUDA, or with TRITON_INTERPRET=1 on the CPU."""

import pytest
import torch

from megatron_dsv41.ops.row_blocks import row_sparse
from megatron_dsv41.ops.sinkhorn import ref
from megatron_dsv41.ops.sinkhorn.triton_update import sinkhorn_update
from megatron_dsv41.testing.interpreter import DEVICE, INTERPRETED

pytestmark = pytest.mark.triton


def table(rows, cols, seed=0):
    """Rows of very different size, some empty, some below the threshold."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, cols, generator=generator) * torch.rand(rows, 1, generator=generator) ** 3
    values[::5] = 0
    values[1::7] *= 1e-6
    return values.to(DEVICE)


def gradient(kind, rows, cols):
    grad = table(rows, cols, 1)
    if kind == "dense":
        return grad
    ids = torch.arange(2, rows, 3, device=DEVICE)[: None if kind == "sparse" else 0]
    return row_sparse(ids, grad[ids], rows)


def exact(weight, grad, momentum, **settings):
    """(weight, momentum) after one step in fp64."""
    wide, moved = weight.double(), momentum.double()
    ref.sinkhorn_update(wide, grad.to_dense().double() if grad.is_sparse else grad.double(), moved, **settings)
    return wide, moved


@pytest.mark.parametrize(("rows", "cols"), [(301, 256), (40, 8), (7, 5), (33, 1), (3, 5120)])
@pytest.mark.parametrize("kind", ["dense", "sparse", "none"])
@pytest.mark.parametrize("steps", [11, 0, 1, 2, 10])
def test_is_the_fp64_update(rows, cols, kind, steps):
    if steps != 11 and (rows, cols) != (40, 8):
        pytest.skip("step counts are tested at one shape")
    weight, momentum, grad = table(rows, cols, 2), table(rows, cols, 3), gradient(kind, rows, cols)
    if cols > 4:
        momentum[:, 3], grad = 0, (grad if grad.is_sparse else grad.index_fill(1, torch.tensor(3, device=DEVICE), 0))
    want, moved = exact(weight, grad, momentum, lr=0.5, steps=steps)
    sinkhorn_update(weight, grad, momentum, lr=0.5, steps=steps)
    torch.testing.assert_close(momentum.double(), moved, rtol=1e-6, atol=1e-7)
    scale = (want - table(rows, cols, 2)).abs().max().clamp_min(1e-30)
    # fp32 weights hold the step to a rounding of theirs.
    rounding = table(rows, cols, 2).abs().max() * 2.0**-24
    assert (weight.double() - want).abs().max() <= 1e-6 * scale + rounding


@pytest.mark.parametrize("rows", [1003] if INTERPRETED else [1003, 300_007])
def test_the_step_itself_to_1e_6(rows):
    """From zero weights the new weights are the step."""
    momentum, grad = table(rows, 256, 3), gradient("sparse", rows, 256)
    weight = torch.zeros_like(momentum)
    want, _ = exact(weight, grad, momentum, lr=1.0)
    sinkhorn_update(weight, grad, momentum, lr=1.0)
    assert (weight.double() - want).abs().max() <= 1e-6 * want.abs().max()
    assert torch.equal(weight == 0, want == 0)  # rows under the threshold stay untouched


def test_bf16_rounds_only_what_is_kept():
    grad = gradient("sparse", 301, 256)
    weight, momentum = table(301, 256, 2).bfloat16(), table(301, 256, 3).bfloat16()
    want, moved = exact(weight, grad, momentum, lr=0.5)
    sinkhorn_update(weight, grad, momentum, lr=0.5)
    for found, value in ((weight, want), (momentum, moved)):
        ulp = value.abs().clamp_min(1e-30).log2().floor().sub(8).exp2()  # half a step of bfloat16
        assert ((found.double() - value).abs() <= ulp * 1.001 + 5e-7).all()  # and what fp32 leaves of differences


@pytest.mark.parametrize("scale", [1e-25, 1e-12, 1e12])
def test_any_scale(scale):
    found = []
    for factor in (1.0, scale):
        weight, momentum = torch.zeros(40, 8, device=DEVICE), table(40, 8, 3) * factor
        sinkhorn_update(weight, table(40, 8, 1) * factor, momentum, lr=1.0, eps=0.0)
        found.append(weight)
    assert (found[0] - found[1]).abs().max() < 1e-4


def test_empty_tables():
    for rows in (6, 0):
        weight, momentum = torch.ones(rows, 4, device=DEVICE), torch.zeros(rows, 4, device=DEVICE)
        sinkhorn_update(weight, torch.zeros(rows, 4, device=DEVICE), momentum, lr=1.0)
        assert torch.equal(weight, torch.ones_like(weight)) and not momentum.any()


def test_row_shards_equal_the_whole():
    """Shards of unequal size, one of them empty, replay the sums of the whole."""
    grad, weight, momentum, sums = table(41, 8, 1), table(41, 8, 2), table(41, 8, 3), []
    parts = [(weight[a:b].clone(), grad[a:b].clone(), momentum[a:b].clone()) for a, b in ((0, 13), (13, 13), (13, 41))]
    sinkhorn_update(weight, grad, momentum, lr=0.5, reduce=lambda x: (sums.append(x.clone()), x)[1])
    for part in parts:
        replay = iter(sums)
        sinkhorn_update(*part, lr=0.5, total_rows=41, reduce=lambda _, replay=replay: next(replay))
    torch.testing.assert_close(torch.cat([part[0] for part in parts]), weight, rtol=1e-6, atol=1e-7)
    assert torch.equal(torch.cat([part[2] for part in parts]), momentum)


def test_same_bits_every_run():
    found = []
    for _ in range(2):
        weight, momentum = table(301, 256, 2), table(301, 256, 3)
        sinkhorn_update(weight, gradient("sparse", 301, 256), momentum, lr=0.5)
        found.append((weight, momentum))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_too_wide_tables_are_refused():
    wide = torch.zeros(1, 20000, device=DEVICE)
    with pytest.raises(ValueError, match="at most 16384 columns, got \\[1, 20000\\]; choose 'ref'"):
        sinkhorn_update(wide, wide, wide, lr=1.0)
